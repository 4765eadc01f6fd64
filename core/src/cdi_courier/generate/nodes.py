"""Device nodes as a spec describes them, and the groups that a container needs to open them."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final

from cdi_courier.cdi.model import ContainerEdits, DeviceNode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdi_courier.generate.root import Root

_TYPES: Final = {stat.S_IFBLK: "b", stat.S_IFCHR: "c", stat.S_IFIFO: "p"}


def look(root: Root, path: str) -> DeviceNode | None:
    """The device node at `path`, all but the owner filled in; None if it is missing or a link."""
    found = root.stat(path, follow=False)
    kind = _TYPES.get(stat.S_IFMT(found.st_mode)) if found is not None else None
    if found is None or kind is None:
        return None
    return DeviceNode(
        path,
        type=kind,
        major=os.major(found.st_rdev),
        minor=os.minor(found.st_rdev),
        file_mode=stat.S_IMODE(found.st_mode),
        permissions="rwm",
        gid=found.st_gid,
    )


def edits(nodes: Iterable[DeviceNode]) -> ContainerEdits:
    """Edits with the nodes, sorted by path, and the groups without which they could not be opened."""
    every = sorted(nodes, key=lambda node: node.path)
    groups = {node.gid for node in every if node.gid and not (node.file_mode or 0) & stat.S_IWOTH}
    return ContainerEdits(device_nodes=tuple(every), additional_gids=tuple(sorted(groups)))
