"""The daemon's report: what the description and the sessions say, joined."""

from __future__ import annotations

import gc
import json
import logging
import queue
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from socket import AF_UNIX, SOCK_DGRAM, socket
from typing import Any

import pytest
from cdi_courier import dialects, service
from cdi_courier.errors import SettingsError
from cdi_courier.hookspecs import Offer
from cdi_courier.host.model import Fact, Host, Runtime
from cdi_courier.injector import Injector
from cdi_courier.plugins import Plugins
from cdi_courier.settings import Settings, load
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


def test_without_the_distribution_the_version_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that runs from a folder of sources reports all else."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    service._version.cache_clear()
    try:
        assert reported(Server(state="active"), looked=False)["version"] == "unknown"
    finally:
        service._version.cache_clear()


def test_decisions_are_in_the_order_of_time() -> None:
    """Whoever made them, the newest is the last."""
    found = reported(Server(state="active"))

    assert [decision["container"] for decision in found["decisions"]] == ["a", "b"]


# Reading the settings again


class Reloading(Server):
    """Takes note of what it is given, or fails to take it."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__(state="active")
        self.given: list[tuple[Settings, Injector]] = []
        self.failure = failure

    def reload(self, settings: Settings, injector: Injector) -> None:
        if self.failure:
            raise self.failure
        self.given.append((settings, injector))


PLUGINS = Plugins({"nri": Backend()}, {d.name: d for d in dialects.cdi_courier_dialects()})  # type: ignore[dict-item]


class Daemon:
    """The state of a daemon whose settings are in one file."""

    def __init__(self, tmp_path: Path, *servers: Server) -> None:
        self.file = tmp_path / "config.toml"
        self.file.write_text("")
        settings = load([self.file])
        self.state = service.State(settings, service.make_injector(settings, PLUGINS))
        self.watch = Watch(settings, PLUGINS, lambda: Host(()))
        self.servers: Any = {f"server{number}": server for number, server in enumerate(servers)}

    def reload(self, text: str) -> None:
        self.file.write_text(text)
        service.reload_settings(self.state, lambda: load([self.file]), PLUGINS, self.servers, self.watch)

    def report(self) -> dict[str, Any]:
        found = service.report(self.servers, self.watch, self.state)
        return json.loads(json.dumps(found))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cdi_courier")


def test_every_server_gets_the_new_settings_and_one_injector(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is in the files counts for all servers alike; one line says from which files and what changed."""
    one, two = Reloading(), Reloading()
    daemon = Daemon(tmp_path, one, two)

    daemon.reload('[delivery]\non_denied = "skip"\n')

    assert one.given == two.given == [(daemon.state.settings, daemon.state.injector)]
    assert daemon.state.settings.delivery.on_denied == "skip"
    (text,) = [r.getMessage() for r in caplog.records]
    assert text == f"settings read again from {daemon.file}; changed: delivery.on_denied"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x", "SET002"),
        ("[policy]\nx = 1", "SET003"),
        ('[policy]\ndefault = "x"', "SET004"),
        ('[annotations]\ndialects = ["x"]', "SET005"),
    ],
    ids=["not TOML", "no such key", "no such value", "no such dialect"],
)
def test_a_file_that_cannot_be_used_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, why: str
) -> None:
    """Nobody is given anything, one line says what is wrong, and status shows it until it is mended."""
    server = Reloading()
    daemon = Daemon(tmp_path, server)
    before = daemon.state.settings, daemon.state.injector

    daemon.reload(text)
    (record,) = caplog.records
    after = daemon.state.settings, daemon.state.injector
    shown = daemon.report()["settings"]["problem"]
    daemon.reload("")

    assert record.getMessage().startswith(f"SET030: the settings stay as they were: {why}: ")
    assert (str(daemon.file) in record.getMessage()) is (why != "SET005")
    assert "\n" not in record.getMessage()
    assert record.exc_info is None
    assert shown == record.getMessage()
    assert after == before
    assert len(server.given) == 1
    assert daemon.report()["settings"]["problem"] == ""


def test_a_file_that_has_gone_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that was named and cannot be read is an error like any other."""
    daemon = Daemon(tmp_path, Reloading())

    def gone() -> Settings:
        raise SettingsError("SET001", "cannot read it")

    service.reload_settings(daemon.state, gone, PLUGINS, daemon.servers, daemon.watch)

    assert "SET030: the settings stay as they were: SET001" in caplog.text


def test_keys_that_need_a_restart_are_named_until_it_has_happened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The value of before counts, the log and status name the key, and both forget it when it is put back."""
    daemon = Daemon(tmp_path, Reloading())

    daemon.reload('[nri]\nplugin_index = "11"\n[metrics]\nlisten = "unix:/x"\n')
    told = daemon.report()["settings"]["restart"]
    daemon.reload("")

    assert told == ["nri.plugin_index", "metrics.listen"]
    assert "SET031: nri.plugin_index, metrics.listen: changed" in caplog.text
    assert daemon.state.settings.nri.plugin_index == "10"
    assert daemon.report()["settings"]["restart"] == []


