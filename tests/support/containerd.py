"""A private containerd: everything it writes, listens on and mounts lies below one folder.

It runs beside an installed one without touching it, on a machine without systemd or CNI. It must not know
what is tested with it; `lab` puts it together with the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import cni, host, image
from .cri import CriClient, CriError
from .packages import Packages, machine_suite
from .waiting import WaitTimeoutError, wait_for

SUITES_2 = ("sid", "forky")  # Debian's suites that hold a containerd 2.x, in the order tried
SUITES_1_7 = ("trixie",)
SUITES_1_6 = ("bookworm",)

_START = 30.0  # seconds; a start takes under two
_STOP = 10.0
_LOG_LINES = 25
_SHIM_FOLDERS = (Path("/run/containerd/s"), Path("/run/containerd"))
_RUNTIME_FOLDERS = (Path("/run/crun"), Path("/run/runc"))
_SOCKET_LIMIT = 107  # bytes of a socket's path, `sun_path` less its closing zero


class RuntimeFailure(Exception):  # noqa: N818 - in a test's report the word error is everywhere already
    """The daemon does not do what it should; the text ends with its log's end."""


@dataclass(frozen=True)
class Binaries:
    """The programs of one containerd, and the OCI runtime it starts. version: (major, minor)."""

    containerd: Path
    ctr: Path
    shim_folder: Path
    runc: Path
    version: tuple[int, int]

    @property
    def name(self) -> str:
        return f"containerd {self.version[0]}.{self.version[1]}"


def packaged(packages: Packages, suite: str | Sequence[str] = SUITES_2) -> Binaries:
    """containerd of a Debian suite, runc of the machine's own. Raises PackageError."""
    root = packages.runnable("containerd", suite)
    runc = runc_of(packages, machine_suite())
    folder = root / "usr/bin"
    containerd = folder / "containerd"
    return Binaries(containerd, folder / "ctr", folder, runc, _version(containerd))


def installed(minimum: tuple[int, int] = (2, 1)) -> Binaries | None:
    """The containerd on PATH with its runc, if it is new enough; None otherwise."""
    found = {name: shutil.which(name) for name in ("containerd", "ctr", "containerd-shim-runc-v2", "runc")}
    paths = {name: Path(path) for name, path in found.items() if path}
    if len(paths) < len(found) or _version(paths["containerd"]) < minimum:
        return None
    shim_folder = paths["containerd-shim-runc-v2"].parent
    return Binaries(
        paths["containerd"], paths["ctr"], shim_folder, paths["runc"], _version(paths["containerd"])
    )


def runc_of(packages: Packages, suite: str) -> Path:
    """runc of a Debian suite, in a form that runs on this machine. Raises PackageError."""
    return packages.runnable("runc", suite) / "usr/sbin/runc"


def crun_of(packages: Packages, suite: str) -> Path:
    """crun of a Debian suite, in a form that runs on this machine. Raises PackageError."""
    return packages.runnable("crun", suite) / "usr/bin/crun"


@dataclass(frozen=True)
class Handler:
    """A runtime handler: the OCI runtime's path, and which annotations reach its config.json (globs)."""

    binary: Path
    pod_annotations: tuple[str, ...] = ()
    container_annotations: tuple[str, ...] = ()


