"""The wrapper in front of runc on a real Docker, as `install` sets it up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cdi_courier import changes
from cdi_courier.cli import command
from click.testing import CliRunner, Result
from support.docker import Docker, DockerError
from support.installing import Restarter
from support.packages import Packages
from support.scenario import ALL, DOMAIN, OPEN_FUSE, OPEN_KMSG, spec

pytestmark = pytest.mark.runtime

RUNTIME = ("--backend", "oci_hook", "--runtime", "docker")


@dataclass
class Host:
    """A Docker, and settings that know where it is."""

    docker: Docker
    restarter: Restarter

    def __post_init__(self) -> None:
        root = self.docker.root
        self.gate = root / "bin/cdi-courier-docker"
        self.cdi = root / "cdi"
        self.cdi.mkdir()
        self.settings = root / "courier.toml"
        own = {
            "endpoint": self.docker.socket,
            "config": self.docker.config,
            "restart": self.restarter.command,
        }
        lines = ", ".join(f"{key} = {json.dumps(str(value))}" for key, value in own.items())
        self.settings.write_text(
            f"[runtimes]\ndocker = {{ {lines} }}\n"
            f"[cdi]\ndirs = ['{self.cdi}']\n[service]\nstate_dir = '{root / 'courier'}'\n"
            f"[oci_hook]\ngate_dir = '{self.gate.parent}'\nlog = '{root / 'gate.log'}'\n"
        )

    def courier(self, *arguments: str) -> Result:
        """Run `cdi-courier` in this process; the description is the real one."""
        return CliRunner().invoke(command, ["--config", str(self.settings), *arguments])

    def asks(self, name: str, value: str = ALL) -> str:
        return self.docker.run(name, {DOMAIN: value})

    def environment(self, name: str) -> str:
        return self.docker.execute(name, ["sh", "-c", "tr '\\0' '\\n' < /proc/1/environ"])


@pytest.fixture(scope="module")
def installed(packages: Packages) -> Iterator[Host]:
    """The wrapper is the default of a Docker that nothing else is configured for."""
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        Docker(packages) as docker,
        Restarter(docker.root, docker.restart) as restarter,
    ):
        monkeypatch.setattr(changes, "FOLDER", str(docker.root / "changes"))
        host = Host(docker, restarter)
        result = host.courier("install", *RUNTIME, "--apply")

        assert result.exit_code == 0, result.output
        assert "oci_hook can serve it" in result.output
        yield host


def write(host: Host, path: Path | None = None) -> None:
    edits = {"deviceNodes": [{"path": "/dev/courier", "hostPath": "/dev/null"}, {"path": "/dev/kmsg"}]}
    (path or host.cdi / "v.json").write_text(json.dumps(spec(all=edits)))


def test_an_annotated_container_gets_its_devices(installed: Host):
    """By `[policy] local`: its variable and its node, which can be used, as no other can."""
    write(installed)
    name = installed.asks("gets")

    assert "COURIER_ALL=yes\n" in installed.environment(name)
    assert "COURIER_ALL=yes\n" in installed.docker.execute(name, ["env"])
    script = f"test -c /dev/courier && echo there; {OPEN_KMSG} && echo opened"
    assert installed.docker.execute(name, ["sh", "-c", script]) == "there\nopened\n"
    assert "not permitted" in installed.docker.execute(name, ["sh", "-c", OPEN_FUSE])
    installed.docker.remove(name)


def test_a_container_that_does_not_ask_gets_nothing(installed: Host):
    """It lives as with runc alone."""
    name = installed.docker.run("plain")

    assert "COURIER" not in installed.environment(name)
    installed.docker.stop_container(name)
    installed.docker.call("POST", f"/containers/{name}/start")
    installed.docker.remove(name)


def test_what_is_not_there_is_refused_in_words(installed: Host):
    """Docker's error has the cause."""
    write(installed)
    with pytest.raises(DockerError, match=r"CDI\d+.*none"):
        installed.asks("none", "management.nvidia.com/gpu=none")
    installed.docker.remove("none")


def test_a_stopped_container_gets_its_devices_again(installed: Host):
    """Each start is answered anew."""
    write(installed)
    name = installed.asks("again")
    installed.docker.stop_container(name)
    installed.docker.call("POST", f"/containers/{name}/start")

    assert "COURIER_ALL=yes\n" in installed.environment(name)
    installed.docker.remove(name)


def test_containers_keep_the_gate_whether_they_run_or_not(installed: Host):
    """Docker does not start a container whose runtime it does not know; so nothing goes before it does."""
    write(installed)
    docker = installed.docker
    written = docker.config.read_bytes()
    name = installed.asks("keeps")
    assert "CHG011: 2 containers use" in installed.courier("uninstall", "--apply").output
    docker.stop_container(name)
    result = installed.courier("uninstall", "--apply", "--force")
    assert (result.exit_code, "docker/keeps" in result.output) == (1, True)
    assert docker.config.read_bytes() == written
    docker.remove(name)
    result = installed.courier("uninstall", "--apply")

    assert result.exit_code == 0, result.output
    assert docker.config.read_text() == "{}\n"
    assert not installed.gate.parent.exists()
    assert not os.listdir(changes.FOLDER)
    assert "COURIER" not in installed.environment(installed.asks("after"))
    docker.remove("after")


def test_a_reload_is_enough_to_install(installed: Host):
    """Without --apply the daemon can be had to read its file, and its containers stay."""
    write(installed)
    installed.docker.run("stays")
    result = installed.courier("install", *RUNTIME)
    assert result.exit_code == 0, result.output
    installed.docker.reload()

    assert "COURIER_ALL=yes\n" in installed.environment(installed.asks("reloaded"))
    assert "COURIER" not in installed.environment("stays")
    assert "oci_hook is installed already" in installed.courier("install", *RUNTIME).output
    for name in ("stays", "reloaded"):
        installed.docker.remove(name)
