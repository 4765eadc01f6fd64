"""The daemon's log: complete and in order, never in the way of whoever logs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import AF_UNIX, SOCK_DGRAM, socket

import pytest
from cdi_courier import logs
from cdi_courier.settings import ServiceSettings
from support.waiting import wait_for

logger = logging.getLogger("cdi_courier.test")


class Target(logging.Handler):
    """Keeps messages, and stands still while `flowing` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.threads: set[str] = set()
        self.reached = threading.Event()
        self.flowing = threading.Event()
        self.flowing.set()

    def emit(self, record: logging.LogRecord) -> None:
        self.reached.set()
        self.flowing.wait(20)
        self.threads.add(threading.current_thread().name)
        self.lines.append(self.format(record))


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    """What the log is written to, instead of stderr."""
    target = Target()
    monkeypatch.setattr(logs, "_target", lambda _: target)
    return target


def test_all_that_was_logged_is_written_at_the_end(target: Target) -> None:
    """Every record is there, in order, once the log is closed, and another thread has written it."""
    with logs.writing(ServiceSettings()):
        for number in range(1000):
            logger.info("line %d", number)

    assert target.lines == [f"line {number}" for number in range(1000)]
    assert target.threads == {"log"}


def test_a_log_that_stands_still_holds_nobody_up(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever logs goes on, what is too much is dropped, and the log says how much once it flows again."""
    monkeypatch.setattr(logs, "LIMIT", 10)
    target.flowing.clear()

    with logs.writing(ServiceSettings()):
        logger.warning("line first")
        assert target.reached.wait(10)
        for number in range(100):
            logger.info("line %d", number)
        target.flowing.set()

    assert target.lines == [
        "line first",
        "90 log records were dropped: the log was not read fast enough",
        *(f"line {number}" for number in range(10)),
    ]


def test_a_log_that_stands_still_does_not_stop_the_end(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end waits a moment for the last words and then goes without them."""
    monkeypatch.setattr(logs, "LAST_WORDS", 0.05)
    target.flowing.clear()

    with logs.writing(ServiceSettings()):
        logger.info("never read")

    assert target.lines == []
    target.flowing.set()


def test_the_level_is_the_setting_s_and_is_given_back(target: Target) -> None:
    """What lies below the level is not written; afterwards logging is as it was."""
    before = logging.getLogger().level

    with logs.writing(ServiceSettings(log_level="warning")):
        logger.info("quiet")
        logger.warning("loud")

    assert target.lines == ["loud"]
    assert logging.getLogger().level == before


def run_logging(tmp_path: Path, redirect: str, syslog: str = "/nowhere") -> subprocess.CompletedProcess[str]:
    """A program that logs one hostile line with its stderr redirected by the shell."""
    script = (
        "import logging\n"
        "from cdi_courier import logs\n"
        "from cdi_courier.settings import ServiceSettings\n"
        f"logs._SYSLOG = {syslog!r}\n"
        f"with logs.writing(ServiceSettings(state_dir={str(tmp_path / 'state')!r})):\n"
        "    logging.getLogger('x').warning('hostile %s', chr(27))\n"
    )
    argv = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-c", script]
    return subprocess.run(argv, capture_output=True, text=True, check=True)


def test_the_log_goes_to_stderr_without_control_characters(tmp_path: Path) -> None:
    """A line is time, level, name and message, and nothing in it can move a terminal's cursor."""
    done = run_logging(tmp_path, "")

    assert done.stderr.endswith("WARNING x: hostile \\u001b\n")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("redirect", ["2>/dev/null", "2>&-"])
def test_where_stderr_goes_nowhere_the_log_is_a_file(tmp_path: Path, redirect: str) -> None:
    """A plugin that a runtime has launched has no stderr; without syslog its log is in state_dir."""
    run_logging(tmp_path, redirect)

    assert (tmp_path / "state" / "log").read_text().endswith("WARNING x: hostile \\u001b\n")


def test_where_stderr_goes_nowhere_syslog_is_asked_first(
    tmp_path: Path, datagrams: Callable[[], bytes]
) -> None:
    """With a syslog socket the line goes there, under the product's name."""
    run_logging(tmp_path, "2>/dev/null", str(tmp_path / "syslog"))

    assert b"cdi-courier: WARNING x: hostile \\u001b" in datagrams()


@pytest.fixture
def datagrams(tmp_path: Path) -> Iterator[Callable[[], bytes]]:
    """A syslog socket; called, it returns the next datagram."""
    with socket(AF_UNIX, SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "syslog"))
        sock.settimeout(10)
        yield lambda: sock.recv(4096)


def test_a_full_pipe_does_not_stop_the_program(tmp_path: Path) -> None:
    """Far more than a pipe holds can be logged while nobody reads it, and the program ends by itself."""
    script = (
        "import logging; from cdi_courier import logs; from cdi_courier.settings import ServiceSettings\n"
        "logs.LAST_WORDS = 0.05\n"
        f"with logs.writing(ServiceSettings(state_dir={str(tmp_path)!r})):\n"
        "    for _ in range(5000): logging.getLogger('x').warning('x' * 100)\n"
        "    print('done', flush=True)\n"
    )
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=writer, text=True
    ) as process:
        os.close(writer)
        assert process.stdout is not None
        done = process.stdout.readline()
        ended = wait_for(lambda: process.poll() is not None, 20, "the program to end")
        os.close(reader)

    assert (done, ended) == ("done\n", True)
