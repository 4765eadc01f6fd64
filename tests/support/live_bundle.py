"""OCI bundles on real low-level runtimes, with a hook of one's own: what live injection is tested on.

A bundle is one static busybox in a root file system. It must not know what is injected.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from . import bundles, image
from .containerd import runc_of
from .packages import Packages

NAMESPACES = ("pid", "ipc", "uts", "mount")
TIMEOUT = 60.0

# crun refuses a machine that has both versions of cgroups. Bookworm's, on the second alone, sets a limit that
# takes a capability which not every machine gives.
_PRIVATE = "set -e; mount --make-rprivate /; "
_V1 = _PRIVATE + (
    "mount -t tmpfs cgroup /sys/fs/cgroup; "
    "for name in cpu cpuacct cpuset memory devices freezer blkio pids; do "
    "mkdir /sys/fs/cgroup/$name; mount -t cgroup -o $name cgroup /sys/fs/cgroup/$name; done; "
)
_V2 = _PRIVATE + "mount -t cgroup2 cgroup /sys/fs/cgroup; "


@dataclass(frozen=True)
class Runtime:
    """A low-level runtime. layout: a shell script that mounts the cgroups that it is run with, privately."""

    name: str
    binary: Path
    layout: str = ""


def runtime(packages: Packages, name: str) -> Runtime:
    """One of `bundles.RUNTIMES`. Raises PackageError."""
    program_of, suite = bundles.RUNTIMES[name]
    layout = "" if program_of is runc_of else _V1 if name == "crun-1.8" else _V2
    return Runtime(name, program_of(packages, suite), layout)


def make_rootfs(folder: Path, packages: Packages) -> Path:
    """A root file system with busybox and a few empty folders."""
    image.unpack(image.busybox(packages), folder)
    shutil.rmtree(folder / "etc")
    for name in ("etc", "opt"):
        (folder / name).mkdir()
    return folder


def config(
    command: Sequence[str],
    *,
    annotations: Mapping[str, str],
    hooks: Mapping[str, Any],
    namespaces: Sequence[str] = NAMESPACES,
    read_only: bool = False,
    mounts: Sequence[Mapping[str, Any]] | None = None,
    user: Mapping[str, int] | None = None,
    env: Sequence[str] = ("PATH=/bin",),
) -> dict[str, Any]:
    """An OCI config. mounts: instead of the usual proc, /dev and /dev/pts. user: of the process."""
    usual = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {
            "destination": "/dev",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
        },
    ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": dict(user or {"uid": 0, "gid": 0}),
            "args": list(command),
            "env": list(env),
            "cwd": "/",
            "capabilities": {
                kind: ["CAP_MKNOD", "CAP_DAC_OVERRIDE", "CAP_SYS_ADMIN"]
                for kind in ("bounding", "effective", "permitted")
            },
        },
        "root": {"path": "rootfs", "readonly": read_only},
        "mounts": usual if mounts is None else list(mounts),
        "annotations": dict(annotations),
        "hooks": dict(hooks),
        "linux": {
            "namespaces": [{"type": name} for name in namespaces],
            "resources": {"devices": [{"allow": True, "access": "rwm"}]},
        },
    }


@dataclass
class Bundle:
    """A bundle in a folder, and the container that a runtime makes of it; taken away at the end."""

    runtime: Runtime
    folder: Path
    config: dict[str, Any]
    id: str = field(default_factory=lambda: f"cdi-{uuid.uuid4().hex[:12]}")

    def __enter__(self) -> Bundle:
        self.write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call("delete", "--force", self.id)
        # What runc leaves on the host for a container without a mount namespace.
        subprocess.run(["umount", self.folder / "rootfs"], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(self.state, ignore_errors=True)

    @property
    def state(self) -> Path:
        """The runtime's own folder."""
        return self.folder / "state"

    def write(self) -> None:
        """Write the config."""
        (self.folder / "config.json").write_text(json.dumps(self.config))

    def call(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Call the runtime."""
        # Both may go to a file: a runtime waits for its hooks' output, and this must not for its containers'.
        own = f'exec {self.runtime.binary} --root {self.state} "$@"'
        enter = ["unshare", "--mount"] if self.runtime.layout else []
        with (self.folder / "output").open("w+") as output:
            done = subprocess.run(
                [*enter, "sh", "-c", self.runtime.layout + own, "sh", *arguments],
                cwd=cwd or self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT,
                check=False,
                env={"PATH": os.environ["PATH"]},
            )
            output.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, output.read(), "")

    def run(self) -> subprocess.CompletedProcess[str]:
        """Create, start and delete the container; what it and the runtime printed."""
        return self.call("run", "--bundle", str(self.folder), self.id)


# Root of a user namespace has its rights only if it is root before it becomes another program.
_UNSHARE = """
import ctypes, os, sys
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
if ctypes.CDLL(None).unshare(CLONE_NEWNS | CLONE_NEWUSER):
    sys.exit("unshare failed")
print("unshared", flush=True)
sys.stdin.readline()
os.setgroups([]), os.setgid(0), os.setuid(0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Paused:
    """A mount namespace as a runtime leaves it when it runs createRuntime hooks: the root is mounted.

    owner: whom root of a user namespace of its own is outside; 0 for none.
    """

    def __init__(self, rootfs: Path, owner: int = 0) -> None:
        self.rootfs = rootfs
        setup = (
            f"mount --make-rprivate / && mount --bind {rootfs} {rootfs} && "
            f"mount -t tmpfs -o mode=755 tmpfs {rootfs}/dev && echo ready && exec sleep 600"
        )
        unshare = [sys.executable, "-c", _UNSHARE] if owner else ["unshare", "--mount"]
        self.process = subprocess.Popen(
            [*unshare, "sh", "-c", setup], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if owner:
            assert self.process.stdout.readline() == b"unshared\n"
            for kind in ("uid", "gid"):
                Path(f"/proc/{self.process.pid}/{kind}_map").write_text(f"0 {owner} 65536")
            self.process.stdin.write(b"mapped\n")
        self.process.stdin.close()
        assert self.process.stdout.readline() == b"ready\n"

    def end(self) -> None:
        """End its process, and with it the namespace."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def mounts(self) -> list[str]:
        """The lines of its mountinfo that are about the root and what is below it."""
        lines = Path(f"/proc/{self.process.pid}/mountinfo").read_text().splitlines()
        return [line for line in lines if line.split()[4].startswith(str(self.rootfs))]

    def inner(self, path: str) -> Path:
        """A path inside, from here. A link in it leads outside."""
        return Path(f"/proc/{self.process.pid}/root{self.rootfs}{path}")
