"""Serves a host's NRI sockets: their locks, a session each, and what all sessions share.

It must not know what is answered: that is `handler`'s.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from cdi_courier import locks

from . import launched
from .connection import SYNCHRONIZE_GRACE, NriConnection
from .handler import Handler

if TYPE_CHECKING:
    import socket

    from cdi_courier.hookspecs import ServeContext
    from cdi_courier.injector import Injector
    from cdi_courier.settings import Settings

logger = logging.getLogger("cdi_courier.nri")

STUCK: Final = 10.0
"""Seconds at one piece of work; the longest, a list of all a node's containers, takes 1."""

_ALONE: Final = 0.2  # seconds that a session may take to begin before spec files are read beside it


class Server:
    """One session a socket, each in a thread of its own, and one thread that reads changed spec files.

    inherited: the connected socket of a plugin that the runtime has launched; then there is only this one.
    """

    def __init__(self, context: ServeContext, inherited: socket.socket | None = None) -> None:
        settings = context.settings.nri
        self._locks = contextlib.ExitStack()
        try:
            # A launched plugin takes them too: a daemon beside it would be the same plugin a second time.
            for path in settings.sockets:
                self._locks.enter_context(locks.runtime_socket(path))
        except BaseException:
            self._locks.close()
            raise
        self._reader = ThreadPoolExecutor(1, "cdi-reader")
        self._begun = threading.Event()
        self._registry = context.injector.registry
        self._inherited = inherited
        paths = settings.sockets if inherited is None else (launched.LABEL,)
        self._handlers = {path: Handler(context, path, self._reader) for path in paths}
        self._connections = [
            NriConnection(
                path,
                settings.plugin_name,
                settings.plugin_index,
                handler,
                reconnect_max=settings.reconnect_max,
                deadline_share=settings.deadline,
                # A plugin launched by a runtime before NRI 0.7 is never synchronized.
                synchronize_grace=SYNCHRONIZE_GRACE if inherited is None else math.inf,
                ignores=handler.ignores,
                observer=functools.partial(self._observe, handler),
            )
            for path, handler in self._handlers.items()
        ]
        self._failure: BaseException | None = None
        self._stuck = False

    def run(self) -> None:
        """Serve every socket until `stop`. The first connection that fails ends all and is raised."""
        threads = [
            threading.Thread(target=self._serve, args=(connection,), name=connection.path)
            for connection in self._connections
        ]
        with self._locks:
            for thread in threads:
                thread.start()
            self._reader.submit(self._read_first)
            for thread in threads:
                thread.join()
            self._reader.shutdown(wait=False, cancel_futures=True)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End every session; requests in hand are answered first."""
        self._begun.set()
        for connection in self._connections:
            connection.stop()

    def reconsider(self) -> None:
        """Let every session look at what has been chosen now."""
        for handler in self._handlers.values():
            handler.reconsider()

    def reload(self, settings: Settings, injector: Injector) -> None:
        """Let every session answer with these from its next request on."""
        if injector.registry is not self._registry:
            # So that the next container need not wait for it.
            injector.registry.snapshot()
            self._registry = injector.registry
        for handler in self._handlers.values():
            handler.reload(settings, injector)
        for connection in self._connections:
            connection.deadline_share = settings.nri.deadline
            connection.reconnect_max = settings.nri.reconnect_max

    def alive(self) -> bool:
        """Whether every session waits for work, or has not been at one piece of it for too long."""
        stuck = {c.path: busy for c in self._connections if (busy := c.busy()) > STUCK}
        if stuck and not self._stuck:
            for path, busy in stuck.items():
                logger.error("the session on %s has been at one piece of work for %.0f s", path, busy)
        self._stuck = bool(stuck)
        return not stuck

    def status(self) -> dict[str, dict[str, Any]]:
        """Socket → its session, as JSON."""
        return {
            connection.path: {
                **self._handlers[connection.path].status(),
                "sessions": connection.sessions,
                "latency": connection.latency.report(),
            }
            for connection in self._connections
        }

    def decisions(self) -> list[dict[str, Any]]:
        """The latest answers of all sessions."""
        return [decision for handler in self._handlers.values() for decision in handler.decisions()]

    def _observe(self, handler: Handler, state: str, since: float, cause: str) -> None:
        handler.observe(state, since, cause)
        if state == "active":
            self._begun.set()

    def _read_first(self) -> None:
        # So that the first container need not wait for it; but to be registered comes first, and threads
        # share the interpreter.
        self._begun.wait(_ALONE)
        self._registry.snapshot()

    def _serve(self, connection: NriConnection) -> None:
        try:
            if self._inherited is None:
                connection.run()
            else:
                connection.serve(self._inherited)
                if not connection.stopping:
                    launched.ended()
        except BaseException as error:  # noqa: BLE001 - raised by `run`, in the thread that asked
            self._failure = error
            self.stop()
