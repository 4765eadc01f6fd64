"""The daemon's report: what the description and the sessions say, joined."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cdi_courier import service
from cdi_courier.hookspecs import Offer
from cdi_courier.host.model import Fact, Host, Runtime
from cdi_courier.plugins import Plugins
from cdi_courier.settings import Settings
from cdi_courier.watch import Watch

SOCKET = "/run/nri/nri.sock"


class Backend:
    """Serves what has its NRI on."""

    name = "nri"

    def offer(self, runtime: Runtime, _: Settings) -> Offer:
        return Offer("nri", "full", "nothing" if runtime.get("nri") == "on" else "restart", "so")


class Server:
    """Has one session."""

    def __init__(self, **state: Any) -> None:
        self.state = {"kind": "", "version": "", "since": 1.0, "cause": "", "counts": {}, **state}

    def status(self) -> dict[str, dict[str, Any]]:
        return {SOCKET: self.state}

    def decisions(self) -> list[dict[str, Any]]:
        return [{"time": 2.0, "container": "b"}, {"time": 1.0, "container": "a"}]


def reported(server: Server, *runtimes: Runtime, looked: bool = True) -> dict[str, Any]:
    plugins = Plugins({"nri": Backend()})  # type: ignore[dict-item]
    watch = Watch(Settings(), plugins, lambda: Host(runtimes))
    if looked:
        watch.look()
    found = service.report({"nri": server}, watch)  # type: ignore[dict-item]
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def containerd(nri: str) -> Runtime:
    facts = {"nri": Fact(nri, "t"), "nri_socket": Fact(SOCKET, "t")}
    return Runtime("containerd", "containerd", "2.1.9", "/run/c.sock", facts)


@pytest.mark.parametrize(
    ("nri", "state", "backend"),
    [("on", "active", "nri"), ("on", "waiting", "nri"), ("off", "waiting", None), ("off", "active", "nri")],
)
def test_a_runtime_s_backend_is_who_serves_it(nri: str, state: str, backend: str | None) -> None:
    """A session that is active says more than a description that has not seen it yet."""
    found = reported(Server(state=state), containerd(nri))["runtimes"]["containerd"]

    assert (found["backend"], found["state"], found["version"]) == (backend, state, "2.1.9")


def test_before_the_host_is_described_sessions_are_known_by_their_socket() -> None:
    """The report is useful from the first moment on."""
    found = reported(Server(state="active", kind="containerd", version="v2.1.9"), looked=False)

    assert found["described"] is False
    assert found["runtimes"][SOCKET]["backend"] == "nri"
    assert found["runtimes"][SOCKET]["version"] == "v2.1.9"


def test_decisions_are_in_the_order_of_time() -> None:
    """Whoever made them, the newest is the last."""
    found = reported(Server(state="active"))

    assert [decision["container"] for decision in found["decisions"]] == ["a", "b"]
