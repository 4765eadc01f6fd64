"""``cdi-courier devices``: what the CDI spec files offer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from cdi_courier.cli import plain, registry_of, tables

if TYPE_CHECKING:
    from cdi_courier.cdi.snapshot import Snapshot


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option(
    "--spec-dir", "spec_dirs", metavar="DIR", multiple=True, help="Look here instead of [cdi] dirs."
)
@click.pass_context
def devices(context: click.Context, as_json: bool, spec_dirs: tuple[str, ...]) -> None:
    """List the devices that can be asked for.

    Also says what is wrong with spec files. The exit code is 0 also if files have errors: they hurt no
    other file.
    """
    snapshot = registry_of(context, spec_dirs).snapshot()
    if as_json:
        click.echo(json.dumps(_report(snapshot), indent=2))
    else:
        _show(snapshot)


def _report(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "dirs": list(snapshot.dirs),
        "devices": {name: {"file": entry.path} for name, entry in sorted(snapshot.devices.items())},
        "conflicts": {name: list(paths) for name, paths in sorted(snapshot.conflicts.items())},
        "blocked": {name: str(error) for name, error in sorted(snapshot.blocked.items())},
        "errors": {
            **{path: [str(e) for e in errors] for path, errors in sorted(snapshot.errors.items())},
            **{path: [str(error)] for path, error in sorted(snapshot.dir_errors.items())},
        },
    }


def _show(snapshot: Snapshot) -> None:
    report = _report(snapshot)
    rows = [(name, entry["file"]) for name, entry in report["devices"].items()]
    if rows:
        for line in tables.lines(("DEVICE", "SPEC FILE"), rows):
            click.echo(line)
    else:
        click.echo(f"no devices in {plain(', '.join(snapshot.dirs))}")
    # A conflict is an error of each of its files.
    for error in dict.fromkeys(error for errors in report["errors"].values() for error in errors):
        click.echo(f"! {error}")
