"""The load driver against the floor plugin of bench/, and against answers that are not what is expected."""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import nri_load
from support.nri_load import Load, LoadError, LoadProcess, check, create_container, synchronize, whole
from support.nri_runtime import GO_MAX_DATA, M, frame, go_frames, message

if TYPE_CHECKING:
    from collections.abc import Iterator

FLOOR = Path(__file__).resolve().parents[3] / "bench" / "nri_floor.py"
KEY = "nvidia.cdi.k8s.io/container.trainer"
CALLS = 50


@contextlib.contextmanager
def floor(socket: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The floor plugin on a socket that is listened at; it ends with its connection."""
    process = subprocess.Popen([sys.executable, str(FLOOR), str(socket)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """A driver in this process with the floor plugin connected."""
    socket = tmp_path / "floor.sock"
    with Load({"floor": str(socket)}) as driver, floor(socket):
        driver.connect("floor")
        yield driver


def response(stream: int, adjust: dict[str, Any], **status: Any) -> bytes:
    """An answer to CreateContainer in frames. adjust: fields of the fake runtime's Adjustment."""
    payload = M["CreateReply"](adjust=M["Adjustment"](**adjust)).SerializeToString()
    envelope = M["Response"](payload=payload)
    for key, value in status.items():
        setattr(envelope.status, key, value)
    return go_frames(1, message(stream, 2, envelope.SerializeToString()))


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        pytest.param({KEY: "a.com/b=c"}, {"names": ["a.com/b=c"]}, id="one name"),
        pytest.param({KEY: "a.com/b=c, a.com/b=d"}, {"names": ["a.com/b=c", "a.com/b=d"]}, id="two names"),
        pytest.param({"nvidia.cdi.k8s.io/pod": "a.com/b=c"}, {"names": ["a.com/b=c"]}, id="the pod's key"),
        pytest.param({"nvidia.cdi.k8s.io": "a.com/b=c"}, {"names": ["a.com/b=c"]}, id="the bare key"),
        pytest.param({"other": "a.com/b=c"}, {}, id="no annotation"),
    ],
)
def test_the_floor_answers_what_the_driver_expects(
    load: Load, annotations: dict[str, str], expected: dict[str, Any]
) -> None:
    """The floor returns the names of the first key there is, and every call takes time."""
    found = load.calls({"floor": expected}, annotations, CALLS, block=10)["floor"]

    assert found["calls"] == CALLS
    assert 0 < found["p50"] <= found["p99"]
    assert found["cpu"] > 0


def test_names_that_are_not_expected_stop_the_driver(load: Load) -> None:
    """A plugin whose answers differ from what was announced is not measured."""
    with pytest.raises(LoadError, match=r"^floor: .*'names': \['a.com/b=c'\]"):
        load.calls({"floor": {"names": ["a.com/b=other"]}}, {KEY: "a.com/b=c"}, CALLS)


def test_a_synchronize_is_answered_part_by_part(tmp_path: Path) -> None:
    """Every message of a split Synchronize is answered with its own flag, and calls go on after it."""
    socket = tmp_path / "floor.sock"
    with Load({"floor": str(socket)}) as load, floor(socket):
        found = load.connect("floor", 1000)
        after = load.calls({"floor": {}}, {}, CALLS)["floor"]

    assert found["messages"] > 1
    assert 0 < found["synchronize"] < found["ready"]
    assert after["calls"] == CALLS


def test_several_plugins_take_turns_in_a_process_of_their_own(tmp_path: Path) -> None:
    """The driver as a process measures each plugin the same number of times, and sees its memory."""
    sockets = {name: str(tmp_path / name) for name in ("one", "other")}
    with contextlib.ExitStack() as stack:
        load = stack.enter_context(LoadProcess(sockets))
        started = {name: stack.enter_context(floor(Path(path))) for name, path in sockets.items()}
        connected = {name: load.do("connect", name)["pid"] for name in sockets}
        expected = {"names": ["a.com/b=c"]}
        found = load.do("calls", dict.fromkeys(sockets, expected), {KEY: "a.com/b=c"}, CALLS)
        memory = load.do("memory", "one")

    assert connected == {name: process.pid for name, process in started.items()}
    assert {name: result["calls"] for name, result in found.items()} == dict.fromkeys(sockets, CALLS)
    assert 0 < memory["pss"] <= memory["rss"]


