"""A private dockerd with a containerd of its own, and a client: all that it writes lies below one folder.

It must not know what is tested with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import containerd, host, image
from .containerd import RuntimeFailure
from .packages import Packages
from .unix_http import UnixConnection
from .waiting import WaitTimeoutError, wait_for

SUITE = "trixie"

_START = 30.0  # seconds; a start takes two
_STOP = 20.0
_ANSWER = 60.0
_IMAGE = "cdi-lab"
_API = "/v1.43"  # the first with annotations
_LOG_LINES = 25
_PREFIX = "cdi-docker-"


class DockerError(Exception):
    """The daemon refused; the text is its message."""


class Docker:
    """The daemon. Use as a context manager; it may be restarted, which ends its containers.

    root      everything, below the system's temporary folder
    socket    of its API
    config    its daemon.json
    log_file  what it and its containerd say
    """

    def __init__(self, packages: Packages) -> None:
        self._dockerd = packages.runnable("docker.io", SUITE) / "usr/sbin/dockerd"
        self._binaries = containerd.packaged(packages, containerd.SUITES_1_7)
        self._busybox = image.busybox(packages)
        for left in host.orphans(_PREFIX):
            _remove(left)
        self.root = host.new_folder(_PREFIX)
        self.socket = self.root / "docker.sock"
        self.config = self.root / "etc/daemon.json"
        self.log_file = self.root / "docker.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Docker:
        try:
            self.config.parent.mkdir()
            self.config.write_text("{}\n")  # one that is named must be there
            self.start()
            self._call(
                "POST",
                f"/images/create?fromSrc=-&repo={_IMAGE}",
                image.root_file_system(self._busybox),
                "application/x-tar",
            )
        except BaseException:
            self.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def start(self) -> None:
        """Start and wait for its answer. Raises RuntimeFailure."""
        folders = (self._binaries.shim_folder, self._binaries.runc.parent)
        path = ":".join([*map(str, folders), os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")])
        argv: list[str | Path] = [
            self._dockerd,
            *("--config-file", self.config),
            *("--data-root", self.root / "data"),
            *("--exec-root", self.root / "exec"),
            *("--pidfile", self.root / "pid"),
            *("--host", f"unix://{self.socket}"),
            *("--cgroup-parent", _cgroup(self.root)),
            *("--bridge", "none"),
            *("--shutdown-timeout", "1"),
            # The machine's own rules stay as they are, and no overlay is put on one.
            *("--userland-proxy=false", "--iptables=false", "--ip6tables=false", "--storage-driver=vfs"),
        ]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": path, "TMPDIR": str(self.root), host.MARK: str(self.root)},
                cwd=self.root,
                start_new_session=True,
            )
        try:
            wait_for(self._ready, _START, "dockerd to answer")
        except WaitTimeoutError as error:
            raise self._failure(str(error)) from None

    def stop(self) -> None:
        """End it as a service manager would. Raises RuntimeFailure when it hangs."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise self._failure("dockerd did not end") from None

    def restart(self) -> None:
        self.stop()
        self.start()

    def reload(self) -> None:
        """Have it read daemon.json, as ``systemctl reload docker`` does; returns when it has."""
        assert self._process is not None
        already = self.log().count("Reloaded configuration")
        self._process.send_signal(signal.SIGHUP)
        wait_for(lambda: self.log().count("Reloaded configuration") > already, _START, "the reload")

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def cleanup(self) -> None:
        """End and remove everything."""
        with contextlib.suppress(RuntimeFailure):
            self.stop()
        _remove(self.root)

    # Containers

    def run(self, name: str, annotations: Mapping[str, str] | None = None, **options: Any) -> str:
        """Create and start a container that stays. options: of its HostConfig. Raises DockerError."""
        body = {
            "Image": _IMAGE,
            "Cmd": list(image.FOREVER),
            "Env": ["PATH=/bin"],
            "HostConfig": {"NetworkMode": "host", "Annotations": dict(annotations or {}), **options},
        }
        self.call("POST", f"/containers/create?name={name}", body)
        self.call("POST", f"/containers/{name}/start")
        return name

    def execute(self, container: str, argv: Sequence[str]) -> str:
        """What a command in the container writes."""
        body = {"Cmd": list(argv), "AttachStdout": True, "AttachStderr": True}
        identity = json.loads(self.call("POST", f"/containers/{container}/exec", body))["Id"]
        data = self.call("POST", f"/exec/{identity}/start", {"Detach": False})
        found = b""
        while data:
            # Frames: one byte says which stream it is, the last four of eight how long it is.
            length = int.from_bytes(data[4:8], "big")
            found, data = found + data[8 : 8 + length], data[8 + length :]
        return found.decode(errors="replace")

    def stop_container(self, name: str) -> None:
        self.call("POST", f"/containers/{name}/stop?t=0")

    def remove(self, name: str) -> None:
        self.call("DELETE", f"/containers/{name}?force=1")

    def call(self, method: str, path: str, body: Any = None) -> bytes:
        """A request of its API. Raises DockerError."""
        return self._call(method, path, b"" if body is None else json.dumps(body).encode())

    def _call(self, method: str, path: str, body: bytes, kind: str = "application/json") -> bytes:
        with contextlib.closing(UnixConnection(self.socket, _ANSWER)) as connection:
            connection.request(method, _API + path, body, {"Content-Type": kind})
            response = connection.getresponse()
            data = response.read()
        if response.status >= 400:
            raise DockerError(json.loads(data)["message"])
        return data

    def _ready(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise self._failure("dockerd ended at its start")
        try:
            self.call("GET", "/info")
        except (OSError, DockerError):
            return False
        return True

    def _failure(self, text: str) -> RuntimeFailure:
        lines = self.log().splitlines()[-_LOG_LINES:]
        return RuntimeFailure("\n".join([text, f"the last lines of {self.log_file}:", *lines]))


def _cgroup(root: Path) -> str:
    return f"/{root.name}"


def _remove(root: Path) -> None:
    cgroup = _cgroup(root)
    host.end_processes(lambda: {*host.processes_of(root), *host.processes_in_cgroup(cgroup)})
    host.unmount_below(root)
    host.remove_cgroup(cgroup)
    shutil.rmtree(root, ignore_errors=True)
