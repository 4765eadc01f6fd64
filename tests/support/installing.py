"""`cdi-courier install` in a lab, whose containerd keeps what is written into its files and is restarted.

It must not know which backend is installed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cdi_courier import changes
from cdi_courier.cli import command
from click.testing import CliRunner, Result

from . import containerd as containerd_module
from .lab import Lab


class Restarter:
    """Calls `restart` whenever the command that `command` names is run, which waits for the end.

    root: a folder for what it needs.
    """

    def __init__(self, root: Path, restart: Callable[[], None]) -> None:
        self.restart = restart
        self.ask, self.answer = root / "ask", root / "answer"
        for path in (self.ask, self.answer):
            os.mkfifo(path)
        script = root / "restart"
        script.write_text(f"#!/bin/sh\necho now > {self.ask}\nexit $(cat {self.answer})\n")
        script.chmod(0o755)
        self.command = str(script)
        self.times = 0
        self.failure: Exception | None = None
        self.thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Restarter:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ask.write_text("end")
        self.thread.join()
        if self.failure is not None:
            raise self.failure

    def _serve(self) -> None:
        while self.ask.read_text() != "end":
            self.times += 1
            status = 1
            try:
                self.restart()
                status = 0
            except containerd_module.RuntimeFailure:
                pass  # a runtime that does not start: the command is told so
            except Exception as error:  # noqa: BLE001 - whoever runs the command waits for an answer
                self.failure = error
            self.answer.write_text(str(status))


def keep_files(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the lab's containerd start with whatever its file says by then, and manifests lie in the lab."""
    file = lab.containerd.config_file
    monkeypatch.setattr(lab.containerd, "config", lambda: file.read_text())
    monkeypatch.setattr(changes, "FOLDER", str(lab.root / "changes"))


def courier(
    lab: Lab, restart: str, *arguments: str, tables: Mapping[str, Mapping[str, Any]] | None = None
) -> Result:
    """Run the command in this process; the description and the choice are the real ones."""
    own = {"config": lab.containerd.config_file, "endpoint": lab.containerd.socket, "restart": restart}
    path = lab.settings({"runtimes": {"containerd": own}, **(tables or {})}, "install.toml")
    return CliRunner().invoke(command, ["--config", str(path), *arguments])


def files_of(lab: Lab) -> dict[str, tuple[int, bytes]]:
    """containerd's configuration: path → mode and content."""
    paths = [
        lab.containerd.config_file,
        *lab.containerd.root.glob("conf.d/*"),
        lab.containerd.root / "conf.d",
    ]
    return {
        str(path): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in paths
        if path.exists()
    }
