"""Device nodes in a container's root file system. Light module; it must not know where they come from.

A node is made, not bind-mounted, wherever that is possible: a bind mount keeps the host's owner and mode.
What the host shares with the container, such as a bind mount of its ``/dev``, is looked at and never changed.
Source: docs/facts.md#live-nodes.
"""

from __future__ import annotations

import os
import stat

from cdi_courier.errors import DeliveryError, quoted

from . import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .rootfs import Rootfs

    Json = dict[str, Any]

_TYPES = {"c": stat.S_IFCHR, "u": stat.S_IFCHR, "b": stat.S_IFBLK, "p": stat.S_IFIFO}
_NODES = frozenset(_TYPES.values())
_NEW_NAME = ".cdi-courier-node"
_DEFAULT_MODE = 0o666  # the runtimes', for a node whose mode nothing tells


def put(rootfs: Rootfs, node: Json) -> None:
    """Have the node in the container, with its numbers, mode and owner; what is so already stays.

    node: as `cdi_courier.oci.complete_node` returns it, with ``uid`` and ``gid``. A node of other numbers is
    replaced, as in a config, where only the container has it. Raises `DeliveryError`: ``HOK210``, ``HOK211``
    as `Rootfs`, ``HOK212`` something else is in its place, ``HOK213`` the kernel refuses.
    """
    path = node["path"]
    folder, name = rootfs.parent(path)
    try:
        _put(rootfs, node, folder, name)
    except OSError as error:
        raise DeliveryError(
            "HOK213",
            f"device node {quoted(path)} cannot be made in the container: {error.strerror}",
            "is what it lies on read-only, or is it in use? See docs/live-injection.md",
        ) from None
    finally:
        os.close(folder)


def is_it(found: os.stat_result, node: Json) -> bool:
    """Whether what was found is a node of the type and the numbers."""
    type_, device = _numbers(node)
    return stat.S_IFMT(found.st_mode) == type_ and (type_ == stat.S_IFIFO or found.st_rdev == device)


def _numbers(node: Json) -> tuple[int, int]:
    """The type, as in ``st_mode``, and the device, as in ``st_rdev``, which is 0 for a FIFO."""
    type_ = _TYPES[node["type"]]
    return type_, 0 if type_ == stat.S_IFIFO else os.makedev(node["major"], node["minor"])


def _put(rootfs: Rootfs, node: Json, folder: int, name: str) -> None:
    path = node["path"]
    try:
        there = syscalls.open_at(folder, name, syscalls.O_PATH | os.O_NOFOLLOW)
    except FileNotFoundError:
        if rootfs.is_shared(folder):
            raise _in_the_way(path, "its folder is shared with the host") from None
        _make(rootfs, node, folder, name)
        return
    try:
        found = syscalls.look(there)
        if stat.S_ISLNK(found.st_mode):
            if not _leads_to(rootfs, node):
                raise _in_the_way(path, "there is a symbolic link to something else")
            return
        if is_it(found, node):
            if not rootfs.is_shared(there):
                _dress(rootfs, there, node)
            return
        if stat.S_IFMT(found.st_mode) not in _NODES:
            raise _in_the_way(path, "there is something that is no device node")
        if any(rootfs.is_shared(where) or rootfs.is_own(where) for where in (there, folder)):
            raise _in_the_way(path, "there is another device's node")
    finally:
        os.close(there)
    # On a file system of the container alone, which ends with it. As a whole: there is never no node.
    _make(rootfs, node, folder, _NEW_NAME)
    syscalls.rename(folder, _NEW_NAME, name)


def _make(rootfs: Rootfs, node: Json, folder: int, name: str) -> None:
    kept = os.dup(folder)
    try:
        # Without a mode until it has its owner.
        syscalls.make_node(folder, name, *_numbers(node))
    except BaseException:
        os.close(kept)
        raise
    rootfs.on_failure(lambda: syscalls.remove(kept, name))
    made = syscalls.open_at(folder, name, syscalls.O_PATH | os.O_NOFOLLOW)
    try:
        if not is_it(syscalls.look(made), node):
            raise _in_the_way(node["path"], "it was exchanged while it was made")
        _dress(rootfs, made, node)
    finally:
        os.close(made)


def _dress(rootfs: Rootfs, descriptor: int, node: Json) -> None:
    """Give a node its owner and mode. It keeps what it had to be given back on failure."""
    found = syscalls.look(descriptor)
    uid, gid = node["uid"], node["gid"]
    mode = node.get("fileMode")
    mode = _DEFAULT_MODE if mode is None else stat.S_IMODE(mode)
    if (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (uid, gid, mode):
        return
    kept = os.dup(descriptor)

    def give_back() -> None:
        syscalls.give(kept, found.st_uid, found.st_gid)
        rootfs.change_mode(kept, stat.S_IMODE(found.st_mode))

    rootfs.on_failure(give_back)
    # In this order: a change of owner takes set-user-ID bits away.
    syscalls.give(descriptor, uid, gid)
    rootfs.change_mode(descriptor, mode)


def _leads_to(rootfs: Rootfs, node: Json) -> bool:
    """Whether the link in the node's place leads to such a node."""
    target = rootfs.find(node["path"])
    if target is None:
        return False
    try:
        return is_it(syscalls.look(target), node)
    finally:
        os.close(target)


def _in_the_way(path: str, what: str) -> DeliveryError:
    return DeliveryError(
        "HOK212",
        f"device node {quoted(path)} cannot be made in the container: {what}, and that is not ours to change",
        "remove it from the image or the volume; a node that the host shares must be made on the host",
    )
