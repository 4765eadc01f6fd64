"""The product on a whole Debian 13: containerd 1.7 from apt, real systemd, its cgroup driver, all controllers.

One boot serves all of it, and the tests are few and broad, because everything in the machine takes ten times
as long. The machine is a host in use: NRI is turned on by `install --apply`, the daemon is a unit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import image, vm
from support.cri import CriClient, CriError, Pod
from support.packages import Packages, machine_suite
from support.product import install_product
from support.scenario import ALL, DOMAIN, GRANTED_NAMESPACE, OPEN_FUSE, OPEN_KMSG, spec
from support.vm import VM
from support.waiting import wait_for

from .conftest import need

pytestmark = pytest.mark.runtime

_REPOSITORY = Path(__file__).resolve().parents[2]
_UNIT = _REPOSITORY / "packaging/systemd/cdi-courier.service"
_CONFIG = "/etc/containerd/config.toml"
_SLICE = "tests.slice"
_NODE = "/dev/courier0"

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

_DEVICE = {"deviceNodes": [{"path": _NODE, "hostPath": "/dev/kmsg", "type": "c", "major": 1, "minor": 11}]}


@dataclass(frozen=True)
class Served:
    """The machine with NRI turned on and the daemon running, and how it came to that.

    before, after: what `doctor --json` said of containerd. pids: containerd's, before and after the install.
    """

    vm: VM
    cri: CriClient
    before: dict[str, Any]
    after: dict[str, Any]
    pids: tuple[int, int]

    def pod(self, name: str, namespace: str = GRANTED_NAMESPACE) -> Pod:
        return self.cri.run_pod(name, namespace, annotations={DOMAIN: ALL})

    def shell(self, container: str, script: str) -> tuple[int, str]:
        rc, out, err = self.cri.exec_sync(container, ["sh", "-c", script])
        return rc, out + err

    def has_device(self, container: str) -> bool:
        """Whether the container may open the device's node, and what is not granted remains shut."""
        opened = self.shell(container, f"exec 3>{_NODE}")[0] == self.shell(container, OPEN_KMSG)[0] == 0
        return opened and self.shell(container, OPEN_FUSE)[0] != 0

    def courier_is_back(self, times: int) -> bool:
        """Whether containerd has introduced itself to the daemon so many times in all."""
        return self.vm.journal("cdi-courier").count("synchronized:") >= times

    def introductions(self) -> int:
        return self.vm.journal("cdi-courier").count("synchronized:")


@pytest.fixture(scope="session")
def debian13(packages: Packages, trixie: Path) -> Iterator[VM]:
    """Debian 13 with containerd 1.7 under systemd's cgroup driver, an image, a device, and the product."""
    need(vm.unsuitable())
    busybox = packages.fetch("busybox-static", machine_suite()) / "bin/busybox"

    def prepare(root: Path) -> None:
        install_product(root)
        image.build(busybox, root / "root/image.tar")
        unit = _UNIT.read_text() if _UNIT.exists() else _MINIMAL_UNIT
        files = {
            _CONFIG: _CONTAINERD,
            "/etc/cdi/test.json": json.dumps(spec(all=_DEVICE)),
            "/etc/systemd/system/cdi-courier.service": unit,
        }
        for path, text in files.items():
            target = root / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)

    with VM(packages, trixie, prepare=prepare) as machine:
        machine.run(["ctr", "-n", "k8s.io", "images", "import", "/root/image.tar"])
        yield machine


@pytest.fixture(scope="session")
def served(debian13: VM) -> Iterator[Served]:
    """The machine after ``cdi-courier install --apply`` and ``systemctl enable --now cdi-courier``."""
    before, pid = described(debian13), main_pid(debian13, "containerd")
    debian13.run(
        ["cdi-courier", "install", "--backend", "nri", "--runtime", "containerd", "--apply", "--yes"]
    )
    pids = (pid, main_pid(debian13, "containerd"))
    debian13.run(["systemctl", "enable", "--now", "cdi-courier"])
    with CriClient(debian13.serve("/run/containerd/containerd.sock"), cgroup_parent=_SLICE) as cri:
        served = Served(debian13, cri, before, described(debian13), pids)
        wait_for(lambda: served.introductions(), 60, lambda: debian13.journal("cdi-courier"))
        yield served


@pytest.fixture
def clean(served: Served) -> Iterator[Served]:
    """`served`, whose pods are removed afterwards."""
    yield served
    for pod in served.cri.list_pods():
        served.cri.remove_pod(pod.id)


def described(machine: VM) -> dict[str, Any]:
    """containerd's entry in ``cdi-courier doctor --json``."""
    document = json.loads(machine.run(["cdi-courier", "doctor", "--json"], check=False).stdout)
    (runtime,) = document["runtimes"]
    entry: dict[str, Any] = runtime
    return entry


def main_pid(machine: VM, unit: str) -> int:
    return int(machine.run(["systemctl", "show", "--property=MainPID", "--value", unit]).stdout)


def test_debug(served: Served) -> None:
    print(json.dumps(served.before), json.dumps(served.after), served.pids)
    assert 0
