"""Containers made by hand with an OCI runtime, on a host of one cgroup layout or on one with systemd.

`OciHost` is a mount namespace with cgroups of version 1 alone, version 2 alone, or both side by side;
`BoxHost` is a box. It must not know what is done to the containers.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cdi_courier
import cdi_courier_oci_hook

from . import bundles, image
from .box import Box
from .namespaces import Namespaces
from .packages import Packages

RUNTIMES = {name.replace("-", " "): entry for name, entry in bundles.RUNTIMES.items()}
"""`bundles.RUNTIMES`, by names for people."""

LAYOUTS = ("v1", "v2", "hybrid")

_SOURCES = [str(Path(str(module.__file__)).parents[1]) for module in (cdi_courier, cdi_courier_oci_hook)]
_INTERPRETER = os.path.realpath(getattr(sys, "_base_executable", sys.executable))

_SETUP = """\
case {layout} in
v2) mount -t cgroup2 cgroup2 /sys/fs/cgroup ;;
*)
    mount -t tmpfs -o mode=0755 cgroup /sys/fs/cgroup
    for name in cpu cpuacct cpuset memory devices freezer blkio pids; do
        mkdir /sys/fs/cgroup/$name
        mount -t cgroup -o $name cgroup /sys/fs/cgroup/$name || rmdir /sys/fs/cgroup/$name
    done
    [ -d /sys/fs/cgroup/devices ]
    mkdir /sys/fs/cgroup/systemd
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
    if [ {layout} = hybrid ]; then
        mkdir /sys/fs/cgroup/unified
        mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
    fi ;;
