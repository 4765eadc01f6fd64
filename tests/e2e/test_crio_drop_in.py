"""`cdi-courier install` and `uninstall` on a CRI-O that restarts: each way of delivery comes, works and goes.

No distribution packages CRI-O for the machines that these tests run on, so that a fake with its measured
habits stands in; the gate, the command and the daemon are the real ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from cdi_courier import changes
from cdi_courier.cli import command
from cdi_courier.cli import install as install_command
from cdi_courier.host import gate_users
from cdi_courier_cri_o import dropin
from click.testing import CliRunner, Result
from support.courier import Courier
from support.cri import CriClient, CriError
from support.crio_process import CrioProcess, start, stop

DEVICE = "v.com/c=all"
KEY = "nvidia.cdi.k8s.io"
Tree = dict[str, tuple[int, object]]


class Site:
    """A host with a CRI-O that runs, settings that name its places, and the command."""

    def __init__(self, root: Path, version: str = "1.33.4") -> None:
        self.root = root
        self.crio = CrioProcess(root / "host", version)
        self.gate = root / "bin/cdi-courier-cri-o"
        self.drop_in = self.crio.folder / "90-cdi-courier.conf"
        self.settings = root / "config.toml"
        self.changes = root / "changes"
        specs = root / "cdi"
        specs.mkdir()
        document = {
            "cdiVersion": "0.6.0",
            "kind": "v.com/c",
            "devices": [{"name": "all", "containerEdits": {"env": ["COURIER=yes"]}}],
        }
        (specs / "v.json").write_text(json.dumps(document))
        self.tables: dict[str, dict[str, Any]] = {
            "runtimes": {
                "cri-o": {
                    "endpoint": str(self.crio.socket),
                    "config": str(self.crio.main),
                    "restart": self.crio.restart,
                }
            },
            "cri_o_drop_in": {"config_dir": str(self.crio.folder)},
            "oci_hook": {"gate_dir": str(root / "bin"), "log": str(root / "hook.log")},
            "nri": {"sockets": [str(self.crio.nri_socket)]},
            "service": {"state_dir": str(root / "run")},
            "cdi": {"dirs": [str(specs)]},
            "policy": {"default": "allow"},
            "probe": {"interval": 1.0},
        }

    def told(self, **sections: dict[str, Any]) -> None:
        """Change settings."""
        for name, values in sections.items():
            self.tables.setdefault(name, {}).update(values)

    def courier(self, *arguments: str, code: int = 0) -> Result:
        self.settings.write_text(tomlkit.dumps(self.tables))
        result = CliRunner().invoke(command, ["--config", str(self.settings), *arguments])
        assert result.exit_code == code, (result.output, result.exception, self.crio.log)
        return result

    def install(self, *arguments: str, code: int = 0) -> str:
        words = ("install", "--backend", "cri_o_drop_in", "--runtime", "cri-o", *arguments)
        return self.courier(*words, code=code).output

    def uninstall(self, *arguments: str, code: int = 0) -> str:
        return self.courier("uninstall", *arguments, code=code).output

    def doctor(self) -> dict[str, Any]:
        """What the report says of CRI-O."""
        self.settings.write_text(tomlkit.dumps(self.tables))
        argv = [sys.executable, "-m", "cdi_courier", "--config", str(self.settings), "doctor", "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        assert done.stdout, done.stderr
        (found,) = (r for r in json.loads(done.stdout)["runtimes"] if r["kind"] == "cri-o")
        return dict(found)

    def offer(self) -> dict[str, Any]:
        (made,) = (o for o in self.doctor()["offers"] if o["backend"] == "cri_o_drop_in")
        return dict(made)

    def files(self) -> Tree:
        """All that installing may touch: CRI-O's configuration, its hooks, the gate's folder."""
        folders = (self.crio.etc, self.crio.hooks, self.root / "bin")
        return {
            str(path): (path.stat().st_mode, path.is_file() and path.read_bytes())
            for folder in folders
            for path in (folder, *folder.rglob("*"))
            if path.exists()
        }


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """CRI-O 1.33 with NRI off, running; in a short folder, since sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp") as folder:
        made = Site(Path(folder))
        monkeypatch.setattr(changes, "FOLDER", str(made.changes))
        monkeypatch.setattr(gate_users, "_CRIO_STORES", (str(made.crio.storage),))
        with made.crio:
            yield made


