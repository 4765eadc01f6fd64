"""What was created while no plugin was there is found and reported when one is there again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.courier import Courier
from support.cri import EXITED
from support.lab import Lab
from support.scenario import (
    ALL,
    GRANTED_NAMESPACE,
    HOSTS,
    KIND,
    annotated,
    devices_of,
    marker,
    on_host,
    run,
    serving,
    spec,
)
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

TWO = f"{KIND}=two"


@pytest.fixture(params=HOSTS)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Every host in turn, clean, with two devices."""
    for lab in on_host(request, request.param):
        lab.write_spec("all.json", spec(all={}, two={}))
        yield lab


def warnings(lab: Lab, courier: Courier, since: int) -> list[str]:
    """What the daemon warns of from a mark until its next session has been through Synchronize."""
    courier.wait_for_log("synchronized:", since=since)
    # An answer comes after everything that Synchronize has made it say.
    run(lab, annotated(lab, "last", pod=ALL))
    courier.wait_for_log(f"injected {GRANTED_NAMESPACE}/last/c1: ", since=since)
    return [line for line in courier.log(since).splitlines() if "WARN" in line]


def test_containers_made_while_the_plugin_was_dead_are_reported(lab: Lab) -> None:
    """One line each names pod, container, devices and cure; nobody else's container has one."""
    courier = serving(lab)
    pod = annotated(lab, container_late=f"{ALL},{TWO}", container_early=ALL, container_ended=ALL)
    plain = lab.cri.run_pod("plain", GRANTED_NAMESPACE)
    early = run(lab, pod, "early")
    courier.kill()

    late = run(lab, pod, "late")
    ended = run(lab, pod, "ended", command=["true"])
    run(lab, pod, "not-named")
    run(lab, plain, "c1")
    wait_for(lambda: lab.cri.container_status(ended).status.state == EXITED, 10, "the container to end")
    mark = courier.mark()
    courier.start()
    lines = warnings(lab, courier, mark)

    assert (marker(lab, early), marker(lab, late)) == (f"injected:{ALL}", None)
    assert devices_of(lab, late) == set()
    assert len(lines) == 1
    assert f"{GRANTED_NAMESPACE}/asks/late" in lines[0]
    assert f"{ALL},{TWO}" in lines[0]
    assert "delete the pod" in lines[0]


def test_every_container_that_was_missed_has_its_line(lab: Lab) -> None:
    """Containers of one pod and of several are told apart."""
    courier = serving(lab)
    courier.kill()

    for name in ("first", "second"):
        pod = annotated(lab, name, pod=ALL)
        for container in ("c1", "c2"):
            run(lab, pod, container)
    mark = courier.mark()
    courier.start()
    lines = warnings(lab, courier, mark)

    assert len(lines) == 4
    for pod_name in ("first", "second"):
        for container in ("c1", "c2"):
            who = f"{GRANTED_NAMESPACE}/{pod_name}/{container}"
            assert [ALL in line for line in lines if who in line] == [True]


def test_a_container_that_would_be_refused_is_reported_with_the_reason(lab: Lab) -> None:
    """Making it anew would not help it, and the line says what would."""
    courier = serving(lab)
    courier.kill()

    run(lab, annotated(lab, "denied", "default", pod=ALL))
    run(lab, annotated(lab, "malformed", pod=f"{ALL},"))
    mark = courier.mark()
    courier.start()
    lines = warnings(lab, courier, mark)

    assert len(lines) == 2
    for who, code in (("default/denied/c1", "POL001"), (f"{GRANTED_NAMESPACE}/malformed/c1", "ANN002")):
        assert [code in line for line in lines if who in line] == [True]


def test_what_was_skipped_on_purpose_is_not_reported_again(lab: Lab) -> None:
    """Its marker says that it was seen."""
    courier = serving(lab, {"delivery": {"on_unresolvable": "skip"}})
    container = run(lab, annotated(lab, pod=f"{KIND}=lost"))
    courier.kill()

    mark = courier.mark()
    courier.start()
    lines = warnings(lab, courier, mark)

    assert marker(lab, container) == "skipped:CDI012"
    assert lines == []


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_restarted_runtime_still_shows_the_markers(lab: Lab, how: str) -> None:
    """Containers that were given their devices are not reported when the runtime comes back."""
    courier = serving(lab)
    container = run(lab, annotated(lab, pod=ALL))
    mark = courier.mark()

    getattr(lab.containerd, how)()
    lab.containerd.start()
    lines = warnings(lab, courier, mark)

    assert devices_of(lab, container) == {"ALL"}
    assert [line for line in lines if "asks/c1" in line] == []
