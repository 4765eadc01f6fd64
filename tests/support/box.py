"""A box: a host with a real systemd as pid 1, beside the test process, in namespaces; up in seconds.

It has its own root (an overlay over a pristine one, see `rootfs`), /dev, journal, dbus, pids, network and a
pure cgroup v2 tree. The kernel is the machine's. Where the machine's controllers are bound to cgroup v1, the
box has none: device programs, units and scopes work, limits of memory and cpu do not; that needs a `vm`.
Nothing of it is mounted where the test process can see it, so when its pid 1 is killed nothing is left but an
empty cgroup, which goes too. It must not know what runs in it.

    with Box(root, prepare=install_product) as box:
        box.run(["cdi-courier", "doctor"])

Files: ``box.root / "etc/x"`` is the live file. Mind the absolute links of a Debian root: ``box.root /
"var/run/x"`` is the machine's own /run/x, because the kernel follows links from the caller's root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import host, units
from .units import HostFailure
from .waiting import WaitTimeoutError, wait_for

_BOOT = 60.0  # seconds; it takes one to four
_RUN = 60.0
_END = 20.0
_LOG_LINES = 40
_PREFIX = "cdi-box-"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# $1: an empty folder, $2: the pristine root, $3: the cgroup's name; then folders that get a tmpfs. Runs in a
# mount namespace of its own and, for the cgroup to be the box's whole tree, before the others are made. A
# tmpfs takes what is written, since an overlay's upper layer cannot lie on another overlay.
_OUTSIDE = r"""
mount -t tmpfs -o mode=0700 cdi-box "$1"
cd "$1"
mkdir upper work root cgroup
chmod 0755 upper
mount -t overlay -o "lowerdir=$2,upperdir=upper,workdir=work" cdi-box root
mount -t cgroup2 cgroup2 cgroup
mkdir "cgroup/$3"
echo $$ > "cgroup/$3/cgroup.procs"
umount cgroup
exec unshare --pid --fork --kill-child --ipc --uts --cgroup --net sh -euc "$INSIDE" box "$@"
"""

# As pid 1. What would change the machine (sysctl, udev's rules on /sys, sysrq) is read-only, which systemd
# takes for a container's manner and leaves alone.
_INSIDE = r"""
cd "$1/root"
shift 3
mount -t proc -o nosuid,noexec,nodev proc proc
for name in proc/sys proc/sysrq-trigger; do
    if [ -e "$name" ]; then  # not every kernel has sysrq
        mount --bind "$name" "$name"
        mount -o remount,bind,ro "$name"
    fi
done
mount -t sysfs -o nosuid,noexec,nodev,ro sysfs sys
mount -t cgroup2 -o nosuid,noexec,nodev cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=0755,nosuid dev dev
for node in "null 3" "zero 5" "full 7" "random 8" "urandom 9"; do
    mknod -m 0666 "dev/${node% *}" c 1 "${node#* }"
done
mknod -m 0666 dev/tty c 5 0
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts dev/pts
mount -t tmpfs -o mode=1777,nosuid,nodev shm dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
mount -t tmpfs -o mode=0755,nosuid,nodev run run
mount -t tmpfs -o mode=1777,nosuid,nodev tmp tmp
for folder in "$@"; do
    mkdir -p "./$folder"
    mount -t tmpfs -o mode=0755 tmpfs "./$folder"
