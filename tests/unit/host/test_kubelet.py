"""Which runtime the kubelet uses, by every way it is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cdi_courier.errors import HostError
from cdi_courier.host import kubelet
from cdi_courier.host.files import Root
from support import fake_crio

CONTAINERD = "/run/containerd/containerd.sock"
CRIO = "/var/run/crio/crio.sock"
FLAG = "--container-runtime-endpoint"
CONFIG = "var/lib/kubelet/config.yaml"
FLAGS = "var/lib/kubelet/kubeadm-flags.env"


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def process(root: Path, *words: str, pid: int = 4711) -> None:
    put(root, f"proc/{pid}/cmdline", "".join(f"{word}\0" for word in words))


def test_without_a_kubelet_nothing_is_known(root: Path) -> None:
    """Neither a process nor a file: no endpoint is assumed."""
    process(root, "/usr/bin/vim", "/var/lib/kubelet/config.yaml")

    assert kubelet.endpoint(Root(str(root))) is None


@pytest.mark.parametrize(
    "words",
    [
        ("/usr/bin/kubelet", f"--container-runtime-endpoint=unix://{CRIO}"),
        ("kubelet", "--v=2", "--container-runtime-endpoint", CRIO, "--x"),
        ("/snap/microk8s/1/kubelite", f"--container-runtime-endpoint={CRIO}"),
    ],
    ids=["equals", "separate", "kubelite"],
)
def test_the_command_line_comes_first(root: Path, words: tuple[str, ...]) -> None:
    """A flag of the running kubelet outweighs its configuration file."""
    process(root, *words, "--config=/etc/k.yaml")
    put(root, "etc/k.yaml", f"containerRuntimeEndpoint: unix://{CONTAINERD}\n")

    found = kubelet.endpoint(Root(str(root)))

    assert found == kubelet.Endpoint(CRIO, "command line of process 4711")


@pytest.mark.parametrize(
    ("mine", "its", "counts"),
    [
        ("pid:[1]", "pid:[1]", True),
        ("pid:[1]", "pid:[2]", False),
        ("pid:[1]", None, True),
        (None, "pid:[2]", True),
    ],
    ids=["the-same", "another", "its-not-readable", "mine-not-readable"],
)
def test_only_a_kubelet_of_the_host_counts(
    root: Path, mine: str | None, its: str | None, counts: bool
) -> None:
    """One in a container's PID namespace, as of a cluster in Docker, speaks of that container's sockets."""
    process(root, "kubelet", f"{FLAG}={CRIO}")
    for who, namespace in (("self", mine), ("4711", its)):
        if namespace is not None:
            (root / "proc" / who / "ns").mkdir()
            (root / "proc" / who / "ns/pid").symlink_to(namespace)

    assert (kubelet.endpoint(Root(str(root))) is not None) is counts


def test_the_running_kubelet_s_configuration_is_read(root: Path) -> None:
    """The file that ``--config`` names, and not another one."""
    process(root, "kubelet", "--config", "/etc/k.yaml")
    put(root, "etc/k.yaml", f"kind: KubeletConfiguration\ncontainerRuntimeEndpoint: unix://{CRIO}\n")
    put(root, CONFIG, f"containerRuntimeEndpoint: unix://{CONTAINERD}\n")

    assert kubelet.endpoint(Root(str(root))) == kubelet.Endpoint(CRIO, "/etc/k.yaml")


def test_a_running_kubelet_that_does_not_say_is_not_guessed_at(root: Path) -> None:
    """Its built-in default depends on its version."""
    process(root, "kubelet")
    put(root, CONFIG, f"containerRuntimeEndpoint: unix://{CONTAINERD}\n")

    assert kubelet.endpoint(Root(str(root))) is None


def test_nobody_else_s_process_is_taken_for_the_kubelet(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user can call a program so, and have it say any socket."""
    process(root, "kubelet", f"{FLAG}={CRIO}")
    before = kubelet.endpoint(Root(str(root)))
    if os.geteuid() == 0:
        os.chown(root / "proc/4711", 4711, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4712)

    assert before is not None
    assert kubelet.endpoint(Root(str(root))) is None


def test_a_title_that_fills_its_place_is_read_to_its_end(root: Path) -> None:
    """The kernel ends the arguments with a zero only if the process has left room for one."""
    put(root, "proc/4711/cmdline", f"kubelet\0{FLAG}={CRIO}")

    assert kubelet.endpoint(Root(str(root))) == kubelet.Endpoint(CRIO, "command line of process 4711")


def test_a_drop_in_outweighs_the_configuration(root: Path) -> None:
    """The last file of ``--config-dir`` by name."""
    process(root, "kubelet", "--config=/etc/k.yaml", "--config-dir=/etc/k.d")
    put(root, "etc/k.yaml", "containerRuntimeEndpoint: unix:///a\n")
    put(root, "etc/k.d/20.conf", f"containerRuntimeEndpoint: unix://{CRIO}\n")
    put(root, "etc/k.d/10.conf", "containerRuntimeEndpoint: unix:///b\n")
    put(root, "etc/k.d/30.yaml", "containerRuntimeEndpoint: unix:///c\n")

    assert kubelet.endpoint(Root(str(root))) == kubelet.Endpoint(CRIO, "/etc/k.d/20.conf")


