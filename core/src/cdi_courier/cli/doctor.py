"""``cdi-courier doctor``: what this host is, what serves it, what to do next."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from cdi_courier import choice, status
from cdi_courier import doctor as doctors
from cdi_courier.cli import registry_of, settings_of
from cdi_courier.errors import CourierError, printable
from cdi_courier.host import conflicts
from cdi_courier.host.describe import describe
from cdi_courier.plugins import discover

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.hookspecs import Choice
    from cdi_courier.plugins import Plugins
    from cdi_courier.settings import Settings


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@click.option(
    "--probe", is_flag=True, help="Also touch the runtimes: register a plugin on NRI sockets for a moment."
)
@click.pass_context
def doctor(context: click.Context, as_json: bool, probe: bool) -> None:
    """Say what serves this host's runtimes, and what to do next.

    Shows what is known of each runtime and from where, and what every backend could do for it. The exit
    code is 0 if pods that ask are served now, else 1.
    """
    settings = settings_of(context)
    plugins = discover(settings.backends.disabled)
    host = describe(settings)
    choices = choice.choose_all(plugins, host.runtimes, settings)
    problems = list(host.problems)
    try:
        daemon = status.ask(settings.service.state_dir)
    except (OSError, ValueError) as error:
        daemon = None
        problems.append(f"the daemon's status cannot be read: {error}")
    found = doctors.report(
        settings,
        plugins,
        choices,
        registry_of(context, ()).snapshot(),
        conflicts=conflicts.find(),
        problems=problems,
        daemon=daemon,
        probes=_probe(plugins, choices, settings) if probe else {},
    )
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for line in _lines(found):
            click.echo(printable(line))
    context.exit(0 if found["ready"] else 1)


def _probe(plugins: Plugins, choices: Sequence[Choice], settings: Settings) -> dict[str, str]:
    said: dict[str, str] = {}
    for found in choices:
        for name, backend in plugins.backends.items():
            try:
                words = backend.probe(found.runtime, settings)
            except CourierError as error:
                words = str(error)
            except Exception as error:  # noqa: BLE001 - foreign code
                words = f"{type(error).__name__}: {error}"
            if words:
                key = found.runtime.key
                said[key] = f"{said[key]}; {name}: {words}" if key in said else f"{name}: {words}"
    return said


def _lines(found: dict[str, Any]) -> list[str]:
    lines = []
    for runtime in found["runtimes"]:
        lines += _runtime_lines(runtime)
    for name, backend in found["backends"].items():
        if backend["problem"]:
            lines.append(f"backend {name} is {backend['state']}: {backend['problem']}")
    cdi = found["cdi"]
    lines.append(f"CDI: {cdi['devices']} devices in {len(cdi['files'])} files of {', '.join(cdi['dirs'])}")
    # A conflict is an error of each of its files.
    lines += [f"  ! {e}" for e in dict.fromkeys(e for errors in cdi["errors"].values() for e in errors)]
    lines += [f"  ! {key} reads {', '.join(dirs)}" for key, dirs in cdi["unequal"].items()]
    policy = found["policy"]
    lines.append(
        f"policy: {len(policy['rules'])} rules, else {policy['default']}; local containers {policy['local']}"
    )
    for rule in policy["rules"]:
        devices, namespaces = ", ".join(rule["devices"]), ", ".join(rule["namespaces"])
        lines.append(f"  {rule['action']} {devices} in {namespaces} ({rule['source']})")
    daemon = found["daemon"]
    lines.append("daemon: " + (f"pid {daemon['pid']}" if daemon else "does not run"))
    lines += [f"! {text}" for text in (*found["conflicts"], *found["problems"])]
    lines.append("ready" if found["ready"] else "not ready")
    lines += [f"  next: {step}" for step in found["next"]]
    return lines


def _runtime_lines(runtime: dict[str, Any]) -> list[str]:
    lines = [f"{runtime['key']} {runtime['version'] or 'of unknown version'} {runtime['endpoint']}".rstrip()]
    lines += [
        f"  {name}: {json.dumps(fact['value'], ensure_ascii=False)}  ({fact['source']})"
        for name, fact in runtime["facts"].items()
    ]
    lines += [f"  ! {problem}" for problem in runtime["problems"]]
    for offer in runtime["offers"]:
        via = f" via {offer['via']}" if offer["via"] else ""
        lines.append(
            f"  {offer['backend']}{via}: {offer['fidelity']}, needs {offer['needs']}: {offer['reason']}"
        )
    lines.append(f"  active: {runtime['active'] or 'none'}: {runtime['reason']}")
    lines.append(f"  recommended: {runtime['recommended'] or 'none'}: {runtime['advice']}")
    if session := runtime["session"]:
        lines.append(f"  session: {session.get('state', '')} {session.get('cause', '')}".rstrip())
    if runtime["probe"]:
        lines.append(f"  probe: {runtime['probe']}")
    lines += [f"  note: {note}" for note in runtime["notes"]]
    return lines
