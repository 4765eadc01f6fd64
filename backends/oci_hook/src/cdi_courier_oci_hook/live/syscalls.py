"""The kernel's calls that live injection makes, each a small function that raises; light module.

It must not know what they are for: no paths of containers, no CDI. Numbers are the kernel's, by table; what
libc has no function for in every version goes through ``syscall``. An errno becomes an `OSError` in one
place. Everything that touches the container or the host goes through here, so that a test can make any of
them fail (`before`).
"""

from __future__ import annotations

import ctypes
import errno
import os

from cdi_courier.errors import DeliveryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# include/uapi/linux: openat2.h, mount.h, fcntl.h, fs.h, sched.h, prctl.h
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

MOUNT_ATTR_RDONLY = 0x01
MOUNT_ATTR_NOSUID = 0x02
MOUNT_ATTR_NODEV = 0x04
MOUNT_ATTR_NOEXEC = 0x08
MOUNT_ATTR_ATIME = 0x70  # a field, not a flag: it is cleared as a whole before one of its values is set
MOUNT_ATTR_RELATIME = 0x00
MOUNT_ATTR_NOATIME = 0x10
MOUNT_ATTR_STRICTATIME = 0x20
MOUNT_ATTR_NODIRATIME = 0x80
MOUNT_ATTR_IDMAP = 0x100000
MOUNT_ATTR_NOSYMFOLLOW = 0x200000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_NOSYMFOLLOW = 256
MS_NOATIME = 1024
MS_NODIRATIME = 2048
MS_BIND = 4096
MS_REC = 16384
MS_UNBINDABLE = 1 << 17
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MS_SHARED = 1 << 20
MS_RELATIME = 1 << 21
MS_STRICTATIME = 1 << 24

O_PATH = os.O_PATH | os.O_CLOEXEC

_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 0x04
_MOVE_MOUNT_T_EMPTY_PATH = 0x40
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_POLLIN = 1
_SIGKILL = 9

_NEW = {"open_tree": 428, "move_mount": 429, "openat2": 437, "mount_setattr": 442}
_NUMBERS = {
    "x86_64": {**_NEW, "prctl": 157, "mount": 165, "umount2": 166, "fchownat": 260, "setns": 308},
    "aarch64": {**_NEW, "umount2": 39, "mount": 40, "fchownat": 54, "prctl": 167, "setns": 268},
}
# Without these nothing can be injected. mount_setattr (Linux 5.12) has an older substitute.
_NEEDED = {"open_tree", "move_mount", "openat2"}

before: Callable[[str], None] | None = None
"""Called with each call's name before it is made; a test raises `OSError` from it."""

_libc: Any = None


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def must_be_supported(machine: str | None = None) -> None:
    """Raises `DeliveryError` ``HOK205`` where the numbers of system calls are not known."""
    found = os.uname().machine if machine is None else machine
    if found not in _NUMBERS or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise DeliveryError(
            "HOK205",
            f"live injection is made for {' and '.join(_NUMBERS)}, not for {found} with "
            f"{8 * ctypes.sizeof(ctypes.c_void_p)} bits",
            "use NRI or the runtime wrapper",
        )


def openat2(directory: int, path: str, flags: int, resolve: int) -> int:
    """Open `path` relative to a descriptor as ``openat2(2)`` does; close-on-exec always."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    return _raw("openat2", directory, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))


def clone_tree(path: str, *, recursive: bool, follow: bool) -> int:
    """A detached copy of the mount at a host's path, of those below it too if `recursive`."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    flags |= _AT_RECURSIVE if recursive else 0
    flags |= 0 if follow else _AT_SYMLINK_NOFOLLOW
    return _raw("open_tree", _AT_FDCWD, os.fsencode(path), flags)


def set_attributes(
    mount: int,
    *,
    add: int = 0,
    clear: int = 0,
    propagation: int = 0,
    owners: int = 0,
    recursive: bool = False,
) -> None:
    """Change a mount: attributes to add and to clear, a propagation type, a user namespace that maps owners.

    Raises `OSError` ``ENOSYS`` before Linux 5.12.
    """
    attributes = _MountAttr(add, clear, propagation, owners)
    flags = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    _raw("mount_setattr", mount, b"", flags, ctypes.byref(attributes), ctypes.sizeof(attributes))


def remount(path: str, flags: int) -> None:
    """``mount(2)`` on what is mounted at a path, without source, type and data."""
    _raw("mount", None, os.fsencode(path), None, flags, None)


