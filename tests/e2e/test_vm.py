"""The product on a whole Debian 13: containerd 1.7 from apt, systemd as cgroup driver, all controllers.

One boot serves all of it, and the tests are few and broad, because everything in the machine takes ten times
as long. The machine is a host in use: apt has installed the packages, `install --apply` has turned NRI on.
"""

from __future__ import annotations

import pytest
from support import debs
from support.cri import CriError
from support.debian13 import (
    CONFIG,
    INSTALL,
    SLICE,
    UNINSTALL,
    WRAP,
    Served,
    described,
    install,
    main_pid,
    present,
)
from support.scenario import STATUS

pytestmark = pytest.mark.runtime


def test_the_machine_is_a_debian_13_with_controllers_and_systemds_cgroup_driver(host13: Served) -> None:
    """What the tests here stand on is what they say: nothing failed, pure cgroup v2, containerd 1.7."""
    release = host13.vm.run(["cat", "/etc/os-release"]).stdout
    controllers = host13.vm.run(["cat", "/sys/fs/cgroup/cgroup.controllers"]).stdout.split()
    facts = {name: fact["value"] for name, fact in host13.after["facts"].items()}

    assert "VERSION_CODENAME=trixie" in release
    assert host13.vm.state == "running"
    assert {"cpu", "memory", "pids"} <= set(controllers)
    assert facts["cgroup_driver"] == "systemd"
    assert facts["cgroup_version"] == 2
    assert host13.after["version"].startswith("1.7.")


def test_the_product_is_what_apt_installed(host13: Served) -> None:
    """All four packages are there as they were built, their unit is enabled and runs, and nothing failed."""
    names = (debs.CORE, *debs.BACKENDS)
    shown = host13.vm.run(["dpkg-query", "--show", "--showformat=${db:Status-Abbrev}", *names]).stdout
    enabled = host13.vm.run(["systemctl", "is-enabled", debs.UNIT]).stdout.strip()
    failed = host13.vm.run(["systemctl", "--failed", "--plain", "--no-legend"]).stdout

    assert shown.split() == ["ii"] * len(names)
    assert host13.vm.run(["dpkg", "--verify", *names]).stdout == ""
    assert (enabled, failed) == ("enabled", "")
    assert main_pid(host13.vm, debs.UNIT) != 0


def test_install_with_apply_turned_nri_on_by_a_restart(host13: Served) -> None:
    """Before, NRI was off and nothing served; after, another containerd process has it on and is served."""
    before, after = host13.before, host13.after

    assert before["facts"]["nri"]["value"] == "off"
    assert before["active"] is None
    assert before["recommended"] == "nri"
    assert after["facts"]["nri"]["value"] == "on"
    assert after["active"] == "nri"
    assert host13.pids[0] != host13.pids[1]


