"""``cdi-courier status``: what the running daemon is doing, by its own word."""

from __future__ import annotations

import importlib.metadata
import json
import time
from typing import TYPE_CHECKING, Any, Final

import click

from cdi_courier import status as sockets
from cdi_courier.cli import settings_of, tables
from cdi_courier.errors import HostError, printable
from cdi_courier.host.answers import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_DECISIONS: Final = 20
_COUNTS: Final = ("requests", "injected", "refused", "skipped", "unresolved", "undeliverable", "missed")
_QUANTILES: Final = ("p50", "p90", "p99")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option(
    "--timeout",
    type=click.IntRange(1, 3600),
    default=2,
    show_default=True,
    metavar="SECONDS",
    help="Wait so long for an answer.",
)
@click.pass_context
def status(context: click.Context, as_json: bool, timeout: float) -> None:
    """Show what the running daemon serves and what it decided lately.

    The exit code is 0 if the daemon answers and serves at least one runtime, else 1.
    """
    report = sockets.require(settings_of(context).service.state_dir, timeout)
    try:
        lines = [json.dumps(report, indent=2)] if as_json else [*_lines(report)]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise HostError(
            "STA003",
            f"the daemon's answer cannot be understood: it is of version {report.get('version')}",
            "restart it, so that daemon and command are of one version; --json shows the answer as it is",
        ) from None
    for line in lines:
        click.echo(line)
    if other := _other_version(report):
        click.echo(other, err=True)
    runtimes = table(report, "runtimes").values()
    context.exit(0 if any(table(entry).get("state") == "active" for entry in runtimes) else 1)


def _other_version(report: Mapping[str, Any]) -> str:
    mine, its = importlib.metadata.version("cdi-courier"), str(report.get("version"))
    if mine == its:
        return ""
    return printable(
        f"STA004: the daemon is of version {its}, this command of version {mine} "
        "(restart the daemon: systemctl restart cdi-courier)"
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    # A refusal's cause holds lines to paste, which the log has as they are.
    return ["", *tables.lines(header, [[cell.replace("\n", " ") for cell in row] for row in rows])]


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report for a person. Raises what a report of another shape makes its reader raise."""
    now = time.time()
    yield from map(printable, _of_daemon(report, now))
    runtimes = report.get("runtimes", {})
    if not runtimes:
        yield "no container runtime is known yet"
        return
    yield from _table(
        ("RUNTIME", "VERSION", "BACKEND", "STATE", "FOR", "BY", "CAUSE"),
        [
            (
                key,
                str(entry.get("version") or "-"),
                str(entry.get("backend") or "none"),
                str(entry.get("state") or "-"),
                _age(now, entry.get("since")),
                str(entry.get("delivery") or "-"),
                str(entry.get("cause") or entry.get("reason") or ""),
            )
            for key, entry in runtimes.items()
        ],
    )
    served = {key: entry for key, entry in runtimes.items() if "counts" in entry}
    if served:
        yield from _table(
            ("RUNTIME", *(name.upper() for name in (*_COUNTS, *_QUANTILES))),
            [
                (
                    key,
                    *(str(entry["counts"].get(name, 0)) for name in _COUNTS),
                    *(_duration(entry.get("latency", {}).get(name)) for name in _QUANTILES),
                )
                for key, entry in served.items()
            ],
        )
    decisions = report.get("decisions", [])[-_DECISIONS:]
    if decisions:
        yield from _table(
            ("WHEN", "VERDICT", "CONTAINER", "DEVICES", "TOOK", "CAUSE"),
            [
                (
                    time.strftime("%H:%M:%S", time.localtime(decision.get("time", 0))),
                    str(decision.get("verdict", "")),
                    str(decision.get("container", "")),
                    ",".join(decision.get("devices", ())) or "-",
                    _duration(decision.get("duration")),
                    str(decision.get("cause") or decision.get("rule") or ""),
                )
                for decision in decisions
            ],
        )


def _of_daemon(report: Mapping[str, Any], now: float) -> Iterator[str]:
    yield (
        f"cdi-courier {report.get('version')}, pid {report.get('pid')}, "
        f"up for {_age(now, report.get('began'))}"
    )
    if settings := report.get("settings"):
        files = ", ".join(settings["files"]) or "no file: the defaults count"
        yield f"settings: {files}, read {_age(now, settings['loaded'])} ago"
        if settings["problem"]:
            yield f"! {settings['problem']}"
        if settings["restart"]:
            yield f"! SET031: {', '.join(settings['restart'])}: changed, but counts only after a restart"
    if cdi := report.get("cdi"):
        yield (
            f"CDI: {cdi['devices']} devices in {cdi['files']} files, {cdi['errors']} errors, "
            f"{cdi['conflicts']} conflicts"
        )
    for problem in report.get("problems", ()):
        yield f"! {problem}"


def _age(now: float, since: float | None) -> str:
    """``3d4h``, ``2h5m``, ``7m12s`` or ``5s``; a clock that was set back does not make it negative."""
    if since is None:
        return "-"
    seconds = max(0, int(now - since))
    for unit, size, part, smaller in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size}{unit}{seconds % size // smaller}{part}"
    return f"{seconds}s"


def _duration(seconds: float | None) -> str:
    """In the unit in which it is easily read."""
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"
