"""Lets a container that exists already use devices: its device cgroup, of version 1, 2 or both.

Light module. It must not know what asks for the devices, nor how they come into the container's file system.
Source: contracts hooks-and-runtimes.md d.4.

A process is in one cgroup of each hierarchy, and everything from there up has its say. What belongs to the
container is changed, from the cgroup of its process up to the one that its runtime made for it, its scope;
what is above is shared with others and only asked. Version 1 has a list of devices a cgroup. Version 2 has
programs (`device_filter`), each of which is replaced by one that says yes to the devices and else what it
said. Where systemd manages the scope it is told first (`systemd`).

All that may well fail is done before the first program is replaced, and what was changed is changed back on
failure. Only what systemd was told stays, for it cannot forget one device; it ends with the unit.
"""

from __future__ import annotations

import errno
import os

from cdi_courier.errors import DeliveryError, quoted

from cdi_courier_oci_hook import log

from . import bpf, device_filter, systemd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Literal

    from .device_filter import Grant

    Rule = tuple[str, int, int, str]
    Undo = list[Callable[[], None]]

ROOT = "/"
"""Where the host's ``proc`` and ``run`` are."""

_TYPES = {"c": device_filter.CHAR, "b": device_filter.BLOCK}
_TYPE_LETTERS = {number: letter for letter, number in _TYPES.items()}
_ACCESS = {"r": device_filter.READ, "w": device_filter.WRITE, "m": device_filter.MKNOD}
_EVERYTHING = device_filter.READ | device_filter.WRITE | device_filter.MKNOD
_MOST_MAJOR, _MOST_MINOR = (1 << 12) - 1, (1 << 20) - 1  # of the kernel's dev_t
_NOT_PERMITTED = (errno.EPERM, errno.EACCES, errno.EROFS)
_ROUNDS = 4  # systemd may write its program anew while this works
# What [oci_hook] device_cgroup = "best-effort" makes a warning: what somebody above has decided, who may have
# allowed the device as well.
_TOLERATED = frozenset({"HOK252", "HOK253", "HOK254", "HOK255", "HOK260", "HOK261", "HOK262"})
_BEST_EFFORT = 'or set [oci_hook] device_cgroup = "best-effort" to start containers all the same'


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
    try:
        _allow(pid, grants, cgroups_path)
    except DeliveryError as error:
        if mode == "enforce" or error.code not in _TOLERATED:
            raise
        log.write(log_to, str(error), log.WARNING)


def grants_of(rules: Iterable[Rule]) -> tuple[Grant, ...]:
    """The rules as numbers, one a device. Raises `DeliveryError` ``HOK250``."""
    grants = []
    for kind, major, minor, access in rules:
        if (
            kind not in _TYPES
            or not 0 <= major <= _MOST_MAJOR
            or not 0 <= minor <= _MOST_MINOR
            or not set(access) <= set(_ACCESS)
        ):
            text = quoted(f"{kind} {major}:{minor} {access}")
            raise DeliveryError(
                "HOK250",
                f"{text} is no device that a cgroup can allow",
                f"type c or b, major up to {_MOST_MAJOR}, minor up to {_MOST_MINOR}, access of r, w and m: "
                "correct the CDI spec file",
            )
        mask = sum(_ACCESS[letter] for letter in set(access))
        if mask:
            grants.append((_TYPES[kind], major, minor, mask))
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
        # crun puts the process below the scope, see contracts hooks-and-runtimes.md d.4.
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


def _allow(pid: int, grants: tuple[Grant, ...], cgroups_path: str) -> None:
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
            pins = systemd.declare(scope, grants, ROOT)
            break
    undo: Undo = []
    opened: list[int] = []
    try:
        if 1 in cgroups:
            _allow_in_lists(cgroups[1], scopes[1], own.get(1), mounts, grants, undo)
        if 2 in cgroups:
            _allow_in_programs(cgroups[2], scopes[2], own.get(2), mounts, grants, pins, opened, undo)
    except BaseException as error:
        failed = _undone(undo)
        if failed and isinstance(error, DeliveryError):
            error.message += f"; and what was changed before could not be changed back: {failed}"
        raise
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _undone(steps: Undo) -> str:
    """Undo the steps, the last first, and return why one failed; the others are undone all the same."""
    failed = ""
    for step in reversed(steps):
        try:
            step()
        except OSError as error:
            failed = error.strerror or str(error)
    return failed


# Version 1


