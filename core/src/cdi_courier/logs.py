"""The daemon's log: written by a thread of its own, so that whoever logs never waits for whoever reads.

A log can stand still: a full pipe, a journal that restarts. The thread that answers a container runtime must
not stand still with it, so records are queued, and dropped and counted when too many wait. They are written
together, a few times a second: taking turns with another thread for each line costs more than all else in a
request.
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
    from collections.abc import Iterator

    from cdi_courier.settings import ServiceSettings

LIMIT: Final = 10_000
"""Records that may wait; about 10 MB of them."""

GATHERING: Final = 0.1
"""Seconds that lines below a warning may wait for more, to be written at once."""

LAST_WORDS: Final = 2.0
"""Seconds that the end of the program waits for what is still queued."""

# Switches of logging itself (its documentation, "Optimization").
_UNTOLD: Final = ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing", "logAsyncioTasks")
_SYSLOG: Final = "/dev/log"
_FILE_SIZE: Final = 1 << 20


@contextlib.contextmanager
def writing(settings: ServiceSettings) -> Iterator[None]:
    """Send what is logged to stderr; to syslog, or else to ``state_dir/log``, where stderr goes nowhere.

    The latter is so for a plugin that a container runtime has launched.
    """
    root = logging.getLogger()
    handler = _Queued(_target(settings.state_dir))
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
    """Hands records to a thread that formats and writes them: their arguments must not change any more."""

    def __init__(self, target: logging.Handler) -> None:
        super().__init__()
        self._target = target
        self._dropped = 0
        # A SimpleQueue may be put to from a signal handler.
        self._queue: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._urgent = threading.Event()
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._queue.qsize() >= LIMIT:
            self._dropped += 1
            return
        self._queue.put(record)
        if record.levelno >= logging.WARNING:
            self._urgent.set()

    def close(self) -> None:
        """Write what waits, but not for ever."""
        super().close()
        self._queue.put(None)
        self._urgent.set()
        self._thread.join(LAST_WORDS)
        if not self._thread.is_alive():
            self._target.close()

    def _write(self) -> None:
        while True:
            records = [self._queue.get()]
            self._urgent.wait(GATHERING)
            self._urgent.clear()
            with contextlib.suppress(queue.Empty):
                while True:
                    records.append(self._queue.get_nowait())
            # emit, not handle: only this thread writes, and a lock that it holds while the log stands still
            # would be waited for when logging shuts down.
            self._emit([record for record in records if record is not None])
            if self._dropped:
                with self.lock:  # type: ignore[union-attr] # held by whoever emits
                    dropped, self._dropped = self._dropped, 0
                text = "%d log records were dropped: the log was not read fast enough"
                self._emit(
                    [logging.LogRecord("cdi_courier", logging.WARNING, __file__, 0, text, (dropped,), None)]
                )
            if None in records:
                return

    def _emit(self, records: list[logging.LogRecord]) -> None:
        if isinstance(self._target, _Stderr):
            self._target.emit_all(records)
        else:
            for record in records:
                self._target.emit(record)


class _Stderr(logging.Handler):
    """Writes to the descriptor itself: the lock of sys.stderr would be waited for when the program ends."""

    def emit_all(self, records: list[logging.LogRecord]) -> None:
        lines = []
        for record in records:
            try:
                lines.append(self.format(record))
            except Exception:  # noqa: BLE001 - as every handler of logging does
                self.handleError(record)
        data = "".join(line + "\n" for line in lines).encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(2, data) :]


class _Formatter(logging.Formatter):
    """Text lines whose hostile parts cannot reach the terminal as control characters."""

    _second = (-1, "")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        # The same every second; writing it anew costs as much as the rest of the line.
        second, text = self._second
        if second != int(record.created):
            second = int(record.created)
            text = time.strftime(datefmt or "%Y-%m-%d %H:%M:%S", time.localtime(second))
            self._second = second, text
        return f"{text},{int(record.msecs):03}"


def _target(state_dir: str) -> logging.Handler:
    handler: logging.Handler
    if not _goes_nowhere(2):
        handler = _Stderr()
    elif os.path.exists(_SYSLOG):
        handler = logging.handlers.SysLogHandler(_SYSLOG, facility=logging.handlers.SysLogHandler.LOG_DAEMON)
        handler.setFormatter(_Formatter("cdi-courier: %(levelname)s %(name)s: %(message)s"))
        return handler
    else:
        os.makedirs(state_dir, mode=0o700, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            os.path.join(state_dir, "log"), maxBytes=_FILE_SIZE, backupCount=1
        )
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


def _goes_nowhere(descriptor: int) -> bool:
    """Whether what is written there is lost: it is closed, or /dev/null."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return True
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 3)
