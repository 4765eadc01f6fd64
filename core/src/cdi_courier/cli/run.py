"""``cdi-courier run``: the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import click

from cdi_courier import service
from cdi_courier.cli import settings_of
from cdi_courier.settings import override

if TYPE_CHECKING:
    from cdi_courier.settings import Settings


@click.command()
@click.option("--backend", metavar="NAME", help="Use this backend; an error if it cannot serve.")
@click.option("--nri-socket", metavar="PATH", help="The NRI socket, instead of [nri] sockets.")
@click.option("--nri-index", metavar="NN", help="The NRI plugin index, instead of [nri] plugin_index.")
@click.pass_context
def run(context: click.Context, backend: str | None, nri_socket: str | None, nri_index: str | None) -> None:
    """Serve container starts until stopped."""

    def read() -> Settings:
        settings = settings_of(context)
        changes: dict[str, object] = {}
        if nri_socket is not None:
            changes["sockets"] = override("nri", "sockets", (nri_socket,), "--nri-socket")
        if nri_index is not None:
            changes["plugin_index"] = override("nri", "plugin_index", nri_index, "--nri-index")
        return attrs.evolve(settings, nri=attrs.evolve(settings.nri, **changes))  # type: ignore[arg-type]

    context.exit(service.process(read, backend))
