"""What can go wrong in an NRI conversation: each fault ends in words, and the next session serves."""

from __future__ import annotations

import ast
import errno
import gc
import itertools
import json
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cdi_courier_nri
import pytest
from cdi_courier_nri import messages
from cdi_courier_nri.connection import UNSENT_LIMIT, NriConnection
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nri_plugin import Plugin, Recorder, names_device
from support.nri_runtime import (
    FAULTS,
    GARBAGE,
    NRI_0_3,
    NRI_0_6,
    NRI_0_8,
    NRI_0_8_V2,
    NRI_0_9,
    NRI_0_11,
    NRI_0_12,
    RUNTIME_SERVICE,
    VERSIONS,
    Fault,
    Habits,
    M,
    NriRuntime,
    Peer,
    closes,
    configure,
    container,
    create,
    falls_silent,
    frame,
    go_messages,
    message,
    pod,
    request,
    response,
    sends,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cdi_courier_nri.session import CreateContainer


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cdi_courier.nri")


def served(runtime: NriRuntime, name: str = "c0", **more: Any) -> list[str]:
    """The devices that the runtime's plugins gave to a new container."""
    creation = runtime.create_container(pod(), container(name), **more)
    assert (creation.error, creation.dropped) == ("", [])
    return [device.name for adjust in creation.adjustments for device in adjust.cdi_devices]


def back(runtime: NriRuntime, number: int) -> Peer:
    """Wait until the plugin has connected for the n-th time and is in the runtime's list."""
    wait_until(
        lambda: runtime.accepted >= number and runtime.active() and runtime.peers[-1].active, "a session"
    )
    return runtime.peers[-1]


# Faults of a handshake, and of a session that has just begun.

LOST = ["NRI010: the runtime closed the connection", "NRI010: the connection failed"]
SILENT = {
    "accepted": ["NRI009: nothing of NRI came"],
    "registering": ["NRI009: nothing of NRI came"],
    "registered": ["NRI009", "NRI011"],
    "configured": ["NRI011: the runtime configured the plugin but never"],
    "synchronizing": ["NRI011: the runtime configured the plugin but never"],
}
NOT_NRI, IMPOSSIBLE = ["NRI006: this does not look like an NRI socket"], ["NRI007: the runtime announces"]
REFUSED = ['NRI008: the runtime refused the registration: "invalid plugin \\u001b[31mname" (code 2)']


def explanations(fault: Fault) -> list[str]:
    if fault.name in {"closes", "dies in a frame"}:
        return LOST
    if fault.name in {"silent", "stops in a frame"}:
        return SILENT[fault.stage]
    if fault.name == "garbage":
        return NOT_NRI if fault.stage in {"accepted", "registering"} else IMPOSSIBLE
    return REFUSED


@pytest.mark.parametrize(
    ("fault", "configure_first"),
    [
        pytest.param(fault, first, id=f"{fault}, {'Configure' if first else 'reply'} first")
        for fault in FAULTS
        # Before either is sent, the order is not to be seen.
        for first in ([False] if fault.stage in {"accepted", "registering"} else [False, True])
    ],
)
def test_a_failed_connection_is_told_and_tried_again(
    path: str, fault: Fault, configure_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each fault at each stage is logged with its cause and ends in a working session."""
    times = 1 if explanations(fault) == SILENT.get(fault.stage) else 2
    runtime = NriRuntime(
        path,
        faults=[fault] * times,
        configure_first=configure_first,
        listed=[([pod()], []), ([], [container()])],
    )
    with runtime, Plugin(path, synchronize_grace=-5.7) as plugin:
        back(runtime, times + 1)
        assert served(runtime) == ["vendor.com/class=c0"]
        assert all(peer.lost.wait(10) for peer in runtime.peers[:times])
        assert plugin.handler.synchronized_with[-1] == (["pod0"], ["c0"])
    closed = [r.getMessage() for r in caplog.records if "closed after" in r.getMessage()]

    assert plugin.connection.sessions == len(closed) == times + 1
    for number, text in enumerate(closed[:times], 1):
        assert text.startswith(f"NRI session {number} on {path} closed after ")
        assert any(words in text for words in explanations(fault)), text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("name", "index", "habits", "words"),
    [
        ("cdi courier", "10", NRI_0_12, "invalid plugin name 'cdi courier'"),
        ("", "10", NRI_0_3, "invalid plugin name ''"),
        ("cdi-courier", "1x", NRI_0_6, "invalid plugin index '1x'"),
    ],
    ids=["strict", "empty", "index"],
)
def test_a_name_that_the_runtime_does_not_want_is_told(
    path: str, name: str, index: str, habits: Habits, words: str
) -> None:
    """The runtime's words are the cause, although it leaves the connection open."""
    with NriRuntime(path, habits) as runtime, Plugin(path, name, index) as plugin:
        wait_until(lambda: words in plugin.causes(), "the cause is told")
        assert runtime.peers[0].lost.wait(10)
        assert runtime.active() == []

    assert "NRI008" in plugin.causes()


def test_a_name_is_only_judged_by_runtimes_that_do(path: str) -> None:
    """Before NRI 0.12 any name that is not empty is accepted."""
    with NriRuntime(path, NRI_0_11) as runtime, Plugin(path, "cdi courier"):
        assert runtime.plugin().registered_as[0] == "cdi courier"


def test_the_plugins_before_us_may_take_their_time(path: str) -> None:
    """While the runtime waits for another plugin's registration, ours waits in its backlog, unharmed."""
    habits = replace(NRI_0_12, registration_timeout=0.2)
    with NriRuntime(path, habits) as runtime, socket.socket(socket.AF_UNIX) as mute:
        mute.connect(path)
        runtime.wait_accepted(1)
        with Plugin(path, handshake_timeout=10) as plugin:
            back(runtime, 2)
            assert served(runtime) == ["vendor.com/class=c0"]
            assert plugin.connection.sessions == 1

    assert runtime.errors == ["deadline exceeded"]


def test_a_full_backlog_is_told_and_waited_for(path: str) -> None:
    """A runtime that accepts nobody refuses to queue us at some point; when it is back, we are served."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        queued: list[socket.socket] = []
        full = False
        while not full:
            queued.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            full = queued[-1].connect_ex(path) == errno.EAGAIN
        with Plugin(path) as plugin:
            wait_until(lambda: "NRI005: cannot connect" in plugin.causes(), "the cause is told")
            os.unlink(path)
            with NriRuntime(path) as runtime:
                back(runtime, 1)
                assert served(runtime) == ["vendor.com/class=c0"]
        for sock in queued:
            sock.close()


# Bytes that end or begin anywhere. A session over a socket pair takes a fraction of a millisecond.

PIECES = {
    "registered": response(1),
    "configured": request(1, "Configure", configure()),
    "part": request(3, "Synchronize", M["Synchronize"](pods=[pod()], more=True).SerializeToString()),
    "synchronized": request(
        9, "Synchronize", M["Synchronize"](containers=[container()] * 60).SerializeToString()
    ),
    "asked": request(11, "CreateContainer", create()),
}
CONVERSATION = b"".join(PIECES.values())
ENDS = dict(zip(PIECES, itertools.accumulate(map(len, PIECES.values())), strict=True))
# Every offset, except in the middle of the large frame, where one is like another.
OFFSETS = [
    offset
    for offset in range(len(CONVERSATION) + 1)
    if not ENDS["synchronized"] - 4000 < offset < ENDS["synchronized"] - 20 or offset % 97 == 0
]


SILENT_LOGGER = logging.getLogger("cdi_courier.nri.silent")
SILENT_LOGGER.disabled = True


def overheard(connection: NriConnection, data: bytes) -> tuple[bool, bytes]:
    """Let a runtime say `data` and end; whether that made a session, and all that the plugin said."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        established = connection.serve(ours)
        said = b"".join(iter(lambda: theirs.recv(65536), b""))
    return established, said


def heard() -> tuple[NriConnection, list[str]]:
    causes: list[str] = []
    handler = Recorder()
    connection = NriConnection(
        "fd 3", "p", "10", handler, observer=lambda *told: causes.append(told[2]), logger=SILENT_LOGGER
    )
    return connection, causes


def test_a_runtime_may_die_after_any_byte() -> None:
    """Wherever the stream ends, the session is lost, its answers are whole, and the next one is healthy."""
    connection, causes = heard()
    for offset in OFFSETS:
        established, said = overheard(connection, CONVERSATION[:offset])
        answered = [stream for conn, stream, kind, _ in go_messages(said) if (conn, kind) == (1, 2)]

        assert established == (offset >= ENDS["synchronized"])
        assert answered == [
            stream
            for stream, what in ((1, "configured"), (3, "part"), (9, "synchronized"), (11, "asked"))
            if offset >= ENDS[what]
        ]
        assert causes[-1].startswith("NRI010"), causes[-1]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=64),
            st.sampled_from([*PIECES.values(), GARBAGE, response(1, code=2, text="no")]),
            st.builds(frame, st.integers(0, 3), st.binary(max_size=40)),
            st.builds(
                lambda stream, kind, data: frame(1, message(stream, kind, data)),
                st.integers(0, 99),
                st.integers(0, 3),
                st.binary(max_size=40),
            ),
        ),
        max_size=6,
    ),
    st.integers(0, 40),
)
def test_whatever_a_runtime_says_is_a_session_or_a_cause(pieces: list[bytes], cut: int) -> None:
    """Any bytes, cut anywhere, end in a ProtocolError in words; what was answered is whole frames."""
    data = b"".join(pieces)
    connection, causes = heard()
    _, said = overheard(connection, data[: max(0, len(data) - cut)])

    assert causes[-1][:6] in {"NRI006", "NRI007", "NRI008", "NRI010", "NRI016"}, causes
    assert [(stream, kind) for conn, stream, kind, _ in go_messages(said) if conn == 2] == [(1, 1)]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\0\0\0\1\xff\xff\xff\xff", "NRI007: the runtime announces a frame of 4294967295 bytes"),
        (frame(1, b"\xff\xff\xff\xff\0\0\0\7\1\0"), "NRI007: the runtime announces a message of 4294967295"),
        (frame(2, b"\4\0\0\1\0\0\0\7\2\0"), "NRI007: the runtime announces a message of 67108865"),
    ],
    ids=["frame", "request", "response"],
)
def test_a_size_that_cannot_be_ends_the_session(path: str, data: bytes, words: str) -> None:
    """More than the sanity limit is refused as soon as it is announced, and the plugin comes back."""
    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        runtime.plugin().send(data)
        back(runtime, 2)
        assert served(runtime) == ["vendor.com/class=c0"]
        assert words in plugin.causes()


