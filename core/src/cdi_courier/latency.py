"""How long answers take: a histogram with fixed bounds, and quantiles of it.

Every container start of a node waits for the one who adds to it, so adding is a search among a few numbers
and two additions; whatever else is to be known is worked out by whoever asks. It must not know what is
measured.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BOUNDS: Final = (
    50e-6,
    100e-6,
    200e-6,
    300e-6,
    500e-6,
    1e-3,
    2.5e-3,
    5e-3,
    10e-3,
    25e-3,
    50e-3,
    0.1,
    0.25,
    0.5,
    1.0,
    2.0,
)
"""Upper bounds in seconds: closest around what an answer takes (some 100 µs), up to a runtime's 2 s."""

QUANTILES: Final = (0.5, 0.9, 0.99)


class Histogram:
    """Counts of durations between bounds. One thread adds; any may read."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def report(self) -> dict[str, Any]:
        """As JSON: ``bounds`` in seconds, ``counts`` between them and one above the last, ``sum``, quantiles.

        ``p50``, ``p90`` and ``p99`` are seconds, or null as long as nothing was counted.
        """
        counts = list(self.counts)
        return {
            "bounds": list(BOUNDS),
            "counts": counts,
            "sum": self.total,
            **{f"p{round(q * 100)}": quantile(BOUNDS, counts, q) for q in QUANTILES},
        }


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The duration that a share (0 to 1) of all is not above, in between by proportion; None of nothing.

    What lies above the last bound is told as that bound: more is not known of it (as Prometheus does it).
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    below = 0
    for index, bound in enumerate(bounds):
        if counts[index] and below + counts[index] >= wanted:
            low = bounds[index - 1] if index else 0.0
            return low + (bound - low) * (wanted - below) / counts[index]
        below += counts[index]
    return bounds[-1]


def cumulative(report: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Prometheus' buckets of a `Histogram.report`: upper bound as text → how many are not above it."""
    found = []
    below = 0
    for bound, count in zip((*report["bounds"], None), report["counts"], strict=True):
        below += count
        found.append(("+Inf" if bound is None else repr(float(bound)), below))
    return found