def move_mount(mount: int, target: int) -> None:
    """Put a detached mount onto what a descriptor refers to."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
    _raw("move_mount", mount, b"", target, b"", flags)


def detach(path: str) -> None:
    """Take the mount at a path away, lazily."""
    _raw("umount2", os.fsencode(path), _MNT_DETACH)


def enter(namespace: int) -> None:
    """Join the namespace that a descriptor refers to."""
    _raw("setns", namespace, 0)


def die_with_parent() -> None:
    """Have this process killed when its parent ends; undone by nothing but a change of credentials."""
    _raw("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def give(descriptor: int, uid: int, gid: int) -> None:
    """Change the owner of what an ``O_PATH`` descriptor refers to."""
    _raw("fchownat", descriptor, b"", uid, gid, _AT_EMPTY_PATH)


def open_at(directory: int | None, path: str, flags: int = O_PATH) -> int:
    """``openat(2)`` for paths that are ours."""
    _before("openat")
    return os.open(path, flags | os.O_CLOEXEC, dir_fd=directory)


def look(descriptor: int) -> os.stat_result:
    """``fstat(2)``."""
    _before("fstat")
    return os.fstat(descriptor)


def look_at(path: str) -> os.stat_result:
    """``stat(2)`` of a path that is ours."""
    _before("stat")
    return os.stat(path)


def read_at(directory: int | None, path: str) -> bytes:
    """The whole content of a file of a kernel's file system."""
    descriptor = open_at(directory, path, os.O_RDONLY)
    try:
        data = b""
        while part := os.read(descriptor, 1 << 16):
            data += part
    finally:
        os.close(descriptor)
    return data


def read_link(directory: int | None, name: str) -> str:
    """``readlinkat(2)``."""
    _before("readlinkat")
    return os.readlink(name, dir_fd=directory)


def make_directory(directory: int, name: str, mode: int) -> None:
    """``mkdirat(2)``."""
    _before("mkdirat")
    os.mkdir(name, mode, dir_fd=directory)


def make_node(directory: int, name: str, mode: int, device: int = 0) -> None:
    """``mknodat(2)``; mode: with the type, also of regular files."""
    _before("mknodat")
    os.mknod(name, mode, device, dir_fd=directory)


def change_mode(path: str, mode: int, directory: int) -> None:
    """``fchmodat(2)``."""
    _before("fchmodat")
    os.chmod(path, mode, dir_fd=directory)


def remove(directory: int, name: str, *, is_directory: bool = False) -> None:
    """``unlinkat(2)``."""
    _before("unlinkat")
    (os.rmdir if is_directory else os.unlink)(name, dir_fd=directory)


def rename(directory: int, old: str, new: str) -> None:
    """``renameat(2)`` within a directory."""
    _before("renameat")
    os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)


def go_to(directory: int | str) -> None:
    """``chdir(2)`` or ``fchdir(2)``."""
    _before("chdir")
    os.chdir(directory)


def become_root() -> None:
    """Take the identity of this user namespace's root, with no other groups."""
    _before("setresuid")
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def pipe() -> tuple[int, int]:
    """``pipe2(2)``, close-on-exec."""
    _before("pipe2")
    return os.pipe()


def memory_file(name: str) -> int:
    """``memfd_create(2)``, close-on-exec."""
    _before("memfd_create")
    return os.memfd_create(name)


def fork() -> int:
    """``fork(2)``."""
    _before("fork")
    return os.fork()


def is_readable(descriptor: int, seconds: float) -> bool:
    """``poll(2)``: whether there is something to read, or the end, before that time is over."""
    asked = (_PollFd * 1)(_PollFd(descriptor, _POLLIN, 0))
    _load().poll(asked, ctypes.c_ulong(1), max(0, int(seconds * 1000)))
    return bool(asked[0].revents)


def wait(pid: int, seconds: float, until: int = -1) -> int | None:
    """Wait for a child's end; its exit status, negative for a signal; None if it did not end in time.

    until: a pipe's reading end; if its other end is closed, that is not in time either.
    """
    _before("pidfd_open")
    descriptor = os.pidfd_open(pid)
    try:
        asked = (_PollFd * 2)(_PollFd(descriptor, _POLLIN, 0), _PollFd(until, 0, 0))
        _load().poll(asked, ctypes.c_ulong(2), max(0, int(seconds * 1000)))
        if not asked[0].revents:
            return None
    finally:
        os.close(descriptor)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _before(name: str) -> None:
    if before is not None:
        before(name)


def _load() -> Any:
    global _libc
    if _libc is None:
        must_be_supported()
        _libc = ctypes.CDLL(None, use_errno=True)
        _libc.syscall.restype = ctypes.c_long
    return _libc


def _raw(name: str, *arguments: Any) -> int:
    """Make a system call; raises `OSError`, and `DeliveryError` ``HOK206`` where a needed one is missing."""
    libc = _load()
    # A plain integer would be passed as 32 bits, with the register's upper half undefined.
    words = [ctypes.c_long(item) if type(item) is int else item for item in arguments]
    try:
        _before(name)
        return _result(libc.syscall(ctypes.c_long(_NUMBERS[os.uname().machine][name]), *words))
    except OSError as error:
        if error.errno == errno.ENOSYS and name in _NEEDED:
            raise DeliveryError(
                "HOK206",
                f"this kernel has no {name} system call",
                "live injection needs Linux 5.6; use NRI or the runtime wrapper",
            ) from None
        raise


def _result(returned: int) -> int:
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return returned
