"""The text of the drop-in. Values in, bytes out: it knows no files, no CRI-O and no settings.

CRI-O replaces arrays and the tables of handlers as a whole (docs/facts.md#cri-o-configuration), so a table
is written with everything that it is to hold.
"""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any, Final

import tomlkit
from cdi_courier.errors import HostError, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_HEAD: Final = "Made by cdi-courier; `cdi-courier uninstall` removes it."
# The first would put the default handler's program in the place of ours (docs/facts.md#cri-o-handlers).
_NOT_COPIED: Final = ("inherit_default_runtime", "runtime_path")


def clone(table: Mapping[str, Any], runtime_path: str) -> dict[str, Any]:
    """A handler's table, the same in everything but the program it runs."""
    return {
        "runtime_path": runtime_path,
        **{key: value for key, value in table.items() if key not in _NOT_COPIED},
    }


def render(
    tables: Mapping[tuple[str, ...], Mapping[str, Any]],
    comments: Sequence[str] = (),
) -> bytes:
    """The file with these tables, each by its path.

    Raises `HostError` ``CRI105`` if the text would not mean that.
    """
    meant = _nested(tables)
    head = "".join(f"# {line}\n" for line in (_HEAD, *comments))
    try:
        content = f"{head}\n{tomlkit.dumps(meant)}".encode()
        right = tomllib.loads(content.decode()) == meant
    except (ValueError, TypeError):
        right = False
    if not right:
        raise HostError(
            "CRI105",
            "a value of the default handler's table cannot be written into a drop-in: "
            f"{quoted(str(dict(tables)))}",
            'report it, with the answer of CRI-O; until then use [cri_o_drop_in] mode = "nri" or "hook"',
        )
    return content


def _nested(tables: Mapping[tuple[str, ...], Mapping[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for path, table in tables.items():
        target = document
        for part in path:
            target = target.setdefault(part, {})
        target.update(table)
    return document
