"""Which sockets are asked, what ``[runtimes]`` changes, and what runtimes are called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cdi_courier.errors import HostError
from cdi_courier.host import cgroups, listeners, processes, sockets
from cdi_courier.host.answers import Findings
from cdi_courier.host.files import Root
from cdi_courier.host.sockets import Override
from support import fake_crio

KNOWN = {
    "run/containerd/containerd.sock": "containerd",
    "run/k3s/containerd/containerd.sock": "containerd",
    "run/k0s/containerd.sock": "containerd",
    "var/snap/microk8s/common/run/containerd.sock": "containerd",
    "run/crio/crio.sock": "cri-o",
    "run/docker.sock": "docker",
}


def found(root: Path, overrides: dict[str, Override] | None = None) -> list[tuple[str, str | None, str]]:
    """(path, kind, key) of each candidate."""
    candidates = sockets.candidates(Root(str(root)), overrides or {})
    return [(candidate.path, candidate.kind, candidate.key) for candidate in candidates]


@pytest.mark.parametrize(("path", "kind"), KNOWN.items())
def test_every_known_socket_is_found_once(root: Path, path: str, kind: str) -> None:
    """Also those that go by /run and by /var/run."""
    fake_crio.stale(root / path)

    assert found(root) == [(f"/{path}", kind, "")]


def test_a_host_without_sockets_has_no_candidates(root: Path) -> None:
    """What is not there is not asked."""
    assert found(root) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"containerd": Override(ignore=True)}, []),
        ({"/run/containerd/containerd.sock": Override(ignore=True)}, []),
        ({"/var/run/containerd/containerd.sock": Override(ignore=True)}, []),
        ({"cri-o": Override(ignore=True)}, [("/run/containerd/containerd.sock", "containerd", "")]),
        ({"containerd": Override(endpoint="/run/mine.sock")},
         [("/run/mine.sock", "containerd", "containerd")]),
        ({"containerd": Override(endpoint="unix:///run/mine.sock")},
         [("/run/mine.sock", "containerd", "containerd")]),
        ({"/run/containerd/containerd.sock": Override()},
         [("/run/containerd/containerd.sock", "containerd", "/run/containerd/containerd.sock")]),
        ({"/run/mine.sock": Override()},
         [("/run/mine.sock", None, "/run/mine.sock"), ("/run/containerd/containerd.sock", "containerd", "")]),
    ],
    ids=["ignore-kind", "ignore-path", "ignore-alias", "ignore-other", "endpoint", "url", "named", "another"],
)  # fmt: skip
def test_the_settings_add_and_take_away(
    root: Path, overrides: dict[str, Override], expected: list[tuple[str, str | None, str]]
) -> None:
    """An endpoint replaces the kind's usual one; a path is one more; what is ignored is not asked."""
    fake_crio.stale(root / "run/containerd/containerd.sock")

    assert found(root, overrides) == expected


def test_an_ignored_runtime_is_not_even_connected_to(look, root: Path, data: Path) -> None:
    """Nothing at all arrives at its socket."""
    with fake_crio.crio(root / "run/crio/crio.sock", data) as runtime:
        host = look({"cri-o": Override(ignore=True)})

    assert (host.runtimes, host.problems) == ((), ())
    assert runtime.asked == []


def test_a_configured_socket_that_is_not_there_is_a_problem(look) -> None:
    """It was asked for by name."""
    host = look({"containerd": Override(endpoint="/run/gone.sock")})

    assert host.runtimes == ()
    assert host.problems == (
        "HST101: /run/gone.sock does not exist (the runtime is down, or listens elsewhere)",
    )


@pytest.mark.parametrize("path", ["run/x.sock", "/" + "a" * 120, "/run/\0"], ids=["relative", "long", "zero"])
def test_an_impossible_path_is_a_problem(look, path: str) -> None:
    """No socket can have it."""
    host = look({"containerd": Override(endpoint=path)})

    (runtime,) = host.runtimes
    assert runtime.problems[0].startswith("HST104: ")
    assert "no socket can have this path" in runtime.problems[0]


def test_an_unusual_socket_s_configuration_is_not_guessed(look, root: Path, data: Path) -> None:
    """Without a command line, a containerd elsewhere may have any file; one that is configured is read."""
    (root / "etc/containerd").mkdir()
    (root / "etc/containerd/config.toml").write_text("version = 2\n")
    with fake_crio.containerd(root / "run/mine.sock", data, "1.7.24", "nri-off"):
        (plain,) = look({"/run/mine.sock": Override()}).runtimes
        (told,) = look({"containerd": Override(endpoint="/run/mine.sock", config="/c.toml")}).runtimes

    assert plain.key == "/run/mine.sock"
    assert plain.get("config") is None
    assert plain.get("nri") is None
    assert told.key == "containerd"
    assert told.get("config") == "/c.toml"
    assert told.get("config_exists") is False
    assert told.facts["config"].source == "[runtimes] config"


