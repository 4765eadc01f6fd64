"""``cdi-courier generate``: write CDI spec files."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from cdi_courier.cli import settings_of
from cdi_courier.errors import CourierError, PluginError, SettingsError, printable, quoted
from cdi_courier.generate import BUILT_IN, alias, write
from cdi_courier.generate.root import Root
from cdi_courier.plugins import discover

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdi_courier.hookspecs import Generated, Generator

_ALIAS = "alias"


class _Generators(click.Group):
    """`alias`, and a command for each generator that a plugin brings."""

    def list_commands(self, context: click.Context) -> list[str]:
        names = {_ALIAS, *(generator.name for generator in BUILT_IN)}
        with contextlib.suppress(SettingsError):  # help is shown all the same
            names |= {*discover(settings_of(context).backends.disabled).generators}
        return sorted(names)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name == _ALIAS:
            return _alias
        for generator in BUILT_IN:  # these need neither settings nor plugins
            if generator.name == name:
                return _command(generator)
        plugins = discover(settings_of(context).backends.disabled)
        for problem in plugins.problems.values():
            click.echo(f"cdi-courier: {problem}", err=True)
        found = plugins.generators.get(name)
        return None if found is None else _command(found)


@click.group(cls=_Generators)
def generate() -> None:
    """Write a CDI spec file for hardware that has none."""


def _output_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--dry-run", is_flag=True, help="Print the file instead of writing it."),
        click.option("--output", metavar="FILE", help=f"Instead of a file in {write.FOLDER}."),
    ):
        function = option(function)
    return function


def _command(generator: Generator) -> click.Command:
    @click.option("--root", metavar="DIR", default="/", help="Look at the host below DIR.", show_default=True)
    @click.option(
        "--mode",
        type=click.Choice(generator.modes),
        default=generator.modes[0],
        show_default=True,
        help="What the spec is for.",
    )
    @_output_options
    def run(root: str, mode: str, output: str | None, dry_run: bool) -> None:
        with Root(root) as opened:
            made, data = _made(generator, opened, mode)
        _finish(made, data, output or write.default_path(made.spec.kind), dry_run=dry_run)

    return click.command(generator.name, help=f"Write a spec for {printable(generator.summary)}.")(run)


def _made(generator: Generator, root: Root, mode: str) -> tuple[Generated, bytes]:
    try:
        made = generator.generate(root, mode)
        source = f" from {made.source}" if made.source else ""
        return made, write.to_bytes(made.spec, f"generate {generator.name} --mode {mode}{source}")
    except CourierError:
        raise
    except Exception as error:
        raise PluginError(
            "PLG005",
            f"the generator {quoted(generator.name)} failed: {quoted(f'{type(error).__name__}: {error}')}",
            "report it to its author",
        ) from error


@click.command(_ALIAS)
@click.argument("name", metavar="KIND=NAME")
@click.option(
    "--node", "nodes", metavar="PATH", multiple=True, required=True, help="A device node; may be repeated."
)
@click.option("--env", metavar="K=V", multiple=True, help="A variable; may be repeated.")
@click.option(
    "--mount",
    "mounts",
    metavar="SRC:DST[:OPTS]",
    multiple=True,
    help="A mount; may be repeated. Read-only unless OPTS are given.",
)
@_output_options
def _alias(
    name: str,
    nodes: tuple[str, ...],
    env: tuple[str, ...],
    mounts: tuple[str, ...],
    output: str | None,
    dry_run: bool,
) -> None:
    """Write a spec that gives any device a CDI name."""
    with Root() as root:
        made = alias.generate(root, name, paths=nodes, env=env, mounts=mounts)
    output = output or write.default_path(made.spec.kind, made.spec.devices[0].name)
    _finish(made, write.to_bytes(made.spec, f"generate alias {name}"), output, dry_run=dry_run)


def _finish(made: Generated, data: bytes, path: str, *, dry_run: bool) -> None:
    for warning in made.warnings:
        click.echo(f"warning: {printable(warning)}", err=True)
    if not path.endswith((".yaml", ".json")):
        click.echo(f"warning: runtimes read only files called .yaml or .json, not {quoted(path)}", err=True)
    if dry_run:
        click.echo(data, nl=False)
        return
    changed = write.write(path, data)
    click.echo(f"{printable(path)}: {'written' if changed else 'unchanged'}")
    for device in made.spec.devices:
        click.echo(f"  {made.spec.kind}={device.name}")