def test_doctor_calls_the_served_host_ready(host13: Served) -> None:
    """With NRI on, a daemon and a device, doctor has nothing to add."""
    done = host13.vm.run(["cdi-courier", "doctor"], check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_an_annotated_container_gets_its_device_in_a_scope_of_systemds(host13: Served) -> None:
    """The node opens, what was not granted stays shut, and systemd's scope was told of the device too."""
    container = host13.cri.run_container(host13.pod("asks"), "c1")
    scope = f"cri-containerd-{container}.scope"
    allowed = host13.vm.run(["systemctl", "show", "--property=DeviceAllow", scope]).stdout

    assert host13.has_device(container)
    assert "COURIER_ALL=yes" in host13.shell(container, "env")[1]
    assert "/dev/char/1:11" in allowed
    assert host13.vm.run(["systemctl", "show", "--property=Slice", "--value", scope]).stdout.strip() == SLICE


def test_a_container_that_may_not_ask_is_refused_and_one_that_does_not_is_untouched(host13: Served) -> None:
    """A pod in another namespace fails with the cause; one without annotation gets nothing of us."""
    stranger, plain = host13.pod("stranger", "default"), host13.cri.run_pod("plain", "default")
    with pytest.raises(CriError, match="POL001"):
        host13.cri.create_container(stranger, "c1")
    container = host13.cri.run_container(plain, "c1")

    assert STATUS not in host13.cri.runtime_spec(container).get("annotations", {})
    assert not host13.has_device(container)


def test_what_an_administrator_does_takes_no_device_away(host13: Served) -> None:
    """A container has its device after a reload, a re-execution, new limits and restarts as before."""
    container = host13.cri.run_container(host13.pod("asks"), "c1")
    scope = f"cri-containerd-{container}.scope"
    acts = (
        ["systemctl", "daemon-reload"],
        ["systemctl", "daemon-reexec"],
        ["systemctl", "set-property", "--runtime", scope, "TasksMax=50"],
        ["systemctl", "restart", "containerd"],
    )
    met = host13.introductions()
    kept = {}
    for argv in acts:
        host13.vm.run(argv)
        kept[argv[1]] = host13.has_device(container)

    assert kept == {"daemon-reload": True, "daemon-reexec": True, "set-property": True, "restart": True}
    host13.wait_for_introduction(met + 1)
    assert host13.has_device(host13.cri.run_container(host13.pod("next"), "c1"))


def test_a_daemon_that_is_killed_is_started_again(host13: Served) -> None:
    """systemd brings it back, what runs keeps its device, and new containers get theirs."""
    container = host13.cri.run_container(host13.pod("asked"), "c1")
    met, pid = host13.introductions(), main_pid(host13.vm, "cdi-courier")
    host13.vm.run(["systemctl", "kill", "--signal=KILL", "cdi-courier"])
    host13.wait_for_introduction(met + 1)

    assert main_pid(host13.vm, "cdi-courier") not in (0, pid)
    assert host13.has_device(container)
    assert host13.has_device(host13.cri.run_container(host13.pod("asks"), "c1"))


def test_a_stopped_daemon_ends_well_and_is_missed(host13: Served) -> None:
    """``systemctl stop`` is a clean end; meanwhile containers start without devices, as NRI has it."""
    host13.vm.run(["systemctl", "stop", "cdi-courier"])
    result = host13.vm.run(["systemctl", "show", "--property=Result", "--value", "cdi-courier"]).stdout
    container = host13.cri.run_container(host13.pod("asks"), "c1")
    without = host13.has_device(container)
    met = host13.introductions()
    host13.vm.run(["systemctl", "start", "cdi-courier"])
    host13.wait_for_introduction(met + 1)

    assert result.strip() == "success"
    assert not without


def test_uninstall_puts_the_runtime_back_and_install_may_be_repeated(host13: Served) -> None:
    """containerd's file is as it was to the byte and NRI off; installing again serves again."""
    installed = host13.vm.run(["cat", CONFIG]).stdout
    host13.vm.run(UNINSTALL)
    restored, off = host13.vm.run(["cat", CONFIG]).stdout, described(host13.vm)
    met = host13.introductions()
    install(host13.vm)
    host13.wait_for_introduction(met + 1)
    again = main_pid(host13.vm, "containerd")
    host13.vm.run(INSTALL)

    assert restored == host13.original
    assert off["facts"]["nri"]["value"] == "off"
    assert host13.vm.run(["cat", CONFIG]).stdout == installed != restored
    assert main_pid(host13.vm, "containerd") == again
    assert host13.has_device(host13.cri.run_container(host13.pod("asks"), "c1"))


def test_after_a_reboot_the_host_serves_again(host13: Served) -> None:
    """Nobody has to do anything: NRI is on, the daemon runs, a new container gets its device."""
    host13.vm.reboot()
    host13.wait_for_introduction(1)

    assert host13.vm.state == "running"
    assert host13.has_device(host13.cri.run_container(host13.pod("asks"), "c1"))


# The last test: it takes the product away.
def test_the_packages_go_and_leave_only_what_a_container_needs(debian13: Served) -> None:
    """A container keeps the wrapper that made it whatever is purged; without it every file is as before."""
    vm, cri = debian13.vm, debian13.cri
    gate = f"{debs.STATE}/bin/cdi-courier-containerd"
    names = (debs.CORE, *debs.BACKENDS)
    vm.run(UNINSTALL)
    vm.run(WRAP)
    pod = debian13.pod("wrapped")
    container = cri.run_container(pod, "c1")
    said, works = {}, {}
    for act in ("remove", "purge"):
        said[act] = debs.apt(vm, act, *names)
        works[act] = debian13.has_device(container)

    assert works == {"remove": True, "purge": True}
    for text in said.values():
        assert "installed into containerd (by backend oci_hook)" in text
        assert f"used by container {container}" in text
    assert vm.run(["test", "-x", gate], check=False).returncode == 0
    with pytest.raises(CriError, match="HOK011"):
        cri.run_container(debian13.pod("asks"), "c1")

    for each in cri.list_pods():
        cri.remove_pod(each.id)
    debs.apt(vm, "install", "--no-install-recommends", "cdi-courier-oci-hook")
    vm.wait(debs.UNIT)
    vm.run(UNINSTALL)
    restored = vm.run(["cat", CONFIG]).stdout
    last = debs.apt(vm, "purge", *names)
    found = present(vm)

    assert restored == debian13.original
    assert "kept" not in last
    assert set(found.items()) ^ set(debian13.files.items()) == set()
    assert vm.run(["systemctl", "list-units", "--all", "--no-legend", "cdi-courier*"]).stdout == ""
    assert vm.run(["test", "-e", "/run/cdi-courier"], check=False).returncode == 1
