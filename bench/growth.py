"""How costs grow: with spec files, names in an annotation, containers at Synchronize. See README.md here.

``python bench/run.py growth``. A figure is the exponent of growth: 1 where twice as much takes twice as long,
0 where it does not matter. All is measured in this process, without a socket.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attrs import evolve
from cdi import write_specs
from cdi_courier.annotations import NVIDIA
from cdi_courier.cdi.registry import Registry
from cdi_courier.hookspecs import ServeContext
from cdi_courier.injector import Injection, Injector
from cdi_courier.request import ContainerRequest
from cdi_courier.settings import Settings
from cdi_courier_nri import adjustment
from cdi_courier_nri.handler import Handler
from cdi_courier_nri.session import Session, Synchronized

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from support import nri_load, nri_runtime  # noqa: E402
from support.waiting import wait_for  # noqa: E402

KEY = "nvidia.cdi.k8s.io"
BAR = 1.1
"""Exponent. Linear is 1; caches that hold less of more make it a little more."""
SLACK = 1.25

Result = dict[str, Any]
Sized = Mapping[int, Callable[[], object]]


def exponent(seconds: Mapping[int, float]) -> float:
    """The exponent of growth: the slope of a line through the logarithms of size and time (least squares)."""
    points = [(math.log(size), math.log(took)) for size, took in seconds.items()]
    x, y = (statistics.fmean(column) for column in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def grown(calls: Sized, repeats: int) -> Result:
    """Median and spread of the exponent over the repeats; and the times of each size in µs, the least of all.

    calls: size → what is measured. All sizes are measured in turn, each several times a repeat, of which the
    least counts: what else the machine does only ever adds.
    """
    times = {size: max(1, round(2e-3 / max(_once(call), 1e-7))) for size, call in calls.items()}
    repeated = []
    for _ in range(repeats):
        found = dict.fromkeys(calls, math.inf)
        for _, (size, call) in itertools.product(range(5), calls.items()):
            begin = time.perf_counter()
            for _ in range(times[size]):
                call()
            found[size] = min(found[size], (time.perf_counter() - begin) / times[size])
        repeated.append(found)
    exponents = [exponent(found) for found in repeated]
    return {
        "median": statistics.median(exponents),
        "low": min(exponents),
        "high": max(exponents),
        "µs": {size: round(min(found[size] for found in repeated) * 1e6, 2) for size in calls},
    }


def _once(call: Callable[[], object]) -> float:
    call()  # the first call pays for imports
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def spec_files(root: Path, sizes: tuple[int, ...]) -> Iterator[tuple[str, Sized]]:
    """A lookup in an unchanged registry, and the first scan of one, with so many files."""
    lookups, scans = {}, {}
    for size in sizes:
        folder = root / f"files{size}"
        folder.mkdir()
        write_specs(folder, size)
        registry = Registry((str(folder),), trust="any")
        # Until the time stamps are old enough to be relied on.
        wait_for(lambda r=registry: r.snapshot() is not None and r.current(), 10, "the files to rest")
        lookups[size] = registry.snapshot
        scans[size] = lambda f=str(folder): Registry((f,), trust="any").snapshot()
    yield "spec files, lookup", lookups
    yield "spec files, first scan", scans


def names(root: Path, sizes: tuple[int, ...]) -> Iterator[tuple[str, Sized]]:
    """From an annotation that holds so many names, not seen before, to the answer by names."""
    folder = root / "names"
    folder.mkdir()
    devices = [{"name": str(n), "containerEdits": {"env": [f"N{n}=1"]}} for n in range(max(sizes))]
    spec = {"cdiVersion": "0.5.0", "kind": "bench.com/gpu", "devices": devices}
    (folder / "bench.json").write_text(json.dumps(spec))
    settings = Settings()
    settings = evolve(settings, policy=evolve(settings.policy, default="allow"))
    registry = Registry((str(folder),), trust="any")
    wait_for(lambda: registry.snapshot() is not None and registry.current(), 10, "the file to rest")
    injector = Injector(settings, registry, [NVIDIA])
    namespaces = (f"n{n}" for n in itertools.count())

    def answer(size: int) -> object:
        # Another namespace each time, so that the grant is not one that is known.
        value = ",".join(f"bench.com/gpu={n}" for n in range(size))
        injection = injector.inject(ContainerRequest({KEY: value}, namespace=next(namespaces), pod="p"))
        if not isinstance(injection, Injection) or len(injection.names) != size:
            raise TypeError(f"{size} names came to {injection}")
        return adjustment.by_names(injection.names)

    yield "names in an annotation", {size: lambda s=size: answer(s) for size in sizes}


def containers(root: Path, sizes: tuple[int, ...]) -> Iterator[tuple[str, Sized]]:
    """Answering Synchronize with so many pods and containers, and looking which of them were missed."""
    settings = Settings()
    injector = Injector(settings, Registry((str(root / "none"),)), [NVIDIA])
    handler = Handler(ServeContext(settings, injector), "/nri.sock", ThreadPoolExecutor(1))
    configure = nri_runtime.request(1, "Configure", nri_runtime.configure(nri_runtime.NRI_0_12))

    def synchronize(parts: list[bytes], size: int) -> None:
        session = Session("courier", "10")
        session.start()
        session.receive(configure)
        events = [event for part in parts for event in session.receive(part)]
        (event,) = (event for event in events if isinstance(event, Synchronized))
        pods, listed = event.listing()
        handler.synchronized(pods, listed)
        if len(listed) != size:
            raise TypeError(f"{len(listed)} of {size} containers were listed")

    listings = {size: nri_load.synchronize(size, 3) for size in sizes}
    yield (
        "containers at Synchronize",
        {size: lambda p=parts, s=size: synchronize(p, s) for size, parts in listings.items()},
    )


BARS = dict.fromkeys(
    (
        "spec files, lookup",
        "spec files, first scan",
        "names in an annotation",
        "containers at Synchronize",
    ),
    BAR,
)

BENCHES = {
    # what is there more and more of → how much
    spec_files: (1, 10, 100, 1000),
    names: (1, 2, 4, 8, 16, 32, 64),
    containers: (100, 500, 1000, 2000, 5000),
}


def measure(*, check: bool = False) -> dict[str, Result]:
    """The figures, by name."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for bench, sizes in BENCHES.items():
            for what, calls in bench(Path(name), sizes):
                found[what] = grown(calls, 2 if check else 5)
    return found
