"""The CRI-O backend: a drop-in file that makes CRI-O run another backend.

It delivers nothing itself; its offer's ``via`` says who does. Its modules are imported where they are used:
the daemon loads every backend at its start, and this one has nothing to run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdi_courier.errors import HostError
from cdi_courier.hookspecs import API_VERSION, Backend, Offer, ServeContext, hookimpl

from . import NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.changes import ChangeSet
    from cdi_courier.hookspecs import Server
    from cdi_courier.host.model import Runtime
    from cdi_courier.injector import Injection
    from cdi_courier.settings import Settings


class CriODropInBackend:
    """Arranges; what delivers is the NRI backend, the runtime wrapper, or the hook."""

    name = NAME
    api_version = API_VERSION

    def offer(self, runtime: Runtime, settings: Settings) -> Offer:
        """As `offers.offer`."""
        # Before the import, which brings http and ssl: most hosts have no CRI-O.
        if runtime.kind != "cri-o":
            return Offer(NAME, "partial", "impossible", "it is for CRI-O only")
        from . import offers

        return offers.offer(runtime, settings)

    def plan(self, runtime: Runtime, settings: Settings) -> ChangeSet:
        """As `install.plan`."""
        from . import install

        return install.plan(runtime, settings)

    def plan_without_restart(self, runtime: Runtime, settings: Settings) -> ChangeSet:
        """As `install.plan`, by a way that needs no restart: the hook."""
        from . import install

        return install.plan(runtime, settings, restart=False)

    def dormant(self, settings: Settings) -> Sequence[Runtime]:
        """A CRI-O that does not run, as its files and its program describe it."""
        from . import dormant

        return dormant.describe(settings)

    def prove(self, runtime: Runtime, settings: Settings, *, canary: bool) -> str:
        """What shows that the way in place works: NRI's introduction, or a pod if that is allowed.

        Raises `CourierError` as `proof.nri`; ``CRI113``, ``CRI114`` as `canary.run`.
        """
        made = self.offer(runtime, settings)
        if made.needs != "nothing":
            raise HostError(
                "CRI113",
                f"nothing is in effect yet that could be tried: {made.reason}",
                "restart CRI-O, or see its log for why it did not start",
            )
        if made.via == "nri":
            from . import proof

            return proof.nri(runtime, settings, canary=canary)
        if not canary or made.fidelity != "full":
            return ""
        from . import canary as canary_

        return canary_.run(runtime.endpoint, settings.oci_hook.handler)

    def undeliverable(
        self, runtime: Runtime, injection: Injection, settings: Settings
    ) -> Sequence[tuple[str, str]]:
        """What the backend loses that really delivers, or would."""
        made = self.offer(runtime, settings)
        # The wrapper loses nothing.
        if made.via == "oci_hook" and made.fidelity == "full":
            return ()
        from . import ways

        delivering = ways.backend(made.via, settings)
        return () if delivering is None else delivering.undeliverable(runtime, injection, settings)

    def probe(self, _: Runtime, __: Settings) -> str:
        """Nothing to touch; `prove` does, after an installation."""
        return ""

    def serve(self, _: ServeContext) -> Server | None:
        """Nothing to run."""
        return None


@hookimpl
def cdi_courier_backend() -> Backend:
    """Return the backend."""
    return CriODropInBackend()