def _allow_in_lists(
    path: str,
    scope: str | None,
    own: str | None,
    mounts: list[Mount],
    grants: tuple[Grant, ...],
    undo: Undo,
) -> None:
    found = _folder(path, 1, mounts)
    if found is None:
        if path == own:
            return  # what the runtime itself has, in a hierarchy that it does not see and cannot have changed
        raise _invisible(path, "version 1")
    if scope is None:
        descriptor = _open_folder(found)
        try:
            had = _listed(descriptor)
        finally:
            os.close(descriptor)
        for grant in grants:
            if grant[3] & ~_had(had, grant):
                raise _shared(path, grant)
        return
    # From above: a cgroup can be allowed only what the one above it may.
    for level in reversed(_levels(path, scope)):
        folder = _folder(level, 1, mounts)
        if folder is None:
            raise _invisible(level, "version 1")
        _allow_in_list(level, folder, grants, undo)


def _allow_in_list(level: str, folder: str, grants: tuple[Grant, ...], undo: Undo) -> None:
    descriptor = _open_folder(folder)
    try:
        had = _listed(descriptor)
        for grant in grants:
            missing = grant[3] & ~_had(had, grant)
            # Also where everything seems to be allowed: the list does not show the exceptions to that.
            try:
                _write_list(folder, "devices.allow", grant)
            except OSError as error:
                if not missing:
                    continue
                if error.errno in _NOT_PERMITTED:
                    raise _not_permitted(f"allow {_text(grant)} in cgroup {quoted(level)}", error) from None
                raise DeliveryError(
                    "HOK257",
                    f"cgroup {quoted(level)} does not take {_text(grant)}: {error.strerror}",
                    "report this with the kernel's version",
                ) from None
            if missing:
                undo.append(lambda rule=(*grant[:3], missing): _write_list(folder, "devices.deny", rule))  # type: ignore[misc]
    finally:
        os.close(descriptor)


def _write_list(folder: str, name: str, grant: Grant) -> None:
    descriptor = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, _text(grant).encode())
    finally:
        os.close(descriptor)


def _listed(folder: int) -> list[tuple[int, str, str, int]]:
    """A cgroup's devices.list: type, numbers as text, ``*`` for all, and access. Type 0 is both."""
    try:
        descriptor = os.open("devices.list", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno in _NOT_PERMITTED:
            return []
        raise _unreadable("devices.list", error) from None
    with open(descriptor) as file:
        lines = file.read().split("\n")
    found = []
    for line in lines:
        kind, _, rest = line.partition(" ")
        numbers, _, access = rest.partition(" ")
        major, _, minor = numbers.partition(":")
        if kind in ("a", *_TYPES):
            found.append((_TYPES.get(kind, 0), major, minor, sum(_ACCESS.get(c, 0) for c in set(access))))
    return found


def _had(listed: list[tuple[int, str, str, int]], grant: Grant) -> int:
    """The access to the device that a list gives."""
    kind, major, minor, _ = grant
    access = 0
    for known, of_major, of_minor, mask in listed:
        if known in (0, kind) and of_major in ("*", str(major)) and of_minor in ("*", str(minor)):
            access |= mask
    return access


# Version 2


class _Exchange:
    """A program of a cgroup and what takes its place; descriptors."""

    __slots__ = ("flags", "folder", "new", "old")

    def __init__(self, folder: int, flags: int, old: int, new: int) -> None:
        self.folder = folder
        self.flags = flags
        self.old = old
        self.new = new


def _allow_in_programs(
    path: str,
    scope: str | None,
    own: str | None,
    mounts: list[Mount],
    grants: tuple[Grant, ...],
    pins: tuple[str, ...],
    opened: list[int],
    undo: Undo,
) -> None:
    leaf = _folder(path, 2, mounts)
    if leaf is None:
        if path == own:
            return
        raise _invisible(path, "version 2")
    if not bpf.supported():
        raise DeliveryError(
            "HOK259",
            f"device filters of cgroup version 2 cannot be changed on {quoted(os.uname().machine)}",
            "this works on x86_64 and aarch64; deliver by NRI or the runtime wrapper instead",
        )
    folders = [leaf]
    for level in _levels(path, scope)[1:] if scope is not None else ():
        folder = _folder(level, 2, mounts)
        if folder is None:
            raise _invisible(level, "version 2")
        folders.append(folder)
    descriptors = [_opened(opened, _open_folder(folder)) for folder in folders]
    made: dict[int, int] = {}
    for _ in range(_ROUNDS):
        plan = _plan(path, descriptors, descriptors if scope is not None else [], grants, opened, made)
        if not plan:
            break
        for exchange in plan:
            _exchange(exchange, path, undo)
    else:
        raise DeliveryError(
            "HOK264",
            f"the device filters of cgroup {quoted(path)} cannot be replaced: they keep changing or are "
            "attached by links",
            "what manages this cgroup besides the container runtime? `bpftool cgroup show` shows its filters",
        )
    for pin in pins:
        _pin_anew(pin, grants, opened, made)


def _plan(
    path: str,
    levels: list[int],
    changeable: list[int],
    grants: tuple[Grant, ...],
    opened: list[int],
    made: dict[int, int],
) -> list[_Exchange]:
    """What is to be exchanged: loaded, and nothing attached yet.

    levels: the container's cgroups, that of its process first. made: id of a program → what takes its place.
    """
    try:
        attached = [(folder, *bpf.query(folder)) for folder in changeable]
        effective, _ = bpf.query(levels[0], effective=True)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS):
            return []  # a kernel without device programs has no filter either
        if error.errno in _NOT_PERMITTED:
            raise _not_permitted(f"ask for the device filters of cgroup {quoted(path)}", error) from None
        raise _failed("ask for the device filters", path, error) from None
    ours = {identifier for _, identifiers, _ in attached for identifier in identifiers}
    for identifier in effective:
        if identifier not in ours:
            _need_yes_above(identifier, path, grants, opened)
    plan = []
    for folder, identifiers, flags in attached:
        for identifier in identifiers:
            found = _program(identifier, path, opened)
            if found is None:
                continue
            old, code = found
            if identifier not in made:
                answers = [device_filter.permits(code, grant) for grant in grants]
                if all(answers):
                    continue
                made[identifier] = _replacement(code, grants, path, opened)
            plan.append(
                _Exchange(folder, flags & (bpf.ALLOW_MULTI | bpf.ALLOW_OVERRIDE), old, made[identifier])
            )
    return plan


