"""``cdi-courier install``: have a backend set up for a runtime, by the backend's own plan."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from attrs import frozen

from cdi_courier import changes, choice
from cdi_courier.cli import held, settings_of
from cdi_courier.cli.installing import modes, run_command, show
from cdi_courier.errors import CourierError, HostError, PluginError, quoted
from cdi_courier.host import configured
from cdi_courier.plugins import Plugins, discover

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdi_courier.changes import ChangeSet
    from cdi_courier.hookspecs import Backend
    from cdi_courier.host.model import Host, Runtime
    from cdi_courier.settings import Settings

T = TypeVar("T")

_READY_TIMEOUT = 15.0  # seconds from the restart until the runtime serves as planned
_READY_PAUSE = 0.25


@frozen
class _Job:
    """One backend for one runtime, and what that changes."""

    backend: Backend
    runtime: Runtime
    plan: ChangeSet


@click.command()
@click.option("--backend", metavar="NAME", help="Set this one up, instead of the recommended one.")
@click.option("--runtime", "key", metavar="KEY", help="Only this runtime, by its kind or endpoint.")
@click.option("--dry-run", is_flag=True, help="Only show what would be written.")
@click.option("--apply", "restart", is_flag=True, help="Also restart the runtime, and look at the result.")
@click.option(
    "--no-restart",
    is_flag=True,
    help="Nothing may be restarted: use a way that needs none if there is one; else only print the command.",
)
@click.option(
    "--canary",
    is_flag=True,
    help="With --apply: have the runtime create a pod and remove it again, where only that proves that "
    "it works; if it does not, what this call has written is taken back.",
)
@click.option("--force", is_flag=True, help="Write also over files that were changed since.")
@click.option("--systemd", is_flag=True, help="Write the daemon's unit instead, where no package has.")
@click.pass_context
def install(
    context: click.Context,
    backend: str | None,
    key: str | None,
    *,
    dry_run: bool,
    restart: bool,
    no_restart: bool,
    canary: bool,
    force: bool,
    systemd: bool,
) -> None:
    """Set the recommended backend up for each runtime of this host.

    Shows what changes, writes it, and prints the command that makes it effective. `cdi-courier uninstall`
    puts every byte back.
    """
    modes(dry_run=dry_run, apply=restart, no_restart=no_restart)
    if canary and not restart:
        raise click.UsageError("--canary needs --apply: there is nothing to try before the restart")
    if systemd:
        from cdi_courier.cli import systemd as unit

        if backend is not None or key is not None or canary:
            raise click.UsageError("--systemd goes with neither --backend nor --runtime nor --canary")
        unit.install(dry_run=dry_run, start=restart, force=force)
        return
    settings = settings_of(context)
    plugins = discover(settings.backends.disabled)
    if backend is not None and backend not in {*plugins.backends, *plugins.problems, *plugins.disabled}:
        known = ", ".join(plugins.backends) or "none"
        raise click.UsageError(f"there is no backend {quoted(backend)}; installed: {known}")
    host = _describe(settings)
    for problem in host.problems:
        click.echo(f"warning: {problem}", err=True)
    every = [*host.runtimes]
    if backend is not None:
        every += _dormant(_backend(plugins, backend), settings, {r.kind for r in every})
    runtimes = [r for r in every if key in (None, r.key, r.endpoint)]
    if key is not None and not runtimes:
        known = ", ".join(r.key for r in every) or "none"
        raise click.UsageError(f"there is no runtime {quoted(key)} here; found: {known}")
    if not runtimes:
        raise HostError(
            "CHG010", "no container runtime was found", "start it, or name its endpoint in [runtimes]"
        )
    failed = served = False
    unfit: dict[str, CourierError] = {}
    for runtime in runtimes:
        job = None
        try:
            job = _plan(plugins, runtime, settings, backend, may_restart=not no_restart)
            if job is not None:
                _do(job, settings, dry_run=dry_run, restart=restart, canary=canary, force=force)
                served = True
        except CourierError as error:
            # One runtime's trouble is not the others'.
            if backend and not key and not job and _is_unfit(plugins, runtime, settings, backend):
                unfit[runtime.key] = error
            else:
                click.echo(f"{runtime.key}: {error}", err=True)
                failed = True
    for name, reason in unfit.items():
        # Podman beside CRI-O is no failure to set CRI-O up, unless it is all that is here.
        click.echo(f"{name}: {'left alone: ' if served else ''}{reason}", err=True)
    context.exit(1 if failed or (unfit and not served) else 0)


# --- what others decide --------------------------------------------------------------------------------


def _describe(settings: Settings) -> Host:
    from cdi_courier.host.describe import describe

    return describe(settings)


def _recommended(plugins: Plugins, runtime: Runtime, settings: Settings) -> str:
    """The name of the backend that is best for the runtime. Raises `PluginError` if none can serve it."""
    found = choice.choose(plugins, runtime, settings)
    if found.recommended is None:
        raise PluginError("PLG004", f"{found.advice}: {found.reason}", "install one, such as cdi-courier-nri")
    return found.recommended


def _backend(plugins: Plugins, name: str) -> Backend:
    """The backend of this name. Raises `PluginError` ``PLG003``."""
    if name not in plugins.backends:
        raise choice.missing(name, plugins)
    return plugins.backends[name]


# --- one runtime ---------------------------------------------------------------------------------------


def _dormant(backend: Backend, settings: Settings, running: set[str]) -> list[Runtime]:
    """Runtimes of kinds of which none runs, and for which the backend can plan all the same."""
    describe = getattr(backend, "dormant", None)
    found = () if describe is None else _asked(backend, "describe what does not run", describe, settings)
    return [runtime for runtime in found if runtime.kind not in running]


def _plan(
    plugins: Plugins, runtime: Runtime, settings: Settings, asked: str | None, *, may_restart: bool
) -> _Job | None:
    own = configured.table(runtime, settings)
    if own is not None and own.ignore:
        click.echo(f"{runtime.key}: left alone, because [runtimes] says ignore")
        return None
    name = asked or (own.backend if own else "") or _recommended(plugins, runtime, settings)
    backend = _backend(plugins, name)
    plan = backend.plan
    if not may_restart:
        plan = getattr(backend, "plan_without_restart", plan)
    return _Job(backend, runtime, _asked(backend, "plan", plan, runtime, settings))


def _is_unfit(plugins: Plugins, runtime: Runtime, settings: Settings, name: str) -> bool:
    """Whether the backend says of itself that it cannot serve the runtime, whatever is installed."""
    offer = choice.gather(plugins, runtime, settings)[0].get(name)
    return offer is not None and offer.needs == "impossible"


def _asked(backend: Backend, what: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """What the backend answers. Raises `CourierError`; ``PLG002`` for whatever else it raises."""
    try:
        return call(*arguments, **named)
    except CourierError:
        raise
    except Exception as error:  # noqa: BLE001 - foreign code
        raise PluginError(
            "PLG002",
            f"backend {backend.name} failed to {what}: {quoted(f'{type(error).__name__}: {error}')}",
            "report it to its author, or name another with --backend",
        ) from None


def _do(job: _Job, settings: Settings, *, dry_run: bool, restart: bool, canary: bool, force: bool) -> None:
    plan = job.plan
    show(changes.preview(plan, folder=changes.FOLDER, force=force))
    if dry_run:
        for note in plan.notes:
            click.echo(f"{plan.runtime}: {note}")
        if plan.restart:
            click.echo(f"{plan.runtime}: then: {plan.restart}")
        return
    steps = changes.apply(plan, folder=changes.FOLDER, force=force)
    for step in steps:
        click.echo(f"{plan.runtime}: {'removed' if step.after is None else 'wrote'} {step.path}: {step.what}")
    if plan.files and not steps:
        click.echo(f"{plan.runtime}: {plan.backend} is installed already")
    for note in plan.notes:
        click.echo(f"{plan.runtime}: {note}")
    if plan.restart and not restart:
        click.echo(f"{plan.runtime}: to make it effective: {plan.restart}")
    if not (restart if plan.restart else canary):
        return
    runtime = job.runtime
    if plan.restart:
        try:
            run_command(plan.restart)
        except HostError as error:
            if steps:
                _take_back(plan, settings, error)
            raise
        runtime = _look_again(job, settings)
    try:
        _prove(job, runtime, settings, canary=canary)
    except CourierError as error:
        if steps and canary:
            _must_be_unused(plan, settings, error)
            _take_back(plan, settings, error)
        raise
    if plan.restart:
        click.echo(f"{plan.runtime}: {plan.backend} can serve it")


def _prove(job: _Job, runtime: Runtime, settings: Settings, *, canary: bool) -> None:
    """Have the backend show that it works, if it can. Raises `CourierError` if it does not work."""
    prove = getattr(job.backend, "prove", None)
    seen = (
        ""
        if prove is None
        else _asked(job.backend, "show that it works", prove, runtime, settings, canary=canary)
    )
    if seen:
        click.echo(f"{runtime.key}: {seen}")
    elif canary:
        click.echo(f"{runtime.key}: {job.plan.backend} has no canary; nothing more was tried")


def _must_be_unused(plan: ChangeSet, settings: Settings, error: CourierError) -> None:
    """Raises `error`, with the reason, if containers exist that could not do without what was installed."""
    try:
        for manifest in changes.installed(changes.FOLDER):
            if (manifest.backend, manifest.runtime) == (plan.backend, plan.runtime):
                held.must_be_unused(manifest, settings)
    except CourierError as second:
        raise HostError(error.code, f"{error.message}; {second.message}", error.hint) from None


def _take_back(plan: ChangeSet, settings: Settings, error: CourierError) -> NoReturn:
    """Undo the installation that the runtime does not start or work with, start it without, and say so."""
    mine = [
        manifest
        for manifest in changes.installed(changes.FOLDER)
        if (manifest.backend, manifest.runtime) == (plan.backend, plan.runtime)
    ]
    try:
        for manifest in mine:
            changes.undo(manifest, folder=changes.FOLDER, keep=held.of(manifest))
    except CourierError as second:
        outcome = f"what had been written cannot be taken back: {second.message}"
        raise HostError(error.code, f"{error.message}; {outcome}", second.hint) from None
    outcome = "what had been written is taken back"
    if plan.restart:
        try:
            run_command(plan.restart)
        except HostError as second:
            outcome += f", and the restart fails without it too: {second.message}"
        else:
            outcome += ", and the runtime was restarted without it"
    for manifest in mine:
        try:
            if held.of(manifest):
                held.finish(manifest, settings)
        except CourierError as third:
            outcome += f"; {third.message}"
    raise HostError(error.code, f"{error.message}; {outcome}", error.hint) from None


def _look_again(job: _Job, settings: Settings) -> Runtime:
    """The runtime as it is now. Raises `HostError` ``CHG008`` if the backend cannot serve it."""
    deadline = time.monotonic() + _READY_TIMEOUT
    while True:
        host = _describe(settings)
        found = [r for r in host.runtimes if r.key == job.runtime.key]
        reason = "; ".join(("it is not found any more", *host.problems))
        if found:
            offer = _asked(job.backend, "say what it can do", job.backend.offer, found[0], settings)
            if offer.needs == "nothing":
                return found[0]
            reason = offer.reason
        if time.monotonic() >= deadline:
            raise HostError(
                "CHG008",
                f"{job.runtime.key} was restarted, and {job.plan.backend} still cannot serve it: {reason}",
                "see the runtime's log; `cdi-courier uninstall` takes back what was written",
            )
        time.sleep(_READY_PAUSE)
