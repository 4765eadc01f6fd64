"""Lets a container that exists already use devices: its device cgroup, of version 1, 2 or both.

Light module. It must not know what asks for the devices, nor how they come into the container's file system.
Source: docs/facts.md#device-filters, #device-cgroup-scopes.

A process is in one cgroup of each hierarchy, and everything from there up has its say. What belongs to the
container is changed, from the cgroup of its process up to the one that its runtime made for it, its scope;
what is above is shared with others and only asked. Version 1 has lists (`device_list`), version 2 has
programs (`device_programs`). Where systemd manages the scope it is told first (`systemd`).

All that may well fail is done before the first program is replaced, and what was changed is changed back on
failure. Only what systemd was told stays, for it cannot forget one device; it ends with the unit.
"""

from __future__ import annotations

import os

from cdi_courier.errors import DeliveryError, quoted

from cdi_courier_oci_hook import log

from . import device_filter, device_list, device_programs, systemd
from .refusals import BEST_EFFORT, unreadable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Literal

    from .device_filter import Grant

    Rule = tuple[str, int, int, str]

ROOT = "/"
"""Where the host's ``proc`` and ``run`` are."""

_MOST_MAJOR, _MOST_MINOR = (1 << 12) - 1, (1 << 20) - 1  # of the kernel's dev_t
# What [oci_hook] device_cgroup = "best-effort" makes a warning: what somebody above has decided, who may have
# allowed the device as well.
_TOLERATED = frozenset({"HOK252", "HOK253", "HOK254", "HOK255", "HOK260", "HOK261", "HOK262"})


class Mount:
    """A mounted cgroup hierarchy, from mountinfo. version: 1, with the devices controller, or 2.

    root: the cgroup that is seen at `point`. device: as in ``st_dev``.
    """

    __slots__ = ("device", "point", "root", "version")

    def __init__(self, version: int, root: str, point: str, device: int) -> None:
        self.version = version
        self.root = root
        self.point = point
        self.device = device


def allow(
    pid: int,
    rules: Iterable[Rule],
    *,
    cgroups_path: str,
    mode: Literal["enforce", "best-effort"],
    log_to: str = "journal",
) -> None:
    """Let the container whose first process this is use these devices; doing so twice is the same as once.

    pid: as this process sees it. rules: type ``c`` or ``b``, major and minor number, and the access that is
    granted, of the letters ``rwm``. cgroups_path: ``linux.cgroupsPath`` of its OCI config, empty if it has
    none. mode, log_to: ``[oci_hook] device_cgroup`` and ``log``; with best-effort what is not in this
    process's power is logged as a warning.

    Raises `DeliveryError` ``HOK250`` to ``HOK264``. The container's filters then are as they were.
    """
    grants = grants_of(rules)
    if not grants:
        return
    said = set()

    def tolerate(error: DeliveryError) -> None:
        if mode == "enforce" or error.code not in _TOLERATED:
            raise error
        if str(error) not in said:
            said.add(str(error))
            log.write(log_to, str(error), log.WARNING)

    try:
        _allow(pid, grants, cgroups_path, tolerate)
    except DeliveryError as error:
        tolerate(error)


def grants_of(rules: Iterable[Rule]) -> tuple[Grant, ...]:
    """The rules as numbers, one a device. Raises `DeliveryError` ``HOK250``."""
    grants = []
    for kind, major, minor, access in rules:
        if (
            kind not in device_filter.TYPES
            or not 0 <= major <= _MOST_MAJOR
            or not 0 <= minor <= _MOST_MINOR
            or not set(access) <= set(device_filter.ACCESS)
        ):
            text = quoted(f"{kind} {major}:{minor} {access}")
            raise DeliveryError(
                "HOK250",
                f"{text} is no device that a cgroup can allow",
                f"type c or b, major up to {_MOST_MAJOR}, minor up to {_MOST_MINOR}, access of r, w and m: "
                "correct the CDI spec file",
            )
        if access:
            grants.append((device_filter.TYPES[kind], major, minor, device_filter.access(access)))
    return device_filter.merged(grants)


def cgroups_of(text: str) -> dict[int, str]:
    """The cgroups in /proc/PID/cgroup: of version 1's devices controller under 1, of version 2 under 2."""
    found = {}
    for line in text.split("\n"):
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if not separator:
            continue
        if "devices" in controllers.split(","):
            found[1] = path
        elif number == "0" and not controllers:
            found[2] = path
    return found


def mounts_of(text: str) -> list[Mount]:
    """The hierarchies in /proc/PID/mountinfo that can hold device cgroups, the last mounted first."""
    mounts = []
    for line in text.split("\n"):
        mount, separator, file_system = line.partition(" - ")
        fields, more = mount.split(" "), file_system.split(" ")
        if not separator or len(fields) < 6 or len(more) < 3:
            continue
        if more[0] == "cgroup2":
            version = 2
        elif more[0] == "cgroup" and "devices" in more[2].split(","):
            version = 1
        else:
            continue
        major, _, minor = fields[2].partition(":")
        try:
            device = os.makedev(int(major), int(minor))
        except (ValueError, OverflowError):
            continue
        mounts.append(Mount(version, _unescaped(fields[3]), _unescaped(fields[4]), device))
    return mounts[::-1]


