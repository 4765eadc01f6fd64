"""A virtual machine: a whole host with its own kernel, controllers and capabilities, under QEMU's emulation.

For what a `box` cannot show: a container runtime from apt under systemd's cgroup driver, limits, a release's
own kernel. Emulated, so 10 to 20 times slower than the machine: boot one, and check much in it. KVM is not
used, for it is not on every machine that runs the tests. It must not know what runs in it.

    with VM(packages, root, prepare=install_product) as vm:
        vm.run(["systemctl", "restart", "containerd"])

A program in the guest (`_AGENT`) takes commands from a virtio channel and answers there. Sockets of the guest
can be reached as ports of 127.0.0.1 (`serve`), for APIs that programs on this side speak; there is no other
network. All that is of it on this side is one process and one folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import host, rootfs, units
from .packages import Packages, machine_suite
from .units import HostFailure
from .waiting import WaitTimeoutError, wait_for

KERNEL = ("linux-image-cloud-amd64", "initramfs-tools", "iproute2", "zstd")
"""What a root needs beside `rootfs.SYSTEM` and Python to boot as a virtual machine."""

SETTINGS = {
    "etc/initramfs-tools/conf.d/vm": "MODULES=list\n",
    "usr/share/initramfs-tools/modules.d/vm": "virtio_pci\nvirtio_blk\next4\n",
}
"""`rootfs.root`'s files for that: an initial RAM disk of half the size."""

_TOOLS = ("qemu-system-x86", "e2fsprogs")
_BOOT = 240.0  # seconds; a quiet machine takes a tenth of it
_RUN = 120.0
_COPY = 120.0
_LOG_LINES = 40
_DISK = "3G"  # sparse
_MEMORY = "2048"  # MiB
_PREFIX = "cdi-vm-"
_APPEND = "root=/dev/vda rw console=ttyS0 quiet mitigations=off systemd.show_status=no net.ifnames=0"
# What a server without screen and users does not need takes a third of an emulated boot.
_MASKED = (
    *(f"modprobe@{module}.service" for module in ("configfs", "drm", "efi_pstore", "fuse")),
    *("getty.target", "ldconfig.service", "systemd-binfmt.service", "systemd-logind.service"),
    *("systemd-hwdb-update.service", "systemd-journal-catalog-update.service", "systemd-tpm2-setup.service"),
    *("proc-sys-fs-binfmt_misc.automount", "sys-kernel-debug.mount", "sys-kernel-tracing.mount"),
    "systemd-udev-load-credentials.service",
)
_CHANNEL = "cdi.courier.tests"
_PORTS = 4  # forwarded; the guest's are _FIRST_PORT and those after it
_FIRST_PORT = 7000

# In a mount namespace of its own, where the folder $2 appears in the root $1 as /tmp; then the program.
_IN_TOOLS = r"""
mount --bind "$2" "$1/tmp"
mount --bind /dev "$1/dev"
cd "$1"
shift 2
exec chroot . "$@"
"""

_AGENT = rf"""
import json, os, subprocess, time

PATH = "/dev/virtio-ports/{_CHANNEL}"
while not (os.path.exists(PATH) and os.path.exists("/sys/class/net/eth0")):
    time.sleep(0.05)
for words in ("address add 10.0.2.15/24 dev eth0", "link set eth0 up"):
    subprocess.run(["ip", *words.split()], check=True)
environment = {{"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8",
               "HOME": "/root"}}
with open(PATH, "r+b", buffering=0) as channel:
    def answer(value):
        data = memoryview(json.dumps(value).encode() + b"\n")
        while data:
            data = data[channel.write(data):]

    answer({{"id": 0}})
    pending = b""
    while True:
        data = channel.read(65536)
        if not data:  # nobody is connected
            time.sleep(0.05)
            continue
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            asked = json.loads(line)
            try:
                done = subprocess.run(asked["argv"], input=asked["input"].encode(), capture_output=True,
                                      env={{**environment, **asked["env"]}}, timeout=asked["timeout"])
                said = {{"rc": done.returncode, "stdout": done.stdout.decode(errors="replace"),
                        "stderr": done.stderr.decode(errors="replace")}}
            except subprocess.TimeoutExpired:
                said = {{"error": "it took over %g s" % asked["timeout"]}}
            except OSError as error:
                said = {{"rc": 127, "stdout": "", "stderr": str(error)}}
            answer({{"id": asked["id"], **said}})
"""

# Not stopped with the runtimes that it restarts, and no limits of its own.
_AGENT_UNIT = """\
[Unit]
Description=Commands of the tests
[Service]
ExecStart=/usr/bin/python3 -I -S /usr/local/lib/agent.py
TasksMax=infinity
OOMPolicy=continue
[Install]
WantedBy=multi-user.target
"""


class VMFailure(HostFailure):
    """The machine does not do what it should; the text ends with the end of its console."""


class KernelPanicError(VMFailure):
    """The machine's kernel has given up."""


