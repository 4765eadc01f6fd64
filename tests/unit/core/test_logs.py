"""The daemon's log: complete and in order, never in the way of whoever logs."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import AF_UNIX, SOCK_DGRAM, socket
from typing import Any

import pytest
from cdi_courier import logs
from cdi_courier.request import ContainerRequest
from cdi_courier.settings import ServiceSettings
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import wait_for

logger = logging.getLogger("cdi_courier.test")


class Target:
    """Keeps lines, and stands still while `flowing` is not set."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.threads: set[str] = set()
        self.reached = threading.Event()
        self.flowing = threading.Event()
        self.flowing.set()

    def write(self, lines: list[logs.Line]) -> None:
        self.reached.set()
        self.flowing.wait(20)
        self.threads.add(threading.current_thread().name)
        self.lines += [line.message for line in lines]


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    """What the log is written to, instead of stderr; only messages."""
    target = Target()
    monkeypatch.setattr(logs, "_target", lambda _: target.write)
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
        *(f"line {number}" for number in range(10)),
        "90 log lines were dropped here: the log was not read fast enough",
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


def run_logging(
    tmp_path: Path, redirect: str, syslog: str = "/nowhere", log_format: str = "auto"
) -> subprocess.CompletedProcess[str]:
    """A program that logs one hostile line with its stderr redirected by the shell."""
    script = (
        "import logging\n"
        "from cdi_courier import logs\n"
        "from cdi_courier.settings import ServiceSettings\n"
        f"logs._SYSLOG = {syslog!r}\n"
        f"service = ServiceSettings(state_dir={str(tmp_path / 'state')!r}, log_format={log_format!r})\n"
        "with logs.writing(service):\n"
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

    data = datagrams()
    assert data.startswith(b"<28>")  # daemon, warning
    assert b"cdi-courier: WARNING x: hostile \\u001b" in data


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


# What a line looks like


DECISION = {
    "namespace": "default",
    "pod": "p",
    "container": "c",
    "devices": "vendor.com/gpu=a",
    "verdict": "refused",
    "code": "POL001",
    "rule": "",
    "runtime": "containerd v2.1.9",
    "duration": 0.00012345678,
}


def line(message: str, level: int = logging.WARNING, **decision: Any) -> logs.Line:
    return logs.Line(level, 1000000000.25, "cdi_courier.x", message, decision or None)


def test_a_decision_in_json_has_its_parts_as_fields() -> None:
    """One object a line: time in UTC, level, logger, message, and what is known of the decision."""
    found = json.loads(logs._json(line("refused default/p/c", **DECISION)))

    assert found == {
        "time": "2001-09-09T01:46:40.250000Z",
        "level": "warning",
        "logger": "cdi_courier.x",
        "message": "refused default/p/c",
        **{name: value for name, value in DECISION.items() if value != ""},
        "duration": 0.000123,
    }


def parsed(entry: bytes) -> dict[str, str]:
    """The fields of an entry of the journal's native protocol."""
    fields = {}
    while entry:
        name, _, entry = entry.partition(b"\n")
        if b"=" in name:
            name, _, value = name.partition(b"=")
        else:
            length = int.from_bytes(entry[:8], "little")
            value, entry = entry[8 : 8 + length], entry[8 + length :]
            assert entry[:1] == b"\n"
            entry = entry[1:]
        fields[name.decode()] = value.decode()
    return fields


def test_a_decision_in_the_journal_has_its_parts_as_fields() -> None:
    """Priority and identifier are those that journalctl filters by; each part known has its own field."""
    found = parsed(logs._entry(line("refused default/p/c", **DECISION)))

    assert (found["PRIORITY"], found["SYSLOG_IDENTIFIER"]) == ("4", "cdi-courier")
    assert found["MESSAGE"] == "refused default/p/c"
    assert (found["CDI_COURIER_POD"], found["CDI_COURIER_CODE"]) == ("p", "POL001")
    assert "CDI_COURIER_RULE" not in found


@given(st.text(), st.text())
def test_no_name_can_add_a_field_to_the_journal_or_a_line_to_json(message: str, pod: str) -> None:
    """Whatever a pod is called, there are the same fields as for any other, each with its own value."""
    hostile = {**DECISION, "pod": pod or "x"}

    journal = parsed(logs._entry(line(message, **hostile)))
    text = logs._json(line(message, **hostile))

    assert journal.keys() == parsed(logs._entry(line("m", **DECISION))).keys()
    assert "\n" not in text
    assert json.loads(text)["verdict"] == journal["CDI_COURIER_VERDICT"] == "refused"


@pytest.mark.parametrize(
    ("log_format", "start"), [("json", "{"), ("text", "2"), ("auto", "2")], ids=["json", "text", "auto"]
)
def test_the_format_is_the_setting_s(tmp_path: Path, log_format: str, start: str) -> None:
    """JSON where the setting says so; text where it says so, and for auto without a journal."""
    done = run_logging(tmp_path, "", log_format=log_format)

    assert done.stderr.startswith(start)
    assert done.stderr.count("\n") == 1
    assert "hostile" in done.stderr


def test_under_systemd_lines_go_to_the_journal_s_own_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where stderr is the stream that JOURNAL_STREAM names, and auto is set, entries have fields."""
    found = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
    monkeypatch.setattr(logs, "JOURNAL", str(tmp_path / "journal"))

    with socket(AF_UNIX, SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "journal"))
        journal.settimeout(10)
        with logs.writing(ServiceSettings()):
            logger.warning("refused %s", "x", extra={"decision": DECISION})
        entry = parsed(journal.recv(65536))

    assert (entry["MESSAGE"], entry["CDI_COURIER_VERDICT"]) == ("refused x", "refused")


@pytest.mark.parametrize("stream", ["", "1:2", "x"], ids=["none", "another", "garbage"])
def test_a_stderr_that_is_not_the_journal_s_is_written_to(
    monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """A daemon started by hand from a service's shell inherits the variable, but not the stream."""
    monkeypatch.setenv("JOURNAL_STREAM", stream)

    assert logs._target(ServiceSettings()) is not logs._to_journal


def test_where_the_journal_is_away_its_stream_gets_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No line is lost because journald restarts: stderr is kept by systemd meanwhile."""
    monkeypatch.setattr(logs, "JOURNAL", str(tmp_path / "none"))

    logs._to_journal([line("one"), line("two")])

    assert capfd.readouterr().err == "WARNING cdi_courier.x: one\nWARNING cdi_courier.x: two\n"


def test_without_a_descriptor_for_the_journal_its_stream_gets_the_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No line is lost because the process can open nothing: its stderr is open."""

    def no_socket(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(logs.socket, "socket", no_socket)

    logs._to_journal([line("one")])

    assert capfd.readouterr().err == "WARNING cdi_courier.x: one\n"


# What is said again and again


def said(repeats: logs.Repeats, now: float, *lines: logs.Line, end: bool = False) -> list[str]:
    return [found.message for found in repeats.passed(lines, now, end=end)]


def test_the_same_refusal_again_and_again_is_told_as_a_number() -> None:
    """The first is written at once, the others are counted, and after 30 s there is one line for them."""
    repeats = logs.Repeats()
    refusal = line("refused a", **DECISION)

    assert said(repeats, 0.0, refusal, refusal) == ["refused a"]
    assert said(repeats, 5.0, *[refusal] * 40) == []
    assert repeats.due(5.0) == 25.0
    assert said(repeats, 30.0) == ["refused a … 41 more in 30 s"]
    assert repeats.due(30.0) is None
    assert said(repeats, 31.0, refusal) == ["refused a"]


def test_what_waits_to_be_told_is_told_at_the_end() -> None:
    """The end of the program does not swallow a number."""
    repeats = logs.Repeats()
    refusal = line("refused a", **DECISION)

    assert said(repeats, 0.0, refusal, refusal, end=True) == ["refused a", "refused a … 1 more in 30 s"]


@pytest.mark.parametrize(
    ("level", "decision", "lines"),
    [
        (logging.INFO, {**DECISION, "verdict": "injected"}, 3),
        (logging.WARNING, {**DECISION, "verdict": "missed"}, 3),
        (logging.WARNING, {**DECISION, "verdict": "skipped"}, 1),
        (logging.WARNING, {}, 3),
        (logging.ERROR, {}, 1),
    ],
    ids=["injected", "missed", "skipped", "a warning", "an error"],
)
def test_only_refusals_and_errors_are_held_back(level: int, decision: dict[str, Any], lines: int) -> None:
    """Who gets devices, who was missed, and how a connection fares is said each time."""
    same = line("the same", level, **decision)

    assert len(said(logs.Repeats(), 0.0, same, same, same)) == lines


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 4))
def test_no_refusal_is_lost(numbers: list[int], remembered: int) -> None:
    """However they mix, and however few are remembered, what is written and what is counted adds up."""
    repeats = logs.Repeats()
    before, logs.REMEMBERED = logs.REMEMBERED, remembered  # type: ignore[misc]
    try:
        found: list[str] = []
        for second, number in enumerate(numbers):
            found += said(repeats, float(second), line(f"refused pod{number}", **DECISION))
        found += said(repeats, 100.0, end=True)
    finally:
        logs.REMEMBERED = before  # type: ignore[misc]

    for number in set(numbers):
        mine = [text for text in found if text.startswith(f"refused pod{number}")]
        counted = sum(int(text.split(" ")[3]) if "more in" in text else 1 for text in mine)
        assert counted == numbers.count(number)


