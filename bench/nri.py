"""What the NRI plugin costs, as ratios to a floor plugin measured in the same run. See README.md beside it.

``python bench/nri.py [--json FILE] [--check] [--cores 1]``; ``--check`` measures less and exits 1 if a bar,
with slack, is missed. The runtime is the load driver of tests/support; it, the floor and the product are
processes of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cdi_courier import service, status

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support.courier import Courier  # noqa: E402
from support.nri_load import LoadError, LoadProcess  # noqa: E402
from support.waiting import wait_for  # noqa: E402

DEVICE = "bench.com/gpu=all"
ASKING = {"nvidia.cdi.k8s.io/container.trainer": DEVICE}
NODES, MOUNTS = 8, 120
NAMES: dict[str, Any] = {"names": [DEVICE]}
EDITS: dict[str, Any] = {"devices": NODES, "mounts": MOUNTS, "env": 1}
NOTHING: dict[str, Any] = {}
LISTED = 2000
MIB = 1 << 20

BARS = {
    # ours ÷ floor, except for what is in MiB
    "names, p50": 1.25,
    "names, p99": 1.5,
    "names, CPU": 1.25,
    "unannotated, p50": 1.1,
    "edits, p50": 2.5,
    "synchronize": 1.5,
    "idle, MiB": 30.0,
    "growth, MiB": 1.0,
}
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""The product is measured as it is installed, its modules compiled: compiling takes memory that stays."""

SLACK = 1.3  # --check runs on busy machines; memory does not depend on that and has none

GUARDS = {
    # A bar that is missed, with where we are on a busy machine: --check guards that.
    "names, CPU": 1.55,
}

GAPS = (0.0, 0.0003, 0.001, 0.003, 0.01)
"""Seconds between calls, for the cost against load."""

# figure → (ours, floor) in nanoseconds, or (bytes, None)
Result = dict[str, tuple[float, float | None]]


class Effort:
    """How much is measured: repeats with new processes, calls and sessions in each, calls for the growth."""

    def __init__(self, *, check: bool) -> None:
        self.repeats = 3 if check else 5
        self.calls = 1500 if check else 5000
        self.sessions = 2 if check else 5
        self.lasting = 10_000 if check else 100_000


