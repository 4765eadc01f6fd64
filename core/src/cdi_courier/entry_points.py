"""Finds the entry points of installed plugins without `importlib.metadata`, where nothing is unusual.

To load that library would be a sixth of the daemon's start, which a node's containers wait for. So the plain
case is read here: folders of metadata, each distribution once. Whatever else there is, the library is asked:
what this finds is what it finds (test_entry_points.py), but a file that it fails at is nobody else's trouble.
It must not know what a plugin is.

Source: "Entry points specification", packaging.python.org.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from functools import reduce
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SUFFIXES: Final = (".dist-info", ".egg-info")
_SEPARATORS: Final = re.compile(r"[-_.]+")
_REFERENCE: Final = re.compile(r"([\w.]+)\s*(?::\s*([\w.]+)\s*)?(?:\[.*\]\s*)?")
# What the library takes for a distribution without entry points.
_ABSENT: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


class EntryPoint(Protocol):
    """An entry point: as much as is needed of `importlib.metadata.EntryPoint`."""

    @property
    def name(self) -> str:
        """What it is called in its group."""

    def load(self) -> Any:
        """Import what it names; raises whatever that raises."""


class Plain(NamedTuple):
    """A line ``name = value``; value: ``module`` or ``module:attribute``, or what stands there instead."""

    name: str
    value: str

    def load(self) -> Any:
        """As `importlib.metadata.EntryPoint.load`; raises ValueError for a value that names nothing."""
        reference = _REFERENCE.fullmatch(self.value)
        if reference is None:
            raise ValueError(f"an entry point is module or module:attribute, not {self.value!r}")
        module = importlib.import_module(reference[1])
        return reduce(getattr, filter(None, (reference[2] or "").split(".")), module)


def installed(group: str) -> Iterable[EntryPoint]:
    """The entry points of a group, of all distributions that are installed."""
    found = plain(group)
    if found is None:
        from importlib import metadata

        return metadata.entry_points(group=group)
    return found


def plain(group: str) -> list[Plain] | None:
    """The same if all is plain; None where only the library knows."""
    if any(hasattr(f, "find_distributions") for f in sys.meta_path if f is not PathFinder):
        return None
    found: list[Plain] = []
    # Normalized name of a distribution → whether it mentions the group.
    seen: dict[str, bool] = {}
    for root in sys.path:
        folders = _folders(root)
        if folders is None:
            return None
        for folder in folders:
            data = _read(os.path.join(root, folder, "entry_points.txt"))
            name, mentions = _normalized(folder), group.encode() in data
            # Which one of two counts, and which one has no name, is for the library to say.
            if (mentions and (name in seen or not name)) or seen.get(name):
                return None
            seen[name] = mentions
            if mentions:
                found += _parse(data, group)
    return found


def _folders(root: str) -> list[str] | None:
    """The folders of metadata in one of the interpreter's folders; None where there may be others."""
    try:
        names = os.listdir(root or ".")
    except FileNotFoundError:
        return []
    except OSError:
        return None
    found = [name for name in names if name.lower().endswith(_SUFFIXES)]
    if root.lower().endswith(".egg") or not all(name.endswith(_SUFFIXES) for name in found):
        return None
    return found


def _normalized(folder: str) -> str:
    """The distribution's name, as far as two names that are written differently are one."""
    return _SEPARATORS.sub("_", folder.rpartition(".")[0].partition("-")[0]).lower()


def _read(path: str) -> bytes:
    with contextlib.suppress(*_ABSENT), open(path, "rb") as file:
        return file.read()
    return b""


def _parse(data: bytes, group: str) -> Iterator[Plain]:
    section = None
    for line in map(str.strip, data.decode(errors="replace").splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line.strip("[]")
        elif section == group and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield Plain(name.strip(), value.strip())