done
touch run/.staged
read -r go
mkdir run/.old
pivot_root . run/.old
umount -l run/.old
rmdir run/.old
rm run/.staged
exec env -i container=other LANG=C.UTF-8 PATH="$PATH" /lib/systemd/systemd --unit=multi-user.target </dev/null
"""


class BoxFailure(HostFailure):
    """The box does not do what it should; the text ends with the end of what it logged."""


class Box:
    """The host. Use as a context manager.

    root: what it starts from, left as it is. prepare: called with the box's root before systemd starts, to
    put files into it. tmpfs: folders that get a tmpfs of their own, e.g. ``/var/lib/containerd``, for
    overlays cannot lie on the box's root. The box ends with the thread that started it, if not before.

    root    the live root as seen from outside; see above
    pid     of the box's pid 1, outside
    state   what ``systemctl is-system-running`` said in the end: ``running`` or ``degraded``
    """

    def __init__(
        self, root: Path, *, prepare: Callable[[Path], object] | None = None, tmpfs: Sequence[str] = ()
    ) -> None:
        self._lower = root
        self._prepare = prepare
        self._tmpfs = tuple(tmpfs)
        self._process: subprocess.Popen[str] | None = None
        self.pid = 0
        self.state = ""

    def __enter__(self) -> Box:
        try:
            self.start()
        except BaseException:
            self.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    @property
    def root(self) -> Path:
        return Path(f"/proc/{self.pid}/root")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, timeout: float = _BOOT) -> None:
        """Boot; returns when systemd has started everything. Raises BoxFailure."""
        _reap_stale()
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.cgroup = f"/{self._folder.name}"
        self._log = _log_of(self._folder).open("w+b")
        self._log.write(f"{host.owner(os.getpid())}\n".encode())
        self._log.flush()
        argv = [
            # The box ends with the process that made it, however that ends.
            *("setpriv", "--pdeathsig", "KILL"),
            *("unshare", "--mount", "--propagation", "private"),
            *("sh", "-euc", _OUTSIDE, "box", str(self._folder), str(self._lower), self._folder.name),
            *(path.strip("/") for path in self._tmpfs),
        ]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            text=True,
            env={"PATH": _PATH, "INSIDE": _INSIDE, "LC_ALL": "C"},
            start_new_session=True,
        )
        self.pid = wait_for(self._first_child, timeout, lambda: self._with_log("the box's pid 1"))
        staged = self.root / str(self._folder).lstrip("/") / "root"
        wait_for(lambda: self._alive() and (staged / "run/.staged").exists(), timeout, "the box's root")
        if self._prepare is not None:
            self._prepare(staged)
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.close()
        try:
            wait_for(self._is_up, timeout, "the box to be up", pause=0.1)
        except WaitTimeoutError as error:
            raise BoxFailure(self._with_log(str(error))) from None

    def cleanup(self) -> None:
        """End everything in it; any number of times."""
        if self._process is None:
            return
        if self._process.poll() is None:
            # Its first child dies with it, and with that, pid 1 of its namespace, everything in there.
            self._process.kill()
        self._process.wait()
        try:
            if self.pid:
                wait_for(lambda: not host.lives(self.pid), _END, f"the box's pid 1, {self.pid}, to end")
        finally:
            host.end_processes(lambda: host.processes_in_cgroup(self.cgroup))
            host.remove_cgroup(self.cgroup)
            self._log.close()
            Path(self._log.name).unlink(missing_ok=True)
            shutil.rmtree(self._folder)
            self._process = None

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        check: bool = True,
        timeout: float = _RUN,
        input: str | None = None,  # noqa: A002 - as subprocess has it
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the box, as root, outside any unit, and return what it said.

        env: beside a bare environment. Raises BoxFailure where it takes too long, or fails and check is set.
        """
        # Entering a cgroup goes before entering the namespace that hides the one left.
        own = self.root / "sys/fs/cgroup/init.scope/cgroup.procs"
        enter = [
            "nsenter",
            f"--target={self.pid}",
            *("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"),
        ]
        command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(own), *enter, *map(str, argv)]
        environment = {"PATH": _PATH, "LANG": "C.UTF-8", "HOME": "/root", **(env or {})}
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
        done: subprocess.CompletedProcess[str]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                env=environment,
                timeout=timeout,
                **options,
            )
        except subprocess.TimeoutExpired as error:
            raise BoxFailure(
                f"{' '.join(map(str, argv))} took over {timeout:g} s: {error.stderr!r}"
            ) from None
        if check and done.returncode:
            text = f"{' '.join(map(str, argv))} ended with {done.returncode}"
            raise BoxFailure(f"{text}:\n{done.stdout}{done.stderr}")
        return done

    def wait(self, unit: str, state: str = "active", *, timeout: float = 30.0) -> None:
        """Wait until a unit's ActiveState is this. Raises HostFailure with its end of the journal."""
        units.wait_for_unit(self.run, unit, state, timeout)

    def journal(self, unit: str | None = None) -> str:
        """What a unit, or everything, has logged since the box started."""
        return units.journal(self.run, unit)

    def _first_child(self) -> int:
        if not self._alive() or self._process is None:
            return 0
        pid = self._process.pid
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            # Before the second unshare the child is one of the first script's own commands.
            if Path(f"/proc/{pid}/comm").read_text().strip() == "unshare" and len(children) == 1:
                child = int(children[0])
                if os.readlink(f"/proc/{child}/ns/pid") != os.readlink(f"/proc/{pid}/ns/pid"):
                    return child
        return 0

    def _alive(self) -> bool:
        if not self.running:
            raise BoxFailure(self._with_log("the box ended at its start"))
        return True

    def _is_up(self) -> bool:
        self._alive()
        if not (self.root / "run/systemd/private").exists():
            return False
        self.state = units.system_state(self.run)
        return self.state in units.UP

    def _with_log(self, text: str) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        if self.state:
            lines += self.journal().splitlines()
        return "\n".join([text, *lines[-_LOG_LINES:]])


def _log_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def _reap_stale() -> None:
    """Remove the empty folders of boxes whose process was killed before it could.

    Only of those: removing the folder of a box that runs would unmount it.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            note = _log_of(folder).read_text(errors="replace").partition("\n")[0]
            if folder.is_dir() and folder.stat().st_uid == os.geteuid() and host.is_orphaned(note):
                host.remove_cgroup(f"/{folder.name}")
                folder.rmdir()
                _log_of(folder).unlink()
