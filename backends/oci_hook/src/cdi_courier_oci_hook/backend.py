"""The OCI hook backend: Podman precreate, runtime wrapper and live injection.

It is not built yet, and its offer says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdi_courier.hookspecs import API_VERSION, Backend, Offer, ServeContext, hookimpl

if TYPE_CHECKING:
    from cdi_courier.hookspecs import Server
    from cdi_courier.settings import Settings

NAME = "oci_hook"


class OciHookBackend:
    """Cannot serve in this version."""

    name = NAME
    api_version = API_VERSION

    def offer(self, _: Settings) -> Offer:
        """Impossible, so that it is never chosen."""
        return Offer(NAME, "partial", "impossible", "not built yet")

    def serve(self, _: ServeContext) -> Server | None:
        """Nothing to run."""
        return None


@hookimpl
def cdi_courier_backend() -> Backend:
    """Return the backend."""
    return OciHookBackend()
