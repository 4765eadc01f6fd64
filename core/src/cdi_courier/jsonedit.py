"""Small edits of a JSON object in a file that is not ours: its keys are put in and taken out, others stay.

The text is written anew, with the indentation that it has; bytes are kept only by whoever keeps the original
(`changes` does). It must not know whose files these are.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from cdi_courier.errors import CourierError, quoted
from cdi_courier.tomledit import restore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Key = tuple[str, ...]

_USUAL_INDENT = 4  # what Docker's own documentation writes


def parse(data: bytes) -> dict[str, Any]:
    """The object. Raises `CourierError` ``CHG012`` for what is none, or says something twice."""
    try:
        document = json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _impossible(f"it is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise _impossible("it is no JSON object")
    return document


def put(data: bytes, values: Mapping[Key, Any]) -> bytes:
    """The document with each key set; objects on the way to it are made. Raises `CourierError` ``CHG012``."""
    document = parse(data)
    for key, value in values.items():
        table = document
        for part in key[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise _impossible(f"{quoted(part)} is no object")
        table[key[-1]] = value
    return _text(document, data)


def remove(data: bytes, keys: Sequence[Key], original: Mapping[str, Any]) -> bytes:
    """The document with each of `keys` as `original` has it: without it, or with its value of then.

    An object that becomes empty goes too, unless `original` has one there. Raises `CourierError` ``CHG012``.
    """
    document = parse(data)
    for key in keys:
        restore(document, key, original)
    return _text(document, data)


def _text(document: Mapping[str, Any], before: bytes) -> bytes:
    found = re.search(rb"\n([ \t]+)\"", before)
    indent: int | str = found[1].decode() if found else _USUAL_INDENT
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can say
        return json.dumps(document, indent=indent).encode() + b"\n"


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{quoted(key)} is there twice")
        found[key] = value
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _impossible(why: str) -> CourierError:
    return CourierError("CHG012", f"the file cannot be edited: {why}", "correct it, or edit it by hand")
