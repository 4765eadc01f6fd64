"""``cdi-courier uninstall``: put back what ``install`` changed, by the manifest and without the backend.

A file that containers depend on is the last to go: nothing is undone while a container needs it, and it stays
as long as a runtime that runs would call it, which is until that is restarted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cdi_courier import changes
from cdi_courier.cli import held, settings_of
from cdi_courier.cli.installing import modes, run_command, show
from cdi_courier.errors import CourierError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.changes import Manifest
    from cdi_courier.settings import Settings


@click.command()
@click.option("--backend", metavar="NAME", help="Only this one.")
@click.option("--runtime", "key", metavar="KEY", help="Only for this runtime, by the name `install` printed.")
@click.option("--dry-run", is_flag=True, help="Only show what would be written.")
@click.option("--apply", "restart", is_flag=True, help="Also restart the runtime.")
@click.option("--no-restart", is_flag=True, help="Print the restart command; this is the default.")
@click.option("--force", is_flag=True, help="Restore also files that were changed since.")
@click.option("--systemd", is_flag=True, help="Take the unit of `install --systemd` away instead.")
@click.pass_context
def uninstall(
    context: click.Context,
    backend: str | None,
    key: str | None,
    *,
    dry_run: bool,
    restart: bool,
    no_restart: bool,
    force: bool,
    systemd: bool,
) -> None:
    """Put every file back as it was before `cdi-courier install`.

    From a file that was changed since, only what cdi-courier added is taken out. Nothing is done while a
    container still uses a wrapper that is installed.
    """
    modes(dry_run=dry_run, apply=restart, no_restart=no_restart)
    if systemd:
        from cdi_courier.cli import systemd as unit

        if backend is not None or key is not None:
            raise click.UsageError("--systemd goes with neither --backend nor --runtime")
        unit.uninstall(dry_run=dry_run, stop=restart, force=force)
        return
    settings = settings_of(context)
    every = changes.installed(changes.FOLDER)
    found = [
        manifest
        for manifest in every
        if backend in (None, manifest.backend) and key in (None, manifest.runtime)
    ]
    if not found:
        others = ", ".join(f"{manifest.backend} for {manifest.runtime}" for manifest in every)
        click.echo(f"nothing of that is installed, only {others}" if others else "nothing is installed")
    failed = False
    for manifest in found:
        try:
            _do(manifest, settings, dry_run=dry_run, restart=restart, force=force)
        except CourierError as error:
            click.echo(f"{manifest.runtime}: {error}", err=True)
            failed = True
    context.exit(1 if failed else 0)


def _do(manifest: Manifest, settings: Settings, *, dry_run: bool, restart: bool, force: bool) -> None:
    own = settings.runtimes.get(manifest.runtime)
    command = manifest.restart
    if command and own is not None and own.restart:
        command = own.restart
    held.must_be_unused(manifest, settings)
    # What the daemon that runs would call goes only after its restart.
    kept = held.called(manifest, settings)
    show(changes.preview_undo(manifest, folder=changes.FOLDER, force=force, keep=kept))
    if dry_run:
        return
    _tell(manifest, changes.undo(manifest, folder=changes.FOLDER, force=force, keep=kept))
    # If only such files were left, the others are put back since an earlier call.
    effective = not kept and all(entry.held for entry in manifest.entries)
    if not kept:
        click.echo(f"{manifest.runtime}: {manifest.backend} is uninstalled")
    if command and restart and not effective:
        run_command(command)
        if kept:
            _tell(manifest, held.finish(manifest, settings, force=force))
            click.echo(f"{manifest.runtime}: {manifest.backend} is uninstalled")
    elif kept:
        click.echo(f"{manifest.runtime}: to make it effective: {command or 'restart the runtime'}")
        click.echo(f"{manifest.runtime}: then again: cdi-courier uninstall, which removes {', '.join(kept)}")
    elif command and not effective:
        click.echo(f"{manifest.runtime}: to make it effective: {command}")


def _tell(manifest: Manifest, steps: Sequence[changes.Step]) -> None:
    for step in steps:
        click.echo(f"{manifest.runtime}: {'removed' if step.after is None else 'put back'} {step.path}")
