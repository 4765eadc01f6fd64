"""A Debian 13 in use: containerd 1.7 from apt under systemd's cgroup driver, with the product's packages.

All that is done to such a host is done as an administrator does it: apt installs the packages, whose scripts
start the daemon's unit, and `install --apply` turns NRI on. It must not know what is tested on it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import debs, image
from .cri import CriClient, Pod
from .packages import Packages
from .scenario import ALL, DOMAIN, GRANTED_NAMESPACE, OPEN_FUSE, OPEN_KMSG, spec
from .vm import VM
from .waiting import wait_for

IMAGE = "/root/image.tar"
INSTALL = ("cdi-courier", "install", "--backend", "nri", "--runtime", "containerd", "--apply")
UNINSTALL = ("cdi-courier", "uninstall", "--runtime", "containerd", "--apply")
WRAP = ("cdi-courier", "install", "--backend", "oci_hook", "--runtime", "containerd", "--apply")
CONFIG = "/etc/containerd/config.toml"
SLICE = "tests.slice"  # of all pods
NODE = "/dev/courier0"

# What an administrator sets for Kubernetes, under the tables that Debian's file has.
_CONTAINERD = f"""\
version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    sandbox_image = "{image.NAME}"
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = true
  [plugins."io.containerd.internal.v1.opt"]
    path = "/var/lib/containerd/opt"
"""

# A machine this slow needs patience; two seconds are for real ones.
_SETTINGS = "[probe]\ntimeout = 30.0\n"
# Containers, and services' private folders, which have other names after each start.
_CHANGING = ("/var/lib/containerd", "/var/tmp")

_DEVICE = {"deviceNodes": [{"path": NODE, "hostPath": "/dev/kmsg", "type": "c", "major": 1, "minor": 11}]}


@dataclass(frozen=True)
class Served:
    """The machine with NRI turned on and the daemon running, and how it came to that.

    files: what was there before the packages, see `debs.files`. original: containerd's configuration file
    then. before, after: what `doctor --json` said of containerd. pids: containerd's, before and after the
    install.
    """

    vm: VM
    cri: CriClient
    files: dict[str, str]
    original: str
    before: dict[str, Any]
    after: dict[str, Any]
    pids: tuple[int, int]

    def pod(self, name: str, namespace: str = GRANTED_NAMESPACE) -> Pod:
        return self.cri.run_pod(name, namespace, annotations={DOMAIN: ALL})

    def shell(self, container: str, script: str) -> tuple[int, str]:
        rc, out, err = self.cri.exec_sync(container, ["sh", "-c", script])
        return rc, out + err

    def has_device(self, container: str) -> bool:
        """Whether the container may open the granted device, by its node and by number, and not another."""
        # One command: starting a program in a container takes a second here.
        tries = (f"exec 3>{NODE}", OPEN_KMSG, OPEN_FUSE)
        rc, out = self.shell(container, "; ".join(f"({command}) 2>&-; echo $?" for command in tries))
        node, granted, other = out.split()
        return (rc, node, granted, other != "0") == (0, "0", "0", True)

    def restore(self) -> None:
        """No pods, both daemons run."""
        self.vm.run(["systemctl", "start", "containerd", "cdi-courier"])
        for pod in self.cri.list_pods():
            self.cri.remove_pod(pod.id)

    def introductions(self) -> int:
        """How often containerd has introduced itself to the daemon since the machine started."""
        return self.vm.journal("cdi-courier").count("synchronized:")

    def wait_for_introduction(self, number: int) -> None:
        """Wait until containerd has done so this often."""
        wait_for(
            lambda: self.introductions() >= number,
            60,
            lambda: f"containerd and the daemon to meet\n{self.vm.journal('cdi-courier')}",
            pause=0.2,
        )


def machine(packages: Packages, root: Path, debian_packages: Path) -> VM:
    """The machine, not yet started: its archive offers the packages, nothing of them is there, NRI is off."""
    busybox = image.busybox(packages)

    def prepare(root: Path) -> None:
        debs.offer(root, debian_packages)
        image.build(busybox, root / IMAGE.lstrip("/"))
        files = {
            CONFIG: _CONTAINERD,
            "/etc/cdi-courier/conf.d/tests.toml": _SETTINGS,
            "/etc/cdi/test.json": json.dumps(spec(all=_DEVICE)),
        }
        for path, text in files.items():
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)

    return VM(packages, root, prepare=prepare)


def serve(vm: VM) -> Served:
    """Install by apt, turn NRI on; returns when containerd and the daemon know each other."""
    vm.run(["ctr", "-n", "k8s.io", "images", "import", IMAGE])
    files = present(vm)
    debs.apt(vm, "update")
    debs.apt(vm, "install", debs.CORE)
    vm.wait(debs.UNIT)
    before, pid = described(vm), main_pid(vm, "containerd")
    original = vm.run(["cat", CONFIG]).stdout
    install(vm)
    pids = (pid, main_pid(vm, "containerd"))
    cri = CriClient(vm.serve("/run/containerd/containerd.sock"), cgroup_parent=SLICE)
    served = Served(vm, cri, files, original, before, described(vm), pids)
    served.wait_for_introduction(1)
    return served


def install(vm: VM) -> None:
    """``cdi-courier install --backend nri --apply``. Raises VMFailure."""
    vm.run(INSTALL)


def present(vm: VM) -> dict[str, str]:
    """The files of the machine, but for what changes whatever is installed."""
    return debs.files(vm, *_CHANGING)


def described(vm: VM) -> dict[str, Any]:
    """containerd's entry in ``cdi-courier doctor --json``."""

    def runtimes() -> list[dict[str, Any]]:
        done = vm.run(["cdi-courier", "doctor", "--json"], check=False)
        found: list[dict[str, Any]] = json.loads(done.stdout)["runtimes"]
        return found

    (runtime,) = wait_for(runtimes, 120, "doctor to have time enough to find containerd")
    return runtime


def main_pid(machine: VM, unit: str) -> int:
    return int(machine.run(["systemctl", "show", "--property=MainPID", "--value", unit]).stdout)
