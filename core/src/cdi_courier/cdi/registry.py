"""The spec directories on disk, rescanned when they have changed. Source: docs/facts.md#cdi-directories.

What a spec is made of is imported with the first scan: a daemon need not wait for that before it registers.

No inotify: before an answer the identity of directories and files (`_Identity`) is compared with what was
read, a few `stat` calls. It knows files, owners and order; what a file says is `decode`'s and `validate`'s,
what follows from all of them is `snapshot`'s.

Three rules keep an answer from being stale:
- What is remembered is the identity of what was *read*, taken from the open file before reading. A file
  that changes meanwhile, or a directory that gains one, differs from it at the next look.
- The kernel's time stamps tick every 1 to 10 ms, and two writes within a tick look the same. A file that
  was changed just before it was read is therefore read again until it has rested (`signature`).
- A directory is listed again unless its time stamps are those of the last listing, and had rested then.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from attrs import define, field, frozen

from cdi_courier.cdi import trust as _trust
from cdi_courier.errors import CdiError, quoted
from cdi_courier.signature import (
    OWNER,
    FileIdentity,
    directory_identity,
    file_identity,
    has_rested,
    look_at_file,
    names_in,
)

if TYPE_CHECKING:
    from cdi_courier.cdi.model import Spec
    from cdi_courier.cdi.snapshot import DeviceEntry, Snapshot, SpecFile

DEFAULT_DIRS: Final = ("/etc/cdi", "/var/run/cdi")
DEFAULT_MAX_FILE_SIZE: Final = 2 * 1024 * 1024

EXTENSIONS: Final = (".json", ".yaml")
# What cannot be opened today can be tomorrow without the file having changed; only these cannot.
_LASTING: Final = frozenset({errno.EACCES, errno.EPERM})

Trust = Literal["root-owned", "any"]
# Of a directory: itself, or an errno, and its spec files by name. None: there is no such directory.
_DirIdentity = tuple[tuple[int, ...], tuple[tuple[str, FileIdentity], ...]] | None
_Identity = tuple[_DirIdentity, ...]
_Stamps = tuple[int, int]  # mtime and ctime in ns

# `directory_identity`, its time stamps and `file_identity` at a third of the price: what is looked at for
# each container is taken out of a stat_result in one go. Tests hold them equal.
_directory_of = attrgetter("st_dev", "st_ino", "st_uid", "st_gid", "st_mode")
_directory_at = attrgetter("st_dev", "st_ino", "st_uid", "st_gid", "st_mode", "st_mtime_ns", "st_ctime_ns")
_stat = os.stat
_stamps_of = attrgetter("st_mtime_ns", "st_ctime_ns")
_file_of = attrgetter(
    "st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns", "st_uid", "st_gid", "st_mode"
)


@frozen(eq=False, repr=False)  # here and below: a quarter of a start is making classes
class _Parsed:
    """A file as read: its spec or its error, and what it was like then."""

    identity: FileIdentity
    rested: bool
    spec: Spec | None
    error: CdiError | None


@define(eq=False, repr=False)
class _Scan:
    """What a scan has gathered so far."""

    parsed: dict[str, _Parsed] = field(factory=dict)
    found: list[str] = field(factory=list)
    specs: list[SpecFile] = field(factory=list)
    errors: dict[str, list[CdiError]] = field(factory=dict)
    dir_errors: dict[str, CdiError] = field(factory=dict)
    blocked: dict[str, CdiError] = field(factory=dict)
    rested: bool = True


@frozen(eq=False, repr=False)
class _Usual:
    """What `Registry.current` compares as a rule.

    missing: directories that are not there. known: path, what is looked at in its stat, what that was.
    """

    snapshot: Snapshot
    missing: list[str]
    known: list[tuple[str, Callable[[os.stat_result], tuple[int, ...]], tuple[int, ...]]]

    def holds(self) -> bool:
        """Whether all is as it was. False also where that cannot be told so simply."""
        try:
            for path in self.missing:
                if _is_there(path):
                    return False
            for path, look, found in self.known:
                if look(_stat(path)) != found:
                    return False
        except OSError:
            return False
        return True


class Registry:
    """The devices that spec files in `dirs` define, always as the files are now.

    dirs: ascending priority; one that does not exist is skipped.
    trust: ``root-owned`` or ``any``, whose files count.
    max_file_size: bytes; a larger file is an error.

    Safe to share between threads: `current` never waits, `snapshot` waits for a scan in progress.
    """

    def __init__(
        self,
        dirs: Sequence[str] = DEFAULT_DIRS,
        *,
        trust: Trust = "root-owned",
        max_file_size: int = DEFAULT_MAX_FILE_SIZE,
    ) -> None:
        self.dirs = tuple(_clean(path) for path in dirs)
        self._owners = _trust.acceptable_owners() if trust == "root-owned" else None
        self._max_file_size = max_file_size
        self._parsed: dict[str, _Parsed] = {}
        # Identity and snapshot in one attribute: a reader sees both or neither. None: look again.
        self._last: tuple[_Identity, Snapshot] | None = None
        # Directory → its time stamps when it was last listed and held the names of `_last`.
        self._listed: dict[str, _Stamps] = {}
        self._usual: _Usual | None = None
        self._lock = threading.Lock()

    def snapshot(self) -> Snapshot:
        """Return what the directories define now. Never raises for what is in them: see its errors."""
        current = self.current()
        if current is None:
            with self._lock:
                current = self.current() or self._rescan()
        return current

    def current(self) -> Snapshot | None:
        """What the directories define now, if no file must be read again to know it; a few stat calls."""
        last = self._last
        if last is None:
            return None
        if (usual := self._usual) is not None and usual.holds():
            return usual.snapshot
        identity, snapshot = last
        for path, known in zip(self.dirs, identity, strict=True):
            if not self._is_still(path, known):
                return None
        self._usual = self._looked(last)
        return snapshot

    def _looked(self, last: tuple[_Identity, Snapshot]) -> _Usual | None:
        """What need only be compared as long as it is all as it was; None where that would not be enough."""
        missing = []
        looks: list[tuple[str, Callable[[os.stat_result], tuple[int, ...]], tuple[int, ...]]] = []
        for directory, known in zip(self.dirs, last[0], strict=True):
            if known is None:
                missing.append(directory)
                continue
            stamps = self._listed.get(directory)
            if stamps is None:
                return None
            looks.append((directory, _directory_at, known[0] + stamps))
            prefix = directory if directory.endswith("/") else directory + "/"
            looks += [(prefix + name, _file_of, identity) for name, identity in known[1]]
        # Asked last: what `_listed` vouched for above was then of this scan.
        return _Usual(last[1], missing, looks) if self._last is last else None

    def _is_still(self, directory: str, known: _DirIdentity) -> bool:
        """Whether a directory has the identity that it had, without reading a file."""
        now = time.time_ns()
        try:
            found = os.stat(directory)
            stamps = _stamps_of(found)
            names = None if self._listed.get(directory) == stamps else names_in(directory, EXTENSIONS)
        except FileNotFoundError:
            return known is None
        except OSError as error:
            return known == ((error.errno or 0,), ())
        if known is None or known[0] != _directory_of(found):
            return False
        files = known[1]
        if names is not None:
            if names != [name for name, _ in files]:
                return False
            # Two threads may both write this; either has seen that the names are those.
            if has_rested(max(stamps), now):
                self._listed[directory] = stamps
        prefix = directory if directory.endswith("/") else directory + "/"
        return all(look_at_file(prefix + name) == identity for name, identity in files)

    def _rescan(self) -> Snapshot:
        scan = _Scan()
        identity = tuple(self._scan_directory(scan, priority) for priority in range(len(self.dirs)))
        snapshot = _conclude(scan, self.dirs)
        self._parsed = scan.parsed
        # Emptied first: until the new names stand in `_last`, nothing may vouch for the old ones.
        self._listed = {}
        self._last = (identity, snapshot) if scan.rested else None
        self._usual = None
        return snapshot

    def _scan_directory(self, scan: _Scan, priority: int) -> _DirIdentity:
        directory = self.dirs[priority]
        try:
            found = os.stat(directory)
            names = names_in(directory, EXTENSIONS)
        except FileNotFoundError:
            return None
        except OSError as error:
            scan.dir_errors[directory] = CdiError(
                "CDI009",
                f"spec directory {quoted(directory)} cannot be read: {error.strerror}",
                "devices that are defined there are unknown until it can",
                file=directory,
            )
            return (error.errno or 0,), ()
        scan.found.append(directory)
        distrusted = (
            ""
            if self._owners is None
            else _trust.distrust_directory(found.st_uid, found.st_gid, found.st_mode, self._owners)
        )
        files = []
        for name in names:
            path = os.path.join(directory, name)
            files.append((name, self._scan_file(scan, path, priority, distrusted)))
        return directory_identity(found), tuple(files)

    def _scan_file(self, scan: _Scan, path: str, priority: int, distrusted: str) -> FileIdentity:
        from cdi_courier.cdi.snapshot import SpecFile

        try:
            found = os.stat(path)
        except OSError as error:
            scan.errors[path] = [_unreadable(path, error.strerror or "")]
            return (error.errno or 0,)
        if stat.S_ISDIR(found.st_mode) and not os.path.islink(path):
            return file_identity(found)
        parsed = scan.parsed.get(path) or self._parsed.get(path)
        if parsed is None or not parsed.rested or parsed.identity != file_identity(found):
            parsed = self._parse(path, found)
        scan.parsed[path] = parsed
        scan.rested = scan.rested and parsed.rested
        if parsed.error is not None:
            scan.errors[path] = [parsed.error]
        elif parsed.spec is not None:
            reason = distrusted or self._distrust(path, parsed.identity)
            if reason:
                untrusted = _untrusted(path, reason, parsed.spec)
                scan.errors[path] = [untrusted]
                for device in parsed.spec.devices:
                    scan.blocked.setdefault(f"{parsed.spec.kind}={device.name}", untrusted)
            else:
                scan.specs.append(SpecFile(path, priority, parsed.spec))
        return parsed.identity

    def _distrust(self, path: str, identity: FileIdentity) -> str:
        """Return why the file is not trusted; empty if it is. A link's own owner counts as well."""
        if self._owners is None:
            return ""
        uid, gid, mode = identity[OWNER]
        reason = _trust.distrust(uid, gid, mode, self._owners)
        if not reason:
            try:
                link = os.lstat(path)
            except OSError:
                return "it vanished while it was looked at"
            if stat.S_ISLNK(link.st_mode) and link.st_uid not in self._owners:
                reason = f"it is a symbolic link that belongs to uid {link.st_uid}, not to root"
        return reason

    def _parse(self, path: str, found: os.stat_result) -> _Parsed:
        """Read a file. Anything but a regular file is refused before it is opened: opening can act."""
        now = time.time_ns()
        identity = file_identity(found)
        if not stat.S_ISREG(found.st_mode):
            error = _unreadable(path, "it is not a regular file")
            return _Parsed(identity, rested=True, spec=None, error=error)
        try:
            found, data = _read(path, self._max_file_size)
        except OSError as error:
            lasting = error.errno in _LASTING
            return _Parsed(identity, lasting, None, _unreadable(path, error.strerror or ""))
        identity = file_identity(found)
        rested = has_rested(found.st_ctime_ns, now)
        if data is None:
            limit = _unfit(found, self._max_file_size)
            return _Parsed(identity, rested, None, _unreadable(path, limit))
        try:
            return _Parsed(identity, rested, load_spec(data, path), None)
        except CdiError as error:
            return _Parsed(identity, rested, None, error)


