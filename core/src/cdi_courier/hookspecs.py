"""What a plugin of cdi-courier implements: the pluggy hooks, and the objects they exchange.

A plugin is a module named by an entry point of the group ``cdi_courier``. It implements any of the hooks
below, marked with `hookimpl`. A backend's entry point bears the backend's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import pluggy
from attrs import field, frozen, validators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from cdi_courier.annotations import Dialect
    from cdi_courier.cdi.model import Spec
    from cdi_courier.changes import ChangeSet
    from cdi_courier.errors import PluginError
    from cdi_courier.generate.root import Root
    from cdi_courier.host.model import Runtime
    from cdi_courier.injector import Injection, Injector
    from cdi_courier.settings import Settings

PROJECT = "cdi_courier"

API_VERSION = 1
"""A backend made for another version is reported and skipped."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Fidelity = Literal["full", "partial"]
Needs = Literal["nothing", "install", "reload", "restart", "impossible"]


@frozen
class Offer:
    """What a backend could do for one runtime.

    fidelity: ``full`` if every kind of edit can be delivered, else ``partial``.
    needs: what must happen before it can serve: nothing; install (files only); a reload or restart of the
        runtime as well. ``impossible`` is never chosen.
    via: the backend that really delivers, where this one only arranges it; else ``""``.
    reason: one sentence for a person.
    warning: what will keep it from serving later on, one sentence; the daemon logs it and ``doctor`` shows
        it. ``""`` if nothing is known.
    """

    backend: str
    fidelity: Fidelity
    needs: Needs
    reason: str
    via: str = ""
    warning: str = ""


@frozen
class Choice:
    """What is chosen for one runtime.

    offers: of every backend that could be asked, the recommended one first.
    active, recommended: a backend's name, or None; reason and advice: why, one sentence each for a person.
    problems: backend's name → why it could not be asked, or does not exist.
    """

    runtime: Runtime
    offers: tuple[Offer, ...]
    active: str | None
    recommended: str | None
    reason: str
    advice: str
    problems: Mapping[str, PluginError]

    def offer(self, backend: str | None) -> Offer | None:
        """The offer of one backend."""
        return next((offer for offer in self.offers if offer.backend == backend), None)

    def is_served_by(self, backend: str) -> bool:
        """Whether this backend delivers: it is active, or what is active only arranges it."""
        active = self.offer(self.active)
        return self.active == backend or (active is not None and active.via == backend)


def _nothing_chosen(_: str, __: str) -> None:
    return None


def _nobody_looks() -> None:
    pass


@frozen
class ServeContext:
    """What a backend works with: the settings in force and the one object that answers requests.

    Both are those of the start; a server that is `Reloadable` is told when there are others.

    chosen: kind and socket of a runtime → what has been chosen for it; None as long as the host has not been
    described, or if it has no such runtime. The socket is CRI's or NRI's. Cheap, and safe in any thread.
    look: have the host described anew, because something has happened to a runtime. Returns at once.
    """

    settings: Settings
    injector: Injector
    chosen: Callable[[str, str], Choice | None] = _nothing_chosen
    look: Callable[[], None] = _nobody_looks


class Server(Protocol):
    """A backend at work. `run` has a thread of its own; the others are called from others, at any time."""

    def run(self) -> None:
        """Serve until `stop`; returning earlier, or raising, ends the daemon."""

    def stop(self) -> None:
        """Make `run` return soon. May be called more than once."""

    def reconsider(self) -> None:
        """What `ServeContext.chosen` says has changed."""

    def status(self) -> Mapping[str, Mapping[str, Any]]:
        """What is going on, as JSON: socket → ``state``, ``since`` (a `time.time`), ``counts`` and more.

        ``status`` and the metrics show these if they are there: ``counts`` (``requests``, ``injected``,
        ``skipped``, ``refused``, ``unresolved``, ``undeliverable``, ``missed``), ``refusals`` and ``skips``
        (error code → containers), ``kinds`` (CDI kind → devices injected), ``sessions`` (connections so far)
        and ``latency`` (`cdi_courier.latency.Histogram.report`). Counts only grow, but for ``missed``.
        """

    def decisions(self) -> Sequence[Mapping[str, Any]]:
        """The latest answers, the newest last, as JSON.

        ``time``, ``container`` (``NAMESPACE/POD/CONTAINER``), ``verdict``, ``devices``, ``cause``, ``code``,
        ``rule``, ``runtime`` and ``duration`` in seconds.
        """


@runtime_checkable
class Reloadable(Protocol):
    """A server that can change its settings at work. One that cannot keeps those of its start."""

    def reload(self, settings: Settings, injector: Injector) -> None:
        """Answer requests that begin from now on with these; those under way end with what they began with.

        Keys that need a restart (`cdi_courier.reloading`) have the values of before. Called from the main
        thread, not at once with another call of itself. An exception leaves the server as it was.
        """