class VM:
    """The machine. Use as a context manager.

    packages: where QEMU comes from. root: what its disk is made of, with `KERNEL` and Python; left as it is.
    prepare: called with a copy of it, to put files in and enable units.

    pid     QEMU's
    state   what ``systemctl is-system-running`` said in the end: ``running`` or ``degraded``
    """

    def __init__(
        self,
        packages: Packages,
        root: Path,
        *,
        prepare: Callable[[Path], object] | None = None,
    ) -> None:
        self._packages = packages
        self._pristine = root
        self._prepare = prepare
        self._ports: list[int] = []
        self._served: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._received = b""
        self._asked = 0
        self.state = ""

    def __enter__(self) -> VM:
        try:
            self.start()
        except BaseException:
            self.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self, timeout: float = _BOOT) -> None:
        """Make the disk and boot; returns when systemd has started everything.

        Raises PackageError, VMFailure.
        """
        self._tools = rootfs.root(self._packages, machine_suite(), _TOOLS, variant="extract")
        for left in host.orphans(_PREFIX):
            shutil.rmtree(left, ignore_errors=True)
        self._folder = host.new_folder(_PREFIX)
        self._make_disk()
        try:
            self._boot(timeout)
        except KernelPanicError:
            # Emulated processors fail a kernel that starts now and then. Nothing that is tested has run yet.
            self._unplug()
            (self._folder / "console").unlink(missing_ok=True)
            self._boot(timeout)

    def _boot(self, timeout: float) -> None:
        # As late as can be: whoever asks the kernel for a port meanwhile may be given one of these.
        self._ports = _free_ports(_PORTS)
        self._received = b""
        with (self._folder / "qemu.log").open("wb") as log:
            self._process = subprocess.Popen(
                self._in_tools(self._qemu()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + timeout
        wait_for(lambda: self._alive() and self._connect(), timeout, "QEMU to open its channel")
        self._wait_until_up(deadline)

    def cleanup(self) -> None:
        """End the machine as if unplugged; any number of times."""
        self._unplug()
        folder = getattr(self, "_folder", None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _unplug(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            self._process = None

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        check: bool = True,
        timeout: float = _RUN,
        input: str = "",  # noqa: A002 - as subprocess has it
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the guest, as root, and return what it said; one at a time.

        env: beside a bare environment. Raises VMFailure where it takes too long, or fails and check is set.
        """
        words = list(map(str, argv))
        number = self._ask(words, timeout, input, env)
        said = self._receive(number, time.monotonic() + timeout + 30)
        if "error" in said:
            raise VMFailure(f"{shlex.join(words)}: {said['error']}")
        done = subprocess.CompletedProcess(words, said["rc"], said["stdout"], said["stderr"])
        if check and done.returncode:
            text = f"{shlex.join(words)} ended with {done.returncode}"
            raise VMFailure(f"{text}:\n{done.stdout}{done.stderr}")
        return done

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Put a file into the live machine, with the folders on its way."""
        self.run(["install", "-D", f"--mode={mode:o}", "/dev/stdin", path], input=text)

    def wait(self, unit: str, state: str = "active", *, timeout: float = _RUN) -> None:
        """Wait until a unit's ActiveState is this. Raises HostFailure with its end of the journal."""
        units.wait_for_unit(self.run, unit, state, timeout)

    def journal(self, unit: str | None = None) -> str:
        """What a unit, or everything, has logged since the machine started."""
        return units.journal(self.run, unit)

    def serve(self, path: str) -> str:
        """Make a Unix socket of the guest reachable, and return its address here: ``127.0.0.1:PORT``.

        For as long as the machine runs, also when who listens there comes back; for a few sockets.
        """
        port = self._ports[len(self._served)]
        self._served.append(path)
        self._proxy(len(self._served) - 1)
        return f"127.0.0.1:{port}"

    def reboot(self) -> None:
        """Restart the machine in an orderly way; returns when everything has been started again."""
        # No answer is waited for: the agent may be ended before it has given it.
        self._ask(["systemctl", "--no-block", "reboot"], _BOOT)
        self._wait_until_up(time.monotonic() + _BOOT)
        for number in range(len(self._served)):
            self._proxy(number)

    def console(self) -> str:
        """What the machine wrote on its serial console, and QEMU about itself."""
        files = [self._folder / "console", self._folder / "qemu.log"]
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    def _wait_until_up(self, deadline: float) -> None:
        """After the agent's first word; deadline: of the monotonic clock."""

        def is_up() -> bool:
            self.state = units.system_state(self.run)
            return self.state in units.UP

        self._receive(0, deadline)
        try:
            wait_for(is_up, max(0.0, deadline - time.monotonic()), "the machine to be up", pause=0.5)
        except WaitTimeoutError as error:
            raise VMFailure(self._with_console(str(error))) from None

    def _proxy(self, number: int) -> None:
        listen = f"--socket-property=ListenStream={_FIRST_PORT + number}"
        proxy = "/usr/lib/systemd/systemd-socket-proxyd"
        self.run(["systemd-run", "--quiet", f"--unit=proxy-{number}", listen, proxy, self._served[number]])

    def _make_disk(self) -> None:
        # A copy, and not an overlay's view of it: e2fsprogs reads it from within the tools' root.
        root = self._folder / "root"
        subprocess.run(["cp", "-a", "--reflink=auto", self._pristine, root], check=True, timeout=_COPY)
        if self._prepare is not None:
            self._prepare(root)
        for name in ("vmlinuz", "initrd.img"):
            newest = max((root / "boot").glob(f"{name}-*"), key=lambda path: path.stat().st_mtime)
            shutil.move(newest, self._folder / name)
        _write(root / "etc/fstab", "/dev/vda / ext4 defaults 0 0\n")
        _write(root / "etc/hostname", "vm\n")
        _write(root / "usr/local/lib/agent.py", _AGENT)
        _write(root / "etc/systemd/system/agent.service", _AGENT_UNIT)
        wants = root / "etc/systemd/system/multi-user.target.wants/agent.service"
        wants.parent.mkdir(parents=True, exist_ok=True)
        wants.symlink_to("../agent.service")
        for name in _MASKED:
            (root / "etc/systemd/system" / name).symlink_to("/dev/null")
        make = ["mke2fs", "-q", "-t", "ext4", "-E", "root_owner=0:0", "-d", "/tmp/root", "/tmp/disk", _DISK]
        done = subprocess.run(self._in_tools(make), capture_output=True, text=True, timeout=_COPY)
        if done.returncode:
            raise VMFailure(f"the disk cannot be made: {done.stderr}")
        shutil.rmtree(root)

    def _qemu(self) -> list[str]:
        forward = [
            f"hostfwd=tcp:127.0.0.1:{port}-:{_FIRST_PORT + number}" for number, port in enumerate(self._ports)
        ]
        return [
            # A plain CPU: for what a rich one can do, udev loads a dozen modules.
            *("qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "qemu64", "-smp", "2"),
            *("-m", _MEMORY, "-nodefaults", "-no-user-config", "-display", "none"),
            *("-kernel", "/tmp/vmlinuz", "-initrd", "/tmp/initrd.img", "-append", _APPEND),
            *("-drive", "file=/tmp/disk,format=raw,if=virtio,cache=unsafe"),
            *("-serial", "file:/tmp/console"),
            *("-device", "virtio-rng-pci", "-device", "virtio-serial-pci"),
            *("-chardev", "socket,id=channel,path=/tmp/channel,server=on,wait=off"),
            *("-device", f"virtserialport,chardev=channel,name={_CHANNEL}"),
            *("-nic", ",".join(["user", "model=virtio-net-pci", "restrict=on", *forward])),
        ]

    def _in_tools(self, argv: Sequence[str]) -> list[str]:
        return [
            # Each of them becomes the next, in one process, which ends with the one that made it.
            *("setpriv", "--pdeathsig", "KILL"),
            *("unshare", "--mount", "--propagation", "private"),
            *("env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"),
            *("sh", "-euc", _IN_TOOLS, "vm", str(self._tools), str(self._folder), *argv),
        ]

    def _connect(self) -> bool:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            channel.connect(os.fspath(self._folder / "channel"))
        except OSError:
            channel.close()
            return False
        self._channel = channel
        return True

    def _ask(
        self, words: Sequence[str], timeout: float, text: str = "", env: Mapping[str, str] | None = None
    ) -> int:
        """Send a command; returns the number that its answer will have."""
        self._asked += 1
        request = {
            "id": self._asked,
            "argv": list(words),
            "input": text,
            "env": dict(env or {}),
            "timeout": timeout,
        }
        if self._channel is None:
            raise VMFailure("the machine does not run")
        self._channel.sendall(json.dumps(request).encode() + b"\n")
        return self._asked

    def _receive(self, number: int, deadline: float) -> dict[str, Any]:
        """The answer of this number; what is left of one that was given up goes by."""
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                said: dict[str, Any] = json.loads(line)
                if said["id"] == number:
                    return said
                continue
            self._alive()
            assert self._channel is not None
            self._channel.settimeout(min(1.0, max(0.01, deadline - time.monotonic())))
            try:
                self._received += self._channel.recv(1 << 16)
            except TimeoutError:
                if "Kernel panic" in self.console():
                    raise KernelPanicError(self._with_console("the machine's kernel gave up")) from None
                if time.monotonic() > deadline:
                    raise VMFailure(self._with_console("the machine does not answer")) from None

    def _alive(self) -> bool:
        if not self.running:
            raise VMFailure(self._with_console("the machine has ended"))
        return True

    def _with_console(self, text: str) -> str:
        return "\n".join([text, *self.console().splitlines()[-_LOG_LINES:]])


def unsuitable() -> str:
    """Why no virtual machine can be started on this machine, or an empty string."""
    machine = os.uname().machine
    return "" if machine == "x86_64" else f"the virtual machine is an x86-64 one, and this is {machine}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
