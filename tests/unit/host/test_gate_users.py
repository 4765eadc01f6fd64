"""Which containers need a gate, by what containerd's shims and Docker have written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cdi_courier.host import gate_users
from support.needs import needs_root

CRI = "io.kubernetes.cri."
NOBODY = 65534


class Host:
    """A containerd's state folder, a Docker's data, and a gate."""

    def __init__(self, root: Path) -> None:
        self.state = root / "state"
        self.data = root / "docker"
        self.gate = root / "bin/gate"
        self.gate.parent.mkdir()
        self.gate.write_text("#!/bin/sh\n")
        self.daemon = root / "daemon.json"

    def task(
        self,
        name: str,
        *,
        options: Any = None,
        runtime: str | None = None,
        annotations: Any = None,
        namespace: str = "k8s.io",
    ) -> Path:
        """A bundle as a shim leaves it."""
        bundle = self.state / "io.containerd.runtime.v2.task" / namespace / name
        bundle.mkdir(parents=True)
        if options is not None:
            (bundle / "options.json").write_text(json.dumps(options))
        if runtime is not None:
            (bundle / "runtime").write_text(runtime)
        if annotations is not None:
            (bundle / "config.json").write_text(json.dumps({"annotations": annotations}))
        return bundle

    def container(self, identity: str, runtime: Any, name: str | None = None) -> None:
        """A container of Docker, running or not."""
        folder = self.data / "containers" / identity
        folder.mkdir(parents=True)
        (folder / "hostconfig.json").write_text(json.dumps({"Runtime": runtime}))
        if name is not None:
            (folder / "config.v2.json").write_text(json.dumps({"Name": name}))

    def users(self) -> tuple[str, ...]:
        return gate_users.users(str(self.gate), [str(self.daemon)])


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Nothing is running on it."""
    host = Host(tmp_path)
    monkeypatch.setattr(gate_users, "_CONTAINERD_STATES", (str(host.state),))
    monkeypatch.setattr(gate_users, "_DOCKER_CONFIG", "/nonexistent/daemon.json")
    return host


def pod(namespace: str, name: str, container: str | None = None) -> dict[str, str]:
    """The annotations by which a config says whose it is."""
    found = {f"{CRI}sandbox-namespace": namespace, f"{CRI}sandbox-name": name}
    return found if container is None else {**found, f"{CRI}container-name": container}


def test_a_host_without_containers_has_no_users(host: Host):
    """Neither folder is there, which is no trouble."""
    assert host.users() == ()


def test_tasks_are_named_as_people_know_them(host: Host):
    """A pod's container and its sandbox by their pod, another client's task by its namespace."""
    gate = str(host.gate)
    host.task("a", options={"binary_name": gate}, annotations=pod("ns", "p", "c"))
    host.task("b", options={"binary_name": gate}, annotations=pod("ns", "p"))
    host.task("c", runtime=f"{gate}\n", namespace="moby")
    host.task("d", options={"binary_name": ""}, runtime=gate, annotations=[1])

    assert host.users() == ("k8s.io/d", "moby/c", "ns/p/(sandbox)", "ns/p/c")


def test_tasks_of_other_runtimes_are_not_counted(host: Host):
    """Who notes another program, none, or nothing that can be read, does not call the gate."""
    host.task("a", options={"binary_name": "/usr/sbin/runc"}, runtime="/usr/sbin/runc")
    host.task("b", options={"binary_name": ""}, runtime="")
    host.task("c")
    (host.task("d") / "options.json").write_text("{")
    host.task("e", options=[])

    assert host.users() == ()


def test_a_gate_is_known_by_another_path(host: Host):
    """A link to it, or a path around a corner, is the same file."""
    link = host.gate.with_name("link")
    link.symlink_to(host.gate)
    host.task("a", options={"binary_name": str(link)})
    host.task("b", options={"binary_name": f"{host.gate.parent}/../bin/gate"})

    assert host.users() == ("k8s.io/a", "k8s.io/b")


def test_a_gate_that_is_gone_still_has_users(host: Host):
    """They are why it should come back."""
    host.task("a", options={"binary_name": str(host.gate)})
    host.gate.unlink()

    assert host.users() == ("k8s.io/a",)


def test_state_in_an_unusual_folder_is_found_by_its_shims(host: Host, monkeypatch: pytest.MonkeyPatch):
    """A shim works in its bundle, wherever the daemon keeps its state."""
    monkeypatch.setattr(gate_users, "_CONTAINERD_STATES", ())
    bundle = host.task("a", options={"binary_name": str(host.gate)})
    with subprocess.Popen(["sleep", "60"], cwd=bundle) as shim:
        found = host.users()
        shim.kill()

    assert found == ("k8s.io/a",)


@needs_root
def test_what_another_user_has_made_counts_for_nothing(host: Host, monkeypatch: pytest.MonkeyPatch):
    """Who is not root cannot keep a gate in use by working in a folder that looks like a shim's."""
    monkeypatch.setattr(gate_users, "_CONTAINERD_STATES", ())
    bundle = host.task("a", options={"binary_name": str(host.gate)})
    tasks = bundle.parents[1]
    with subprocess.Popen(["sleep", "60"], cwd=bundle) as shim:
        os.chown(tasks, NOBODY, NOBODY)
        theirs = host.users()
        os.chown(tasks, 0, 0)
        tasks.chmod(0o1777)
        anybodys = host.users()
        tasks.chmod(0o711)
        roots = host.users()
        shim.kill()

    assert (theirs, anybodys, roots) == ((), (), ("k8s.io/a",))


