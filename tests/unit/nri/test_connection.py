"""The connection against a runtime on a real socket: handshakes, answers, faults, and coming back."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
from cdi_courier.errors import AnnotationError, CdiError, DeliveryError, PolicyDenied
from cdi_courier_nri import messages
from cdi_courier_nri.connection import NriConnection
from support.nri_plugin import Plugin, Recorder, names_device
from support.nri_runtime import (
    EVENTS,
    GARBAGE,
    VERSIONS,
    Fault,
    Habits,
    NriRuntime,
    closes,
    container,
    create,
    falls_silent,
    pod,
    sends,
    wait_until,
)

if TYPE_CHECKING:
    from pathlib import Path

    from cdi_courier_nri.session import Configured, CreateContainer


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cdi_courier.nri")


def names(adjust: Any) -> list[str]:
    return [device.name for device in adjust.cdi_devices]


@pytest.mark.parametrize("configure_first", [False, True], ids=["reply first", "Configure first"])
@pytest.mark.parametrize("habits", VERSIONS, ids=str)
def test_a_container_gets_its_adjustment(path: str, habits: Habits, configure_first: bool) -> None:
    """Whatever the NRI version and the order of the handshake, the plugin registers and is asked."""
    listed = [([], [container("c1")]), ([pod("pod0")], [])]
    if not habits.splits_synchronize:
        listed = [([pod("pod0")], [container("c1")])]
    runtime = NriRuntime(path, habits, configure_first=configure_first, listed=listed)
    with runtime, Plugin(path) as plugin:
        peer = runtime.plugin()
        assert peer.registered_as == ("cdi-courier", "10", "v0.12.2")
        assert peer.events == 0x0008
        creation = runtime.create_container(pod(), container("c7"))
        assert (creation.error, creation.dropped) == ("", [])
        assert [names(adjust) for adjust in creation.adjustments] == [["vendor.com/class=c7"]]
        assert plugin.handler.synchronized_with == [(["pod0"], ["c1"])]
        (info,) = plugin.handler.configured_with
        assert (info.runtime_name, info.runtime_version) == (habits.runtime_name, habits.runtime_version)
        assert info.request_timeout_ms == habits.told_request_timeout_ms
        assert info.nri_version == habits.told_version
        for event in EVENTS:
            assert [reply.code for reply in peer.announce(event, pod(), container())] == [0]
        assert peer.call("Unheard").code == 12

    assert runtime.errors == []
    assert plugin.states == [
        ("registering", ""),
        ("configured", ""),
        ("active", ""),
        ("waiting", ""),
        ("stopped", ""),
    ]


def test_a_handler_is_told_when_its_answers_are_on_their_way(path: str) -> None:
    """Whatever can wait is done after the runtime has its answer, also after one that came late."""
    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        peer = runtime.plugin()
        before = plugin.handler.answered_times
        peer.create_container(pod(), container())
        wait_until(lambda: plugin.handler.answered_times == before + 1, "it is told")
        later: Future[bytes] = Future()
        plugin.handler.answer = lambda _: later
        stream = peer.start("CreateContainer", create())
        later.set_result(b"")
        assert peer.finish(stream).code == 0
        wait_until(lambda: plugin.handler.answered_times >= before + 2, "it is told")


@pytest.mark.parametrize("size", [4086, 4087, 4096, 4097, 10_000, 1_000_000, 4_194_304])
def test_adjustments_of_every_size_arrive(path: str, size: int) -> None:
    """A runtime that reads as Go does gets responses around each limit whole."""
    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        text = "x" * (size - 60)

        def answer(_: CreateContainer) -> Any:
            response = messages.CreateContainerResponse()
            response.adjust.annotations["a"] = text
            response.adjust.annotations["b"] = "y" * (size - 28 - response.ByteSize())
            return response

        plugin.handler.answer = answer
        reply = runtime.plugin().create_container(pod(), container(), timeout=10)
        assert reply.adjust.annotations["a"] == text


def test_an_adjustment_too_large_refuses_the_container_and_keeps_the_session(path: str) -> None:
    """More than ttrpc carries becomes an error status; the next container is served."""
    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        plugin.handler.answer = lambda request: b"x" * 4_200_000 if request.container.name == "big" else b""
        peer = runtime.plugin()
        reply = peer.create_container(pod(), container("big"))
        assert (reply.code, "NRI014" in reply.message) == (8, True)

        assert peer.create_container(pod(), container("small")).code == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PolicyDenied("POL001", "may not", "paste this"), 7),
        (CdiError("CDI001", "no such device"), 5),
        (AnnotationError("ANN001", "an empty item"), 3),
        (DeliveryError("DLV001", "cannot carry"), 9),
    ],
    ids=["policy", "cdi", "annotation", "delivery"],
)
def test_a_refusal_reaches_the_runtime_in_words(
    path: str, error: Exception, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A CourierError is an error status with its code, cause and hint, without a traceback."""
    with NriRuntime(path) as runtime, Plugin(path) as plugin:

        def refuse(_: CreateContainer) -> Any:
            raise error

        plugin.handler.answer = refuse
        reply = runtime.plugin().create_container(pod(), container())
        assert (reply.code, reply.message) == (code, str(error))
        assert plugin.connection.refused == 1

    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "wrong", [lambda _: 1 // 0, lambda _: None, lambda _: "text"], ids=["raises", "none", "str"]
)
def test_a_failing_handler_refuses_one_container(
    path: str, wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Any other exception is logged with its traceback, refuses the container, and the session goes on."""
    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        plugin.handler.answer = wrong
        peer = runtime.plugin()
        reply = peer.create_container(pod(), container())
        assert (reply.code, "NRI013: internal error" in reply.message) == (13, True)
        assert "Traceback" in caplog.text

        plugin.handler.answer = names_device
        assert names(peer.create_container(pod(), container("c1")).adjust) == ["vendor.com/class=c1"]


def test_a_handler_that_fails_in_the_handshake_does_not_end_it(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`configured` and `synchronized` may raise; containers are served all the same."""

    class Failing(Recorder):
        def configured(self, info: Configured) -> None:
            raise RuntimeError("one")

        def synchronized(self, pods: list[Any], containers: list[Any]) -> None:
            raise CdiError("CDI099", "two")

    with NriRuntime(path) as runtime, Plugin(path, handler=Failing()):
        assert runtime.plugin().create_container(pod(), container()).code == 0

    assert "RuntimeError: one" in caplog.text
    assert "CDI099: two" in caplog.text


def test_the_deadline_is_a_share_of_the_timeout(path: str) -> None:
    """It counts from receipt; without a timeout in the request, the configured one counts."""
    with NriRuntime(path) as runtime, Plugin(path, deadline_share=0.5) as plugin:
        before = time.monotonic()
        peer = runtime.plugin()
        peer.create_container(pod(), container(), timeout=10)
        peer.create_container(pod(), container(), timeout=0)
        after = time.monotonic()
        first, second = plugin.handler.deadlines

        assert before + 5 < first < after + 5
        assert before + 1 < second < after + 1


def test_a_later_answer_arrives_while_others_are_served(path: str) -> None:
    """A Future is answered when it is done, and holds up nobody."""
    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        later: Future[Any] = Future()
        plugin.handler.answer = lambda request: later if request.container.name == "slow" else b""
        peer = runtime.plugin()
        slow = peer.start("CreateContainer", create("slow"), timeout=60)
        assert peer.create_container(pod(), container("quick")).code == 0
        later.set_result(messages.CreateContainerResponse())
        assert peer.finish(slow).code == 0

        failed: Future[Any] = Future()
        failed.set_exception(CdiError("CDI007", "gone"))
        plugin.handler.answer = lambda _: failed
        assert peer.call("CreateContainer", create()).message == "CDI007: gone"


def test_an_answer_that_is_not_there_in_time_is_a_refusal(path: str) -> None:
    """At the deadline the container is refused with code 4 and the Future is cancelled."""
    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        later: Future[Any] = Future()
        plugin.handler.answer = lambda _: later
        reply = runtime.plugin().create_container(pod(), container(), timeout=0.1)
        assert (reply.code, "NRI015" in reply.message) == (4, True)
        assert later.cancelled()


def test_a_stop_gives_the_answers_that_are_owed(path: str) -> None:
    """A container in work when the plugin stops is answered before the connection closes."""
    with NriRuntime(path) as runtime:
        later: Future[Any] = Future()
        asked = threading.Event()

        def answer(_: CreateContainer) -> Any:
            asked.set()
            return later

        with Plugin(path) as plugin:
            plugin.handler.answer = answer
            peer = runtime.plugin()
            stream = peer.start("CreateContainer", create("c0"), timeout=60)
            assert asked.wait(10)
            plugin.connection.stop()
            later.set_result(b"")
        assert peer.finish(stream).code == 0
        assert peer.lost.wait(10)


def test_a_stop_answers_what_has_arrived(path: str) -> None:
    """A container that waits in the socket while another is in work is answered as well."""
    with NriRuntime(path) as runtime:
        asked, go_on = threading.Event(), threading.Event()

        def answer(_: CreateContainer) -> Any:
            asked.set()
            assert go_on.wait(10)
            return b""

        with Plugin(path) as plugin:
            plugin.handler.answer = answer
            peer = runtime.plugin()
            streams = [peer.start("CreateContainer", create("c0"), timeout=60)]
            assert asked.wait(10)
            streams += [peer.start("CreateContainer", create("c1"), timeout=60) for _ in range(3)]
            plugin.connection.stop()
            go_on.set()
        assert [peer.finish(stream).code for stream in streams] == [0] * 4


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_an_absent_socket_is_waited_for_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No folder, no socket, nobody listening: one line for each change of cause, then a session."""
    folder = os.open(tmp_path, os.O_PATH)
    path = f"/proc/self/fd/{folder}/nri/nri.sock"
    with Plugin(path) as plugin:
        wait_until(lambda: "nor its folder" in plugin.causes(), "the missing folder is told")
        (tmp_path / "nri").mkdir()
        wait_until(lambda: "nri.sock is not there" in plugin.causes(), "the missing socket is told")
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(path)
        wait_until(lambda: "nobody listens" in plugin.causes(), "the refusing socket is told")
        os.unlink(path)
        wait_until(
            lambda: [s for s, _ in plugin.states].count("waiting") == 4, "the missing socket is told again"
        )
        with NriRuntime(path) as runtime:
            runtime.plugin()
    os.close(folder)

    codes = [text[:6] for text in warnings(caplog)]
    assert codes[:4] == ["NRI001", "NRI001", "NRI002", "NRI001"]


def test_a_path_that_cannot_be_a_socket_is_told_in_words(tmp_path: Path) -> None:
    """A file, a folder in a file, a path too long, a datagram socket: each a clear NRI004."""
    (tmp_path / "file").write_text("")
    folder = os.open(tmp_path, os.O_PATH)
    short = f"/proc/self/fd/{folder}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
        datagram.bind(f"{short}/datagram")
        cases = {
            f"{short}/file": "it is not a socket",
            f"{short}/file/x": "Not a directory",
            "/" + "x" * 200: "path too long",
            f"{short}/datagram": "wrong type",
        }
        for path, words in cases.items():
            with Plugin(path) as plugin:
                wait_until(plugin.causes, path)
            assert plugin.causes().startswith("NRI004"), plugin.causes()
            assert words in plugin.causes()
    os.close(folder)


def test_a_missing_permission_is_told(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EACCES names the permission and is polled; the answer is played, because root has every right."""

    class Forbidden(socket.socket):
        def connect(self, address: Any) -> None:
            raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("cdi_courier_nri.connection.socket.socket", Forbidden)
        with Plugin(path) as plugin:
            wait_until(plugin.causes, "the cause is told")

    assert plugin.causes().startswith("NRI003: no permission")


def test_a_stop_interrupts_a_wait_at_once(path: str) -> None:
    """Waiting for a socket, in backoff and in a silent handshake, a stop takes no time, even before `run`."""
    began = time.monotonic()
    with Plugin(path, poll_interval=3600):
        pass
    with (
        NriRuntime(path, faults=[Fault("accepted", falls_silent)]) as runtime,
        Plugin(path, handshake_timeout=3600),
    ):
        runtime.wait_accepted(1)
    with (
        NriRuntime(path, faults=[Fault("accepted", closes)] * 9) as runtime,
        Plugin(path, poll_interval=3600, reconnect_max=3600) as plugin,
    ):
        wait_until(plugin.causes, "the first handshake failed")
    plugin.connection.stop()
    plugin.connection.run()

    assert time.monotonic() - began < 5


def test_failed_handshakes_back_off_up_to_the_maximum(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses double from the poll interval up to the longest, with jitter."""
    pauses: list[float] = []

    def pause(connection: NriConnection, seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 8:
            connection.stop()

    monkeypatch.setattr(NriConnection, "_pause", pause)
    with (
        NriRuntime(path, faults=[Fault("accepted", sends(GARBAGE))] * 8),
        Plugin(path, poll_interval=0.25, reconnect_max=5.0) as plugin,
    ):
        plugin.thread.join(10)
    ceilings = [0.25, 0.5, 1, 2, 4, 5, 5, 5]

    assert all(c / 2 <= p <= c for p, c in zip(pauses, ceilings, strict=True)), pauses


def test_a_connected_socket_can_be_served_directly() -> None:
    """One end of a socket pair, as a runtime hands it to a plugin that it launches, holds one session."""
    ours, theirs = socket.socketpair()
    connection = NriConnection("fd 3", "cdi-courier", "10", Recorder())
    theirs.sendall(b"nonsense")
    assert not connection.serve(ours)
    theirs.close()

    assert ours.fileno() == -1


def test_an_observer_that_fails_is_logged(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever watches cannot end the session."""

    def observer(state: str, since: float, cause: str) -> None:
        raise RuntimeError(state)

    connection = NriConnection(path, "cdi-courier", "10", Recorder(), observer=observer)
    connection.stop()
    connection.run()

    assert "RuntimeError: stopped" in caplog.text


# Whether it is stuck


def test_a_connection_that_waits_for_work_is_not_busy(path: str) -> None:
    """Without a runtime, and with one that asks nothing, the thread is at no work, however long that is."""
    with Plugin(path) as plugin:
        wait_until(lambda: plugin.states, "the first attempt")
        wait_until(lambda: plugin.connection.busy() == 0, "rest without a runtime")
        with NriRuntime(path) as runtime:
            runtime.plugin()
            wait_until(lambda: plugin.connection.busy() == 0, "rest with a runtime")
            runtime.create_container(pod(), container())
            wait_until(lambda: plugin.connection.busy() == 0, "rest after a request")


def test_a_connection_that_hangs_in_its_work_is_busy_since_then(path: str) -> None:
    """A handler that never returns is noticed from outside, and forgotten once it does."""
    release = threading.Event()

    def hangs(request: CreateContainer) -> Any:
        release.wait(20)
        return b""

    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        peer = runtime.plugin()
        plugin.handler.answer = hangs
        stream = peer.start("CreateContainer", create("x"))
        wait_until(lambda: plugin.connection.busy() > 0.1, "the connection to be busy")
        release.set()
        assert peer.finish(stream).code == 0
        wait_until(lambda: plugin.connection.busy() == 0, "rest after it")


def test_a_request_that_another_thread_decides_is_no_work(path: str) -> None:
    """While spec files are read the loop turns; only its own work counts, and time shows in the histogram."""
    later: Future[Any] = Future()
    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        peer = runtime.plugin()
        plugin.handler.answer = lambda request: later
        stream = peer.start("CreateContainer", create("x"))
        wait_until(lambda: plugin.handler.deadlines != [], "the question")
        wait_until(lambda: plugin.connection.busy() == 0, "rest")
        assert sum(plugin.connection.latency.counts) == 0
        later.set_result(b"")
        assert peer.finish(stream).code == 0
        wait_until(lambda: sum(plugin.connection.latency.counts) == 1, "the answer to be counted")


def test_what_the_connection_refuses_itself_is_told_to_the_handler(path: str) -> None:
    """An internal error, an answer too large and one too late are told with their codes; others are not."""
    answers: dict[str, Any] = {
        "bug": lambda: 1 / 0,
        "large": lambda: bytes(5_000_000),
        "late": Future,
        "refused": lambda: (_ for _ in ()).throw(PolicyDenied("POL001", "no")),
        "fine": bytes,
    }
    with NriRuntime(path) as runtime, Plugin(path, deadline_share=0.05) as plugin:
        peer = runtime.plugin()
        plugin.handler.answer = lambda request: answers[request.container.name]()
        codes = [peer.create_container(pod(), container(name)).code for name in answers]
        wait_until(lambda: sum(plugin.connection.latency.counts) == 5, "all to be counted")

    assert plugin.handler.failures == ["NRI013", "NRI014", "NRI015"]
    assert [code == 0 for code in codes] == [False, False, False, False, True]
    assert plugin.connection.refused == 4
