"""Reads the reference's results in data/, for the tests beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

_DATA = Path(__file__).parent / "data"


def cases(name: str, key: str = "id") -> list[Any]:
    """Every line of a file as one pytest parameter, called by its id."""
    lines = (_DATA / f"{name}.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [pytest.param(row, id=row[key].encode("unicode_escape").decode("ascii")) for row in rows]


def without_empty(value: Any) -> Any:
    """A JSON value without empty lists, empty strings, nulls and false: the reference does not write them."""
    if isinstance(value, dict):
        kept = {key: without_empty(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if not _is_empty(item)}
    return [without_empty(item) for item in value] if isinstance(value, list) else value


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [])
