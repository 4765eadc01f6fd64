"""The few bpf(2) calls that reading and exchanging a cgroup's device filters takes. Light module.

One small function a command; every failure is an `OSError`. It must not know what is in a program
(`device_filter`) or whose cgroup it is (`cgroup`). Source: docs/facts.md#device-filters; the kernel's
include/uapi/linux/bpf.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

ALLOW_OVERRIDE, ALLOW_MULTI, REPLACE = 1, 2, 4
"""How programs are attached."""

LOG_SIZE = 1 << 16
"""Bytes of the verifier's log that are read when it refuses a program."""

_NUMBERS = {"x86_64": 321, "aarch64": 280}
_LOAD, _PIN, _GET_PINNED, _ATTACH, _DETACH, _FD_BY_ID, _INFO, _QUERY = 5, 6, 7, 8, 9, 13, 15, 16
_PROGRAM_CGROUP_DEVICE, _ATTACH_CGROUP_DEVICE = 15, 6
_EFFECTIVE = 1
_MOST_PROGRAMS = 64  # BPF_CGROUP_MAX_PROGS, of one cgroup
_ATTRIBUTES = 128  # bytes; from 6.17 to 7.1 QUERY writes 64 of them whatever size it is told
_QUERY_SIZE = 64
_LICENCE = b"Apache"
_NAME = b"cdi_courier"
_ATTEMPTS = 5  # as libbpf: a signal that comes in between makes the verifier give up with EAGAIN
_RLIMIT_MEMLOCK = 8
_UNLIMITED = (1 << 64) - 1

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(OSError):  # noqa: N818 - the kernel's answer, not a malfunction
    """The verifier does not take a program. log: its last words."""

    def __init__(self, number: int, log: str) -> None:
        super().__init__(number, os.strerror(number))
        self.log = log


def supported() -> bool:
    """Whether the number of the system call is known for this machine."""
    return _number() is not None


def query(cgroup: int, *, effective: bool = False) -> tuple[list[int], int]:
    """The ids of the device programs attached to a cgroup's directory, and how they were attached.

    effective: those of all cgroups above it too, also of such as cannot be seen from here; then nothing is
    said of how.
    """
    room = _MOST_PROGRAMS
    while True:
        ids = (ctypes.c_uint32 * room)()
        flags = _EFFECTIVE if effective else 0
        packed = struct.pack(
            "=IIIIQII", cgroup, _ATTACH_CGROUP_DEVICE, flags, 0, ctypes.addressof(ids), room, 0
        )
        attributes = _attributes(packed)
        try:
            _bpf(_QUERY, attributes, _QUERY_SIZE)
        except OSError as error:
            count = struct.unpack_from("=I", attributes, 24)[0]
            if error.errno != errno.ENOSPC or count <= room:
                raise
            room = count
            continue
        count = struct.unpack_from("=I", attributes, 24)[0]
        return list(ids[:count]), struct.unpack_from("=I", attributes, 12)[0]


def program(identifier: int) -> int:
    """A descriptor of the program with this id."""
    return _bpf(_FD_BY_ID, _attributes(struct.pack("=III", identifier, 0, 0)), 12)


def identifier(descriptor: int) -> int:
    """The id of a program."""
    return int(struct.unpack_from("=I", _info(descriptor, 0, None), 4)[0])


def instructions(descriptor: int) -> bytes:
    """A program's instructions as the kernel shows them; empty if it does not."""
    while True:
        size = struct.unpack_from("=I", _info(descriptor, 0, None), 20)[0]
        buffer = ctypes.create_string_buffer(max(size, 1))
        info = _info(descriptor, size, buffer)
        shown, address = (struct.unpack_from("=I", info, 20)[0], struct.unpack_from("=Q", info, 32)[0])
        if not address or not size:
            return b""
        if shown <= size:
            return buffer.raw[:shown]


def load(code: bytes) -> int:
    """A descriptor of a new device program. Raises `Refused` where the verifier finds fault with it."""
    try:
        return _load(code, None)
    except OSError as error:
        if error.errno == errno.EPERM:
            # Before Linux 5.11 programs count as locked memory, and too little of it looks like this.
            return _load_unlimited(code, error)
        if error.errno not in (errno.EINVAL, errno.EACCES, errno.E2BIG):
            raise
        first = error
    log = ctypes.create_string_buffer(LOG_SIZE)
    try:
        return _load(code, log)
    except OSError:
        raise Refused(first.errno or 0, log.value[-500:].decode(errors="replace")) from None