@dataclass
class Containerd:
    """The daemon. Sockets and state stay the same over `restart`.

    root: a short absolute path, made when missing; the caller removes it after `cleanup`.
    cdi_spec_dirs: absolute, ascending priority. handlers: by name, beside the default ``runc``.
    extra_config: TOML appended to the configuration. image_archive: the tar of `image.build`, imported at
    first start.
    """

    root: Path
    binaries: Binaries
    image_archive: Path
    cdi_spec_dirs: Sequence[Path] = ()
    nri: bool = True
    cdi: bool = True
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    extra_config: str = ""

    def __post_init__(self) -> None:
        self.socket = self.root / "containerd.sock"
        self.nri_socket = self.root / "nri.sock"
        self.config_file = self.root / "config.toml"
        self.log_file = self.root / "containerd.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._imported = False
        # Shims listen below containerd's compiled-in state folder, whatever the configuration says.
        self._shim_sockets: set[Path] = set()
        # OCI runtimes make their default state folder even where they are told to use another.
        self._absent = [path for path in _RUNTIME_FOLDERS if not path.exists()]
        longest = f"{self.socket}.ttrpc"
        if len(os.fsencode(longest)) > _SOCKET_LIMIT:
            raise RuntimeFailure(f"{longest} is too long for a socket; use a shorter folder")

    def __enter__(self) -> Containerd:
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
        return self.process is not None and self.process.poll() is None

    def start(self, timeout: float = _START) -> None:
        """Start, wait until the CRI answers, the first time import the image. Raises RuntimeFailure."""
        if self.running:
            return
        for folder in ("root", "state", "tmp", "opt", "cni/bin", "cni/conf", "nri/plugins", "nri/conf"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        cni.install(self.root / "cni/bin", self.root / "cni/conf")
        self.config_file.write_text(self.config())
        path = f"{self.binaries.shim_folder}:{os.environ.get('PATH', '/usr/sbin:/usr/bin:/sbin:/bin')}"
        with self.log_file.open("ab") as log:
            # A session of its own: Ctrl-C is for the one who cleans up, not for the daemon.
            self.process = subprocess.Popen(
                [self.binaries.containerd, "--config", self.config_file],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": path, "TMPDIR": str(self.root / "tmp"), host.MARK: str(self.root)},
                cwd=self.root,
                start_new_session=True,
            )
        try:
            wait_for(self._ready, timeout, f"{self.binaries.name} to answer on {self.socket}")
            if not self._imported:
                self._import_image()
        except WaitTimeoutError as error:
            raise self._failure(str(error)) from None

    def stop(self) -> None:
        """End it as an administrator would; pods go on running. Raises RuntimeFailure when it hangs."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it without any chance to tidy up; pods go on running."""
        self._end(signal.SIGKILL)

    def restart(self, timeout: float = _START) -> None:
        """Stop and start on the same sockets."""
        self.stop()
        self.start(timeout)

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def config(self) -> str:
        """The configuration file: version 3 for containerd 2, version 2 for 1.x."""
        return "\n".join(
            [self._config_3() if self.binaries.version >= (2, 0) else self._config_2(), self.extra_config]
        )

    def cleanup(self) -> None:
        """End the daemon and its shims, unmount what they mounted; any number of times.

        Containers have an environment of their own; who gave the pods a cgroup parent ends them by it (`Lab`
        does).
        """
        self._shim_sockets |= shim_sockets(self.root)
        if self.running:
            self.kill()
        host.end_processes(lambda: host.processes_of(self.root))
        host.unmount_below(self.root)
        remove_sockets(self._shim_sockets)
        for path in self._absent:
            host.remove_if_empty(path)

    def _end(self, number: signal.Signals) -> None:
        self._shim_sockets |= shim_sockets(self.root)
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(_STOP)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise self._failure(
                    f"{self.binaries.name} did not end within {_STOP:g} s of {number.name}"
                ) from None
        self.process = None

    def _ready(self) -> bool:
        if self.process is None or self.process.poll() is not None:
            rc = None if self.process is None else self.process.returncode
            raise self._failure(f"{self.binaries.name} ended at its start, exit status {rc}")
        if not self.socket.exists():
            return False
        try:
            with CriClient(self.socket) as client:
                conditions = client.status(timeout=1).status.conditions
        except CriError:
            return False
        return any(condition.type == "RuntimeReady" and condition.status for condition in conditions)

    def _import_image(self) -> None:
        ctr, address, archive = str(self.binaries.ctr), str(self.socket), str(self.image_archive)
        argv = [ctr, "--address", address, "-n", "k8s.io", "images", "import", archive]
        environment = {**os.environ, "TMPDIR": str(self.root / "tmp"), host.MARK: str(self.root)}
        done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=60)
        if done.returncode:
            raise self._failure(f"the image cannot be imported: {done.stderr.strip() or done.stdout.strip()}")
        # The CRI learns of it by an event of its own time.
        with CriClient(self.socket) as client:
            wait_for(lambda: client.has_image(image.NAME), 10, "the CRI to know the imported image")
        self._imported = True

    def _failure(self, text: str) -> RuntimeFailure:
        lines = self.log().splitlines()[-_LOG_LINES:]
        return RuntimeFailure("\n".join([text, f"the last lines of {self.log_file}:", *lines]))

    def _all_handlers(self) -> dict[str, Handler]:
        return {"runc": Handler(self.binaries.runc), **self.handlers}

    def _common(self) -> str:
        root = self.root
        return f"""\
root = {_toml(root / "root")}
state = {_toml(root / "state")}
{f"temp = {_toml(root / 'tmp')}" if self.binaries.version >= (1, 7) else ""}
# Snapshotters for file systems that are not here only write warnings into the log.
disabled_plugins = [
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]

[grpc]
address = {_toml(self.socket)}

[debug]
level = "info"

[plugins."io.containerd.internal.v1.opt"]
path = {_toml(root / "opt")}

[plugins."io.containerd.nri.v1.nri"]
disable = {_toml(not self.nri)}
socket_path = {_toml(self.nri_socket)}
plugin_path = {_toml(root / "nri/plugins")}
plugin_config_path = {_toml(root / "nri/conf")}
"""

    def _config_3(self) -> str:
        cri = 'plugins."io.containerd.cri.v1.runtime"'
        return f"""\
version = 3
{self._common()}
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = {_toml(image.NAME)}

[{cri}]
# Without CAP_SYS_RESOURCE the pause container's -998 cannot be set, and runc dies of it.
restrict_oom_score_adj = true
# Else they lie below /run/netns, which is everybody's.
netns_mounts_under_state_dir = true
enable_cdi = {_toml(self.cdi)}
cdi_spec_dirs = {_toml(self.cdi_spec_dirs)}

[{cri}.cni]
bin_dirs = {_toml([self.root / "cni/bin"])}
conf_dir = {_toml(self.root / "cni/conf")}

{self._handler_tables(f"{cri}.containerd")}"""

    def _config_2(self) -> str:
        cri = 'plugins."io.containerd.grpc.v1.cri"'
        # 1.6 knows nothing of CDI and refuses no unknown key, but need not be asked to.
        cdi = f"enable_cdi = {_toml(self.cdi)}\ncdi_spec_dirs = {_toml(self.cdi_spec_dirs)}"
        return f"""\
version = 2
{self._common()}
[{cri}]
# Without CAP_SYS_RESOURCE the pause container's -998 cannot be set, and runc dies of it.
restrict_oom_score_adj = true
# Else they lie below /run/netns, which is everybody's.
netns_mounts_under_state_dir = true
sandbox_image = {_toml(image.NAME)}
{cdi if self.binaries.version >= (1, 7) else ""}

[{cri}.cni]
bin_dir = {_toml(self.root / "cni/bin")}
conf_dir = {_toml(self.root / "cni/conf")}

{self._handler_tables(f"{cri}.containerd")}"""

    def _handler_tables(self, table: str) -> str:
        lines = [f"[{table}]", 'default_runtime_name = "runc"']
        for name, handler in self._all_handlers().items():
            lines += [
                f"[{table}.runtimes.{_toml(name)}]",
                'runtime_type = "io.containerd.runc.v2"',
                f"pod_annotations = {_toml(handler.pod_annotations)}",
                f"container_annotations = {_toml(handler.container_annotations)}",
                f"[{table}.runtimes.{_toml(name)}.options]",
                f"BinaryName = {_toml(handler.binary)}",
                f"Root = {_toml(self.root / 'oci' / name)}",
                "SystemdCgroup = false",
            ]
        return "\n".join([*lines, ""])


