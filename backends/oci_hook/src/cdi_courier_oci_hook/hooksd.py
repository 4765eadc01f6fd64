"""Hook JSON for engines that read folders of it: CRI-O and Podman. Only for installers, never per container.

The schema is version 1.0.0 (docs/facts.md#hook-files). It must not know where an engine reads.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from . import installation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Literal

    from cdi_courier.annotations import KeyFamily
    from cdi_courier.changes import FileChange
    from cdi_courier.settings import Settings

    from .hook import Kind

    Stage = Literal["precreate", "createRuntime", "prestart"]

NAME: Final = "cdi-courier.json"
"""The hook's file in whatever folder."""

# The hook gets this environment and nothing else: with none, runtimes hand on their own or the container's.
# Without a locale Python looks for one.
_ENVIRONMENT: Final = ("PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8")
_META: Final = frozenset(r"\.+*?()|[]{}^$")


def files(
    settings: Settings, directory: str, kind: Kind, *, stage: Stage = "createRuntime"
) -> tuple[FileChange, ...]:
    """The hook for live injection in a folder that an engine watches.

    directory: absolute. kind: who runs it, see `hook.Installed`. stage: ``prestart`` for engines that do not
    know ``createRuntime``. Raises `SettingsError` ``SET005``.
    """
    from cdi_courier.changes import FileChange
    from cdi_courier.compiling import injector_of

    from . import hook

    families = injector_of(settings).families
    installed = hook.Installed(
        kind=kind,
        keys=keys(families),
        timeout=settings.oci_hook.timeout,
        interpreter=installation.interpreter(),
        settings=installation.settings_place(settings),
        state_dir=settings.service.state_dir,
        log=settings.oci_hook.log,
    )
    script = hook.command(installed, installation.package_path())
    return (
        FileChange(
            f"{directory}/{NAME}",
            document(script, installed.keys, stage, settings),
            "the hook that injects into annotated containers",
        ),
    )


def document(script: str, keys: Iterable[tuple[str, bool]], stage: Stage, settings: Settings) -> bytes:
    """A hook JSON that runs a Python command in a bare interpreter, for containers annotated so.

    keys: as `keys` returns them.
    """
    program = installation.bare_interpreter()
    told = "journalctl -t cdi-courier" if settings.oci_hook.log == "journal" else settings.oci_hook.log
    described = {
        "version": "1.0.0",
        "hook": {
            "path": program,
            # When the hook refuses a container, Podman prints these, and crun nothing that the hook says. The
            # last is for whoever reads that.
            "args": [program, "-I", "-S", "-c", script, f"the cause is in: {told}"],
            "env": list(_ENVIRONMENT),
            "timeout": settings.oci_hook.timeout,
        },
        "when": {"annotations": {pattern(keys): ".*"}},
        "stages": [stage],
    }
    return json.dumps(described, indent=2).encode() + b"\n"


def keys(families: Sequence[KeyFamily]) -> tuple[tuple[str, bool], ...]:
    """The annotations that ask, each once: a key or, if the second is true, the beginning of one."""
    return tuple(dict.fromkeys(form for forms, _ in families for form in forms))


def pattern(keys: Iterable[tuple[str, bool]]) -> str:
    """A regular expression of Go's that matches exactly these annotations; engines do not anchor it."""
    return "^(" + "|".join(_literal(key) + (".+" if begins else "") for key, begins in keys) + ")$"


def _literal(text: str) -> str:
    return "".join(f"\\{c}" if c in _META else c for c in text)
