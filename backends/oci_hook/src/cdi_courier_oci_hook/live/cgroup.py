"""Lets a container that exists already use devices: its device cgroup, of version 1, 2 or both.

Light module. It must not know what asks for the devices, nor how they come into the container's file system.
Source: docs/facts.md#device-filters, #device-cgroup-scopes.

A process is in one cgroup of each hierarchy, and everything from there up has its say. What belongs to the
container is changed, from the cgroup of its process up to the one that its runtime made for it, its scope;
what is above is shared with others and only asked. Version 1 has lists (`device_list`), version 2 has
programs (`device_programs`). Where systemd manages the scope it is told first (`systemd`).

All that may well fail is done before the first program is replaced, and what was changed is changed back on
failure. Only what systemd was told stays, for it cannot forget one device; it ends with the unit. Where a
refusal is tolerated, that version is left as it was, and the other is changed all the same.
"""

from __future__ import annotations

import os

from cdi_courier.errors import DeliveryError, quoted

from cdi_courier_oci_hook import log

from . import device_filter, device_list, device_programs, mountinfo, systemd
from .refusals import BEST_EFFORT, unreadable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Literal

    from .device_filter import Grant
    from .mountinfo import Mount

    Rule = tuple[str, int, int, str]

ROOT = "/"
"""Where the host's ``proc`` and ``run`` are."""

_MOST_MAJOR, _MOST_MINOR = (1 << 12) - 1, (1 << 20) - 1  # of the kernel's dev_t
# What [oci_hook] device_cgroup = "best-effort" makes a warning: what somebody above has decided, who may have
# allowed the device as well.
_TOLERATED = frozenset({"HOK252", "HOK253", "HOK254", "HOK255", "HOK260", "HOK261", "HOK262"})


