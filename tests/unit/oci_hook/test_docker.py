"""What installing the wrapper changes in Docker's daemon.json, and where it refuses to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cdi_courier import changes
from cdi_courier.changes import ChangeSet
from cdi_courier.errors import CourierError
from cdi_courier.host import processes
from cdi_courier.host.model import Fact, Runtime
from cdi_courier.settings import OciHookSettings, RuntimeSettings, Settings
from cdi_courier_oci_hook import wrapping
from cdi_courier_oci_hook.backend import OciHookBackend

FILES = {
    "none": None,
    "empty": "",
    "blank": " \n",
    "an-object": "{}",
    "others": '{\n\t"log-level": "warn",\n\t"insecure-registries": ["é"]\n}',
    "another-default": '{"default-runtime": "crun", "runtimes": {"crun": {"path": "crun"}}}\n',
}


class Host:
    """A daemon.json, a folder for gates, and the low-level runtimes runc and crun."""

    def __init__(self, root: Path) -> None:
        self.file = root / "etc/docker/daemon.json"
        self.file.parent.mkdir(parents=True)
        self.sbin = root / "sbin"
        self.sbin.mkdir()
        for name in ("runc", "crun"):
            (self.sbin / name).write_text("#!/bin/sh\n")
            (self.sbin / name).chmod(0o755)
        self.gate = root / "bin/cdi-courier-docker"
        self.options: list[str] = []

    def settings(self, **oci_hook: Any) -> Settings:
        return Settings(oci_hook=OciHookSettings(gate_dir=str(self.gate.parent), **oci_hook))

    def plan(self, settings: Settings | None = None, **facts: Any) -> ChangeSet:
        found = {"config": str(self.file), "pid": 1, **facts}
        runtime = Runtime(
            "docker", "docker", "26.1.5", "", {name: Fact(value, "a test") for name, value in found.items()}
        )
        return OciHookBackend().plan(runtime, settings or self.settings())

    def apply(self, settings: Settings | None = None) -> tuple[changes.Step, ...]:
        return changes.apply(self.plan(settings), folder=changes.FOLDER)

    def undo(self) -> None:
        for manifest in changes.installed(changes.FOLDER):
            changes.undo(manifest, folder=changes.FOLDER)

    def refused(self, settings: Settings | None = None, **facts: Any) -> CourierError:
        with pytest.raises(CourierError) as caught:
            self.plan(settings, **facts)
        return caught.value


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Docker is installed, and its daemon was started without options."""
    host = Host(tmp_path)
    monkeypatch.setattr(changes, "FOLDER", str(tmp_path / "state"))
    monkeypatch.setattr(processes, "command_line", lambda *_: ["dockerd", *host.options])
    monkeypatch.setattr(processes, "environment", lambda *_: {"PATH": f"relative:{host.sbin}"})
    return host


files = pytest.mark.parametrize("text", FILES.values(), ids=list(FILES))


@files
@pytest.mark.parametrize("mode", ["default", "named"])
def test_install_and_uninstall_leave_every_byte_as_it_was(host: Host, text: str | None, mode: str):
    """The file that was there is there again; the gate and its folder are gone."""
    if text is not None:
        host.file.write_text(text)
    host.apply(host.settings(handler_mode=mode))
    document = json.loads(host.file.read_text())

    assert document["runtimes"]["cdi-courier"] == {"path": str(host.gate)}
    theirs = json.loads(text) if text and text.strip() else {}
    default = "cdi-courier" if mode == "default" else theirs.get("default-runtime")
    assert document.get("default-runtime") == default
    for known in (document, theirs):
        known.pop("default-runtime", None)
        known.get("runtimes", {}).pop("cdi-courier", None)
    assert {"runtimes": {}, **theirs} == document
    assert host.gate.exists()
    host.undo()
    assert (host.file.read_text() if host.file.exists() else None) == text
    assert not host.gate.parent.exists()


@files
def test_installing_twice_is_installing_once(host: Host, text: str | None):
    """The second plan is the first one."""
    if text is not None:
        host.file.write_text(text)
    first = host.plan()
    host.apply()

    assert host.plan().files == first.files
    assert host.apply() == ()


def test_only_ours_leaves_a_file_that_was_changed_since(host: Host):
    """Their default is what it was, their new key stays."""
    host.file.write_text(FILES["another-default"] or "")
    host.apply()
    document = json.loads(host.file.read_text())
    document["log-level"] = "debug"
    host.file.write_text(json.dumps(document))
    host.undo()

    expected = {**json.loads(FILES["another-default"] or ""), "log-level": "debug"}
    assert json.loads(host.file.read_text()) == expected


@pytest.mark.parametrize(
    ("default", "entry", "copied", "real"),
    [
        pytest.param("crun", {"path": "crun"}, {}, "crun", id="a-name"),
        pytest.param(
            "crun",
            {"path": "crun", "runtimeArgs": ["--debug"]},
            {"runtimeArgs": ["--debug"]},
            "crun",
            id="arguments",
        ),
        pytest.param("mine", {"runtimeType": "io.containerd.runc.v2"}, {}, "runc", id="a-type"),
        pytest.param(
            "mine",
            {"runtimeType": "io.containerd.runc.v2", "options": {"BinaryName": "crun"}},
            {},
            "crun",
            id="a-type-with-a-program",
        ),
    ],
)
def test_the_default_runtime_is_copied(host: Host, default: str, entry: Any, copied: Any, real: str):
    """With all that it has, and with the gate in front of its program, found where the daemon finds it."""
    host.file.write_text(json.dumps({"default-runtime": default, "runtimes": {default: entry}}))
    host.apply()
    document = json.loads(host.file.read_text())

    assert document["runtimes"]["cdi-courier"] == {"path": str(host.gate), **copied}
    assert document["runtimes"][default] == entry
    assert str(host.sbin / real).encode() in host.gate.read_bytes()