def _program(identifier: int, path: str, opened: list[int]) -> tuple[int, bytes] | None:
    """A program's descriptor and instructions; None if it is gone by now."""
    try:
        descriptor = _opened(opened, bpf.program(identifier))
        return descriptor, bpf.instructions(descriptor)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        if error.errno in _NOT_PERMITTED:
            raise _not_permitted(f"read a device filter of cgroup {quoted(path)}", error) from None
        raise _failed("read a device filter", path, error) from None


def _need_yes_above(identifier: int, path: str, grants: tuple[Grant, ...], opened: list[int]) -> None:
    found = _program(identifier, path, opened)
    if found is None:
        return
    for grant in grants:
        answer = device_filter.permits(found[1], grant)
        if answer is False:
            raise DeliveryError(
                "HOK254",
                f"{_text(grant)} is denied to cgroup {quoted(path)} by a device filter that is not the "
                f"container's own, program {identifier}",
                "`bpftool cgroup tree` shows where it is attached: allow the device there (DeviceAllow= of a "
                f"systemd unit), {_BEST_EFFORT}",
            )
        if answer is None:
            raise DeliveryError(
                "HOK255",
                f"whether {_text(grant)} is allowed to cgroup {quoted(path)} cannot be told: program "
                f"{identifier}, a device filter that is not the container's own, uses maps or functions",
                f"`bpftool cgroup tree` shows what attaches it; {_BEST_EFFORT}",
            )


def _replacement(code: bytes, grants: tuple[Grant, ...], path: str, opened: list[int]) -> int:
    """A new program that says yes to the grants and else what the old one says."""
    reason = device_filter.immovable(code)
    new = b"" if reason else device_filter.allowing(code, grants)
    if len(new) // 8 > device_filter.MAX_INSTRUCTIONS:
        reason = f"with the devices it would have more than {device_filter.MAX_INSTRUCTIONS} instructions"
    if reason:
        raise DeliveryError(
            "HOK256",
            f"a device filter of cgroup {quoted(path)} cannot be extended: {reason}",
            "deliver by NRI or the runtime wrapper instead, before the container has a filter",
        )
    try:
        return _opened(opened, bpf.load(new))
    except bpf.Refused as error:
        raise DeliveryError(
            "HOK257",
            f"the kernel refuses the extended device filter of cgroup {quoted(path)}: {error.strerror}",
            f"report this with the kernel's version and what it says: {quoted(error.log, 500)}",
        ) from None
    except OSError as error:
        if error.errno in _NOT_PERMITTED:
            raise _not_permitted(f"load a device filter for cgroup {quoted(path)}", error) from None
        raise _failed("load a device filter", path, error) from None