def test_a_repeat_is_told_even_if_nobody_logs_any_more(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes wakes up for it by itself."""
    monkeypatch.setattr(logs, "REPEATED", 0.2)

    with logs.writing(ServiceSettings()):
        for _ in range(3):
            logger.error("the same")
        wait_for(lambda: len(target.lines) == 2, 10, "the number of repeats")

    assert target.lines == ["the same", "the same … 2 more in 0 s"]


REQUEST = ContainerRequest({}, namespace="n", pod="p\n", container="c")


def test_a_decision_is_the_same_line_with_and_without_logging_s_record(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """What is put into words late reads as what passes through logging, where others listen too."""
    decision = logs.Decision("injected", REQUEST, ("v.com/c=d",), "a rule", "containerd")
    root = logging.getLogger()
    with caplog.at_level("INFO"):
        logs.tell(logger, logging.INFO, decision)
    others, root.handlers[:] = root.handlers[:], []
    try:
        with logs.writing(ServiceSettings()):
            logs.tell(logger, logging.INFO, decision)
            logs.tell(logger, logging.DEBUG, decision)
    finally:
        root.handlers[:] = others
    written = capfd.readouterr().err

    (record,) = caplog.records
    assert record.getMessage() == r"injected n/p\n/c: v.com/c=d"
    assert record.__dict__["decision"] == decision.fields()
    assert written.endswith(rf"INFO cdi_courier.test: {record.getMessage()}" + "\n")
    assert written.count("\n") == 1


def test_a_decision_has_its_parts_as_fields_in_json() -> None:
    """One that was never logging's record has the parts that are known, and no others."""
    decision = logs.Decision("refused", REQUEST, ("v.com/c=d",), "", "", code="POL001", what="no")
    shown = json.loads(logs._json(logs._line((logging.WARNING, "cdi_courier.x", decision))))

    assert {key: shown[key] for key in ("namespace", "devices", "verdict", "code", "message")} == {
        "namespace": "n",
        "devices": "v.com/c=d",
        "verdict": "refused",
        "code": "POL001",
        "message": r"refused n/p\n/c: no",
    }
    assert not {"rule", "runtime", "duration"} & set(shown)
