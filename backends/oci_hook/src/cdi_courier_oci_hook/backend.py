"""The OCI hook backend: Podman precreate, a wrapper in front of containerd and Docker, live injection.

Its offers are real; those of ways that are not built yet say so and are impossible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdi_courier.cdi.edits import edits_to_dict
from cdi_courier.errors import DeliveryError
from cdi_courier.hookspecs import API_VERSION, Backend, Offer, ServeContext, hookimpl

from . import crio_hook, hook, podman, wrapping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.changes import ChangeSet
    from cdi_courier.hookspecs import Server
    from cdi_courier.host.model import Runtime
    from cdi_courier.injector import Injection
    from cdi_courier.settings import Settings

NAME: Final = "oci_hook"

WAYS: Final = ("precreate", "wrapper", "hook")
"""The entry points of this backend, best first."""

BUILT: Final = ("precreate", "wrapper", "hook")
"""Those of `WAYS` that can be installed and deliver."""


class OciHookBackend:
    """Edits a container's OCI config before it is created, or injects into it before it is started.

    built: those of `WAYS` that can be installed and deliver.
    """

    name = NAME
    api_version = API_VERSION

    def __init__(self, built: Sequence[str] = ()) -> None:
        self._built = built

    def offer(self, runtime: Runtime, settings: Settings) -> Offer:
        """The best way for this kind of runtime; it needs nothing where it is configured already."""
        way, offer = _best(runtime, settings)
        if way not in self._built:
            return Offer(NAME, offer.fidelity, "impossible", f"{offer.reason}; that is not built yet")
        if way == "precreate" and podman.is_installed(runtime):
            return Offer(NAME, offer.fidelity, "nothing", "its precreate hook is installed")
        return offer

    def plan(self, runtime: Runtime, settings: Settings) -> ChangeSet:
        """As `plan` of the runtime's own module. Raises `DeliveryError` ``DLV002`` for what has none yet."""
        if runtime.kind == "podman" and "precreate" in self._built:
            return podman.plan(runtime, settings)
        if runtime.kind == "containerd" and "wrapper" in self._built:
            from . import containerd

            return containerd.plan(runtime, settings)
        if runtime.kind == "docker" and "wrapper" in self._built:
            from . import docker

            return docker.plan(runtime, settings)
        if runtime.kind == "cri-o" and "hook" in self._built:
            return crio_hook.plan(runtime, settings)
        raise DeliveryError(
            "DLV002", f"backend {NAME} cannot be installed: {self.offer(runtime, settings).reason}"
        )

    def undeliverable(self, runtime: Runtime, injection: Injection, _: Settings) -> Sequence[tuple[str, str]]:
        """Of edits of a config nothing is lost; much of what is injected into a container that exists."""
        if runtime.kind != "cri-o":
            return ()
        return hook.undeliverable_edits(edits_to_dict(injection.edits))

    def probe(self, _: Runtime, __: Settings) -> str:
        """Nothing to touch."""
        return ""

    def serve(self, _: ServeContext) -> Server | None:
        """Nothing to run."""
        return None


@hookimpl
def cdi_courier_backend() -> Backend:
    """Return the backend."""
    return OciHookBackend(BUILT)


def _best(runtime: Runtime, settings: Settings) -> tuple[str, Offer]:
    if runtime.kind == "podman":
        return "precreate", Offer(
            NAME, "full", "install", "a precreate hook edits the config of Podman's containers"
        )
    if runtime.kind == "cri-o":
        return "hook", crio_hook.offer(runtime)
    return "wrapper", wrapping.offer(runtime, settings)