def _is_there(path: str) -> bool:
    """Whether there is anything, or might be: not `os.path.exists`, for which an error means no."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def load_spec(data: bytes, path: str) -> Spec:
    """As `validate.load_spec`."""
    from cdi_courier.cdi import validate

    return validate.load_spec(data, path)


def load_file(path: str, max_file_size: int = 2097152) -> Spec:
    """Load one spec file, whoever owns it and wherever it lies.

    Raises `CdiError`: ``CDI002`` unreadable, not a regular file or larger than `max_file_size` bytes;
    ``CDI003`` to ``CDI006`` as `validate.load_spec`.
    """
    try:
        found, data = _read(path, max_file_size)
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        raise _unreadable(path, getattr(error, "strerror", None) or str(error)) from None
    if data is None:
        raise _unreadable(path, _unfit(found, max_file_size))
    return load_spec(data, path)


def _conclude(scan: _Scan, dirs: tuple[str, ...]) -> Snapshot:
    """Decide which definition of each device is in force: docs/facts.md#cdi-conflicts."""
    from cdi_courier.cdi.snapshot import DeviceEntry, Snapshot

    devices: dict[str, tuple[int, DeviceEntry]] = {}
    conflicts: dict[str, list[str]] = {}
    for file in scan.specs:
        for device in file.spec.devices:
            name = f"{file.spec.kind}={device.name}"
            priority, other = devices.get(name, (-1, None))
            if other is None or file.priority > priority:
                devices[name] = file.priority, DeviceEntry(file.path, device, file.spec)
                continue
            error = _conflict(name, file.path, other.path)
            for path in (file.path, other.path):
                scan.errors.setdefault(path, []).append(error)
            paths = conflicts.setdefault(name, [])
            paths += [path for path in (other.path, file.path) if path not in paths]
    # A conflict stays one even where a directory of higher priority defines the device once. That is the
    # runtimes' behaviour, and a device that one resolves and the other does not would be worse.
    usable = {
        name: entry
        for name, (_, entry) in devices.items()
        if name not in conflicts and name not in scan.blocked
    }
    return Snapshot(
        dirs=dirs,
        found=tuple(scan.found),
        specs=tuple(scan.specs),
        devices=MappingProxyType(usable),
        errors=MappingProxyType({path: tuple(errors) for path, errors in scan.errors.items()}),
        dir_errors=MappingProxyType(scan.dir_errors),
        conflicts=MappingProxyType({name: tuple(paths) for name, paths in conflicts.items()}),
        blocked=MappingProxyType(scan.blocked),
    )


