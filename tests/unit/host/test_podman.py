"""Podman: what its program prints, what its files say, and programs that do neither."""

from __future__ import annotations

import json
import os
import pwd
import time
from pathlib import Path

import pytest
from cdi_courier.errors import HostError
from cdi_courier.host import children, podman, probe
from cdi_courier.host.answers import Findings
from cdi_courier.host.files import Root
from cdi_courier.host.sockets import Override
from support.waiting import wait_for

BINARY = "usr/bin/podman"
CONF = "etc/containers/containers.conf"


def program(root: Path, script: str) -> Path:
    """A Podman that is this shell script."""
    path = root / BINARY
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_a_captured_podman_is_described(look, root: Path, data: Path) -> None:
    """Version, low-level runtime, cgroups and rootless come from ``podman info``; it has no socket."""
    program(root, f'[ "$*" = "info --format json" ] && cat {data}/podman-4.3.1-info.json')

    host = look()

    (runtime,) = host.runtimes
    assert host.problems == runtime.problems == ()
    assert (runtime.key, runtime.kind, runtime.version, runtime.endpoint) == ("podman", "podman", "4.3.1", "")
    assert {name: fact.value for name, fact in runtime.facts.items()} == {
        "nri": "absent",
        "handlers": {"crun": {"type": "oci", "path": "/usr/bin/crun"}},
        "default_handler": "crun",
        "cgroup_version": 1,
        "cgroup_driver": "cgroupfs",
        "rootless": False,
        "hooks_dirs": ["/usr/share/containers/oci/hooks.d"],
        "config": "/etc/containers/containers.conf",
        "config_exists": False,
    }
    assert runtime.facts["hooks_dirs"].source == "Podman's default"


def test_a_rootless_podman_says_so(data: Path) -> None:
    """The fact is Podman's own word."""
    document = json.loads((data / "podman-4.3.1-info.json").read_text())
    document["host"]["security"]["rootless"] = True

    assert podman.read_info(document).value("rootless") is True


def test_another_host_s_podman_is_not_this_one_s(data: Path) -> None:
    """A remote client describes the host that it is connected to."""
    document = json.loads((data / "podman-4.3.1-info.json").read_text())
    document["host"]["serviceIsRemote"] = True

    with pytest.raises(HostError, match="HST104: podman info describes another host"):
        podman.read_info(document)


def test_the_environment_cannot_point_it_elsewhere(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither CONTAINER_HOST nor CONTAINERS_CONF reaches it, nor a PATH of the caller's."""
    monkeypatch.setenv("CONTAINER_HOST", "ssh://elsewhere")
    monkeypatch.setenv("CONTAINERS_CONF", "/elsewhere")
    monkeypatch.setenv("PATH", f"/elsewhere:{os.environ['PATH']}")
    path = program(root, 'printf \'{"env": "%s"}\' "$(env | tr "\\n" " ")"')

    seen = podman.info(str(path), 5)["env"]

    assert "elsewhere" not in seen
    assert "PATH=/usr/local/sbin:" in seen


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("exec sleep 60", "HST103", "did not answer within 0.3 s"),
        ("echo '{'; exec sleep 60", "HST103", "did not answer within 0.3 s"),
        ("while :; do printf ' '; sleep 0.05; done", "HST103", "did not answer within 0.3 s"),
        ("exec >&- 2>&-; exec sleep 60", "HST103", "did not answer within 0.3 s"),
        ("echo nonsense", "HST104", "is not JSON"),
        ("echo '[1]'", "HST104", "is not a JSON object"),
        ("exit 0", "HST104", "is not JSON"),
        ("echo 'no: \x1b[31m' >&2; exit 125", "HST107", 'ended with status 125: "no: \\u001b[31m"'),
        ("kill -9 $$", "HST107", "ended with status -9"),
    ],
    ids=["hangs", "hangs-later", "drips", "closes", "garbage", "list", "nothing", "fails", "killed"],
)  # fmt: skip
def test_a_program_that_does_not_answer_is_a_problem(
    look, root: Path, script: str, code: str, said: str
) -> None:
    """Podman is there, and what it did instead of answering is said in time."""
    program(root, script)
    start = time.monotonic()

    (runtime,) = look(timeout=0.3).runtimes

    assert time.monotonic() - start < 5
    assert (runtime.kind, runtime.version) == ("podman", "")
    assert [problem.partition(":")[0] for problem in runtime.problems] == [code]
    assert said in runtime.problems[0]


