"""Bind mounts from the host into a container's mount namespace. Light module; it must not know why.

In two halves. `prepare` works in the host's view: it takes a detached copy of what is to be mounted and gives
it its attributes, so that no one ever sees it without them. `attach` works in the container's mount namespace
and puts the copy onto a descriptor; nothing is mounted on the host at any time.
Source: docs/facts.md#live-mounts, #user-namespaces, mount_setattr(2).
"""

from __future__ import annotations

import errno
import os
import stat

from cdi_courier.errors import DeliveryError, quoted

from . import nodes, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .rootfs import Rootfs

    Json = dict[str, Any]
    # Attributes that are changed, and those of them that are set: the others are taken away.
    Change = tuple[int, int]

# The bits of an attribute, its value in them, the option that sets it and the one that takes it away.
_PAIRS = (
    (syscalls.MOUNT_ATTR_RDONLY, syscalls.MOUNT_ATTR_RDONLY, "ro", "rw"),
    (syscalls.MOUNT_ATTR_NOSUID, syscalls.MOUNT_ATTR_NOSUID, "nosuid", "suid"),
    (syscalls.MOUNT_ATTR_NODEV, syscalls.MOUNT_ATTR_NODEV, "nodev", "dev"),
    (syscalls.MOUNT_ATTR_NOEXEC, syscalls.MOUNT_ATTR_NOEXEC, "noexec", "exec"),
    (syscalls.MOUNT_ATTR_NODIRATIME, syscalls.MOUNT_ATTR_NODIRATIME, "nodiratime", "diratime"),
    (syscalls.MOUNT_ATTR_NOSYMFOLLOW, syscalls.MOUNT_ATTR_NOSYMFOLLOW, "nosymfollow", "symfollow"),
    (syscalls.MOUNT_ATTR_ATIME, syscalls.MOUNT_ATTR_NOATIME, "noatime", "atime"),
    (syscalls.MOUNT_ATTR_ATIME, syscalls.MOUNT_ATTR_STRICTATIME, "strictatime", "nostrictatime"),
)
# option → bits, value, whether it sets it, whether for all mounts below as well
_ATTRIBUTES = {
    option: (bits, value, sets, False)
    for bits, value, yes, no in _PAIRS
    for option, sets in ((yes, True), (no, False))
}
# The kernel's default, so there is nothing that would be without it.
_ATTRIBUTES["relatime"] = (syscalls.MOUNT_ATTR_ATIME, syscalls.MOUNT_ATTR_RELATIME, True, False)
_ATTRIBUTES |= {f"r{option}": (*found[:3], True) for option, found in _ATTRIBUTES.items()}
_PROPAGATION = {
    "private": syscalls.MS_PRIVATE,
    "slave": syscalls.MS_SLAVE,
    "shared": syscalls.MS_SHARED,
    "unbindable": syscalls.MS_UNBINDABLE,
}
_PROPAGATION |= {f"r{name}": flag | syscalls.MS_REC for name, flag in _PROPAGATION.items()}
_IGNORED = frozenset(("bind", "rbind", "defaults", "norelatime", "rnorelatime", "idmap", "ridmap"))
_OLD_PROPAGATION = syscalls.MS_PRIVATE | syscalls.MS_REC

# attribute, flag of mount(2), name in mountinfo
_FLAGS = (
    (syscalls.MOUNT_ATTR_RDONLY, syscalls.MS_RDONLY, "ro"),
    (syscalls.MOUNT_ATTR_NOSUID, syscalls.MS_NOSUID, "nosuid"),
    (syscalls.MOUNT_ATTR_NODEV, syscalls.MS_NODEV, "nodev"),
    (syscalls.MOUNT_ATTR_NOEXEC, syscalls.MS_NOEXEC, "noexec"),
    (syscalls.MOUNT_ATTR_NODIRATIME, syscalls.MS_NODIRATIME, "nodiratime"),
    (syscalls.MOUNT_ATTR_NOSYMFOLLOW, syscalls.MS_NOSYMFOLLOW, "nosymfollow"),
)
_ATIME_FLAGS = {
    syscalls.MOUNT_ATTR_RELATIME: syscalls.MS_RELATIME,
    syscalls.MOUNT_ATTR_NOATIME: syscalls.MS_NOATIME,
    syscalls.MOUNT_ATTR_STRICTATIME: syscalls.MS_STRICTATIME,
}
_NOTHING = (0, 0)


class Prepared:
    """A mount on its way.

    tree: descriptor of the detached copy. one, every: what was changed of it, and of all that is mounted
    below it too. late: whether `attach` has to do that.
    """

    __slots__ = ("directory", "every", "identity", "late", "one", "path", "tree")

    def __init__(
        self, path: str, tree: int, found: os.stat_result, one: Change, every: Change, *, late: bool
    ) -> None:
        self.path = path
        self.tree = tree
        self.identity = (found.st_dev, found.st_ino)
        self.directory = stat.S_ISDIR(found.st_mode)
        self.one = one
        self.every = every
        self.late = late


