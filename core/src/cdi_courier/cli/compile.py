"""``cdi-courier compile``: make the table that hooks and wrappers answer from."""

from __future__ import annotations

import json

import click

from cdi_courier import table
from cdi_courier.compiling import compile_settled, settings_place, write, write_patterns
from cdi_courier.errors import HostError, quoted
from cdi_courier.patterns import NAME


@click.command("compile")
@click.option("--print", "to_stdout", is_flag=True, help="Print the table instead of writing it.")
@click.pass_context
def compile_(context: click.Context, *, to_stdout: bool) -> None:
    """Compile settings, policy and specs for hooks and wrappers.

    The table goes into [service] state_dir. Hooks do so themselves when something has changed; this only
    takes the time beforehand.
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
        raise _unwritable("the table", path, error, "[service] state_dir") from None
    except ValueError as error:
        raise HostError("HOK001", f"the table is not written: {error}", "do it again later") from None
    click.echo(f"wrote {path}: {len(compiled.document['devices'])} devices")
    patterns = f"{compiled.settings.oci_hook.gate_dir}/{NAME}"
    try:
        if write_patterns(compiled):
            click.echo(f"wrote {patterns}: what the runtime wrapper looks for")
    except OSError as error:
        raise _unwritable(
            "what the runtime wrapper looks for", patterns, error, "[oci_hook] gate_dir"
        ) from None


def _unwritable(what: str, path: str, error: OSError, setting: str) -> HostError:
    reason = f"{what}, {quoted(path, None)}, cannot be written: {error.strerror}"
    return HostError("HOK001", reason, f"run as root, or set {setting}", file=path)