def test_state_in_a_folder_with_a_blank_is_found_by_its_mounts(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The kernel writes a blank in a mount point as an octal number."""
    monkeypatch.setattr(gate_users, "_CONTAINERD_STATES", ())
    host.state = tmp_path / "a\\b c"
    bundle = host.task("a", options={"binary_name": str(host.gate)})
    point = str(bundle / "rootfs").replace("\\", r"\134").replace(" ", r"\040")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"proc /proc proc rw 0 0\noverlay {point} overlay rw 0 0\n")
    monkeypatch.setattr(gate_users, "_MOUNTS", str(mounts))

    assert host.users() == ("k8s.io/a",)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "huge", "link-to-nothing"])
def test_what_no_runtime_has_written_is_passed_over(host: Host, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Anybody may work in a folder that looks like a shim's: nothing there is waited for or read for ever."""
    monkeypatch.setattr(gate_users, "_LIMIT", 4096)
    for place in ("options.json", "runtime", "config.json"):
        path = host.task(f"bad-{place}") / place
        match kind:
            case "pipe":
                os.mkfifo(path)
            case "folder":
                path.mkdir()
            case "device":
                path.symlink_to("/dev/zero")
            case "huge":
                path.write_text(json.dumps({"binary_name": str(host.gate), "x": "y" * 8192}))
            case _:
                path.symlink_to("nothing")
    host.task("good", options={"binary_name": str(host.gate)})

    assert host.users() == ("k8s.io/good",)


def test_a_name_that_no_file_can_have_is_nobody_s(host: Host):
    """A zero byte in what is noted, or in what Docker's file says, is no trouble."""
    host.task("a", options={"binary_name": "a\0b"})
    host.task("b", runtime="a\0b")
    host.container("1", "ours", "/web")
    runtimes = {"odd": {"path": "a\0b"}, "ours": {"path": str(host.gate)}}
    host.daemon.write_text(json.dumps({"runtimes": runtimes, "data-root": "a\0b"}))

    assert host.users() == ()


def test_containers_of_docker_count_whether_they_run_or_not(host: Host):
    """They note a name, which daemon.json says the meaning of."""
    host.daemon.write_text(
        json.dumps(
            {
                "data-root": str(host.data),
                "runtimes": {
                    "ours": {"path": str(host.gate)},
                    "theirs": {"path": "/usr/bin/crun"},
                    "odd": [],
                    "none": {},
                },
            }
        )
    )
    host.container("1", "ours", "/web")
    host.container("2", "ours")
    for number, other in enumerate(("theirs", "runc", "odd", "", None, ["ours"]), 3):
        host.container(str(number), other, "/other")

    host.data = host.data / "231072.231072"
    host.container("9", "ours", "/remapped")

    assert host.users() == ("docker/2", "docker/remapped", "docker/web")


def test_a_docker_that_was_told_its_folder_by_an_option_is_found(host: Host):
    """Its command line says where its containers are."""
    host.daemon.write_text(json.dumps({"runtimes": {"ours": {"path": str(host.gate)}}}))
    host.container("1", "ours", "/web")
    script = "import time; print(flush=True); time.sleep(60)"
    argv = ["dockerd", "-c", script, "--data-root", str(host.data)]
    with subprocess.Popen(argv, executable=sys.executable, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        found = host.users()
        daemon.kill()

    assert found == ("docker/web",)


@needs_root
def test_a_docker_of_another_user_counts_for_nothing(host: Host):
    """Who is not root cannot keep a gate in use by a program that looks like Docker's daemon."""
    host.daemon.write_text(json.dumps({"runtimes": {"ours": {"path": str(host.gate)}}}))
    host.container("1", "ours", "/web")
    argv = ["dockerd", "-c", "echo; read -r _", "x", "--data-root", str(host.data)]
    found = []
    for user in (NOBODY, 0):
        with subprocess.Popen(
            argv, executable="/bin/sh", user=user, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as daemon:
            assert daemon.stdout is not None
            daemon.stdout.readline()
            found.append(host.users())

    assert found == [(), ("docker/web",)]


def test_docker_s_file_may_be_called_anything(host: Host):
    """A daemon is told its file by an option, and does not look at the name's end."""
    host.daemon = host.daemon.with_name("dockerd.conf")
    host.container("c1", "gate", "/web")
    host.daemon.write_text(
        json.dumps({"runtimes": {"gate": {"path": str(host.gate)}}, "data-root": str(host.data)})
    )

    assert host.users() == ("docker/web",)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"runtimes": []}', '{"data-root": 7, "runtimes": {}}'],
    ids=["empty", "cut-off", "a-list", "odd-runtimes", "odd-root"],
)
def test_a_daemon_json_that_names_no_gate_has_no_users(host: Host, text: str):
    """Whatever it is, the gate is not in it."""
    host.daemon.write_text(text)
    host.container("1", "ours")

    assert host.users() == ()


def test_it_runs_without_the_product(host: Host):
    """A package's script asks by the file alone; the status tells, and hostile names are harmless."""
    host.task("a", options={"binary_name": str(host.gate)}, annotations=pod("ns", "p\x1b[31m\n", "c"))
    state = host.task("b", options={"binary_name": str(host.gate)})

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-I", "-S", str(gate_users.__file__), *arguments]
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)

    # It knows of the folder only by a process in it.
    with subprocess.Popen(["sleep", "60"], cwd=state) as shim:
        used = ask(str(host.gate))
        shim.kill()
    assert (used.returncode, used.stdout) == (1, "k8s.io/b\nns/p\\x1b[31m\\n/c\n")
    assert ask(str(host.gate)).returncode == 0
    assert ask().returncode == 2
    assert "usage" in ask().stderr
