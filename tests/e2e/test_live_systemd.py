"""Under a real systemd a device that was granted to a live container outlives a daemon-reload."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support import rootfs
from support.box import Box
from support.containerd import crun_of
from support.oci import RUNTIMES, BoxHost, Container
from support.packages import Packages

pytestmark = pytest.mark.runtime

GRANTED = "1:11"  # kmsg, which anybody may open to write
OTHER = "10:237"  # loop-control
DENIED = "Operation not permitted"

# What each leaves behind differs: runc replaces systemd's filter and lists the devices in the unit; crun has
# filters on two cgroups; and from 1.23 on its one filter is pinned, and systemd attaches it.
MANAGED = {name: RUNTIMES[name] for name in ("runc 1.1", "runc 1.3", "crun 1.28")}
MANAGED["crun 1.21"] = (crun_of, "trixie")

ALLOW = """
from cdi_courier_oci_hook.live import cgroup, device_programs, systemd
{seam}
cgroup.allow({pid}, [("c", {major}, {minor}, "rw")], cgroups_path={path}, mode="enforce")
"""
# As before systemd was told anything.
UNTOLD = "systemd.declare = lambda *_: ()"


@pytest.fixture(scope="module")
def host(packages: Packages) -> Iterator[BoxHost]:
    """A box with the runtimes."""
    with Box(rootfs.root(packages, "bookworm", (*rootfs.SYSTEM, *rootfs.LIBRARIES))) as box:
        yield BoxHost(box, packages, MANAGED)


def script(pid: str, cgroups_path: str, device: str = GRANTED, seam: str = "") -> str:
    """What the hook does, as Python. pid, cgroups_path: expressions. seam: statements that go before."""
    major, _, minor = device.partition(":")
    return ALLOW.format(pid=pid, path=cgroups_path, major=major, minor=minor, seam=seam)


def allow(container: Container, device: str = GRANTED, seam: str = "") -> None:
    """Allow the device as the hook does."""
    container.host.python(script(str(container.pid), repr(container.cgroups_path), device, seam))


def devices(container: Container) -> list[str]:
    """What the granted device and the other one say when they are opened."""
    return [container.use(GRANTED, "w"), container.use(OTHER)]


@pytest.mark.parametrize("runtime", MANAGED)
def test_a_granted_device_outlives_what_systemd_does(host: BoxHost, runtime: str) -> None:
    """Granted at createRuntime, it stays usable and the other one refused, whatever systemd does."""
    read = "import json; state = json.load(sys.stdin)\n"
    hook = read + script("state['pid']", "'system.slice:cdi:' + state['id']")
    with host.container(runtime, hook=hook) as container:
        scope = f"cdi-{container.name}.scope"
        container.start()
        seen = [devices(container)]
        for command in ("daemon-reload", "daemon-reexec", f"set-property --runtime {scope} TasksMax=99"):
            host.run("systemctl", *command.split())
            seen.append(devices(container))

        assert seen == [["opened", DENIED]] * 4


@pytest.mark.parametrize("runtime", MANAGED)
def test_without_telling_systemd_a_reload_takes_the_device(host: BoxHost, runtime: str) -> None:
    """That is what the telling is for: the filter alone is written anew."""
    with host.container(runtime) as container:
        container.start()
        allow(container, seam=UNTOLD)
        before = devices(container)
        host.run("systemctl", "daemon-reload")

        assert (before, devices(container)) == (["opened", DENIED], [DENIED, DENIED])


@pytest.mark.parametrize("runtime", ["runc 1.1", "crun 1.28"])
def test_devices_that_are_granted_one_after_the_other_stay(host: BoxHost, runtime: str) -> None:
    """The second grant adds to the first in what systemd has too."""
    with host.container(runtime) as container:
        container.start()
        for device in (GRANTED, OTHER):
            allow(container, device)
        host.run("systemctl", "daemon-reload")

        assert devices(container) == ["opened", "opened"]


def test_the_unit_lists_the_device_once(host: BoxHost) -> None:
    """Allowing again adds nothing to the unit, and what runc listed is still there."""
    with host.container("runc 1.1") as container:
        show = ["systemctl", "show", "--property=DeviceAllow", f"cdi-{container.name}.scope"]
        before = host.run(*show).stdout.splitlines()
        allow(container)
        allow(container)
        after = host.run(*show).stdout.splitlines()

        assert sorted(after) == sorted([*before, "DeviceAllow=/dev/char/1:11 rw"])


def test_a_scope_without_a_runtimes_own_filter_is_left_to_systemd(host: BoxHost) -> None:
    """Where systemd's filter is the only one, it says yes once systemd was told, and is not replaced."""
    unit = ["--scope", "--unit=plain", "--property=DevicePolicy=strict"]
    host.run(
        "sh", "-c", f"mknod /dev/granted c 1 11; systemd-run {' '.join(unit)} sleep 600 >/dev/null 2>&1 &"
    )
    pid = host.run("sh", "-c", "until pid=$(pidof sleep); do :; done; echo $pid").stdout.strip()
    folder = "/sys/fs/cgroup/system.slice/plain.scope"
    probe = f"echo 0 > {folder}/cgroup.procs; exec 3>>/dev/granted && echo opened"
    before = host.run("sh", "-c", probe, check=False).stdout
    seam = "device_programs.bpf.attach = None"
    host.python(script(pid, "'system.slice::plain'", seam=seam))
    after = host.run("sh", "-c", probe).stdout
    host.run("systemctl", "stop", "plain.scope")

    assert (before, after) == ("", "opened\n")


def test_systemd_answers_every_time(host: BoxHost) -> None:
    """Three hundred connections in a row, each of which calls as soon as it may."""
    many = """
from cdi_courier_oci_hook.live import systemd
import time
answers = 0
for _ in range(300):
    connection = systemd._connect("/", time.monotonic() + 60)
    answers += bool(systemd._get(connection, systemd._OBJECT, "org.freedesktop.systemd1.Manager", "Version"))
    connection.close()
print(answers)
"""
    assert host.python(many).stdout == "300\n"


def test_the_bus_serves_where_the_managers_socket_does_not(host: BoxHost) -> None:
    """Over the bus daemon, with its greeting and its signals, the unit is told as well."""
    with host.container("runc 1.3") as container:
        allow(container, seam="systemd._SOCKETS = systemd._SOCKETS[1:]")
        shown = host.run("systemctl", "show", "--property=DeviceAllow", f"cdi-{container.name}.scope").stdout

        assert re.search(r"^DeviceAllow=/dev/char/1:11 rw$", shown, re.MULTILINE)
