"""containerd's configuration files as an installer needs them: read, merged as containerd does, and added to.

Source: docs/facts.md#containerd-configuration. It writes nothing, and knows
nothing of what is installed. Only used by commands, never by the daemon. What it refuses bears the code of
whoever asks.
"""

from __future__ import annotations

import fnmatch
import glob
import posixpath
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from cdi_courier import tomledit
from cdi_courier.changes import FileChange
from cdi_courier.errors import CourierError, HostError, quoted
from cdi_courier.host import configured
from cdi_courier.host.answers import merge_tables
from cdi_courier.host.files import read_file

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from cdi_courier.host.model import Runtime
    from cdi_courier.settings import Settings

    Documents = dict[str, dict[str, Any]]  # path → document, in the order in which containerd reads them

_RESTART: Final = "systemctl restart containerd"

_MAIN: Final = "/etc/containerd/config.toml"

# Who brings containerd → what extends the configuration that it generates.
_DISTRIBUTIONS: Final = {
    "k3s": "a template config.toml.tmpl, or config-v3.toml.tmpl for containerd 2, in the folder of its "
    'config.toml, with {{ template "base" . }} and the table',
    "rke2": "a template config.toml.tmpl, or config-v3.toml.tmpl for containerd 2, in the folder of its "
    'config.toml, with {{ template "base" . }} and the table',
    "k0s": "a file in /etc/k0s/containerd.d with the table",
    "microk8s": "the table in /var/snap/microk8s/current/args/containerd-template.toml",
}


@frozen
class Main:
    """containerd's main file.

    data: None if there is none. schema: its version; the one to give it, if it says nothing. replaces:
    whether a plugin's table in a later file replaces an earlier file's, as up to 1.7.
    """

    path: str
    data: bytes | None
    document: dict[str, Any]
    schema: int
    replaces: bool
    imports: list[str]

    def beside(self, name: str) -> str:
        """The path of a file below its folder."""
        return posixpath.join(posixpath.dirname(self.path), name)


def main_path(runtime: Runtime, settings: Settings) -> str:
    """Where its main file lies."""
    return configured.config(runtime, settings, _MAIN)


def restart_command(runtime: Runtime, settings: Settings) -> str:
    """What restarts it."""
    return configured.restart_command(runtime, settings, _RESTART)


def parsed(path: str, data: bytes | None, version: tuple[int, int, int] | None, code: str) -> Main:
    """The main file of a containerd of this version. Raises `HostError` with `code`."""
    document = {} if data is None else parse(path, data, code)
    schema = _schema(path, document, version, code)
    # An unknown version counts as 1.7: what is written then is right for 2.x too.
    replaces = schema <= 2 and not (version and version >= (2, 0, 0))
    return Main(path, data, document, schema, replaces, _imports(path, document, code))


def load(
    main: Main, code: str, *, without: Collection[str] = (), overlay: Mapping[str, bytes] | None = None
) -> Documents:
    """The documents that containerd reads, in its order: breadth first, each once.

    without: files to be taken for absent. overlay: files and the text they are taken to have, whether they
    are there or not. Raises `HostError` with `code`.
    """
    texts = overlay or {}
    documents: Documents = {}
    pending = [(main.path, main.document, main.imports)]
    if main.path in texts:
        document = parse(main.path, texts[main.path], code)
        pending = [(main.path, document, _imports(main.path, document, code))]
    while pending:
        path, content, patterns = pending.pop(0)
        if path in documents:
            continue
        documents[path] = content
        for pattern in patterns:
            for found in _matches(posixpath.join(posixpath.dirname(path), pattern), texts):
                data = texts[found] if found in texts else read_file(found, code)
                if data is not None and found not in without:
                    inner = parse(found, data, code)
                    pending.append((found, inner, _imports(found, inner, code)))
    return documents


def merged(documents: Documents, plugin: str, *, replaces: bool) -> dict[str, Any]:
    """The plugin's table that results from the files; without containerd's own defaults."""
    table: dict[str, Any] = {}
    for document in documents.values():
        found = plugin_table(document, plugin)
        if found:
            table = dict(found) if replaces else merge_tables(table, found)
    return table


def plugin_table(document: Mapping[str, Any], plugin: str) -> dict[str, Any]:
    """What one document says of a plugin; an empty table if nothing."""
    plugins = document.get("plugins")
    table = plugins.get(plugin) if isinstance(plugins, dict) else None
    return table if isinstance(table, dict) else {}


def disabling(documents: Documents, names: Sequence[str]) -> tuple[str, str] | None:
    """(file, name) where ``disabled_plugins`` names one of these."""
    for path, document in documents.items():
        disabled = document.get("disabled_plugins")
        for name in names:
            if isinstance(disabled, list) and name in disabled:
                return path, name
    return None


# --- what is written -----------------------------------------------------------------------------------