def allow(
    pid: int,
    rules: Iterable[Rule],
    *,
    cgroups_path: str,
    mode: Literal["enforce", "best-effort"],
    log_to: str = "journal",
    deadline: float = float("inf"),
) -> None:
    """Let the container whose first process this is use these devices; doing so twice is the same as once.

    pid: as this process sees it. rules: type ``c`` or ``b``, major and minor number, and the access that is
    granted, of the letters ``rwm``. cgroups_path: ``linux.cgroupsPath`` of its OCI config, empty if it has
    none. mode, log_to: ``[oci_hook] device_cgroup`` and ``log``; with best-effort what is not in this
    process's power is logged as a warning. deadline: a `time.monotonic` by which systemd must have answered.

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

    _allow(pid, grants, cgroups_path, tolerate, deadline)


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


def mounts_of(data: bytes) -> dict[int, list[Mount]]:
    """The hierarchies in /proc/PID/mountinfo that can hold device cgroups, by version, the last first."""
    found: dict[int, list[Mount]] = {1: [], 2: []}
    # Of a host's thousands of mounts only these few lines are worth reading.
    lines = b"\n".join(line for line in data.split(b"\n") if b" - cgroup" in line)
    for mount in reversed(mountinfo.parse(lines).values()):
        if mount.type == "cgroup2":
            found[2].append(mount)
        elif mount.type == "cgroup" and "devices" in mount.super_options:
            found[1].append(mount)
    return found


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


class _Place:
    """Where a container is in one hierarchy.

    path: the cgroup of its process. scope: the one that was made for it; None if there is none. folders: the
    directories of the cgroups from the one up to the other; without a scope, that of the process alone.
    """

    __slots__ = ("folders", "path", "scope")

    def __init__(self, path: str, scope: str | None, folders: list[str]) -> None:
        self.path = path
        self.scope = scope
        self.folders = folders


def _places(pid: int, cgroups_path: str) -> dict[int, _Place]:
    """Where a process is, by version. Raises `DeliveryError` ``HOK251``."""
    own = cgroups_of(os.fsdecode(_read("proc/self/cgroup")))
    mounts = mounts_of(_read("proc/self/mountinfo"))
    places = {}
    for version, path in cgroups_of(os.fsdecode(_read(f"proc/{pid}/cgroup"))).items():
        visible = [mount for mount in mounts[version] if _is_visible(mount)]
        if path == own.get(version) and _folder(path, visible) is None:
            continue  # a runtime that does not see the cgroup that both are in has changed nothing there
        scope = scope_of(path, own.get(version, "/"), cgroups_path)
        places[version] = _Place(path, scope, _folders(path, scope, version, visible))
    return places


def _allow(
    pid: int,
    grants: tuple[Grant, ...],
    cgroups_path: str,
    tolerate: Callable[[DeliveryError], None],
    deadline: float,
) -> None:
    places = _places(pid, cgroups_path)
    pins = _declared(places, grants, tolerate, deadline)
    undo: list[Callable[[], None]] = []
    opened: list[int] = []

    def change_lists(place: _Place) -> None:
        _allow_in_lists(place, grants, undo)

    def change_programs(place: _Place) -> None:
        device_programs.allow(
            place.path,
            place.folders,
            grants,
            own=place.scope is not None,
            pins=pins,
            tolerate=tolerate,
            opened=opened,
            undo=undo,
        )

    try:
        for version, change in ((1, change_lists), (2, change_programs)):
            if version in places:
                done = len(undo)
                try:
                    change(places[version])
                except DeliveryError as error:
                    _change_back(undo, done, error)
                    tolerate(error)
    except BaseException as error:
        _change_back(undo, 0, error)
        raise
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _declared(
    places: dict[int, _Place],
    grants: tuple[Grant, ...],
    tolerate: Callable[[DeliveryError], None],
    deadline: float,
) -> tuple[str, ...]:
    """Tell systemd where the scope is one of its; returns what `systemd.declare` does."""
    scope = next((place.scope for place in places.values() if (place.scope or "").endswith(".scope")), None)
    if scope is None:
        return ()
    try:
        return systemd.declare(scope, grants, ROOT, deadline)
    except DeliveryError as error:
        tolerate(error)
        return ()


def _change_back(undo: list[Callable[[], None]], kept: int, error: BaseException) -> None:
    """Undo all but the first `kept` steps, the last first. What fails of that is said in the error."""
    failed = ""
    while len(undo) > kept:
        try:
            undo.pop()()
        except OSError as why:
            failed = why.strerror or str(why)
    if failed and isinstance(error, DeliveryError):
        error.message += f"; and what was changed before could not be changed back: {failed}"


def _allow_in_lists(place: _Place, grants: tuple[Grant, ...], undo: list[Callable[[], None]]) -> None:
    if place.scope is not None:
        # From above: a cgroup can be allowed only what the one above it may.
        for folder in reversed(place.folders):
            device_list.allow(folder, grants, undo)
        return
    for grant in grants:
        if not device_list.allows(place.folders[0], grant):
            raise DeliveryError(
                "HOK252",
                f"cgroup {quoted(place.path)}, which does not allow {device_filter.written(grant)}, is not "
                "the container's alone",
                f"let the runtime make a cgroup for each container, {BEST_EFFORT}",
            )


def _folders(path: str, scope: str | None, version: int, mounts: list[Mount]) -> list[str]:
    """The directories of the cgroups from that of the process up to the scope."""
    levels = [path]
    while scope is not None and levels[-1] != scope:
        levels.append(levels[-1].rpartition("/")[0])
    folders = []
    for level in levels:
        folder = _folder(level, mounts)
        if folder is None:
            raise DeliveryError(
                "HOK251",
                f"no mounted hierarchy of version {version} shows cgroup {quoted(level)}",
                "the container runtime must run where the host's /sys/fs/cgroup is mounted",
            )
        folders.append(folder)
    return folders


def _folder(path: str, mounts: list[Mount]) -> str | None:
    """Where a cgroup's directory is; None where none of the mounts shows it."""
    if "/../" in f"{path}/":
        return None  # beyond the cgroup namespace of this process
    for mount in mounts:
        root = mount.root.rstrip("/")
        if path == root or path.startswith(f"{root}/"):
            return mount.point.rstrip("/") + path[len(root) :]
    return None


def _is_visible(mount: Mount) -> bool:
    """Whether it is what is found at its mount point, where another may have been mounted over it."""
    try:
        device = os.stat(mount.point).st_dev
    except OSError:
        return False
    return mount.device == f"{os.major(device)}:{os.minor(device)}"


def _read(path: str) -> bytes:
    path = os.path.join(ROOT, path)
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise unreadable(path, error) from None
