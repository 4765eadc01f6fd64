"""The pod that proves a handler: created, removed, and told if either does not work."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cdi_courier.errors import CourierError
from cdi_courier.hookspecs import Offer
from cdi_courier.settings import Settings
from cdi_courier_cri_o import canary, offers
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
                raise fake_crio.Refusal("failed to find runtime handler\x1b[31m")
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


def test_nri_proves_itself_by_its_introduction(
    site: Site, monkeypatch: pytest.MonkeyPatch, runtime: Runtime
) -> None:
    """No pod is needed for that, and none is created."""
    offering(monkeypatch, Offer(offers.NAME, "full", "nothing", "", "nri"))
    path = str(runtime.path.with_name("nri.sock"))
    site.live = None
    with NriRuntime(path, NRI_0_12):
        words = CriODropInBackend().prove(site.runtime(nri_socket=path), Settings(), canary=True)

    assert "speaks NRI" in words
    assert runtime.asked == []


@pytest.mark.parametrize(
    ("fidelity", "allowed"),
    [("full", False), ("partial", True)],
    ids=["handler without leave", "hook"],
)
def test_no_pod_is_created_without_leave_or_need(
    site: Site, monkeypatch: pytest.MonkeyPatch, fidelity: Any, allowed: bool
) -> None:
    """A handler is proved only if that is allowed, and a hook's file needs no proof."""
    offering(monkeypatch, Offer(offers.NAME, fidelity, "nothing", "", "oci_hook"))

    assert CriODropInBackend().prove(site.runtime(), site.settings, canary=allowed) == ""


def test_what_is_not_in_effect_is_not_tried(site: Site) -> None:
    """The reason is the offer's."""
    with pytest.raises(CourierError) as caught:
        CriODropInBackend().prove(site.runtime(), site.settings, canary=True)

    assert caught.value.code == "CRI113"
    assert "a drop-in turns NRI on" in caught.value.message