# Synchronize: sizes, order, deadlines.


def megabytes(count: int) -> list[Any]:
    return [pod(f"pod{i}", filler="x" * 1_000_000) for i in range(count)]


def test_sixteen_megabytes_in_one_message_are_taken(path: str) -> None:
    """NRI before 0.7 lists everything at once, up to what its multiplexer carries."""
    listed = megabytes(16)
    listed.append(pod("last", filler="x" * 750_000))
    with NriRuntime(path, NRI_0_6, listed=[(listed, [container()])]) as runtime, Plugin(path) as plugin:
        back(runtime, 1)
        assert served(runtime) == ["vendor.com/class=c0"]
        wait_until(lambda: plugin.handler.synchronized_with, "the list has been read")
        assert plugin.handler.synchronized_with == [([f"pod{i}" for i in range(16)] + ["last"], ["c0"])]

    assert runtime.errors == []


def test_the_beginning_of_a_list_too_long_for_the_runtime_is_told(path: str) -> None:
    """Beyond 16 MiB an old runtime sends 4096 bytes and forgets us; we come back and are served at last."""
    runtime = NriRuntime(path, NRI_0_6, listed=[(megabytes(17), [])])
    with runtime, Plugin(path, synchronize_grace=-5.0) as plugin:
        assert runtime_forgets(runtime)
        runtime.listed = [(megabytes(1), [])]
        wait_until(runtime.active, "a session")
        assert served(runtime) == ["vendor.com/class=c0"]
        assert "NRI011: the runtime configured the plugin but never" in plugin.causes()

    assert "failed to synchronize: message too long" in runtime.errors


