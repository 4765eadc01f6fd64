"""What these tests stand on: a folder of settings and spec files that has not been touched just now."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Files:
    """Settings that name one spec directory, a state directory and a log, all below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.settings = root / "config.toml"
        self.specs = root / "cdi"
        self.state = root / "state"
        self.log = root / "log"
        self.specs.mkdir()
        self.configure("")
        self.spec("v.json", {"a": {"env": ["A=1"]}, "b": {"env": ["B=1"]}}, env=["ALL=1"])

    def configure(self, more: str) -> None:
        """Write the settings. more: TOML."""
        self.settings.write_text(
            f"cdi.dirs = ['{self.specs}']\ncdi.trust = 'any'\nservice.state_dir = '{self.state}'\n"
            f"oci_hook.log = '{self.log}'\n{more}"
        )

    def spec(self, name: str, devices: dict[str, Any], kind: str = "v.com/c", **own: Any) -> Path:
        """Write a spec file. devices: name → container edits; own: the file's own container edits."""
        path = self.specs / name
        document = {
            "cdiVersion": "0.7.0",
            "kind": kind,
            "devices": [{"name": n, "containerEdits": edits} for n, edits in devices.items()],
            "containerEdits": own,
        }
        path.write_text(json.dumps(document))
        return path

    @property
    def table(self) -> Path:
        return self.state / "table.json"


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    """Device ``v.com/c=a`` and ``=b``, each with an env, in a file that has one too."""
    before = os.umask(0o022)
    yield Files(tmp_path)
    os.umask(before)
