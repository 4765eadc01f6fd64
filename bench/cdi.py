"""What the CDI side costs, as ratios to a floor measured in the same run. See README.md beside this file.

``python bench/run.py cdi``
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from cdi_courier.annotations import NVIDIA
from cdi_courier.cdi.registry import Registry
from cdi_courier.cdi.validate import load_spec
from cdi_courier.injector import Injector
from cdi_courier.request import ContainerRequest
from cdi_courier.settings import Settings

REPEATS = 5
SLACK = 1.5  # --check runs on busy machines
Result = dict[str, float]


def seconds(call: Callable[[], object], times: int) -> float:
    """Seconds one call takes, over `times` of them."""
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times


def ratio(ours: Callable[[], object], floor: Callable[[], object], times: int) -> Result:
    """Median and spread of ours ÷ floor, the two interleaved."""
    ours(), floor()  # the first call pays for imports and page faults
    found = [seconds(ours, times) / seconds(floor, times) for _ in range(REPEATS)]
    return {"median": statistics.median(found), "low": min(found), "high": max(found)}


def gpu_spec() -> bytes:
    """8 GPUs with 7 MIG instances each and 120 mounts, about 100 KB of YAML as vendors write it."""
    devices = []
    for gpu in range(8):
        for name in (str(gpu), *(f"{gpu}:{mig}" for mig in range(7))):
            nodes = [{"path": f"/dev/nvidia{gpu}"}] + [
                {"path": f"/dev/nvidia-caps/nvidia-cap{gpu * 30 + cap}", "fileMode": 292} for cap in range(15)
            ]
            devices.append({"name": name, "containerEdits": {"deviceNodes": nodes}})
    mounts = [
        {
            "hostPath": f"/usr/lib/x86_64-linux-gnu/libnvidia-{n}.so.570.86.15",
            "containerPath": f"/usr/lib/x86_64-linux-gnu/libnvidia-{n}.so.570.86.15",
            "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
        }
        for n in range(120)
    ]
    spec = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": devices,
        "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "mounts": mounts},
    }
    return yaml.safe_dump(spec, sort_keys=False).encode()


def write_specs(folder: Path, count: int) -> list[str]:
    """`count` small spec files of different kinds."""
    paths = []
    for n in range(count):
        path = folder / f"spec{n:04}.json"
        device = {"name": "all", "containerEdits": {"env": [f"N={n}"]}}
        path.write_text(json.dumps({"cdiVersion": "0.3.0", "kind": f"v{n}.com/gpu", "devices": [device]}))
        paths.append(str(path))
    return paths


def load() -> Result:
    """Loading the large spec, to PyYAML's C loader on the same bytes."""
    data = gpu_spec()
    return ratio(lambda: load_spec(data), lambda: yaml.load(data, Loader=yaml.CSafeLoader), 3)


def unchanged() -> Result:
    """A lookup in an unchanged registry of 20 files, to one stat a file."""
    with tempfile.TemporaryDirectory() as name:
        paths = write_specs(Path(name), 20)
        registry = Registry((name,), trust="any")
        while registry.current() is None:  # until the files' time stamps are old enough to be relied on
            registry.snapshot()

        def stats() -> None:
            for path in paths:
                os.stat(path)

        return ratio(registry.snapshot, stats, 500)


def linear() -> Result:
    """Time a file of a first scan with 1,000 files, to that with 50."""

    def scan(count: int) -> Callable[[], object]:
        folder = stack.name + f"/{count}"
        os.mkdir(folder)
        write_specs(Path(folder), count)
        return lambda: Registry((folder,), trust="any").snapshot()

    with tempfile.TemporaryDirectory() as name:
        stack = argparse.Namespace(name=name)
        many, few = scan(1000), scan(50)
        found = [seconds(many, 1) / 1000 / (seconds(few, 20) / 50) for _ in range(REPEATS)]
    return {"median": statistics.median(found), "low": min(found), "high": max(found)}


def nothing_asked() -> Result:
    """System calls on spec directories that a request without a name makes."""
    calls = 0

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal calls
        if event in ("os.listdir", "os.scandir", "open") and str(arguments[0]).startswith(folder):
            calls += 1

    with tempfile.TemporaryDirectory() as folder:
        write_specs(Path(folder), 20)
        sys.addaudithook(count)
        injector = Injector(Settings(), Registry((folder,), trust="any"), [NVIDIA])
        for _ in range(1000):
            injector.inject(ContainerRequest({"other": "x"}, namespace="default", container="c"))
        folder = "\0"  # the hook cannot be removed
    return {"median": calls, "low": calls, "high": calls}


BENCHES = {
    # name → (what, bar)
    "load": (load, 1.6),
    "unchanged": (unchanged, 3.0),
    "linear": (linear, 2.0),
    "nothing asked": (nothing_asked, 0.0),
}


BARS = {name: bar for name, (_, bar) in BENCHES.items()}


def measure(*, check: bool = False) -> dict[str, Result]:  # noqa: ARG001 - as the other benches
    """The figures, by name."""
    return {name: bench() for name, (bench, _) in BENCHES.items()}
