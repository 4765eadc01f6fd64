"""How long the daemon takes from its start until a runtime has it, as a ratio. See README.md.

``python bench/run.py start``. The runtime is the load driver of tests/support, in this process.
"""

from __future__ import annotations

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
