"""The daemon: find the plugins, choose a backend, run it until a signal ends it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from cdi_courier import choice, locks
from cdi_courier.cdi.registry import Registry
from cdi_courier.errors import CourierError, PluginError, SettingsError
from cdi_courier.hookspecs import ServeContext
from cdi_courier.injector import Injector
from cdi_courier.plugins import Plugins, discover

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdi_courier.hookspecs import Server
    from cdi_courier.settings import Settings

logger = logging.getLogger("cdi_courier")


def run(settings: Settings, backend: str | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit code.

    backend: run this one, whatever ``[backends] choose`` says. Raises `CourierError` where nothing can be
    served: a forced backend that cannot, another daemon that already does.
    """
    plugins = discover(settings.backends.disabled)
    for problem in plugins.problems.values():
        logger.error("%s", problem)
    name = choose_backend(settings, plugins, backend)
    state_dir = settings.service.state_dir
    ended = threading.Event()
    # The signals are caught before any lock is taken, so that each lock is given back.
    with _signals(ended), locks.exclusive(Path(state_dir) / "lock", f"state directory {state_dir}"):
        context = ServeContext(settings, make_injector(settings, plugins))
        server = plugins.backends[name].serve(context)
        if server is None:
            raise PluginError("PLG004", f"backend {name} has nothing to run", "choose another with --backend")
        logger.info("serving with backend %s, pid %d", name, os.getpid())
        # What exists now stays: the collector need not look through it again and again.
        gc.collect()
        gc.freeze()
        return _supervise(server, ended)


def choose_backend(settings: Settings, plugins: Plugins, wanted: str | None) -> str:
    """The backend to run. Raises `PluginError` that names every offer and its reason if there is none."""
    offers, problems = choice.gather(plugins, settings)
    for problem in problems.values():
        logger.error("%s", problem)
    wanted = wanted or settings.backends.choose
    if wanted != "auto":
        return choice.forced(wanted, plugins, offers)
    chosen = choice.choose(offers, settings.backends.order)
    if chosen.active is None:
        reasons = "; ".join(f"{offer.backend}: {offer.reason}" for offer in chosen.offers)
        raise PluginError(
            "PLG004",
            f"no backend can serve here ({reasons or 'none is installed'})",
            "install one, for example the package cdi-courier-nri",
        )
    return chosen.active


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


def _supervise(server: Server, ended: threading.Event) -> int:
    """Run the server in its own thread; this one waits for the signals, which Python delivers only here."""
    failed = threading.Event()

    def serve() -> None:
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

    thread = threading.Thread(target=serve, name="backend")
    thread.start()
    ended.wait()
    server.stop()
    thread.join()
    return 1 if failed.is_set() else 0
