"""``cdi-courier config``: looking at the configuration."""

from __future__ import annotations

import click

from cdi_courier.cli import settings_of
from cdi_courier.plugins import discover
from cdi_courier.service import make_injector


@click.group()
def config() -> None:
    """Look at the configuration."""


@config.command()
@click.pass_context
def check(context: click.Context) -> None:
    """Say whether the configuration files are right, all of them."""
    settings = settings_of(context)
    plugins = discover(settings.backends.disabled)
    make_injector(settings, plugins)
    for problem in plugins.problems.values():
        click.echo(f"warning: {problem}", err=True)
    for file in settings.files:
        click.echo(f"read {file}")
    click.echo("the configuration is right" if settings.files else "no configuration file; all defaults")
