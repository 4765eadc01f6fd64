"""A day's work of the daemon in a minute: its memory, descriptors and threads stay what they were.

`CDI_COURIER_TEST_SOAK` is the number of requests: a tenth of a day at ten a second unless it says otherwise.
The runtime is in Python; what it costs the daemon is what a real one would.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cdi_courier import status
from support.courier import Courier
from support.nri_load import realistic_container, realistic_pod
from support.nri_soak import NUMBER, SoakRuntime, template
from support.waiting import wait_for

KEY = "nvidia.cdi.k8s.io"
GPU = "vendor.com/gpu"

REQUESTS = int(os.environ.get("CDI_COURIER_TEST_SOAK", "86400"))
ROUND = 1800  # requests between two looks at the daemon
PERIOD = 12  # rounds, after which everything is as before: each chore was done twice, with both deliveries
WARM_UP = 3 * PERIOD  # rounds, in which everything that is bounded becomes full
GROWTH = 1.05
LISTED = 200  # containers of a list, of which each fourth has missed its devices

# A tenth of the mix each; what is asked for by NUMBER differs in every request.
KINDS: dict[str, tuple[dict[str, str], str]] = {
    "plain": ({}, "gpu-operator"),
    "one": ({KEY: f"{GPU}=a"}, "gpu-operator"),
    "two": ({f"{KEY}/pod": f"{GPU}=a,{GPU}=b"}, "gpu-operator"),
    "refused": ({KEY: f"{GPU}=a"}, "default"),
    "refused for a name of its own": ({KEY: f"{GPU}=n{NUMBER}"}, f"ns-{NUMBER}"),
    "unresolvable": ({KEY: f"{GPU}=none"}, "gpu-operator"),
    "unresolvable by a name of its own": ({KEY: f"{GPU}=n{NUMBER}"}, "gpu-operator"),
    "unresolvable by a kind of its own": ({KEY: f"v{NUMBER}.com/gpu=a"}, "gpu-operator"),
    "malformed": ({KEY: f"x{NUMBER}"}, "gpu-operator"),
    "undeliverable by edits": ({KEY: f"{GPU}=groups"}, "gpu-operator"),
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


class Daemon:
    """The daemon of the test, its files, and what can be seen of it from outside."""

    def __init__(self, folder: Path, socket_path: str) -> None:
        self.folder = folder
        self.delivery = "edits"
        self.generation = 0
        self.cdi = folder / "cdi"
        self.cdi.mkdir()
        self._socket_path = socket_path
        self.configure()
        self.write_spec()
        self.courier = Courier(folder / "config.toml", folder / "log")

    def configure(self) -> None:
        (self.folder / "config.toml").write_text(
            f'[cdi]\ndirs = ["{self.cdi}"]\ntrust = "any"\n'
            f'[service]\nstate_dir = "{self.folder}/s"\nlog_format = "json"\n'
            f'[nri]\nsockets = ["{self._socket_path}"]\ndelivery = "{self.delivery}"\n'
        )

    def write_spec(self) -> None:
        self.generation += 1
        edits: dict[str, dict[str, Any]] = {
            "a": {"env": [f"A={self.generation}"], "deviceNodes": [{"path": "/dev/null"}]},
            "b": {"mounts": [{"hostPath": "/", "containerPath": "/b", "options": ["ro"]}]},
            "groups": {"additionalGids": [44]},
        }
        devices = [{"name": name, "containerEdits": edit} for name, edit in edits.items()]
        partial = self.folder / "partial"
        partial.write_text(json.dumps({"cdiVersion": "0.7.0", "kind": GPU, "devices": devices}))
        partial.rename(self.cdi / "v.json")

    @property
    def pid(self) -> int:
        assert self.courier.process is not None
        return self.courier.process.pid

    def report(self) -> dict[str, Any]:
        found = status.ask(f"{self.folder}/s", timeout=20)
        assert found is not None
        return found

    def session(self) -> dict[str, Any]:
        return next(e for e in self.report()["runtimes"].values() if e.get("socket") == self._socket_path)

    def memory(self) -> dict[str, int]:
        """In kB: ``Rss``, ``Pss``, and ``Anonymous``, which other processes have no part in."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
        return {name: sizes[name] for name in ("Rss", "Pss", "Anonymous")}

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def reload(self) -> None:
        """With the other delivery."""
        self.delivery = "names" if self.delivery == "edits" else "edits"
        self.configure()
        mark = self.courier.mark()
        os.kill(self.pid, signal.SIGHUP)
        self.courier.wait_for_log("changed: nri.delivery", 20, since=mark)

    def forget_log(self) -> str:
        """What was logged, which is gone from the file then: of a day it would be 200 MB."""
        text = self.courier.log()
        os.truncate(self.courier.log_file, 0)
        return text


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """The daemon, not yet started."""
    made = Daemon(tmp_path, str(tmp_path / "nri.sock"))
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


def chores(daemon: Daemon, runtime: SoakRuntime) -> list[Callable[[], object]]:
    """What happens to a daemon beside its requests, now and then."""
    pods, containers = listing()
    other = daemon.cdi / "other.yaml"

    def reconnect() -> None:
        runtime.drop()
        runtime.connect(pods, containers)

    return [
        lambda: os.utime(daemon.cdi / "v.json"),
        daemon.write_spec,
        lambda: other.write_text(f"cdiVersion: 0.6.0\nkind: other.com/x{daemon.generation}\ndevices: [\n"),
        daemon.reload,
        reconnect,
        lambda: other.unlink(missing_ok=True),
    ]


def test_a_day_s_containers_leave_memory_descriptors_and_threads_as_they_were(
    daemon: Daemon, record_property: Callable[[str, object], None]
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
                before = daemon.descriptors(), daemon.threads()
            found = runtime.ask(itertools.islice(mix, ROUND))
            answers.update({(*key, daemon.delivery): count for key, count in found.items()})
            wait_for(
                lambda: daemon.session()["counts"]["requests"] == runtime.asked,
                20,
                lambda: f"{runtime.asked} requests to be counted: {daemon.session()['counts']}",
            )
            sizes.append(daemon.memory())
            assert "Traceback" not in daemon.forget_log()
            next(todo)()
        session = daemon.session()
        wait_for(
            lambda: (daemon.descriptors(), daemon.threads()) == before,
            30,
            lambda: f"{before} descriptors and threads; {daemon.descriptors()}, {daemon.threads()}",
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
    assert sum(session["latency"]["counts"]) == runtime.asked
    for name in ("Rss", "Anonymous"):  # Pss grows also where another process ends that shared a page
        warm, *later = figures[name]
        assert later[-1] <= warm * GROWTH, f"{name} has grown: {figures[name]} kB"


def _is(verdict: str, wanted: str) -> bool:
    return verdict.startswith(wanted) if wanted else not verdict
