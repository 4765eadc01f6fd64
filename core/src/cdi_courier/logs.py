"""The daemon's log: written by a thread of its own, so that whoever logs never waits for whoever reads.

A log can stand still: a full pipe, a journal that restarts. The thread that answers a container runtime must
not stand still with it, so lines are queued, and dropped and counted when too many wait. Whoever logs only
puts the message together; what a line looks like, and whether it was said a moment ago already, is that
thread's work. It writes several at once, a few times a second: taking turns with another thread for each line
costs more than all else in a request, and a record holds on to much more than its line.

A decision about a container is handed over as a `Decision` (`tell`), which is put into words by that thread
too: logging's record of it would cost a third of the line. Its parts become fields of the journal and of
JSON; in text they are in the message.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import stat
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdi_courier.errors import printable, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from cdi_courier.request import ContainerRequest
    from cdi_courier.settings import ServiceSettings

LIMIT: Final = 10_000
"""Lines that may wait; about 3 MB of them."""

GATHERING: Final = 0.1
"""Seconds that lines below a warning may wait for more, to be written at once."""

MANY: Final = 256
"""Lines that are written without waiting for more."""

LAST_WORDS: Final = 2.0
"""Seconds that the end of the program waits for what is still queued."""

REPEATED: Final = 30.0
"""Seconds within which a refusal or an error that says word for word the same is counted, not written."""

REMEMBERED: Final = 1000
"""Lines that are remembered for that; beyond, the oldest may be written again early."""

JOURNAL: Final = "/run/systemd/journal/socket"

# Switches of logging itself (its documentation, "Optimization").
_UNTOLD: Final = ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing", "logAsyncioTasks")
_SYSLOG: Final = "/dev/log"
_FILE_SIZE: Final = 1 << 20
_LONGEST: Final = 60_000  # bytes of a journal's field; an entry must fit a datagram
_SHOWN: Final = 200  # characters of a line that is told to have been repeated
_PRIORITIES: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}


class Decision:
    """What became of a container.

    time: a `time.time`. devices: qualified names. what: the rest of the line, for a person; if empty, the
    devices. cause: the same in short. duration: seconds, or None. The strings are as a pod's author wrote
    them; `str` of it is one harmless line.
    """

    __slots__ = (
        "cause",
        "code",
        "container",
        "devices",
        "duration",
        "namespace",
        "pod",
        "rule",
        "runtime",
        "time",
        "verdict",
        "what",
    )

    def __init__(
        self,
        verdict: str,
        request: ContainerRequest,
        devices: Sequence[str],
        rule: str,
        runtime: str,
        *,
        code: str = "",
        cause: str = "",
        what: str = "",
    ) -> None:
        self.time = time.time()
        self.verdict = verdict
        # Not the request itself: it holds on to much more.
        self.namespace = request.namespace
        self.pod = request.pod
        self.container = request.container
        self.devices = devices
        self.rule = rule
        self.runtime = runtime
        self.duration: float | None = None
        self.code = code
        self.cause = cause
        self.what = what

    def __str__(self) -> str:
        return f"{self.verdict} {self.who}: {self.what or ','.join(self.devices)}"

    @property
    def who(self) -> str:
        """``namespace/pod/container``, harmless."""
        return quoted(f"{self.namespace}/{self.pod}/{self.container}", None)[1:-1]

    def fields(self) -> dict[str, str | float | None]:
        """The parts that the journal and JSON have as fields."""
        return {
            "namespace": self.namespace,
            "pod": self.pod,
            "container": self.container,
            "devices": ",".join(self.devices),
            "verdict": self.verdict,
            "code": self.code,
            "rule": self.rule,
            "runtime": self.runtime,
            "duration": self.duration,
        }


class Line(NamedTuple):
    """What is left of a record. created: a `time.time`. decision: what it is about, or its fields."""

    level: int
    created: float
    name: str
    message: str
    decision: Decision | Mapping[str, Any] | None = None


if TYPE_CHECKING:
    _Write = Callable[[list[Line]], None]

_root: Final = logging.getLogger()


def tell(logger: logging.Logger, level: int, decision: Decision) -> None:
    """Log a decision; nobody may change it afterwards."""
    if not logger.isEnabledFor(level):
        return
    handlers = _root.handlers
    if len(handlers) == 1 and handlers[0].__class__ is _Queued:
        handlers[0].put(level, (level, logger.name, decision))
    else:
        logger.log(level, "%s", decision, extra={"decision": decision.fields()})


@contextlib.contextmanager
def writing(settings: ServiceSettings) -> Iterator[None]:
    """Send what is logged to where `_target` says, until the end of the with statement."""
    root = logging.getLogger()
    handler = _Queued(_target(settings))
    level = root.level
    root.addHandler(handler)
    root.setLevel(settings.log_level.upper())
    # No line shows where it was logged, nor the thread or process; looking that up is a third of a record.
    told = {name: getattr(logging, name, None) for name in _UNTOLD}
    try:
        for name in told:
            setattr(logging, name, None)
        yield
    finally:
        for name, value in told.items():
            setattr(logging, name, value)
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()


class _Queued(logging.Handler):
    """Hands lines to a thread that writes them. write: takes several lines at once, and may take its time."""

    def __init__(self, write: _Write) -> None:
        super().__init__()
        self._write = write
        self._dropped = 0
        # A SimpleQueue may be put to from a signal handler.
        self._queue: queue.SimpleQueue[Line | tuple[int, str, Decision] | None] = queue.SimpleQueue()
        self._urgent = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, level: int, what: Line | tuple[int, str, Decision]) -> None:
        """Queue a line, or what will be one (level, logger, decision); level: the line's."""
        waiting = self._queue.qsize()
        if waiting >= LIMIT:
            with self.lock:  # type: ignore[union-attr]
                self._dropped += 1
            return
        self._queue.put(what)
        if level >= logging.WARNING or waiting == MANY:
            self._urgent.set()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
            if record.exc_info or record.stack_info:
                message = _TRACEBACKS.format(record)
        except Exception:  # noqa: BLE001 - as every handler of logging does
            self.handleError(record)
            return
        decision = record.__dict__.get("decision")
        self.put(record.levelno, Line(record.levelno, record.created, record.name, message, decision))

    def close(self) -> None:
        """Write what waits, but not for ever."""
        super().close()
        self._queue.put(None)
        self._urgent.set()
        self._thread.join(LAST_WORDS)

    def _run(self) -> None:
        repeats = Repeats()
        while True:
            lines: list[Line | tuple[int, str, Decision] | None] = []
            # Where something was held back, there is something to say even if nobody logs any more.
            with contextlib.suppress(queue.Empty):
                lines.append(self._queue.get(timeout=repeats.due(time.monotonic())))
            self._urgent.wait(GATHERING)
            self._urgent.clear()
            with contextlib.suppress(queue.Empty):
                while True:
                    lines.append(self._queue.get_nowait())
            ended = None in lines
            said = (_line(line) for line in lines if line is not None)
            found = repeats.passed(said, time.monotonic(), end=ended)
            if self._dropped:
                with self.lock:  # type: ignore[union-attr] # held by whoever drops
                    dropped, self._dropped = self._dropped, 0
                text = f"{dropped} log lines were dropped here: the log was not read fast enough"
                found.append(Line(logging.WARNING, time.time(), __name__, text))
            # What cannot be written is lost: there is nobody to tell.
            with contextlib.suppress(OSError):
                if found:
                    self._write(found)
            if ended:
                return