def shim_sockets(root: Path) -> set[Path]:
    """Where the shims of the daemon with this root listen, as long as their bundles say it."""
    found = set()
    for name in ("address", "bootstrap.json"):
        for path in (root / "state").glob(f"io.containerd.runtime.v2.task/*/*/{name}"):
            with contextlib.suppress(OSError, ValueError):  # the shim is just coming or going
                text = path.read_text()
                address = json.loads(text)["address"] if name == "bootstrap.json" else text
                if address.startswith("unix://"):
                    found.add(Path(address.removeprefix("unix://")))
    return found


def remove_sockets(paths: Iterable[Path]) -> None:
    """Remove what killed shims left, and the folders if no other containerd uses them."""
    for path in paths:
        path.unlink(missing_ok=True)
    for folder in _SHIM_FOLDERS:
        host.remove_if_empty(folder)


def _version(containerd: Path) -> tuple[int, int]:
    # "containerd github.com/containerd/containerd/v2 2.1.9+unknown", "… 1.7.24~ds1 1.7.24~ds1-6"
    text = subprocess.run([containerd, "--version"], capture_output=True, text=True, timeout=30).stdout
    found = re.search(r"\sv?(\d+)\.(\d+)\.", text)
    if found is None:
        raise RuntimeFailure(f"{containerd} --version says {text!r}, which names no version")
    return int(found.group(1)), int(found.group(2))


def _toml(value: str | bool | Path | Iterable[object]) -> str:
    # JSON's strings, booleans and arrays of them are TOML's.
    if isinstance(value, (bool, str, Path)):
        return json.dumps(str(value) if isinstance(value, Path) else value)
    return json.dumps([str(item) for item in value])
