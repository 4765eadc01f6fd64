"""What the runtime wrapper costs, as ratios to a floor measured in the same run. See README.md beside this.

``python bench/run.py hook``. The real runtime is ``true``, so that a time is the wrapper's own and one exec.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from cdi import gpu_spec
from cdi_courier import compiling, patterns
from cdi_courier.settings import load
from cdi_courier_oci_hook import gate

REPEATS = 5
CALLS = 15  # of ours and of the floor, in turn, a repeat
SLACK = 2.0  # --check runs on busy machines, where starting a process takes its time
TRUE = "/usr/bin/true"
SHELL = ("/bin/sh", "-c", "true")
JSON = (os.path.realpath(sys.executable), "-I", "-S", "-c", "import json")
CAPTURED = Path(__file__).parents[1] / "tests/data/runtimes/containerd-2.1.9-ociconfig-container.json"
DEVICES = "nvidia.com/gpu=0,nvidia.com/gpu=3:2"

Result = dict[str, float]


def seconds(argv: Sequence[str]) -> float:
    """Seconds from starting a program to having its end."""
    begin = time.perf_counter()
    pid = os.posix_spawn(argv[0], argv, {"LC_ALL": "C.UTF-8"})
    _, status = os.waitpid(pid, 0)
    taken = time.perf_counter() - begin
    if status:
        raise SystemExit(f"{' '.join(argv)} failed with status {status}")
    return taken


def ratio(ours: Sequence[str], floor: Sequence[str], prepare: Callable[[], object] = lambda: None) -> Result:
    """Median and spread of ours ÷ floor, the two in turn; and both in ms. prepare: before each of ours."""
    repeats = []
    mine: list[float] = []
    bare: list[float] = []
    for _ in range(REPEATS):
        pairs = []
        for _ in range(CALLS):
            prepare()
            pairs.append((seconds(ours), seconds(floor)))
        times = [statistics.median(column) for column in zip(*pairs, strict=True)]
        mine.append(times[0] * 1e3)
        bare.append(times[1] * 1e3)
        repeats.append(times[0] / times[1])
    return {
        "median": statistics.median(repeats),
        "low": min(repeats),
        "high": max(repeats),
        "ours_ms": statistics.median(mine),
        "floor_ms": statistics.median(bare),
    }


class Host:
    """A gate in front of ``true``, a spec file of 90 KB and a compiled table, below a folder."""

    def __init__(self, root: Path) -> None:
        (root / "cdi").mkdir()
        (root / "gates").mkdir()
        (root / "cdi/gpu.json").write_text(json.dumps(spec()))
        (root / "settings").mkdir()
        place = root / "settings/config.toml"
        place.write_text(
            f"cdi.dirs = ['{root}/cdi']\ncdi.trust = 'any'\nservice.state_dir = '{root}/state'\n"
            f"oci_hook.gate_dir = '{root}/gates'\noci_hook.log = '{root}/log'\n"
        )
        for file in gate.files(load([place]), "gate", TRUE, ""):
            assert file.content is not None
            Path(file.path).write_bytes(file.content)
            os.chmod(file.path, file.mode)
        compiled = compiling.compile_settled(str(place))
        compiling.write(compiled, f"{root}/state/table.json")
        # As of a while later than the settings, which are the newest of files only in a bench.
        patterns.write(
            f"{root}/gates", str(place), compiled.injector.families, compiled.began_ns + 2_000_000_000
        )
        self.gate = str(root / "gates/gate")
        self.bundle = root / "bundle"
        self.bundle.mkdir()
        self._config: Any = json.loads(CAPTURED.read_bytes())

    def put(self, annotations: dict[str, str]) -> None:
        """Make the bundle anew: what containerd 2.1 handed to runc, with annotations of the pod."""
        document = {**self._config, "annotations": {**self._config["annotations"], **annotations}}
        (self.bundle / "config.json").write_text(json.dumps(document, separators=(",", ":")))

    def create(self) -> list[str]:
        """The call with which containerd's shim creates a container."""
        known = ["--root", "/run/containerd/runc/k8s.io", "--log", f"{self.bundle}/log.json"]
        return [self.gate, *known, "--log-format", "json", "create", "--bundle", str(self.bundle), "c1"]


def spec() -> Any:
    """The large spec file of the other benches, every node of which is ``/dev/null`` on the host."""
    document = yaml.safe_load(gpu_spec())
    for device in document["devices"]:
        for node in device["containerEdits"]["deviceNodes"]:
            node["hostPath"] = "/dev/null"
    return document


def other() -> Result:
    """A call that creates nothing, to a shell that does nothing."""
    with tempfile.TemporaryDirectory() as name:
        host = Host(Path(name))
        return ratio([host.gate, "--root", "/run/runc", "state", "c1"], SHELL)


def unannotated() -> Result:
    """Creating a container that asks for nothing, to a shell that does nothing."""
    with tempfile.TemporaryDirectory() as name:
        host = Host(Path(name))
        host.put({"other": "x"})
        return ratio(host.create(), SHELL)


def annotated() -> Result:
    """Creating a container with two devices from the compiled table, to Python that imports json."""
    with tempfile.TemporaryDirectory() as name:
        host = Host(Path(name))
        result = ratio(host.create(), JSON, lambda: host.put({"nvidia.cdi.k8s.io": DEVICES}))
        edited = json.loads((host.bundle / "config.json").read_bytes())
        if len(edited["mounts"]) < 120 or (host.bundle / "log.json").exists():
            raise SystemExit("the container was not edited")
        return result


BENCHES = {
    # name → (what, bar)
    "other call": (other, 2.0),
    "unannotated": (unannotated, 4.0),
    "annotated": (annotated, 1.3),
}


BARS = {name: bar for name, (_, bar) in BENCHES.items()}


def measure(*, check: bool = False) -> dict[str, Result]:  # noqa: ARG001 - as the other benches
    """The figures, by name."""
    return {name: bench() for name, (bench, _) in BENCHES.items()}