class Repeats:
    """Holds back what was said word for word a moment ago, and says how often it was.

    That is so for errors and for refusals: a container that is refused is tried again and again. What names
    another container has other words, so nothing about a container goes unsaid. Who is given devices is
    always said, and so is what was missed: each list of a runtime is complete. Clocks are `time.monotonic`.
    """

    def __init__(self) -> None:
        # What was said → until when its repeats are held back, the latest of them, how many. In that order.
        self._said: dict[tuple[int, str, str], tuple[float, Line | None, int]] = {}

    def due(self, now: float) -> float | None:
        """Seconds until there is something to say of itself; None if there is not."""
        held = [until for until, _, count in self._said.values() if count]
        return max(0.0, min(held) - now) if held else None

    def passed(self, lines: Iterable[Line], now: float, *, end: bool = False) -> list[Line]:
        """Those lines that are to be written now, with what is to be said of others. end: nothing follows."""
        found = self._over(now, end=end)
        for line in lines:
            if not _may_repeat(line):
                found.append(line)
                continue
            key = line[0], line[2], line[3]
            said = self._said.get(key)
            if said is not None:
                self._said[key] = said[0], line, said[2] + 1
                continue
            if len(self._said) >= REMEMBERED:
                oldest = next(iter(self._said))
                found += _summary(*self._said.pop(oldest)[1:])
            self._said[key] = now + REPEATED, None, 0
            found.append(line)
        return found + (self._over(now, end=True) if end else [])

    def _over(self, now: float, *, end: bool) -> list[Line]:
        found = []
        for key, (until, line, count) in list(self._said.items()):
            if until > now and not end:
                break  # the others are younger
            del self._said[key]
            found += _summary(line, count)
        return found


def _line(waiting: Line | tuple[int, str, Decision]) -> Line:
    if isinstance(waiting, Line):
        return waiting
    level, name, decision = waiting
    return Line(level, decision.time, name, str(decision), decision)


def _may_repeat(line: Line) -> bool:
    decision = line.decision
    if decision is not None:
        verdict = decision.verdict if isinstance(decision, Decision) else decision.get("verdict")
        return verdict in ("refused", "skipped")
    return line.level >= logging.ERROR


def _summary(line: Line | None, count: int) -> list[Line]:
    if line is None:
        return []
    shown = line.message if len(line.message) <= _SHOWN else f"{line.message[:_SHOWN]}…"
    return [line._replace(message=f"{shown} … {count} more in {REPEATED:.0f} s")]


# --- what a line looks like ------------------------------------------------------------------------------