@runtime_checkable
class Supervised(Protocol):
    """A server that knows whether it is stuck. One that does not is taken to be alive."""

    def alive(self) -> bool:
        """Whether what serves could serve now: it waits for work, or has not been long at what it does.

        Asked every few seconds from the main thread, so it must not wait. As long as it says no, the service
        manager's watchdog is not fed, and in the end the daemon is killed and started anew.
        """


class Backend(Protocol):
    """A way of delivery. Creating and asking it must be cheap and must touch nothing."""

    @property
    def name(self) -> str:
        """Its entry point's name."""

    @property
    def api_version(self) -> int:
        """The `API_VERSION` it was made for."""

    def offer(self, runtime: Runtime, settings: Settings) -> Offer:
        """What it could do for this runtime with these settings. Never raises for what a host lacks."""

    def plan(self, runtime: Runtime, settings: Settings) -> ChangeSet:
        """What installing it for this runtime changes; a set without files if there is nothing to do.

        Reads the runtime's files and writes none. Raises `cdi_courier.errors.CourierError` where it cannot
        be installed, with what a person can do instead.
        """

    def undeliverable(
        self, runtime: Runtime, injection: Injection, settings: Settings
    ) -> Sequence[tuple[str, str]]:
        """The edits that this way loses for this runtime, each with the reason; both for a person."""

    def probe(self, runtime: Runtime, settings: Settings) -> str:
        """Touch the runtime to be sure, which is never done unasked; what was seen, ``""`` if nothing.

        Raises `cdi_courier.errors.CourierError` that says why it does not work.
        """

    def serve(self, context: ServeContext) -> Server | None:
        """Acquire what serving needs (locks) and return the server; None if nothing has to run.

        Raises `cdi_courier.errors.CourierError` where it cannot serve.
        """


class Installer(Backend, Protocol):
    """What a backend may have beside: each method is looked up by its name, and each may be missing."""

    def plan_without_restart(self, runtime: Runtime, settings: Settings) -> ChangeSet:
        """As `plan`, if no restart is allowed (``install --no-restart``): by a way that needs none.

        A backend that has only one way leaves this out; its plan is then written, and the restart left to
        the administrator.
        """

    def dormant(self, settings: Settings) -> Sequence[Runtime]:
        """Runtimes that it can plan for although they do not run; their endpoint is ``""``.

        Asked only where the backend is named and no such runtime answers. Raises `CourierError`.
        """

    def prove(self, runtime: Runtime, settings: Settings, *, canary: bool) -> str:
        """After the installation: have the runtime show that it works; what was seen, ``""`` if nothing was.

        canary: whether a container may be created for it, which is removed again. Called only by ``install
        --apply``. Raises `CourierError` that says why it does not work.
        """


@frozen
class Generated:
    """A CDI spec that a generator has made.

    spec: its ``cdi_version`` does not matter, the lowest that fits is written.
    source: what it was made from, a few words without a time, for the file's first line.
    warnings: what the spec lacks and a person should know, one sentence each.
    """

    spec: Spec
    source: str = ""
    warnings: tuple[str, ...] = ()


@frozen
class Generator:
    """A maker of CDI specs, called as ``cdi-courier generate NAME``; raises ValueError if it could not be.

    name: lower-case letters, digits and dashes; not ``alias``, which is a command of its own.
    summary: for the command's help, a few words.
    generate: the host's files and the mode → the spec; reads and never writes. The same host gives the same
        spec, in the same order. Raises `cdi_courier.errors.CourierError` where there is nothing to make one
        of.
    modes: what `generate` may be asked for; the first is the default.
    """

    name: str = field(validator=validators.matches_re("(?!alias$)[a-z0-9][a-z0-9-]*"))
    summary: str = field(validator=validators.instance_of(str))
    generate: Callable[[Root, str], Generated]
    modes: tuple[str, ...] = field(
        default=("default",),
        validator=[
            validators.min_len(1),
            validators.deep_iterable(validators.instance_of(str), validators.instance_of(tuple)),
        ],
    )


@hookspec
def cdi_courier_backend() -> Backend:  # type: ignore[empty-body]
    """Return the plugin's backend."""


@hookspec
def cdi_courier_dialects() -> Iterable[Dialect]:  # type: ignore[empty-body]
    """Return annotation dialects, each under a name of its own."""


@hookspec
def cdi_courier_generators() -> Iterable[Generator]:  # type: ignore[empty-body]
    """Return generators of CDI specs, each under a name of its own."""
