"""``cdi-courier compile``: make the table that hooks and wrappers answer from."""

from __future__ import annotations

import json

import click

from cdi_courier import table
from cdi_courier.compiling import compile_settled, settings_place, write
from cdi_courier.errors import HostError, quoted


@click.command("compile")
@click.option("--print", "to_stdout", is_flag=True, help="Print the table instead of writing it.")
@click.pass_context
def compile_(context: click.Context, *, to_stdout: bool) -> None:
    """Compile settings, policy and spec files into [service] state_dir.

    Hooks do so themselves when something has changed; this only takes the time beforehand.
    """
    place = settings_place(context.find_root().obj)
    compiled = compile_settled(place)
    if to_stdout:
        click.echo(json.dumps(compiled.document, indent=2))
        return
    path = table.place(compiled.settings.service.state_dir)
    try:
        write(compiled, path)
    except OSError as error:
        raise HostError(
            "HOK001",
            f"the table {quoted(path, None)} cannot be written: {error.strerror}",
            "run as root, or set [service] state_dir",
            file=path,
        ) from None
    except ValueError as error:
        raise HostError("HOK001", f"the table is not written: {error}", "do it again later") from None
    click.echo(f"wrote {path}: {len(compiled.document['devices'])} devices")