def drop_in(schema: int, plugin: str, table: Mapping[str, Any]) -> str:
    """A file with one plugin's table."""
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment("Made by cdi-courier; `cdi-courier uninstall` removes it."))
    document.add("version", tomlkit.item(schema))
    plugins = tomlkit.table(is_super_table=True)
    plugins.add(tomlkit.key(plugin), tomlkit.item(dict(table)))
    document.add("plugins", plugins)
    return tomlkit.dumps(document)


def covered(main: Main, path: str) -> bool:
    """Whether the main file surely imports the file already."""
    return any(_covers(pattern, path) for pattern in main.imports)


def with_import(main: Main, pattern: str, what: str) -> FileChange:
    """The main file with one more import; it is made if there is none. Raises `HostError` ``CHG006``."""
    line = f"imports = [{quoted(pattern, None)}]"
    items = (("imports", pattern),)
    data, schema = main.data, main.schema
    if data is None:
        return FileChange(main.path, f"version = {schema}\n{line}\n".encode(), what, items=items)
    try:
        if "imports" in main.document:
            edited = tomledit.append(data, "imports", pattern)
        elif main.document:
            edited = tomledit.add_line(data, line, after="version")
        else:
            edited = tomledit.add_line(tomledit.add_line(data, line), f"version = {schema}")
    except CourierError as error:
        raise HostError(
            error.code,
            f"{quoted(main.path, None)}: {error.message}",
            f"write into it: {line}",
            file=main.path,
        ) from None
    return FileChange(main.path, edited, what, items=items)


# --- refusals ------------------------------------------------------------------------------------------


def generated_by(runtime: Runtime) -> str:
    """Who generates the configuration of this containerd at each start; empty if nobody does."""
    found = runtime.get("distribution") or ("its distribution" if runtime.get("config_template") else "")
    return str(found)


def must_be_ours_to_edit(runtime: Runtime, code: str, table: str = "") -> None:
    """Raises for a containerd whose configuration somebody generates.

    table: what helps in the template that it is generated from, as TOML; empty where a table is not enough.
    """
    who = generated_by(runtime)
    if not who:
        return
    template = runtime.get("config_template")
    how = _DISTRIBUTIONS.get(who, "the table in the template that it is generated from")
    by_hand = f"put there{f' (see {template})' if template else ''}: {how} {table}; then restart it"
    instead = "use NRI where this containerd has it: `cdi-courier install --backend nri` says what it needs"
    raise HostError(
        code,
        f"{who} generates {runtime.key}'s configuration at each start",
        by_hand if table else instead,
    )


def version_1(main: Main, version: tuple[int, int, int] | None, lacks: str, code: str) -> CourierError:
    """The refusal of a main file of version 1. lacks: what such a file cannot do."""
    how = "write it anew as version 2"
    if version and version >= (2, 0, 0):
        how = f"`containerd -c {main.path} config migrate` prints it as a newer one"
    return HostError(
        code,
        f"{quoted(main.path, None)} is of version 1 (it declares none, or 1), which cannot {lacks}",
        how,
        file=main.path,
    )


# --- reading -------------------------------------------------------------------------------------------


def parse(path: str, data: bytes, code: str) -> dict[str, Any]:
    """A file's document. Raises `HostError` with `code`."""
    try:
        return tomledit.parse(data)
    except ValueError as error:
        raise HostError(
            code, f"{quoted(path, None)} is not TOML: {error}", "correct it first", file=path
        ) from None


def _schema(path: str, document: Mapping[str, Any], version: tuple[int, int, int] | None, code: str) -> int:
    """The version of the main file; of one that says nothing, the one to give it."""
    if not document:
        return 3 if version and version >= (2, 0, 0) else 2
    schema = document.get("version", 1)
    if not isinstance(schema, int):
        raise HostError(code, f"version of {quoted(path, None)} is no number", file=path)
    return schema


def _imports(path: str, document: Mapping[str, Any], code: str) -> list[str]:
    imports = document.get("imports", [])
    if not isinstance(imports, list) or not all(isinstance(item, str) for item in imports):
        raise HostError(code, f"imports of {quoted(path, None)} is no list of strings", file=path)
    return imports


def _matches(pattern: str, overlay: Mapping[str, bytes]) -> list[str]:
    if "*" not in pattern:
        return [posixpath.normpath(pattern)]
    found = set(glob.glob(pattern, include_hidden=True))
    return sorted(found | {path for path in overlay if _covers(pattern, path)})


def _covers(pattern: str, path: str) -> bool:
    """Whether an import surely reads the file. A doubtful one counts as no: a second import does no harm."""
    if not pattern.startswith("/") or "[" in pattern or "\\" in pattern:
        return False
    if "*" not in pattern:
        return posixpath.normpath(pattern) == path
    parts, names = pattern.split("/"), path.split("/")
    return len(parts) == len(names) and all(map(fnmatch.fnmatchcase, names, parts))