class _Traceback(logging.Formatter):
    """A message and its traceback."""

    def __init__(self) -> None:
        super().__init__("%(message)s")


_TRACEBACKS: Final = _Traceback()


class _Text:
    """``TIME LEVEL NAME: MESSAGE``; nothing in it can move a terminal's cursor. times: with the time."""

    def __init__(self, *, times: bool) -> None:
        self._times = times
        self._second = -1
        self._text = ""

    def __call__(self, line: Line) -> str:
        text = f"{logging.getLevelName(line.level)} {line.name}: {printable(line.message)}"
        if not self._times:
            return text
        second = int(line.created)
        if second != self._second:
            self._second, self._text = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._text},{int((line.created - second) * 1000):03} {text}"


def _json(line: Line) -> str:
    """One object: time (UTC), level, logger, message, and what is known of a decision."""
    import json  # with the first line, for those who want it so

    second = int(line.created)
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
    return json.dumps(
        {
            "time": f"{when}.{int((line.created - second) * 1e6):06}Z",
            "level": logging.getLevelName(line.level).lower(),
            "logger": line.name,
            "message": printable(line.message),
            **_known(line.decision),
        }
    )


def _entry(line: Line) -> bytes:
    """An entry of the journal's native protocol: a value with line feeds is preceded by its length.

    Source: "Native Journal Protocol" of systemd.
    """
    fields: dict[str, Any] = {
        "PRIORITY": _PRIORITIES.get(line.level, 5),
        "SYSLOG_FACILITY": 3,
        "SYSLOG_IDENTIFIER": "cdi-courier",
        "LOGGER": line.name,
        **{f"CDI_COURIER_{name.upper()}": value for name, value in _known(line.decision).items()},
        "MESSAGE": line.message,
    }
    data = bytearray()
    for name, value in fields.items():
        text = printable(str(value)).encode(errors="backslashreplace")[:_LONGEST]
        if b"\n" in text:
            data += b"%s\n%s%s\n" % (name.encode(), len(text).to_bytes(8, "little"), text)
        else:
            data += b"%s=%s\n" % (name.encode(), text)
    return bytes(data)


def _known(decision: Decision | Mapping[str, Any] | None) -> dict[str, Any]:
    """The parts that are known. Names are hostile, but for the journal and JSON they are only values."""
    parts = decision.fields() if isinstance(decision, Decision) else decision or {}
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in parts.items()
        if value not in (None, "")
    }


# --- where lines go --------------------------------------------------------------------------------------


def _target(settings: ServiceSettings) -> _Write:
    """Where lines go, and what they look like there.

    With ``log_format = "auto"`` to the journal if stderr is connected to it, with fields. Else to stderr; to
    syslog, or else to ``state_dir/log``, where stderr goes nowhere: that is so for a plugin that a container
    runtime has launched.
    """
    to_json = settings.log_format == "json"
    if settings.log_format == "auto" and _is_journal(2, os.environ.get("JOURNAL_STREAM", "")):
        return _to_journal
    if not _goes_nowhere(2):
        return _to_stderr(_json if to_json else _Text(times=True))
    import logging.handlers  # for a plugin that a runtime has launched

    if os.path.exists(_SYSLOG):
        syslog = logging.handlers.SysLogHandler(_SYSLOG, facility=logging.handlers.SysLogHandler.LOG_DAEMON)
        syslog.ident = "cdi-courier: "
        return _through(syslog, _json if to_json else _Text(times=False))
    os.makedirs(settings.state_dir, mode=0o700, exist_ok=True)
    path = os.path.join(settings.state_dir, "log")
    file = logging.handlers.RotatingFileHandler(path, maxBytes=_FILE_SIZE, backupCount=1)
    return _through(file, _json if to_json else _Text(times=True))


def _to_journal(lines: list[Line]) -> None:
    sent = 0
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            for line in lines:
                sock.sendto(_entry(line), JOURNAL)
                sent += 1
    except OSError:
        # It restarts, is not for us, or no descriptor is left; its stream, which stderr is, may be there.
        _to_stderr(_Text(times=False))(lines[sent:])


def _to_stderr(shown: Callable[[Line], str]) -> _Write:
    def write(lines: list[Line]) -> None:
        # To the descriptor itself: the lock of sys.stderr would be waited for when the program ends.
        data = "".join(shown(line) + "\n" for line in lines).encode(errors="backslashreplace")
        while data:
            data = data[os.write(2, data) :]

    return write


def _through(handler: logging.Handler, shown: Callable[[Line], str]) -> _Write:
    def write(lines: list[Line]) -> None:
        for line in lines:
            # emit, not handle: the handler's lock would be waited for when logging shuts down.
            handler.emit(logging.LogRecord("", line.level, "", 0, shown(line), None, None))

    return write


def _is_journal(descriptor: int, stream: str) -> bool:
    """Whether the descriptor is the stream to the journal that systemd has named (systemd.exec(5))."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return stream == f"{found.st_dev}:{found.st_ino}"


def _goes_nowhere(descriptor: int) -> bool:
    """Whether what is written there is lost: it is closed, or /dev/null."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return True
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 3)
