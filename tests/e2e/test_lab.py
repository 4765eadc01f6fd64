"""The lab itself: real runtimes run as the other tests need them, and nothing of them stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import cni, containerd, host
from support.cri import RUNNING, USERNS_ROOT, CriError
from support.lab import NEWER, Lab, reap_stale
from support.packages import Packages, machine_suite
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

KIND = "lab.example/device"
SPEC = {
    "cdiVersion": "0.6.0",
    "kind": KIND,
    "devices": [
        {
            "name": "kmsg",
            "containerEdits": {
                "env": ["LAB_DEVICE=kmsg"],
                "deviceNodes": [
                    {
                        "path": "/dev/lab0",
                        "hostPath": "/dev/kmsg",
                        "type": "c",
                        "major": 1,
                        "minor": 11,
                        "permissions": "rw",
                    }
                ],
            },
        }
    ],
}
# A node of one's own making for the kernel's log, 1:11, which no container may open unless granted. Opened
# for writing only: reading it needs a capability too, and that refusal looks like the device cgroup's.
TRY_KMSG = "mknod /tmp/node c 1 11 && exec 3>/tmp/node"


def test_a_plain_pod_runs_on_containerd_2(lab: Lab) -> None:
    """The daemon is 2.1 or newer, a container runs, a command in it answers on both streams."""
    pod = lab.cri.run_pod("plain", "team-a", annotations={"example.com/key": "value"})
    container = lab.cri.run_container(pod, "c0", env={"GREETING": "hello"})

    version = lab.cri.version()
    result = lab.cri.exec_sync(container, ["sh", "-c", "echo $GREETING; echo no >&2; exit 3"])
    status = lab.cri.pod_status(pod).status

    assert version.runtime_name == "containerd"
    assert tuple(map(int, version.runtime_version.split(".")[:2])) >= (2, 1)
    assert result == (3, "hello\n", "no\n")
    assert [each.state for each in lab.cri.list_containers(pod)] == [RUNNING]
    assert (status.metadata.name, status.metadata.namespace) == ("plain", "team-a")
    assert dict(status.annotations) == {"example.com/key": "value"}


def test_a_device_that_was_not_granted_is_refused(lab: Lab) -> None:
    """A container can make a node for a device it was not given, but cannot open it."""
    pod = lab.cri.run_pod("plain")
    container = lab.cri.run_container(pod, "c0")

    result = lab.cri.exec_sync(container, ["sh", "-c", TRY_KMSG])

    assert result.rc != 0
    assert "Operation not permitted" in result.stderr
    assert "/tmp/node" in result.stderr


def test_a_device_named_over_cri_is_granted(lab: Lab) -> None:
    """The baseline: containerd resolves a CDI name of the request in the lab's directories."""
    lab.write_spec("lab.json", SPEC)
    pod = lab.cri.run_pod("granted")
    container = lab.cri.run_container(pod, "c0", cdi_devices=[f"{KIND}=kmsg"])

    result = lab.cri.exec_sync(
        container, ["sh", "-c", f"stat -c %t:%T /dev/lab0; echo $LAB_DEVICE; {TRY_KMSG}"]
    )

    assert result == (0, "1:b\nkmsg\n", "")


def test_an_unknown_device_is_refused_in_words(lab: Lab) -> None:
    """What the runtime says against a request reaches the caller as code and text."""
    pod = lab.cri.run_pod("refused")

    with pytest.raises(CriError, match=f"{KIND}=nothing") as caught:
        lab.cri.create_container(pod, "c0", cdi_devices=[f"{KIND}=nothing"])

    assert caught.value.method == "CreateContainer"
    assert caught.value.code != "DEADLINE_EXCEEDED"


