"""The CRI-O backend: a drop-in file that makes CRI-O run another backend.

Its offers are real; writing the drop-in is not built yet, and until it is they say so and are impossible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdi_courier.errors import DeliveryError
from cdi_courier.hookspecs import API_VERSION, Backend, Offer, ServeContext, hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.changes import ChangeSet
    from cdi_courier.hookspecs import Server
    from cdi_courier.host.model import Runtime
    from cdi_courier.injector import Injection
    from cdi_courier.settings import Settings

NAME: Final = "cri_o_drop_in"

MODES: Final = ("nri", "handler", "hook")
"""What CRI-O can be made to run, best first."""

_NRI_SINCE: Final = (1, 26, 0)
_PRECEDING: Final = (1, 20, 0)


class CriODropInBackend:
    """Arranges; what delivers is the NRI backend, the runtime wrapper, or the hook.

    built: the modes that can be installed.
    """

    name = NAME
    api_version = API_VERSION

    def __init__(self, built: Sequence[str] = ()) -> None:
        self._built = built

    def offer(self, runtime: Runtime, settings: Settings) -> Offer:
        """The best mode that CRI-O's version has, or the one that ``[cri_o_drop_in] mode`` demands."""
        if runtime.kind != "cri-o":
            return _impossible("it is for CRI-O only")
        if runtime.get("nri") == "on":
            return _impossible("NRI is on already; there is nothing to arrange")
        version = runtime.version_tuple
        if version is None or version < _PRECEDING:
            return _impossible(f"CRI-O {runtime.version or 'of unknown version'} is not supported")
        wanted = settings.cri_o_drop_in.mode
        offers = {
            "nri": Offer(NAME, "full", "restart", "a drop-in turns NRI on", "nri"),
            "handler": Offer(
                NAME, "full", "restart", "a drop-in registers the runtime wrapper as a handler", "oci_hook"
            ),
            "hook": Offer(
                NAME, "partial", "install", "a hook injects into the created container", "oci_hook"
            ),
        }
        if version < _NRI_SINCE:
            del offers["nri"]
        if wanted != "auto":
            offers = {mode: offer for mode, offer in offers.items() if mode == wanted}
            if not offers:
                return _impossible(
                    f'[cri_o_drop_in] mode = "{wanted}", and CRI-O {runtime.version} has no NRI'
                )
        for mode, offer in offers.items():
            if mode in self._built:
                return offer
        reason = next(iter(offers.values())).reason
        return _impossible(f"{reason}; installing that is not built yet")

    def plan(self, runtime: Runtime, settings: Settings) -> ChangeSet:
        """Nothing can be installed yet. Raises `DeliveryError` ``DLV002``."""
        raise DeliveryError(
            "DLV002", f"backend {NAME} cannot be installed: {self.offer(runtime, settings).reason}"
        )

    def undeliverable(self, _: Runtime, __: Injection, ___: Settings) -> Sequence[tuple[str, str]]:
        """It delivers nothing itself."""
        return ()

    def probe(self, _: Runtime, __: Settings) -> str:
        """Nothing to touch."""
        return ""

    def serve(self, _: ServeContext) -> Server | None:
        """Nothing to run."""
        return None


@hookimpl
def cdi_courier_backend() -> Backend:
    """Return the backend."""
    return CriODropInBackend()


def _impossible(reason: str) -> Offer:
    return Offer(NAME, "partial", "impossible", reason)
