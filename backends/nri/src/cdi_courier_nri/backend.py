"""The NRI backend: answers CreateContainer out of the injector. It parses no annotation and no CDI file."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

from cdi_courier import locks
from cdi_courier.errors import CourierError, DeliveryError, quoted
from cdi_courier.hookspecs import API_VERSION, Backend, Offer, ServeContext, hookimpl
from cdi_courier.injector import Skipped
from cdi_courier.request import ContainerRequest

from . import adjustment, runtimes
from .connection import NriConnection

if TYPE_CHECKING:
    from cdi_courier.hookspecs import Server
    from cdi_courier.settings import Settings

    from .session import Configured, CreateContainer

logger = logging.getLogger("cdi_courier.nri")

NAME = "nri"


class NriBackend:
    """Delivers through the runtime's NRI socket; needs nothing installed and nothing restarted."""

    name = NAME
    api_version = API_VERSION

    def offer(self, settings: Settings) -> Offer:
        """Always possible: a socket that is not there is waited for."""
        sockets = ", ".join(settings.nri.sockets)
        return Offer(
            NAME, "full", "nothing", f"a plugin on {sockets}, which is waited for while it is absent"
        )

    def serve(self, context: ServeContext) -> Server:
        """Take the lock of every socket and return the server. Raises `HostError` if one is taken."""
        return _Server(context)


@hookimpl
def cdi_courier_backend() -> Backend:
    """Return the NRI backend."""
    return NriBackend()


class _Server:
    """One session a socket, each in a thread of its own."""

    def __init__(self, context: ServeContext) -> None:
        settings = context.settings.nri
        self._locks = contextlib.ExitStack()
        try:
            for path in settings.sockets:
                self._locks.enter_context(locks.runtime_socket(path))
        except BaseException:
            self._locks.close()
            raise
        self._connections = [
            NriConnection(
                path,
                settings.plugin_name,
                settings.plugin_index,
                Handler(context),
                reconnect_max=settings.reconnect_max,
                deadline_share=settings.deadline,
            )
            for path in settings.sockets
        ]
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Serve every socket until `stop`. The first connection that fails ends all and is raised."""
        threads = [
            threading.Thread(target=self._serve, args=(connection,), name=connection.path)
            for connection in self._connections
        ]
        with self._locks:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End every session; requests in hand are answered first."""
        for connection in self._connections:
            connection.stop()

    def _serve(self, connection: NriConnection) -> None:
        try:
            connection.run()
        except BaseException as error:  # noqa: BLE001 - raised by `run`, in the thread that asked
            self._failure = error
            self.stop()


class Handler:
    """One connection's answers."""

    def __init__(self, context: ServeContext) -> None:
        self._injector = context.injector
        self._setting = context.settings.nri.delivery
        self._dirs = context.settings.cdi.dirs
        # Until Configure tells the runtime, nothing is known that would allow names.
        self._delivery: runtimes.Delivery = "names" if self._setting == "names" else "edits"
        self._why = "the runtime has not introduced itself"

    def configured(self, info: Configured) -> None:
        """Decide what this runtime is sent."""
        if self._setting == "auto":
            self._delivery, self._why = runtimes.delivery(info.runtime_name, info.runtime_version, self._dirs)
        else:
            self._delivery, self._why = self._setting, f'[nri] delivery = "{self._setting}"'
        logger.info("delivering by %s: %s", self._delivery, self._why)

    def synchronized(self, pods: list[Any], containers: list[Any]) -> None:
        """Existing containers cannot be given devices; only their number is noted."""
        logger.info("synchronized: %d pods, %d containers exist already", len(pods), len(containers))

    def create_container(self, event: CreateContainer, _: float) -> bytes:
        """The reply for one container; raises `CourierError` for a refusal, after logging it."""
        pod, container = event.pod, event.container
        request = ContainerRequest(
            pod.annotations, namespace=pod.namespace, pod=pod.name, container=container.name
        )
        try:
            injection = self._injector.inject(request)
            if injection is None:
                return b""
            if isinstance(injection, Skipped):
                logger.warning("skipped %s: %s", _who(request), injection.error)
                return adjustment.skipped(injection.error.code)
            if self._delivery != "names":
                raise DeliveryError(
                    "DLV001",
                    f"this runtime would have to be sent edits ({self._why}), and edits are not built yet",
                    "if it honours CDI names over NRI and reads the same directories, "
                    'set [nri] delivery = "names"',
                )
        except CourierError as error:
            logger.warning("refused %s: %s", _who(request), error)
            raise
        logger.info("injected %s: %s", _who(request), ",".join(injection.names))
        return adjustment.by_names(injection.names, {device.name for device in container.CDI_devices})


def _who(request: ContainerRequest) -> str:
    # One harmless line: a name with a line feed must not forge a second record.
    return quoted(f"{request.namespace}/{request.pod}/{request.container}", None)[1:-1]