class Host:
    """One repeat's processes, all new: the driver, a floor, and a product for each way of delivery."""

    def __init__(self, folder: Path, processors: tuple[int, int]) -> None:
        self._folder = folder
        # Inherited by what is started from here; the driver moves away from it.
        os.sched_setaffinity(0, {processors[1]})
        self._stack = contextlib.ExitStack()
        self._sockets = {name: str(folder / f"{name}.sock") for name in ("floor", "names", "edits")}
        self._products = {
            delivery: Courier(self._settings(delivery), folder / f"{delivery}.log", env=COMPILED)
            for delivery in ("names", "edits")
        }
        self._floor: subprocess.Popen[bytes] | None = None
        self.load = LoadProcess(self._sockets, cpu=processors[0])
        (folder / "cdi").mkdir()
        (folder / "cdi" / "bench.json").write_text(json.dumps(spec()))

    def __enter__(self) -> Host:
        with contextlib.ExitStack() as stack:
            for name in self._sockets:
                stack.callback(self._stop, name)
            stack.enter_context(self.load)
            for name in self._sockets:
                self._start(name)
                self.load.do("connect", name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def settle(self) -> None:
        """Wait until the products have done what a start leaves for later: it takes time and memory."""
        for delivery in self._products:
            described = functools.partial(_is_described, str(self._folder / delivery))
            wait_for(described, 30, "the description of the host")
        time.sleep(2 * service._SETTLED)

    def renew(self, name: str, listed: int) -> dict[str, int]:
        """Replace a plugin by a new process and return what `Load.connect` says of its first session."""
        # Ended before it is dropped: the product would come back, and its corpse be accepted.
        self._stop(name)
        self.load.do("drop", name)
        self._start(name)
        found: dict[str, int] = self.load.do("connect", name, listed)
        return found

    def _start(self, name: str) -> None:
        if name == "floor":
            argv = [sys.executable, str(HERE / "nri_floor.py"), self._sockets[name]]
            self._floor = subprocess.Popen(argv)
        else:
            self._products[name].start()

    def _stop(self, name: str) -> None:
        if name != "floor":
            self._products[name].stop()
        elif self._floor is not None:
            self._floor.kill()
            self._floor.wait()

    def _settings(self, delivery: str) -> Path:
        path = self._folder / f"{delivery}.toml"
        path.write_text(
            f'cdi.dirs = ["{self._folder}/cdi"]\n'
            f'nri.sockets = ["{self._sockets[delivery]}"]\n'
            f'nri.delivery = "{delivery}"\n'
            f'service.state_dir = "{self._folder}/{delivery}"\n'
        )
        return path


def _is_described(state_dir: str) -> bool:
    """Whether the daemon has described the host."""
    return bool((status.ask(state_dir) or {}).get("described"))


def spec() -> dict[str, Any]:
    """A device of 8 nodes that stand for harmless ones, 120 mounts and a variable."""
    nodes = [
        {"path": f"/dev/bench{n}", "hostPath": f"/dev/{('null', 'zero', 'full', 'random')[n % 4]}"}
        for n in range(NODES)
    ]
    mounts = [
        {
            "hostPath": f"/usr/lib/x86_64-linux-gnu/libbench-{n}.so.570.86.15",
            "containerPath": f"/usr/lib/x86_64-linux-gnu/libbench-{n}.so.570.86.15",
            "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
        }
        for n in range(MOUNTS)
    ]
    return {
        "cdiVersion": "0.5.0",
        "kind": "bench.com/gpu",
        "devices": [{"name": "all", "containerEdits": {"deviceNodes": nodes}}],
        "containerEdits": {"env": ["BENCH_VISIBLE_DEVICES=void"], "mounts": mounts},
    }


def names(host: Host, effort: Effort) -> Result:
    """An annotated CreateContainer answered by names."""
    found = host.load.do("calls", {"floor": NAMES, "names": NAMES}, ASKING, effort.calls)
    return _pairs("names", found, "names")


def unannotated(host: Host, effort: Effort) -> Result:
    """The same CreateContainer without an annotation of ours."""
    found = host.load.do("calls", {"floor": NOTHING, "names": NOTHING}, {}, effort.calls)
    return _pairs("unannotated", found, "names")


def edits(host: Host, effort: Effort) -> Result:
    """The annotated CreateContainer answered by edits, to the floor's answer by names."""
    found = host.load.do("calls", {"floor": NAMES, "edits": EDITS}, ASKING, effort.calls)
    return _pairs("edits", found, "edits")


def memory(host: Host, effort: Effort) -> Result:
    """What is resident after the handshake, and how much more after many calls than after a few."""
    idle = host.load.do("memory", "names")
    _mixed(host, 2000)
    warm = host.load.do("memory", "names")
    _mixed(host, effort.lasting)
    lasting = host.load.do("memory", "names")
    return {
        "idle, MiB": (idle["rss"], None),
        "idle Pss, MiB": (idle["pss"], None),
        "warm, MiB": (warm["rss"], None),
        "growth, MiB": (lasting["rss"] - warm["rss"], None),
    }


def synchronize(host: Host, effort: Effort) -> Result:
    """Synchronize of 2,000 pods and containers, in turn, each the first of a new process.

    Megabytes are read into memory that the process has not had before, and the kernel's work for that is most
    of the time. In a process that has read as much already it is a third; the floor has no second session.
    """
    found: dict[str, list[dict[str, int]]] = {"floor": [], "names": []}
    for _ in range(effort.sessions):
        for name, sessions in found.items():
            sessions.append(host.renew(name, LISTED))
    result: Result = {}
    for figure, key in (("", "synchronize"), (", CPU", "cpu"), (", and the next call", "ready")):
        ours, floor = (statistics.median(s[key] for s in found[name]) for name in ("names", "floor"))
        result["synchronize" + figure] = ours, floor
    result["synchronized, MiB"] = host.load.do("memory", "names")["rss"], None
    return result


SCENARIOS = (memory, names, unannotated, edits, synchronize)


def against_load(host: Host, calls: int) -> list[dict[str, Any]]:
    """Of each gap between calls: calls a second and each plugin's p50 and CPU a call, in µs."""
    found = []
    for gap in GAPS:
        measured = host.load.do(
            "calls",
            {"floor": NAMES, "names": NAMES},
            ASKING,
            max(50, min(calls, int(1 / (gap + 1e-4)))),
            gap=gap,
        )
        found.append(
            {
                "rate": 1e9 / (statistics.fmean(m["mean"] for m in measured.values()) + gap * 1e9),
                **{name: {"p50": m["p50"] / 1e3, "cpu": m["cpu"] / 1e3} for name, m in measured.items()},
            }
        )
    return found


def curves(processors: tuple[int, int], calls: int = 5000) -> dict[str, Any]:
    """What a plot shows: percentiles of the time of an answer in µs, by scenario and plugin, and the load."""
    found: dict[str, Any] = {}
    with _host(processors) as host:
        host.settle()
        for scenario, ours, asking, floor, expected in (
            ("names", "names", ASKING, NAMES, NAMES),
            ("unannotated", "names", {}, NOTHING, NOTHING),
            ("edits", "edits", ASKING, NAMES, EDITS),
        ):
            measured = host.load.do("calls", {"floor": floor, ours: expected}, asking, calls)
            found[scenario] = {
                "ours" if name == ours else name: [p / 1e3 for p in m["percentiles"]]
                for name, m in measured.items()
            }
        found["load"] = against_load(host, calls)
    return found


def _pairs(what: str, found: dict[str, dict[str, float]], ours: str) -> Result:
    figures = {"p50": "p50", "p99": "p99", "mean": "mean", "CPU": "cpu"}
    return {f"{what}, {label}": (found[ours][key], found["floor"][key]) for label, key in figures.items()}


def _mixed(host: Host, calls: int) -> None:
    """Half of them annotated."""
    for asking, expected in ((ASKING, NAMES), ({}, NOTHING)):
        host.load.do("calls", {"names": expected}, asking, calls // 2)


@contextlib.contextmanager
def _host(processors: tuple[int, int]) -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as name, Host(Path(name), processors) as host:
        yield host


def measure(effort: Effort, processors: tuple[int, int]) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """All scenarios: figure → (ours, floor) of each repeat; and scenario → why it could not be measured."""
    found: dict[str, list[Any]] = {}
    failures: dict[str, str] = {}
    with _host(processors):
        pass  # the first start compiles
    for _ in range(effort.repeats):
        with _host(processors) as host:
            host.settle()
            for scenario in SCENARIOS:
                try:
                    result = scenario(host, effort)
                except LoadError as error:
                    failures[scenario.__name__] = str(error)
                    continue
                for figure, pair in result.items():
                    found.setdefault(figure, []).append(pair)
    return found, failures


def summary(pairs: list[tuple[float, float | None]]) -> dict[str, float]:
    """Median and spread over the repeats; of the ratio, or of the MiB where there is no floor."""
    values = [ours / MIB if floor is None else ours / floor for ours, floor in pairs]
    result = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    if pairs[0][1] is not None:
        result["ours µs"] = statistics.median(ours for ours, _ in pairs) / 1e3
        result["floor µs"] = statistics.median(floor or 0 for _, floor in pairs) / 1e3
    return result


def table(results: dict[str, dict[str, float]]) -> str:
    """The results as lines for a terminal."""
    columns = ("median", "low", "high", "bar", "ours µs", "floor µs")
    lines = [f"{'bench':30}" + "".join(f"{column:>10}" for column in columns)]
    for figure, result in results.items():
        row = {**result, **({"bar": BARS[figure]} if figure in BARS else {})}
        cells = [f"{row[column]:10.2f}" if column in row else " " * 10 for column in columns]
        lines.append((f"{figure:30}" + "".join(cells)).rstrip())
    return "\n".join(lines)


def processors_of(cores: int) -> tuple[int, int]:
    """The driver's processor and the plugins'."""
    available = sorted(os.sched_getaffinity(0))
    return available[-cores:][0], available[-1]


def behind(results: dict[str, dict[str, float]]) -> list[str]:
    """The figures that `--check` does not let pass."""
    return [
        figure
        for figure, bar in (BARS | GUARDS).items()
        if figure not in results
        or results[figure]["median"] > bar * (1.0 if figure.endswith("MiB") else SLACK)
    ]


def main() -> int:
    """Run all; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--cores", type=int, choices=(1, 2), default=2, help="2: the driver has its own")
    arguments = parser.parse_args()
    found, failures = measure(Effort(check=arguments.check), processors_of(arguments.cores))
    results = {figure: summary(pairs) for figure, pairs in found.items()}
    print(table(results))
    for scenario, why in failures.items():
        print(f"{scenario}: {why}", file=sys.stderr)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    missed = [f for f, bar in BARS.items() if f not in results or results[f]["median"] > bar]
    if missed:
        print(f"missed bars: {'; '.join(missed)}")
    if arguments.check and (late := behind(results)):
        print(f"behind bar or guard by more than {SLACK}: {'; '.join(late)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
