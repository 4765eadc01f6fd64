"""``cdi-courier install --systemd``: the daemon's unit, for an installation that no package has made.

The unit is the packages' own with this installation's interpreter in it. A package brings its own unit, so
here one is written only where there is none. It knows nothing of runtimes and backends.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Final

import click

from cdi_courier import changes
from cdi_courier.cli.installing import run_command, show
from cdi_courier.errors import HostError, quoted

NAME: Final = "cdi-courier.service"
_RELOAD: Final = "systemctl daemon-reload"
_START: Final = ("systemctl enable cdi-courier.service", "systemctl restart cdi-courier.service")
_STOP: Final = "systemctl disable --now cdi-courier.service"
_SEE_UNIT: Final = f"see `systemctl status {NAME}`, then do it by hand"
_PROGRAM: Final = "/usr/bin/cdi-courier"
_HIDDEN: Final = {
    # what a unit may say → what it does not see then
    "ProtectHome": ("/home/", "/root/", "/run/user/"),
    "PrivateTmp": ("/tmp/", "/var/tmp/"),  # noqa: S108 - nothing is written there
}


UNITS: Final = "/etc/systemd/system"
"""The folder that the administrator's own units lie in."""
PACKAGED: Final = ("/usr/lib/systemd/system", "/lib/systemd/system")
"""The folders of packages' units."""
RUNNING: Final = "/run/systemd/system"
"""Is there where systemd runs."""
MANIFESTS: Final = "/var/lib/cdi-courier/unit"
"""Not that of the backends': undoing those leaves the daemon alone."""


def unit(interpreter: str) -> str:
    """The unit file that starts the daemon with an interpreter.

    interpreter: absolute, of the installation. Raises `HostError` ``CHG022`` for a path that a unit cannot
    hold, ``CHG023`` for one that the unit's own protection hides.
    """
    if not os.path.isabs(interpreter) or re.search(r"[\s\"'\\;$\0]", interpreter):
        raise HostError(
            "CHG022",
            f"the interpreter {quoted(interpreter)} cannot be named in a unit",
            "install into a folder without blanks, quotes and the like, such as /opt/cdi-courier",
        )
    text = Path(__file__).parents[1].joinpath(NAME).read_text(encoding="utf-8")
    places = (interpreter, os.path.realpath(interpreter))
    for key, folders in _HIDDEN.items():
        hides = re.search(rf"^{key}=(?!no|false|0)", text, re.MULTILINE)
        if hides and any(place.startswith(folders) for place in places):
            raise HostError(
                "CHG023",
                f"the interpreter {quoted(interpreter)} lies where {key}= of the unit hides it",
                "install elsewhere, such as into /opt/cdi-courier",
            )
    # -P: nothing is imported from the working directory.
    command = f"{interpreter.replace('%', '%%')} -P -m cdi_courier"
    program = re.compile(rf"^(Exec\w+=){re.escape(_PROGRAM)}(?=\s|$)", re.MULTILINE)
    return program.sub(lambda found: found[1] + command, text)


def plan(interpreter: str) -> changes.ChangeSet:
    """The change that puts the unit there.

    Raises `HostError`: as `unit`; ``CHG021`` if systemd does not run here, ``CHG024`` if a package has
    brought the unit.
    """
    _need_systemd()
    for folder in PACKAGED:
        if os.path.lexists(os.path.join(folder, NAME)):
            raise HostError(
                "CHG024",
                f"{folder}/{NAME} is there already, from a package",
                "use that one, or remove the package cdi-courier first",
            )
    file = changes.FileChange(f"{UNITS}/{NAME}", unit(interpreter).encode(), "starts cdi-courier at boot")
    return changes.ChangeSet("systemd", NAME, (file,), _RELOAD)


def install(*, dry_run: bool, start: bool, force: bool) -> None:
    """Write the unit, and say how to start it or do so. Raises what `plan` and `changes.apply` raise."""
    planned = plan(sys.executable)
    show(changes.preview(planned, folder=MANIFESTS, force=force))
    if dry_run:
        return
    steps = changes.apply(planned, folder=MANIFESTS, force=force)
    click.echo(f"{NAME}: {'written' if steps else 'is installed already'}")
    commands = (_RELOAD, *_START)
    if not start:
        click.echo(f"to start it: {' && '.join(commands)}")
        return
    for command in commands:
        run_command(command, _SEE_UNIT)
    click.echo(f"{NAME}: enabled and started")


def uninstall(*, dry_run: bool, stop: bool, force: bool) -> None:
    """Take the unit away, and say how to stop the daemon or do so before. Raises as `install`."""
    found = changes.installed(MANIFESTS)
    if not found:
        click.echo("nothing is installed")
    for manifest in found:
        show(changes.preview_undo(manifest, folder=MANIFESTS, force=force))
        if dry_run:
            return
        if stop:
            _need_systemd()
            run_command(_STOP, _SEE_UNIT)
        changes.undo(manifest, folder=MANIFESTS, force=force)
        click.echo(f"{NAME}: removed")
        if stop:
            run_command(_RELOAD, _SEE_UNIT)
        else:
            click.echo(f"to stop what runs: {_STOP} && {_RELOAD}")


def _need_systemd() -> None:
    if not os.path.isdir(RUNNING):
        raise HostError(
            "CHG021",
            "systemd does not run here",
            "have what starts services run `cdi-courier run`",
        )
