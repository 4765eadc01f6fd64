"""``state_dir/status.sock``: connect, read one JSON object, done. For `doctor`, `status` and whoever watches.

It must not know what the report says.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

from cdi_courier.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger("cdi_courier")

_PATIENCE: Final = 2.0  # seconds for a reader that does not read
_AGAIN: Final = 5.0  # seconds between attempts at a socket that cannot be made
_BREATH: Final = 0.2  # seconds until another attempt at a connection that cannot be accepted

SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED})
"""Why accepting fails and may not fail the next time; after anything else it is over."""


def path_of(state_dir: str) -> str:
    """Where the socket is."""
    return os.path.join(state_dir, "status.sock")


@contextlib.contextmanager
def serving(state_dir: str, report: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Answer whoever connects with what `report` returns. Only root, or who runs us, may connect.

    The caller holds the lock of the state directory, so a socket that is there is nobody's. A socket that
    cannot be made is an error in the log (``STA005``), and is tried again: serving containers matters more.
    """
    path = path_of(state_dir)
    ending = threading.Event()
    made: list[socket.socket] = []

    def make() -> bool:
        try:
            made.append(_listener(path))
        except OSError as error:
            trouble = error.strerror or str(error)
            if trouble not in said:
                said.append(trouble)
                logger.error(  # noqa: TRY400 - an expected failure has no traceback
                    "%s",
                    HostError(
                        "STA005",
                        f"{path} cannot be made, so there is no status: {trouble}",
                        f"containers are served all the same; trying again every {_AGAIN:g} s",
                    ),
                )
            return False
        if said:
            logger.info("%s is there now", path)
        return True

    def work() -> None:
        while not made and not ending.wait(_AGAIN):
            make()
        # After the look at `ending` that follows an append, the end finds the listener and wakes its accept.
        if made and not ending.is_set():
            _serve(made[0], report, ending)

    said: list[str] = []
    make()
    thread = threading.Thread(target=work, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        for listener in made:
            # Ends the accept.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        thread.join(_PATIENCE)
        for listener in made:
            listener.close()
            with contextlib.suppress(OSError):
                os.unlink(path)


def _listener(path: str) -> socket.socket:
    """A socket that listens there, for nobody but its owner. Raises `OSError`."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        before = os.umask(0o177)
        try:
            at(path, listener.bind)
        finally:
            os.umask(before)
        listener.listen(16)
    except BaseException:
        listener.close()
        raise
    return listener


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
        # Each user has a folder of their own, unless the settings name one.
        root = "run as root to ask the host's daemon, or start it: " if os.geteuid() else ""
        raise HostError(
            "STA001",
            f"no daemon runs: nobody listens at {path}",
            f"{root}systemctl start cdi-courier, or cdi-courier run; [service] state_dir names the folder",
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
    import json

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


def _serve(listener: socket.socket, report: Callable[[], dict[str, Any]], ending: threading.Event) -> None:
    troubled = False
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if ending.is_set() or error.errno not in SCARCE:
                return
            if not troubled:
                troubled = True
                logger.error("%s", scarce("who asks for the status waits", error))  # noqa: TRY400
            ending.wait(_BREATH)
            continue
        if troubled:
            troubled = False
            logger.info("the status is told again")
        with connection:
            try:
                import json  # the daemon does it ahead, when its sessions have begun (`service`)

                connection.settimeout(_PATIENCE)
                connection.sendall(json.dumps(report()).encode())
            except OSError:
                continue  # whoever asked has gone, or does not read
            except Exception:
                logger.exception("the status report failed")


def scarce(what: str, error: OSError) -> HostError:
    """That a connection cannot be accepted now. what: follows from that, in words."""
    return HostError(
        "STA006",
        f"{what}, for a connection cannot be accepted: {error.strerror}",
        "containers are served all the same; raise LimitNOFILE= of the unit, or see what takes the "
        "host's descriptors and memory",
    )
