"""The backend ``bundle_socket``: edits OCI configs for whoever starts runc or crun by a program of their own.

A launcher connects to ``bundle.sock`` in ``[service] state_dir``, writes a container's ``config.json`` and
shuts down its side; the answer is one JSON object: ``config``, the one to use, or ``error``, why the
container must not start. `bundle` is such a launcher's half. It parses neither annotations nor CDI files:
the injector that it is handed does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cdi_courier import editing
from cdi_courier.cdi.edits import edits_to_dict
from cdi_courier.errors import CourierError, DeliveryError, HostError
from cdi_courier.hookspecs import API_VERSION, Backend, Offer, ServeContext, hookimpl
from cdi_courier.injector import Injection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdi_courier.changes import ChangeSet
    from cdi_courier.hookspecs import Server
    from cdi_courier.host.model import Runtime
    from cdi_courier.injector import Injector
    from cdi_courier.settings import Settings

logger = logging.getLogger("cdi_courier.bundle_socket")

NAME: Final = "bundle_socket"
SOCKET: Final = "bundle.sock"

_PATIENCE: Final = 5.0  # seconds for a launcher that neither writes nor reads
_LARGEST: Final = 16 * 1024 * 1024  # bytes; a config with a thousand mounts has 0.3 MiB
_KEPT: Final = 100
_BREATH: Final = 0.2  # seconds until another attempt at a connection that cannot be accepted
# Why accepting fails and may not fail the next time. A server that returns ends the daemon.
_SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED})


class BundleSocketBackend:
    """Creating and asking it touches nothing; `serve` alone makes the socket."""

    name = NAME
    api_version = API_VERSION

    def offer(self, runtime: Runtime, _: Settings) -> Offer:
        """Nothing for any runtime that the host describes: they do not ask over our socket."""
        return Offer(
            NAME, "full", "impossible", f"{runtime.kind} does not ask over its socket; it is for launchers"
        )

    def plan(self, runtime: Runtime, settings: Settings) -> ChangeSet:
        """Nothing can be installed. Raises `DeliveryError` ``SER004``."""
        raise DeliveryError(
            "SER004", f"backend {NAME} cannot be installed: {self.offer(runtime, settings).reason}"
        )

    def undeliverable(self, _: Runtime, __: Injection, ___: Settings) -> Sequence[tuple[str, str]]:
        """A config can say everything that CDI can."""
        return ()

    def probe(self, _: Runtime, __: Settings) -> str:
        """No runtime to touch."""
        return ""

    def serve(self, context: ServeContext) -> Server:
        """Make the socket. Raises `HostError` ``SER003``."""
        path = Path(context.settings.service.state_dir) / SOCKET
        listener = socket.socket(socket.AF_UNIX)
        try:
            path.unlink(missing_ok=True)  # the daemon holds the folder's lock, so nobody listens there
            listener.bind(str(path))
            path.chmod(0o600)  # before `listen`, until which nobody can connect
            listener.listen(16)
        except OSError as error:
            listener.close()
            raise HostError(
                "SER003",
                f"the socket {path} cannot be made: {error.strerror or error}",
                "run as root, or set [service] state_dir to a short path",
            ) from None
        return BundleServer(path, listener, context.injector)


@hookimpl
def cdi_courier_backend() -> Backend:
    """Return the backend."""
    return BundleSocketBackend()


class BundleServer:
    """One launcher at a time; what is asked takes a millisecond, and no launcher is waited for long."""

    def __init__(self, path: Path, listener: socket.socket, injector: Injector) -> None:
        self._path = path
        self._listener = listener
        self._injector = injector
        self._ending = threading.Event()
        self._since = time.time()
        self._counts = dict.fromkeys(("requests", "injected", "skipped", "refused"), 0)
        self._decisions: deque[Mapping[str, Any]] = deque(maxlen=_KEPT)

    def run(self) -> None:
        """Answer whoever connects, until `stop`."""
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    if self._ending.is_set() or error.errno not in _SCARCE:
                        break
                    self._ending.wait(_BREATH)
                    continue
                with connection:
                    self._converse(connection)
        self._path.unlink(missing_ok=True)

    def stop(self) -> None:
        """End the accept; may be called more than once, and after the end."""
        self._ending.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def reconsider(self) -> None:
        """What is chosen for runtimes does not matter here."""

    def reload(self, _: Settings, injector: Injector) -> None:
        """Answer the next launcher by other settings (`cdi_courier.hookspecs.Reloadable`)."""
        self._injector = injector

    def status(self) -> dict[str, dict[str, Any]]:
        """The one socket."""
        return {str(self._path): {"state": "active", "since": self._since, "counts": dict(self._counts)}}

    def decisions(self) -> list[Mapping[str, Any]]:
        """The latest answers."""
        return list(self._decisions)

    def _converse(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_PATIENCE)
            data = _read(connection)
            connection.sendall(json.dumps(self._answer(data)).encode())
        except OSError as error:
            logger.warning("a launcher has gone, or is too slow: %s", error)
        except Exception:
            # A launcher that gets no answer starts no container, and the next one is served all the same.
            logger.exception("a launcher could not be answered")

    def _answer(self, data: bytes) -> dict[str, Any]:
        self._counts["requests"] += 1
        try:
            config, names = self._edit(data)
        except CourierError as error:
            logger.warning("refused: %s", error)
            self._decide("refused", (), str(error), error.code)
            return {"error": str(error)}
        except (ValueError, RecursionError):
            self._decide("refused", (), "the config is no JSON")
            return {"error": "the config is no JSON"}
        if names:
            logger.info("injected: %s", ",".join(names))
            self._decide("injected", names, "")
        return {"config": config}

    def _edit(self, data: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
        config = json.loads(data)
        # A launcher's containers are local: what is in the config was written by whoever starts it.
        result = self._injector.inject(editing.request_of(config, "local"))
        if result is None:
            return config, ()
        if isinstance(result, Injection):
            edited = editing.put_in(config, result.names, edits_to_dict(result.edits))
        else:
            edited = editing.skip(config, result.error)
            logger.warning("skipped: %s", result.error)
            self._decide("skipped", result.names, str(result.error), result.error.code)
        return edited.config, edited.names

    def _decide(self, verdict: str, names: Sequence[str], cause: str, code: str = "") -> None:
        self._counts[verdict] += 1
        self._decisions.append(
            {
                "time": time.time(),
                "verdict": verdict,
                "devices": list(names),
                "cause": cause,
                "code": code,
            }
        )


def _read(connection: socket.socket) -> bytes:
    """All that comes until the other side is shut down; `OSError` if that is too much or too late."""
    deadline = time.monotonic() + _PATIENCE
    data = bytearray()
    while part := connection.recv(65536):
        data += part
        if len(data) > _LARGEST or time.monotonic() > deadline:
            raise OSError(f"more than {_LARGEST} bytes, or not within {_PATIENCE:g} s")
    return bytes(data)
