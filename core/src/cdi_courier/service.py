"""The daemon: find the plugins, run the backends, describe the host beside them, until a signal ends it."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import logging
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from cdi_courier import choice, locks, status
from cdi_courier.cdi.registry import Registry
from cdi_courier.errors import CourierError, PluginError, SettingsError
from cdi_courier.hookspecs import ServeContext
from cdi_courier.host.describe import describe
from cdi_courier.injector import Injector
from cdi_courier.plugins import Plugins, discover
from cdi_courier.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdi_courier.hookspecs import Server
    from cdi_courier.settings import Settings

logger = logging.getLogger("cdi_courier")


def run(settings: Settings, backend: str | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit code.

    backend: run this one alone, whatever ``[backends] choose`` says. Raises `CourierError` where nothing can
    be served: a forced backend that cannot, another daemon that already does.
    """
    if backend is not None:
        settings = attrs.evolve(settings, backends=attrs.evolve(settings.backends, choose=backend))
    plugins = discover(settings.backends.disabled)
    for problem in plugins.problems.values():
        logger.error("%s", problem)
    state_dir = settings.service.state_dir
    ended = threading.Event()
    # The signals are caught before any lock is taken, so that each lock is given back.
    with _signals(ended), locks.exclusive(Path(state_dir) / "lock", f"state directory {state_dir}"):
        servers: dict[str, Server] = {}
        watch = Watch(
            settings,
            plugins,
            lambda: describe(settings),
            lambda: _reconsider(servers),
        )
        servers.update(_servers(settings, plugins, watch))
        # What exists now stays: the collector need not look through it again and again.
        gc.collect()
        gc.freeze()
        with status.serving(state_dir, lambda: report(servers, watch)):
            return _supervise(servers, watch, ended)


def _servers(settings: Settings, plugins: Plugins, watch: Watch) -> dict[str, Server]:
    """The backends that have something to run. They begin at once; the host is described beside them.

    None of them: the daemon waits, since what it is told to do next may be to start anew with one. Raises
    `PluginError` ``PLG003`` for a forced one that does not exist or has nothing to run.
    """
    wanted = settings.backends.choose
    names = [*settings.backends.order, *sorted(plugins.backends)] if wanted == "auto" else [wanted]
    if wanted != "auto" and wanted not in plugins.backends:
        raise choice.missing(wanted, plugins)
    context = ServeContext(settings, make_injector(settings, plugins), watch.chosen, watch.wake)
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


def report(servers: Mapping[str, Server], watch: Watch) -> dict[str, Any]:
    """The daemon's state as JSON (design section 5)."""
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
        for socket, state in server.status().items():
            served = watch.chosen(state.get("kind", ""), socket)
            key = socket if served is None else served.runtime.key
            entry = runtimes.setdefault(key, {"backend": None})
            if state.get("state") == "active":
                entry["backend"] = name
            # What is not known here, such as the version before a session, may be known by the description.
            entry.update({"socket": socket, **{k: v for k, v in state.items() if v != "" or k not in entry}})
        decisions += server.decisions()
    return {
        "version": importlib.metadata.version("cdi-courier"),
        "pid": os.getpid(),
        "described": watch.choices is not None,
        "runtimes": runtimes,
        "decisions": sorted(decisions, key=lambda decision: decision.get("time", 0)),
        "problems": list(watch.problems),
    }


def _reconsider(servers: Mapping[str, Server]) -> None:
    for server in servers.values():
        server.reconsider()


def make_injector(settings: Settings, plugins: Plugins) -> Injector:
    """The pipeline with these settings. Raises `SettingsError` for an annotation dialect nobody offers."""
    for name in settings.annotations.dialects:
        if name not in plugins.dialects:
            raise SettingsError(
                "SET005",
                f"[annotations] dialects names {name}, which no plugin offers",
                f"known: {', '.join(plugins.dialects)}",
            )
    registry = Registry(settings.cdi.dirs, trust=settings.cdi.trust, max_file_size=settings.cdi.max_file_size)
    return Injector(settings, registry, plugins.dialects.values())


@contextlib.contextmanager
def _signals(ended: threading.Event) -> Iterator[None]:
    """Set `ended` on SIGTERM and SIGINT."""

    def stop(number: int, _: object) -> None:
        logger.info("stopping: %s", signal.Signals(number).name)
        ended.set()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _supervise(servers: Mapping[str, Server], watch: Watch, ended: threading.Event) -> int:
    """Run each server and the watch in a thread; this one waits for the signals, which arrive here."""
    failed = threading.Event()

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
            if not ended.is_set():
                failed.set()
            ended.set()

    threads = [threading.Thread(target=serve, args=(s,), name=name) for name, s in servers.items()]
    # Not waited for: it may be in the midst of asking a runtime that hangs.
    threading.Thread(target=watch.run, name="watch", daemon=True).start()
    for thread in threads:
        thread.start()
    ended.wait()
    watch.stop()
    for server in servers.values():
        server.stop()
    for thread in threads:
        thread.join()
    return 1 if failed.is_set() else 0