def test_a_program_that_floods_is_ended(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read to the end of memory."""
    monkeypatch.setattr(children, "LIMIT", 100_000)
    path = program(root, "exec yes")

    with pytest.raises(HostError, match="HST107: podman info printed more than 100000 bytes"):
        podman.info(str(path), 20)


def test_a_program_that_cannot_be_started_is_a_problem(root: Path) -> None:
    """One that is of no format, for example."""
    path = program(root, "")
    path.write_bytes(b"\x7fELF")

    with pytest.raises(HostError, match=r"HST107: podman info cannot be started: .*Exec format error"):
        podman.info(str(path), 5)


def test_a_program_that_hangs_is_gone_afterwards(root: Path) -> None:
    """It does not outlive the question."""
    path = program(root, f"echo $$ > {root}/pid; exec sleep 60")

    with pytest.raises(HostError, match="HST103"):
        podman.info(str(path), 0.5)

    pid = (root / "pid").read_text().strip()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), 5, "the program to end")


def test_an_ignored_podman_is_not_run(look, root: Path) -> None:
    """``[runtimes.podman] ignore``."""
    program(root, f"touch {root}/ran")

    host = look({"podman": Override(ignore=True)})

    assert (host.runtimes, host.problems) == ((), ())
    assert not (root / "ran").exists()


def read_files(root: Path, folder: str = "", configured: str = "") -> Findings:
    findings = Findings()
    podman.learn_from_files(Root(str(root)), configured, folder, findings)
    return findings


def test_a_later_file_replaces_the_hook_directories(root: Path) -> None:
    """An array replaces the one before, in the order main file, drop-ins, the user's own."""
    put(root, "usr/share/containers/containers.conf", '[engine]\nhooks_dir = ["/vendor"]\n')
    put(root, CONF, '[engine]\nhooks_dir = ["/main"]\ncdi_spec_dirs = ["/cdi"]\n')
    put(root, f"{CONF}.d/90-x.conf", '[engine]\nhooks_dir = ["/drop-in"]\n')
    put(root, "home/u/.config/containers/containers.conf", '[engine]\nhooks_dir = ["/own"]\n')

    system, user = read_files(root), read_files(root, "/home/u/.config")

    assert system.value("hooks_dirs") == ["/drop-in"]
    assert system.facts["hooks_dirs"].source == f"/{CONF}.d/90-x.conf"
    assert system.value("cdi_spec_dirs") == ["/cdi"]
    assert system.value("config_exists") is True
    assert user.value("hooks_dirs") == ["/own"]


def test_a_list_may_be_appended_to(root: Path) -> None:
    """``{append=true}`` makes this and later files add to what was there."""
    put(root, CONF, '[engine]\nhooks_dir = ["/main", {append = true}]\n')
    put(root, f"{CONF}.d/90-x.conf", '[engine]\nhooks_dir = ["/drop-in"]\n')

    findings = read_files(root)

    assert findings.value("hooks_dirs") == ["/usr/share/containers/oci/hooks.d", "/main", "/drop-in"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HOME": "/h"}, "/h/.config"),
        ({"HOME": "/h", "XDG_CONFIG_HOME": "/x"}, "/x"),
        ({"HOME": "/h", "XDG_CONFIG_HOME": ""}, "/h/.config"),
        ({"HOME": "relative"}, ""),
        ({}, f"{pwd.getpwuid(os.getuid()).pw_dir}/.config"),
    ],
    ids=["home", "xdg", "xdg-empty", "relative", "no-home"],
)
def test_a_users_files_are_where_podman_has_them(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    """XDG_CONFIG_HOME comes first, then HOME, and without it the user database says."""
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    request = probe.request_from({"root": "", "timeout": 1, "total": 1})

    assert request.config_dir == expected


@pytest.mark.parametrize(
    ("folder", "expected"),
    [("", ["/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"]), ("/home/u/.config", [])],
    ids=["root", "rootless"],
)
def test_an_empty_list_means_the_standard_directories_to_root(
    root: Path, folder: str, expected: list[str]
) -> None:
    """And none to others."""
    put(root, CONF, "[engine]\nhooks_dir = []\n")

    assert read_files(root, folder).value("hooks_dirs") == expected


def test_a_broken_file_leaves_the_directories_unknown(root: Path) -> None:
    """Podman refuses it as well."""
    put(root, f"{CONF}.d/90-x.conf", "[engine\n")

    findings = read_files(root)

    assert findings.value("hooks_dirs") is None
    assert findings.problems[0].startswith(f"HST105: /{CONF}.d/90-x.conf is not TOML")
