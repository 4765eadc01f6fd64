"""``cdi-courier explain``: what becomes of the containers of a manifest on this host."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cdi_courier import choice, manifests
from cdi_courier import explain as explanations
from cdi_courier.cli import plain, settings_of
from cdi_courier.errors import ManifestError, printable, quoted
from cdi_courier.host.describe import describe
from cdi_courier.plugins import discover
from cdi_courier.service import make_injector

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

UNUSABLE = 2


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON list instead of tables.")
@click.option("--diff", is_flag=True, help="Also each container's OCI config before and after, as a diff.")
@click.option(
    "--namespace", metavar="NS", default="default", help="Of objects that name none.", show_default=True
)
@click.argument("manifest", metavar="FILE|-")
@click.pass_context
def explain(context: click.Context, as_json: bool, diff: bool, namespace: str, manifest: str) -> None:
    """Say what a manifest's containers would get on this host.

    And why, or why not. FILE holds pods, workloads, Lists of them, in one document or several. Nothing is
    created. The exit code is 0 if all that is asked for would be delivered, 1 if not, 2 if the file cannot
    be used.
    """
    settings = settings_of(context)
    plugins = discover(settings.backends.disabled)
    injector = make_injector(settings, plugins)
    try:
        templates = manifests.read(_read(manifest))
    except ManifestError as error:
        click.echo(f"cdi-courier: {error}", err=True)
        context.exit(UNUSABLE)
    host = describe(settings)
    found = explanations.report(
        (manifests.in_namespace(template, namespace) for template in templates),
        injector,
        settings,
        plugins,
        choice.choose_all(plugins, host.runtimes, settings),
        diff=diff,
    )
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for entry in found:
            for line in _lines(entry):
                click.echo(printable(line))
    context.exit(0 if explanations.delivered(found) else 1)


def _read(manifest: str) -> bytes:
    limit = manifests.MAX_BYTES + 1  # one more than is taken, so that too much is seen and not read
    try:
        if manifest == "-":
            return sys.stdin.buffer.read(limit)
        with Path(manifest).open("rb") as file:
            return file.read(limit)
    except (OSError, ValueError) as error:  # a name with NUL in it
        reason = getattr(error, "strerror", None) or str(error)
        raise ManifestError("EXP001", f"cannot read {quoted(manifest)}: {reason}") from None


def _lines(entry: dict[str, Any]) -> list[str]:
    document, containers = entry["document"], entry["containers"]
    name = plain(f"{document['namespace']}/{document['name']}")
    place = f"document {document['number']}" + (f", {document['item']}" if document["item"] else "")
    lines = [f"{explanations.printable_kind(document['kind'])} {name} ({place}, line {document['line']})"]
    lines += _table(
        ("CONTAINER", "KEY", "DEVICE", "VERDICT", "RULE", "SPEC FILE"),
        [row for container in containers for row in _requests(container)],
    )
    lines += _table(
        ("CONTAINER", "EDIT", "SPEC FILE"),
        [(c["name"], edit["edit"], edit["file"]) for c in containers for edit in c["edits"]],
    )
    lines += _table(("CONTAINER", "RUNTIME", "BACKEND", "CANNOT DELIVER", "BECAUSE"), _losses(containers))
    # What concerns every container is said once.
    common = [
        problem
        for problem in (containers[0]["problems"] if len(containers) > 1 else ())
        if all(problem in container["problems"] for container in containers)
    ]
    lines += [f"! {problem.rstrip()}" for problem in common]
    lines += [
        f"! {plain(container['name'])}: {problem.rstrip()}"
        for container in containers
        for problem in container["problems"]
        if problem not in common
    ]
    for container in containers:
        if container.get("diff"):
            lines += ["", f"{container['type']} {plain(container['name'])}", container["diff"]]
    return [*lines, ""]


def _requests(container: dict[str, Any]) -> Iterable[Sequence[str]]:
    name = container["name"]
    if container["type"] != "container":
        name += f" ({container['type']})"
    if not container["devices"]:
        yield name, container["key"] or "none", "", "", "", ""
    for device in container["devices"]:
        yield (
            name,
            device["key"],
            device["name"],
            device["verdict"],
            device["rule"],
            device["file"] or "none",
        )


def _losses(containers: Iterable[dict[str, Any]]) -> list[Sequence[str]]:
    """What backends lose, the same loss of several containers in one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for container in containers:
        for lost in container["undeliverable"]:
            backend = lost["backend"] + " (active)" * lost["active"]
            row = (lost["runtime"], backend, lost["edit"], lost["reason"])
            rows.setdefault(row, []).append(container["name"])
    return [(", ".join(dict.fromkeys(names)), *row) for row, names in rows.items()]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as what they hold: a name that is cut is no name."""
    if not rows:
        return []
    cells = [titles, *([plain(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
