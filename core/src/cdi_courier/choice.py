"""From the backends' offers to the one that is run, with the reasons. It asks nobody and starts nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from cdi_courier.errors import PluginError, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdi_courier.hookspecs import Offer
    from cdi_courier.plugins import Plugins
    from cdi_courier.settings import Settings


@frozen
class Choice:
    """active: the backend to run now, or None; offers: all of them, best first."""

    active: str | None
    offers: tuple[Offer, ...]


def gather(plugins: Plugins, settings: Settings) -> tuple[dict[str, Offer], dict[str, PluginError]]:
    """Every backend's offer; a backend that fails to make one is a problem of its own."""
    offers, problems = {}, {}
    for name, backend in plugins.backends.items():
        try:
            offers[name] = backend.offer(settings)
        except Exception as error:  # noqa: BLE001 - foreign code
            problems[name] = PluginError(
                "PLG002",
                f"backend {name} failed to say what it can do: {quoted(f'{type(error).__name__}: {error}')}",
                "report it to its author, or name it in [backends] disabled",
            )
    return offers, problems


def choose(offers: Mapping[str, Offer], order: Sequence[str]) -> Choice:
    """Active is, among the offers that need nothing, the first by configured order, then by fidelity."""
    rank = {name: position for position, name in enumerate(order)}

    def by_order(offer: Offer) -> tuple[bool, int, bool, str]:
        ready = offer.needs == "nothing"
        return (not ready, rank.get(offer.backend, len(rank)), offer.fidelity != "full", offer.backend)

    ranked = tuple(sorted(offers.values(), key=by_order))
    active = ranked[0].backend if ranked and ranked[0].needs == "nothing" else None
    return Choice(active, ranked)


def forced(name: str, plugins: Plugins, offers: Mapping[str, Offer]) -> str:
    """`name`, if that backend can serve; else `PluginError` ``PLG003``, which says why not."""
    offer = offers.get(name)
    if offer is not None:
        if offer.needs == "nothing":
            return name
        raise PluginError(
            "PLG003", f"backend {name} cannot serve: {offer.reason}", f"it needs: {offer.needs}"
        )
    if name in plugins.disabled:
        raise PluginError("PLG003", f"backend {name} is disabled", "take it out of [backends] disabled")
    if name in plugins.problems:
        raise PluginError("PLG003", f"backend {name} cannot serve: {plugins.problems[name].message}")
    installed = ", ".join(plugins.backends) or "none"
    raise PluginError(
        "PLG003",
        f"there is no backend {quoted(name)}; installed: {installed}",
        "install the package that brings it",
    )
