"""What makes containerd serve NRI: a drop-in that enables it, and the import that makes it be read.

Source: contracts nri-protocol.md §15, hooks-and-runtimes.md c.3, runtimes-verified.md (containerd). It reads
the runtime's files and writes none. Only used by commands, never by the daemon.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import posixpath
from typing import TYPE_CHECKING, Any, Final

from cdi_courier import tomledit
from cdi_courier.changes import ChangeSet, FileChange
from cdi_courier.errors import CourierError, HostError, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdi_courier.host.model import Runtime
    from cdi_courier.settings import RuntimeSettings, Settings

PLUGIN: Final = "io.containerd.nri.v1.nri"

_NAME = "nri"
_MAIN = "/etc/containerd/config.toml"
_DROP_IN = "conf.d/50-cdi-courier-nri.toml"
# A pattern, although it is for one file: containerd 1.7 does not start if a plain name is missing.
_PATTERN = "conf.d/50-cdi-courier-nri*.toml"
_RESTART = "systemctl restart containerd"
_DEFAULT_SOCKET = "/var/run/nri/nri.sock"

# Who brings containerd → what extends the configuration that it generates.
_DISTRIBUTIONS = {
    "k3s": "a template config.toml.tmpl, or config-v3.toml.tmpl for containerd 2, in the folder of its "
    'config.toml, with {{ template "base" . }} and the table',
    "rke2": "a template config.toml.tmpl, or config-v3.toml.tmpl for containerd 2, in the folder of its "
    'config.toml, with {{ template "base" . }} and the table',
    "k0s": "a file in /etc/k0s/containerd.d with the table",
    "microk8s": "the table in /var/snap/microk8s/current/args/containerd-template.toml",
}


def plan(runtime: Runtime, settings: Settings) -> ChangeSet:
    """What enables NRI in this runtime; a set without files if it serves NRI or only lacks the restart.

    Raises `CourierError`: ``NRI101`` it has none, ``NRI102`` its file is of a version that cannot enable it,
    ``NRI103`` its file is generated, ``NRI104`` something else in its files keeps NRI off, ``NRI105`` a file
    cannot be read, ``NRI106`` it is another backend's to enable.
    """
    if runtime.get("nri") == "on" and runtime.get("nri_connections") is not False:
        return ChangeSet(_NAME, runtime.key, notes=(f"{runtime.key} serves NRI already",))
    if runtime.get("nri") == "absent" or runtime.kind not in ("containerd", "cri-o"):
        raise _none(runtime)
    if runtime.kind == "cri-o":
        raise HostError(
            "NRI106", f"NRI is off in {runtime.key}", "cdi-courier install --backend cri_o_drop_in enables it"
        )
    version = runtime.version_tuple
    if version is not None and version < (1, 7, 0):
        raise _none(runtime)
    _own_configuration(runtime)
    return _containerd(runtime, settings, version)


def _containerd(runtime: Runtime, settings: Settings, version: tuple[int, int, int] | None) -> ChangeSet:
    own = _settings_of(runtime, settings)
    main = own.config if own and own.config else runtime.get("config", _MAIN)
    drop_in = posixpath.join(posixpath.dirname(main), _DROP_IN)
    data = _read(main)
    document = {} if data is None else _parse(main, data)
    schema = _schema(main, document, version)
    if schema == 1:
        raise _version_1(main, version)
    # An unknown version counts as 1.7: what is written then is right for 2.x too.
    old = schema == 2 and not (version and version >= (2, 0, 0))
    imports = _imports(main, document)
    covered = any(_covers(pattern, drop_in) for pattern in imports)
    pattern = posixpath.join(posixpath.dirname(main), _PATTERN)

    files = _load(main, document, imports, without=drop_in)
    _must_load(files)
    current = _effective(files, replaces=old)
    changes: tuple[FileChange, ...] = ()
    if current.get("disable", old) is not False or current.get("disable_connections"):
        # Up to 1.7 the drop-in's table is all that counts, so what others have set goes into it.
        text = _drop_in(schema, {**(current if old else {}), "disable": False})
        all_imports = [*imports, *([] if covered else [pattern])]
        _must_enable(_load(main, document, all_imports, drop_in=(drop_in, text)), drop_in, replaces=old)
        changes = (FileChange(drop_in, text.encode(), "enables NRI"),)
        if not covered:
            changes += (_main_change(main, data, document, schema, pattern),)
    return ChangeSet(
        _NAME,
        runtime.key,
        changes,
        own.restart if own and own.restart else _RESTART,
        tuple(_notes(main, data, document, changes, current, settings)),
    )


def _main_change(
    main: str, data: bytes | None, document: dict[str, Any], schema: int, pattern: str
) -> FileChange:
    what = f"has containerd read {posixpath.dirname(_DROP_IN)}"
    line = f"imports = [{quoted(pattern, None)}]"
    items = (("imports", pattern),)
    if data is None:
        return FileChange(main, f"version = {schema}\n{line}\n".encode(), what, items=items)
    try:
        if "imports" in document:
            edited = tomledit.append(data, "imports", pattern)
        elif document:
            edited = tomledit.add_line(data, line, after="version")
        else:
            edited = tomledit.add_line(tomledit.add_line(data, line), f"version = {schema}")
    except CourierError as error:
        raise HostError(
            error.code, f"{quoted(main, None)}: {error.message}", f"write into it: {line}", file=main
        ) from None
    return FileChange(main, edited, what, items=items)


def _notes(
    main: str,
    data: bytes | None,
    document: dict[str, Any],
    changes: tuple[FileChange, ...],
    table: Mapping[str, Any],
    settings: Settings,
) -> Iterator[str]:
    if not changes:
        yield f"{main} leaves NRI on already; only the restart is missing"
    elif data is None or not document:
        yield f"{main} says nothing yet; everything it does not say keeps containerd's defaults"
    socket = table.get("socket_path") or _DEFAULT_SOCKET
    known = {os.path.realpath(path) for path in settings.nri.sockets}
    if os.path.realpath(socket) not in known:
        yield f"containerd will listen on {socket}: name it in [nri] sockets"


# --- refusals ------------------------------------------------------------------------------------------


def _none(runtime: Runtime) -> CourierError:
    return HostError(
        "NRI101",
        f"{runtime.key} {runtime.version} has no NRI".replace("  ", " "),
        "containerd has it since 1.7, CRI-O since 1.26; another backend may serve this one",
    )


def _own_configuration(runtime: Runtime) -> None:
    """Raises for a containerd whose configuration somebody generates."""
    distribution, template = runtime.get("distribution"), runtime.get("config_template")
    if not distribution and not template:
        return
    how = _DISTRIBUTIONS.get(distribution, "the table in the template that it is generated from")
    raise HostError(
        "NRI103",
        f"{distribution or 'its distribution'} generates {runtime.key}'s configuration at each start",
        f'put there{f" (see {template})" if template else ""}: {how} [plugins."{PLUGIN}"] disable = false; '
        "then restart it",
    )


def _version_1(main: str, version: tuple[int, int, int] | None) -> CourierError:
    how = "write it anew as version 2"
    if version and version >= (2, 0, 0):
        how = f"`containerd -c {main} config migrate` prints it as a newer one"
    # Seen on 1.7.24: with such a main file the table is ignored, wherever it stands.
    return HostError(
        "NRI102",
        f"{quoted(main, None)} is of version 1 (it declares none, or 1), which cannot enable NRI",
        how,
        file=main,
    )


def _must_load(files: Mapping[str, dict[str, Any]]) -> None:
    for path, document in files.items():
        disabled = document.get("disabled_plugins")
        if isinstance(disabled, list) and PLUGIN in disabled:
            raise HostError(
                "NRI104",
                f"disabled_plugins of {quoted(path, None)} names {PLUGIN}",
                "take it out of that list",
                file=path,
            )


def _must_enable(files: Mapping[str, dict[str, Any]], drop_in: str, *, replaces: bool) -> None:
    """Raises if plugins could not connect with the drop-in in place."""
    table = _effective(files, replaces=replaces)
    for key, default in (("disable", replaces), ("disable_connections", False)):
        if table.get(key, default) is not False:
            others = [path for path, document in files.items() if path != drop_in and _table(document)]
            raise HostError(
                "NRI104",
                f'[plugins."{PLUGIN}"] of {quoted(others[-1], None)} keeps plugins from connecting',
                f"write {key} = false there",
                file=others[-1],
            )


# --- containerd's files --------------------------------------------------------------------------------


def _drop_in(schema: int, table: Mapping[str, Any]) -> str:
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment("Made by cdi-courier; `cdi-courier uninstall` removes it."))
    document.add("version", tomlkit.item(schema))
    plugins = tomlkit.table(is_super_table=True)
    plugins.add(tomlkit.key(PLUGIN), tomlkit.item(dict(table)))
    document.add("plugins", plugins)
    return tomlkit.dumps(document)


def _schema(main: str, document: Mapping[str, Any], version: tuple[int, int, int] | None) -> int:
    """The version of the main file; of one that says nothing, the one to give it."""
    if not document:
        return 3 if version and version >= (2, 0, 0) else 2
    schema = document.get("version", 1)
    if not isinstance(schema, int):
        raise HostError("NRI105", f"version of {quoted(main, None)} is no number", file=main)
    return schema


def _load(
    main: str,
    document: dict[str, Any],
    imports: list[str],
    *,
    without: str = "",
    drop_in: tuple[str, str] = ("", ""),
) -> dict[str, dict[str, Any]]:
    """Path → document of the files that containerd reads, in its order: breadth first, each once.

    without: a file to be taken for absent. drop_in: one, and the text it is taken to have.
    """
    documents: dict[str, dict[str, Any]] = {}
    pending = [(main, document, imports)]
    while pending:
        path, content, patterns = pending.pop(0)
        if path in documents:
            continue
        documents[path] = content
        for pattern in patterns:
            for found in _matches(posixpath.join(posixpath.dirname(path), pattern), drop_in[0]):
                data = drop_in[1].encode() if found == drop_in[0] else _read(found)
                if data is not None and found != without:
                    inner = _parse(found, data)
                    pending.append((found, inner, _imports(found, inner)))
    return documents


def _matches(pattern: str, drop_in: str) -> list[str]:
    if "*" not in pattern:
        return [posixpath.normpath(pattern)]
    found = set(glob.glob(pattern, include_hidden=True))
    if _covers(pattern, drop_in):
        found.add(drop_in)
    return sorted(found)


def _covers(pattern: str, path: str) -> bool:
    """Whether an import surely reads the file. A doubtful one counts as no: a second import does no harm."""
    if not pattern.startswith("/") or "[" in pattern or "\\" in pattern:
        return False
    if "*" not in pattern:
        return posixpath.normpath(pattern) == path
    parts, names = pattern.split("/"), path.split("/")
    return len(parts) == len(names) and all(map(fnmatch.fnmatchcase, names, parts))


def _effective(files: Mapping[str, dict[str, Any]], *, replaces: bool) -> dict[str, Any]:
    """The NRI table that results. replaces: as up to 1.7, where a later file's table is all that counts."""
    table: dict[str, Any] = {}
    for document in files.values():
        found = _table(document)
        if found:
            table = dict(found) if replaces else {**table, **found}
    return table


def _table(document: Mapping[str, Any]) -> dict[str, Any]:
    plugins = document.get("plugins")
    table = plugins.get(PLUGIN) if isinstance(plugins, dict) else None
    return table if isinstance(table, dict) else {}


def _imports(path: str, document: Mapping[str, Any]) -> list[str]:
    imports = document.get("imports", [])
    if not isinstance(imports, list) or not all(isinstance(item, str) for item in imports):
        raise HostError("NRI105", f"imports of {quoted(path, None)} is no list of strings", file=path)
    return imports


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostError(
            "NRI105", f"cannot read {quoted(path, None)}: {error.strerror}", "run as root", file=path
        ) from None


def _parse(path: str, data: bytes) -> dict[str, Any]:
    try:
        return tomledit.parse(data)
    except ValueError as error:
        raise HostError(
            "NRI105", f"{quoted(path, None)} is not TOML: {error}", "correct it first", file=path
        ) from None


def _settings_of(runtime: Runtime, settings: Settings) -> RuntimeSettings | None:
    for key in (runtime.endpoint, runtime.key, runtime.kind):
        if key and key in settings.runtimes:
            return settings.runtimes[key]
    return None