def test_the_file_is_the_settings_the_daemons_or_the_usual_one(host: Host, tmp_path: Path):
    """In this order."""
    own = tmp_path / "own.json"
    told = Settings(
        oci_hook=host.settings().oci_hook, runtimes={"docker": RuntimeSettings(config=str(own), restart="r")}
    )
    host.options = ["--config-file", "/x/daemon.json"]

    assert host.plan(told).files[-1].path == str(own)
    assert host.plan(told).restart == "r"
    assert host.plan().files[-1].path == "/x/daemon.json"
    host.options = []
    assert host.plan().files[-1].path == str(host.file)
    assert host.plan().restart == "systemctl restart docker"


def test_a_person_is_told_how_to_ask_and_what_a_restart_does(host: Host):
    """Containers end with Docker, unlike with containerd."""
    notes = " ".join(host.plan().notes)

    assert "--annotation" in notes
    assert "live-restore" in notes
    assert "--runtime gpu" in " ".join(host.plan(host.settings(handler_mode="named", handler="gpu")).notes)


def test_once_it_is_in_force_nothing_is_left_to_do(host: Host):
    """The daemon says that it calls the gate, and every file is as planned."""
    host.apply()
    serving = {
        "handlers": {"cdi-courier": {"type": "oci", "path": str(host.gate)}},
        "default_handler": "cdi-courier",
    }

    assert host.plan(**serving).restart == ""
    assert host.plan().restart != ""
    assert host.plan(**{**serving, "default_handler": "runc"}).restart != ""


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        pytest.param("{", "HOK117", "not JSON", id="malformed"),
        pytest.param("[]", "HOK117", "no JSON object", id="no-object"),
        pytest.param('{"runtimes": []}', "HOK117", "runtimes", id="odd-runtimes"),
        pytest.param('{"default-runtime": 7}', "HOK117", "default-runtime", id="odd-default"),
        pytest.param('{"default-runtime": "x", "runtimes": {"x": 1}}', "HOK117", "x", id="odd-runtime"),
        pytest.param(
            '{"default-runtime": "x", "runtimes": {"x": {"runtimeType": "io.containerd.runc.v2", '
            '"options": {"SystemdCgroup": true}}}}',
            "HOK117",
            "options",
            id="options",
        ),
        pytest.param(
            '{"default-runtime": "x", "runtimes": {"x": {"runtimeType": "io.containerd.runsc.v1"}}}',
            "HOK113",
            "io.containerd.runsc.v1",
            id="gvisor",
        ),
        pytest.param(
            '{"default-runtime": "io.containerd.kata.v2"}', "HOK113", "io.containerd.kata.v2", id="kata"
        ),
        pytest.param(
            '{"default-runtime": "x", "runtimes": {"x": {"path": "/nonexistent/x"}}}',
            "HOK114",
            "/nonexistent/x",
            id="no-program",
        ),
        pytest.param('{"runtimes": {"cdi-courier": {"path": "/x"}}}', "HOK115", "cdi-courier", id="taken"),
        pytest.param('{"default-runtime": "gone"}', "HOK120", "gone", id="no-default"),
    ],
)
def test_what_the_file_does_not_allow_is_refused(host: Host, text: str, code: str, word: str):
    """It is as before, and the message says what to do."""
    host.file.write_text(text)
    error = host.refused()

    assert error.code == code
    assert word in error.message
    assert error.hint
    assert host.file.read_text() == text


@pytest.mark.parametrize("option", ["--default-runtime=crun", "--add-runtime=x=/x"])
def test_options_that_the_file_must_not_repeat_are_named(host: Host, option: str):
    """Docker would not start with both."""
    host.options = [option]
    error = host.refused()

    assert error.code == "HOK118"
    assert option.partition("=")[0] in error.message
    named = host.settings(handler_mode="named")
    if option.startswith("--default"):
        assert host.plan(named).files
    else:
        assert host.refused(named).code == "HOK118"


def test_a_users_own_docker_is_not_roots_to_configure(host: Host):
    """Its file is somewhere in that user's home."""
    assert host.refused(rootless=True).code == "HOK119"


def test_a_runtime_in_no_folder_of_the_daemons_is_told(host: Host):
    """The folders that were looked through are in the message, relative ones not."""
    (host.sbin / "runc").unlink()
    error = host.refused()

    assert error.code == "HOK114"
    assert f"is not in {host.sbin}," in error.message


def test_without_a_daemon_the_usual_folders_are_looked_through(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Where nothing is known of the daemon's environment."""
    monkeypatch.setattr(wrapping, "_PATH", str(tmp_path))
    (tmp_path / "runc").write_text("")
    (tmp_path / "runc").chmod(0o755)

    assert wrapping.real_runtime(Runtime("docker", "docker"), "") == str(tmp_path / "runc")


def test_a_program_by_name_is_the_daemons_and_not_the_callers(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file of that name in the working directory, which says that it is a gate, leads nowhere."""
    (tmp_path / "crun").write_text("#!/bin/sh\n# cdi-courier gate: x\nreal=/bin/false\n")
    monkeypatch.chdir(tmp_path)
    with_pid = Runtime("docker", "docker", facts={"pid": Fact(1, "a test")})

    assert wrapping.real_runtime(with_pid, "crun") == str(host.sbin / "crun")
