"""A generated spec on a real runtime: a whole host in a folder, and a container of runc on that host.

The host's GPU nodes have the numbers of harmless devices, so that "the device works" can be tried.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import image
from support.containerd import runc_of
from support.fake_host import FakeHost
from support.packages import Packages, default_cache

pytestmark = pytest.mark.runtime

VERSION = "550.54.15"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
NAME = "management.nvidia.com/gpu=all"

# Whatever is left running, or mounted, ends with the box.
BOX = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")
# What runc needs of a host: the kernel's file systems, and its own files.
BOOT = """
set -e
mount --bind "$1" "$1"
cd "$1"
mount -t proc proc proc
mount --rbind /sys sys
mount -t tmpfs tmpfs run/runc
mount --bind "$2" ".$2"
exec chroot . "$3" --root /run/runc run --bundle /bundle --no-new-keyring "$4"
"""

LOOK = f"""
stat -c '%n %t:%T %a %g' /dev/nvidia0 /dev/nvidiactl
(: > /dev/nvidia0) && echo opened
head -c 2 /dev/nvidiactl | od -An -tx1
mknod /tmp/other c 99 1
(: > /tmp/other) 2>&1 | sed 's/.*: //'
ls {LIBRARIES}
cmp {LIBRARIES}/libcuda.so.1 {LIBRARIES}/libcuda.so.{VERSION} && echo same
touch {LIBRARIES}/libcuda.so.1 2> /dev/null || echo read-only
nvidia-smi
echo $NVIDIA_VISIBLE_DEVICES
test -S /run/nvidia-persistenced/socket && echo socket
id -G
"""


def test_a_container_gets_the_driver_of_its_host(packages: Packages, tmp_path: Path) -> None:
    """Nodes work, libraries, programs and sockets are in place and read-only, no other device is let in."""
    runc = runc_of(packages, "sid")
    host = FakeHost(tmp_path / "host")
    host.node("/dev/null", 1, 3)
    # The kernel's log, because runc lets every container have null and zero.
    host.node("/dev/nvidia0", 1, 11, mode=0o660, gid=44)
    host.node("/dev/nvidiactl", 1, 5)
    host.node("/dev/nvidia-uvm", 1, 5)
    host.driver(VERSION)
    host.file("/usr/bin/nvidia-smi", b"#!/bin/sh\necho a GPU\n", 0o755)
    host.socket("/run/nvidia-persistenced/socket")
    host.link("/var/run", "../run")
    for folder in ("proc", "sys", "run/runc", "tmp", str(default_cache()).lstrip("/")):
        host.at(folder).mkdir(parents=True, exist_ok=True)
    image.unpack(image.busybox(packages), host.at("/bundle/rootfs"))
    for folder in ("run", "var"):
        host.at(f"/bundle/rootfs/{folder}").mkdir()
    host.link("/bundle/rootfs/var/run", "../run")

    specs = tmp_path / "cdi" / "gpu.yaml"
    courier("generate", "nvidia", "--root", host.root, "--output", specs)
    subprocess.run([runc, "spec", "--bundle", host.at("/bundle")], check=True, timeout=20)
    path = host.at("/bundle/config.json")
    config = json.loads(path.read_text())
    config["process"] |= {"terminal": False, "args": ["/bin/sh", "-c", LOOK]}
    config["process"]["env"] = ["PATH=/bin:/usr/bin"]
    config["process"].pop("rlimits", None)
    for kind in config["process"]["capabilities"]:
        config["process"]["capabilities"][kind].append("CAP_MKNOD")
    config["root"]["readonly"] = False
    name = f"generate-{tmp_path.name}"
    config["linux"]["cgroupsPath"] = f"/cdi-courier-{name}"
    path.write_text(json.dumps(config))
    settings = tmp_path / "config.toml"
    settings.write_text('[cdi]\ntrust = "any"\n')
    options = ("--spec-dir", specs.parent, "--device", NAME)
    path.write_text(courier("--config", settings, "apply", *options, path))

    done = subprocess.run(
        [*BOX, "sh", "-c", BOOT, "boot", host.root, default_cache(), runc, name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "/dev/nvidia0 1:b 660 44",
        "/dev/nvidiactl 1:5 666 0",
        "opened",
        " 00 00",
        # The device cgroup's word; that there is no such device would be said after it.
        "Operation not permitted",
        *(f"{stem}.so.{suffix}" for stem in ("libcuda", "libnvidia-ml") for suffix in ("1", VERSION)),
        "same",
        "read-only",
        "a GPU",
        "void",
        "socket",
        "0 44",
    ]


def courier(*arguments: str | Path) -> str:
    """Run the command; what it prints."""
    return subprocess.run(
        [sys.executable, "-m", "cdi_courier", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=20,
        check=True,
    ).stdout
