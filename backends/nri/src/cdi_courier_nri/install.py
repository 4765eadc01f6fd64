"""What makes containerd serve NRI: a drop-in that enables it, and the import that makes it be read.

Source: docs/facts.md#nri-in-runtimes, #containerd-configuration. It reads
the runtime's files and writes none. Only used by commands, never by the daemon.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from cdi_courier.changes import ChangeSet, FileChange
from cdi_courier.errors import CourierError, HostError, quoted
from cdi_courier.host import containerd_files as files
from cdi_courier.host.files import read_file
from cdi_courier.host.model import FIRST_WITH_NRI

from . import NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdi_courier.host.model import Runtime
    from cdi_courier.settings import Settings

PLUGIN: Final = "io.containerd.nri.v1.nri"

_DROP_IN = "conf.d/50-cdi-courier-nri.toml"
# A pattern, although it is for one file: containerd 1.7 does not start if a plain name is missing.
_PATTERN = "conf.d/50-cdi-courier-nri*.toml"
_DEFAULT_SOCKET = "/var/run/nri/nri.sock"
_UNREADABLE = "NRI105"


def plan(runtime: Runtime, settings: Settings) -> ChangeSet:
    """What enables NRI in this runtime; a set without files if it serves NRI or only lacks the restart.

    Raises `CourierError`: ``NRI101`` it has none, ``NRI102`` its file is of a version that cannot enable it,
    ``NRI103`` its file is generated, ``NRI104`` something else in its files keeps NRI off, ``NRI105`` a file
    cannot be read, ``NRI106`` it is another backend's to enable.
    """
    if runtime.get("nri") == "on" and runtime.get("nri_connections") is not False:
        return ChangeSet(NAME, runtime.key, notes=(f"{runtime.key} serves NRI already",))
    if runtime.get("nri") == "absent" or runtime.kind not in ("containerd", "cri-o"):
        raise _none(runtime)
    if runtime.kind == "cri-o":
        raise HostError(
            "NRI106", f"NRI is off in {runtime.key}", "cdi-courier install --backend cri_o_drop_in enables it"
        )
    version = runtime.version_tuple
    if version is not None and version < FIRST_WITH_NRI["containerd"]:
        raise _none(runtime)
    files.must_be_ours_to_edit(runtime, "NRI103", f'[plugins."{PLUGIN}"] disable = false')
    return _containerd(runtime, settings, version)


def _containerd(runtime: Runtime, settings: Settings, version: tuple[int, int, int] | None) -> ChangeSet:
    path = files.main_path(runtime, settings)
    main = files.parsed(path, read_file(path, _UNREADABLE), version, _UNREADABLE)
    if main.schema == 1:
        # Seen on 1.7.24: with such a main file the table is ignored, wherever it stands.
        raise files.version_1(main, version, "enable NRI", "NRI102")
    old = main.replaces
    drop_in = main.beside(_DROP_IN)

    documents = files.load(main, _UNREADABLE, without=(drop_in,))
    _must_load(documents)
    current = files.merged(documents, PLUGIN, replaces=old)
    changes: tuple[FileChange, ...] = ()
    if current.get("disable", old) is not False or current.get("disable_connections"):
        # Up to 1.7 the drop-in's table is all that counts, so what others have set goes into it.
        text = _drop_in(main.schema, {**(current if old else {}), "disable": False})
        changes = (FileChange(drop_in, text.encode(), "enables NRI"),)
        if not files.covered(main, drop_in):
            folder = os.path.dirname(_DROP_IN)
            changes += (files.with_import(main, main.beside(_PATTERN), f"has containerd read {folder}"),)
        overlay = {change.path: change.content for change in changes if change.content is not None}
        _must_enable(files.load(main, _UNREADABLE, overlay=overlay), drop_in, replaces=old)
    return ChangeSet(
        NAME,
        runtime.key,
        changes,
        files.restart_command(runtime, settings),
        tuple(_notes(main, changes, current, settings)),
    )


def _drop_in(schema: int, table: Mapping[str, Any]) -> str:
    return files.drop_in(schema, PLUGIN, table)


def _notes(
    main: files.Main, changes: tuple[FileChange, ...], table: Mapping[str, Any], settings: Settings
) -> Iterator[str]:
    if not changes:
        yield f"{main.path} leaves NRI on already; only the restart is missing"
    elif not main.document:
        yield f"{main.path} says nothing yet; everything it does not say keeps containerd's defaults"
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


def _must_load(documents: files.Documents) -> None:
    found = files.disabling(documents, (PLUGIN,))
    if found is not None:
        raise HostError(
            "NRI104",
            f"disabled_plugins of {quoted(found[0], None)} names {PLUGIN}",
            "take it out of that list",
            file=found[0],
        )


def _must_enable(documents: files.Documents, drop_in: str, *, replaces: bool) -> None:
    """Raises if plugins could not connect with the drop-in in place."""
    table = files.merged(documents, PLUGIN, replaces=replaces)
    for key, default in (("disable", replaces), ("disable_connections", False)):
        if table.get(key, default) is not False:
            others = [
                path
                for path, document in documents.items()
                if path != drop_in and files.plugin_table(document, PLUGIN)
            ]
            raise HostError(
                "NRI104",
                f'[plugins."{PLUGIN}"] of {quoted(others[-1], None)} keeps plugins from connecting',
                f"write {key} = false there",
                file=others[-1],
            )
