"""A whole host in one folder: a private containerd, its CRI, CDI directories, and `cdi-courier run`.

Tests and the demo open one with `Lab(...)`. When it closes, also after a failure or Ctrl-C, no process,
mount, cgroup, network namespace or file of it is left; what does not go is named in `LeftoverError`. It must
not know what is tested in it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import cni, host, image
from . import containerd as containerd_module
from .containerd import Binaries, Containerd, Handler
from .courier import Courier, CourierFailure
from .cri import CriClient, CriError
from .packages import PackageError, Packages, Progress, machine_suite

__all__ = ["Courier", "CourierFailure", "Lab", "LeftoverError", "reap_stale", "unsuitable"]

NEWER = "newer"  # the handler whose runc can map the owners of mounts, where a lab has one

_PREFIX = "cdi-lab-"
_CONTAINERD = "c"  # short: below it lie sockets
_POD_TIMEOUT = 10.0  # seconds for each pod's orderly end; afterwards the disorderly one takes everything


class LeftoverError(Exception):
    """Something of the lab could not be removed; the text names each thing."""


class Lab:
    """The host. Use as a context manager.

    suite: Debian's suite, or several to try, that containerd comes from. binaries: these instead, e.g.
    `containerd.installed()`. nri, cdi, handlers, extra_config: as in `Containerd`. progress: called with a
    line for a person before whatever takes time.

    root            everything, mode 0711, below the system's temporary folder
    cdi_dirs        the two CDI directories, ascending priority, empty
    nri_socket      where plugins connect
    state_dir       for `cdi-courier`'s own state
    containerd, cri the daemon and its client
    delivery        the [nri] delivery that `settings` writes, until `reset`
    """

    def __init__(
        self,
        suite: str | Sequence[str] = containerd_module.SUITES_2,
        *,
        binaries: Binaries | None = None,
        packages: Packages | None = None,
        nri: bool = True,
        cdi: bool = True,
        handlers: Mapping[str, Handler] | None = None,
        extra_config: str = "",
        progress: Progress | None = None,
    ) -> None:
        self._packages = packages or Packages(progress=progress)
        self._progress = progress or (lambda line: None)
        self._suite, self._binaries = suite, binaries
        self._options: dict[str, Any] = {
            "nri": nri,
            "cdi": cdi,
            "handlers": handlers or {},
            "extra_config": extra_config,
        }
        self.delivery = "names"
        self._couriers: list[Courier] = []
        self._open = False

    def __enter__(self) -> Lab:
        self._must_be_closed()
        try:
            self.start()
        except BaseException:
            # The cause is what the reader needs; what may have stayed behind is named with it.
            with contextlib.suppress(LeftoverError):
                self.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def start(self) -> None:
        """Bring everything up. Raises PackageError, RuntimeFailure."""
        self._must_be_closed()
        reap_stale()
        binaries = self._binaries or containerd_module.packaged(self._packages, self._suite)
        busybox = image.busybox(self._packages)
        self.root = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._open = True
        # Root of a user namespace is nobody special here, and its containers lie below.
        self.root.chmod(0o711)
        atexit.register(self._at_exit)
        self.cgroup = f"/{self.root.name}"
        if host.file_system(self.root) == "overlayfs":
            # Inside a container: containerd's overlays cannot lie on another one.
            host.mount_tmpfs(self.root)
        host.sign(self.root)
        self.cdi_dirs = [self.root / "cdi/etc", self.root / "cdi/run"]
        self.state_dir = self.root / "courier"
        for folder in (*self.cdi_dirs, self.state_dir, self.root / "logs"):
            folder.mkdir(parents=True)
        archive = image.build(busybox, self.root / "image.tar")
        self.containerd = Containerd(
            self.root / _CONTAINERD, binaries, archive, cdi_spec_dirs=self.cdi_dirs, **self._options
        )
        self.nri_socket = self.containerd.nri_socket
        self.cri = CriClient(
            self.containerd.socket, cgroup_parent=self.cgroup, log_directory=self.root / "logs"
        )
        self._progress(f"starting {binaries.name}")
        self.containerd.start()

    # CDI

    def write_spec(self, name: str, spec: Mapping[str, Any] | str, directory: int = 0) -> Path:
        """Put a CDI spec file in place in one step, as a careful producer does.

        name: the file's, ``vendor.json``. spec: the document, or the file's text as it is. directory: 0 is of
        lower priority than 1.
        """
        path = self.cdi_dirs[directory] / name
        partial = path.with_name(f".{name}.{secrets.token_hex(4)}")
        partial.write_text(spec if isinstance(spec, str) else json.dumps(spec, indent=2))
        return partial.rename(path)

    def clear_specs(self) -> None:
        """Both CDI directories empty again, whatever a test made of them."""
        for directory in self.cdi_dirs:
            if directory.is_symlink() or not directory.is_dir():
                directory.unlink(missing_ok=True)
                directory.mkdir(parents=True)
            for path in directory.iterdir():
                _delete(path)

    # cdi-courier

    def settings(
        self, tables: Mapping[str, Mapping[str, Any]] | None = None, name: str = "config.toml"
    ) -> Path:
        """Write a settings file for `cdi-courier` that points into this lab, and return its path.

        tables: ``{"policy": {"default": "allow"}}``; each key replaces or joins the lab's own.
        """
        merged: dict[str, dict[str, Any]] = {
            "cdi": {"dirs": [str(path) for path in self.cdi_dirs]},
            "nri": {"sockets": [str(self.nri_socket)], "delivery": self.delivery},
            "service": {"state_dir": str(self.state_dir), "log_format": "text"},
        }
        for table, values in (tables or {}).items():
            merged.setdefault(table, {}).update(values)
        path = self.root / name
        path.write_text(_toml_document(merged))
        return path

    def courier(
        self,
        tables: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        name: str = "courier",
    ) -> Courier:
        """A `Courier` with `settings` and an empty log, not yet started. name: of its files."""
        settings = self.settings(tables, f"{name}.toml")
        mark = {host.MARK: str(self.root)}
        log = self.root / f"{name}.log"
        log.unlink(missing_ok=True)
        courier = Courier(settings, log, args, env={**(env or {}), **mark})
        self._couriers.append(courier)
        return courier

    # The end

    def reset(self) -> None:
        """Back to how it was after the start: no courier, pod or CDI file; containerd runs.

        For the next test on the same lab. Raises CriError, RuntimeFailure.
        """
        while self._couriers:
            _end(self._couriers.pop())
        self.containerd.start()
        self.remove_pods()
        self.clear_specs()
        self.delivery = "names"
        shutil.rmtree(self.state_dir, ignore_errors=True)
        self.state_dir.mkdir()

    def remove_pods(self) -> None:
        """End every pod in an orderly way. Raises CriError."""
        for pod in self.cri.list_pods(timeout=_POD_TIMEOUT):
            self.cri.remove_pod(pod.id, timeout=_POD_TIMEOUT)

    def cleanup(self) -> None:
        """End and remove everything; may be called any number of times. Raises LeftoverError."""
        if not self._open:
            return
        for courier in self._couriers:
            _end(courier)
        containerd = getattr(self, "containerd", None)
        if containerd is not None:
            if containerd.running:
                # Whatever an unruly pod or plugin holds up goes with its cgroup below.
                with contextlib.suppress(CriError):
                    self.remove_pods()
            self.cri.close()
            containerd.cleanup()
        _remove(self.root, self.cgroup)
        left = self.leftovers()
        if left:
            raise LeftoverError("left behind: " + "; ".join(left))
        self._open = False
        atexit.unregister(self._at_exit)

    def leftovers(self) -> list[str]:
        """What of this lab is on the host, in words; after `cleanup` nothing."""
        return _leftovers(self.root, self.cgroup)

    def _must_be_closed(self) -> None:
        if self._open:
            raise RuntimeError(f"this lab is open already, in {self.root}")

    def _at_exit(self) -> None:
        with contextlib.suppress(LeftoverError):
            self.cleanup()


def unsuitable() -> str:
    """Why no lab can be opened on this machine, or an empty string."""
    if os.geteuid() != 0:
        return "a container runtime needs root"
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            return f"the runtimes come from Debian's archive, and {tool} is not on this machine"
    try:
        machine_suite()
    except PackageError as error:
        return str(error)
    return ""


def reap_stale() -> list[Path]:
    """Remove what labs left whose process was killed before it could clean up; returns their folders."""
    reaped = host.orphans(_PREFIX)
    for root in reaped:
        _remove(root, f"/{root.name}")
    return reaped


def _end(courier: Courier) -> None:
    # Stopped, not killed: its lock lies outside the lab, and only it removes that.
    with contextlib.suppress(CourierFailure):
        courier.stop()


def _remove(root: Path, cgroup: str) -> None:
    host.end_processes(lambda: {*host.processes_of(root), *host.processes_in_cgroup(cgroup)})
    containerd_module.remove_sockets(containerd_module.shim_sockets(root / _CONTAINERD))
    host.unmount_below(root)
    cni.remove_notes_on(root)
    host.remove_cgroup(cgroup)
    # The owner's file goes last: should this be interrupted, the next lab finds it and goes on.
    with contextlib.suppress(FileNotFoundError):
        for path in root.iterdir():
            if path.name != host.OWNER:
                _delete(path)
    shutil.rmtree(root, ignore_errors=True)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _leftovers(root: Path, cgroup: str) -> list[str]:
    found = [f"process {pid}" for pid in host.processes_of(root)]
    found += [f"process {pid} in cgroup {cgroup}" for pid in host.processes_in_cgroup(cgroup)]
    found += [f"mount {point}" for point in host.mounts_below(root)]
    found += [f"cgroup {path}" for path in host.cgroups(cgroup)]
    found += [f"note {path}" for path in cni.notes_on(root)]
    if root.exists():
        found.append(f"folder {root}")
    return found


def _toml_document(tables: Mapping[str, Mapping[str, Any]]) -> str:
    lines: list[str] = []
    for table, values in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    if isinstance(value, Path):
        value = str(value)
    return json.dumps(value, ensure_ascii=False)
