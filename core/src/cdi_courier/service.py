"""The daemon: find the plugins, run the backends, describe the host beside them, until a signal ends it.

What a signal asks for is done by the main thread, one thing after the other (`_attend`): end, or read the
settings again. Containers are served by other threads and wait for neither.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import logging
import os
import queue
import resource
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import attrs
from attrs import define, field

from cdi_courier import locks, logs, metrics, notify, reloading, status, table
from cdi_courier.cdi.registry import Registry
from cdi_courier.errors import CourierError, PluginError, SettingsError
from cdi_courier.hookspecs import Reloadable, ServeContext, Supervised
from cdi_courier.injector import Injector
from cdi_courier.plugins import Plugins, discover
from cdi_courier.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cdi_courier.cdi.snapshot import Snapshot
    from cdi_courier.hookspecs import Server
    from cdi_courier.host.model import Host
    from cdi_courier.settings import Settings

    _Wishes = queue.SimpleQueue[str]

logger = logging.getLogger("cdi_courier")

_STOP, _RELOAD, _ENDED = "stop", "reload", "ended"
_LOOK: Final = 10.0  # seconds between two looks at the servers, and two lines for the service manager
_ALONE: Final = 0.2  # seconds that the sessions have the interpreter for themselves, to begin in
_SETTLED: Final = 1.0  # seconds without a wish after which all that a start makes has been made
_SIGNAL: Final = 1.0  # seconds that a signal may go unnoticed in the worst case
_DESCRIPTORS: Final = 64  # some 15 are in use, a few more while the host is described
_ALIVE_STATES: Final = ("active", "idle")


@define(eq=False, repr=False)
class State:
    """What the daemon works with now. Only the main thread changes it, any may read.

    loaded: when the settings were read, a `time.time`. problem: why the last attempt to read them again
    failed, ``""`` if it did not. restart: keys that were changed and do not count before a restart. metrics:
    why there are none although they are wanted.
    """

    settings: Settings
    injector: Injector
    began: float = field(factory=time.time)
    loaded: float = field(factory=time.time)
    problem: str = ""
    restart: tuple[str, ...] = ()
    metrics: str = ""


def process(read: Callable[[], Settings], backend: str | None = None) -> int:
    """`run` as the whole of a process: what it has to say goes where the settings want it.

    read: the settings as they are now in the files. Raises what `read` and `run` raise.
    """
    settings = read()
    with _last_words(), logs.writing(settings.service):
        return run(settings, backend, read)


@contextlib.contextmanager
def _last_words() -> Iterator[None]:
    """Have a daemon that is aborted, as a watchdog does, say on stderr what each thread was at."""
    try:
        faulthandler.enable()
    except (AttributeError, ValueError, OSError):  # a plugin that a runtime has launched may have no stderr
        yield
        return
    try:
        yield
    finally:
        faulthandler.disable()


def run(settings: Settings, backend: str | None = None, reread: Callable[[], Settings] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. SIGHUP reads the settings again.

    backend: run this one alone, whatever ``[backends] choose`` says. reread: the settings as they are now in
    the files, which may raise `SettingsError`; None: SIGHUP changes nothing. Raises `CourierError` where
    nothing can be served: a forced backend that cannot, another daemon that already does, a limit of open
    files that is too low.
    """
    _need_descriptors()
    settings = _forced(settings, backend)
    plugins = discover(settings.backends.disabled)
    for problem in plugins.problems.values():
        logger.error("%s", problem)
    state_dir = settings.service.state_dir
    wishes: _Wishes = queue.SimpleQueue()
    # The signals are caught before any lock is taken, so that each lock is given back.
    with _signals(wishes), locks.exclusive(os.path.join(state_dir, "lock"), f"state directory {state_dir}"):
        state = State(settings, make_injector(settings, plugins))
        servers: dict[str, Server] = {}
        watch = Watch(
            settings,
            plugins,
            lambda: _described(state),
            lambda: _reconsider(servers),
        )
        servers.update(_servers(state, plugins, watch))

        def reload() -> None:
            if reread is not None:
                reload_settings(state, lambda: _forced(reread(), backend), plugins, servers, watch)

        def told() -> dict[str, Any]:
            return report(servers, watch, state)

        with status.serving(state_dir, told), metrics.serving(settings.metrics.listen, told) as trouble:
            state.metrics = trouble
            return _supervise(servers, watch, wishes, reload)


