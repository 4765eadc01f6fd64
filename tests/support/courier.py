"""``cdi-courier run`` as a child process with its log in a file.

It must not know what the log says; callers wait for what they expect there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .waiting import WaitTimeoutError, wait_for

_STOP = 10.0
_LOG_LINES = 30


class CourierFailure(Exception):  # noqa: N818 - in a test's report the word error is everywhere already
    """The daemon does not do what it should; the text ends with its log's end."""


class Courier:
    """The daemon. It may be started again after it ended; the log goes on in the same file.

    settings: the file for ``--config``. log_file: stdout and stderr. args: after ``run``. env: beside the
    caller's environment, from which the product's own variables are taken out. python: the interpreter that
    has the product.
    """

    def __init__(
        self,
        settings: Path,
        log_file: Path,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        python: str | Path = sys.executable,
    ) -> None:
        self.settings = settings
        self.log_file = log_file
        self.args = tuple(args)
        self.env = dict(env or {})
        self.python = Path(python)
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Courier:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def returncode(self) -> int | None:
        """The exit status once it has ended."""
        return None if self.process is None else self.process.poll()

    @property
    def argv(self) -> list[str]:
        return [str(self.python), "-m", "cdi_courier", "--config", str(self.settings), "run", *self.args]

    def start(self) -> None:
        """Start; does not wait: what is waited for stands in the log."""
        if self.running:
            return
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("CDI_COURIER_")}
        with self.log_file.open("ab") as log:
            # A session of its own: Ctrl-C is for the one who cleans up.
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**inherited, "PYTHONUNBUFFERED": "1", **self.env},
                start_new_session=True,
            )

    def stop(self, timeout: float = _STOP) -> int | None:
        """End it as a service manager would and return its exit status; None when it never ran."""
        return self._end(signal.SIGTERM, timeout)

    def kill(self) -> int | None:
        """End it without any chance to tidy up."""
        return self._end(signal.SIGKILL, _STOP)

    def restart(self) -> None:
        self.stop()
        self.start()

    def wait(self, timeout: float = _STOP) -> int:
        """Wait until it ends by itself and return its exit status. Raises CourierFailure."""
        if self.process is None:
            raise CourierFailure("it was never started")
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self._failure(f"it did not end within {timeout:g} s") from None

    def log(self, since: int = 0) -> str:
        """The log from a `mark` on."""
        if not self.log_file.exists():
            return ""
        with self.log_file.open("rb") as file:
            file.seek(since)
            return file.read().decode(errors="replace")

    def mark(self) -> int:
        """Where the log ends now; for `log` and `wait_for_log`, to look only at what comes after."""
        return self.log_file.stat().st_size if self.log_file.exists() else 0

    def wait_for_log(
        self, wanted: str | Callable[[str], bool], timeout: float = 10.0, *, since: int = 0
    ) -> str:
        """Wait for a line that holds the text, or for which the function is true, and return the line.

        Raises CourierFailure when the time is over or the daemon has ended without it.
        """
        matches = wanted if callable(wanted) else lambda line: wanted in line
        what = "a line that fits" if callable(wanted) else repr(wanted)

        def line() -> str | None:
            ended = not self.running  # looked at before the log, so that its last words count
            found = next((line for line in self.log(since).splitlines() if matches(line)), None)
            if found is None and ended:
                raise self._failure(f"it ended with status {self.returncode} without {what} in its log")
            return found

        try:
            return wait_for(line, timeout, what) or ""
        except WaitTimeoutError as error:
            raise self._failure(f"{error} in its log") from None

    def _end(self, number: signal.Signals, timeout: float) -> int | None:
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise self._failure(f"it did not end within {timeout:g} s of {number.name}") from None
        return self.process.returncode

    def _failure(self, text: str) -> CourierFailure:
        lines = self.log().splitlines()[-_LOG_LINES:]
        return CourierFailure(
            "\n".join([f"cdi-courier run: {text}; the last lines of {self.log_file}:", *lines])
        )
