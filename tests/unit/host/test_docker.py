"""Docker's answers, and Podman's that imitate them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cdi_courier.host.sockets import Override
from support import fake_crio

SOCKET = "run/docker.sock"
VERSION = {"Version": "28.5.1", "ApiVersion": "1.51", "Components": [{"Name": "Engine"}]}
# As Docker's API documents GET /info, without what is not read.
INFO = {
    "ServerVersion": "28.5.1",
    "CgroupDriver": "systemd",
    "CgroupVersion": "2",
    "Runtimes": {"io.containerd.runc.v2": {"path": "runc"}, "runc": {"path": "runc"}},
    "DefaultRuntime": "runc",
    "SecurityOptions": ["name=apparmor", "name=seccomp,profile=builtin"],
    "CDISpecDirs": ["/etc/cdi", "/var/run/cdi"],
}


def docker(root: Path, version: object = VERSION, info: object = INFO) -> fake_crio.FakeRuntime:
    http = {"/version": json.dumps(version).encode(), "/info": json.dumps(info).encode()}
    return fake_crio.FakeRuntime(root / SOCKET, {}, http)


def test_a_docker_is_described(look, root: Path) -> None:
    """Version and info give its facts."""
    with docker(root) as server:
        (runtime,) = look().runtimes

    assert runtime.problems == ()
    assert (runtime.key, runtime.kind, runtime.version) == ("docker", "docker", "28.5.1")
    assert runtime.get("handlers")["runc"] == {"type": "oci", "path": "runc"}
    assert runtime.get("default_handler") == "runc"
    assert runtime.get("cgroup_driver") == "systemd"
    assert runtime.get("cgroup_version") == 2
    assert runtime.get("cdi_spec_dirs") == ["/etc/cdi", "/var/run/cdi"]
    assert runtime.get("rootless") is False
    assert runtime.get("config") == "/etc/docker/daemon.json"
    assert set(server.asked) == {"GET /version", "GET /info"}


@pytest.mark.parametrize(
    ("api", "nri", "state"),
    [
        ("1.51", None, "absent"),
        ("1.53", None, "off"),
        ("1.53", {"Info": [["a", "b"]]}, "on"),
        ("", None, None),
    ],
    ids=["older", "off", "on", "unknown"],
)
def test_nri_is_known_by_the_api_s_version(
    look, root: Path, api: str, nri: object, state: str | None
) -> None:
    """Since 1.53 the info has NRI exactly if it is enabled."""
    with docker(root, {**VERSION, "ApiVersion": api}, {**INFO, "NRI": nri}):
        (runtime,) = look().runtimes

    assert runtime.get("nri") == state


def test_a_rootless_docker_says_so(look, root: Path) -> None:
    """In the caller's runtime folder; its security options tell."""
    (root / "run").rename(root / "user")
    (root / "run").mkdir()
    http = {
        "/version": json.dumps(VERSION).encode(),
        "/info": json.dumps({**INFO, "SecurityOptions": ["name=rootless"]}).encode(),
    }
    with fake_crio.FakeRuntime(root / "user/docker.sock", {}, http):
        (runtime,) = look(runtime_dir="/user").runtimes

    assert runtime.endpoint == "/user/docker.sock"
    assert runtime.get("rootless") is True
    assert runtime.get("config") is None


def test_podman_at_docker_s_socket_is_no_docker(look, root: Path, data: Path) -> None:
    """The package podman-docker puts Podman's socket there; it is Podman's endpoint then."""
    binary = root / "usr/bin/podman"
    binary.parent.mkdir(parents=True)
    binary.write_text(f"#!/bin/sh\ncat {data}/podman-4.3.1-info.json\n")
    binary.chmod(0o755)
    with docker(root, {**VERSION, "Components": [{"Name": "Podman Engine"}]}):
        (runtime,) = look().runtimes

    assert (runtime.key, runtime.kind, runtime.version) == ("podman", "podman", "4.3.1")
    assert runtime.endpoint == "/run/docker.sock"


def test_a_socket_of_the_settings_is_found_out(look, root: Path) -> None:
    """A path alone is asked for what it is, and goes by that path."""
    with docker(root), fake_crio.listening(root / "run/other.sock"):
        (runtime,) = look({"/run/docker.sock": Override(config="/d.json")}).runtimes

    assert (runtime.key, runtime.kind) == ("/run/docker.sock", "docker")
    assert runtime.get("config") == "/d.json"


def test_podman_s_socket_without_its_program_is_a_podman(look, root: Path) -> None:
    """Its version is known, and why nothing more."""
    with docker(root, {**VERSION, "Version": "5.6.0", "Components": [{"Name": "Podman Engine"}]}):
        (runtime,) = look().runtimes

    assert (runtime.key, runtime.kind, runtime.version) == ("podman", "podman", "5.6.0")
    assert runtime.problems[0].startswith("HST107: Podman answers at /run/docker.sock, but its program")