def scope_of(path: str, own: str, cgroups_path: str) -> str | None:
    """The cgroup that was made for the container whose process is in `path`; None if there is none.

    own: the cgroup of this process, which is the runtime's. cgroups_path: as in `allow`. What holds the
    runtime, or is a slice, is shared with others and never the container's.
    """
    parts = path.strip("/").split("/")
    end = len(parts)
    for wanted in _scope_names(cgroups_path):
        # The deepest: one that has the name by chance can only be above it.
        fitting = [at for at in range(len(wanted), len(parts) + 1) if parts[at - len(wanted) : at] == wanted]
        if fitting:
            end = fitting[-1]
            break
    else:
        # crun puts the process below the scope, see docs/facts.md#device-cgroup-scopes.
        if parts[-1] == "container" and len(parts) > 1 and parts[-2].endswith(".scope"):
            end -= 1
    scope = "/" + "/".join(parts[:end])
    if not parts[0] or scope.endswith(".slice") or f"{own}/".startswith(f"{scope}/"):
        return None
    return scope


def _scope_names(cgroups_path: str) -> list[list[str]]:
    """What the path of a container's scope ends with, the likeliest first."""
    names = []
    if not cgroups_path.startswith("/") and cgroups_path.count(":") == 2:
        _, prefix, name = cgroups_path.split(":")
        names.append([f"{prefix}-{name}.scope" if prefix else f"{name}.scope"])
    parts = [part for part in cgroups_path.split("/") if part not in ("", ".")]
    if parts and ".." not in parts:
        names.append(parts)
    return names


def _allow(
    pid: int, grants: tuple[Grant, ...], cgroups_path: str, tolerate: Callable[[DeliveryError], None]
) -> None:
    cgroups = cgroups_of(_read(f"proc/{pid}/cgroup"))
    own = cgroups_of(_read("proc/self/cgroup"))
    # Other file systems may have been mounted over some.
    mounts = [mount for mount in mounts_of(_read("proc/self/mountinfo")) if _visible(mount)]
    scopes = {
        version: scope_of(path, own.get(version, "/"), cgroups_path) for version, path in cgroups.items()
    }
    pins: tuple[str, ...] = ()
    for scope in scopes.values():
        if scope is not None and scope.endswith(".scope"):
            try:
                pins = systemd.declare(scope, grants, ROOT)
            except DeliveryError as error:
                tolerate(error)
            break
    folders = {
        version: _folders(path, scopes[version], version, mounts)
        for version, path in cgroups.items()
        # Where the runtime does not see the hierarchy that it is in itself, it has changed nothing there.
        if path != own.get(version) or _folder(path, version, mounts) is not None
    }
    undo: list[Callable[[], None]] = []
    opened: list[int] = []
    try:
        if 1 in folders:
            _allow_in_lists(cgroups[1], folders[1], grants, undo, own=scopes[1] is not None)
        if 2 in folders:
            device_programs.allow(
                cgroups[2],
                folders[2],
                grants,
                own=scopes[2] is not None,
                pins=pins,
                tolerate=tolerate,
                opened=opened,
                undo=undo,
            )
    except BaseException as error:
        failed = _undone(undo)
        if failed and isinstance(error, DeliveryError):
            error.message += f"; and what was changed before could not be changed back: {failed}"
        raise
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _undone(steps: list[Callable[[], None]]) -> str:
    """Undo the steps, the last first, and return why one failed; the others are undone all the same."""
    failed = ""
    for step in reversed(steps):
        try:
            step()
        except OSError as error:
            failed = error.strerror or str(error)
    return failed


def _allow_in_lists(
    path: str, folders: list[str], grants: tuple[Grant, ...], undo: list[Callable[[], None]], *, own: bool
) -> None:
    if own:
        # From above: a cgroup can be allowed only what the one above it may.
        for folder in reversed(folders):
            device_list.allow(folder, grants, undo)
        return
    for grant in grants:
        if not device_list.allows(folders[0], grant):
            raise DeliveryError(
                "HOK252",
                f"cgroup {quoted(path)}, which does not allow {device_filter.written(grant)}, is not the "
                "container's alone",
                f"let the runtime make a cgroup for each container, {BEST_EFFORT}",
            )


def _folders(path: str, scope: str | None, version: int, mounts: list[Mount]) -> list[str]:
    """The directories of the cgroups from that of the process up to the scope."""
    levels = [path]
    while scope is not None and levels[-1] != scope:
        levels.append(levels[-1].rpartition("/")[0])
    folders = []
    for level in levels:
        folder = _folder(level, version, mounts)
        if folder is None:
            raise DeliveryError(
                "HOK251",
                f"no mounted hierarchy of version {version} shows cgroup {quoted(level)}",
                "the container runtime must run where the host's /sys/fs/cgroup is mounted",
            )
        folders.append(folder)
    return folders


def _folder(path: str, version: int, mounts: list[Mount]) -> str | None:
    """Where a cgroup's directory is; None where none of the mounts shows it."""
    if "/../" in f"{path}/":
        return None  # beyond the cgroup namespace of this process
    for mount in mounts:
        root = mount.root.rstrip("/")
        if mount.version == version and (path == root or path.startswith(f"{root}/")):
            return mount.point.rstrip("/") + path[len(root) :]
    return None


def _visible(mount: Mount) -> bool:
    try:
        return os.stat(mount.point).st_dev == mount.device
    except OSError:
        return False


def _read(path: str) -> str:
    path = os.path.join(ROOT, path)
    try:
        with open(path, "rb") as file:
            return os.fsdecode(file.read())
    except OSError as error:
        raise unreadable(path, error) from None


def _unescaped(field: str) -> str:
    r"""A field of mountinfo, in which blanks and backslashes are written as \ooo."""
    first, *rest = field.split("\\")
    pieces = [os.fsencode(first)]
    for piece in rest:
        digits = piece[:3]
        if len(digits) == 3 and all("0" <= digit <= "7" for digit in digits) and digits[0] < "4":
            pieces.append(bytes([int(digits, 8)]) + os.fsencode(piece[3:]))
        else:
            pieces.append(b"\\" + os.fsencode(piece))
    return os.fsdecode(b"".join(pieces))