def runtime_forgets(runtime: NriRuntime) -> bool:
    """Wait until the first plugin is connected for nothing."""
    runtime.wait_accepted(1)
    return runtime.peers[0].forgotten.wait(10)


@pytest.mark.parametrize("habits", [v for v in VERSIONS if v.splits_synchronize], ids=str)
def test_a_list_that_the_runtime_splits_is_whole(path: str, habits: Habits) -> None:
    """Twelve megabytes come in several messages, with stream ids missing between them, in one list."""
    containers = [container(f"c{i}", of="pod11") for i in range(100)]
    with NriRuntime(path, habits, listed=[(megabytes(12), containers)]) as runtime, Plugin(path) as plugin:
        back(runtime, 1)
        assert served(runtime) == ["vendor.com/class=c0"]
        wait_until(lambda: plugin.handler.synchronized_with, "the list has been read")
        ((pods, names),) = plugin.handler.synchronized_with
        assert pods == [f"pod{i}" for i in range(12)]
        assert names == [f"c{i}" for i in range(100)]

    assert runtime.errors == []


@pytest.mark.parametrize("habits", VERSIONS, ids=str)
def test_a_late_answer_to_synchronize_makes_the_plugin_connect_anew(path: str, habits: Habits) -> None:
    """Whether the runtime then drops the plugin or forgets it, the session is not trusted."""
    runtime = NriRuntime(path, habits, synchronize_timeout=1e-9)
    with runtime, Plugin(path) as plugin:
        runtime.wait_accepted(1)
        if habits.forgets:
            assert runtime_forgets(runtime)
        assert runtime.peers[0].lost.wait(10)
        runtime.synchronize_timeout = None
        wait_until(runtime.active, "a session")
        assert served(runtime) == ["vendor.com/class=c0"]
        first = next(cause for _, cause in plugin.states if cause)

    assert first[:6] in ({"NRI012"} if habits.forgets else {"NRI012", "NRI010"})


