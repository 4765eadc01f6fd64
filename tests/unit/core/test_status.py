"""The status socket: one object for whoever connects, and nobody can hold it up."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cdi_courier import status
from cdi_courier.cli import command
from cdi_courier.errors import HostError
from click.testing import CliRunner
from support.waiting import wait_for


def test_who_connects_reads_one_object(tmp_path: Path) -> None:
    """The report is made anew for each, only its owner may connect, and the socket goes with the daemon."""
    asked = []

    def report() -> dict[str, int]:
        asked.append(1)
        return {"asked": len(asked)}

    with status.serving(str(tmp_path), report):
        assert status.ask(str(tmp_path)) == {"asked": 1}
        assert status.ask(str(tmp_path)) == {"asked": 2}
        assert stat.S_IMODE((tmp_path / "status.sock").stat().st_mode) == 0o600

    assert status.ask(str(tmp_path)) is None
    assert list(tmp_path.iterdir()) == []


def test_a_stale_socket_is_nobody_and_is_replaced(tmp_path: Path) -> None:
    """A socket that a killed daemon has left answers nothing, and the next daemon takes its place."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "status.sock"))

    assert status.ask(str(tmp_path)) is None
    with status.serving(str(tmp_path), lambda: {"new": True}):
        assert status.ask(str(tmp_path)) == {"new": True}


def test_a_long_path_is_no_hindrance(tmp_path: Path) -> None:
    """A state directory may have a longer path than a socket's address holds."""
    deep = tmp_path / ("d" * 200)
    deep.mkdir()

    with status.serving(str(deep), lambda: {"deep": True}):
        assert status.ask(str(deep)) == {"deep": True}


def test_a_report_that_fails_hurts_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error is in the log, who asked gets no answer, and the next one is answered."""
    reports = [{"bad": object()}, {"good": True}]

    with status.serving(str(tmp_path), lambda: reports.pop(0)):
        with pytest.raises(json.JSONDecodeError):
            status.ask(str(tmp_path))
        assert status.ask(str(tmp_path)) == {"good": True}

    assert "the status report failed" in caplog.text


def test_a_reader_that_does_not_read_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who does not read a report larger than a socket holds up others for a moment only."""
    monkeypatch.setattr(status, "_PATIENCE", 0.05)
    large = {"x": "y" * 5_000_000}

    with status.serving(str(tmp_path), lambda: large), socket.socket(socket.AF_UNIX) as idle:
        idle.connect(str(tmp_path / "status.sock"))
        assert status.ask(str(tmp_path), timeout=10) == large


def test_a_folder_that_is_not_there_is_told_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without its socket the daemon still serves containers; the log says that there is no status."""
    served = []

    with status.serving(str(tmp_path / "none"), dict):
        served.append(1)

    assert served
    assert "there is no status" in caplog.text


def test_a_socket_that_can_be_made_later_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The cause is said once, with its code, and who asks is answered as soon as there is a socket."""
    monkeypatch.setattr(status, "_AGAIN", 0.01)
    folder = tmp_path / "later"
    with status.serving(str(folder), lambda: {"there": True}):
        folder.mkdir()
        wait_for(lambda: (folder / "status.sock").exists(), 10, "the socket")
        found = status.ask(str(folder))

    assert found == {"there": True}
    assert caplog.text.count("STA005") == 1
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("scarce", sorted(status.SCARCE))
def test_who_cannot_be_accepted_is_answered_when_he_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, scarce: int
) -> None:
    """Whatever is scarce for a moment is said once and does not end the answering; anything else does."""
    monkeypatch.setattr(status, "_BREATH", 0.0)
    ours, theirs = socket.socketpair()
    failures = [OSError(scarce, os.strerror(scarce))] * 3

    class Listener:
        def accept(self) -> tuple[socket.socket, str]:
            if failures:
                raise failures.pop()
            failures.append(OSError(errno.EINVAL, "it is shut down"))
            return theirs, ""

    status._serve(Listener(), lambda: {"well": True}, threading.Event())  # type: ignore[arg-type]
    with ours:
        answered = json.loads(ours.recv(4096))

    assert answered == {"well": True}
    assert caplog.text.count("STA006") == 1


# Who asks by hand


def test_nobody_who_runs_is_said_so(tmp_path: Path) -> None:
    """No socket, or one that nobody listens at, means that no daemon runs."""
    with pytest.raises(HostError) as none:
        status.require(str(tmp_path))
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "status.sock"))
    with pytest.raises(HostError) as stale:
        status.require(str(tmp_path))

    assert (none.value.code, stale.value.code) == ("STA001", "STA001")