def test_the_peer_is_the_process_that_listens(root: Path) -> None:
    """By the kernel's word, with its user."""
    with fake_crio.listening(root / "run/x.sock"):
        peer = sockets.peer(Root(str(root)), "/run/x.sock", 5)

    assert peer == sockets.Peer(os.getpid(), os.geteuid())


def test_nobody_at_a_socket_is_an_error_with_a_code(root: Path) -> None:
    """A stale file and an absent one."""
    fake_crio.stale(root / "run/x.sock")

    for path in ("/run/x.sock", "/run/y.sock", "/run/x.sock/z"):
        with pytest.raises(HostError) as caught:
            sockets.peer(Root(str(root)), path, 5)
        assert caught.value.code == "HST101"


MOUNTS = {
    1: "30 1 0:26 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro\n"
    "31 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    2: "30 1 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
}


@pytest.mark.parametrize("version", [1, 2])
def test_the_cgroup_version_is_what_is_mounted(root: Path, version: int) -> None:
    """The hybrid layout counts as 1, as for the low-level runtimes."""
    (root / "proc/self/mountinfo").write_text(MOUNTS[version])
    findings = Findings()

    cgroups.learn(Root(str(root)), None, findings)

    assert findings.value("cgroup_version") == version


def test_the_runtime_s_own_mounts_count(root: Path) -> None:
    """It may see another hierarchy than this process, and the last mount hides the others."""
    (root / "proc/self/mountinfo").write_text(MOUNTS[1])
    (root / "proc/77").mkdir()
    (root / "proc/77/mountinfo").write_text(MOUNTS[1] + MOUNTS[2])
    findings = Findings()

    cgroups.learn(Root(str(root)), 77, findings)

    assert findings.value("cgroup_version") == 2
    assert findings.facts["cgroup_version"].source == "cgroup2 at /sys/fs/cgroup of process 77"


@pytest.mark.parametrize("text", ["", "x\n", "1 2 3 - cgroup2", "30 1 0:26 / /sys/fs/cgroup rw - bpf x rw\n"])
def test_unknown_mounts_give_no_version(root: Path, text: str) -> None:
    """Nothing is assumed."""
    (root / "proc/self/mountinfo").write_text(text)
    findings = Findings()

    cgroups.learn(Root(str(root)), None, findings)

    assert findings.value("cgroup_version") is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["x", "-c", "/a"], "/a"),
        (["x", "--config=/a"], "/a"),
        (["x", "--config", "/a", "-c", "/b"], "/b"),
        (["x", "--config"], None),
        (["x", "--configure=/a", "/a"], None),
        ([], None),
    ],
)
def test_an_option_is_read_as_go_reads_it(words: list[str], expected: str | None) -> None:
    """Both spellings, the last one wins, one without a value is none."""
    assert processes.option(words, "-c", "--config") == expected


def test_who_listens_is_seen_without_connecting(root: Path) -> None:
    """The kernel knows which file a socket is bound to, and the process which sockets it has."""
    path = root / "run/x.sock"
    (root / f"proc/{os.getpid()}").symlink_to(f"/proc/{os.getpid()}")
    with fake_crio.listening(path) as listener:
        listener.setblocking(False)
        peer = sockets.listener(Root(str(root)), "/run/x.sock", os.getpid(), 5)

        assert peer == sockets.Peer(os.getpid())
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_socket_that_was_bound_anew_is_not_the_former_owner_s(root: Path) -> None:
    """Two runtimes at one path: only whoever made the file that is there now is reached."""
    path = root / "run/x.sock"
    (root / f"proc/{os.getpid()}").symlink_to(f"/proc/{os.getpid()}")
    with fake_crio.listening(path):
        path.unlink()
        fake_crio.stale(path)

        assert not listeners.listens(Root(str(root)), "/run/x.sock", os.getpid())


@pytest.mark.parametrize("path", ["/run/gone", "/run/file", "/run/\0"])
def test_nobody_listens_at_what_is_no_socket(root: Path, path: str) -> None:
    """Whatever is there instead."""
    (root / "run/file").touch()

    assert not listeners.listens(Root(str(root)), path, os.getpid())
