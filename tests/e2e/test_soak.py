"""A day's work of the daemon in a minute: its memory, descriptors and threads stay what they were.

`CDI_COURIER_TEST_SOAK` is the number of requests: a tenth of a day at ten a second unless it says otherwise.
The runtime is in Python; what it costs the daemon is what a real one would.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon
from support.nri_load import realistic_container, realistic_pod
from support.nri_soak import NUMBER, SoakRuntime, template
from support.unix_http import UnixConnection
from support.waiting import wait_for

KEY = "nvidia.cdi.k8s.io"
GPU = "vendor.com/gpu"

REQUESTS = int(os.environ.get("CDI_COURIER_TEST_SOAK", "86400"))
ROUND = 1200  # requests between two looks at the daemon
PERIOD = 12  # rounds, after which everything is as before: each chore was done twice, with both deliveries
WARM_UP = 3 * PERIOD  # rounds, in which everything that is bounded becomes full
GROWTH = 1.05
END = 8192  # bytes of a log in which its last line is looked for
LAST = 8  # periods at the end, of which a single one may have had the log wait on a busy machine
LISTED = 200  # containers of a list, of which each fourth has missed its devices

# A tenth of the mix each; what is asked for by NUMBER differs in every request.
KINDS: dict[str, tuple[dict[str, str], str]] = {
    "plain": ({}, "gpu-operator"),
    "two": ({f"{KEY}/pod": f"{GPU}=a,{GPU}=b"}, "gpu-operator"),
    "refused": ({KEY: f"{GPU}=a"}, "default"),
    "refused for a name of its own": ({KEY: f"{GPU}=n{NUMBER}"}, f"ns-{NUMBER}"),
    "unresolvable": ({KEY: f"{GPU}=none"}, "gpu-operator"),
    "unresolvable by a name of its own": ({KEY: f"{GPU}=n{NUMBER}"}, "gpu-operator"),
    "unresolvable by a kind of its own": ({KEY: f"v{NUMBER}.com/gpu=a"}, "gpu-operator"),
    "malformed": ({KEY: f"x{NUMBER}"}, "gpu-operator"),
    "undeliverable by edits": ({KEY: f"{GPU}=groups"}, "gpu-operator"),
    "one": ({KEY: f"{GPU}=a"}, "gpu-operator"),  # the last, because it is always logged
}

VERDICTS = {
    "plain": "",
    "refused": "POL001",
    "refused for a name of its own": "POL001",
    # The reason differs while there is a broken file that may be the one.
    "unresolvable": "CDI",
    "unresolvable by a name of its own": "CDI",
    "unresolvable by a kind of its own": "CDI",
    "malformed": "ANN001",
}
DELIVERED = {"names": "names", "edits": "DLV001"}


class Soaked(Daemon):
    """The daemon, and what is changed of its files under it."""

    def __init__(self, folder: Path, socket_path: str) -> None:
        super().__init__(folder, socket_path)
        self.delivery = "edits"
        self.generation = 0
        self.other = self.cdi / "other.yaml"
        self.metrics = folder / "m"
        self._configure()
        self.write_next_spec()

    def write_next_spec(self) -> None:
        self.generation += 1
        edits: dict[str, dict[str, Any]] = {
            "a": {"env": [f"A={self.generation}"], "deviceNodes": [{"path": "/dev/null"}]},
            "b": {"mounts": [{"hostPath": "/", "containerPath": "/b", "options": ["ro"]}]},
            "groups": {"additionalGids": [44]},
        }
        self.write_spec(GPU, edits)

    def write_broken_spec(self) -> None:
        self.other.write_text(f"cdiVersion: 0.6.0\nkind: other.com/x{self.generation}\ndevices: [\n")

    def deliver_otherwise(self) -> None:
        self.delivery = "names" if self.delivery == "edits" else "edits"
        self._configure()
        mark = self.courier.mark()
        self.hang_up()
        self.courier.wait_for_log("changed: nri.delivery", 20, since=mark)

    def _configure(self) -> None:
        self.configure(f'[metrics]\nlisten = "unix:{self.metrics}"', delivery=self.delivery)

    def scrape(self) -> str:
        """What Prometheus would read."""
        with contextlib.closing(UnixConnection(self.metrics)) as connection:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()

    def counts(self) -> tuple[int, int]:
        """Descriptors and threads."""
        return len(self.descriptors()), self.threads()

    def forget_log(self, last: str) -> str:
        """What was logged up to this, which is gone from the file then: of a day it would be 200 MB."""
        # At ten a second no lines wait; thousands of them would be a part of the memory that is measured.
        wait_for(
            lambda: last in self.courier.log(max(0, self.courier.mark() - END)), 20, f"{last} in the log"
        )
        text = self.courier.log()
        os.truncate(self.courier.log_file, 0)
        return text


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Soaked]:
    """The daemon, not yet started."""
    made = Soaked(tmp_path, str(tmp_path / "nri.sock"))
    yield made
    made.courier.stop()


def expected(kind: str, delivery: str) -> str:
    if kind == "undeliverable by edits":
        return DELIVERED[delivery]
    return VERDICTS.get(kind, delivery)


def listing() -> tuple[list[Any], list[Any]]:
    """Pods with a container each; those that ask have no marker."""
    asks = {KEY: f"{GPU}=a"}
    pods = [realistic_pod(number, asks if number % 4 == 0 else None) for number in range(LISTED)]
    return pods, [realistic_container(number) for number in range(LISTED)]


def chores(daemon: Soaked, runtime: SoakRuntime) -> list[Callable[[], object]]:
    """What happens to a daemon beside its requests, now and then."""
    pods, containers = listing()

    def reconnect() -> None:
        runtime.drop()
        runtime.connect(pods, containers)

    return [
        lambda: os.utime(daemon.cdi / "v.json"),
        daemon.write_next_spec,
        daemon.write_broken_spec,
        daemon.deliver_otherwise,
        reconnect,
        lambda: daemon.other.unlink(missing_ok=True),
    ]


def test_a_day_s_containers_leave_memory_descriptors_and_threads_as_they_were(
    daemon: Soaked, record_property: Callable[[str, object], None]
) -> None:
    """Every answer is right, and after the last the daemon is as large as after the first thousands."""
    templates = {kind: template(*made) for kind, made in KINDS.items()}
    mix = itertools.cycle(KINDS)
    sizes: list[dict[str, int]] = []
    answers: Counter[tuple[str, str, str]] = Counter()
    with SoakRuntime(str(daemon.folder / "nri.sock"), templates) as runtime:
        daemon.courier.start()
        runtime.connect(*listing())
        todo = itertools.cycle(chores(daemon, runtime))
        before = 0, 0
        for number in range(WARM_UP + PERIOD * -(-REQUESTS // (ROUND * PERIOD))):
            if number == WARM_UP:
                before = daemon.counts()
            found = runtime.ask(itertools.islice(mix, ROUND))
            answers.update({(*key, daemon.delivery): count for key, count in found.items()})
            assert "Traceback" not in daemon.forget_log(
                f"injected gpu-operator/trainer-{runtime.asked - 1:08x}"
            )
            scraped = daemon.scrape()
            sizes.append(daemon.memory())
            next(todo)()
        wait_for(
            lambda: daemon.session()["counts"]["requests"] == runtime.asked, 20, "the last to be counted"
        )
        session = daemon.session()
        # No more than then; the timer of a scrape may have been one of them.
        wait_for(
            lambda: all(now <= then for now, then in zip(daemon.counts(), before, strict=True)),
            30,
            lambda: f"{before} descriptors and threads, not {daemon.counts()}",
        )
    periods = [sizes[start : start + PERIOD] for start in range(WARM_UP - PERIOD, len(sizes), PERIOD)]
    figures = {
        name: [round(statistics.fmean(size[name] for size in period)) for period in periods]
        for name in sizes[0]
    }
    print(figures)
    record_property("kB", {name: [found[0], found[-1]] for name, found in figures.items()})

    wrong = {key: count for key, count in answers.items() if not _is(key[1], expected(key[0], key[2]))}
    assert wrong == {}
    assert sum(answers.values()) == runtime.asked >= REQUESTS
    assert (
        f'cdi_courier_requests_total{{socket="{daemon.folder}/nri.sock"}} {float(runtime.asked)}' in scraped
    )
    assert sum(session["latency"]["counts"]) == runtime.asked
    for name in ("Rss", "Anonymous"):  # Pss grows also where another process ends that shared a page
        warm, *later = figures[name]
        assert statistics.median(later[-LAST:]) <= warm * GROWTH, f"{name} has grown: {figures[name]} kB"


def _is(verdict: str, wanted: str) -> bool:
    return verdict.startswith(wanted) if wanted else not verdict