def test_nri_is_on(lab: Lab) -> None:
    """Plugins find the lab's own NRI socket."""
    assert lab.nri_socket.is_socket()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_restart_keeps_pods_and_sockets(lab: Lab, how: str) -> None:
    """After a restart the same client, container and NRI socket serve on."""
    pod = lab.cri.run_pod("survivor")
    container = lab.cri.run_container(pod, "c0")

    getattr(lab.containerd, how)()
    lab.containerd.start()

    assert lab.cri.exec_sync(container, ["echo", "still here"]) == (0, "still here\n", "")
    assert lab.nri_socket.is_socket()


def test_a_failing_daemon_shows_its_log(packages: Packages) -> None:
    """A containerd that cannot start is reported with what it said last, and leaves nothing."""
    lab = Lab(packages=packages, extra_config="not toml")

    with pytest.raises(containerd.RuntimeFailure, match=r"(?s)ended at its start.*last lines of.*toml"), lab:
        pass

    assert lab.leftovers() == []


def test_nothing_is_left_when_a_lab_closes(packages: Packages) -> None:
    """Processes, mounts, cgroups, network namespaces, shim sockets and files go, also when pods still run."""
    with Lab(packages=packages) as lab:
        pod = lab.cri.run_pod("left", host_network=False)
        lab.cri.run_container(pod, "c0")
        during = lab.leftovers()
        sockets = containerd.shim_sockets(lab.containerd.root)

    assert {"process", "mount", "cgroup", "folder", "note"} <= {line.split()[0] for line in during}
    assert lab.leftovers() == []
    assert sockets
    assert not any(path.exists() for path in sockets)


def test_nothing_is_left_when_the_daemon_was_killed(packages: Packages) -> None:
    """The same without a daemon that could help."""
    with Lab(packages=packages) as lab:
        pod = lab.cri.run_pod("left", host_network=False)
        lab.cri.run_container(pod, "c0")
        sockets = containerd.shim_sockets(lab.containerd.root)
        lab.containerd.kill()

    assert lab.leftovers() == []
    assert sockets
    assert not any(path.exists() for path in sockets)


def test_a_killed_owner_s_lab_is_removed_by_the_next(packages: Packages) -> None:
    """Who is killed outright cannot clean up; the next lab on the machine does."""
    script = """
import sys
from support.lab import Lab
lab = Lab()
lab.start()
lab.cri.run_container(lab.cri.run_pod("orphan", host_network=False), "c0")
print(lab.root, flush=True)
sys.stdin.read()
"""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as owner:
        assert owner.stdout is not None
        root = Path(owner.stdout.readline().strip())
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert host.processes_of(root)
    sockets = containerd.shim_sockets(root / "c")

    reap_stale()

    assert not root.exists()
    assert host.processes_of(root) + host.mounts_below(root) + host.cgroups(f"/{root.name}") == []
    assert cni.notes_on(root) == []
    assert sockets
    assert not any(path.exists() for path in sockets)


def test_an_open_lab_does_not_start_twice(lab: Lab) -> None:
    """A second start would lose sight of what the first one made."""
    with pytest.raises(RuntimeError, match="open"):
        lab.start()


def test_a_courier_that_ends_is_reported_with_its_log(lab: Lab) -> None:
    """Waiting for a line stops at once, with the log's end, when the daemon has gone."""
    from support.courier import CourierFailure

    courier = lab.courier(args=["--no-such-option"])
    courier.start()

    with pytest.raises(CourierFailure, match=r"(?s)ended with status.*last lines of"):
        courier.wait_for_log("never said")


def test_containerd_1_7_runs_with_the_same_code(lab17: Lab) -> None:
    """Configuration version 2, NRI and CDI on: a pod runs, and only a granted device opens."""
    lab17.write_spec("lab.json", SPEC)
    pod = lab17.cri.run_pod("plain")
    plain = lab17.cri.run_container(pod, "plain")
    granted = lab17.cri.run_container(pod, "granted", cdi_devices=[f"{KIND}=kmsg"])

    assert lab17.cri.version().runtime_version.startswith("1.7.")
    assert lab17.nri_socket.is_socket()
    assert lab17.cri.exec_sync(plain, ["sh", "-c", TRY_KMSG]).rc != 0
    assert lab17.cri.exec_sync(granted, ["sh", "-c", TRY_KMSG]).rc == 0


