"""runc and crun by hand: OCI bundles in namespaces with a cgroup layout of one's choice.

It must not know what stands before the runtime.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import image
from .containerd import crun_of, runc_of
from .namespaces import Namespaces
from .packages import Packages

Source = tuple[Callable[[Packages, str], Path], str]
"""How the program of a low-level runtime is found, and the suite that has the version."""

RUNTIMES: dict[str, Source] = {
    "runc-1.1": (runc_of, "bookworm"),
    "runc-1.3": (runc_of, "sid"),
    "crun-1.8": (crun_of, "bookworm"),
    "crun-1.28": (crun_of, "sid"),
}
"""The low-level runtimes of the tests."""

_LAYOUTS = {
    # crun 1.8 refuses the two side by side.
    "v1": "umount /sys/fs/cgroup/unified 2>/dev/null || :",
    "v2": "mount -t cgroup2 cdi-bundles /sys/fs/cgroup",
}


def find(packages: Packages, name: str) -> Path:
    """The program of one of `RUNTIMES`. Raises PackageError."""
    program_of, suite = RUNTIMES[name]
    return program_of(packages, suite)


class BundleHost(Namespaces):
    """The namespaces, and what is in their folder. layout: of cgroups, v1 or v2."""

    def __init__(self, packages: Packages, layout: str) -> None:
        super().__init__("cdi-bundles-", _LAYOUTS[layout])
        self._busybox = image.busybox(packages)

    def _prepare(self) -> None:
        image.unpack(self._busybox, self.root / "rootfs")

    def run(
        self, *argv: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program there. cwd: `root`, if not told. env: all of its environment."""
        return self._enter(argv, cwd=cwd, env=env)

    def bundle(
        self, script: str | Sequence[str], annotations: Mapping[str, str], folder: Path | None = None
    ) -> Path:
        """A bundle whose container runs a shell script; it may make device nodes, and open none but a few."""
        folder = folder or Path(tempfile.mkdtemp(dir=self.root, prefix="bundle-"))
        config = {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": ["sh", "-c", script],
                "env": ["PATH=/bin"],
                "cwd": "/",
                "capabilities": {kind: ["CAP_MKNOD"] for kind in ("bounding", "effective", "permitted")},
            },
            "root": {"path": str(self.root / "rootfs"), "readonly": True},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {
                    "destination": "/dev",
                    "type": "tmpfs",
                    "source": "tmpfs",
                    "options": ["nosuid", "mode=755"],
                },
                {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
            ],
            "annotations": dict(annotations),
            "linux": {
                "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")],
                "resources": {
                    "devices": [
                        {"allow": False, "access": "rwm"},
                        {"allow": True, "type": "c", "access": "m"},
                    ]
                },
            },
        }
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def mount_small(self, kib: int) -> Path:
        """A file system of so many KiB, inside; outside it is an empty folder."""
        folder = Path(tempfile.mkdtemp(dir=self.root, prefix="small-"))
        done = self.run("mount", "-t", "tmpfs", "-o", f"size={kib}k", "cdi-bundles", str(folder))
        assert done.returncode == 0, done.stderr
        return folder


def process_file(folder: Path, *args: str) -> Path:
    """What an engine writes for an ``exec``: a process of its own making."""
    number, name = tempfile.mkstemp(dir=folder, prefix="process-")
    document: dict[str, Any] = {"user": {"uid": 0, "gid": 0}, "args": args, "env": ["PATH=/bin"], "cwd": "/"}
    with os.fdopen(number, "w") as file:
        json.dump(document, file)
    return Path(name)
