"""The NRI backend: what it offers, how it is installed and served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdi_courier.hookspecs import API_VERSION, Backend, Offer, ServeContext, hookimpl

from . import NAME, launched, offers
from .probe import probe
from .server import Server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.changes import ChangeSet
    from cdi_courier.host.model import Runtime
    from cdi_courier.injector import Injection
    from cdi_courier.settings import Settings


class NriBackend:
    """Delivers through the runtime's NRI socket; needs nothing installed and nothing restarted."""

    name = NAME
    api_version = API_VERSION

    def offer(self, runtime: Runtime, settings: Settings) -> Offer:
        """What NRI's state on this runtime allows."""
        return offers.offer(runtime, settings)

    def undeliverable(
        self, runtime: Runtime, injection: Injection, settings: Settings
    ) -> Sequence[tuple[str, str]]:
        """What edits would lose; names, which the runtime resolves itself, lose nothing."""
        return offers.undeliverable(runtime, injection, settings)

    def probe(self, runtime: Runtime, settings: Settings) -> str:
        """Register a plugin for a moment and say how the runtime introduces itself."""
        socket = runtime.get("nri_socket")
        return probe(socket, settings.probe.timeout) if socket else ""

    def plan(self, runtime: Runtime, settings: Settings) -> ChangeSet:
        """What enables NRI in the runtime. Raises `CourierError` ``NRI101`` to ``NRI106``."""
        # Imported here because it is for commands only.
        from . import install

        return install.plan(runtime, settings)

    def serve(self, context: ServeContext) -> Server:
        """Take the lock of every socket and return the server. Raises `HostError` if one is taken."""
        return Server(context, launched.adopt())


@hookimpl
def cdi_courier_backend() -> Backend:
    """Return the NRI backend."""
    return NriBackend()
