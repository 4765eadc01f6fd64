"""docs/security.md claims nothing that no test shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/security.md").read_text())


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[test for _, test in NAMED])
def test_each_test_that_is_named_exists(file: str, test: str) -> None:
    """A defence whose test was renamed or removed is noticed."""
    assert f"\ndef {test}(" in (ROOT / file).read_text()


def test_every_defence_in_a_table_names_a_test() -> None:
    """Each row says who may try what, what defends, and what shows it."""
    rows = [line for line in (ROOT / "docs/security.md").read_text().splitlines() if line.startswith("| to ")]

    assert len(rows) > 15
    assert [row for row in rows if "::test_" not in row] == []
