"""Where a hook's words go when its caller throws its stderr away."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from cdi_courier_oci_hook import log


class Listener:
    """A datagram socket with a short path, as the journal and syslog have."""

    def __init__(self, folder: int, name: str) -> None:
        self.path = f"/proc/{os.getpid()}/fd/{folder}/{name}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.settimeout(5)

    def received(self) -> bytes:
        return self.socket.recv(1 << 17)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A folder's descriptor; neither journal nor syslog is where it usually is."""
    monkeypatch.setattr(log, "JOURNAL", str(tmp_path / "none"))
    monkeypatch.setattr(log, "SYSLOG", str(tmp_path / "none"))
    descriptor = os.open(tmp_path, os.O_PATH)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def journal(folder: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    listener = Listener(folder, "journal")
    monkeypatch.setattr(log, "JOURNAL", listener.path)
    yield listener
    listener.socket.close()


@pytest.fixture
def syslog(folder: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    listener = Listener(folder, "log")
    monkeypatch.setattr(log, "SYSLOG", listener.path)
    yield listener
    listener.socket.close()


def fields(entry: bytes) -> dict[bytes, bytes]:
    """A journal entry, read as the protocol describes it."""
    found = {}
    while entry:
        line, _, entry = entry.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(entry[:8], "little")
            value, entry = entry[8 : 8 + size], entry[8 + size + 1 :]
        found[name] = value
    return found


def test_the_journal_gets_the_whole_message(journal: Listener, syslog: Listener) -> None:
    """In its native protocol lines to paste stay lines; syslog is not bothered."""
    log.write("journal", "POL001: no\n[policy]\nlocal = 1")

    assert fields(journal.received()) == {
        b"PRIORITY": b"3",
        b"SYSLOG_FACILITY": b"3",
        b"SYSLOG_IDENTIFIER": b"cdi-courier",
        b"MESSAGE": b"POL001: no\n[policy]\nlocal = 1",
    }
    syslog.socket.settimeout(0)
    with pytest.raises(BlockingIOError):
        syslog.received()


def test_without_a_journal_syslog_gets_one_line(syslog: Listener) -> None:
    """A line feed cannot forge a second record there."""
    log.write("journal", "HOK004: a\nb", log.WARNING)

    assert syslog.received() == b"<28>cdi-courier[%d]: HOK004: a b" % os.getpid()


def test_without_either_only_stderr_has_it(folder: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is raised."""
    log.write("journal", "HOK004: a")

    assert capfd.readouterr().err == "cdi-courier: HOK004: a\n"


def test_a_file_is_appended_to_line_by_line(folder: int, tmp_path: Path) -> None:
    """One line a message, with a time, private to its owner."""
    path = tmp_path / "file"

    log.write(str(path), "A: 1\n2")
    log.write(str(path), "B: 3")

    assert [line.split(" ", 1)[1] for line in path.read_text().splitlines()] == ["A: 1 2", "B: 3"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["missing-folder", "link", "directory"])
def test_a_file_that_cannot_be_written_leaves_the_journal(
    journal: Listener, tmp_path: Path, kind: str
) -> None:
    """A rootless user's hook cannot write root's file, and a link is not followed."""
    path = tmp_path / "sub" / "file"
    if kind == "link":
        path = tmp_path / "file"
        path.symlink_to(tmp_path / "target")
    elif kind == "directory":
        path.mkdir(parents=True)

    log.write(str(path), "A: 1")

    assert fields(journal.received())[b"MESSAGE"] == b"A: 1"
    assert not (tmp_path / "target").exists()


def test_a_journal_that_does_not_read_is_not_waited_for(journal: Listener) -> None:
    """When its queue is full the message is lost, and the container is not held up."""
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.setblocking(False)
    with sender, contextlib.suppress(BlockingIOError):
        while True:
            sender.sendto(b"x", journal.path)

    log.write("journal", "A: 1")

    assert journal.received() == b"x"


def test_a_lone_surrogate_is_no_obstacle(journal: Listener) -> None:
    """Messages quote what containers say; whatever it is, it arrives."""
    log.write("journal", "A: \udc80")

    assert fields(journal.received())[b"MESSAGE"] == rb"A: \udc80"
