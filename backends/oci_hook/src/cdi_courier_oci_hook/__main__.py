"""``python -m cdi_courier_oci_hook REAL`` prints a gate, for whoever puts it in its place by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from cdi_courier.compiling import load_settings, settings_place
from cdi_courier.errors import CourierError

from . import gate

if TYPE_CHECKING:
    from .wrapper import Kind


@click.command("cdi_courier_oci_hook", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("real")
@click.option(
    "--kind",
    type=click.Choice(["containerd", "cri-o", "docker"]),
    help="What will call it, which says where names are found. Without it containers are local.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="As of cdi-courier; it is written into the gate.",
)
def main(real: str, kind: Kind | None, config: Path | None) -> None:
    """Print the gate in front of the runtime REAL, such as /usr/sbin/runc.

    Make it executable where only root can write, and have it called instead of REAL.
    """
    try:
        script = gate.render(gate.make(load_settings(settings_place(config)), real, kind or ""))
    except CourierError as error:
        click.echo(error, err=True)
        raise SystemExit(1) from None
    sys.stdout.buffer.write(script)


if __name__ == "__main__":
    main()
