"""What makes Podman call the ``precreate`` hook: a hook JSON in a folder of its own, and a drop-in naming it.

Source: docs/facts.md#podman-hooks, #hook-files. It reads the host's files and writes none. Only used by
commands and for offers, never per container; what only commands need is imported when they plan.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from cdi_courier.errors import HostError, quoted

from . import NAME, hooksd, installation, precreate

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdi_courier.annotations import KeyFamily
    from cdi_courier.changes import ChangeSet
    from cdi_courier.host.model import Runtime
    from cdi_courier.settings import Settings

HOOKS_DIR: Final = "/etc/cdi-courier/podman-hooks.d"
"""Nobody else's: CRI-O and Buildah fail on a stage they do not know, and read the usual folders."""

HOOK: Final = f"{HOOKS_DIR}/{hooksd.NAME}"
DROP_IN: Final = "/etc/containers/containers.conf.d/90-cdi-courier.conf"


def is_installed(runtime: Runtime) -> bool:
    """Whether Podman reads our folder and the hook lies there."""
    return HOOKS_DIR in runtime.get("hooks_dirs", ()) and os.path.isfile(HOOK)


def plan(runtime: Runtime, settings: Settings) -> ChangeSet:
    """What has this Podman call the hook. Needs no restart: each Podman reads its files anew.

    Raises `CourierError`: ``HOK101`` its directories are not known, ``HOK102`` a later file overrules the
    drop-in, ``HOK103`` it is asked for by a rootless user, ``SET005``.
    """
    from cdi_courier.changes import ChangeSet, FileChange
    from cdi_courier.compiling import injector_of

    if runtime.get("rootless"):
        raise HostError(
            "HOK103",
            "Podman's hook is installed in /etc, by root",
            "run it as root; the hook then serves rootless users too",
        )
    dirs = runtime.get("hooks_dirs")
    if dirs is None:
        because = f": {runtime.problems[0]}" if runtime.problems else ""
        raise HostError(
            "HOK101",
            f"the hooks directories that Podman reads are not known{because}",
            "cdi-courier doctor shows what is known of it and from where",
        )
    _must_count(runtime, dirs)
    families = injector_of(settings).families
    others = _dirs_without_ours(runtime, dirs)
    hooks_dirs = [*dict.fromkeys(path for path in others if path != HOOKS_DIR), HOOKS_DIR]
    return ChangeSet(
        NAME,
        runtime.key,
        (
            FileChange(HOOK, _hook(settings, families), "the hook that edits annotated containers"),
            FileChange(DROP_IN, _drop_in(hooks_dirs), f"has Podman read {HOOKS_DIR}"),
        ),
        notes=tuple(_notes(families)),
    )


def _dirs_without_ours(runtime: Runtime, dirs: Sequence[str]) -> Sequence[str]:
    """The list that would be in force without our drop-in. dirs: the one that is."""
    if DROP_IN not in runtime.facts["hooks_dirs"].source:
        return dirs
    from cdi_courier.host import podman
    from cdi_courier.host.answers import Findings
    from cdi_courier.host.files import Root

    findings = Findings()
    podman.learn_from_files(Root(), runtime.get("config", ""), "", findings, without=DROP_IN)
    found: Sequence[str] = findings.value("hooks_dirs") or ()
    return found


def _must_count(runtime: Runtime, dirs: Sequence[str]) -> None:
    """Raises if a file that Podman reads after the drop-in replaces the list."""
    source = runtime.facts["hooks_dirs"].source
    folder, name = os.path.split(source)
    replaces = folder == os.path.dirname(DROP_IN) and os.fsencode(name) > os.fsencode(
        os.path.basename(DROP_IN)
    )
    if HOOKS_DIR not in dirs and (
        replaces or (os.path.exists(DROP_IN) and source != DROP_IN and os.path.exists(HOOK))
    ):
        raise HostError(
            "HOK102",
            f"{quoted(source, None)} sets hooks_dir, and Podman reads it after {DROP_IN}",
            f'add "{HOOKS_DIR}" to the list there',
            file=source,
        )


def _hook(settings: Settings, families: Sequence[KeyFamily]) -> bytes:
    installed = precreate.Installed(
        interpreter=installation.interpreter(),
        settings=installation.settings_place(settings),
        state_dir=settings.service.state_dir,
        log=settings.oci_hook.log,
        origin="local",
    )
    script = precreate.command(installed, installation.package_path())
    keys = [(key, False) for key in _keys(families)]
    return hooksd.document(script, keys, "precreate", settings)


def _drop_in(hooks_dirs: Sequence[str]) -> bytes:
    items = ", ".join(quoted(path, None) for path in hooks_dirs)
    return (
        "# Made by cdi-courier; `cdi-courier uninstall` removes it. The list replaces earlier files' lists.\n"
        f"[engine]\nhooks_dir = [{items}]\n"
    ).encode()


def _notes(families: Sequence[KeyFamily]) -> Iterator[str]:
    yield f"containers are edited when they start, if annotated with {' or '.join(_keys(families))}"
    yield "install again after a change of [annotations] or [oci_hook], of hooks_dir, or of our place"


def _keys(families: Sequence[KeyFamily]) -> list[str]:
    """The keys that ask. Those that name the container are left out: Podman does not tell a hook its name."""
    return list(dict.fromkeys(key for forms, _ in families for key, scoped in forms if not scoped))