def test_a_server_that_cannot_reload_is_named_and_hurts_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A backend made before there was reloading, and one that fails at it, go on; the others have the new."""
    good = Reloading()
    daemon = Daemon(tmp_path, Server(state="active"), Reloading(RuntimeError("no")), good)

    daemon.reload('[policy]\ndefault = "allow"\n')

    assert "backend server0 goes on with the settings of its start" in caplog.text
    assert "backend server1 goes on with its settings of before" in caplog.text
    assert len(good.given) == 1


def test_what_was_read_of_spec_files_is_kept_as_long_as_it_may_be(tmp_path: Path) -> None:
    """A reload that does not touch [cdi] reads no spec file again; one that does begins anew."""
    daemon = Daemon(tmp_path, Reloading())
    first = daemon.state.injector.registry

    daemon.reload('[policy]\ndefault = "allow"\n')
    second = daemon.state.injector.registry
    daemon.reload(f'[cdi]\ndirs = ["{tmp_path}"]\n')

    assert second is first
    assert daemon.state.injector.registry is not first
    assert daemon.state.injector.registry.dirs == (str(tmp_path),)


def test_the_log_level_counts_at_once(tmp_path: Path) -> None:
    """Somebody who looks for a fault need not restart what shows it."""
    daemon = Daemon(tmp_path, Reloading())
    root = logging.getLogger()
    before = root.level
    try:
        daemon.reload('[service]\nlog_level = "debug"\n')
        during = root.level
    finally:
        root.setLevel(before)

    assert during == logging.DEBUG


# The service manager


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """A service manager with a watchdog; called, it gives what it was told so far."""
    with socket(AF_UNIX, SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "30000000")

        def told() -> list[str]:
            lines = []
            try:
                while True:
                    lines += listener.recv(4096).decode().split("\n")
            except BlockingIOError:
                return lines

        yield told


class Living(Server):
    """Is as alive as it is told to be."""

    def __init__(self, *, alive: bool) -> None:
        super().__init__(state="active")
        self._alive = alive

    def alive(self) -> bool:
        return self._alive


def attended(*servers: Server, wishes: tuple[str, ...]) -> int:
    """How often the settings were read again, for these wishes in this order."""
    reloads: list[int] = []
    wanted: queue.SimpleQueue[str] = queue.SimpleQueue()
    for wish in wishes:
        wanted.put(wish)
    service._attend({str(n): s for n, s in enumerate(servers)}, wanted, lambda: reloads.append(1))  # type: ignore[misc]
    return len(reloads)


@pytest.mark.parametrize(
    ("servers", "fed"),
    [
        ([Living(alive=True)], True),
        ([Living(alive=True), Living(alive=False)], False),
        ([Server(state="active")], True),
    ],
    ids=["alive", "one is stuck", "does not know"],
)
def test_the_watchdog_is_fed_as_long_as_every_server_is_alive(
    manager: Callable[[], list[str]], servers: list[Server], fed: bool
) -> None:
    """One that is stuck lets it starve; one that cannot tell is taken to be alive."""
    attended(*servers, wishes=("reload", "stop"))

    assert ("WATCHDOG=1" in manager()) is fed


def test_a_reload_is_told_from_its_beginning_to_its_end(manager: Callable[[], list[str]]) -> None:
    """`systemctl` shows reloading and then active again, each time."""
    reloads = attended(Living(alive=True), wishes=("reload", "reload", "ended"))

    names = [line.partition("=")[0] for line in manager()]
    assert reloads == 2
    assert names == [*["RELOADING", "MONOTONIC_USEC", "READY", "STATUS", "STATUS", "WATCHDOG"] * 2]


def test_a_signal_that_comes_just_before_a_wait_is_noticed_after_it() -> None:
    """No wait for wishes is endless: the handler of a signal that missed its moment runs in between."""
    waits: list[float] = []

    class Wishes:
        def get(self, timeout: float) -> str:
            waits.append(timeout)
            if len(waits) == 1:
                raise queue.Empty
            return "stop"

    service._attend({}, Wishes(), lambda: None)  # type: ignore[arg-type]

    assert len(waits) == 2
    assert max(waits) <= service._SIGNAL


def test_the_collector_is_at_work_when_a_start_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first moment without a wish ends its rest; what the start has made is not looked through again."""
    monkeypatch.setattr(service, "_SETTLED", 0.01)
    deadline = time.monotonic() + 5

    class Wishes:
        def get(self, timeout: float) -> str:
            if gc.isenabled() or time.monotonic() > deadline:
                return "stop"
            raise queue.Empty

    gc.disable()
    frozen = gc.get_freeze_count()
    try:
        service._attend({}, Wishes(), lambda: None)  # type: ignore[arg-type]
        found = gc.isenabled(), gc.get_freeze_count() > frozen
    finally:
        gc.enable()
        gc.unfreeze()

    assert found == (True, True)
