"""``state_dir/status.sock``: connect, read one JSON object, done. For `doctor`, `status` and whoever watches.

It must not know what the report says.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cdi_courier.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger("cdi_courier")

_PATIENCE: Final = 2.0  # seconds for a reader that does not read


def path_of(state_dir: str) -> str:
    """Where the socket is."""
    return os.path.join(state_dir, "status.sock")


@contextlib.contextmanager
def serving(state_dir: str, report: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Answer whoever connects with what `report` returns. Only root, or who runs us, may connect.

    The caller holds the lock of the state directory, so a socket that is there is nobody's. A socket that
    cannot be made is an error in the log: serving containers matters more.
    """
    path = path_of(state_dir)
    listener = socket.socket(socket.AF_UNIX)
    try:
        Path(path).unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            at(path, listener.bind)
        finally:
            os.umask(before)
        listener.listen(16)
    except OSError as error:
        listener.close()
        logger.error("%s cannot be made, so there is no status: %s", path, error.strerror or error)  # noqa: TRY400
        yield
        return
    thread = threading.Thread(target=_serve, args=(listener, report), name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # Ends the accept.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(_PATIENCE)
        listener.close()
        Path(path).unlink(missing_ok=True)


def require(state_dir: str, timeout: float = _PATIENCE) -> dict[str, Any]:
    """What the daemon of a state directory reports.

    Raises `HostError`: ``STA001`` none runs, ``STA002`` it does not answer in time, ``STA003`` nobody may
    ask it, or its answer cannot be understood.
    """
    path = path_of(state_dir)
    try:
        report = ask(state_dir, timeout)
    except (TimeoutError, BlockingIOError):
        pid = _owner(path)
        raise HostError(
            "STA002",
            f"the daemon{f' (pid {pid})' if pid else ''} does not answer at {path} within {timeout:g} s",
            "it is stuck or stopped; under systemd the watchdog restarts it, else do so by hand",
        ) from None
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise HostError(
            "STA003",
            f"the daemon's status cannot be read from {path}: {words}",
            "run as root; look whether daemon and command are of one version, and into the daemon's log",
        ) from None
    if report is None:
        raise HostError(
            "STA001",
            f"no daemon runs: nobody listens at {path}",
            "systemctl start cdi-courier, or cdi-courier run; [service] state_dir names the folder",
        )
    return report


def _owner(path: str) -> int | None:
    """The process that listens at the socket, if that can be known without its help."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        at(path, client.connect)
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[:4], sys.byteorder) or None
    return None


def ask(state_dir: str, timeout: float = _PATIENCE) -> dict[str, Any] | None:
    """What the daemon of a state directory reports; None if none runs. Raises `OSError`, `ValueError`."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(timeout)
        try:
            at(path_of(state_dir), client.connect)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        data = bytearray()
        while part := client.recv(65536):
            data += part
    report = json.loads(data)
    if not isinstance(report, dict):
        raise ValueError("the answer is no JSON object")  # noqa: TRY004 - of data, not of a type
    return report


def at(path: str, act: Callable[[str], None]) -> None:
    """Bind or connect also where the path is longer than a socket's address can be."""
    folder = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        act(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)


def _serve(listener: socket.socket, report: Callable[[], dict[str, Any]]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            try:
                connection.settimeout(_PATIENCE)
                connection.sendall(json.dumps(report()).encode())
            except OSError:
                continue  # whoever asked has gone, or does not read
            except Exception:
                logger.exception("the status report failed")