def test_an_error_reaches_the_other_end_of_the_pipe(tmp_path: Path) -> None:
    """What stops the driver's method stops its caller, with the method's name, and the driver goes on."""
    socket = tmp_path / "floor.sock"
    with LoadProcess({"floor": str(socket)}) as load, floor(socket):
        load.do("connect", "floor")
        with pytest.raises(LoadError, match=r"^calls: floor: the answer holds"):
            load.do("calls", {"floor": {"mounts": 1}}, {}, CALLS)
        after = load.do("calls", {"floor": {}}, {}, CALLS)

    assert after["floor"]["calls"] == CALLS


def test_a_plugin_that_goes_away_is_noticed(tmp_path: Path) -> None:
    """A plugin that dies is an error that names it, not a wait."""
    socket = tmp_path / "floor.sock"
    with Load({"floor": str(socket)}) as load, floor(socket) as process:
        load.connect("floor")
        process.kill()
        process.wait()
        with pytest.raises(LoadError, match="floor"):
            load.calls({"floor": {}}, {}, CALLS)


@pytest.mark.parametrize(
    ("adjust", "expected"),
    [
        pytest.param({"cdi_devices": [{"name": "a/b=c"}]}, {"names": ["a/b=c"]}, id="names"),
        pytest.param({"mounts": [{"destination": "/a"}] * 3}, {"mounts": 3}, id="mounts"),
        pytest.param({"env": [{"key": "A"}]}, {"env": 1}, id="env"),
        pytest.param({"annotations": {"a": "b"}}, {}, id="a marker alone"),
    ],
)
def test_the_expected_answer_passes(adjust: dict[str, Any], expected: dict[str, Any]) -> None:
    """An answer with what is expected and nothing else is right, whatever it is annotated with."""
    check(response(7, adjust), 7, expected)

    with pytest.raises(LoadError, match="the answer holds"):
        check(response(7, adjust), 7, {"devices": 1})


def test_an_error_status_is_a_wrong_answer() -> None:
    """A refusal is no answer, and its text is passed on."""
    with pytest.raises(LoadError, match="status 9: DLV001: why"):
        check(response(7, {}, code=9, message="DLV001: why"), 7, {})


def test_an_answer_to_another_request_is_a_wrong_answer() -> None:
    """An answer is that to its own stream."""
    with pytest.raises(LoadError, match="a response to 7 was due"):
        check(response(5, {}), 7, {})


def test_a_message_that_goes_on_is_a_wrong_answer() -> None:
    """Bytes beyond the one message are noticed."""
    with pytest.raises(LoadError, match="one message"):
        check(response(7, {}) + frame(1, b"more"), 7, {})


def test_a_frame_of_another_connection_is_a_wrong_answer() -> None:
    """A message does not continue on another connection."""
    with pytest.raises(LoadError, match="a frame of connection 2"):
        check(response(7, {}) + frame(2, b"more"), 7, {})


@given(size=st.integers(0, 20_000), first=st.integers(1, 5000))
def test_a_message_is_whole_with_its_last_byte(size: int, first: int) -> None:
    """However a message is cut into two frames, it is whole when its last byte is there and not before."""
    data = message(1, 2, bytes(size))
    cut = max(10, min(first, len(data)))
    frames = frame(1, data[:cut]) + (frame(1, data[cut:]) if data[cut:] else b"")

    assert whole(frames)
    assert not any(
        whole(frames[:end]) for end in {0, 8, 17, cut + 7, cut + 8, len(frames) - 1} if end < len(frames)
    )


def test_a_request_is_of_realistic_size() -> None:
    """A CreateContainer has 3 to 6 kB, and a large Synchronize is in parts that Go's ttrpc lets pass."""
    parts = synchronize(2000, 3)

    assert 3000 < len(create_container({KEY: "a.com/b=c"})) < 6000
    assert len(parts) > 1
    assert max(map(len, parts)) < GO_MAX_DATA
    assert [struct.unpack_from(">I", part, 12)[0] for part in parts] == [3 + 2 * n for n in range(len(parts))]


def test_the_driver_says_in_json_that_it_listens(tmp_path: Path) -> None:
    """The module can be run by itself: a line when the sockets are there, and an end with its input."""
    module = Path(nri_load.__file__)
    done = subprocess.run(
        [sys.executable, "-m", "support.nri_load", f"floor={tmp_path}/floor.sock"],
        input="",
        capture_output=True,
        check=True,
        env={"PYTHONPATH": str(module.parent.parent)},
        text=True,
        timeout=30,
    )

    assert json.loads(done.stdout) == {"result": "listening"}
