"""`cdi-courier run` with files of its own beside an NRI runtime in Python, and what outside is seen of it.

It must not know what is tested with it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdi_courier import status

from .courier import Courier

_STATUS = 20.0  # seconds; for a daemon that is busy and a machine that is


class Daemon:
    """The daemon and its files.

    folder: of its settings, spec files and log. socket_path: where the runtime listens, or will.

    courier    its process
    cdi        the folder of its spec files
    state_dir  its own, made by itself
    """

    def __init__(self, folder: Path, socket_path: str) -> None:
        self.folder = folder
        self.cdi = folder / "cdi"
        self.cdi.mkdir()
        self.state_dir = folder / "s"
        self.settings = folder / "config.toml"
        self.courier = Courier(self.settings, folder / "log")
        self._socket_path = socket_path
        self.configure()

    def configure(self, more: str = "", *, cdi: Path | None = None, delivery: str = "edits") -> None:
        """Write the settings. more: TOML behind them."""
        partial = self.folder / "config.partial"
        partial.write_text(
            f'[cdi]\ndirs = ["{cdi or self.cdi}"]\ntrust = "any"\n'
            f'[service]\nstate_dir = "{self.state_dir}"\nlog_format = "text"\n'
            f'[nri]\nsockets = ["{self._socket_path}"]\ndelivery = "{delivery}"\n{more}\n'
        )
        partial.rename(self.settings)

    def write_spec(
        self, kind: str, devices: Mapping[str, Mapping[str, Any]], cdi: Path | None = None
    ) -> Path:
        """Put the one spec file in place, in one step. devices: name → edits."""
        made = [{"name": name, "containerEdits": edits} for name, edits in devices.items()]
        partial = self.folder / "spec.partial"
        partial.write_text(json.dumps({"cdiVersion": "0.7.0", "kind": kind, "devices": made}))
        return partial.rename((cdi or self.cdi) / "v.json")

    @property
    def pid(self) -> int:
        assert self.courier.process is not None
        return self.courier.process.pid

    def hang_up(self) -> None:
        """Have it read its settings again."""
        os.kill(self.pid, signal.SIGHUP)

    def report(self) -> dict[str, Any]:
        """What it tells whoever asks. Raises OSError."""
        found = status.ask(str(self.state_dir), timeout=_STATUS)
        if found is None:
            raise ConnectionRefusedError(f"nobody listens in {self.state_dir}")
        return found

    def session(self) -> dict[str, Any]:
        """The report's part about the runtime."""
        runtimes = self.report()["runtimes"].values()
        found: dict[str, Any] = next(e for e in runtimes if e.get("socket") == self._socket_path)
        return found

    def memory(self) -> dict[str, int]:
        """In kB: ``Rss``, ``Pss``, and ``Anonymous``, which other processes have no part in."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
        return {name: sizes[name] for name in ("Rss", "Pss", "Anonymous")}

    def descriptors(self) -> list[int]:
        """Of what it has open now."""
        return sorted(map(int, os.listdir(f"/proc/{self.pid}/fd")))

    def threads(self) -> int:
        """How many it has."""
        return len(os.listdir(f"/proc/{self.pid}/task"))
