"""How long the daemon takes from its start until a runtime has it, as a ratio. See README.md.

``python bench/start.py [--json FILE] [--check]``; ``--check`` measures less and exits 1 if the bar, with
slack, is missed. The runtime is the load driver of tests/support, in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support.courier import Courier  # noqa: E402
from support.nri_load import Load  # noqa: E402

BARS = {"registered": 12.0}
SLACK = 2.0  # --check runs on busy machines, where a long process pays more than a short one
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
FLOOR = [PYTHON, "-I", "-S", "-c", "pass"]
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""The product is measured as it is installed, its modules compiled."""

Result = dict[str, float]


def registered(root: Path) -> float:
    """Seconds from starting the daemon until it has answered Configure and an empty Synchronize."""
    name = str(root / "nri.sock")
    settings = root / "config.toml"
    settings.write_text(
        f'cdi.dirs = ["{root}/cdi"]\nnri.sockets = ["{name}"]\nservice.state_dir = "{root}/state"\n'
    )
    with Load({"courier": name}) as load:
        daemon = Courier(settings, root / "log", env=COMPILED)
        begin = time.perf_counter()
        daemon.start()
        try:
            load.connect("courier")
            return time.perf_counter() - begin
        finally:
            daemon.stop()


def bare() -> float:
    """Seconds that an interpreter takes which does nothing."""
    begin = time.perf_counter()
    subprocess.run(FLOOR, check=True)
    return time.perf_counter() - begin


def measure(*, check: bool = False) -> dict[str, Result]:
    """The bench's figures: median and spread of ours ÷ floor, the two in turn; and both in ms."""
    ratios, mine, floor = [], [], []
    for repeat in range(-1, 3 if check else 5):
        pairs = []
        for _ in range(2 if check else 3):
            with tempfile.TemporaryDirectory() as name:
                pairs.append((registered(Path(name)), bare()))
        ours, least = (statistics.median(column) for column in zip(*pairs, strict=True))
        if repeat >= 0:  # the first start compiles
            ratios.append(ours / least)
            mine.append(ours * 1e3)
            floor.append(least * 1e3)
    return {
        "registered": {
            "median": statistics.median(ratios),
            "low": min(ratios),
            "high": max(ratios),
            "ours_ms": statistics.median(mine),
            "floor_ms": statistics.median(floor),
        }
    }


def main() -> int:
    """Run it; print a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    results = measure(check=arguments.check)
    print(f"{'bench':15}{'median':>9}{'low':>9}{'high':>9}{'ours ms':>9}{'floor ms':>9}{'bar':>9}")
    for name, result in results.items():
        print(f"{name:15}" + "".join(f"{v:9.2f}" for v in (*result.values(), BARS[name])))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")
    if arguments.check and results["registered"]["median"] > BARS["registered"] * SLACK:
        print(f"missed by more than {SLACK} times: registered", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