def _exchange(exchange: _Exchange, path: str, undo: Undo) -> None:
    folder, flags, old, new = exchange.folder, exchange.flags, exchange.old, exchange.new
    try:
        _swap(folder, flags, old, new)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return  # the old one is gone: look again
        if error.errno in _NOT_PERMITTED:
            raise _not_permitted(f"replace a device filter of cgroup {quoted(path)}", error) from None
        raise _failed("replace a device filter", path, error) from None
    undo.append(lambda: _swap(folder, flags, new, old))


def _swap(folder: int, flags: int, old: int, new: int) -> None:
    """Attach a program in the place of another, at no time neither of them."""
    if not flags & bpf.ALLOW_MULTI:
        bpf.attach(folder, new, flags)
        return
    try:
        bpf.attach(folder, new, flags, replaced=old)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Before Linux 5.6. Both must say yes for a moment, which is never more than was allowed.
        bpf.attach(folder, new, flags)
        try:
            bpf.detach(folder, old)
        except OSError:
            bpf.detach(folder, new)
            raise


def _pin_anew(path: str, grants: tuple[Grant, ...], opened: list[int], made: dict[int, int]) -> None:
    """Put the extended program where systemd takes the unit's device filter from."""
    temporary = f"{path}_cdi_courier"  # a bpffs takes no dots
    try:
        old = _opened(opened, bpf.pinned(path))
        identifier = bpf.identifier(old)
        code = bpf.instructions(old)
        if all(device_filter.permits(code, grant) for grant in grants):
            return
        if identifier not in made:
            made[identifier] = _replacement(code, grants, path, opened)
        if os.path.lexists(temporary):
            os.unlink(temporary)
        bpf.pin(made[identifier], temporary)
        os.rename(temporary, path)
    except OSError as error:
        raise DeliveryError(
            "HOK263",
            f"the device filter that systemd reads from {quoted(path)} cannot be extended: {error.strerror}",
            "the container would lose its devices with the next `systemctl daemon-reload`; is that a bpffs?",
        ) from None


# Where things are


def _levels(path: str, scope: str) -> list[str]:
    """The cgroups from that of the process up to the scope."""
    levels = [path]
    while levels[-1] != scope:
        levels.append(levels[-1].rpartition("/")[0])
    return levels


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


def _open_folder(folder: str) -> int:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(folder, error) from None


def _opened(descriptors: list[int], descriptor: int) -> int:
    descriptors.append(descriptor)
    return descriptor


def _read(path: str) -> str:
    path = os.path.join(ROOT, path)
    try:
        with open(path, "rb") as file:
            return os.fsdecode(file.read())
    except OSError as error:
        raise _unreadable(path, error) from None


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


# What is said


def _text(grant: Grant) -> str:
    """A grant as devices.allow takes it."""
    kind, major, minor, mask = grant
    return f"{_TYPE_LETTERS[kind]} {major}:{minor} {''.join(c for c, bit in _ACCESS.items() if mask & bit)}"


def _unreadable(path: str, error: OSError) -> DeliveryError:
    return DeliveryError(
        "HOK251",
        f"{quoted(path)} cannot be read: {error.strerror}",
        "has the container ended? Else are /proc and /sys/fs/cgroup mounted where the hook runs?",
    )


def _invisible(path: str, version: str) -> DeliveryError:
    return DeliveryError(
        "HOK251",
        f"no mounted hierarchy of {version} shows cgroup {quoted(path)}",
        "the container runtime must run where the host's /sys/fs/cgroup is mounted",
    )


def _shared(path: str, grant: Grant) -> DeliveryError:
    return DeliveryError(
        "HOK252",
        f"cgroup {quoted(path)}, which does not allow {_text(grant)}, is not the container's alone",
        f"let the runtime make a cgroup for each container, {_BEST_EFFORT}",
    )


def _not_permitted(what: str, error: OSError) -> DeliveryError:
    return DeliveryError(
        "HOK253",
        f"this process may not {what}: {error.strerror}",
        "the hook needs to be root of the host with CAP_SYS_ADMIN, and a cgroup above must not forbid the "
        f"device; {_BEST_EFFORT}",
    )


def _failed(what: str, path: str, error: OSError) -> DeliveryError:
    return DeliveryError(
        "HOK258",
        f"cannot {what} of cgroup {quoted(path)}: {error.strerror}",
        "the filters are as they were; report this with the kernel's version",
    )