class Kubelet:
    """The kubelet's side of it: a connection for each call, for CRI-O is restarted between them."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            with CriClient(self.socket) as client:
                return getattr(client, name)(*arguments, **named)

        return call


@pytest.fixture
def cri(site: Site) -> Kubelet:
    """Who asks CRI-O for pods."""
    return Kubelet(site.crio.socket)


def environment(site: Site, container: str) -> list[str]:
    """What the config that the low-level runtime was called with has."""
    path = site.crio.storage / f"overlay-containers/{container}/userdata/config.json"
    found: list[str] = json.loads(path.read_text())["process"]["env"]
    return found


# NRI


def test_nri_is_turned_on_proved_and_off_again(site: Site) -> None:
    """After --apply CRI-O introduces itself over NRI; after uninstalling it is off and every byte is back."""
    before = site.files()
    assert site.offer()["needs"] == "restart"
    output = site.install("--apply")

    assert "cri-o 1.33.4 speaks" in output
    assert "cri_o_drop_in can serve it" in output
    report = site.doctor()
    assert (report["active"], report["facts"]["nri"]["value"]) == ("nri", "on")
    assert site.offer()["needs"] == "nothing"
    again = site.install("--apply")
    assert "is set up already" in again
    site.uninstall("--apply")
    assert site.files() == before
    assert not list(site.changes.iterdir())
    # The socket's file stays; nobody takes it for NRI.
    assert site.crio.nri_socket.exists()
    assert site.doctor()["facts"]["nri"]["value"] == "off"


def test_a_dry_run_and_a_bare_install_restart_nothing(site: Site) -> None:
    """The first writes nothing either; the second prints the command, and a reload is not enough for it."""
    before, pid = site.files(), site.crio.pid
    shown = site.install("--dry-run")

    assert "+enable_nri = true" in shown
    assert site.files() == before
    assert f"to make it effective: {site.crio.restart}" in site.install()
    site.crio.hang_up()
    assert site.crio.pid == pid
    assert site.drop_in.exists()
    # It says that NRI is on, and serves none.
    offer = site.offer()
    assert offer["needs"] == "restart"
    assert "HST106" in offer["reason"]


def test_the_daemon_serves_what_the_drop_in_has_arranged_also_where_that_is_demanded(site: Site) -> None:
    """[runtimes] backend = "cri_o_drop_in" does not keep the NRI session from answering."""
    site.install("--apply")
    site.tables["runtimes"]["cri-o"]["backend"] = "cri_o_drop_in"
    site.settings.write_text(tomlkit.dumps(site.tables))
    with Courier(site.settings, site.root / "courier.log") as courier:
        courier.wait_for_log("cri-o 1.33.4: served by cri_o_drop_in: ")
        courier.wait_for_log("delivering by edits: cri-o honours")


# The wrapper as a handler


def test_a_handler_is_installed_proved_by_a_pod_and_taken_back(site: Site, cri: Kubelet) -> None:
    """The gate edits what asks, leaves the rest alone, and is gone in the end with every byte as before."""
    site.told(cri_o_drop_in={"mode": "handler"})
    before = site.files()
    pod_of_before = cri.run_pod("before")
    output = site.install("--apply", "--canary")

    assert "a pod was created with handler cdi-courier and removed again" in output
    assert [call[1] for call in site.crio.calls if call[0].startswith("--root=")][:3] == [
        "create",
        "kill",
        "delete",
    ]
    asks = cri.run_pod("asks", annotations={f"{KEY}/container.c1": DEVICE})
    asked = cri.create_container(asks, "c1")
    other = cri.create_container(asks, "c2")
    assert "COURIER=yes" in environment(site, asked)
    assert "COURIER=yes" not in environment(site, other)
    cri.remove_pod(pod_of_before)
    site.uninstall("--apply")
    assert site.files() == before
    # It was made with the gate as the default and takes what is the default now.
    cri.remove_pod(asks)
    assert not list(site.changes.iterdir())


def test_a_denied_container_is_refused_with_its_cause(site: Site, cri: Kubelet) -> None:
    """What the gate says reaches the kubelet."""
    site.told(cri_o_drop_in={"mode": "handler"}, policy={"default": "deny"})
    site.install("--apply")
    pod = cri.run_pod("asks", "default", annotations={f"{KEY}/container.c1": DEVICE})
    with pytest.raises(CriError) as caught:
        cri.create_container(pod, "c1")

    assert "POL001" in caught.value.message


def test_a_reload_makes_no_handler_effective(site: Site, cri: Kubelet) -> None:
    """CRI-O says that it has the handler, pods cannot have it, and the offer is not fooled."""
    site.told(cri_o_drop_in={"mode": "handler"})
    site.install()
    site.crio.hang_up()
    offer = site.offer()

    assert site.doctor()["facts"]["default_handler"]["value"] == "cdi-courier"
    assert offer["needs"] == "restart"
    assert "has not been restarted since" in offer["reason"]
    with pytest.raises(CriError) as caught:
        cri.run_pod("x", handler="cdi-courier")
    assert "failed to find runtime handler" in caught.value.message


def test_a_pod_that_cannot_be_created_has_everything_taken_back(site: Site) -> None:
    """The canary fails, CRI-O runs as before, and the message says why."""
    site.told(cri_o_drop_in={"mode": "handler"})
    before = site.files()
    site.crio.runc.write_text('#!/bin/sh\ncase $2 in create) echo "no such cgroup" >&2; exit 1;; esac\n')
    output = site.install("--apply", "--canary", code=1)

    assert "CRI113" in output
    assert "no such cgroup" in output
    assert "restarted without it" in output
    assert site.files() == before
    assert site.doctor()["facts"]["default_handler"]["value"] == "runc"


def test_a_cri_o_that_does_not_come_back_gets_its_own_files_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not start with is taken back, and it is started without."""
    site.told(cri_o_drop_in={"mode": "handler"})
    before = site.files()
    real = dropin.clone
    monkeypatch.setattr(dropin, "clone", lambda table, _: real(table, "/nonexistent/gate"))
    output = site.install("--apply", code=1)

    assert "CHG007" in output
    assert "invalid runtime_path for cdi-courier" in output
    assert "restarted without it" in output
    assert site.files() == before
    assert site.doctor()["facts"]["default_handler"]["value"] == "runc"


