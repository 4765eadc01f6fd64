"""The daemon's log: written by a thread of its own, so that whoever logs never waits for whoever reads.

A log can stand still: a full pipe, a journal that restarts. The thread that answers a container runtime must
not stand still with it, so lines are queued, and dropped and counted when too many wait. They are formatted
by whoever logs and written together, a few times a second: taking turns with another thread for each line
costs more than all else in a request, and a record holds on to much more than its line.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import queue
import stat
import threading
import time
from typing import TYPE_CHECKING, Final

from cdi_courier.errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cdi_courier.settings import ServiceSettings

    _Line = tuple[int, str]  # level, text
    _Write = Callable[[list[_Line]], None]

LIMIT: Final = 10_000
"""Lines that may wait; about 2 MB of them."""

GATHERING: Final = 0.1
"""Seconds that lines below a warning may wait for more, to be written at once."""

MANY: Final = 256
"""Lines that are written without waiting for more."""

LAST_WORDS: Final = 2.0
"""Seconds that the end of the program waits for what is still queued."""

# Switches of logging itself (its documentation, "Optimization").
_UNTOLD: Final = ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing", "logAsyncioTasks")
_UNTIMED: Final = "%(levelname)s %(name)s: %(message)s"
_SYSLOG: Final = "/dev/log"
_FILE_SIZE: Final = 1 << 20


@contextlib.contextmanager
def writing(settings: ServiceSettings) -> Iterator[None]:
    """Send what is logged to stderr; to syslog, or else to ``state_dir/log``, where stderr goes nowhere.

    The latter is so for a plugin that a container runtime has launched.
    """
    root = logging.getLogger()
    write, formatter = _target(settings.state_dir)
    handler = _Queued(write)
    handler.setFormatter(formatter)
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
        self._queue: queue.SimpleQueue[_Line | None] = queue.SimpleQueue()
        self._urgent = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        waiting = self._queue.qsize()
        if waiting >= LIMIT:
            self._dropped += 1
            return
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - as every handler of logging does
            self.handleError(record)
            return
        self._queue.put((record.levelno, line))
        if record.levelno >= logging.WARNING or waiting == MANY:
            self._urgent.set()

    def close(self) -> None:
        """Write what waits, but not for ever."""
        super().close()
        self._queue.put(None)
        self._urgent.set()
        self._thread.join(LAST_WORDS)

    def _run(self) -> None:
        while True:
            lines = [self._queue.get()]
            self._urgent.wait(GATHERING)
            self._urgent.clear()
            with contextlib.suppress(queue.Empty):
                while True:
                    lines.append(self._queue.get_nowait())
            if self._dropped:
                with self.lock:  # type: ignore[union-attr] # held by whoever emits
                    dropped, self._dropped = self._dropped, 0
                text = f"{dropped} log lines were dropped here: the log was not read fast enough"
                lines.append((logging.WARNING, text))
            # What cannot be written is lost: there is nobody to tell.
            with contextlib.suppress(OSError):
                self._write([line for line in lines if line is not None])
            if None in lines:
                return


class _Formatter(logging.Formatter):
    """Text lines whose hostile parts cannot reach the terminal as control characters."""

    def __init__(self, *, times: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s" if times else _UNTIMED)
        self._times = times
        self._second = -1
        self._text = ""

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info or record.stack_info:
            return super().format(record)
        # The same line at a quarter of the price.
        message = printable(record.getMessage())
        if not self._times:
            return f"{record.levelname} {record.name}: {message}"
        return f"{self.formatTime(record)} {record.levelname} {record.name}: {message}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatTime(self, record: logging.LogRecord, _: str | None = None) -> str:  # noqa: N802
        second = int(record.created)
        if second != self._second:
            self._second, self._text = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._text},{int(record.msecs):03}"


def _target(state_dir: str) -> tuple[_Write, logging.Formatter]:
    """Where lines go, and what they look like there."""
    if not _goes_nowhere(2):
        return _to_stderr, _Formatter(times=True)
    if os.path.exists(_SYSLOG):
        syslog = logging.handlers.SysLogHandler(_SYSLOG, facility=logging.handlers.SysLogHandler.LOG_DAEMON)
        syslog.ident = "cdi-courier: "
        return _through(syslog), _Formatter(times=False)
    os.makedirs(state_dir, mode=0o700, exist_ok=True)
    path = os.path.join(state_dir, "log")
    file = logging.handlers.RotatingFileHandler(path, maxBytes=_FILE_SIZE, backupCount=1)
    return _through(file), _Formatter(times=True)


def _to_stderr(lines: list[_Line]) -> None:
    # To the descriptor itself: the lock of sys.stderr would be waited for when the program ends.
    data = "".join(text + "\n" for _, text in lines).encode(errors="backslashreplace")
    while data:
        data = data[os.write(2, data) :]


def _through(handler: logging.Handler) -> _Write:
    def write(lines: list[_Line]) -> None:
        for level, text in lines:
            # emit, not handle: the handler's lock would be waited for when logging shuts down.
            handler.emit(logging.LogRecord("", level, "", 0, text, None, None))

    return write


def _goes_nowhere(descriptor: int) -> bool:
    """Whether what is written there is lost: it is closed, or /dev/null."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return True
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 3)
