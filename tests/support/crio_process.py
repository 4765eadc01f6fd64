"""A CRI-O in Python that is a process: it reads its files when it starts, and only then do they count.

Its habits are those measured on a real one (docs/facts.md#cri-o): SIGHUP changes what it says of
its configuration and nothing else; a malformed file, a default handler without its program and a hook of an
unknown stage keep it from starting; a handler that is gone leaves its pods without stop and removal; NRI's
socket stays behind. It runs no containers, but calls the handlers' programs as CRI-O does, with what CRI-O
writes. An independent judge: it shares no code with the product but the builder of message classes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomlkit

if __name__ == "__main__":  # as a program it has no package
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support import fake_crio
from support.cri import MESSAGES
from support.fake_crio import Refusal
from support.host import lives
from support.nri_runtime import Habits, NriRuntime
from support.waiting import wait_for

DATA = Path(__file__).parents[1] / "data/runtimes"

_START = 20.0
_CRI = "/runtime.v1.RuntimeService/"
_POD = 0  # NamespaceMode
_PREFIX = "io.kubernetes.cri-o."
Document = dict[str, Any]


class Fatal(Exception):  # noqa: N818 - what CRI-O ends with
    """It does not start; the text is the last line of its log."""


class CrioProcess:
    """A host's CRI-O below `root`: its files, its programs and, while it runs, its socket.

    As a context manager it runs. `restart` is a command for ``[runtimes] restart``.
    """

    def __init__(self, root: Path, version: str = "1.33.4") -> None:
        self.root = root
        self.etc = root / "etc/crio"
        self.main = self.etc / "crio.conf"
        self.folder = self.etc / "crio.conf.d"
        self.hooks = root / "hooks.d"
        self.socket = root / "crio.sock"
        self.nri_socket = root / "nri.sock"
        self.calls_file = root / "calls"
        self.log_file = root / "log"
        self.storage = root / "storage"
        for folder in (self.folder, self.hooks, root / "bin"):
            folder.mkdir(parents=True)
        (root / "version").write_text(version)
        self.runc = self._program("bin/runc", f'echo "$@" >> {self.calls_file}')
        self.conmon = self._program("bin/conmon", "")
        this = f"{sys.executable} {Path(__file__).resolve()}"
        self.restart = str(self._program("bin/restart", f"exec {this} restart {root}"))
        self.main.write_text(
            "# The host's own; a comment that must stay.\n"
            f'[crio]\nrunroot = "{self.storage}"\n[crio.runtime]\ndefault_runtime = "runc"\n'
            f'hooks_dir = ["{self.hooks}"]\n'
            f'[crio.runtime.runtimes.runc]\nruntime_path = "{self.runc}"\nruntime_type = "oci"\n'
            f'runtime_root = "/run/runc"\nmonitor_path = "{self.conmon}"\n'
            f'[crio.nri]\nenable_nri = false\nnri_listen = "{self.nri_socket}"\n'
        )

    def _program(self, name: str, script: str) -> Path:
        path = self.root / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def __enter__(self) -> CrioProcess:
        assert start(self.root), self.log
        return self

    def __exit__(self, *_: object) -> None:
        stop(self.root)

    @property
    def pid(self) -> int:
        return int((self.root / "pid").read_text())

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of each call of runc."""
        text = self.calls_file.read_text() if self.calls_file.exists() else ""
        return [shlex.split(line) for line in text.splitlines()]

    def hang_up(self) -> None:
        """Have it reload its configuration, and wait until it has."""
        before = self.log.count("reload")
        os.kill(self.pid, signal.SIGHUP)
        wait_for(lambda: self.log.count("reload") > before, _START, "the reload")


# --- starting and stopping -----------------------------------------------------------------------------


