"""Whether a process listens at a socket's file, by the kernel's word and without connecting.

A runtime logs an error for each connection to its NRI socket that registers no plugin, and the host is looked
at again and again. What this cannot see (another network namespace, no permission) it does not deny.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdi_courier.host.files import Root

# linux/netlink.h, linux/sock_diag.h, linux/unix_diag.h, net/tcp_states.h
_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST_DUMP: Final = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_LISTEN: Final = 1 << 10
_UDIAG_SHOW_VFS: Final = 2
_UNIX_DIAG_VFS: Final = 1
_HEADER: Final = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST: Final = struct.Struct(
    "=BBHIII2I"
)  # unix_diag_req: family, protocol, pad, states, ino, show, cookie
_MESSAGE: Final = struct.Struct("=BBBBIII")  # unix_diag_msg: family, type, state, pad, ino, cookie
_ATTRIBUTE: Final = struct.Struct("=HH")  # nlattr: length, type
_VFS: Final = struct.Struct("=II")  # unix_diag_vfs: inode, device

_TIMEOUT: Final = 1.0  # seconds; the kernel answers in a millisecond


def listens(root: Root, path: str, pid: int) -> bool:
    """Whether it can be seen that this process listens at the socket's file."""
    try:
        wanted = {f"socket:[{inode}]" for inode in _sockets(root, path)}
        return bool(wanted) and any(target in wanted for target in _descriptors(root, pid))
    except (OSError, ValueError, struct.error):
        return False


def anybody_listens(root: Root, path: str) -> bool:
    """Whether it can be seen that some process listens at the socket's file."""
    try:
        return bool(_sockets(root, path))
    except (OSError, ValueError, struct.error):
        return False


def _sockets(root: Root, path: str) -> list[int]:
    """Inodes of the sockets that listen at this file. Raises what the kernel's answers may raise."""
    found = os.stat(root.real(path))
    if not stat.S_ISSOCK(found.st_mode):
        return []
    # As the kernel encodes it; inodes are cut to 32 bits there.
    file = (found.st_ino & 0xFFFFFFFF, os.major(found.st_dev) << 20 | os.minor(found.st_dev))
    return [inode for inode, at in _listening() if at == file]


def _descriptors(root: Root, pid: int) -> Iterator[str]:
    folder = root.real(f"/proc/{pid}/fd")
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # closed meanwhile
            yield os.readlink(f"{folder}/{name}")


def _listening() -> Iterator[tuple[int, tuple[int, int]]]:
    """(socket's inode, (file's inode, device)) of each listening Unix socket of this network namespace."""
    request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _LISTEN, 0, _UDIAG_SHOW_VFS, 0, 0)
    length = _HEADER.size + len(request)
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
    ) as kernel:
        kernel.settimeout(_TIMEOUT)
        kernel.sendto(_HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0) + request, (0, 0))
        while True:
            data = kernel.recv(1 << 16)
            at = 0
            while at + _HEADER.size <= len(data):
                length, type_, *_ = _HEADER.unpack_from(data, at)
                if type_ in (_NLMSG_ERROR, _NLMSG_DONE) or length < _HEADER.size:
                    return
                yield from _bound(data[at + _HEADER.size : at + length])
                at += _aligned(length)


def _bound(message: bytes) -> Iterator[tuple[int, tuple[int, int]]]:
    _, _, _, _, inode, *_ = _MESSAGE.unpack_from(message)
    at = _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(message):
        length, type_ = _ATTRIBUTE.unpack_from(message, at)
        if type_ == _UNIX_DIAG_VFS:
            yield inode, _VFS.unpack_from(message, at + _ATTRIBUTE.size)
        at += max(_aligned(length), _ATTRIBUTE.size)


def _aligned(length: int) -> int:
    return (length + 3) & ~3
