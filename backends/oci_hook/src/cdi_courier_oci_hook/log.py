"""The log of a process that starts once a container, whose stderr its caller throws away. Light module.

Nothing here waits or raises: a container is not refused because a log cannot be written.
"""

from __future__ import annotations

import _socket
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    _Where = TypeVar("_Where", str, int)

JOURNAL = "/run/systemd/journal/socket"
SYSLOG = "/dev/log"

ERROR, WARNING = 3, 4
"""Priorities, as in syslog."""

_DAEMON = 3 << 3  # syslog's facility
_LONGEST = 60_000  # bytes; a datagram must fit a socket's buffer


def write(target: str, message: str, priority: int = ERROR) -> None:
    """Write one message, on stderr too.

    target: ``journal``, which is syslog where there is no journal, or a file; where that cannot be written,
    as ``journal``. message: text that `errors.printable` has made harmless; may have several lines.
    """
    text = message.encode(errors="backslashreplace")[:_LONGEST]
    _try(_to_descriptor, 2, b"cdi-courier: " + text + b"\n")
    if target != "journal" and _try(_to_file, target, text):
        return
    if not _try(_to_socket, JOURNAL, _journal_entry(text, priority)):
        _try(
            _to_socket, SYSLOG, b"<%d>cdi-courier[%d]: " % (_DAEMON | priority, os.getpid()) + _one_line(text)
        )


def _journal_entry(text: bytes, priority: int) -> bytes:
    """An entry of the journal's native protocol: a value with line feeds is preceded by its length."""
    fields = b"PRIORITY=%d\nSYSLOG_FACILITY=3\nSYSLOG_IDENTIFIER=cdi-courier\n" % priority
    return fields + b"MESSAGE\n" + len(text).to_bytes(8, "little") + text + b"\n"


def _one_line(text: bytes) -> bytes:
    return text.replace(b"\n", b" ")


def _try(write_to: Callable[[_Where, bytes], None], where: _Where, data: bytes) -> bool:
    try:
        write_to(where, data)
    except (OSError, ValueError):
        return False
    return True


def _to_descriptor(descriptor: int, data: bytes) -> None:
    os.write(descriptor, data)


def _to_file(path: str, text: bytes) -> None:
    flags = (
        os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    )
    descriptor = os.open(path, flags, 0o600)
    try:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z").encode()
        os.write(descriptor, now + b" " + _one_line(text) + b"\n")
    finally:
        os.close(descriptor)


def _to_socket(path: str, data: bytes) -> None:
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_NONBLOCK)
    try:
        connection.sendto(data, path)
    finally:
        connection.close()
