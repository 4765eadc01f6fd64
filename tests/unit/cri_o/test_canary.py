"""The pod that proves a handler: created, removed, and told if either does not work."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from cdi_courier import status
from cdi_courier.errors import CourierError
from cdi_courier.hookspecs import Offer
from cdi_courier_cri_o import canary, offers, proof
from cdi_courier_cri_o.backend import CriODropInBackend
from support import fake_crio
from support.cri import MESSAGES
from support.nri_runtime import NRI_0_12, NriRuntime

from .conftest import Site

CRI = "/runtime.v1.RuntimeService/"


class Runtime:
    """A CRI that notes what it is asked, and fails where it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failing = ""
        self.asked: list[tuple[str, Any]] = []
        self.server = fake_crio.FakeRuntime(
            path,
            {
                f"{CRI}{name}": self.method(name)
                for name in ("RunPodSandbox", "StopPodSandbox", "RemovePodSandbox")
            },
        )

    def method(self, name: str) -> Callable[[bytes], bytes]:
        def answer(data: bytes) -> bytes:
            self.asked.append((name, MESSAGES[f"{name}Request"].FromString(data)))
            if name == self.failing:
                raise fake_crio.Refusal(f"{'long: ' * 50}failed to find runtime handler\x1b[31m")
            fields = {"pod_sandbox_id": "abc"} if name == "RunPodSandbox" else {}
            return bytes(MESSAGES[f"{name}Response"](**fields).SerializeToString())

        return answer


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """A CRI-O on a short path."""
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp") as folder:
        made = Runtime(Path(folder) / "crio.sock")
        with made.server:
            yield made


def test_a_pod_is_created_with_the_handler_and_removed(runtime: Runtime) -> None:
    """It needs no network plugin, and has CRI-O run the handler's program."""
    words = canary.run(str(runtime.path), "cdi-courier")
    names = [name for name, _ in runtime.asked]
    request = runtime.asked[0][1]
    namespaces = request.config.linux.security_context.namespace_options

    assert names == ["RunPodSandbox", "StopPodSandbox", "RemovePodSandbox"]
    assert {ids.pod_sandbox_id for _, ids in runtime.asked[1:]} == {"abc"}
    assert request.runtime_handler == "cdi-courier"
    assert (namespaces.network, namespaces.pid) == (2, 0)
    assert request.config.metadata.uid
    assert not request.config.annotations
    assert "cdi-courier and removed again" in words