def attach(cgroup: int, new: int, flags: int, replaced: int | None = None) -> None:
    """Attach a program to a cgroup's directory. replaced: in the place of this one, which needs Linux 5.6.

    flags: how the cgroup's programs are attached, as `query` says. Without ALLOW_MULTI there is one program,
    which the new one replaces.
    """
    packed = struct.pack(
        "=IIIII",
        cgroup,
        new,
        _ATTACH_CGROUP_DEVICE,
        flags | REPLACE if replaced is not None else flags,
        replaced or 0,
    )
    _bpf(_ATTACH, _attributes(packed), 20)


def detach(cgroup: int, old: int) -> None:
    """Detach a program from a cgroup's directory."""
    _bpf(_DETACH, _attributes(struct.pack("=III", cgroup, old, _ATTACH_CGROUP_DEVICE)), 12)


def pinned(path: str) -> int:
    """A descriptor of what is pinned at this path of a bpffs."""
    return _with_path(_GET_PINNED, path, 0)


def pin(descriptor: int, path: str) -> None:
    """Pin a program at a path, which must be free, of a bpffs."""
    _with_path(_PIN, path, descriptor)


def _with_path(command: int, path: str, descriptor: int) -> int:
    name = ctypes.create_string_buffer(os.fsencode(path))
    packed = struct.pack("=QII", ctypes.addressof(name), descriptor, 0)
    return _bpf(command, _attributes(packed), 16)


def _info(descriptor: int, size: int, buffer: ctypes.Array[ctypes.c_char] | None) -> bytes:
    """The first 64 bytes of struct bpf_prog_info."""
    info = ctypes.create_string_buffer(64)
    address = ctypes.addressof(buffer) if buffer is not None else 0
    struct.pack_into("=IQQ", info, 20, size, 0, address)
    packed = struct.pack("=IIQ", descriptor, len(info), ctypes.addressof(info))
    _bpf(_INFO, _attributes(packed), 16)
    return info.raw


def _load(code: bytes, log: ctypes.Array[ctypes.c_char] | None) -> int:
    licence = ctypes.create_string_buffer(_LICENCE)
    text = ctypes.create_string_buffer(code, len(code))
    packed = struct.pack(
        "=IIQQIIQII16sII",
        _PROGRAM_CGROUP_DEVICE,
        len(code) // 8,
        ctypes.addressof(text),
        ctypes.addressof(licence),
        1 if log is not None else 0,
        len(log) if log is not None else 0,
        ctypes.addressof(log) if log is not None else 0,
        0,
        0,
        _NAME,
        0,
        0,
    )
    for _ in range(_ATTEMPTS - 1):
        try:
            return _bpf(_LOAD, _attributes(packed), len(packed))
        except BlockingIOError:
            continue
    return _bpf(_LOAD, _attributes(packed), len(packed))


def _load_unlimited(code: bytes, first: OSError) -> int:
    try:
        old = _memory_limit(None)
        # Only root may raise the second figure; the first may be raised to it by anybody.
        try:
            _memory_limit((_UNLIMITED, _UNLIMITED))
        except OSError:
            _memory_limit((old[1], old[1]))
    except OSError:
        raise first from None
    try:
        return _load(code, None)
    finally:
        _memory_limit(old)


def _memory_limit(new: tuple[int, int] | None) -> tuple[int, int]:
    """The bytes of memory that this process may lock, soft and hard, before `new` holds."""
    old = (ctypes.c_uint64 * 2)()
    wanted = (ctypes.c_uint64 * 2)(*new) if new is not None else None
    if _libc.prlimit(0, _RLIMIT_MEMLOCK, wanted, old):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return old[0], old[1]


def _attributes(packed: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(packed, _ATTRIBUTES)


def _number() -> int | None:
    # A 32-bit process on such a machine has other numbers.
    return _NUMBERS.get(os.uname().machine) if ctypes.sizeof(ctypes.c_void_p) == 8 else None


def _bpf(command: int, attributes: ctypes.Array[ctypes.c_char], size: int) -> int:
    number = _number()
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    result = _libc.syscall(
        ctypes.c_long(number), ctypes.c_long(command), attributes, ctypes.c_long(size), ctypes.c_long(0)
    )
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)
