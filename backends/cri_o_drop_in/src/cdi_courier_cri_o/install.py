"""What has CRI-O run another backend: the drop-in, what it refers to, and the checks before it is written.

Source: docs/facts.md#cri-o. It reads the host's files, asks CRI-O
and writes nothing. Only used by commands, never by the daemon.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from cdi_courier.changes import ChangeSet, FileChange
from cdi_courier.errors import HostError, quoted
from cdi_courier.host import configured, processes
from cdi_courier.host.files import Root

from . import NAME, configuration, dropin, dryrun, offers, ways

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdi_courier.host.model import Runtime
    from cdi_courier.settings import Settings

    from .configuration import Configuration

_RESTART: Final = "systemctl restart crio"
_FIRST_WITH_CRUN: Final = (1, 31, 0)
"""From here on crun is what CRI-O runs if no file says otherwise."""

# Options of crio that beat every file, and the variables that stand for them; NRI's has none.
_OPTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "nri": ("--enable-nri", ""),
    "handler": ("--default-runtime", "CONTAINER_DEFAULT_RUNTIME"),
}
_NRI: Final = ("crio", "nri")
_RUNTIME: Final = ("crio", "runtime")

_Tables = dict[tuple[str, ...], dict[str, Any]]


def plan(runtime: Runtime, settings: Settings, *, restart: bool = True) -> ChangeSet:
    """What has this CRI-O deliver by the best way; a set without files if it does already.

    restart: whether the way may need one. Raises `HostError`: ``CRI101`` no way is possible, ``CRI102`` the
    default handler is not known, ``CRI103`` a file of CRI-O's is broken, ``CRI104``, ``CRI105`` CRI-O's own
    program refuses or does not understand the drop-in, ``CRI106`` a later file overrides it, ``CRI107`` an
    option of CRI-O does, ``CRI108`` a program that is named does not exist, ``CRI109`` the handler's name is
    somebody else's, ``CRI110`` no directory for the hook can be written.
    """
    if runtime.kind != "cri-o":
        # Where the backend is named, it is asked to plan for every runtime of the host.
        raise HostError(
            "CRI101", f"{runtime.key} is not CRI-O, which this backend is for only", "name another backend"
        )
    mode, reasons = offers.choose(runtime, settings, restart=restart)
    if not mode:
        raise HostError(
            "CRI101",
            f"CRI-O cannot be made to deliver: {'; '.join(dict.fromkeys(reasons.values()))}",
            "cdi-courier doctor shows what is known of it and from where",
        )
    notes = [f"not by {name}: {why}" for name, why in reasons.items()]
    if mode == "hook":
        return _hook(runtime, settings, notes)
    if mode == "nri" and runtime.get("nri") == "on" and offers.offer(runtime, settings).needs == "impossible":
        return ChangeSet(NAME, runtime.key, notes=(f"{runtime.key} serves NRI already",))
    found = configuration.read(runtime, settings)
    if mode == "handler":
        _must_be_free(found, settings)
    _must_be_read(runtime, found, mode, settings)
    files, tables, comments = _nri() if mode == "nri" else _handler(runtime, found, settings)
    kept = _kept(found, settings, tables)
    if kept:
        comments += ("The other handlers stay for the containers that were created with them.",)
    content = dropin.render({**tables, **kept}, comments)
    crio = dryrun.program(runtime.get("pid"))
    if crio:
        dryrun.check(crio, found, content, _keys(tables))
    else:
        notes.append("CRI-O's program was not found, so that it could not read the drop-in for a try")
    files = (*_obsolete(runtime), *files, FileChange(found.drop_in, content, offers.WHAT[mode]))
    if offers.offer(runtime, settings).needs == "nothing" and ways.are_written(files):
        return ChangeSet(NAME, runtime.key, notes=(f"{runtime.key} is set up already",))
    notes += [f"not verified: {what}" for what in found.unverified]
    notes += _notes(mode, runtime, settings, tables)
    command = configured.restart_command(runtime, settings, _RESTART)
    return ChangeSet(NAME, runtime.key, files, command, tuple(notes))


# --- the three ways ------------------------------------------------------------------------------------


def _nri() -> tuple[tuple[FileChange, ...], _Tables, tuple[str, ...]]:
    return (), {_NRI: {"enable_nri": True}}, ()


def _kept(found: Configuration, settings: Settings, tables: _Tables) -> _Tables:
    """The handlers of ours from before; without them, their pods could not even be stopped."""
    running = {
        name: table
        for name, table in configuration.handlers_of(found.running or {}).items()
        if isinstance(table, dict) and ways.is_gate(settings, str(table.get("runtime_path")))
    }
    every = {**running, **configuration.handlers_of(found.ours)}
    kept = {
        (*_RUNTIME, "runtimes", name): dropin.clone(table, str(table.get("runtime_path")))
        for name, table in every.items()
        if isinstance(table, dict)
    }
    return {key: table for key, table in kept.items() if key not in tables}


def _handler(
    runtime: Runtime, found: Configuration, settings: Settings
) -> tuple[tuple[FileChange, ...], _Tables, tuple[str, ...]]:
    name = settings.oci_hook.handler
    base, table = _default(runtime, found, settings)
    real = _program(table.get("runtime_path") or base, "runtime_path", base)
    if ways.is_gate(settings, real):
        # Only the wrapper's own table is left of the default handler.
        real = _program(ways.real_of(real), "runtime_path", base)
    if table.get("monitor_path"):
        _program(table["monitor_path"], "monitor_path", base)
    files = ways.gate_files(settings, real)
    tables: _Tables = {}
    if settings.oci_hook.handler_mode == "default":
        tables[_RUNTIME] = {"default_runtime": name}
    tables[(*_RUNTIME, "runtimes", name)] = dropin.clone(table, files[-1].path)
    comments = (
        f"Handler {base} as CRI-O has it, but for runtime_path: the wrapper runs {real}.",
        "After a change of that handler run `cdi-courier install` again.",
    )
    return files, tables, comments


def _hook(runtime: Runtime, settings: Settings, notes: list[str]) -> ChangeSet:
    directories = offers.hooks_dirs(runtime)
    # What CRI-O watches already, best where the hook's package looks; of any other it knows nothing.
    preferred = ways.hook_directory(runtime)
    for directory in sorted(directories, key=lambda path: os.path.normpath(path) != preferred):
        if os.path.isdir(directory) and os.access(directory, os.W_OK) and not _is_read_only(directory):
            break
    else:
        raise HostError(
            "CRI110",
            f"no directory that CRI-O watches for hooks can be written: {', '.join(directories)}",
            "make one of them, or name another in [crio.runtime] hooks_dir and restart CRI-O",
        )
    files = ways.hook_files(settings, directory)
    if ways.are_written(files):
        return ChangeSet(NAME, runtime.key, notes=(f"{runtime.key} is set up already",))
    notes.append("CRI-O reads the hook for the next container; nothing is restarted")
    notes.append("env, additional groups and hooks of later stages are not delivered this way")
    return ChangeSet(NAME, runtime.key, files, "", tuple(notes))


def _is_read_only(directory: str) -> bool:
    return bool(os.statvfs(directory).f_flag & os.ST_RDONLY)


def _obsolete(runtime: Runtime) -> Iterator[FileChange]:
    """The hooks of earlier installations: two ways at once would deliver twice."""
    for path in offers.hooks_of(runtime):
        yield FileChange(path, None, "the hook is not needed any more")


# --- the default handler -------------------------------------------------------------------------------


def _default(runtime: Runtime, found: Configuration, settings: Settings) -> tuple[str, dict[str, Any]]:
    """The handler that is the default without us, and its table."""
    ours = settings.oci_hook.handler
    running, stored = found.running or {}, found.stored
    name = configuration.default_of(running)
    if name in ("", ours):
        name = configuration.default_of(stored) or _built_in(runtime)
    for document in (running, stored):
        table = configuration.handlers_of(document).get(name)
        if isinstance(table, dict):
            return name, table
    for document in (running, found.ours):
        table = configuration.handlers_of(document).get(ours)
        if isinstance(table, dict):
            return name, table
    if name == _built_in(runtime):
        # What CRI-O has for it when no file does; the program is looked up.
        return name, {"runtime_type": "oci", "runtime_root": f"/run/{name}"}
    raise HostError(
        "CRI102",
        f"default_runtime is {quoted(name)}, and no file of CRI-O's has a handler of that name",
        "correct [crio.runtime] default_runtime, or start CRI-O so that it can be asked",
    )


def _built_in(runtime: Runtime) -> str:
    version = runtime.version_tuple
    if version is None:
        raise HostError(
            "CRI102",
            "which handler is CRI-O's default is not known: no file says it, and neither does its version",
            "start CRI-O so that it can be asked, or write [crio.runtime] default_runtime",
        )
    return "crun" if version >= _FIRST_WITH_CRUN else "runc"


def _program(value: Any, key: str, handler: str) -> str:
    """The absolute path of a program that CRI-O runs. A dry run sees nothing of what is wrong here."""
    path = value if isinstance(value, str) else ""
    if path and "/" not in path:
        # CRI-O looks handlers without a path up in PATH, by their name.
        for folder in dryrun.FOLDERS:
            if _is_program(f"{folder}/{path}"):
                return f"{folder}/{path}"
    if not _is_program(path):
        raise HostError(
            "CRI108",
            f"{key} of handler {handler} is {quoted(path)}, which is no absolute path of a program here",
            "correct it in CRI-O's configuration; CRI-O does not start with a default handler like that",
        )
    return path


def _is_program(path: str) -> bool:
    return os.path.isabs(path) and os.path.isfile(path) and os.access(path, os.X_OK)


# --- what would keep the drop-in from counting ---------------------------------------------------------


def _must_be_free(found: Configuration, settings: Settings) -> None:
    name = settings.oci_hook.handler
    for file in found.files:
        if name in configuration.handlers_of(file.document):
            raise HostError(
                "CRI109",
                f"{quoted(file.path, None)} has a handler {name} of its own",
                "choose another name: [oci_hook] handler",
                file=file.path,
            )


def _must_be_read(runtime: Runtime, found: Configuration, mode: str, settings: Settings) -> None:
    """Raises where CRI-O reads other folders, or something else has the last word."""
    pid = runtime.get("pid")
    words = processes.command_line(Root(), pid)
    environment = processes.environment(Root(), pid) if pid else {}
    folder = processes.option(words, "-d", "--config-dir", "-config-dir") or environment.get(
        "CONTAINER_CONFIG_DIR", ""
    )
    if folder and os.path.realpath(folder) != os.path.realpath(found.folder):
        raise HostError(
            "CRI107",
            f"CRI-O was started to read {quoted(folder, None)}, not {found.folder}",
            f"name it in the settings: [cri_o_drop_in] config_dir = {quoted(folder, None)}",
        )
    option, variable = _OPTIONS[mode]
    value = processes.option(words, option, option[1:]) or environment.get(variable, "")
    counts = (
        value.lower() in ("false", "0", "f")
        if mode == "nri"
        else (settings.oci_hook.handler_mode == "default" and value not in ("", settings.oci_hook.handler))
    )
    if counts:
        raise HostError(
            "CRI107",
            f"CRI-O was started with {option} {value}, which beats every file",
            f"take {' or '.join(filter(None, (option, variable)))} out of its unit or its environment file",
        )
    for path, what in offers.overriding(found, mode, settings):
        hint = "take that out there"
        if what.endswith("default_runtime"):
            hint += ', or set [oci_hook] handler_mode = "named" and use a RuntimeClass'
        raise HostError(
            "CRI106",
            f"{quoted(path, None)} sets {what}, and CRI-O reads it after {found.drop_in}",
            hint,
            file=path,
        )


# --- the rest ------------------------------------------------------------------------------------------


def _keys(tables: Mapping[tuple[str, ...], Mapping[str, Any]]) -> dict[tuple[str, ...], Any]:
    """The keys that make the difference, for reading back."""
    wanted = ("enable_nri", "default_runtime", "runtime_path")
    return {
        (*path, key): value for path, table in tables.items() for key, value in table.items() if key in wanted
    }


def _notes(mode: str, runtime: Runtime, settings: Settings, tables: _Tables) -> Iterator[str]:
    if mode == "nri":
        socket = offers.nri_socket(runtime)
        if os.path.realpath(socket) not in {os.path.realpath(path) for path in settings.nri.sockets}:
            yield f"CRI-O will listen on {socket}: name it in [nri] sockets"
        return
    name = settings.oci_hook.handler
    yield "only a pod proves that it is in effect: --apply --canary creates one and removes it again"
    if runtime.get("nri") == "on":
        yield (f'NRI is on as well: without [runtimes] cri-o = {{ backend = "{NAME}" }} both would deliver')
    if tables[(*_RUNTIME, "runtimes", name)].get("platform_runtime_paths"):
        yield "containers of the platforms in platform_runtime_paths bypass the wrapper and get no devices"
    if settings.oci_hook.handler_mode == "default":
        yield f"a pod without RuntimeClass runs with handler {name} after the restart"
        return
    yield ways.runtime_class(settings)