# Containers: late answers, many at once, failing handlers.


def test_an_answer_that_comes_after_the_deadline_costs_the_session_and_nothing_else(path: str) -> None:
    """The container is created without us, and the plugin is back for the next one."""
    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        runtime.plugin()
        go_on = threading.Event()

        def slowly(_: CreateContainer) -> Any:
            assert go_on.wait(10)
            return b""

        plugin.handler.answer = slowly
        creation = runtime.create_container(pod(), container(), timeout=0.05)
        assert (creation.error, creation.adjustments) == ("", [])
        assert creation.dropped == ["10-cdi-courier"]

        plugin.handler.answer = names_device
        go_on.set()
        back(runtime, 2)
        assert served(runtime) == ["vendor.com/class=c0"]
        assert "NRI010" in plugin.causes()


def test_a_worker_that_is_too_slow_refuses_its_container_before_the_runtime_gives_up(path: str) -> None:
    """The refusal comes before the deadline, the worker's answer after it goes nowhere, the session stays."""
    with NriRuntime(path) as runtime, Plugin(path, deadline_share=0.02) as plugin:
        peer = runtime.plugin()
        working: Future[Any] = Future()
        working.set_running_or_notify_cancel()
        plugin.handler.answer = lambda _: working
        creation = runtime.create_container(pod(), container(), timeout=10)
        assert creation.dropped == []
        assert creation.error.startswith("NRI015: the answer was not ready in time")

        working.set_result(b"late")
        plugin.handler.answer = names_device
        assert served(runtime) == ["vendor.com/class=c0"]
        assert runtime.active() == [peer]
        assert plugin.connection.refused == 1


