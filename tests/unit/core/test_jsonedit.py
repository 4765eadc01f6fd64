"""Edits of a JSON object: our keys come and go, everything else keeps its meaning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cdi_courier import jsonedit
from cdi_courier.errors import CourierError
from hypothesis import given
from hypothesis import strategies as st

KEYS: tuple[jsonedit.Key, ...] = (("runtimes", "ours"), ("default-runtime",))

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(
    st.sampled_from(["runtimes", "default-runtime"]), st.dictionaries(st.text(), values, max_size=3)
) | st.dictionaries(st.text(), values, max_size=4).filter(
    lambda found: isinstance(found.get("runtimes", {}), dict)
)


@given(objects, values, st.sampled_from([None, "\t", 1, 2, 4]))
def test_what_is_put_in_is_taken_out_again(document: dict[str, Any], value: Any, indent: Any):
    """Afterwards the document means what it meant, however it was written."""
    data = json.dumps(document, indent=indent).encode()
    edited = jsonedit.put(data, {KEYS[0]: value, KEYS[1]: "ours"})

    assert jsonedit.parse(edited)["runtimes"]["ours"] == value
    assert jsonedit.parse(edited)["default-runtime"] == "ours"
    assert jsonedit.parse(jsonedit.remove(edited, KEYS, document)) == document


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param('{\n  "a": 1\n}\n', '{\n  "a": 1,\n  "b": "é"\n}\n', id="two-blanks"),
        pytest.param('{\n\t"a": 1\n}', '{\n\t"a": 1,\n\t"b": "é"\n}\n', id="tabs"),
        pytest.param('{"a": 1}', '{\n    "a": 1,\n    "b": "é"\n}\n', id="one-line"),
    ],
)
def test_the_indentation_is_kept(text: str, expected: str):
    """A file that people read stays as they write it."""
    assert jsonedit.put(text.encode(), {("b",): "é"}).decode() == expected


def test_half_a_surrogate_pair_is_kept():
    """JSON can hold what UTF-8 cannot say."""
    edited = jsonedit.put(b'{"a": "\\ud800"}', {("b",): 1})

    assert jsonedit.parse(edited) == {"a": "\ud800", "b": 1}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"[]", id="a-list"),
        pytest.param(b"{", id="cut-off"),
        pytest.param(b"\xff", id="not-utf-8"),
        pytest.param(b'{"a": 1, "a": 2}', id="twice"),
        pytest.param(b'{"a": NaN}', id="not-a-number"),
        pytest.param(b'{"runtimes": []}', id="in-the-way"),
        pytest.param(b'{"a": ' + b"[" * 100_000, id="too-deep"),
    ],
)
def test_what_cannot_be_edited_is_said(text: bytes):
    """Nothing is written in its place."""
    with pytest.raises(CourierError) as caught:
        jsonedit.put(text, {("runtimes", "ours"): {}})

    assert caught.value.code == "CHG012"