def test_two_kinds_of_containerd_run_at_once(lab: Lab, lab17: Lab) -> None:
    """Each sees its own pods, and a container of one runs on when the other is killed."""
    pods = [each.cri.run_pod(name) for each, name in ((lab, "two"), (lab17, "one"))]
    container = lab.cri.run_container(pods[0], "c0")
    lab17.cri.run_container(pods[1], "c0")
    seen = [[pod.metadata.name for pod in each.cri.list_pods()] for each in (lab, lab17)]

    lab17.containerd.kill()

    assert seen == [["two"], ["one"]]
    assert lab.cri.exec_sync(container, ["echo", "hello"]) == (0, "hello\n", "")


@pytest.mark.parametrize("which", ["lab", "lab17"], ids=["2.1", "1.7"])
def test_a_pod_may_have_a_network_of_its_own(which: str, request: pytest.FixtureRequest) -> None:
    """It has an address for the runtime, and none of the host's interfaces."""
    lab: Lab = request.getfixturevalue(which)
    pod = lab.cri.run_pod("own", host_network=False)

    container = lab.cri.run_container(pod, "c0")

    assert lab.cri.pod_status(pod).status.network.ip == cni.ADDRESS
    assert lab.cri.exec_sync(container, ["ls", "/sys/class/net"]).stdout == "lo\n"


@pytest.mark.parametrize("which", ["lab", "lab17"], ids=["2.1", "1.7"])
def test_a_pod_may_have_a_user_namespace_of_its_own(which: str, request: pytest.FixtureRequest) -> None:
    """Its root is somebody else on the host, its files are its own, and a mount's are nobody's."""
    lab: Lab = request.getfixturevalue(which)
    file = lab.root / "of-the-host"
    file.touch()
    pod = lab.cri.run_pod("own", host_users=False, handler=NEWER)

    container = lab.cri.run_container(pod, "c0", mounts=[(file, "/mounted", True)])

    script = "cat /proc/self/uid_map; stat -c %u /bin/busybox /mounted"
    rc, out, err = lab.cri.exec_sync(container, ["sh", "-c", script])
    assert (rc, out.split(), err) == (0, ["0", str(USERNS_ROOT), "65536", "0", "65534"], "")
    assert lab.cri.runtime_spec(container)["linux"]["uidMappings"] == [
        {"containerID": 0, "hostID": USERNS_ROOT, "size": 65536}
    ]


def test_runc_of_a_newer_suite_runs_beside_the_machine_s(packages: Packages) -> None:
    """A handler's runc may need a newer C library than the machine has; annotations reach it."""
    newer = containerd.Handler(containerd.runc_of(packages, "sid"), pod_annotations=("lab.example/*",))
    with Lab(packages=packages, handlers={"newer": newer}) as lab:
        pod = lab.cri.run_pod(
            "newer", handler="newer", annotations={"lab.example/key": "value", "other": "no"}
        )
        container = lab.cri.run_container(pod, "c0")

        result = lab.cri.exec_sync(container, ["echo", "hello"])
        annotations = lab.cri.runtime_spec(container)["annotations"]

    assert result == (0, "hello\n", "")
    assert annotations["lab.example/key"] == "value"
    assert "other" not in annotations


def test_a_warm_cache_needs_no_network(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fetched once is found again without apt."""
    packages.fetch("runc", machine_suite())
    monkeypatch.setenv("PATH", "/nowhere")

    folder = Packages(packages.cache, refresh=False).fetch("runc", machine_suite())

    assert (folder / "usr/sbin/runc").is_file()


def test_waiting_names_what_it_waited_for() -> None:
    """A deadline that passes says for what."""
    from support.waiting import WaitTimeoutError

    with pytest.raises(WaitTimeoutError, match="for the sun"):
        wait_for(lambda: False, 0.01, "the sun")
