"""Units and journal of a host that runs programs for us: what boxes and virtual machines have in common.

It must not know how the host is reached: `Run` does that.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from .waiting import WaitTimeoutError, wait_for

UP = ("running", "degraded")
"""What ``systemctl is-system-running`` says when everything has been started; degraded: some of it failed."""


class Run(Protocol):
    """Runs a program on the host as root; check: raise `HostFailure` where it fails."""

    def __call__(
        self, argv: Sequence[str | Path], *, check: bool = True
    ) -> subprocess.CompletedProcess[str]: ...


class HostFailure(Exception):  # noqa: N818 - in a test's report the word error is everywhere already
    """The host does not do what it should; the text ends with what it logged."""


def wait_for_unit(run: Run, unit: str, state: str, timeout: float) -> None:
    """Wait until a unit's ActiveState is this. Raises HostFailure with the unit's end of the journal."""
    show = ["systemctl", "show", "--property=ActiveState", "--value", unit]
    try:
        wait_for(lambda: run(show).stdout.strip() == state, timeout, f"{unit} to be {state}", pause=0.1)
    except WaitTimeoutError as error:
        status = run(["systemctl", "status", "--no-pager", "--lines=0", unit], check=False).stdout
        raise HostFailure(f"{error}\n{status}{journal(run, unit)}") from None


def journal(run: Run, unit: str | None = None) -> str:
    """What a unit, or everything, has logged since the host started."""
    argv = ["journalctl", "--no-pager", "--boot", "--output=short-monotonic"]
    return run([*argv, f"--unit={unit}"] if unit else argv, check=False).stdout


def system_state(run: Run) -> str:
    """What ``systemctl is-system-running`` says, e.g. one of `UP`."""
    return run(["systemctl", "is-system-running"], check=False).stdout.strip()
