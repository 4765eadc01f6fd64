"""What live injection costs, as a ratio to a bare interpreter started in the same run. See README.md.

``python bench/run.py live``, as root. The container is a mount namespace as a runtime leaves it, a new one
for each injection; making it is outside of the time. It has no device filter of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cdi_courier
import cdi_courier_oci_hook
from cdi_courier import compiling
from cdi_courier_oci_hook import hook

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support.live_bundle import Paused  # noqa: E402

REPEATS, TIMES = 5, 4
SLACK = 1.3  # --check runs on busy machines
NODES, MOUNTS = 8, 20
BARS = {"injection": 2.5}
"""Ours ÷ the floor."""

PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
FLOOR = [PYTHON, "-I", "-S", "-c", "import json,ctypes"]
PATH = [str(Path(str(module.__file__)).parents[1]) for module in (cdi_courier, cdi_courier_oci_hook)]
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
KEY, DEVICE = "nvidia.cdi.k8s.io", "bench.com/gpu=all"


def prepare(root: Path) -> list[str]:
    """Write settings, a device of 8 nodes and 20 mounts, and the table; the hook's command as installed."""
    for name in ("cdi", "source", "rootfs/dev"):
        (root / name).mkdir(parents=True)
    mounts = []
    for n in range(MOUNTS):
        source = root / f"source/lib{n}.so"
        source.write_text("x")
        target = f"/usr/lib/x86_64-linux-gnu/lib{n}.so"
        mounts.append({"hostPath": str(source), "containerPath": target, "options": ["ro", "nosuid", "bind"]})
    nodes = [{"path": f"/dev/bench{n}", "hostPath": "/dev/null"} for n in range(NODES)]
    device = {"name": "all", "containerEdits": {"deviceNodes": nodes, "mounts": mounts}}
    spec = {"cdiVersion": "0.6.0", "kind": "bench.com/gpu", "devices": [device]}
    (root / "cdi/bench.json").write_text(json.dumps(spec))
    settings = root / "config.toml"
    settings.write_text(
        f"cdi.dirs = ['{root}/cdi']\ncdi.trust = 'any'\nservice.state_dir = '{root}/state'\n"
        f"oci_hook.log = '{root}/log'\n"
    )
    compiling.write(compiling.compile_settled(str(settings)), f"{root}/state/table.json")
    (root / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}, "linux": {}}))
    installed = hook.Installed(
        kind="local",
        interpreter="/nonexistent",  # the table must answer
        settings=str(settings),
        state_dir=f"{root}/state",
        log=f"{root}/log",
    )
    return [PYTHON, "-I", "-S", "-c", hook.command(installed, PATH)]


def seconds(argv: list[str], stdin: bytes = b"") -> float:
    """How long a process takes from its start to its end, which must be a good one."""
    begin = time.perf_counter()
    subprocess.run(argv, input=stdin, env=ENVIRONMENT, check=True, timeout=60)
    return time.perf_counter() - begin


def injection(root: Path, argv: list[str]) -> float:
    """How long injecting into a new container takes; it must have got everything."""
    container = Paused(root / "rootfs")
    try:
        state = {
            "ociVersion": "1.0.2",
            "id": "bench",
            "status": "creating",
            "pid": container.process.pid,
            "bundle": str(root),
            "annotations": {KEY: DEVICE},
        }
        took = seconds(argv, json.dumps(state).encode())
        made = len(list(container.inner("/dev").iterdir()))
        mounted = sum("/usr/lib/x86_64-linux-gnu/" in line for line in container.mounts())
    finally:
        container.end()
    if (made, mounted) != (NODES, MOUNTS):
        raise RuntimeError(f"{made} nodes and {mounted} mounts were injected")
    return took


def measure(*, check: bool = False) -> dict[str, dict[str, float]]:  # noqa: ARG001 - as the other benches
    """Each figure's median, low and high; no less is measured for a check."""
    with tempfile.TemporaryDirectory(prefix="cdi-bench-") as name:
        argv = prepare(Path(name))
        injection(Path(name), argv), seconds(FLOOR)  # the first call compiles modules
        ours: list[float] = []
        floor: list[float] = []
        ratios = []
        for _ in range(REPEATS):
            pairs = [(injection(Path(name), argv), seconds(FLOOR)) for _ in range(TIMES)]
            ratios.append(statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs))
            ours += [a for a, _ in pairs]
            floor += [b for _, b in pairs]
    figures = {
        "injection": ratios,
        "ours, ms": [1000 * t for t in ours],
        "floor, ms": [1000 * t for t in floor],
    }
    return {
        name: {"median": statistics.median(found), "low": min(found), "high": max(found)}
        for name, found in figures.items()
    }
