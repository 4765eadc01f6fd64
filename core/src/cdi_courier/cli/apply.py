"""``cdi-courier apply``: put CDI devices into an OCI runtime config, as a runtime would."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from cdi_courier.cdi.edits import edits_to_dict
from cdi_courier.cli import registry_of
from cdi_courier.errors import CdiError, quoted
from cdi_courier.oci import apply_edits

UNRESOLVED = 3


@click.command()
@click.option("--spec-dir", "spec_dirs", metavar="DIR", multiple=True, help="Instead of [cdi] dirs.")
@click.option("--device", "devices", metavar="NAME", multiple=True, required=True, help="May be repeated.")
@click.argument("config", metavar="[CONFIG|-]", default="-")
@click.pass_context
def apply(context: click.Context, spec_dirs: tuple[str, ...], devices: tuple[str, ...], config: str) -> None:
    """Print an OCI config with CDI devices put in.

    CONFIG, or what comes on standard input, is left alone. Exit code 3 if a name cannot be resolved, with
    one line a name on stderr and nothing on stdout; 1 for any other failure.
    """
    snapshot = registry_of(context, spec_dirs).snapshot()
    names = tuple(dict.fromkeys(devices))
    unresolved = [name for name in names if name not in snapshot.devices]
    for name in unresolved:
        click.echo(f"{quoted(name)}: {snapshot.explain(name)}", err=True)
    if unresolved:
        context.exit(UNRESOLVED)
    what = "standard input" if config == "-" else quoted(config)
    try:
        text = sys.stdin.buffer.read() if config == "-" else Path(config).read_bytes()
        document = json.loads(text)
    except OSError as error:
        raise _unusable(f"{what} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        raise _unusable(f"{what} is not JSON: {quoted(str(error))[1:-1]}") from None
    edited = apply_edits(document, edits_to_dict(snapshot.resolve(names).edits))
    click.echo(json.dumps(edited))


def _unusable(why: str) -> CdiError:
    return CdiError("CDI018", f"the OCI config is not usable: {why}", "name the config.json of a bundle")