def _need_descriptors() -> None:
    """Raise the limit of open files as far as it is needed. Raises `SettingsError` ``SET041``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _DESCRIPTORS:
        raise SettingsError(
            "SET041",
            f"this process may open {hard} files at a time, and needs up to {_DESCRIPTORS}",
            "raise the hard limit of open files: LimitNOFILE= of the unit, ulimit -Hn",
        )
    if soft != resource.RLIM_INFINITY and soft < _DESCRIPTORS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, hard))


def _forced(settings: Settings, backend: str | None) -> Settings:
    if backend is None:
        return settings
    return attrs.evolve(settings, backends=attrs.evolve(settings.backends, choose=backend))


def _servers(state: State, plugins: Plugins, watch: Watch) -> dict[str, Server]:
    """The backends that have something to run. They begin at once; the host is described beside them.

    None of them: the daemon waits, since what it is told to do next may be to start anew with one. Raises
    `PluginError` ``PLG003`` for a forced one that does not exist or has nothing to run.
    """
    settings = state.settings
    wanted = settings.backends.choose
    names = [*settings.backends.order, *sorted(plugins.backends)] if wanted == "auto" else [wanted]
    if wanted != "auto" and wanted not in plugins.backends:
        from cdi_courier import choice

        raise choice.missing(wanted, plugins)
    context = ServeContext(settings, state.injector, watch.chosen, watch.wake)
    servers: dict[str, Server] = {}
    for name in dict.fromkeys(names):
        made = plugins.backends[name].serve(context) if name in plugins.backends else None
        if made is not None:
            logger.info("serving with backend %s, pid %d", name, os.getpid())
            servers[name] = made
    if not servers and wanted != "auto":
        raise PluginError(
            "PLG003",
            f"backend {wanted} has nothing to run: it works from a runtime's configuration",
            f"cdi-courier install --backend {wanted} puts it there",
        )
    if not servers:
        installed = ", ".join(plugins.backends) or "none"
        nothing = PluginError(
            "PLG004",
            f"no backend has anything to run (installed: {installed})",
            "install one that has, for example the package cdi-courier-nri, or stop this service",
        )
        logger.warning("%s", nothing)
    return servers


def reload_settings(
    state: State,
    reread: Callable[[], Settings],
    plugins: Plugins,
    servers: Mapping[str, Server],
    watch: Watch,
) -> None:
    """Have everything work with the settings as they are in the files now, or with those of before.

    Never raises: what is wrong is said in one line, and shown by ``status`` until it is right.
    """
    try:
        change = reloading.compare(state.settings, reread())
        same = change.settings.cdi == state.settings.cdi
        injector = make_injector(change.settings, plugins, state.injector.registry if same else None)
    except CourierError as error:
        words = str(error).replace("\n", " ")
        problem = SettingsError(
            "SET030", f"the settings stay as they were: {words}", "mend that, then reload again"
        )
        state.problem = str(problem)
        logger.error("%s", problem)  # noqa: TRY400 - an expected failure has no traceback
        return
    state.settings, state.injector = change.settings, injector
    state.loaded, state.problem, state.restart = time.time(), "", change.restart
    watch.reload(change.settings)
    for name, server in servers.items():
        if not isinstance(server, Reloadable):
            logger.warning("backend %s goes on with the settings of its start: it cannot change them", name)
            continue
        try:
            server.reload(change.settings, injector)
        except Exception:
            logger.exception("backend %s goes on with its settings of before: it failed to change them", name)
    if "service.log_level" in change.changed:
        logging.getLogger().setLevel(change.settings.service.log_level.upper())
    logger.info("%s", reloading.in_words(change, change.settings.files))
    if change.restart:
        needed = SettingsError(
            "SET031",
            f"{', '.join(change.restart)}: changed, but counts only after a restart of the daemon",
            "until then the value of before counts; systemctl restart cdi-courier",
        )
        logger.warning("%s", needed)


def report(servers: Mapping[str, Server], watch: Watch, state: State | None = None) -> dict[str, Any]:
    """The daemon's state as JSON. state: what it works with, if that is to be told.

    Source: docs/operations.md#status.
    """
    runtimes: dict[str, Any] = {}
    for found in watch.choices or ():
        runtimes[found.runtime.key] = {
            "kind": found.runtime.kind,
            "version": found.runtime.version,
            "backend": found.active,
            "recommended": found.recommended,
            "reason": found.reason,
        }
    decisions: list[Mapping[str, Any]] = []
    for name, server in servers.items():
        for socket, told in server.status().items():
            served = watch.chosen(told.get("kind", ""), socket)
            key = socket if served is None else served.runtime.key
            entry = runtimes.setdefault(key, {"backend": None})
            if told.get("state") == "active":
                entry["backend"] = name
            # What is not known here, such as the version before a session, may be known by the description.
            entry.update({"socket": socket, **{k: v for k, v in told.items() if v != "" or k not in entry}})
        decisions += server.decisions()
    return {
        "version": _version(),
        "pid": os.getpid(),
        "described": watch.choices is not None,
        "runtimes": runtimes,
        "decisions": sorted(decisions, key=lambda decision: decision.get("time", 0)),
        "problems": [*watch.problems, *([state.metrics] if state and state.metrics else [])],
        **({} if state is None else _state(state)),
    }


def _prepare_reports() -> None:
    """Load what a report takes: a start does without, and later descriptors may have run out."""
    import json  # noqa: F401 - for `status`

    _version()


@functools.cache
def _version() -> str:
    # Asked once: it is looked up in files.
    from importlib import metadata

    try:
        return metadata.version("cdi-courier")
    except metadata.PackageNotFoundError:  # run from a folder of sources
        return "unknown"


def _state(state: State) -> dict[str, Any]:
    settings = state.settings
    snapshot: Snapshot = state.injector.registry.snapshot()
    return {
        "began": state.began,
        "settings": {
            "files": list(settings.files),
            "loaded": state.loaded,
            "problem": state.problem,
            "restart": list(state.restart),
        },
        "cdi": {
            "files": len(snapshot.specs),
            "devices": len(snapshot.devices),
            "errors": sum(map(len, snapshot.errors.values())) + len(snapshot.dir_errors),
            "conflicts": len(snapshot.conflicts),
        },
        "table": _table_time(settings.service.state_dir),
    }


def _table_time(state_dir: str) -> float | None:
    """When the compiled table was written, a `time.time`; None if there is none."""
    try:
        return os.stat(os.path.join(state_dir, table.NAME)).st_mtime
    except OSError:
        return None


def _described(state: State) -> Host:
    # Imported when the sessions have begun, which come first.
    from cdi_courier.host.describe import describe

    return describe(state.settings)


def _reconsider(servers: Mapping[str, Server]) -> None:
    for server in servers.values():
        server.reconsider()


def make_injector(settings: Settings, plugins: Plugins, registry: Registry | None = None) -> Injector:
    """The pipeline with these settings.

    registry: what has read the spec files already, if the settings about them are the same. Raises
    `SettingsError` for an annotation dialect nobody offers.
    """
    for name in settings.annotations.dialects:
        if name not in plugins.dialects:
            raise SettingsError(
                "SET005",
                f"[annotations] dialects names {name}, which no plugin offers",
                f"known: {', '.join(plugins.dialects)}",
            )
    cdi = settings.cdi
    if registry is None:
        registry = Registry(cdi.dirs, trust=cdi.trust, max_file_size=cdi.max_file_size)
    return Injector(settings, registry, plugins.dialects.values())


@contextlib.contextmanager
def _signals(wishes: _Wishes) -> Iterator[None]:
    """Wish for the end on SIGTERM and SIGINT, and for the settings to be read again on SIGHUP."""

    # A SimpleQueue may be put to by a handler that has interrupted its very reader; an Event may not be set.
    def stop(number: int, _: object) -> None:
        logger.info("stopping: %s", signal.Signals(number).name)
        wishes.put(_STOP)

    def reload(_: int, __: object) -> None:
        wishes.put(_RELOAD)

    wanted = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: reload}
    previous = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _supervise(
    servers: Mapping[str, Server], watch: Watch, wishes: _Wishes, reload: Callable[[], None]
) -> int:
    """Run each server and the watch in a thread; this one does what signals wish for."""
    failed = threading.Event()
    ending = threading.Event()

    def serve(server: Server) -> None:
        try:
            server.run()
        except CourierError as error:
            failed.set()
            logger.error("%s", error)  # noqa: TRY400 - an expected failure has no traceback
        except BaseException:
            failed.set()
            logger.exception("the backend failed; the daemon ends, so that whoever watches it starts it anew")
        finally:
            if not ending.is_set():
                failed.set()
            wishes.put(_ENDED)

    threads = [threading.Thread(target=serve, args=(s,), name=name) for name, s in servers.items()]
    for thread in threads:
        thread.start()
    # Ready also without a runtime: a runtime that is ordered after this one must be able to start.
    notify.ready(_in_words(servers))

    def look() -> None:
        if not ending.wait(_ALONE):
            # What goes wrong here goes wrong again, and is told, when somebody asks for a report.
            with contextlib.suppress(Exception):
                _prepare_reports()
            watch.run()

    # Not waited for: it may be in the midst of asking a runtime that hangs.
    threading.Thread(target=look, name="watch", daemon=True).start()
    _attend(servers, wishes, reload)
    notify.stopping()
    ending.set()
    watch.stop()
    for server in servers.values():
        server.stop()
    for thread in threads:
        thread.join()
    return 1 if failed.is_set() else 0


def _attend(servers: Mapping[str, Server], wishes: _Wishes, reload: Callable[[], None]) -> None:
    """Do what is wished for until it is the end; feed the watchdog as long as every server is alive."""
    watchdog = notify.watchdog_interval()
    pause = _LOOK if watchdog is None else min(_LOOK, watchdog / 3)
    settled = False
    while True:
        wish = _next(wishes, pause if settled else min(_SETTLED, pause))
        if not settled and not wish:
            _settle()
            settled = True
        if wish in (_STOP, _ENDED):
            return
        if wish == _RELOAD:
            notify.reloading()
            reload()
            notify.ready(_in_words(servers))
        notify.alive(_in_words(servers), fed=_alive(servers))


def _settle() -> None:
    """Have the collector at work again, but not on what a start has made, which stays."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _next(wishes: _Wishes, pause: float) -> str:
    """The next wish; ``""`` if there is none for `pause` seconds.

    No wait is long: a signal that arrives just before one begins does not end it, and what it wishes for is
    said by its handler, which runs in this thread alone.
    """
    end = time.monotonic() + pause
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            return wishes.get(timeout=min(_SIGNAL, left))
    return ""


def _alive(servers: Mapping[str, Server]) -> bool:
    return all(server.alive() for server in servers.values() if isinstance(server, Supervised))


def _in_words(servers: Mapping[str, Server]) -> str:
    """One line for the service manager: how many runtimes are served, and what became of containers."""
    found = [state for server in servers.values() for state in server.status().values()]
    served = sum(state.get("state") in _ALIVE_STATES for state in found)
    causes = [cause for state in found if (cause := state.get("cause")) and state.get("state") == "waiting"]
    counts = [state.get("counts", {}) for state in found]
    injected, refused = (sum(c.get(name, 0) for c in counts) for name in ("injected", "refused"))
    text = f"{served} of {len(found)} connected, {injected} injected, {refused} refused"
    return f"{text}; waiting: {causes[0]}" if causes else text
