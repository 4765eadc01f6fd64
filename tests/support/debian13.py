"""A Debian 13 in use: containerd 1.7 from apt under systemd's cgroup driver, with the product installed.

What `cdi-courier` does to such a host is done to it by its own commands: NRI turned on by `install --apply`,
the daemon run as a unit. It must not know what is tested on it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import image
from .cri import CriClient, Pod
from .packages import Packages, machine_suite
from .product import install_product
from .scenario import ALL, DOMAIN, GRANTED_NAMESPACE, OPEN_FUSE, OPEN_KMSG, spec
from .vm import VM, VMFailure
from .waiting import wait_for

IMAGE = "/root/image.tar"
INSTALL = ("cdi-courier", "install", "--backend", "nri", "--runtime", "containerd", "--apply")
UNINSTALL = ("cdi-courier", "uninstall", "--runtime", "containerd", "--apply")
CONFIG = "/etc/containerd/config.toml"
SLICE = "tests.slice"  # of all pods
NODE = "/dev/courier0"

_UNIT = Path(__file__).resolve().parents[2] / "packaging/systemd/cdi-courier.service"

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

_MINIMAL_UNIT = """\
[Unit]
Description=CDI devices by annotation
[Service]
ExecStart=/usr/bin/cdi-courier run
Restart=always
[Install]
WantedBy=multi-user.target
"""

# A machine this slow needs patience; two seconds are for real ones.
_SETTINGS = "[probe]\ntimeout = 30.0\n"

_DEVICE = {"deviceNodes": [{"path": NODE, "hostPath": "/dev/kmsg", "type": "c", "major": 1, "minor": 11}]}


@dataclass(frozen=True)
class Served:
    """The machine with NRI turned on and the daemon running, and how it came to that.

    original: containerd's configuration file before. before, after: what `doctor --json` said of containerd.
    pids: containerd's, before and after the install.
    """

    vm: VM
    cri: CriClient
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


def machine(packages: Packages, root: Path) -> VM:
    """The machine, not yet started: everything is there, nothing of the product runs, NRI is off."""
    busybox = packages.fetch("busybox-static", machine_suite()) / "bin/busybox"

    def prepare(root: Path) -> None:
        install_product(root)
        image.build(busybox, root / IMAGE.lstrip("/"))
        files = {
            CONFIG: _CONTAINERD,
            "/etc/cdi-courier/config.toml": _SETTINGS,
            "/etc/cdi/test.json": json.dumps(spec(all=_DEVICE)),
            "/etc/systemd/system/cdi-courier.service": _UNIT.read_text() if _UNIT.exists() else _MINIMAL_UNIT,
        }
        for path, text in files.items():
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)

    return VM(packages, root, prepare=prepare)


def serve(vm: VM) -> Served:
    """Import the image, install, start the daemon; returns when containerd and the daemon know each other."""
    vm.run(["ctr", "-n", "k8s.io", "images", "import", IMAGE])
    before, pid = described(vm), main_pid(vm, "containerd")
    original = vm.run(["cat", CONFIG]).stdout
    install(vm)
    pids = (pid, main_pid(vm, "containerd"))
    vm.run(["systemctl", "enable", "--now", "cdi-courier"])
    cri = CriClient(vm.serve("/run/containerd/containerd.sock"), cgroup_parent=SLICE)
    served = Served(vm, cri, original, before, described(vm), pids)
    served.wait_for_introduction(1)
    return served


def install(vm: VM) -> None:
    """``cdi-courier install --backend nri --apply``. Raises VMFailure."""
    done = vm.run(INSTALL, check=False)
    if done.returncode:
        raise VMFailure(f"{' '.join(INSTALL)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


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
