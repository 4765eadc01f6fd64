"""The watch over the host: what is said when, and who is told."""

from __future__ import annotations

import threading
from typing import Any

import attrs
import pytest
from cdi_courier.hookspecs import Offer
from cdi_courier.host.model import Fact, Host, Runtime
from cdi_courier.plugins import Plugins
from cdi_courier.settings import ProbeSettings, RuntimeSettings, Settings
from cdi_courier.watch import Watch
from support.waiting import wait_for


class Backend:
    """Needs nothing for runtimes whose NRI is on."""

    name = "nri"

    def offer(self, runtime: Runtime, _: Settings) -> Offer:
        on = runtime.get("nri") == "on"
        return Offer("nri", "full", "nothing" if on else "restart", "it is on" if on else "it is off")


PLUGINS = Plugins({"nri": Backend()})  # type: ignore[dict-item]
SETTINGS = attrs.evolve(Settings(), probe=ProbeSettings(interval=3600.0))


def containerd(nri: str = "on", version: str = "2.1.9", socket: str = "/run/nri/nri.sock") -> Runtime:
    facts = {"nri": Fact(nri, "t"), "nri_socket": Fact(socket, "t")}
    return Runtime("containerd", "containerd", version, "/run/containerd/containerd.sock", facts)


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cdi_courier.host")


class Hosts:
    """What the host is found to be at each look; an exception is raised. The last one stays."""

    def __init__(self, *hosts: Any) -> None:
        self.hosts = list(hosts)
        self.looks = 0

    def __call__(self) -> Host:
        self.looks += 1
        found = self.hosts.pop(0) if len(self.hosts) > 1 else self.hosts[0]
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, Host)
        return found


def test_a_description_that_fails_takes_nothing_back(caplog: pytest.LogCaptureFixture) -> None:
    """What was known of the runtimes stays, nobody is told of a change, and the failure is said once."""
    failed = Host(problems=("HST108: the probing process cannot be started",))
    changes = []
    hosts = Hosts(Host((containerd(),)), failed, failed, Host((containerd(),)))
    watch = Watch(SETTINGS, PLUGINS, hosts, lambda: changes.append(watch.choices))
    watch.look()
    known = watch.choices
    for _ in range(2):
        watch.look()
    during = watch.choices, watch.problems
    watch.look()

    assert known
    assert during == (known, failed.problems)
    assert (watch.choices, watch.problems) == (known, ())
    assert changes == [known]
    assert [record.getMessage() for record in caplog.records][1:] == list(failed.problems)


def test_what_is_chosen_is_said_once_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    """Each runtime has one line, and a new one only when version, choice or reason are others."""
    off = Host((containerd("off"),))
    newer = Host((containerd(version="2.2.0"),))
    hosts = Hosts(off, off, Host((containerd(),)), Host((containerd(),)), newer, Host())
    changes = []
    watch = Watch(SETTINGS, PLUGINS, hosts, lambda: changes.append(watch.choices))

    for _ in range(6):
        watch.look()

    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines[:3]] == [
        "containerd 2.1.9",
        "containerd 2.1.9",
        "containerd 2.2.0",
    ]
    assert "install --backend nri" in lines[0]
    assert "served by nri: it is on" in lines[1]
    assert lines[3].startswith("no container runtime is here; looking again every 3600 s")
    assert lines[4] == "containerd is gone"
    assert len(lines) == 5
    assert len(changes) == 4


def test_a_look_that_fails_keeps_what_was_known(caplog: pytest.LogCaptureFixture) -> None:
    """An error while describing is in the log, and what was chosen stays chosen."""
    watch = Watch(SETTINGS, PLUGINS, Hosts(Host((containerd(),)), OSError("no child"), Host((containerd(),))))
    watch.look()
    before = watch.choices

    watch.look()

    assert watch.choices is before
    assert "describing the host failed" in caplog.text


def test_problems_of_the_host_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """What concerns no runtime is a line of its own, once for as long as it lasts."""
    watch = Watch(SETTINGS, PLUGINS, Hosts(Host((), ("the description took too long",))))

    watch.look()
    watch.look()

    assert caplog.text.count("the description took too long") == 1


@pytest.mark.parametrize(
    ("kind", "socket", "found"),
    [
        ("containerd", "/run/nri/nri.sock", True),
        ("", "/run/../run/nri/nri.sock", True),
        ("", "/run/nri/nri.sock", True),
        ("x", "/run/containerd/containerd.sock", True),
        ("containerd", "/elsewhere", True),
        ("cri-o", "/elsewhere", False),
        ("", "", False),
    ],
)
def test_a_runtime_is_found_by_its_sockets_or_by_being_the_only_one_of_its_kind(
    kind: str, socket: str, found: bool
) -> None:
    """A socket says which runtime it is; without it the kind does, if there is one of it."""
    watch = Watch(SETTINGS, PLUGINS, Hosts(Host((containerd(),))))

    assert watch.chosen(kind, socket) is None
    watch.look()
    assert (watch.chosen(kind, socket) is not None) is found


def test_two_of_a_kind_are_told_apart_by_socket_only() -> None:
    """With two containerds the kind alone names neither."""
    other = attrs.evolve(
        containerd(socket="/run/two/nri.sock"), key="/run/two.sock", endpoint="/run/two.sock"
    )
    watch = Watch(SETTINGS, PLUGINS, Hosts(Host((containerd(), other))))
    watch.look()

    second = watch.chosen("containerd", "/run/two/nri.sock")

    assert second is not None
    assert second.runtime.key == "/run/two.sock"
    assert watch.chosen("containerd", "") is None


def test_it_looks_again_when_woken_and_ends_when_stopped() -> None:
    """The interval is an hour here: only being woken can make it look a second time."""
    hosts = Hosts(Host((containerd(),)))
    watch = Watch(SETTINGS, PLUGINS, hosts)
    thread = threading.Thread(target=watch.run)
    thread.start()
    wait_for(lambda: hosts.looks == 1, 10, "the first look")

    watch.wake()
    wait_for(lambda: hosts.looks == 2, 10, "the second look")
    watch.stop()
    thread.join(10)

    assert not thread.is_alive()


def test_new_settings_count_from_the_next_look_on_which_is_at_once() -> None:
    """A runtime that they give to nobody is served by nobody, without waiting for the interval."""
    hosts = Hosts(Host((containerd(),)))
    watch = Watch(SETTINGS, PLUGINS, hosts)
    thread = threading.Thread(target=watch.run)
    thread.start()
    wait_for(lambda: watch.choices, 10, "the first look")
    (before,) = watch.choices or ()

    watch.reload(attrs.evolve(SETTINGS, runtimes={"containerd": RuntimeSettings(ignore=True)}))
    wait_for(lambda: hosts.looks == 2 and watch.choices and watch.choices[0] != before, 10, "another look")
    (after,) = watch.choices or ()
    watch.stop()
    thread.join(10)

    assert (before.active, after.active) == ("nri", None)


def test_what_will_end_is_said_when_it_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    """A backend's warning is part of the line, which is said again when the warning changes."""
    warnings = iter(["", "the file is gone", "the file is gone", ""])

    class Warner:
        name = "nri"

        def offer(self, *_: object) -> Offer:
            return Offer("nri", "full", "nothing", "it is on", warning=next(warnings))

    watch = Watch(SETTINGS, Plugins({"nri": Warner()}), Hosts(Host((containerd(),))))  # type: ignore[dict-item]
    for _ in range(4):
        watch.look()

    assert [record.getMessage().partition("it is on")[2] for record in caplog.records] == [
        "",
        "; nri: the file is gone",
        "",
    ]