@pytest.mark.parametrize(("user", "told"), [(0, False), (1000, True)], ids=["root", "a-user"])
def test_a_user_is_told_that_root_s_daemon_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, told: bool
) -> None:
    """A user looks into a folder of their own, where the host's daemon is never found."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(HostError, match="STA001") as caught:
        status.require(str(tmp_path))

    assert ("run as root" in caught.value.hint) is told


@pytest.mark.parametrize("backlog", [0, 16], ids=["a full queue", "an empty queue"])
def test_who_does_not_answer_in_time_is_stuck(tmp_path: Path, backlog: int) -> None:
    """A daemon that listens and does not answer is named by its process, if it can be connected to."""
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.socket(socket.AF_UNIX))
        silent.bind(str(tmp_path / "status.sock"))
        silent.listen(backlog)
        if not backlog:
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(tmp_path / "status.sock"))
        with pytest.raises(HostError) as caught:
            status.require(str(tmp_path), 0.05)

    assert caught.value.code == "STA002"
    assert backlog == 0 or f"(pid {os.getpid()})" in caught.value.message


@pytest.mark.parametrize("answer", [b"", b"[]", b"{", b"\xff"], ids=["nothing", "a list", "half", "no UTF-8"])
def test_an_answer_that_makes_no_sense_is_said_so(tmp_path: Path, answer: bytes) -> None:
    """Whatever is at the socket instead of a daemon, the cause is in words."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "status.sock"))
        other.listen(1)

        def talk() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(answer)

        thread = threading.Thread(target=talk)
        thread.start()
        with pytest.raises(HostError) as caught:
            status.require(str(tmp_path), 10)
        thread.join(10)

    assert caught.value.code == "STA003"


REPORT = {
    "version": "0.1.0",
    "pid": 7,
    "began": 1.0,
    "settings": {"files": [], "loaded": 1.0, "problem": "SET030: x", "restart": ["nri.sockets"]},
    "cdi": {"files": 1, "devices": 2, "errors": 3, "conflicts": 4},
    "problems": ["HST107: no podman"],
    "runtimes": {
        "containerd": {
            "backend": "nri",
            "version": "2.1.9",
            "state": "active",
            "since": 2.0,
            "delivery": "names",
            "counts": {"requests": 5, "injected": 3, "refused": 1},
            "latency": {"p50": 0.00025, "p90": 0.0031, "p99": 1.5},
        },
        "podman": {"backend": None, "version": "5.0", "reason": "needs install"},
    },
    "decisions": [
        {
            "time": n,
            "verdict": "refused",
            "container": f"ns/pod{n}/c",
            "devices": [],
            "cause": "POL001: \x1b[31m",
        }
        for n in range(30)
    ],
}


def asked(tmp_path: Path, report: dict[str, Any], *arguments: str) -> Any:
    config = tmp_path / "config.toml"
    config.write_text(f'[service]\nstate_dir = "{tmp_path}"\n')
    with status.serving(str(tmp_path), lambda: report):
        return CliRunner().invoke(command, ["--config", str(config), "status", *arguments])


def test_the_report_is_shown_in_tables(tmp_path: Path) -> None:
    """Each runtime with state, counts and quantiles, the problems, and the latest twenty decisions."""
    done = asked(tmp_path, {**REPORT, "version": metadata.version("cdi-courier")})

    assert done.exit_code == 0
    lines = [line.split() for line in done.output.splitlines()]
    assert ["containerd", "5", "3", "1", "0", "0", "0", "0", "250", "µs", "3.1", "ms", "1.5", "s"] in lines
    for words in ("SET030: x", "SET031: nri.sockets", "HST107: no podman", "needs install", "2 devices"):
        assert words in done.output
    assert [line[2] for line in lines if "refused" in line] == [f"ns/pod{n}/c" for n in range(10, 30)]
    assert "\x1b" not in done.output
    assert "POL001: \\u001b[31m" in done.output


@pytest.mark.parametrize(("state", "code"), [("active", 0), ("idle", 1), ("waiting", 1)])
def test_the_exit_code_says_whether_a_runtime_is_served(tmp_path: Path, state: str, code: int) -> None:
    """A script need not read the text: 0 where containers are served now, else 1."""
    runtimes = {"containerd": {"backend": "nri", "state": state}}

    done = asked(tmp_path, {**REPORT, "runtimes": runtimes}, "--json")

    assert done.exit_code == code


def test_the_json_is_the_report_itself(tmp_path: Path) -> None:
    """What the daemon says is handed on as it is."""
    report = {**REPORT, "version": metadata.version("cdi-courier")}

    done = asked(tmp_path, report, "--json")

    assert json.loads(done.stdout) == report


@pytest.mark.parametrize(
    "other",
    [
        {"settings": {"paths": []}},
        {"cdi": 3},
        {"runtimes": ["containerd"]},
        {"runtimes": {"containerd": {"counts": None}}},
        {"decisions": [{"time": "today"}]},
    ],
    ids=["settings", "cdi", "runtimes", "counts", "decisions"],
)
def test_an_answer_of_another_shape_is_said_so(tmp_path: Path, other: dict[str, Any]) -> None:
    """A daemon of another version may say things otherwise, which is no traceback."""
    done = asked(tmp_path, {**REPORT, "version": "0.0.1", **other})

    assert isinstance(done.exception, HostError)
    assert done.exception.code == "STA003"
    assert "0.0.1" in done.exception.message
    assert json.loads(asked(tmp_path, {**REPORT, **other}, "--json").stdout) == {**REPORT, **other}


def test_another_version_is_named(tmp_path: Path) -> None:
    """After an upgrade the old daemon runs on until it is restarted; that is said, and the rest shown."""
    done = asked(tmp_path, {**REPORT, "version": "0.0.1"})

    assert "STA004: the daemon is of version 0.0.1" in done.output
    assert "ns/pod29/c" in done.output
