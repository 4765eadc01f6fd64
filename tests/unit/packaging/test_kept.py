"""The package scripts, which may have no Python, look where the product looks for whoever needs a wrapper."""

from fnmatch import fnmatch
from pathlib import Path

import pytest
from cdi_courier.host import containerd_files, gate_users

SCRIPT = (Path(__file__).parents[3] / "packaging/kept.sh").read_text()


def words_of_loop(variable: str) -> set[str]:
    """What the script's one ``for`` loop over this variable goes through."""
    _, _, behind = SCRIPT.partition(f"for {variable} in ")
    words, _, _ = behind.partition("; do")
    return set(words.replace("\\\n", " ").split())


def test_the_scripts_know_the_same_state_folders_of_containerd() -> None:
    """A distribution of containerd that one of the two knows is known to the other."""
    assert words_of_loop("state") == set(gate_users._CONTAINERD_STATES)


def test_the_scripts_know_where_shims_keep_their_bundles() -> None:
    """Below a state folder both look into the same one."""
    assert f"\ntasks={gate_users._TASKS.strip('/')}\n" in SCRIPT.replace("    ", "")


@pytest.mark.parametrize(
    "path",
    [
        containerd_files._MAIN,
        gate_users._DOCKER_CONFIG,
        gate_users._CRIO_CONFIG,
        f"{gate_users._CRIO_DROP_INS}/50-theirs.conf",
        "/var/lib/rancher/rke2/agent/etc/containerd/config-v3.toml.tmpl",
        "/etc/k0s/containerd.d/wrapper.toml",
        "/var/snap/microk8s/current/args/containerd-template.toml",
    ],
)
def test_the_scripts_read_every_file_that_may_name_a_wrapper(path: str) -> None:
    """What an installation writes into, and what a person is told to write into, keeps the wrapper."""
    assert any(fnmatch(path, pattern) for pattern in words_of_loop("file"))