def unsupported(mount: Json, *, user_namespace: bool) -> str:
    """Why a CDI mount cannot be put into a container that exists already; ``""`` if it can."""
    options = mount.get("options") or []
    if mount.get("type") not in (None, "", "bind", "rbind", "none") and not {"bind", "rbind"} & {*options}:
        return f"only bind mounts can be added to a container that exists, not type {quoted(mount['type'])}"
    for option in options:
        if option not in _ATTRIBUTES and option not in _PROPAGATION and option not in _IGNORED:
            return f"option {quoted(option)} cannot be set on a bind mount"
    if not user_namespace and {"idmap", "ridmap"} & {*options}:
        return "without a user namespace there is nothing to map owners by"
    return ""


def prepare(mount: Json, *, owners: int | None = None) -> Prepared:
    """Take a copy of a CDI mount's source, with its options. owners: the user namespace that maps them.

    Raises `DeliveryError`: ``HOK214`` the source cannot be used, ``HOK215`` not with these options.
    """
    source, path = mount["hostPath"], mount["containerPath"]
    options = mount.get("options") or []
    recursive = "rbind" in options or mount.get("type") == "rbind"
    try:
        tree = syscalls.clone_tree(source, recursive=recursive, follow=True)
    except OSError as error:
        raise DeliveryError(
            "HOK214",
            f"{quoted(source)} cannot be mounted into the container: {error.strerror}",
            "is what the CDI spec names still on this host? Make the spec anew",
            host_path=source,
        ) from None
    one, every = _changes(options)
    # Nobody but the container may see what is mounted below it, unless the spec wants that.
    propagation = next((_PROPAGATION[o] for o in reversed(options) if o in _PROPAGATION), 0)
    return _finish(
        tree, source, path, one=one, every=every, propagation=propagation, owners=owners, options=options
    )


def prepare_node(node: Json) -> Prepared:
    """Take a copy of a host's device node, for containers in which none can be made.

    node: as `cdi_courier.oci.complete_node` returns it. Raises `DeliveryError` ``HOK214`` if the host has no
    such node, or another one.
    """
    source, path = node["hostPath"], node["path"]
    try:
        tree = syscalls.clone_tree(source, recursive=False, follow=False)
    except OSError as error:
        raise _no_node(path, source, str(error.strerror)) from None
    try:
        why = "" if nodes.is_it(syscalls.look(tree), node) else "it is another one"
    except OSError as error:
        why = str(error.strerror)
    if why:
        os.close(tree)
        raise _no_node(path, source, why)
    attributes = syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NOEXEC
    return _finish(tree, source, path, one=(attributes, attributes))


def attach(rootfs: Rootfs, mount: Prepared) -> None:
    """Put the copy into its place, which is made if need be. One that is there already is left as it is.

    Raises `DeliveryError`: ``HOK210``, ``HOK211`` as `Rootfs`; ``HOK215`` the kernel refuses, ``HOK216`` it
    would appear outside of the container, ``HOK217`` a file on a directory or the reverse.
    """
    path = mount.path
    target = rootfs.find(path)
    if target is None:
        target = rootfs.make(path, directory=mount.directory)
    try:
        _must_be_fit(rootfs, mount, target)
        if _is_there(rootfs, mount, target):
            return
        syscalls.move_mount(mount.tree, target)
        rootfs.on_failure(lambda: rootfs.at_descriptor(syscalls.detach, mount.tree))
        if mount.late:
            _set_late(rootfs, mount)
    except OSError as error:
        raise _not_mounted(path, str(error.strerror)) from None
    finally:
        os.close(target)


def _finish(
    tree: int,
    source: str,
    path: str,
    *,
    one: Change = _NOTHING,
    every: Change = _NOTHING,
    propagation: int = 0,
    owners: int | None = None,
    options: Sequence[str] = (),
) -> Prepared:
    """Give a detached copy its attributes; before Linux 5.12 that has to wait until it is in its place."""
    late = False
    try:
        found = syscalls.look(tree)
        try:
            _set(tree, one=one, every=every, propagation=propagation)
            if owners is not None:
                syscalls.set_attributes(
                    tree, add=syscalls.MOUNT_ATTR_IDMAP, owners=owners, recursive="ridmap" in options
                )
        except OSError as error:
            new = every[0] or owners is not None or propagation & ~_OLD_PROPAGATION
            if error.errno != errno.ENOSYS or new:
                raise
            late = True
    except OSError as error:
        os.close(tree)
        cause = str(error.strerror)
        if owners is not None and error.errno == errno.EINVAL:
            cause = f"its file system cannot map owners into the container's user namespace ({cause})"
        if error.errno == errno.EPERM and _takes_away(one) | _takes_away(every):
            # As runc from 1.2 on: what a spec asks for by name is not left out in silence.
            cause = f"in a user namespace no option takes away what it has on the host, such as ro ({cause})"
        hint = "correct the options of the CDI spec. See docs/live-injection.md"
        raise _not_mounted(path, f"{quoted(source)}: {cause}", hint) from None
    return Prepared(path, tree, found, one, every, late=late)