@pytest.mark.parametrize("seed", range(3))
def test_many_requests_are_answered_in_any_order(path: str, seed: int) -> None:
    """Sixty containers in flight, finished by four threads in random order: each gets its own answer."""
    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        peer = runtime.plugin()
        futures: dict[str, Future[Any]] = {}
        failing = {f"c{i}" for i in range(0, 60, 7)}

        def later(request: CreateContainer) -> Any:
            return futures.setdefault(request.container.name, Future())

        plugin.handler.answer = later
        streams = {
            f"c{i}": peer.start("CreateContainer", create(f"c{i}"), timeout=60, metadata={"traceparent": "0"})
            for i in range(60)
        }
        wait_until(lambda: len(futures) == 60, "all requests are in work")
        order = list(futures)
        random.Random(seed).shuffle(order)

        def finish(names: list[str]) -> None:
            for name in names:
                if name in failing:
                    futures[name].set_exception(ValueError(name))
                else:
                    futures[name].set_result(answer_for(name))

        threads = [threading.Thread(target=finish, args=(order[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        replies = {name: peer.finish(stream) for name, stream in streams.items()}
        for thread in threads:
            thread.join()

    for name, reply in replies.items():
        devices = [device.name for device in reply.adjust.cdi_devices]
        assert (reply.code, devices) == ((13, []) if name in failing else (0, [f"vendor.com/class={name}"]))


def answer_for(name: str) -> bytes:
    response = messages.CreateContainerResponse()
    response.adjust.CDI_devices.add(name=f"vendor.com/class={name}")
    data: bytes = response.SerializeToString()
    return data


def test_requests_may_carry_metadata_and_skip_streams(path: str) -> None:
    """Tracing keys are ignored, and so is every stream id that the runtime never used."""
    with NriRuntime(path) as runtime, Plugin(path):
        peer = runtime.plugin()
        for number in (0, 1, 1000):
            peer.skip_streams(number)
            reply = peer.create_container(pod(), container(), metadata={"traceparent": "00-a", "é": ""})
            assert [device.name for device in reply.adjust.cdi_devices] == ["vendor.com/class=c0"]


def raising(error: BaseException) -> Callable[[CreateContainer], Any]:
    def answer(_: CreateContainer) -> Any:
        raise error

    return answer


def failed(error: BaseException | None) -> Callable[[CreateContainer], Any]:
    def answer(_: CreateContainer) -> Any:
        future: Future[Any] = Future()
        if error:
            future.set_exception(error)
        else:
            future.cancel()
        return future

    return answer


@pytest.mark.parametrize(
    "wrong",
    [
        raising(SystemExit(1)),
        raising(RecursionError()),
        raising(MemoryError()),
        raising(OSError(24, "Too many open files")),
        raising(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "\udc80")),
        failed(ValueError("\udc80\x00")),
        failed(SystemExit(1)),
        failed(None),
        lambda _: messages.ConfigureResponse,
        lambda _: bytearray(b"x"),
    ],
    ids=[
        "exit raised",
        "recursion",
        "memory",
        "OSError",
        "unicode",
        "future",
        "exit",
        "cancelled",
        "class",
        "bytearray",
    ],
)
def test_no_failure_of_a_handler_costs_more_than_its_container(
    path: str, wrong: Callable[[CreateContainer], Any]
) -> None:
    """Whatever is raised, set or returned, the container is refused in words and the session stays."""
    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        peer = runtime.plugin()
        plugin.handler.answer = wrong
        assert runtime.create_container(pod(), container()).error.startswith("NRI013: internal error in cdi")

        plugin.handler.answer = names_device
        assert served(runtime) == ["vendor.com/class=c0"]
        assert runtime.active() == [peer]


def test_two_instances_conflict_until_one_is_gone(path: str) -> None:
    """The runtime fails the container with both names; neither plugin is dropped, and either can go."""
    with NriRuntime(path) as runtime, Plugin(path):
        with Plugin(path):
            back(runtime, 2)
            creation = runtime.create_container(pod(), container())
            assert creation.error == (
                'plugins "10-cdi-courier" and "10-cdi-courier" both tried to set CdiDevices '
                "vendor.com/class=c0"
            )
            assert len(runtime.active()) == 2
        wait_until(lambda: len(runtime.active()) == 1, "one is gone")
        assert served(runtime) == ["vendor.com/class=c0"]


def test_one_claimed_twice_is_the_runtimes_error(path: str) -> None:
    """The judge used here fails a container whose adjustment names one device twice, as Go does."""
    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        runtime.plugin()
        plugin.handler.answer = lambda _: answer_for("a") + answer_for("a")
        creation = runtime.create_container(pod(), container())

        assert "both tried to set CdiDevices vendor.com/class=a" in creation.error


# Resources: memory, descriptors, threads, time.


def test_a_runtime_that_does_not_read_is_waited_for(path: str) -> None:
    """Answers that the socket does not take are kept, in order, and other requests are still read."""
    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        peer = runtime.plugin()
        payload = b"\x12\x00" * 1_000_000
        plugin.handler.answer = lambda _: payload
        peer.pause()
        streams = [peer.start("CreateContainer", create(), timeout=60) for _ in range(8)]
        wait_until(lambda: plugin.connection.containers >= 3, "requests are read")
        peer.resume()
        assert [len(peer.finish(stream).payload) for stream in streams] == [2_000_000] * 8


class Owing:
    """Answers of one megabyte each, and how many bytes were owed at most when one more was asked for."""

    payload = b"\x12\x00" * 500_000

    def __init__(self, plugin: Plugin, peer: Peer) -> None:
        self.asked = 0
        self.most = 0
        self._peer = peer
        plugin.handler.answer = self._answer

    def _answer(self, _: CreateContainer) -> Any:
        self.most = max(self.most, self.asked * len(self.payload) - self._peer.received)
        self.asked += 1
        return self.payload


class Settled:
    """Whether a number has been the same at many looks in a row: nobody is at work on it any more."""

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number
        self._last, self._looks = -1, 0

    def __call__(self) -> bool:
        number = self._number()
        self._last, self._looks = number, self._looks + 1 if number == self._last else 0
        return self._looks > 25


IN_BETWEEN = 3_000_000
"""Bytes that count as owed although they have been sent: in the socket and in the hands of its reader."""


@pytest.mark.parametrize(
    "filler",
    [70_000, 0],
    ids=["one request a read", "many requests a read"],
)
def test_what_waits_for_a_runtime_that_does_not_read_is_bounded(path: str, filler: int) -> None:
    """Above the limit nothing more is asked for until the runtime has read; then all is answered."""
    with NriRuntime(path) as runtime, Plugin(path) as plugin:
        peer = runtime.plugin()
        owing = Owing(plugin, peer)
        peer.pause()
        asking = create(filler="x" * filler)
        wire = [request(7 + 2 * i, "CreateContainer", asking, timeout=60) for i in range(60)]
        sender = threading.Thread(target=peer.send, args=(b"".join(wire),))
        sender.start()
        wait_until(lambda: owing.most > UNSENT_LIMIT - len(owing.payload), "the limit is reached")
        wait_until(Settled(lambda: owing.asked), "nothing more is asked")
        peer.resume()
        assert [len(peer.finish(7 + 2 * i).payload) for i in range(60)] == [len(owing.payload)] * 60
        sender.join()

    assert owing.most < UNSENT_LIMIT + IN_BETWEEN


def descriptors() -> dict[str, str]:
    """What this process has open, by number."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the one that the directory was read through
    return found


def test_two_hundred_restarts_leave_nothing_behind(path: str) -> None:
    """Each time the socket is gone and made anew, the plugin is back; no descriptor, no thread is left."""
    with Plugin(path, poll_interval=0.002) as plugin:
        with NriRuntime(path) as runtime:
            runtime.plugin()
        wait_until(lambda: plugin.states[-1][0] == "waiting", "the first session is over")
        gc.collect()
        # It goes on trying to connect: for a moment each time it has a socket.
        before, threads = min((descriptors() for _ in range(20)), key=len), threading.active_count()
        for number in range(200):
            with NriRuntime(path) as runtime:
                runtime.plugin()
                assert served(runtime, f"c{number}") == [f"vendor.com/class=c{number}"]
        wait_until(lambda: plugin.states[-1][0] == "waiting", "the last session is over")
        assert threading.active_count() == threads
        wait_until(lambda: descriptors() == before, "the same descriptors as before")
        assert plugin.connection.sessions == 201
        assert plugin.connection.containers == 200


NO_DESCRIPTORS = """
import json, os, resource, socket, sys, threading, time
from cdi_courier_nri import connection

attempts, told = [], []

class Counted(socket.socket):
    def __init__(self, *arguments):
        attempts.append(time.monotonic())
        super().__init__(*arguments)

class Handler:
    def configured(self, info): pass
    def synchronized(self, pods, containers): pass
    def answered(self): pass
    def failed(self, request, error): pass
    def create_container(self, request, deadline): return b""

socket.socket = Counted
plugin = connection.NriConnection(
    sys.argv[1], "p", "10", Handler(), poll_interval=0.05, observer=lambda *state: told.append(state)
)
free = os.open("/dev/null", os.O_RDONLY)
os.close(free)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
threading.Thread(target=plugin.run, daemon=True).start()
end, pause = time.monotonic() + 10, threading.Event()
while len(attempts) < 11 and time.monotonic() < end:
    pause.wait(0.01)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
pauses = [b - a for a, b in zip(attempts[:11], attempts[1:11])]
print(json.dumps({"told": told[0], "pauses": pauses}), flush=True)
sys.stdin.read()
plugin.stop()
"""


def test_a_plugin_without_descriptors_waits_for_one(path: str) -> None:
    """Out of descriptors, connecting is tried at the poll interval, told once, and works when one is free."""
    with (
        NriRuntime(path) as runtime,
        subprocess.Popen(
            [sys.executable, "-c", NO_DESCRIPTORS, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child,
    ):
        assert child.stdout
        found = json.loads(child.stdout.readline())
        peer = back(runtime, 1)
        assert peer.create_container(pod(), container()).code == 0
        _, log = child.communicate("", timeout=10)

    assert found["told"][0] == "waiting"
    assert found["told"][2].startswith("NRI005: cannot connect")
    assert "Too many open files" in found["told"][2]
    assert len(found["pauses"]) == 10
    assert min(found["pauses"]) >= 0.045
    assert log.count("NRI005") == 1


def test_the_clock_on_the_wall_decides_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it jumps by hours at every look, sessions, deadlines, watchdogs and pauses are as ever."""
    jumps = itertools.cycle([7_200.0, -86_400.0, 3.0, 1e9])
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + next(jumps))
    runtime = NriRuntime(path, faults=[Fault("accepted", falls_silent), Fault("configured", falls_silent)])
    with runtime, Plugin(path, synchronize_grace=-5.8, deadline_share=0.05) as plugin:
        back(runtime, 3)
        assert "NRI009" in plugin.causes()
        assert "NRI011" in plugin.causes()
        later: Future[Any] = Future()
        plugin.handler.answer = lambda request: later if request.container.name == "later" else b""
        peer = runtime.peers[-1]
        stream = peer.start("CreateContainer", create("later"), timeout=1000)
        assert [peer.create_container(pod(), container()).code for _ in range(8)] == [0] * 8
        later.set_result(answer_for("later"))
        assert peer.finish(stream).code == 0

        plugin.handler.answer = lambda _: Future()
        began = time.monotonic()
        assert peer.create_container(pod(), container(), timeout=4).code == 4
        assert 0.2 <= time.monotonic() - began < 4


def test_only_a_status_tells_the_wall_clocks_time() -> None:
    """Nothing looks at the wall clock, except for the times that a status report shows."""
    wall = {"time.time", "time.time_ns", "datetime.datetime", "datetime.now"}
    users = []
    for file in sorted(Path(cdi_courier_nri.__file__).parent.glob("*.py")):
        tree = ast.parse(file.read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                users += [
                    f"{file.stem}.{function.name}"
                    for node in ast.walk(function)
                    if isinstance(node, ast.Attribute) and ast.unparse(node) in wall
                ]
        imported = {
            alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        }
        assert "datetime" not in imported

    assert set(users) == {
        "handler.__init__",
        "connection.report",
    }


# A plugin that the runtime launches.

LAUNCHED = """
import math, os, socket
from cdi_courier_nri.connection import NriConnection

class Handler:
    def configured(self, info): self.config = info.config
    def synchronized(self, pods, containers): pass
    def answered(self): pass
    def failed(self, request, error): pass
    def create_container(self, request, deadline): raise OSError(2, self.config)

plugin = NriConnection("fd 3", os.environ["NRI_PLUGIN_NAME"], "10", Handler(), synchronize_grace=math.inf)
plugin.serve(socket.socket(fileno=int(os.environ["NRI_PLUGIN_SOCKET"])))
os._exit(7)
"""


@pytest.mark.parametrize("habits", [NRI_0_3, NRI_0_6, NRI_0_8, NRI_0_12], ids=str)
def test_a_launched_plugin_lives_on_descriptor_3_and_ends_with_it(path: str, habits: Habits) -> None:
    """It has three variables and no standard streams, is asked whether synchronized or not, and exits."""
    runtime = NriRuntime(path, habits)
    try:
        peer = runtime.launch([sys.executable, "-c", LAUNCHED], name="cdi-courier", config="a = 1")
        process = Path(f"/proc/{peer.pid}")
        assert sorted((process / "environ").read_bytes().decode().split("\0")) == [
            "",
            "NRI_PLUGIN_IDX=10",
            f"NRI_PLUGIN_NAME={'10-' if habits.nri < (0, 4, 0) else ''}cdi-courier",
            "NRI_PLUGIN_SOCKET=3",
        ]
        assert {os.readlink(process / "fd" / str(fd)) for fd in range(3)} == {"/dev/null"}
        assert runtime.create_container(pod(), container()).error.startswith("NRI013")
        peer.close()
        assert peer.exit_status() == 7
    finally:
        runtime.stop()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The product in a plugin directory, with settings that a script names: the runtime gives it none."""
    settings, cdi, plugin = tmp_path / "config.toml", tmp_path / "cdi", tmp_path / "10-cdi-courier"
    cdi.mkdir()
    devices = [{"name": "a", "containerEdits": {"env": ["A=b"]}}]
    (cdi / "v.json").write_text(
        json.dumps({"cdiVersion": "0.6.0", "kind": "vendor.com/gpu", "devices": devices})
    )
    settings.write_text(
        f'[cdi]\ndirs = ["{cdi}"]\ntrust = "any"\n[service]\nstate_dir = "{tmp_path}/state"\n'
        f'[nri]\nsockets = ["{tmp_path}/nri.sock"]\n'
    )
    program = f"{sys.executable} -c 'from cdi_courier_nri.launched import main; main()'"
    plugin.write_text(f"#!/bin/sh\nCDI_COURIER_CONFIG={settings} exec {program}\n")
    plugin.chmod(0o755)
    return plugin


@pytest.mark.parametrize("habits", [NRI_0_3, NRI_0_6, NRI_0_8_V2, NRI_0_9, NRI_0_12], ids=str)
def test_the_product_serves_the_runtime_that_launched_it(path: str, installed: Path, habits: Habits) -> None:
    """It delivers over descriptor 3, synchronized or not, and ends with an error when the runtime does."""
    runtime = NriRuntime(path, habits)
    try:
        peer = runtime.launch([str(installed)], name="cdi-courier")
        asking = pod(namespace="gpu-operator", **{"nvidia.cdi.k8s.io/pod": "vendor.com/gpu=a"})
        creation = runtime.create_container(asking, container(), timeout=30)
        assert (creation.error, creation.dropped) == ("", [])
        (adjust,) = creation.adjustments
        assert [(pair.key, pair.value) for pair in adjust.env] == [("A", "b")]
        assert runtime.create_container(asking, container("c1"), timeout=30).dropped == []
        peer.close()
        assert peer.exit_status() == 1
    finally:
        runtime.stop()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(stage, act, name)
        for stage in ("accepted", "configured")
        for act, name in ((closes, "closes"), (sends(GARBAGE), "garbage"))
    ],
    ids=str,
)
def test_a_launched_plugin_whose_runtime_fails_ends(path: str, installed: Path, fault: Fault) -> None:
    """There is nothing to come back to: it exits with an error, and does not wait for another runtime."""
    runtime = NriRuntime(path, faults=[fault])
    try:
        assert runtime.launch([str(installed)]).exit_status(30) == 1
    finally:
        runtime.stop()


def test_a_launched_plugin_is_killed_when_it_is_dropped(path: str) -> None:
    """The judge used here kills what it launched and does not wait for it, as Go does."""
    runtime = NriRuntime(path)
    peer = runtime.launch([sys.executable, "-c", LAUNCHED])
    runtime.stop()

    assert not Path(f"/proc/{peer.pid}").exists()


# The judge itself, where the product never gives it reason.


def saying(path: str, mask: int, *codes: int) -> socket.socket:
    """A plugin that registers and has answered all in advance: Configure, Synchronize, then with `codes`."""
    register = M["Register"](plugin_name="p", plugin_idx="10").SerializeToString()
    call = M["Request"](service=RUNTIME_SERVICE, method="RegisterPlugin", payload=register)
    replies = [M["Response"](payload=M["ConfigureReply"](events=mask).SerializeToString()), M["Response"]()]
    replies += [M["Response"](status=M["Status"](code=code)) for code in codes]
    data = frame(2, message(1, 1, call.SerializeToString()))
    for number, reply in enumerate(replies):
        data += frame(1, message(1 + 2 * number, 2, reply.SerializeToString()))
    plugin = socket.socket(socket.AF_UNIX)
    plugin.connect(path)
    plugin.sendall(data)
    return plugin


@pytest.mark.parametrize(
    ("habits", "mask", "events", "errors"),
    [
        (NRI_0_8, 0x2008, None, ["invalid plugin events: 0x2008"]),
        (NRI_0_12, 0x2008, 0x2008, []),
        (NRI_0_12, 0x4008, None, ["invalid plugin events: 0x4008"]),
        (NRI_0_8, 0, 0x07FF, []),
        (NRI_0_12, 0, 0x3FFF, []),
    ],
    ids=["unknown in 0.8", "known in 0.12", "unknown in 0.12", "all of 0.8", "all of 0.12"],
)
def test_an_event_mask_means_what_the_version_makes_of_it(
    path: str, habits: Habits, mask: int, events: int | None, errors: list[str]
) -> None:
    """A bit that the version does not know ends the connection; no bit means every event it knows."""
    with NriRuntime(path, habits) as runtime, saying(path, mask):
        wait_until(lambda: runtime.errors or runtime.active(), "the handshake is over")
        assert [peer.events for peer in runtime.active()] == ([] if events is None else [events])

    assert runtime.errors == errors


def test_an_unimplemented_event_comes_as_a_state_change(path: str) -> None:
    """Since 0.12 code 12 makes the runtime fall back; before, StateChange is all there is."""
    with NriRuntime(path, NRI_0_12) as runtime, saying(path, 8, 12, 0):
        assert [reply.code for reply in runtime.plugin().announce("RunPodSandbox", pod())] == [12, 0]
    with NriRuntime(path, NRI_0_11) as runtime, saying(path, 8, 0):
        assert [reply.code for reply in runtime.plugin().announce("RunPodSandbox", pod())] == [0]
