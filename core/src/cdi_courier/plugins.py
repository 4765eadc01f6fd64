"""Finds the installed plugins, one entry point at a time.

A plugin that is broken, foreign or disabled is reported and skipped; its exceptions reach nobody else's call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import pluggy
from attrs import field, frozen

from cdi_courier import dialects, entry_points, generate, hookspecs
from cdi_courier.annotations import Dialect
from cdi_courier.errors import PluginError, quoted
from cdi_courier.hookspecs import Generator

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cdi_courier.entry_points import EntryPoint
    from cdi_courier.hookspecs import Backend

GROUP = hookspecs.PROJECT

_Named = TypeVar("_Named", Dialect, Generator)
_BUILT_IN = {"built-in": dialects, "built-in-generators": generate}


@frozen
class Plugins:
    """What was found. `problems`: entry-point name → why that plugin, or a part of it, was skipped."""

    backends: Mapping[str, Backend] = field(factory=dict)
    dialects: Mapping[str, Dialect] = field(factory=dict)
    generators: Mapping[str, Generator] = field(factory=dict)
    problems: Mapping[str, PluginError] = field(factory=dict)
    disabled: tuple[str, ...] = ()


def discover(disabled: Iterable[str] = (), found: Iterable[EntryPoint] | None = None) -> Plugins:
    """Load every entry point of the group except the `disabled` ones, which are never imported.

    found: the entry points, instead of those that are installed.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for name, module in _BUILT_IN.items():
        manager.register(module, name)
    problems: dict[str, PluginError] = {}
    skipped = []
    if found is None:
        found = entry_points.installed(GROUP)
    for entry_point in sorted(found, key=lambda e: e.name):
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
    return Plugins(
        backends,
        _named(manager, "cdi_courier_dialects", Dialect, problems),
        _named(manager, "cdi_courier_generators", Generator, problems),
        problems,
        disabled,
    )


def _named(
    manager: pluggy.PluginManager, hook: str, kind: type[_Named], problems: dict[str, PluginError]
) -> dict[str, _Named]:
    """What a hook that returns several things has found, by name; the first of a name keeps it."""
    every: dict[str, _Named] = {}
    for name, call in _implementations(manager, hook):
        try:
            for item in tuple(call()):
                if not isinstance(item, kind):
                    what = f"{quoted(repr(item))}, which is no {kind.__name__}"
                    problems[name] = _broken(name, f"offers {what}")
                elif item.name in every:
                    what = f"the {kind.__name__.lower()} {quoted(item.name)}"
                    problems[name] = _broken(name, f"offers {what}, which exists already")
                else:
                    every[item.name] = item
        except Exception as error:  # noqa: BLE001 - foreign code
            problems[name] = _broken(name, f"failed: {_words(error)}")
    return every


def _implementations(manager: pluggy.PluginManager, hook: str) -> list[tuple[str, Any]]:
    found = [(impl.plugin_name, impl.function) for impl in getattr(manager.hook, hook).get_hookimpls()]
    # The built-in ones first: a plugin cannot take their names.
    return sorted(found, key=lambda item: (item[0] not in _BUILT_IN, item[0]))


def _broken(name: str, problem: str) -> PluginError:
    return PluginError(
        "PLG001",
        f"plugin {name} {problem}",
        "upgrade or remove it, or name it in [backends] disabled",
        plugin=name,
    )


def _words(error: BaseException) -> str:
    return quoted(f"{type(error).__name__}: {error}")
