"""OCI bundles on real low-level runtimes, with a hook of one's own: what live injection is tested on.

A bundle is one static busybox in a root file system. It must not know what is injected.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from .containerd import crun_of, runc_of
from .packages import Packages

APPLETS = ("sh", "sleep", "cat", "ls", "stat", "mount", "grep", "test", "id", "readlink", "env", "mknod")
NAMESPACES = ("pid", "ipc", "uts", "mount")
TIMEOUT = 60.0

SUITES = {"runc-1.1": ("runc", "bookworm"), "runc-1.3": ("runc", "sid")} | {
    "crun-1.8": ("crun", "bookworm"),
    "crun-1.28": ("crun", "sid"),
}
"""Name of a runtime → package and Debian suite."""

# crun of bookworm refuses a machine that has both versions of cgroups.
_PURE_V2 = "mount --make-rprivate / && mount -t cgroup2 cdi-courier /sys/fs/cgroup && "


@dataclass(frozen=True)
class Runtime:
    """A low-level runtime. pure_v2: whether it is run where there is only the second version of cgroups."""

    name: str
    binary: Path
    pure_v2: bool = False


def runtime(packages: Packages, name: str) -> Runtime:
    """One of `SUITES`. Raises PackageError."""
    kind, suite = SUITES[name]
    binary = runc_of(packages, suite) if kind == "runc" else crun_of(packages, suite)
    return Runtime(name, binary, pure_v2=kind == "crun")


def make_rootfs(folder: Path, packages: Packages) -> Path:
    """A root file system with busybox and a few folders."""
    busybox = packages.fetch("busybox-static", "bookworm") / "bin/busybox"
    (folder / "bin").mkdir(parents=True)
    shutil.copy2(busybox, folder / "bin/busybox")
    for applet in APPLETS:
        (folder / "bin" / applet).symlink_to("busybox")
    for name in ("dev", "proc", "sys", "etc", "opt", "tmp"):
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
        setup = _PURE_V2 if self.runtime.pure_v2 else ""
        enter = ["unshare", "--mount"] if self.runtime.pure_v2 else []
        with (self.folder / "output").open("w+") as output:
            done = subprocess.run(
                [*enter, "sh", "-c", setup + own, "sh", *arguments],
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
