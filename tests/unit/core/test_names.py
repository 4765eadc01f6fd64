"""Qualified names (docs/facts.md#cdi-names)."""

from __future__ import annotations

import re

import pytest
from cdi_courier.errors import CdiError
from cdi_courier.names import invalid_qualified, parse_qualified, split_device, split_kind
from hypothesis import given, settings
from hypothesis import strategies as st

KIND = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")

GOOD = {
    "a/b=c": ("a", "b", "c"),
    "v.com/cls=0:1": ("v.com", "cls", "0:1"),
    "v..com/cls=a": ("v..com", "cls", "a"),
    "V_x.COM/cls=a": ("V_x.COM", "cls", "a"),
    "v.com/cls=all": ("v.com", "cls", "all"),
    "v" * 300 + "/cls=a": ("v" * 300, "cls", "a"),
}
UNQUALIFIED = [
    "",
    "/cls=a",
    "v.com/=a",
    "v.com/cls=",
    "a=b/c",
    "v.com=x/cls=a",
    "/dev/null",
    "foo",
    "=a",
    "a/b",
]
INVALID = [
    "v.com/cls=a=b",
    "v.com/cls/x=a",
    " v.com/cls=a",
    "v.com/cls=a\n",
    "v.com/cls=a ",
    "v.com /cls=a",
    "v.com/cls=٣",
    "v.com/cls=３",
    "ｖ.com/cls=a",
    "v.com/clsé=a",
    "1v.com/cls=a",
    "v.com/1=a",
    "v.com/cls-=a",
    "v.com./cls=a",
    "v.com/cls=:a",
    "v.com/cls=a:",
    "v.com/cls=*",
    "v.com/cls=a\0",
    "v.com/cls=\ud800",
]


@pytest.mark.parametrize("device", GOOD)
def test_a_good_name_is_taken_apart(device: str) -> None:
    """A qualified name has no length limit and is cut into vendor, class and name."""
    parsed = parse_qualified(device)

    assert parsed == GOOD[device]


@pytest.mark.parametrize("device", UNQUALIFIED)
def test_what_is_not_of_the_form_comes_back_verbatim(device: str) -> None:
    """A string without all three parts is split into two empty parts and itself."""
    parts = split_device(device)

    assert parts == ("", "", device)


@pytest.mark.parametrize("device", UNQUALIFIED + INVALID)
def test_a_wrong_name_is_refused_with_its_code(device: str) -> None:
    """A name that is unqualified or has a wrong character raises CDI001."""
    with pytest.raises(CdiError) as caught:
        parse_qualified(device)

    assert caught.value.code == "CDI001"
    assert caught.value.message.startswith('"')


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("v.com/cls", ("v.com", "cls")),
        ("v.com/a/b", ("v.com", "a/b")),
        ("v.com", ("", "v.com")),
        ("/cls", ("", "/cls")),
        ("v.com/", ("", "v.com/")),
        ("", ("", "")),
    ],
)
def test_a_kind_is_cut_at_the_first_slash(kind: str, parts: tuple[str, str]) -> None:
    """A kind that cannot be cut gives an empty vendor and itself."""
    found = split_kind(kind)

    assert found == parts


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="aZ0_-.:/= \n*é٣", max_size=12))
def test_validity_is_exactly_that_of_the_documented_patterns(device: str) -> None:
    """A name is valid if and only if it matches the three expressions of docs/facts.md#cdi-names."""
    kind, _, name = device.partition("=")
    vendor, _, class_ = kind.partition("/")
    expected = bool(KIND.fullmatch(vendor) and KIND.fullmatch(class_) and NAME.fullmatch(name))

    assert (invalid_qualified(device) is None) == expected


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_splitting_loses_nothing(device: str) -> None:
    """The parts of any string put together again are the string."""
    vendor, class_, name = split_device(device)

    assert device == (f"{vendor}/{class_}={name}" if vendor else name)
