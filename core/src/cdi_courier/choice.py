"""From the backends' offers to the one that serves a runtime, and the one that would serve it best.

It asks only the backends, starts nothing and installs nothing. Two answers per runtime (docs/choosing.md):
*active* can serve now; *recommended* would deliver most, and may have to be installed first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdi_courier.errors import PluginError, quoted
from cdi_courier.hookspecs import Choice, Offer
from cdi_courier.host import configured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.host.model import Kind, Runtime
    from cdi_courier.plugins import Plugins
    from cdi_courier.settings import RuntimeSettings, Settings

_NEEDS = ("nothing", "install", "reload", "restart", "impossible")
_AUTO = "auto"


def choose_all(plugins: Plugins, runtimes: Sequence[Runtime], settings: Settings) -> tuple[Choice, ...]:
    """`choose` for every runtime."""
    return tuple(choose(plugins, runtime, settings) for runtime in runtimes)


def choose(plugins: Plugins, runtime: Runtime, settings: Settings) -> Choice:
    """Ask every backend what it could do for the runtime and decide.

    Settings decide first: a runtime that is ignored has neither; one that ``[runtimes]`` or ``[backends]
    choose`` gives to a backend has that or none. Else active is, among the offers that need nothing, the
    first in ``[backends] order``, then by fidelity; recommended goes by fidelity, then order, then need.
    """
    offers, problems = gather(plugins, runtime, settings)
    rank = {name: position for position, name in enumerate(settings.backends.order)}

    def order(offer: Offer) -> int:
        return rank.get(offer.backend, len(rank))

    best_first = tuple(
        sorted(
            offers.values(),
            key=lambda o: (
                o.needs == "impossible",
                o.fidelity != "full",
                order(o),
                _NEEDS.index(o.needs),
                o.backend,
            ),
        )
    )
    mine = configured.table(runtime, settings)
    if mine is not None and mine.ignore:
        return Choice(runtime, best_first, None, None, "[runtimes] says to ignore this runtime", "", problems)
    wanted, why = _wanted(settings, mine)
    if wanted:
        if wanted not in offers:
            problems[wanted] = missing(wanted, plugins)
        candidates = tuple(offer for offer in best_first if offer.backend == wanted)
    else:
        candidates = best_first
    ready = sorted(
        (offer for offer in candidates if offer.needs == "nothing"),
        key=lambda o: (order(o), o.fidelity != "full", o.backend),
    )
    possible = [offer for offer in candidates if offer.needs != "impossible"]
    active = ready[0].backend if ready else None
    recommended = possible[0].backend if possible else None
    return Choice(
        runtime,
        best_first,
        active,
        recommended,
        _reason(ready, candidates, why, problems.get(wanted)),
        _advice(active, possible, runtime.kind),
        problems,
    )


def gather(
    plugins: Plugins, runtime: Runtime, settings: Settings
) -> tuple[dict[str, Offer], dict[str, PluginError]]:
    """Every backend's offer; a backend that fails to make one, or was skipped, is a problem of its own."""
    offers: dict[str, Offer] = {}
    problems = dict(plugins.problems)
    for name, backend in plugins.backends.items():
        try:
            offer = backend.offer(runtime, settings)
            if offer.needs not in _NEEDS or offer.backend != name:
                raise ValueError(f"offer {offer!r} is not one of {name}")  # noqa: TRY301 - foreign code
            offers[name] = offer
        except Exception as error:  # noqa: BLE001 - foreign code
            problems[name] = PluginError(
                "PLG002",
                f"backend {name} failed to say what it can do: {quoted(f'{type(error).__name__}: {error}')}",
                "report it to its author, or name it in [backends] disabled",
            )
    for name in plugins.disabled:
        problems[name] = _disabled(name)
    return offers, problems


def missing(name: str, plugins: Plugins) -> PluginError:
    """Why there is no backend of this name: ``PLG003``."""
    if name in plugins.disabled:
        return _disabled(name)
    if name in plugins.problems:
        return PluginError("PLG003", f"backend {name} cannot serve: {plugins.problems[name].message}")
    installed = ", ".join(plugins.backends) or "none"
    return PluginError(
        "PLG003",
        f"there is no backend {quoted(name)}; installed: {installed}",
        "install the package that brings it",
    )


def _disabled(name: str) -> PluginError:
    return PluginError("PLG003", f"backend {name} is disabled", "take it out of [backends] disabled")


def _wanted(settings: Settings, mine: RuntimeSettings | None) -> tuple[str, str]:
    """The backend that settings demand, and which setting; empty if they demand none."""
    if mine is not None and mine.backend:
        return mine.backend, f"[runtimes] demands {mine.backend}"
    if settings.backends.choose != _AUTO:
        return settings.backends.choose, f"[backends] choose demands {settings.backends.choose}"
    return "", ""


def _reason(
    ready: Sequence[Offer], candidates: Sequence[Offer], why: str, problem: PluginError | None
) -> str:
    if ready:
        return "; ".join(filter(None, (why, ready[0].reason)))
    if problem is not None:
        return f"{why}; {problem.message}"
    reasons = "; ".join(f"{offer.backend}: {offer.reason}" for offer in candidates)
    return "; ".join(filter(None, (why, f"no backend can serve now ({reasons or 'none is installed'})")))


def _advice(active: str | None, possible: Sequence[Offer], kind: Kind) -> str:
    if not possible:
        return "no installed backend can serve this runtime"
    best = possible[0]
    if best.backend == active:
        return "nothing to do"
    # Docker ends its containers with itself; a runtime of Kubernetes leaves them to its shims.
    stay = (
        'only with "live-restore" do running containers stay'
        if kind == "docker"
        else "running containers stay"
    )
    effect = {
        "nothing": "it could serve at once",
        "install": "files are written, nothing is restarted",
        "reload": "files are written and the runtime is reloaded",
        "restart": f"files are written and the runtime is restarted; {stay}",
    }[best.needs]
    return f"cdi-courier install --backend {best.backend}: {best.reason}; {effect}"