def test_a_handler_that_a_pod_names_is_not_taken_away(site: Site, cri: Kubelet) -> None:
    """Uninstalling is refused as long as there is such a pod, and the pod can still be removed."""
    site.told(cri_o_drop_in={"mode": "handler"}, oci_hook={"handler_mode": "named"})
    before = site.files()
    output = site.install("--apply", "--canary")
    pod = cri.run_pod("busy", "ml", handler="cdi-courier")
    refused = site.uninstall("--apply", code=1)

    assert "kind: RuntimeClass" in output
    assert "CHG011" in refused
    assert "ml/busy" in refused
    assert site.gate.exists()
    assert site.drop_in.exists()
    cri.remove_pod(pod)
    site.uninstall("--apply")
    assert site.files() == before


def test_the_gate_stays_until_cri_o_is_restarted_without_it(site: Site, cri: Kubelet) -> None:
    """With its file missing CRI-O could not stop a container; after the restart it goes."""
    site.told(cri_o_drop_in={"mode": "handler"})
    before = site.files()
    site.install("--apply")
    pod = cri.run_pod("x")
    site.uninstall()

    assert not site.drop_in.exists()
    assert site.gate.exists()
    cri.stop_pod(pod)
    subprocess.run([site.crio.restart], check=True)
    site.uninstall()
    assert site.files() == before
    assert not list(site.changes.iterdir())


