"""What a service manager is told by the ``sd_notify`` protocol: lines of ``NAME=value`` in one datagram.

Without ``NOTIFY_SOCKET`` all of this does nothing. It must not know what is told.
Source: sd_notify(3) and sd_watchdog_enabled(3) of systemd.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from typing import Final

from cdi_courier.errors import printable

_PATIENCE: Final = 1.0  # seconds


def ready(status: str) -> None:
    """Say that the start, or a reload, is over. status: a few words for ``systemctl status``."""
    _send("READY=1", _status(status))


def reloading() -> None:
    """Say that settings are being read again; `ready` ends that."""
    _send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")


def stopping() -> None:
    """Say that the end has begun."""
    _send("STOPPING=1")


def alive(status: str, *, fed: bool) -> None:
    """Say what is going on and, if `fed`, put the watchdog off."""
    _send(_status(status), *(["WATCHDOG=1"] if fed else []))


def watchdog_interval() -> float | None:
    """Seconds within which `alive` must be called; None where there is no watchdog for this process."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    text = os.environ.get("WATCHDOG_USEC", "")
    return int(text) / 1e6 if text.isascii() and text.isdigit() and int(text) else None


def _status(text: str) -> str:
    return "STATUS=" + printable(text).replace("\n", " ")


def _send(*lines: str) -> None:
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    # Whoever serves containers does not fall for a service manager that has gone, nor wait long for it.
    with contextlib.suppress(OSError):
        _socket().sendto("\n".join(lines).encode(errors="backslashreplace"), address)


@functools.cache
def _socket() -> socket.socket:
    """Made once: the watchdog must be fed also while the process has no descriptor left."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.settimeout(_PATIENCE)
    return sock
