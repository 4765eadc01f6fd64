"""runc and crun by hand: OCI bundles in a mount namespace with a cgroup layout of one's choice.

A PID namespace ends everything that is left running. It must not know what stands before the runtime.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .packages import Packages
from .waiting import wait_for

RUNTIMES = {
    # name → the package, the suite that has this version
    "runc-1.1": ("runc", "bookworm"),
    "runc-1.3": ("runc", "sid"),
    "crun-1.8": ("crun", "bookworm"),
    "crun-1.28": ("crun", "sid"),
}

_TIMEOUT = 60.0
_STARTED = 10.0
_APPLETS = ("sh", "env", "ls", "cat", "sleep", "mount", "mknod", "id")

_LAYOUTS = {
    # crun 1.8 refuses the two side by side.
    "v1": "umount /sys/fs/cgroup/unified 2>/dev/null || :",
    "v2": "mount -t cgroup2 cdi-bundles /sys/fs/cgroup",
}
_SETUP = """\
set -eu
mount --make-rprivate /
{layout}
touch {root}/ready
# As the first process it inherits orphans; the shell buries whatever ends while it waits, sleep would not.
while :; do sleep 3600; done
"""


def find(packages: Packages, name: str) -> Path:
    """The program of one of `RUNTIMES`."""
    package, suite = RUNTIMES[name]
    root = packages.runnable(package, suite)
    return next(path for folder in ("sbin", "bin") if (path := root / "usr" / folder / package).exists())


class BundleHost:
    """The namespaces; a context manager.

    root: a folder for whatever a test needs, the same inside and outside. layout: of cgroups, v1 or v2.
    """

    def __init__(self, packages: Packages, layout: str) -> None:
        self._busybox = packages.fetch("busybox-static", "bookworm") / "bin/busybox"
        self._layout = _LAYOUTS[layout]
        self.root = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def __enter__(self) -> BundleHost:
        self.root = Path(tempfile.mkdtemp(prefix="cdi-bundles-"))
        rootfs = self.root / "rootfs"
        for name in ("bin", "dev", "proc", "sys", "tmp"):
            (rootfs / name).mkdir(parents=True)
        shutil.copy2(self._busybox, rootfs / "bin/busybox")
        for applet in _APPLETS:
            (rootfs / "bin" / applet).symlink_to("busybox")
        with (self.root / "setup.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"),
                    _SETUP.format(root=self.root, layout=self._layout),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        process = self._process
        wait_for(
            lambda: (self.root / "ready").exists() or process.poll() is not None, _STARTED, "the namespaces"
        )
        if not (self.root / "ready").exists():
            said = (self.root / "setup.log").read_text()
            self.__exit__(None, None, None)
            raise RuntimeError(f"the namespaces cannot be made: {said}")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self._pid = int(children[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()  # and with it, by --kill-child, the first process of the PID namespace
            self._process.wait()
            wait_for(lambda: not self._pid or not Path(f"/proc/{self._pid}").exists(), _STARTED, "its end")
        shutil.rmtree(self.root)

    def run(
        self, *argv: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program there. env: all of its environment."""
        return subprocess.run(
            [
                "nsenter",
                f"--target={self._pid}",
                "--mount",
                "--pid",
                f"--wdns={cwd or self.root}",
                "--",
                *argv,
            ],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"} if env is None else env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )

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

    def path(self, inside: Path) -> Path:
        """A path of the namespaces, from outside."""
        return Path(f"/proc/{self._pid}/root{inside}")


def process_file(folder: Path, *args: str, env: Sequence[str] = ("PATH=/bin",)) -> Path:
    """What an engine writes for an ``exec``: a process of its own making."""
    number, name = tempfile.mkstemp(dir=folder, prefix="process-")
    document: dict[str, Any] = {"user": {"uid": 0, "gid": 0}, "args": args, "env": env, "cwd": "/"}
    with os.fdopen(number, "w") as file:
        json.dump(document, file)
    return Path(name)
