"""Makes the compiled table, which `table` describes and reads.

It is made of settings, dialects and one look at the spec directories; what it is used for is not known here.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from cdi_courier import dialects, patterns, table
from cdi_courier.annotations import comma_list
from cdi_courier.cdi.edits import edits_to_dict
from cdi_courier.cdi.registry import EXTENSIONS
from cdi_courier.plugins import Plugins, discover
from cdi_courier.service import make_injector
from cdi_courier.settings import default_dir, default_files, load
from cdi_courier.signature import has_rested

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdi_courier.annotations import KeyFamily
    from cdi_courier.cdi.snapshot import Snapshot
    from cdi_courier.injector import Injector
    from cdi_courier.settings import Settings

_ATTEMPTS: Final = 20
_PAUSE: Final = 0.05  # seconds; longer than files must have rested


@frozen
class Compiled:
    """What was compiled, and what it was compiled from.

    document: the table's file. settled: whether nothing changed meanwhile or just before; otherwise a reader
    could not tell the states apart, and the document must not be kept. began_ns: the clock before anything
    was looked at.
    """

    document: Mapping[str, Any]
    settled: bool
    settings: Settings
    injector: Injector
    snapshot: Snapshot
    began_ns: int


def settings_place(config: str | os.PathLike[str] | None) -> str:
    """Where settings are read from, as `table.settings_sources` takes it. config: ``--config``, or None."""
    return f"{default_dir()}/" if config is None else os.path.abspath(config)


def load_settings(place: str) -> Settings:
    """The settings at a `settings_place`. Raises `SettingsError`."""
    return load(default_files(place) if place.endswith("/") else [place])


def compile_table(place: str) -> Compiled:
    """Compile what holds now. place: a `settings_place`. Raises `SettingsError`."""
    now = time.time_ns()
    sources = table.settings_sources(place)
    before = table.look(sources)
    settings = load_settings(place)
    injector = injector_of(settings)
    spec_sources: list[table.Source] = [(path, EXTENSIONS) for path in injector.registry.dirs]
    specs_before = table.look(spec_sources)
    snapshot = injector.registry.snapshot()
    unchanged = table.look(sources) == before and table.look(spec_sources) == specs_before
    signature = before[0] + specs_before[0]
    return Compiled(
        _document(place, settings, injector, snapshot, signature),
        unchanged and has_rested(max(before[1], specs_before[1]), now),
        settings,
        injector,
        snapshot,
        now,
    )


def compile_settled(place: str) -> Compiled:
    """Compile as soon as nothing changes any more; what holds after a second even if something does."""
    for _ in range(_ATTEMPTS):
        compiled = compile_table(place)
        if compiled.settled:
            break
        time.sleep(_PAUSE)
    return compiled


def write(compiled: Compiled, path: str) -> None:
    """Put the table in its place as a whole, whoever else does the same; its folder is made (0700).

    Raises `OSError`, and `ValueError` for one that is not settled.
    """
    if not compiled.settled:
        raise ValueError("it was made of files that were just changing")
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{table.NAME}.", dir=folder)  # 0600
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            json.dump(compiled.document, file, separators=(",", ":"))
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_patterns(compiled: Compiled) -> bool:
    """Tell the gate of the runtime wrapper, where one is installed, which annotations count now.

    As `patterns.write`, also what it raises.
    """
    return patterns.write(
        compiled.settings.oci_hook.gate_dir,
        compiled.document["settings"],
        compiled.injector.families,
        compiled.began_ns,
    )


def injector_of(settings: Settings) -> Injector:
    """The pipeline with these settings. Plugins are loaded only for their dialects: some take long.

    Raises `SettingsError` ``SET005``.
    """
    built_in = {dialect.name: dialect for dialect in dialects.cdi_courier_dialects()}
    if built_in.keys() >= set(settings.annotations.dialects):
        return make_injector(settings, Plugins(dialects=built_in))
    return make_injector(settings, discover(settings.backends.disabled))


def _document(
    place: str, settings: Settings, injector: Injector, snapshot: Snapshot, signature: list[Any]
) -> dict[str, Any]:
    light = [family for family in injector.families if family[1] is comma_list]
    foreign = [family for family in injector.families if family[1] is not comma_list]
    files: list[Any] = []
    index: dict[str, int] = {}
    devices = {}
    for name, entry in snapshot.devices.items():
        if entry.path not in index:
            index[entry.path] = len(files)
            files.append(edits_to_dict(entry.spec.container_edits))
        devices[name] = [index[entry.path], edits_to_dict(entry.device.container_edits)]
    return {
        "format": table.FORMAT,
        "settings": place,
        "signature": signature,
        "log": settings.oci_hook.log,
        "keys": _keys(light),
        "foreign_keys": _keys(foreign),
        "max_names": settings.annotations.max_names,
        "max_length": settings.annotations.max_length,
        "skip_denied": settings.delivery.on_denied == "skip",
        "undeliverable": settings.delivery.undeliverable,
        "device_cgroup": settings.oci_hook.device_cgroup,
        "policy": {
            "default": settings.policy.default,
            "local": settings.policy.local,
            "rules": [
                {
                    "action": rule.action,
                    "namespaces": rule.namespaces,
                    "pods": rule.pods,
                    "containers": rule.containers,
                    "devices": rule.devices,
                    "source": source,
                }
                for rule, source in zip(settings.policy.rules, settings.policy.sources, strict=True)
            ],
        },
        "files": files,
        "devices": devices,
    }


def _keys(families: list[KeyFamily]) -> list[Any]:
    return [[[prefix, scoped] for prefix, scoped in forms] for forms, _ in families]
