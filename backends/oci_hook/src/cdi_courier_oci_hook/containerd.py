"""What has containerd call the gate: a handler that is a copy of the default one, with the gate for runc.

Source: docs/facts.md#containerd-handlers, #containerd-annotations. It reads the runtime's files and
writes none. Only used by commands.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen
from cdi_courier import changes, tomledit
from cdi_courier.changes import ChangeSet, FileChange
from cdi_courier.errors import CourierError, HostError, quoted
from cdi_courier.host import containerd_files as files
from cdi_courier.host.answers import merge_tables
from cdi_courier.host.files import read_file

from . import NAME, wrapping

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdi_courier.host.model import Runtime
    from cdi_courier.settings import Settings

_DROP_IN = "conf.d/50-cdi-courier-oci-hook.toml"
# A pattern, although it is for one file: a plain name that is missing keeps containerd from starting.
_PATTERN = "conf.d/50-cdi-courier-oci-hook*.toml"
_UNREADABLE = "HOK112"

# Schema of the main file → the plugin that has the handlers.
_PLUGIN_2 = "io.containerd.grpc.v1.cri"
_PLUGIN_3 = "io.containerd.cri.v1.runtime"
_DISABLED = ("cri", _PLUGIN_2, _PLUGIN_3)

_DEFAULT = "runc"
_DEFAULTS: Final[Mapping[str, Any]] = {_DEFAULT: {"runtime_type": "io.containerd.runc.v2"}}
"""The handlers that containerd has where its files name none; options that are not set are empty."""


@frozen
class _Handlers:
    """What the configuration makes of handlers. written: whether the files name any."""

    handlers: dict[str, Any]
    default: str
    written: bool


def plan(runtime: Runtime, settings: Settings) -> ChangeSet:
    """What has this containerd call the gate; without a restart command if it does already.

    Raises `CourierError`: ``HOK110`` its file is generated, ``HOK111`` of version 1, ``HOK112`` cannot be
    read, ``HOK113`` the default handler calls no runc, ``HOK114`` its low-level runtime is not there,
    ``HOK115`` the handler's name is taken, ``HOK116`` something else in its files keeps it from counting,
    ``HOK120`` the default handler is not defined, ``CHG006``, ``SET005``.
    """
    name = settings.oci_hook.handler
    # A handler in the template is not enough: it would call a gate that is never written.
    files.must_be_ours_to_edit(runtime, "HOK110")
    version = runtime.version_tuple
    path = files.main_path(runtime, settings)
    before = changes.without_ours(NAME, runtime.key, folder=changes.FOLDER)
    data = before[path] if path in before else read_file(path, _UNREADABLE)
    main = files.parsed(path, data, version, _UNREADABLE)
    if main.schema == 1:
        raise files.version_1(main, version, "name handlers in the way that is known here", "HOK111")
    plugin = _PLUGIN_2 if main.schema == 2 else _PLUGIN_3
    absent = [found for found, text in before.items() if text is None]
    texts = {found: text for found, text in before.items() if text is not None}
    documents = files.load(main, _UNREADABLE, without=absent, overlay=texts)
    _must_load(documents)
    now = _handlers(documents, plugin, replaces=main.replaces)
    if name in now.handlers:
        raise wrapping.taken(name, path)
    if now.default not in now.handlers:
        raise wrapping.missing_default(now.default, path)

    patterns = wrapping.annotation_patterns(settings)
    called = now.handlers[now.default]
    _must_be_sound(now.default, called, _owner(documents, plugin))
    real = wrapping.real_runtime(runtime, _binary(now.default, called))
    ours = _copy(called, wrapping.path_of(runtime, settings), patterns)
    default = name if settings.oci_hook.handler_mode == "default" else now.default
    edit = _edit_in_place if main.replaces else _drop_in
    changed = edit(main, documents, texts, plugin, now, (name, ours), default)
    overlay = {**texts, **{change.path: change.content for change in changed if change.content is not None}}
    left = [found for found in absent if found not in overlay]
    after = files.load(main, _UNREADABLE, without=left, overlay=overlay)
    _must_count(documents, _handlers(after, plugin, replaces=main.replaces), plugin, (name, ours), default)
    everything = (*wrapping.gate_files(runtime, settings, real), *changed)
    planned = ChangeSet(
        NAME,
        runtime.key,
        everything,
        files.restart_command(runtime, settings),
        tuple(_notes(runtime, settings, now, real, patterns)),
    )
    return evolve(planned, restart="") if wrapping.is_in_force(runtime, settings, everything) else planned


def _notes(
    runtime: Runtime, settings: Settings, now: _Handlers, real: str, patterns: list[str]
) -> Iterator[str]:
    yield from wrapping.notes(settings, now.default, real, patterns)
    running = runtime.get("default_handler")
    if running not in (None, now.default, settings.oci_hook.handler):
        yield (
            f"the running containerd has the default handler {running}, its files say {now.default}: "
            "something else changes with the restart"
        )
    if settings.oci_hook.handler_mode == "named":
        yield wrapping.runtime_class(settings)


# --- the handlers --------------------------------------------------------------------------------------


def _handlers(documents: files.Documents, plugin: str, *, replaces: bool) -> _Handlers:
    cri = files.merged(documents, plugin, replaces=replaces)
    table = cri.get("containerd", {})
    handlers = table.get("runtimes", {}) if isinstance(table, dict) else None
    path = _owner(documents, plugin)
    if not isinstance(handlers, dict) or not all(isinstance(entry, dict) for entry in handlers.values()):
        raise HostError(
            _UNREADABLE,
            f"the handlers in {quoted(path, None)} are no tables",
            "write each as a table of its own: [….runtimes.NAME]",
            file=path,
        )
    old = table.get("default_runtime")
    if isinstance(old, dict) and old.get("runtime_type"):
        raise HostError(
            "HOK116",
            f"default_runtime in {quoted(path, None)} is what counts, before default_runtime_name",
            "write it as a handler of runtimes, and its name into default_runtime_name",
            file=path,
        )
    written = bool(handlers)
    if not replaces:
        handlers = merge_tables(_DEFAULTS, handlers)
    elif not written:
        # Up to 1.7 the first handler in a file takes the built-in one away.
        handlers = copy.deepcopy(dict(_DEFAULTS))
    default = table.get("default_runtime_name") or _DEFAULT
    if not isinstance(default, str):
        raise HostError(
            _UNREADABLE,
            f"default_runtime_name in {quoted(path, None)} is no string",
            "write the name of a handler there, in quotes",
            file=path,
        )
    return _Handlers(handlers, default, written)


def _must_be_sound(name: str, handler: Mapping[str, Any], path: str) -> None:
    """Raises `HostError` ``HOK112`` where a handler that is copied has something of a wrong type."""
    annotations, options = handler.get("pod_annotations", []), handler.get("options", {})
    binary = options.get("BinaryName", "") if isinstance(options, dict) else ""
    strings = isinstance(annotations, list) and all(isinstance(each, str) for each in annotations)
    for key, right in (
        ("pod_annotations", strings),
        ("options", isinstance(options, dict)),
        ("options.BinaryName", isinstance(binary, str)),
    ):
        if not right:
            raise HostError(
                _UNREADABLE,
                f"{key} of handler {quoted(name)} in {quoted(path, None)} is of a wrong type",
                "correct it: containerd does not start with it either",
                file=path,
            )


def _binary(name: str, handler: Mapping[str, Any]) -> str:
    """The low-level runtime that a handler names. Raises `HostError` ``HOK113``."""
    type_ = handler.get("runtime_type", "")
    if type_ not in wrapping.RUNC_LIKE:
        raise wrapping.not_runc_like(name, str(type_))
    binary: str = handler.get("options", {}).get("BinaryName", "")
    return binary


def _copy(handler: Mapping[str, Any], gate: str, patterns: list[str]) -> dict[str, Any]:
    ours = copy.deepcopy(dict(handler))
    options = ours.pop("options", {})
    ours["pod_annotations"] = list(dict.fromkeys([*ours.get("pod_annotations", ()), *patterns]))
    # Last, because a table has to stand behind its parent's own keys.
    ours["options"] = {**options, "BinaryName": gate}
    return ours


# --- where it is written -------------------------------------------------------------------------------


def _drop_in(
    main: files.Main,
    _: files.Documents,
    __: Mapping[str, bytes],
    plugin: str,
    now: _Handlers,
    ours: tuple[str, dict[str, Any]],
    default: str,
) -> tuple[FileChange, ...]:
    """Since 2.0 tables are merged: a file of our own adds to what others say, today and later."""
    path = main.beside(_DROP_IN)
    table = _table(now, ours, default, everything=False)
    text = files.drop_in(main.schema, plugin, {"containerd": table})
    change = FileChange(path, text.encode(), _what(ours[0], now, default))
    if files.covered(main, path):
        return (change,)
    return change, files.with_import(main, main.beside(_PATTERN), "has containerd read that file")


def _edit_in_place(
    main: files.Main,
    documents: files.Documents,
    texts: Mapping[str, bytes],
    plugin: str,
    now: _Handlers,
    ours: tuple[str, dict[str, Any]],
    default: str,
) -> tuple[FileChange, ...]:
    """Up to 1.7 the last file with the plugin's table is all that counts, so that is the file to edit.

    A file of our own would have to repeat everything, and whatever is changed in the others afterwards, a
    mirror, a path, would silently not count any more. Edited in place every other byte stays, uninstalling
    puts the file back, and from one that was changed since it takes out these keys alone.
    """
    owners = [path for path, document in documents.items() if files.plugin_table(document, plugin)]
    path = owners[-1] if owners else main.path
    data = texts.get(path) or (main.data if path == main.path else read_file(path, _UNREADABLE))
    data = data or b""
    if not documents[path]:
        # Without a version it would be taken for one of version 1, whatever it says.
        data = tomledit.add_line(data, f"version = {main.schema}")
    root = ("plugins", plugin, "containerd")
    added = {**(now.handlers if not now.written else {}), ours[0]: ours[1]}
    keys: list[tomledit.Key] = [(*root, "runtimes", name) for name in added]
    try:
        if default != now.default:
            keys.append((*root, "default_runtime_name"))
            data = tomledit.put(data, keys[-1], default)
        for name, table in added.items():
            data = tomledit.add_table(data, (*root, "runtimes", name), table)
    except CourierError as error:
        table = _table(now, ours, default, everything=True)
        text = files.drop_in(main.schema, plugin, {"containerd": table})
        raise HostError(
            error.code,
            f"{quoted(path, None)}: {error.message}",
            "write into it what follows, and install again with another [oci_hook] handler; or write its "
            f"plugins as tables of their own\n{text}",
            file=path,
        ) from None
    return (FileChange(path, data, _what(ours[0], now, default), keys=tuple(keys)),)


def _table(
    now: _Handlers, ours: tuple[str, dict[str, Any]], default: str, *, everything: bool
) -> dict[str, Any]:
    handlers = {**(now.handlers if everything and not now.written else {}), ours[0]: ours[1]}
    return {
        **({"default_runtime_name": default} if default != now.default else {}),
        "runtimes": handlers,
    }


def _what(name: str, now: _Handlers, default: str) -> str:
    return f"adds handler {name}" + (", and makes it the default" if default != now.default else "")


# --- refusals ------------------------------------------------------------------------------------------


def _must_load(documents: files.Documents) -> None:
    found = files.disabling(documents, _DISABLED)
    if found is not None:
        raise HostError(
            "HOK116",
            f"disabled_plugins of {quoted(found[0], None)} names {found[1]}, so no pods come to containerd",
            "take it out of that list, if this containerd is to run pods",
            file=found[0],
        )


def _must_count(
    before: files.Documents, now: _Handlers, plugin: str, ours: tuple[str, dict[str, Any]], default: str
) -> None:
    """Raises if the handlers, with everything written, are not what was meant."""
    if now.default == default and now.handlers.get(ours[0]) == ours[1]:
        return
    # Only files that were there before can be in the way.
    path = _owner(before, plugin)
    raise HostError(
        "HOK116",
        f"{quoted(path, None)} is read later, and sets default_runtime_name or the same handler",
        "take that out there",
        file=path,
    )


def _owner(documents: files.Documents, plugin: str) -> str:
    """The last file that says something of the plugin, else the main one."""
    owners = [path for path, document in documents.items() if files.plugin_table(document, plugin)]
    return owners[-1] if owners else next(iter(documents))
