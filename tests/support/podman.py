"""A host of its own for one of Debian's Podmans: configuration, programs and processes are private.

A mount namespace has the machine's files, with what is written to its folders elsewhere, and a
PID namespace ends everything that Podman leaves running. It must not know what is configured there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from . import image
from .packages import Packages
from .waiting import wait_for

SUITES = {"4.3": "bookworm", "5": "trixie"}
"""Podman's version → Debian's suite that has it."""

USER = 4242
"""A user that the machine does not have; ``/etc/passwd`` of the host has it."""

_TIMEOUT = 60.0
_STARTED = 10.0
_APPLETS = ("sh", "env", "ls", "cat", "sleep", "mount", "mknod", "id")

_SETUP = """\
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=0755 cdi-podman {root}/own
for name in etc usr/local var/lib; do
    mkdir -p {root}/own/$name/upper {root}/own/$name/work
    mount -t overlay -o lowerdir=/$name,upperdir={root}/own/$name/upper,workdir={root}/own/$name/work \\
        overlay /$name
done
mkdir -p /run/user
mount -t tmpfs -o mode=0755 cdi-podman /run/user
mkdir -m 0700 /run/user/{user} {root}/own/home
chown {user}:{user} /run/user/{user} {root}/own/home
echo 'guest:x:{user}:{user}::{root}/own/home:/bin/sh' >> /etc/passwd
mv {root}/podman /usr/local/sbin/podman
# By name: conmon has Podman clean up after a container, and does not tell it where conmon is.
ln -s {conmon} /usr/local/sbin/conmon
mkdir -p /usr/local/lib/podman /etc/containers
ln -s {netavark} /usr/local/lib/podman/netavark
# A shared root is what systemd makes of it.
mount --make-rshared /
touch {root}/ready
# As the first process it inherits orphans; the shell buries whatever ends while it waits, sleep would not.
while :; do sleep 3600; done
"""

# What this machine needs: no systemd, and no CAP_SYS_RESOURCE to raise limits with.
_RUN = ("--rm", "--network=host", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")


class PodmanHost:
    """The host; a context manager. root: a folder for whatever a test needs, the same inside and outside."""

    def __init__(self, packages: Packages, suite: str) -> None:
        self._podman = packages.runnable("podman", suite) / "usr/bin/podman"
        self._conmon = packages.runnable("conmon", suite) / "usr/bin/conmon"
        runc = packages.runnable("runc", suite)
        self._runc = next(path for path in (runc / "usr/sbin/runc", runc / "usr/bin/runc") if path.exists())
        # Podman 5 wants it to be there, also where it is not used; what Podman 4 finds does not matter.
        self._netavark = packages.fetch("netavark", "trixie") / "usr/lib/podman/netavark"
        self._busybox = packages.fetch("busybox-static", "bookworm") / "bin/busybox"
        self.root = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0

    def __enter__(self) -> PodmanHost:
        # Not pytest's own folder: a rootless user could not look into it.
        self.root = Path(tempfile.mkdtemp(prefix="cdi-podman-"))
        self.root.chmod(0o755)
        for name in ("own", "root", "rootless"):
            (self.root / name).mkdir()
        script = self.root / "podman"
        script.write_text(
            "#!/bin/sh\n"
            "export PODMAN_IGNORE_CGROUPSV1_WARNING=1\n"
            f"[ $(id -u) = 0 ] && s={self.root}/root || s={self.root}/own/home\n"
            f"exec {self._podman} --root $s/s --runroot $s/r --tmpdir $s/t --storage-driver vfs "
            "--network-config-dir $s/n "
            f"--runtime {self._runc} --cgroup-manager cgroupfs "
            '--events-backend none "$@"\n'
        )
        script.chmod(0o755)
        self._make_rootfs(self.root / "rootfs", 0)
        self._make_rootfs(self.root / "rootfs-of-user", USER)
        setup = _SETUP.format(root=self.root, user=USER, conmon=self._conmon, netavark=self._netavark)
        log = (self.root / "setup.log").open("wb")
        with log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", setup],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(
            lambda: (self.root / "ready").exists() or self._process.poll() is not None,  # type: ignore[union-attr]
            _STARTED,
            "the host's namespaces",
        )
        if not (self.root / "ready").exists():
            said = (self.root / "setup.log").read_text()
            self.__exit__(None, None, None)
            raise RuntimeError(f"the host cannot be made: {said}")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._pid = int(children[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()  # and with it, by --kill-child, the first process of the PID namespace
            self._process.wait()
            wait_for(lambda: not Path(f"/proc/{self._pid}").exists() or not self._pid, _STARTED, "its end")
        shutil.rmtree(self.root)

    def path(self, inside: str) -> Path:
        """A path of the host, from outside. A link in it leads outside."""
        return Path(f"/proc/{self._pid}/root{inside}")

    def run(
        self, *argv: str, user: int = 0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the host, as root or as `USER`."""
        home = str(self.root / ("own/home" if user else "root"))
        environment = {"PATH": "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": home, **(env or {})}
        enter = ["nsenter", "--target", str(self._pid), "--mount", "--pid", "--"]
        become: list[str] = []
        if user:
            environment["XDG_RUNTIME_DIR"] = f"/run/user/{user}"
            become = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--"]
        return subprocess.run(
            [*enter, *become, *argv],
            cwd="/",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )

    def courier(self, *arguments: str, user: int = 0) -> subprocess.CompletedProcess[str]:
        """Run ``cdi-courier`` there."""
        return self.run(sys.executable, "-m", "cdi_courier", *arguments, user=user)

    def container(
        self, script: str, annotations: Mapping[str, str], *options: str, user: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """``podman run`` of a shell script in a root file system with busybox."""
        marks = [f"--annotation={key}={value}" for key, value in annotations.items()]
        return self.run("podman", "run", *_RUN, *marks, *options, *self.command(script, user), user=user)

    def command(self, script: str, user: int = 0) -> Sequence[str]:
        """What follows the options of ``podman run`` or ``create``."""
        rootfs = self.root / ("rootfs-of-user" if user else "rootfs")
        return "--rootfs", str(rootfs), "sh", "-c", script

    def load_image(self) -> str:
        """Put the tests' image into root's store and return its name; pods' infra containers have it too."""
        archive = image.build(self._busybox, self.root / "image.tar")
        self.path("/etc/containers/policy.json").write_text(
            '{"default": [{"type": "insecureAcceptAnything"}]}'
        )
        self.path("/etc/containers/containers.conf").write_text(
            '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
            f'[engine]\ninfra_image = "{image.NAME}"\ninfra_command = "/bin/sleep"\n'
        )
        loaded = self.run("podman", "load", "--input", str(archive))
        if loaded.returncode:
            raise RuntimeError(f"the image cannot be loaded: {loaded.stderr}")
        return image.NAME

    def _make_rootfs(self, folder: Path, owner: int) -> None:
        (folder / "bin").mkdir(parents=True)
        shutil.copy2(self._busybox, folder / "bin/busybox")
        for applet in _APPLETS:
            (folder / "bin" / applet).symlink_to("busybox")
        for path in (folder, *folder.rglob("*")):
            os.chown(path, owner, owner, follow_symlinks=False)
