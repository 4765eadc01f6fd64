"""The status socket: one object for whoever connects, and nobody can hold it up."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path

import pytest
from cdi_courier import status


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