@pytest.mark.parametrize(
    ("flags", "config", "instance", "expected"),
    [
        (f'KUBELET_KUBEADM_ARGS="--x=\'a b\' {FLAG}=unix://{CRIO} --y"\n', "", "", FLAGS),
        ("", f"containerRuntimeEndpoint: unix://{CRIO}\n", "", CONFIG),
        ("KUBELET_KUBEADM_ARGS=''\n", f"containerRuntimeEndpoint: {CRIO}\n", "", CONFIG),
        ("", "containerRuntimeEndpoint: unix:///x\n", f"containerRuntimeEndpoint: {CRIO}\n",
         "var/lib/kubelet/instance-config.yaml"),
    ],
    ids=["flags", "config", "empty-flags", "instance"],
)  # fmt: skip
def test_kubeadm_s_files_tell_of_a_kubelet_that_is_down(
    root: Path, flags: str, config: str, instance: str, expected: str
) -> None:
    """Flags before configuration, the instance's before the cluster's."""
    put(root, FLAGS, flags)
    put(root, CONFIG, config)
    put(root, "var/lib/kubelet/instance-config.yaml", instance)

    assert kubelet.endpoint(Root(str(root))) == kubelet.Endpoint(CRIO, f"/{expected}")


@pytest.mark.parametrize(
    ("words", "settings", "expected"),
    [
        (("/usr/local/bin/k3s server",), "", "/run/k3s/containerd/containerd.sock"),
        (("/usr/local/bin/k3s agent",), "", "/run/k3s/containerd/containerd.sock"),
        (("k3s", "server", f"--container-runtime-endpoint={CRIO}"), "", CRIO),
        (("/usr/local/bin/k3s server",), f"container-runtime-endpoint: {CRIO}\n", CRIO),
        (("/usr/local/bin/k3s", "kubectl", "logs"), "", None),
    ],
    ids=["server", "agent", "flag", "settings", "client"],
)
def test_k3s_holds_a_kubelet(root: Path, words: tuple[str, ...], settings: str, expected: str | None) -> None:
    """It uses its own containerd unless it is told otherwise."""
    put(root, "run/k3s/containerd/containerd.sock", "")
    put(root, "etc/rancher/k3s/config.yaml", settings)
    process(root, *words)

    found = kubelet.endpoint(Root(str(root)))

    assert (found.path if found else None) == expected


@pytest.mark.parametrize(
    "text",
    [
        "containerRuntimeEndpoint: [",
        "containerRuntimeEndpoint: \0",
        "containerRuntimeEndpoint: " + "[" * 3000,
    ],
    ids=["syntax", "control", "depth"],
)
def test_a_broken_file_is_a_problem_of_the_host(look, root: Path, text: str) -> None:
    """It is named, and nothing is claimed of the kubelet."""
    put(root, CONFIG, text)

    host = look()

    assert [problem.startswith(f"HST105: /{CONFIG} is not YAML") for problem in host.problems] == [True]


@pytest.mark.parametrize("text", ["- containerRuntimeEndpoint\n", "containerRuntimeEndpoint: 7\n", "tcp://x"])
def test_a_value_of_another_shape_is_no_endpoint(root: Path, text: str) -> None:
    """Lists, numbers and other addresses say nothing."""
    put(root, CONFIG, text)

    assert kubelet.endpoint(Root(str(root))) is None


def test_the_file_is_not_read_without_end(root: Path) -> None:
    """YAML is slow; a kubelet's file is short."""
    put(root, CONFIG, "#" * (1 << 19))

    with pytest.raises(HostError, match=r"HST105: .*is larger than 262144 bytes"):
        kubelet.endpoint(Root(str(root)))


def test_one_runtime_is_the_kubelet_s(look, root: Path, data: Path) -> None:
    """The others are known not to be; two names of one socket are one."""
    process(root, "kubelet", f"--container-runtime-endpoint=unix://{CRIO}")
    with (
        fake_crio.crio(root / "run/crio/crio.sock", data, variant="nri-off"),
        fake_crio.containerd(root / CONTAINERD[1:], data, "1.7.24", "nri-off"),
    ):
        runtimes = {runtime.key: runtime for runtime in look().runtimes}

    assert runtimes["cri-o"].get("kubelet") is True
    assert runtimes["containerd"].get("kubelet") is False
    assert runtimes["cri-o"].facts["kubelet"].source == f"command line of process 4711: {CRIO}"


def test_cri_dockerd_is_docker_to_the_kubelet(look, root: Path) -> None:
    """Docker serves no CRI itself."""
    process(root, "kubelet", "--container-runtime-endpoint=unix:///var/run/cri-dockerd.sock")
    http = {"/version": b'{"Version": "28.5.1", "ApiVersion": "1.51"}', "/info": b"{}"}
    with fake_crio.FakeRuntime(root / "run/docker.sock", {}, http):
        (runtime,) = look().runtimes

    assert runtime.get("kubelet") is True
