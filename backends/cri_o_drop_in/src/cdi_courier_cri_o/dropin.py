"""The text of the drop-in. Values in, bytes out: it knows no files, no CRI-O and no settings.

CRI-O replaces arrays and the tables of handlers as a whole (docs/facts.md#cri-o-configuration), so a table
is written with everything that it is to hold.
"""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any, Final

from cdi_courier.errors import HostError, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_HEAD: Final = "Made by cdi-courier; `cdi-courier uninstall` removes it."
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
# It would put the default handler's runtime_path in the place of ours (docs/facts.md#cri-o-handlers).
_NOT_COPIED: Final = ("inherit_default_runtime",)


def clone(table: Mapping[str, Any], runtime_path: str) -> dict[str, Any]:
    """A handler's table, the same in everything but the program it runs."""
    kept = {key: value for key, value in table.items() if key not in _NOT_COPIED}
    return {"runtime_path": runtime_path, **{k: v for k, v in kept.items() if k != "runtime_path"}}


def render(
    tables: Mapping[tuple[str, ...], Mapping[str, Any]],
    comments: Sequence[str] = (),
) -> bytes:
    """The file with these tables, each by its path.

    Raises `HostError` ``CRI105`` if the text would not mean that.
    """
    lines = [f"# {line}" for line in (_HEAD, *comments)]
    for path, table in tables.items():
        lines += _table(path, table)
    text = "\n".join(lines) + "\n"
    try:
        right = tomllib.loads(text) == _nested(tables)
    except ValueError:
        right = False
    if not right:
        raise HostError(
            "CRI105",
            "a value of the default handler's table cannot be written into a drop-in: "
            f"{quoted(str(dict(tables)))}",
            'report it, with the answer of CRI-O; until then use [cri_o_drop_in] mode = "nri" or "hook"',
        )
    return text.encode()


def _table(path: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield f"[{'.'.join(map(_key, path))}]"
    inner = {}
    for key, value in table.items():
        if isinstance(value, dict):
            inner[key] = value
        else:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in inner.items():
        yield from _table((*path, key), value)


def _nested(tables: Mapping[tuple[str, ...], Mapping[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for path, table in tables.items():
        target = document
        for part in path:
            target = target.setdefault(part, {})
        target.update(table)
    return document


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return quoted(str(value), None)
