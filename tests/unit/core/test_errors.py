"""Messages: hostile text in them is harmless."""

from __future__ import annotations

import tomllib
import unicodedata

import pytest
from cdi_courier import errors
from cdi_courier.errors import CourierError, printable, quoted
from hypothesis import given, settings
from hypothesis import strategies as st

# Every code point, lone surrogates included.
ANYTHING = st.text(alphabet=st.characters(), max_size=40)


def harmful(text: str) -> set[str]:
    return {c for c in text if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"}}


@settings(max_examples=300, deadline=None)
@given(ANYTHING)
def test_printable_text_holds_no_control_character_but_the_line_feed(text: str) -> None:
    """Control, format and surrogate characters are written as escapes; line feeds stay."""
    shown = printable(text)

    assert harmful(shown) <= {"\n"}
    assert shown.encode().decode() == shown
    assert shown.count("\n") == text.count("\n")


@settings(max_examples=300, deadline=None)
@given(ANYTHING)
def test_quoted_text_is_one_harmless_line(text: str) -> None:
    """Quoted text stands in double quotes on one line without control characters."""
    shown = quoted(text)

    assert not harmful(shown)
    assert shown.startswith('"')
    assert shown.endswith('"')


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=40))
def test_quoted_text_is_a_toml_string_of_that_text(text: str) -> None:
    """Whoever pastes quoted text into TOML gets the text back."""
    read = tomllib.loads(f"key = {quoted(text)}")["key"]

    assert read == text


@pytest.mark.parametrize(
    "text", ["\\", '"', "\\n", "\n", "\r\n", "\x1b[2J", "\U000e0001", "\t", "\x7f", "\x85"]
)
def test_awkward_text_survives_quoting(text: str) -> None:
    """Backslashes, quotes and control characters come back out of the TOML string unchanged."""
    read = tomllib.loads(f"key = {quoted(text)}")["key"]

    assert read == text


def test_long_text_is_cut_with_a_mark() -> None:
    """Text longer than the limit ends with an ellipsis outside the quotes."""
    shown = quoted("x" * 300, 10)

    assert shown == '"xxxxxxxxxx"…'


def test_a_lone_surrogate_is_written_as_an_escape() -> None:
    """A lone surrogate cannot break an encoder."""
    shown = quoted("\ud83d")

    assert shown == '"\\ud83d"'


def test_an_error_says_code_message_and_hint_harmlessly() -> None:
    """The text of an error is its code, its message and its hint, escapes written out."""
    error = CourierError("CDI004", "bad \x1b file", "remove \x07 it", file="f")

    assert str(error) == "CDI004: bad \\u001b file (remove \\u0007 it)"
    assert error.fields == {"file": "f"}
    assert str(CourierError("CDI004", "bad")) == "CDI004: bad"


def test_every_error_is_of_the_one_hierarchy() -> None:
    """Whoever catches CourierError catches every expected failure."""
    classes = [value for value in vars(errors).values() if isinstance(value, type)]

    assert all(issubclass(value, CourierError) for value in classes)
    assert len(classes) > 9
