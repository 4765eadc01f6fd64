"""``cdi-courier validate``: are these CDI spec files usable?"""

from __future__ import annotations

import json

import click

from cdi_courier.cdi.lint import advice
from cdi_courier.cdi.registry import load_file
from cdi_courier.cli import plain, settings_of
from cdi_courier.errors import CdiError


@click.command()
@click.option("--json", "as_json", is_flag=True, help='Print {"FILE": null or "message", …}.')
@click.option("--lint", is_flag=True, help="Add advice on stderr about what is valid and yet unwise.")
@click.argument("files", metavar="FILE…", nargs=-1, required=True)
@click.pass_context
def validate(context: click.Context, as_json: bool, lint: bool, files: tuple[str, ...]) -> None:
    """Check CDI spec files as runtimes do. Exit code 0 if all are valid, else 1.

    Who owns a file does not matter here; `devices` shows which files are trusted.
    """
    limit = settings_of(context).cdi.max_file_size
    results: dict[str, str | None] = {}
    for file in files:
        try:
            spec = load_file(file, limit)
        except CdiError as error:
            results[file] = str(error)
        else:
            results[file] = None
            for line in advice(spec) if lint else ():
                click.echo(f"{plain(file)}: advice: {line}", err=True)
    if as_json:
        click.echo(json.dumps(results, indent=2))
    else:
        for file, message in results.items():
            click.echo(f"{plain(file)}: valid" if message is None else message, err=message is not None)
    context.exit(1 if any(results.values()) else 0)
