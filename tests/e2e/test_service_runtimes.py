"""The daemon and a real containerd in every order of starts and restarts, and over the latter's upgrade."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from support import chaos
from support.containerd import SUITES_1_7, SUITES_2, packaged
from support.lab import Lab
from support.packages import Packages
from support.scenario import ALL, GRANTED_NAMESPACE, annotated, devices_of, marker, on_host, run, spec
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

EVENTS = ("daemon", "runtime", "daemon again", "runtime again")
ORDERS = [
    order
    for order in itertools.permutations(EVENTS)
    if all(order.index(name) < order.index(f"{name} again") for name in ("daemon", "runtime"))
]


@pytest.fixture(params=["2.1-names", "1.7-edits"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A host of either generation, clean."""
    yield from on_host(request, request.param)


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_whatever_starts_first_is_served_and_whoever_was_there_before_is_reported(
    lab: Lab, order: tuple[str, ...]
) -> None:
    """With both up a container gets its device; one created without the daemon is named as missed."""
    lab.write_spec("all.json", spec(all={}))
    lab.containerd.stop()
    courier = lab.courier()
    served: list[str] = []
    missed: dict[str, str] = {}

    def miss(number: int) -> None:
        name = f"missed-{number}"
        missed[f"{GRANTED_NAMESPACE}/{name}/c1"] = run(lab, annotated(lab, name, pod=ALL))

    for number, event in enumerate(order):
        mark = courier.mark()
        if event == "daemon":
            courier.start()
        elif event == "runtime":
            lab.containerd.start()
        elif event == "runtime again":
            lab.containerd.restart()
        else:
            courier.stop()
            if lab.containerd.running:
                miss(number)
            courier.start()
        if courier.running and lab.containerd.running:
            courier.wait_for_log("synchronized:", since=mark)
            served.append(run(lab, annotated(lab, f"served-{number}", pod=ALL)))
        elif lab.containerd.running:
            miss(number)
    courier.stop()  # the log is whole then

    assert served
    assert [devices_of(lab, container) for container in served] == [{"ALL"}] * len(served)
    assert [devices_of(lab, container) for container in missed.values()] == [set()] * len(missed)
    assert chaos.listings(courier.log())[-1].missed == set(missed)


@pytest.fixture
def old(packages: Packages) -> Iterator[Lab]:
    """A host of its own with containerd 1.7."""
    with Lab(SUITES_1_7, packages=packages) as lab:
        yield lab


def test_an_upgrade_of_containerd_under_the_daemon_changes_how_devices_come(
    old: Lab, packages: Packages
) -> None:
    """2.1 follows 1.7 on its sockets and state: the daemon describes it anew and sends names, not edits."""
    old.write_spec("all.json", spec(all={}))
    containerd = old.containerd
    courier = old.courier(
        {
            "runtimes": {
                "containerd": {"endpoint": str(containerd.socket), "config": str(containerd.config_file)}
            },
            "nri": {"delivery": "auto"},
        }
    )
    courier.start()
    courier.wait_for_log("served by nri: NRI is on; delivering by edits", 30)
    before = run(old, annotated(old, "before", pod=ALL))
    process, mark = courier.process, courier.mark()

    containerd.stop()
    containerd.binaries = packaged(packages, SUITES_2)
    containerd.start()
    courier.wait_for_log("synchronized:", since=mark)
    courier.wait_for_log("served by nri: NRI is on; delivering by names", 30, since=mark)
    wait_for(
        lambda: "INFO cdi_courier.nri: delivering by names" in courier.log(mark), 10, "names to be chosen"
    )
    old.delivery = "names"
    after = run(old, annotated(old, "after", pod=ALL))

    assert (courier.running, courier.process) == (True, process)
    assert old.cri.version().runtime_version.removeprefix("v").startswith("2.")
    assert [devices_of(old, container) for container in (before, after)] == [{"ALL"}] * 2
    assert [marker(old, container) for container in (before, after)] == [f"injected:{ALL}"] * 2
    assert chaos.listings(courier.log(mark))[-1].missed == set()
    assert "Traceback" not in courier.log()
