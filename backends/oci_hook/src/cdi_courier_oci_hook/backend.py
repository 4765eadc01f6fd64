"""The OCI hook backend: Podman precreate, a wrapper in front of containerd and Docker, live injection.

It chooses the way by the kind of the runtime; each way's own module knows how, and is imported where it is
used: the daemon loads every backend at its start, and this one has nothing to run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdi_courier.hookspecs import API_VERSION, Backend, Offer, ServeContext, hookimpl

from . import NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.changes import ChangeSet
    from cdi_courier.hookspecs import Server
    from cdi_courier.host.model import Runtime
    from cdi_courier.injector import Injection
    from cdi_courier.settings import Settings


class OciHookBackend:
    """Edits a container's OCI config before it is created, or injects into it before it is started."""

    name = NAME
    api_version = API_VERSION

    def offer(self, runtime: Runtime, settings: Settings) -> Offer:
        """The best way for this kind of runtime; it needs nothing where it is configured already."""
        if runtime.kind == "podman":
            return _podman_offer(runtime)
        if runtime.kind == "cri-o":
            from . import crio_hook

            return crio_hook.offer(runtime)
        from . import wrapping

        return wrapping.offer(runtime, settings)

    def plan(self, runtime: Runtime, settings: Settings) -> ChangeSet:
        """As `plan` of the runtime's own module. Raises `CourierError`."""
        if runtime.kind == "podman":
            from . import podman

            return podman.plan(runtime, settings)
        if runtime.kind == "cri-o":
            from . import crio_hook

            return crio_hook.plan(runtime, settings)
        if runtime.kind == "docker":
            from . import docker

            return docker.plan(runtime, settings)
        from . import containerd

        return containerd.plan(runtime, settings)

    def undeliverable(self, runtime: Runtime, injection: Injection, _: Settings) -> Sequence[tuple[str, str]]:
        """Of edits of a config nothing is lost; much of what is injected into a container that exists."""
        if runtime.kind != "cri-o":
            return ()
        from cdi_courier.cdi.edits import edits_to_dict

        from . import hook

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
    return OciHookBackend()


def _podman_offer(runtime: Runtime) -> Offer:
    from . import podman

    if podman.is_installed(runtime):
        return Offer(NAME, "full", "nothing", "its precreate hook is installed")
    return Offer(NAME, "full", "install", "a precreate hook edits the config of Podman's containers")