def _read(path: str, limit: int) -> tuple[os.stat_result, bytes | None]:
    """Return what a file is and holds; None if it is too large, or no regular file any more."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
            return found, None
        data = b""
        while len(data) <= limit and (part := os.read(descriptor, limit + 1 - len(data))):
            data += part
        return found, data if len(data) <= limit else None
    finally:
        os.close(descriptor)


def _unfit(found: os.stat_result, limit: int) -> str:
    """Why `_read` has returned no bytes."""
    return f"it is larger than {limit} bytes" if stat.S_ISREG(found.st_mode) else "it is not a regular file"


def _clean(path: str) -> str:
    """Clean a path lexically as Go does: no leading double slash, and nothing is the current directory."""
    clean = os.path.normpath(path)
    return clean[1:] if clean.startswith("//") else clean


def _unreadable(path: str, reason: str) -> CdiError:
    return CdiError(
        "CDI002",
        f"spec file {quoted(path)} cannot be read: {reason}",
        "a spec is a regular file that this process may read, of at most [cdi] max_file_size bytes",
        file=path,
    )


def _untrusted(path: str, reason: str, spec: Spec) -> CdiError:
    return CdiError(
        "CDI007",
        f"spec file {quoted(path)} is not trusted: {reason}",
        'runtimes would use it, so its devices are refused: chown root, chmod go-w, or [cdi] trust = "any"',
        file=path,
        kind=spec.kind,
    )


def _conflict(name: str, new: str, stored: str) -> CdiError:
    return CdiError(
        "CDI008",
        f"device {quoted(name)} is defined both in {quoted(new)} and in {quoted(stored)}",
        "within one directory a device may be defined once; delete or rename one of the files",
        device=name,
        file=new,
    )
