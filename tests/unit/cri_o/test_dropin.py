"""The text of the drop-in: what is read from it is what was meant."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from cdi_courier.errors import CourierError
from cdi_courier_cri_o import dropin
from hypothesis import given
from hypothesis import strategies as st

TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)
SCALAR = st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), TEXT)
TABLES = st.dictionaries(
    TEXT,
    st.recursive(
        st.one_of(SCALAR, st.lists(SCALAR, max_size=4)),
        lambda inner: st.dictionaries(TEXT, inner, max_size=4),
        max_leaves=8,
    ),
    max_size=6,
)


@given(TEXT, TABLES)
def test_whatever_a_handler_holds_is_written_so_that_it_is_read_again(
    name: str, table: dict[str, Any]
) -> None:
    """Names, strings, arrays and tables within tables survive, whatever characters they have."""
    written = dropin.render({("crio", "runtime", "runtimes", name): table}).decode()

    assert tomllib.loads(written) == {"crio": {"runtime": {"runtimes": {name: table}}}}


@given(TABLES, TEXT)
def test_a_clone_differs_in_its_program_alone(table: dict[str, Any], path: str) -> None:
    """All else is copied, but for what would put the default handler's program in its place."""
    table["inherit_default_runtime"] = True
    clone = dropin.clone(table, path)

    assert clone.pop("runtime_path") == path
    rest = {k: v for k, v in table.items() if k not in ("runtime_path", "inherit_default_runtime")}
    assert clone == rest


@pytest.mark.parametrize(
    ("table", "comment"),
    [
        pytest.param({"x": object()}, "", id="no TOML value"),
        pytest.param({"x": 1}, "a\nb = 1", id="a comment with a line of its own"),
        pytest.param({"x": 1}, "\udcff", id="a comment that is no text"),
    ],
)
def test_what_would_mean_something_else_is_not_written(table: dict[str, Any], comment: str) -> None:
    """It is an error in words instead."""
    with pytest.raises(CourierError) as caught:
        dropin.render({("crio",): table}, [comment])

    assert caught.value.code == "CRI105"