def test_the_daemon_says_when_the_drop_in_will_not_outlast_a_restart(site: Site) -> None:
    """A file that overrides it, and its absence, are said in words as soon as they are seen."""
    site.told(cri_o_drop_in={"mode": "handler"})
    site.install("--apply")
    later = site.crio.folder / "99-later.conf"
    site.settings.write_text(tomlkit.dumps(site.tables))
    with Courier(site.settings, site.root / "courier.log") as courier:
        courier.wait_for_log("handler cdi-courier is in effect")
        later.write_text('[crio.runtime]\ndefault_runtime = "runc"\n')
        courier.wait_for_log(f"{later} sets [crio.runtime] default_runtime")
        later.unlink()
        site.drop_in.unlink()
        courier.wait_for_log(f"{site.drop_in} is gone, so that it ends when CRI-O is restarted")


# The hook


@pytest.mark.parametrize("mode", ["auto", "hook"])
def test_without_a_restart_the_hook_serves_until_a_better_way_comes(site: Site, mode: str) -> None:
    """CRI-O goes on running, the hook is active, and with NRI on it is gone; undoing leaves nothing."""
    site.told(cri_o_drop_in={"mode": mode})
    before, pid = site.files(), site.crio.pid
    output = site.install("--no-restart")
    report = site.doctor()

    assert "to make it effective" not in output
    assert site.crio.pid == pid
    hook = json.loads((site.crio.hooks / "cdi-courier.json").read_text())
    assert hook["stages"] == ["createRuntime"]
    assert report["active"] == ("oci_hook" if mode == "auto" else "cri_o_drop_in")
    assert start_again(site), site.crio.log
    site.told(cri_o_drop_in={"mode": "auto"})
    site.install("--apply")
    assert not (site.crio.hooks / "cdi-courier.json").exists()
    assert site.doctor()["active"] == "nri"
    site.uninstall("--apply")
    assert site.files() == before


def start_again(site: Site) -> bool:
    """Whether it starts with its files as they are."""
    stop(site.crio.root)
    return start(site.crio.root)


# A CRI-O that does not run


def test_what_does_not_run_is_set_up_from_its_files(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program tells the version and reads the files; what nobody could verify is said."""
    stop(site.crio.root)
    program = site.root / "path/crio"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo "crio version 1.28.1"; exit; }\n'
        'cat "$4"/90-cdi-courier.conf\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    output = site.install()

    assert "not verified: CRI-O does not run" in output
    assert start(site.crio.root), site.crio.log
    assert site.doctor()["facts"]["nri"]["value"] == "on"
    assert site.offer()["needs"] == "nothing"


def test_what_the_program_refuses_is_not_written(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRI-O itself is asked before anything is changed."""
    before = site.files()
    program = site.root / "path/crio"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\n[ -e "$4"/90-cdi-courier.conf ] || exit 0\n'
        'echo \'time="t" level=fatal msg="unable to decode configuration"\' >&2; exit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    output = site.install("--apply", code=1)

    assert "CRI104" in output
    assert "unable to decode configuration" in output
    assert site.files() == before


def test_a_canary_needs_a_restart_to_try(site: Site) -> None:
    """Without --apply nothing is in effect that it could be created with."""
    result = site.courier("install", "--canary", code=2)

    assert "--canary needs --apply" in result.output


def test_the_restart_is_what_the_command_waits_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart command that restarts nothing is found out: the handler is not in effect."""
    monkeypatch.setattr(install_command, "_READY_TIMEOUT", 0.0)
    site.told(cri_o_drop_in={"mode": "handler"})
    site.tables["runtimes"]["cri-o"]["restart"] = f"kill -HUP {site.crio.pid}"
    output = site.install("--apply", code=1)

    assert "CHG008" in output


def test_a_canary_that_stays_keeps_its_handler(site: Site, cri: Kubelet) -> None:
    """Without its handler the pod could never be removed, so nothing is taken back from under it."""
    site.told(cri_o_drop_in={"mode": "handler"})
    site.crio.runc.write_text("#!/bin/sh\ncase $2 in kill) echo 'it hangs' >&2; exit 1;; esac\n")
    output = site.install("--apply", "--canary", code=1)

    assert "CRI114" in output
    assert "so nothing is taken back" in output
    assert site.drop_in.exists()
    site.crio.runc.write_text("#!/bin/sh\n")
    (pod,) = cri.list_pods()
    cri.remove_pod(pod.id)
    site.uninstall("--apply")
