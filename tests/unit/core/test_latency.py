"""The histogram of durations: nothing is lost, and quantiles lie where the durations do."""

from __future__ import annotations

import json

import pytest
from cdi_courier.latency import BOUNDS, Histogram, cumulative, quantile
from hypothesis import given
from hypothesis import strategies as st

SECONDS = st.lists(st.floats(0.0, 10.0), min_size=1, max_size=60)


def filled(durations: list[float]) -> Histogram:
    histogram = Histogram()
    for seconds in durations:
        histogram.add(seconds)
    return histogram


@given(SECONDS)
def test_every_duration_is_counted_in_its_bucket(durations: list[float]) -> None:
    """For each bound, what is not above it is what was not above it; the sum is the sum."""
    report = json.loads(json.dumps(filled(durations).report()))

    buckets = cumulative(report)
    assert [count for _, count in buckets] == [
        *(sum(seconds <= bound for seconds in durations) for bound in BOUNDS),
        len(durations),
    ]
    assert buckets[-1][0] == "+Inf"
    assert report["sum"] == pytest.approx(sum(durations))


@given(SECONDS, st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(durations: list[float], share: float) -> None:
    """It is no further off than its bucket is wide; above the last bound it is the last bound."""
    found = quantile(BOUNDS, filled(durations).counts, share)

    ordered = sorted(durations)
    rank = next(n for n in range(1, len(ordered) + 1) if n >= share * len(ordered))
    true = ordered[rank - 1]
    low, high = 0.0, BOUNDS[-1]
    for bound in BOUNDS:
        if true <= bound:
            high = bound
            break
        low = bound
    assert found is not None
    assert low <= found <= high


def test_nothing_has_no_quantiles() -> None:
    """Before the first answer there is nothing to tell, which is not zero."""
    report = Histogram().report()

    assert (report["p50"], report["p90"], report["p99"]) == (None, None, None)
