"""A CRI-O's files in a temporary folder, and what it says it runs with; its programs are taken to exist."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from cdi_courier import changes
from cdi_courier.changes import ChangeSet
from cdi_courier.errors import CourierError
from cdi_courier.host import crio
from cdi_courier.host.answers import Findings
from cdi_courier.host.model import Runtime
from cdi_courier.settings import Settings
from cdi_courier_cri_o import configuration, dryrun, install
from cdi_courier_cri_o.backend import CriODropInBackend

GATE = "/var/lib/cdi-courier/bin/cdi-courier-cri-o"
PLAIN = """
[crio.runtime]
default_runtime = "runc"
hooks_dir = ["/usr/share/containers/oci/hooks.d"]
[crio.runtime.runtimes.runc]
runtime_path = "/usr/sbin/runc"
runtime_type = "oci"
runtime_root = "/run/runc"
monitor_path = "/usr/bin/conmon"
"""
NRI_OFF = PLAIN + '[crio.nri]\nenable_nri = false\nnri_listen = "/nonexistent/nri.sock"\n'
Tree = dict[str, tuple[int, object]]


class Site:
    """One host with a CRI-O. live: what ``GET /config`` answers, None if nobody does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.etc = root / "etc/crio"
        self.main = self.etc / "crio.conf"
        self.folder = self.etc / "crio.conf.d"
        self.folder.mkdir(parents=True)
        self.state = str(root / "state")
        self.live: str | None = NRI_OFF
        self.version = "1.28.2"
        self.settings = attrs.evolve(
            Settings(), cri_o_drop_in=attrs.evolve(Settings().cri_o_drop_in, config_dir=str(self.folder))
        )

    @property
    def drop_in(self) -> Path:
        return self.folder / configuration.DROP_IN

    def told(self, **sections: dict[str, Any]) -> None:
        """Change settings."""
        for name, values in sections.items():
            section = attrs.evolve(getattr(self.settings, name), **values)
            self.settings = attrs.evolve(self.settings, **{name: section})

    def runtime(self, **facts: Any) -> Runtime:
        """The CRI-O as it is described by what it says, and by these facts."""
        findings = Findings()
        findings.version = self.version
        for name, value in facts.items():
            findings.learn(name, value, "a test")
        findings.learn("config", str(self.main), "a test")
        if self.live is not None:
            crio.learn_from_config(configuration.tomledit.parse(self.live.encode()), findings)
        crio.learn_from_version(findings)
        return Runtime("cri-o", "cri-o", self.version, "/run/crio/crio.sock", findings.facts)

    def plan(self, *, restart: bool = True, **facts: Any) -> ChangeSet:
        return install.plan(self.runtime(**facts), self.settings, restart=restart)

    def refused(self, **facts: Any) -> CourierError:
        """What planning is refused with."""
        with pytest.raises(CourierError) as caught:
            self.plan(**facts)
        return caught.value

    def apply(self, plan: ChangeSet) -> None:
        changes.apply(plan, folder=self.state)

    def undo(self) -> None:
        for manifest in changes.installed(self.state):
            changes.undo(manifest, folder=self.state)

    def offer(self, **facts: Any) -> Any:
        return CriODropInBackend().offer(self.runtime(**facts), self.settings)


def tree(root: Path) -> Tree:
    """Path → mode and content, or link target."""
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes(),
        )
        for path in root.rglob("*")
    }


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """CRI-O 1.28 with NRI off and one handler."""
    made = Site(tmp_path)

    def answer(*_: object) -> bytes:
        if made.live is None:
            raise crio.HostError("HST101", "nobody listens")
        return made.live.encode()

    monkeypatch.setattr(configuration.unix_http, "get", answer)
    monkeypatch.setattr(install, "_is_program", lambda path: path.startswith("/"))
    monkeypatch.setattr(dryrun, "program", lambda _: "")
    monkeypatch.setattr(changes, "FOLDER", made.state)
    made.told(oci_hook={"gate_dir": str(tmp_path / "bin")})
    return made


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a ``crio`` of a shell script's text, which plans then try."""

    def make(script: str) -> Path:
        path = tmp_path / "crio"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(dryrun, "program", lambda _: str(path))
        return path

    return make