def _set(tree: int, *, one: Change, every: Change, propagation: int) -> None:
    # A copy of a shared mount is its peer: what the container mounts on it would be on the host. As in a
    # config, "shared" means shared within the container, and as a slave of the host.
    kind = propagation & ~syscalls.MS_REC
    follows = kind in (syscalls.MS_SLAVE, syscalls.MS_SHARED)
    syscalls.set_attributes(
        tree, propagation=syscalls.MS_SLAVE if follows else syscalls.MS_PRIVATE, recursive=True
    )
    if kind in (syscalls.MS_SHARED, syscalls.MS_UNBINDABLE):
        syscalls.set_attributes(tree, propagation=kind, recursive=bool(propagation & syscalls.MS_REC))
    # In the runtimes' order: of "rw" and "rro" the second holds everywhere.
    for (bits, value), recursive in ((one, False), (every, True)):
        if bits:
            syscalls.set_attributes(tree, add=value, clear=bits, recursive=recursive)


def _changes(options: Sequence[str]) -> tuple[Change, Change]:
    """What options change of the mount alone, and of those below it too; the last of a pair wins.

    A copy has the attributes that its source has on the host, and keeps those that no option is about.
    """
    found = {False: _NOTHING, True: _NOTHING}
    for option in options:
        if option not in _ATTRIBUTES:
            continue
        bits, value, sets, recursive = _ATTRIBUTES[option]
        changed, wanted = found[recursive]
        if sets:
            wanted = wanted & ~bits | value
        elif wanted & bits in (0, value):
            wanted &= ~bits
        else:
            continue  # "atime" says nothing against strictatime
        found[recursive] = changed | bits, wanted
    return found[False], found[True]


def _takes_away(change: Change) -> int:
    return change[0] & ~change[1]


def _attributes_of(options: frozenset[str]) -> int:
    """A mount's attributes, by its options in mountinfo; of a mount with strictatime that says nothing."""
    found = sum(bit for bit, _, name in _FLAGS if name in options)
    if "noatime" in options:
        return found | syscalls.MOUNT_ATTR_NOATIME
    return found | (
        syscalls.MOUNT_ATTR_RELATIME if "relatime" in options else syscalls.MOUNT_ATTR_STRICTATIME
    )


def _must_be_fit(rootfs: Rootfs, mount: Prepared, target: int) -> None:
    found = syscalls.look(target)
    if stat.S_ISDIR(found.st_mode) != mount.directory:
        is_, was = ("a directory", "no directory") if mount.directory else ("no directory", "one")
        raise DeliveryError(
            "HOK217",
            f"{quoted(mount.path)} cannot be mounted: on the host it is {is_}, in the container {was}",
            "remove it from the image, or correct the CDI spec",
        )
    if rootfs.is_root(target):
        raise _not_mounted(mount.path, "it leads to the container's root")
    kernels = rootfs.is_kernels(target)
    if kernels and not (mount.path.startswith("/sys/") and rootfs.mount_of(target).type == "sysfs"):
        # What runtimes do through these files, such as confining the process, must reach the kernel.
        raise _not_mounted(mount.path, f"it leads into the kernel's {rootfs.mount_of(target).type}")
    if rootfs.mount_of(target).shared:
        raise DeliveryError(
            "HOK216",
            f"{quoted(mount.path)} cannot be mounted: it is in a volume whose mounts appear on the host",
            "leave the volume's propagation private, or move the volume",
        )


def _is_there(rootfs: Rootfs, mount: Prepared, target: int) -> bool:
    """Whether the same is mounted there with the wanted attributes. Of what is below it nothing is known."""
    found = syscalls.look(target)
    if (found.st_dev, found.st_ino) != mount.identity or not rootfs.is_mount_point(target):
        return False
    bits, value = mount.one
    return not mount.every[0] and _attributes_of(rootfs.mount_of(target).options) & bits == value


def _set_late(rootfs: Rootfs, mount: Prepared) -> None:
    """What `_set` does, by mount(2): first the container's alone, then the attributes."""
    bits, value = mount.one
    if value & syscalls.MOUNT_ATTR_NOSYMFOLLOW:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    wanted = _attributes_of(rootfs.mount_of(mount.tree).options) & ~bits | value
    flags = _ATIME_FLAGS[wanted & syscalls.MOUNT_ATTR_ATIME]
    flags |= sum(flag for bit, flag, _ in _FLAGS if bit & wanted)

    def change(path: str) -> None:
        syscalls.remount(path, syscalls.MS_PRIVATE | syscalls.MS_REC)
        syscalls.remount(path, syscalls.MS_REMOUNT | syscalls.MS_BIND | flags)

    rootfs.at_descriptor(change, mount.tree)


def _no_node(path: str, source: str, why: str) -> DeliveryError:
    return DeliveryError(
        "HOK214",
        f"device node {quoted(path)} is bind-mounted from the host into a user namespace, "
        f"but {quoted(source)} cannot be used: {why}",
        "is the device plugged in and its driver loaded?",
        host_path=source,
    )


def _not_mounted(
    path: str, why: str, hint: str = "what does the image have there? See docs/live-injection.md"
) -> DeliveryError:
    return DeliveryError("HOK215", f"{quoted(path)} cannot be mounted in the container: {why}", hint)
