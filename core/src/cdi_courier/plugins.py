"""Finds the installed plugins, one entry point at a time.

A plugin that is broken, foreign or disabled is reported and skipped; its exceptions reach nobody else's call.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

import pluggy
from attrs import field, frozen

from cdi_courier import dialects as built_in
from cdi_courier import hookspecs
from cdi_courier.annotations import Dialect
from cdi_courier.errors import PluginError, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cdi_courier.hookspecs import Backend

GROUP = hookspecs.PROJECT


@frozen
class Plugins:
    """What was found. `problems`: entry-point name → why that plugin, or a part of it, was skipped."""

    backends: Mapping[str, Backend] = field(factory=dict)
    dialects: Mapping[str, Dialect] = field(factory=dict)
    problems: Mapping[str, PluginError] = field(factory=dict)
    disabled: tuple[str, ...] = ()


def discover(
    disabled: Iterable[str] = (), entry_points: Iterable[importlib.metadata.EntryPoint] | None = None
) -> Plugins:
    """Load every entry point of the group except the `disabled` ones, which are never imported."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(built_in, "built-in")
    problems: dict[str, PluginError] = {}
    skipped = []
    if entry_points is None:
        entry_points = importlib.metadata.entry_points(group=GROUP)
    for entry_point in sorted(entry_points, key=lambda e: e.name):
        name = entry_point.name
        if name in set(disabled):
            skipped.append(name)
            continue
        if manager.has_plugin(name):
            # Registering would fail, and whoever came first must not pay for it.
            problems[name] = _broken(name, "exists twice, or has a built-in name; the first one is used")
            continue
        try:
            plugin = entry_point.load()
            manager.register(plugin, name)
            manager.check_pending()
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything at import
            problems[name] = _broken(name, f"cannot be loaded: {_words(error)}")
            if manager.has_plugin(name):
                manager.unregister(name=name)
    return _collect(manager, problems, tuple(skipped))


def _collect(
    manager: pluggy.PluginManager, problems: dict[str, PluginError], disabled: tuple[str, ...]
) -> Plugins:
    backends: dict[str, Backend] = {}
    dialects: dict[str, Dialect] = {}
    # One call a plugin instead of one for all: pluggy would end the whole call at the first exception.
    for name, call in _implementations(manager, "cdi_courier_backend"):
        try:
            backend = call()
            if backend.api_version != hookspecs.API_VERSION:
                problems[name] = _broken(
                    name,
                    f"was made for API version {backend.api_version}, not {hookspecs.API_VERSION}",
                )
            elif backend.name != name:
                problems[name] = _broken(name, f"calls its backend {quoted(str(backend.name))}, not {name}")
            else:
                backends[name] = backend
        except Exception as error:  # noqa: BLE001 - foreign code
            problems[name] = _broken(name, f"failed: {_words(error)}")
    for name, call in _implementations(manager, "cdi_courier_dialects"):
        try:
            for dialect in tuple(call()):
                if not isinstance(dialect, Dialect):
                    problems[name] = _broken(name, f"offers {quoted(repr(dialect))}, which is no Dialect")
                elif dialect.name in dialects:
                    problems[name] = _broken(name, f"offers the dialect {dialect.name}, which exists already")
                else:
                    dialects[dialect.name] = dialect
        except Exception as error:  # noqa: BLE001 - foreign code
            problems[name] = _broken(name, f"failed: {_words(error)}")
    return Plugins(backends, dialects, problems, disabled)


def _implementations(manager: pluggy.PluginManager, hook: str) -> list[tuple[str, Any]]:
    found = [(impl.plugin_name, impl.function) for impl in getattr(manager.hook, hook).get_hookimpls()]
    # The built-in ones first: a plugin cannot take their names.
    return sorted(found, key=lambda item: (item[0] != "built-in", item[0]))


def _broken(name: str, problem: str) -> PluginError:
    return PluginError(
        "PLG001",
        f"plugin {name} {problem}",
        "upgrade or remove it, or name it in [backends] disabled",
        plugin=name,
    )


def _words(error: BaseException) -> str:
    return quoted(f"{type(error).__name__}: {error}")
