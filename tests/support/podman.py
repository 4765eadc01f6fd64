"""A host of its own for one of Debian's Podmans: configuration, programs and processes are private.

It has the machine's files, with what is written to its folders elsewhere. It must not know what is configured
there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from . import image
from .containerd import runc_of
from .namespaces import Namespaces
from .packages import Packages

SUITES = {"4.3": "bookworm", "5": "trixie"}
"""Podman's version → Debian's suite that has it."""

USER = 4242
"""A user that the machine does not have; ``/etc/passwd`` of the host has it."""

_SETUP = """\
mount -t tmpfs -o mode=0755 cdi-podman $ROOT/own
for name in etc usr/local var/lib; do
    mkdir -p $ROOT/own/$name/upper $ROOT/own/$name/work
    mount -t overlay -o lowerdir=/$name,upperdir=$ROOT/own/$name/upper,workdir=$ROOT/own/$name/work \\
        overlay /$name
done
mkdir -p /run/user
mount -t tmpfs -o mode=0755 cdi-podman /run/user
mkdir -m 0700 /run/user/{user} $ROOT/own/home
chown {user}:{user} /run/user/{user} $ROOT/own/home
echo 'guest:x:{user}:{user}::$ROOT/own/home:/bin/sh' >> /etc/passwd
mv $ROOT/podman /usr/local/sbin/podman
# By name: conmon has Podman clean up after a container, and does not tell it where conmon is.
ln -s {conmon} /usr/local/sbin/conmon
mkdir -p /usr/local/lib/podman /etc/containers
ln -s {netavark} /usr/local/lib/podman/netavark
# A shared root is what systemd makes of it.
mount --make-rshared /
"""

# What this machine needs: no systemd, and no CAP_SYS_RESOURCE to raise limits with.
_RUN = ("--rm", "--network=host", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")


class PodmanHost(Namespaces):
    """The host."""

    def __init__(self, packages: Packages, suite: str) -> None:
        conmon = packages.runnable("conmon", suite) / "usr/bin/conmon"
        # Podman 5 wants it to be there, also where it is not used; what Podman 4 finds does not matter.
        netavark = packages.fetch("netavark", "trixie") / "usr/lib/podman/netavark"
        super().__init__("cdi-podman-", _SETUP.format(user=USER, conmon=conmon, netavark=netavark))
        self._podman = packages.runnable("podman", suite) / "usr/bin/podman"
        self._runc = runc_of(packages, suite)
        self._busybox = image.busybox(packages)

    def _prepare(self) -> None:
        self.root.chmod(0o755)  # a rootless user has to look into it
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
        for folder, owner in (("rootfs", 0), ("rootfs-of-user", USER)):
            rootfs = image.unpack(self._busybox, self.root / folder)
            for path in (rootfs, *rootfs.rglob("*")):
                os.chown(path, owner, owner, follow_symlinks=False)

    def run(
        self, *argv: str, user: int = 0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the host, as root or as `USER`."""
        home = str(self.root / ("own/home" if user else "root"))
        environment = {"PATH": "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": home, **(env or {})}
        become: list[str] = []
        if user:
            environment["XDG_RUNTIME_DIR"] = f"/run/user/{user}"
            become = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--"]
        return self._enter([*become, *argv], env=environment)

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