esac
"""


class OciHost(Namespaces):
    """A mount namespace with one of `LAYOUTS`."""

    def __init__(self, packages: Packages, layout: str) -> None:
        super().__init__("cdi-oci-", _SETUP.format(layout=layout), pids=False)
        self.layout = layout
        self.cgroup = f"/cdi-courier-{os.getpid()}-{layout}"
        """The cgroup that is above those of the containers."""
        self._packages = packages
        self._busybox = image.busybox(packages)
        self._count = 0

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):
            self.shell(f"find /sys/fs/cgroup -depth -type d -path '*{self.cgroup}*' -exec rmdir {{}} \\;")
        super().__exit__()

    def run(self, *argv: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program in the namespace. Raises RuntimeError where it fails and check is set."""
        done = self._enter(argv)
        if check and done.returncode:
            raise RuntimeError(f"{argv}: {done.stdout}{done.stderr}")
        return done

    def shell(self, script: str) -> str:
        """Run a shell script in the namespace and return what it prints."""
        return self.run("sh", "-c", script).stdout

    def python(self, script: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run Python there as the installed hook is run: bare, with the product's path alone."""
        script = f"import sys; sys.path += {_SOURCES!r}\n{script}"
        return self.run(_INTERPRETER, "-I", "-S", "-c", script, check=check)

    def folder(self, cgroup: str) -> Path:
        """The directory of a cgroup, as seen in the namespace, in the hierarchy that filters devices."""
        return Path("/sys/fs/cgroup" + ("" if self.layout == "v2" else "/devices") + cgroup)

    def outside(self, path: Path) -> Path:
        """Where this process finds a path of the host."""
        return path

    @contextlib.contextmanager
    def container(
        self, runtime: str, *, cgroups_path: str | None = None, devices: Sequence[dict[str, Any]] = ()
    ) -> Iterator[Container]:
        """A container that is created and not started. devices: more of ``linux.resources.devices``."""
        program_of, suite = RUNTIMES[runtime]
        self._count += 1
        name = f"c{self._count}"
        program = [program_of(self._packages, suite)]
        made = Container(self, program, self.root / name, cgroups_path or f"{self.cgroup}/{name}")
        with _created(made, self._busybox, devices, {}):
            yield made


class BoxHost:
    """A box that has Python, with the product and runtimes put in; systemd makes the containers' cgroups.

    runtimes: some of `RUNTIMES`, or more in their manner.
    """

    def __init__(self, box: Box, packages: Packages, runtimes: Mapping[str, bundles.Source]) -> None:
        self.root = Path("/var/containers")
        self._box = box
        self._busybox = image.busybox(packages)
        self._programs = {name: program_of(packages, suite) for name, (program_of, suite) in runtimes.items()}
        self._count = 0

        self.outside(self.root).mkdir()
        for source in _SOURCES:
            shutil.copytree(source, self.outside(Path("/opt")), dirs_exist_ok=True)
        for program in self._programs.values():
            # One that was made runnable on this machine names its libraries by their paths in the cache.
            said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
            for file in {
                str(program),
                *(word for word in said.split() if word.startswith(str(packages.cache))),
            }:
                target = self.outside(Path(file))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)
        # As on any host with systemd; in a box it does not do that itself.
        self.run("sh", "-c", "mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf")

    def run(self, *argv: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program in the box."""
        return self._box.run(argv, check=check)

    def python(self, script: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run Python there as the installed hook is run: bare, with the product's path alone."""
        script = f"import sys; sys.path.append('/opt')\n{script}"
        return self.run("/usr/bin/python3", "-I", "-S", "-c", script, check=check)

    def outside(self, path: Path) -> Path:
        """Where this process finds a path of the box."""
        return self._box.root / str(path)[1:]

    @contextlib.contextmanager
    def container(self, runtime: str, *, hook: str = "") -> Iterator[Container]:
        """A container in a scope of systemd's, created and not started. hook: at createRuntime, Python."""
        self._count += 1
        name = f"c{self._count}"
        program = [self._programs[runtime], "--systemd-cgroup"]
        made = Container(self, program, self.root / name, f"system.slice:cdi:{name}")
        argv = ["python3", "-I", "-S", "-c", f"import sys; sys.path.append('/opt')\n{hook}"]
        hooks = {"createRuntime": [{"path": "/usr/bin/python3", "args": argv, "env": ["PATH=/usr/bin"]}]}
        with _created(made, self._busybox, (), hooks if hook else {}):
            yield made


@contextlib.contextmanager
def _created(
    container: Container, busybox: Path, devices: Sequence[dict[str, Any]], hooks: dict[str, Any]
) -> Iterator[None]:
    container.create(busybox, devices, hooks)
    try:
        yield
    finally:
        container.call("delete", "--force", container.name, check=False)


class Container:
    """A container whose process sleeps. pid: of that process."""

    def __init__(
        self, host: OciHost | BoxHost, program: Sequence[str | Path], bundle: Path, cgroups_path: str
    ) -> None:
        self.host = host
        self.name = bundle.name
        self.cgroups_path = cgroups_path
        self.pid = 0
        self._program = program
        self._bundle = bundle

    def create(self, busybox: Path, devices: Sequence[dict[str, Any]], hooks: dict[str, Any]) -> None:
        """Write the bundle and have it created."""
        bundle = self.host.outside(self._bundle)
        image.unpack(busybox, bundle / "rootfs")
        (bundle / "config.json").write_text(
            json.dumps(_config(self.cgroups_path, devices) | {"hooks": hooks})
        )
        pid_file = self._bundle / "pid"
        self.call("create", "--bundle", str(self._bundle), "--pid-file", str(pid_file), self.name)
        self.pid = int((bundle / "pid").read_text())

    def start(self) -> None:
        """Start it."""
        self.call("start", self.name)

    def execute(self, script: str) -> str:
        """Run a shell script inside and return what it prints."""
        return self.call("exec", self.name, "sh", "-c", script).stdout

    def use(self, device: str, access: str = "rw") -> str:
        """Open a character device inside. device: ``MAJOR:MINOR``; returns the error's words, or "opened"."""
        major, _, minor = device.partition(":")
        path = f"/dev/t{major}-{minor}"
        redirection = {"r": "<", "w": ">>", "rw": "<>"}[access]
        said = self.execute(
            f"exec 2>&1; [ -e {path} ] || mknod {path} c {major} {minor} && (exec 3{redirection}{path}) && "
            "echo opened; true"
        )
        return said.strip().rpartition(": ")[2]

    def call(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Call the runtime. Its files are the container's output too, so none is a pipe."""
        log = self._bundle / "said"
        script = f'exec "$@" >{log} 2>&1'
        root = self.host.root / "state"
        argv = ["sh", "-c", script, "sh", *self._program, "--root", root, *arguments]
        done = self.host.run(*argv, check=False)
        done.stdout = self.host.outside(log).read_text()
        if check and done.returncode:
            raise RuntimeError(f"{self._program[0]} {arguments}: {done.stdout}{done.stderr}")
        return done


def _config(cgroups_path: str, devices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    capabilities = ["CAP_MKNOD", "CAP_DAC_OVERRIDE", "CAP_SYS_ADMIN"]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["sleep", "3600"],
            "env": ["PATH=/bin"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        },
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
        ],
        "linux": {
            "cgroupsPath": cgroups_path,
            "namespaces": [{"type": name} for name in ("pid", "mount", "ipc", "uts")],
            "resources": {"devices": [{"allow": False, "access": "rwm"}, *devices]},
        },
    }
