"""``cdi-courier policy``: asking the policy."""

from __future__ import annotations

import click

from cdi_courier.cli import settings_of
from cdi_courier.errors import CdiError, PolicyDenied, quoted
from cdi_courier.names import parse_qualified
from cdi_courier.policy import judge, require
from cdi_courier.request import ContainerRequest


@click.group()
def policy() -> None:
    """Ask who may have what."""


@policy.command()
@click.option("--namespace", metavar="NS", required=True, help="The pod's namespace.")
@click.option("--pod", metavar="P", default="", help="The pod's name.")
@click.option("--container", metavar="C", default="", help="The container's name.")
@click.option("--device", metavar="NAME", required=True, multiple=True, help="A qualified device name.")
@click.pass_context
def check(context: click.Context, namespace: str, pod: str, container: str, device: tuple[str, ...]) -> None:
    """Say whether a container may have devices, and which rule decides. Exit code 0: yes, 1: no."""
    for name in device:
        try:
            parse_qualified(name)
        except CdiError as error:
            raise click.UsageError(str(error)) from None
    rules = settings_of(context).policy.compiled()
    request = ContainerRequest({}, namespace=namespace, pod=pod, container=container)
    for name in device:
        allowed, why = judge(rules, request, name)
        click.echo(f"{'allowed' if allowed else 'denied'}: {quoted(name)}, by {why}")
    try:
        require(rules, request, device)
    except PolicyDenied as denied:
        click.echo(denied.hint, nl=not denied.hint.endswith("\n"))
        context.exit(1)
