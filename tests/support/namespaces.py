"""A place for what a test runs: namespaces that a script has set up, and a folder that is in both worlds.

All that runs in it ends with it, and it ends with the process that made it. It must not know what is set up
there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from . import host
from .waiting import wait_for

_PIDS = ("--pid", "--fork", "--mount-proc", "--kill-child")
_STARTED = 10.0
_ENDED = 10.0
_TIMEOUT = 60.0

# As the first process it inherits orphans; the shell buries whatever ends while it waits, sleep would not.
_STAY = "while :; do sleep 3600; done"
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


class Namespaces:
    """A mount namespace and, where asked for, a PID namespace; a context manager, for others to inherit.

    prefix: of the folder's name. setup: a shell script that is run there first, with the folder in ``$ROOT``.
    pids: whether there is a PID namespace, whose end takes all that was started in it.

    root    a folder for whatever a test needs, the same inside and outside
    pid     of a process that stays there, as seen from outside
    """

    def __init__(self, prefix: str, setup: str, *, pids: bool = True) -> None:
        self.root = Path()
        self.pid = 0
        self._prefix, self._setup, self._pids = prefix, setup, pids
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        for left in host.orphans(self._prefix):
            shutil.rmtree(left, ignore_errors=True)
        self.root = host.new_folder(self._prefix)
        try:
            self._prepare()
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def path(self, inside: str | Path) -> Path:
        """A path of the namespaces, from outside. A link in it leads outside."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def _prepare(self) -> None:
        """Put into `root` what the script needs."""

    def _enter(
        self, argv: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program there. cwd: `root`, if not told. env: all of its environment."""
        spaces = ["--mount", "--pid"] if self._pids else ["--mount"]
        return subprocess.run(
            ["nsenter", f"--target={self.pid}", *spaces, f"--wdns={cwd or self.root}", "--", *argv],
            env=_ENVIRONMENT if env is None else env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )

    def _start(self) -> None:
        ready, log = self.root / "ready", self.root / "setup.log"
        stay = _STAY if self._pids else "exec sleep infinity"
        argv = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", *(_PIDS if self._pids else ())]
        with log.open("wb") as file:
            process = self._process = subprocess.Popen(
                [*argv, "sh", "-euc", f"{self._setup}\ntouch $ROOT/ready\n{stay}"],
                env={**os.environ, "ROOT": str(self.root)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        wait_for(lambda: ready.exists() or process.poll() is not None, _STARTED, "the namespaces")
        if not ready.exists():
            raise RuntimeError(f"the namespaces cannot be set up: {log.read_text()}")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self.pid = int(children[0]) if self._pids else process.pid

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()  # and with it, by --kill-child, the first process of the PID namespace
            self._process.wait()
            self._process = None
            wait_for(lambda: not host.lives(self.pid), _ENDED, "the end of the namespaces")
        shutil.rmtree(self.root)