def start(root: Path) -> bool:
    """Start it and wait until it serves; False if it ended instead."""
    (root / "pid").unlink(missing_ok=True)
    with (root / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "run", str(root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    wait_for(
        lambda: (root / "pid").exists() or process.poll() is not None, _START, "the start of the fake CRI-O"
    )
    if process.poll() is None:
        # Nobody waits for it in this process any more: it belongs to the folder.
        process.returncode = 0
        return True
    return False


def stop(root: Path) -> None:
    """End it, if it runs, as a service manager does."""
    try:
        pid = int((root / "pid").read_text())
        os.kill(pid, signal.SIGTERM)
    except (OSError, ValueError):
        return

    wait_for(lambda: not lives(pid), _START, "the end of the fake CRI-O")
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    (root / "pid").unlink()


# --- its configuration ---------------------------------------------------------------------------------


def load(root: Path) -> Document:
    """What it makes of its files and its defaults. Raises Fatal."""
    minor = int((root / "version").read_text().split(".")[1])
    document: Document = {
        "crio": {
            "runtime": {
                "default_runtime": "crun" if minor >= 31 else "runc",
                "cdi_spec_dirs": ["/etc/cdi", "/var/run/cdi"],
                "cgroup_manager": "systemd",
                "runtimes": {},
            },
            "nri": {"enable_nri": minor >= 30, "nri_listen": "/var/run/nri/nri.sock"},
        }
    }
    folder = root / "etc/crio/crio.conf.d"
    paths = [root / "etc/crio/crio.conf", *sorted(path for path in folder.rglob("*") if not path.is_dir())]
    for path in paths:
        if not path.exists():
            continue
        try:
            decode(document, tomllib.loads(path.read_text()))
        except ValueError as error:
            raise Fatal(f"walk path: unable to decode configuration {path}: toml: {error}") from None
    if minor < 26:
        del document["crio"]["nri"]
    return document


def decode(target: Document, source: Mapping[str, Any], within: str = "") -> None:
    """One file upon the result of those before it."""
    for key, value in source.items():
        if isinstance(value, dict) and within != ".crio.runtime.runtimes":
            decode(target.setdefault(key, {}), value, f"{within}.{key}")
        else:
            target[key] = value


def handlers(document: Document) -> dict[str, Document]:
    """The handlers that it can use. Raises Fatal if the default one cannot be."""
    runtime = document["crio"]["runtime"]
    usable = {}
    for name, entry in runtime["runtimes"].items():
        if os.access(entry.get("runtime_path") or "", os.X_OK):
            usable[name] = entry
        elif name == runtime["default_runtime"]:
            raise Fatal(f"validating runtime config: runtime validation: invalid runtime_path for {name}")
        else:
            print(f"'{name}' is being ignored due to: invalid runtime_path", flush=True)
    if runtime["default_runtime"] not in usable:
        name = runtime["default_runtime"]
        raise Fatal(f'default_runtime set to "{name}", but no runtime entry table was found')
    return usable


def check_hooks(document: Document) -> None:
    """Raises Fatal for a hook of a stage that it does not know."""
    for folder in document["crio"]["runtime"].get("hooks_dir", ()):
        for path in Path(folder).glob("*.json"):
            for stage in json.loads(path.read_text()).get("stages", ()):
                if stage in ("precreate", "poststop-x"):
                    raise Fatal(f'unknown stage "{stage}"')


# --- the daemon ----------------------------------------------------------------------------------------


class Daemon:
    """What a start has made of the files; nothing changes it later."""

    def __init__(self, root: Path) -> None:
        self.root = root
        document = load(root)
        self.handlers = handlers(document)
        self.default = document["crio"]["runtime"]["default_runtime"]
        check_hooks(document)
        self.pods = root / "pods"
        self.pods.mkdir(exist_ok=True)
        version = (root / "version").read_text()
        self.server = fake_crio.crio(root / "crio.sock", DATA, version)
        self.server.grpc_answers |= {f"{_CRI}{name}": self._method(name) for name in METHODS}
        self.say(document)
        for entry in self.handlers.values():
            for word in ("--version", "features"):
                subprocess.run([entry["runtime_path"], word], check=False)
        nri = document["crio"].get("nri", {})
        if nri.get("enable_nri"):
            path = nri["nri_listen"]
            Path(path).unlink(missing_ok=True)  # as Go's stub does, whoever listens there
            self.nri = NriRuntime(path, Habits((0, 9, 0), "cri-o", version))
            self.nri.listen()
        else:
            print("NRI interface is disabled in the configuration.", flush=True)

    def say(self, document: Document) -> None:
        """What it says of its configuration, over both protocols."""
        self.server.http_answers["/config"] = tomlkit.dumps(document).encode()

    def _method(self, name: str) -> Callable[[bytes], bytes]:
        def answer(data: bytes) -> bytes:
            request = MESSAGES[f"{name}Request"].FromString(data)
            return bytes(MESSAGES[f"{name}Response"](**METHODS[name](self, request)).SerializeToString())

        return answer

    def handler(self, name: str) -> Document:
        """The table of a handler by name, of the present default for an empty one."""
        found = self.handlers.get(name or self.default)
        if found is None:
            known = " ".join(sorted(self.handlers))
            raise Refusal(f"failed to find runtime handler {name} from runtime list map[{known}]")
        return found

    def call(self, entry: Document, *words: str) -> None:
        done = subprocess.run(
            [entry["runtime_path"], f"--root={entry.get('runtime_root', '')}", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Refusal(f"container create failed: {done.stderr}")

    def create(self, entry: Document, annotations: Mapping[str, str]) -> str:
        """A container's bundle, and the call that conmon makes for it."""
        identity = uuid.uuid4().hex
        bundle = self.root / f"storage/overlay-containers/{identity}/userdata"
        bundle.mkdir(parents=True)
        config = json.loads((DATA / "crio-1.36.3-ociconfig-sandbox.json").read_text())
        config["annotations"] = dict(annotations)
        (bundle / "config.json").write_text(json.dumps(config))
        try:
            self.call(entry, "create", "--bundle", str(bundle), "--pid-file", f"{bundle}/pidfile", identity)
        except Refusal:
            (bundle / "config.json").unlink()
            raise
        return identity

    def run_pod(self, request: Any) -> Document:
        entry = self.handler(request.runtime_handler)
        config = request.config
        annotations = dict(config.annotations) | {
            f"{_PREFIX}ContainerType": "sandbox",
            f"{_PREFIX}RuntimeHandler": request.runtime_handler,
            f"{_PREFIX}KubeName": config.metadata.name,
            f"{_PREFIX}Namespace": config.metadata.namespace,
        }
        # Without a process namespace of the pod there is no container for it, but its config all the same.
        if config.linux.security_context.namespace_options.pid == _POD:
            identity = self.create(entry, annotations)
        else:
            identity = self.create({"runtime_path": "/bin/true"}, annotations)
        (self.pods / identity).write_text(request.runtime_handler)
        return {"pod_sandbox_id": identity}

    def stop_pod(self, request: Any) -> Document:
        path = self.pods / request.pod_sandbox_id
        if path.exists():
            self.call(self.handler(path.read_text()), "kill", request.pod_sandbox_id, "15")
        return {}

    def remove_pod(self, request: Any) -> Document:
        path = self.pods / request.pod_sandbox_id
        if path.exists():
            self.call(self.handler(path.read_text()), "delete", "--force", request.pod_sandbox_id)
            bundle = self.root / f"storage/overlay-containers/{request.pod_sandbox_id}/userdata"
            (bundle / "config.json").unlink()
            path.unlink()
        return {}

    def list_pods(self, _: Any) -> Document:
        return {
            "items": [{"id": path.name, "runtime_handler": path.read_text()} for path in self.pods.iterdir()]
        }

    def create_container(self, request: Any) -> Document:
        entry = self.handler((self.pods / request.pod_sandbox_id).read_text())
        annotations = {
            **request.sandbox_config.annotations,
            f"{_PREFIX}ContainerType": "container",
            **request.config.annotations,
            **request.config.labels,
        }
        return {"container_id": self.create(entry, annotations)}


METHODS: Mapping[str, Callable[[Daemon, Any], Document]] = {
    "RunPodSandbox": Daemon.run_pod,
    "StopPodSandbox": Daemon.stop_pod,
    "RemovePodSandbox": Daemon.remove_pod,
    "ListPodSandbox": Daemon.list_pods,
    "CreateContainer": Daemon.create_container,
}


def run(root: Path) -> None:
    """Serve until SIGTERM. Raises Fatal."""
    signals = {signal.SIGHUP, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # for every thread: they are waited for below
    (root / "crio.sock").unlink(missing_ok=True)
    daemon = Daemon(root)
    daemon.server.__enter__()
    temporary = root / f".pid.{os.getpid()}"
    temporary.write_text(str(os.getpid()))
    temporary.rename(root / "pid")
    while signal.sigwait(signals) == signal.SIGHUP:
        try:
            daemon.say(load(root))
            print("Configuration reload completed", flush=True)
        except Fatal as error:
            print(f"Unable to reload configuration: {error}", flush=True)
    os._exit(0)  # as it is: what it listened at stays behind


def main() -> int:
    verb, root = sys.argv[1], Path(sys.argv[2])
    if verb == "restart":
        stop(root)
        if start(root):
            return 0
        print((root / "log").read_text().splitlines()[-1])
        return 1
    try:
        run(root)
    except Fatal as error:
        print(f"{time.strftime('%FT%TZ')} level=fatal msg={json.dumps(str(error))}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