@pytest.mark.parametrize(
    ("failing", "code", "says"),
    [
        pytest.param("RunPodSandbox", "CRI113", "failed to find runtime handler", id="not created"),
        pytest.param("StopPodSandbox", "CRI114", "crictl rmp -f abc", id="not stopped"),
        pytest.param("RemovePodSandbox", "CRI114", "crictl rmp -f abc", id="not removed"),
    ],
)
def test_a_pod_that_fails_is_told(runtime: Runtime, failing: str, code: str, says: str) -> None:
    """With CRI-O's own words, made harmless for a terminal, and what to do about it."""
    runtime.failing = failing
    with pytest.raises(CourierError) as caught:
        canary.run(str(runtime.path), "cdi-courier")

    assert caught.value.code == code
    assert says in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_pod_that_does_not_end_is_killed_by_asking_again(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRI-O kills when the caller's time is up, so the first call is a short one."""
    monkeypatch.setattr(canary, "_GRACE", 0.2)
    asked_again = threading.Event()
    calls: list[int] = []

    def stop(_: bytes) -> bytes:
        calls.append(len(calls))
        if calls[-1] == 0:
            asked_again.wait(30)
        asked_again.set()
        return b""

    runtime.server.grpc_answers[f"{CRI}StopPodSandbox"] = stop
    words = canary.run(str(runtime.path), "cdi-courier")

    assert "removed again" in words
    assert len(calls) == 2


def test_a_pod_that_may_come_too_late_can_be_found(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow CRI-O goes on creating it when nobody waits any more, so the message says where to look."""
    monkeypatch.setattr(canary, "_TIMEOUT", 0.2)
    given_up = threading.Event()

    def create(_: bytes) -> bytes:
        given_up.wait(30)
        return b""

    runtime.server.grpc_answers[f"{CRI}RunPodSandbox"] = create
    try:
        with pytest.raises(CourierError) as caught:
            canary.run(str(runtime.path), "cdi-courier")
    finally:
        given_up.set()

    assert caught.value.code == "CRI113"
    assert f"crictl pods --namespace {canary.NAMESPACE}" in caught.value.hint


@pytest.mark.parametrize("missing", ["RunPodSandbox", "StopPodSandbox"])
def test_a_method_that_is_not_there_is_told(runtime: Runtime, missing: str) -> None:
    """A server that is no CRI is an error like another."""
    del runtime.server.grpc_answers[f"{CRI}{missing}"]
    with pytest.raises(CourierError) as caught:
        canary.run(str(runtime.path), "x")

    assert caught.value.code in ("CRI113", "CRI114")
    assert missing in caught.value.message


# When it is asked for


def offering(monkeypatch: pytest.MonkeyPatch, made: Offer) -> None:
    monkeypatch.setattr(offers, "offer", lambda *_: made)


def nri(site: Site, monkeypatch: pytest.MonkeyPatch, path: str, *, canary: bool = False) -> str:
    offering(monkeypatch, Offer("cri_o_drop_in", "full", "nothing", "", "nri"))
    site.live = None
    site.told(service={"state_dir": str(site.root / "run")}, nri={"reconnect_max": 0.1})
    return CriODropInBackend().prove(site.runtime(nri_socket=path), site.settings, canary=canary)


@pytest.mark.parametrize(
    ("version", "canary", "registers"),
    [
        pytest.param("1.26.4", False, False, id="old"),
        pytest.param("1.26.4", True, True, id="old with leave"),
        pytest.param("1.30.14", False, False, id="1.30"),
        pytest.param("1.31.0", False, True, id="1.31"),
        pytest.param("", False, False, id="unknown"),
    ],
)
def test_nri_proves_itself_by_its_introduction(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    runtime: Runtime,
    version: str,
    canary: bool,
    registers: bool,
) -> None:
    """No pod is created for that; an NRI that may hang over a plugin more gets one only with leave."""
    site.version = version
    path = str(runtime.path.with_name("nri.sock"))
    with NriRuntime(path, NRI_0_12) as served:
        words = nri(site, monkeypatch, path, canary=canary)

    assert ("speaks NRI" in words) is registers
    assert bool(served.accepted) is registers
    assert runtime.asked == []


@pytest.fixture
def daemon(site: Site) -> Callable[[dict[str, str]], AbstractContextManager[None]]:
    """Has a daemon report this of one NRI socket."""
    (site.root / "run").mkdir()

    def serving(entry: dict[str, str]) -> AbstractContextManager[None]:
        return status.serving(str(site.root / "run"), lambda: {"pid": 7, "runtimes": {"cri-o": entry}})

    return serving


@pytest.mark.parametrize("state", ["active", "idle"])
def test_the_session_of_a_daemon_that_runs_is_the_proof(
    site: Site, monkeypatch: pytest.MonkeyPatch, daemon: Any, state: str
) -> None:
    """Then no other plugin is registered, whatever it does with the session."""
    path = str(site.root / "nri.sock")
    with daemon({"socket": path, "state": state}):
        words = nri(site, monkeypatch, path)

    assert words == "the daemon (process 7) has an NRI session with CRI-O"


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        pytest.param({"state": "waiting", "cause": "NRI001: nobody"}, "NRI001: nobody", id="waiting"),
        pytest.param({"state": "stopped"}, "stopped", id="without a cause"),
        pytest.param({"socket": "/elsewhere"}, "does not try", id="another socket"),
    ],
)
def test_a_daemon_without_a_session_is_told(
    site: Site, monkeypatch: pytest.MonkeyPatch, daemon: Any, entry: dict[str, str], says: str
) -> None:
    """It would serve nobody, so that is a failure, with what it says itself."""
    monkeypatch.setattr(proof, "_MORE", 0.0)
    path = str(site.root / "nri.sock")
    with daemon({"socket": path, **entry}), pytest.raises(CourierError) as caught:
        nri(site, monkeypatch, path)

    assert caught.value.code == "CRI115"
    assert says in caught.value.message


def test_a_daemon_that_cannot_be_asked_is_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nonsense at its socket leads to the plugin of our own."""
    (site.root / "run").mkdir()
    site.version = "1.31.0"
    with status.serving(str(site.root / "run"), list), pytest.raises(CourierError) as caught:  # type: ignore[arg-type,return-value]
        nri(site, monkeypatch, str(site.root / "none"))

    assert caught.value.code == "NRI005"


@pytest.mark.parametrize(
    ("fidelity", "allowed"),
    [("full", False), ("partial", True)],
    ids=["handler without leave", "hook"],
)
def test_no_pod_is_created_without_leave_or_need(
    site: Site, monkeypatch: pytest.MonkeyPatch, fidelity: Any, allowed: bool
) -> None:
    """A handler is proved only if that is allowed, and a hook's file needs no proof."""
    offering(monkeypatch, Offer("cri_o_drop_in", fidelity, "nothing", "", "oci_hook"))

    assert CriODropInBackend().prove(site.runtime(), site.settings, canary=allowed) == ""


def test_what_is_not_in_effect_is_not_tried(site: Site) -> None:
    """The reason is the offer's."""
    with pytest.raises(CourierError) as caught:
        CriODropInBackend().prove(site.runtime(), site.settings, canary=True)

    assert caught.value.code == "CRI113"
    assert "a drop-in turns NRI on" in caught.value.message
