"""``cdi-courier run``: the daemon."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import attrs
import click

from cdi_courier import service
from cdi_courier.cli import settings_of
from cdi_courier.errors import printable
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
    settings = settings_of(context)
    changes: dict[str, object] = {}
    if nri_socket is not None:
        changes["sockets"] = override("nri", "sockets", (nri_socket,), "--nri-socket")
    if nri_index is not None:
        changes["plugin_index"] = override("nri", "plugin_index", nri_index, "--nri-index")
    settings = attrs.evolve(settings, nri=attrs.evolve(settings.nri, **changes))  # type: ignore[arg-type]
    _log_to_stderr(settings)
    context.exit(service.run(settings, backend))


class _Formatter(logging.Formatter):
    """Text lines whose hostile parts cannot reach the terminal as control characters."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        record.message = printable(record.message)
        return super().formatMessage(record)


def _log_to_stderr(settings: Settings) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(settings.service.log_level.upper())
