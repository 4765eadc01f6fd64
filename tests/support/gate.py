"""A gate of the runtime wrapper in front of programs that only say how they were called.

It must not know what is right: it does and reports, tests judge.
"""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
from cdi_courier import compiling, patterns
from cdi_courier.settings import load
from cdi_courier_oci_hook import gate

_SAYS = """\
#!/bin/sh
{{ printf '%s\\0' {who} "$$" "${{CDI_COURIER_GATE_PID-}}" "$@"; cat; }} >"{said}"
"""
_TIMEOUT = 60.0

RESTED_NS = 60_000_000_000
"""How much younger than it is the gate's patterns look."""


class Reached(NamedTuple):
    """Who was reached in the end. who: ``real``, ``python``, or ``""`` for nobody.

    stdin: what it could read.
    """

    who: str
    argv: tuple[str, ...]
    pid: int
    marker: str
    stdin: bytes
    gate_pid: int
    returncode: int
    stderr: str


def says(path: Path, who: str, said: Path) -> Path:
    """A program that writes how it was called to `said`, with its stdin."""
    path.write_text(_SAYS.format(who=who, said=said))
    path.chmod(0o755)
    return path


class Gated:
    """A gate below a folder, with settings that have not been changed just now.

    place: of the settings, a file. kind: of the runtime. changes: to the `gate.Gate`. python: whether Python
    is the real one, or a program that says how it was called.
    """

    def __init__(
        self, root: Path, place: Path, kind: Any = "", *, python: bool = False, **changes: Any
    ) -> None:
        self.root = root
        self.settings = place
        self.said = root / "said"
        self.real = says(root / "real", "real", self.said)
        made = gate.make(load([place]), str(self.real), kind)
        if not python:
            changes = {"bare": str(says(root / "python", "python", self.said)), **changes}
        self.made = attrs.evolve(made, **changes)
        self.folder = Path(self.made.gate_dir)
        self.folder.mkdir(exist_ok=True)
        self.path = self.folder / "gate"
        self.records = Path(self.made.state_dir) / "exec"
        self.write()
        self.rest()

    def write(self) -> None:
        """Write the gate's file."""
        self.path.write_bytes(gate.render(self.made))
        self.path.chmod(0o755)

    def rest(self) -> None:
        """Write the patterns as if the settings, and what their folder holds, had rested for a while."""
        families = compiling.injector_of(load([self.settings])).families
        patterns.write(str(self.folder), self.made.settings, families, time.time_ns() + RESTED_NS)

    def call(
        self,
        *argv: str,
        stdin: bytes = b"",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        shell: Sequence[str] = (),
    ) -> Reached:
        """Call the gate. env: all of its environment. shell: a program that runs it."""
        self.said.unlink(missing_ok=True)
        process = subprocess.Popen(
            [*shell, self.path, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=cwd or self.root,
            env={} if env is None else env,
        )
        _, stderr = process.communicate(stdin, timeout=_TIMEOUT)
        fields = self.said.read_bytes().split(b"\0") if self.said.exists() else [b"", b"0", b"", b""]
        return Reached(
            fields[0].decode(),
            tuple(map(os.fsdecode, fields[3:-1])),
            int(fields[1]),
            fields[2].decode(),
            fields[-1],
            process.pid,
            process.returncode,
            stderr.decode(),
        )


def modes(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a folder: its mode and content."""
    return {
        path.name: (stat.S_IMODE(path.lstat().st_mode), path.read_bytes() if path.is_file() else b"")
        for path in folder.iterdir()
    }
