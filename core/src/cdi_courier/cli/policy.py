"""``cdi-courier policy``: asking the policy."""

from __future__ import annotations

import click

from cdi_courier.cli import settings_of
from cdi_courier.errors import CdiError, quoted
from cdi_courier.names import parse_qualified
from cdi_courier.policy import allowing_rule, judge
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
    """Say whether a container may have devices, and by which rule.

    Exit code 0: yes, 1: no.
    """
    if not namespace:
        raise click.UsageError("--namespace must not be empty: without one no rule can be applied")
    for name in device:
        try:
            parse_qualified(name)
        except CdiError as error:
            raise click.UsageError(str(error)) from None
    rules = settings_of(context).policy.compiled()
    request = ContainerRequest({}, namespace=namespace, pod=pod, container=container)
    denied = []
    for name in device:
        allowed, why = judge(rules, request, name)
        click.echo(f"{'allowed' if allowed else 'denied'}: {quoted(name, None)} ({why})")
        if not allowed:
            denied.append(name)
    if denied:
        click.echo("to allow it, put this into a file in /etc/cdi-courier/conf.d that sorts last:")
        click.echo(allowing_rule(request, denied), nl=False)
        context.exit(1)
