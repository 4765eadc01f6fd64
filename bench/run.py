"""All benches in one table and one file. See README.md beside this.

``python bench/run.py [--json FILE] [--plot FOLDER] [--check] [BENCH…]``; ``--check`` measures less and exits
1 if a bar, with its bench's slack, is missed. Without a BENCH all are run; this knows only their figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cdi
import growth
import hook
import live
import nri
import start

Figures = dict[str, dict[str, Any]]


def measure_nri(*, check: bool) -> Figures:
    """The NRI plugin's figures; what could not be measured has none."""
    found, failures = nri.measure(nri.Effort(check=check), nri.processors_of(2))
    for scenario, why in failures.items():
        print(f"{scenario}: {why}", file=sys.stderr)
    return {figure: nri.summary(pairs) for figure, pairs in found.items()}


PARTS: dict[str, tuple[Callable[..., Figures], dict[str, float], float]] = {
    # bench → (how, its bars, its slack)
    "cdi": (cdi.measure, cdi.BARS, cdi.SLACK),
    "nri": (measure_nri, nri.BARS, nri.SLACK),
    "start": (start.measure, start.BARS, start.SLACK),
    "growth": (growth.measure, growth.BARS, growth.SLACK),
    "hook": (hook.measure, hook.BARS, hook.SLACK),
    "live": (live.measure, live.BARS, live.SLACK),
}


def behind(part: str, figures: Figures) -> list[str]:
    """The figures of a part that a check does not let pass: those not measured, too."""
    _, bars, slack = PARTS[part]
    if part == "nri":
        return nri.behind(figures)
    return [
        name for name, bar in bars.items() if name not in figures or figures[name]["median"] > bar * slack
    ]


def lines(part: str, figures: Figures) -> list[str]:
    """The part's rows of the table: median, spread and bar; a star where the bar is missed."""
    bars = PARTS[part][1]
    rows = []
    for name, figure in figures.items():
        cells = "".join(f"{figure[column]:9.2f}" for column in ("median", "low", "high"))
        bar = bars.get(name)
        mark = "" if bar is None else f"{bar:9.2f}{'  *' if figure['median'] > bar else ''}"
        rows.append(f"{part + ': ' + name:40}{cells}{mark}")
    return rows


def main() -> int:
    """Run all; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benches", metavar="BENCH", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--plot", metavar="FOLDER", type=Path, help="needs matplotlib")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if unknown := {*arguments.benches} - {*PARTS}:
        parser.error(f"there is no bench {', '.join(sorted(unknown))}")
    results: dict[str, Figures] = {}
    late = []
    print(
        f"{'bench (*: its bar is missed)':40}" + "".join(f"{c:>9}" for c in ("median", "low", "high", "bar"))
    )
    for part, (measure, _, _) in PARTS.items():
        if arguments.benches and part not in arguments.benches:
            continue
        if part == "live" and os.geteuid() != 0:
            print("live: measured as root only", file=sys.stderr)
            continue
        begin = time.monotonic()
        results[part] = measure(check=arguments.check)
        print("\n".join(lines(part, results[part])), flush=True)
        print(f"    {part} took {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        late += [f"{part}: {name}" for name in behind(part, results[part])]
    document: dict[str, Any] = {
        "machine": {
            "processors": os.cpu_count(),
            "python": platform.python_version(),
            "load": os.getloadavg(),
        },
        "figures": results,
        "bars": {part: bars for part, (_, bars, _) in PARTS.items()},
    }
    if arguments.plot:
        import plot  # here, because matplotlib is for this alone

        document["curves"] = nri.curves(nri.processors_of(2))
        plot.draw(document["curves"], results.get("growth", {}), arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    if arguments.check and late:
        print(f"behind their bars, with slack: {'; '.join(late)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
