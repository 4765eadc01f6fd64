"""Which containers depend on a gate: a runtime wrapper whose path their runtime has noted for them.

A gate that is removed too early leaves containers that can be neither entered nor stopped
(docs/facts.md#containerd-handlers, #cri-o-handlers). So this is asked before one is removed: by commands, and
as ``python3 -I -S gate_users.py GATE [FILE…]`` by a person. Package scripts, which may not have Python any
more, ask the same in sh: ``packaging/kept.sh``.
It imports only the standard library, asks no daemon, and reads what the runtimes have written.

It must not know how a gate is installed.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any

    # gate, configuration files → containers
    Source = Callable[[str, Sequence[str]], Iterable[str]]

_CONTAINERD_STATES = (
    "/run/containerd",
    "/run/docker/containerd/daemon",
    "/run/k3s/containerd",
    "/run/k0s/containerd",
    "/var/snap/microk8s/common/run/containerd",
)
_MOUNTS = "/proc/self/mounts"
_TASKS = "/io.containerd.runtime.v2.task"
_DOCKER_CONFIG = "/etc/docker/daemon.json"
_DOCKER_ROOT = "/var/lib/docker"
_CRI = "io.kubernetes.cri."
_CRIO_CONFIG = "/etc/crio/crio.conf"
_CRIO_DROP_INS = "/etc/crio/crio.conf.d"
_CRIO_STORES = ("/run/containers/storage", "/var/lib/containers/storage")
_CRIO = "io.kubernetes.cri-o."
# Bytes of a file; the largest, a container's config, has some ten thousand.
_LIMIT = 16 << 20


def users(gate: str, configurations: Sequence[str] = ()) -> tuple[str, ...]:
    """The containers that need the gate, each as a person knows it, sorted; none if it may go.

    gate: its absolute path. configurations: runtimes' files that may name it, besides the usual ones.
    Raises `OSError` where it cannot be told, for want of permission.
    """
    return tuple(sorted({user for source in SOURCES for user in source(gate, configurations)}))


# --- containerd ----------------------------------------------------------------------------------------


def containerd(gate: str, _: Sequence[str]) -> Iterator[str]:
    """Tasks of every containerd, Docker's included, whose bundle notes the gate.

    The shim writes the low-level runtime's path into the bundle when it creates the task, and the bundle goes
    with the task. The CRI deletes a task as soon as it ends: what is left of such a container in the CRI
    needs no low-level runtime any more.
    """
    for state in _states():
        # Anybody may work in a folder that looks like a shim's.
        if not _is_ours(state + _TASKS):
            continue
        for namespace in _entries(state + _TASKS):
            for name in _entries(f"{state}{_TASKS}/{namespace}"):
                bundle = f"{state}{_TASKS}/{namespace}/{name}"
                if _same(_noted(bundle), gate):
                    yield _task(bundle, namespace, name)


def _states() -> Iterator[str]:
    """The state folders of the containerds of this host: the usual ones, and those that are seen in use."""
    found = {os.path.realpath(path) for path in _CONTAINERD_STATES}
    # A shim's working directory is the bundle of its first task; every running task has its root mounted.
    seen = [_link(f"/proc/{entry}/cwd") for entry in _entries("/proc") if entry.isdigit()]
    with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        seen += [_unescaped(line.split(" ", 2)[1]) for line in file if _TASKS in line]
    found |= {path.partition(_TASKS)[0] for path in seen if _TASKS in path}
    yield from sorted(found)


def _unescaped(point: str) -> str:
    # A blank, a tab, a line feed and a backslash are in octal: proc(5).
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), point)


def _noted(bundle: str) -> str:
    # Both are written, the second one for old shims' sake.
    name = _object(f"{bundle}/options.json").get("binary_name")
    if isinstance(name, str) and name:
        return name
    return os.fsdecode(_read(f"{bundle}/runtime") or b"").strip()


def _task(bundle: str, namespace: str, name: str) -> str:
    annotations = _object(f"{bundle}/config.json").get("annotations")
    told = annotations if isinstance(annotations, dict) else {}
    pod = [told.get(f"{_CRI}sandbox-{key}") for key in ("namespace", "name")]
    if all(isinstance(part, str) and part for part in pod):
        return "/".join([*map(str, pod), str(told.get(f"{_CRI}container-name") or "(sandbox)")])
    return f"{namespace}/{name}"


# --- Docker --------------------------------------------------------------------------------------------


def docker(gate: str, configurations: Sequence[str]) -> Iterator[str]:
    """Containers of Docker, running or not: each notes its runtime by the name that daemon.json defines.

    One that does not run needs the name as well: Docker does not start it under another.
    """
    for path in {*configurations, _DOCKER_CONFIG}:
        document = _object(path)
        runtimes = document.get("runtimes")
        names = [
            name
            for name, entry in (runtimes.items() if isinstance(runtimes, dict) else ())
            if isinstance(entry, dict) and _same(str(entry.get("path") or ""), gate)
        ]
        for folder in _docker_containers(document) if names else ():
            if _object(f"{folder}/hostconfig.json").get("Runtime") in names:
                name = _object(f"{folder}/config.v2.json").get("Name")
                identity = os.path.basename(folder)
                yield f"docker/{name.lstrip('/') if isinstance(name, str) and name else identity}"


def _docker_containers(document: dict[str, Any]) -> Iterator[str]:
    told = document.get("data-root") or document.get("graph")
    roots = {told if isinstance(told, str) else _DOCKER_ROOT, *_docker_roots()}
    # With userns-remap all lies in a folder named after the two numbers.
    roots |= {
        f"{root}/{name}" for root in roots for name in _entries(root) if name.replace(".", "").isdigit()
    }
    for root in sorted(roots):
        for identity in _entries(f"{root}/containers"):
            yield f"{root}/containers/{identity}"


def _docker_roots() -> Iterator[str]:
    """Where daemons that run were told by an option to keep their data."""
    for entry in _entries("/proc"):
        words = (_read(f"/proc/{entry}/cmdline") or b"").split(b"\0") if entry.isdigit() else [b""]
        if os.path.basename(words[0]) != b"dockerd" or _user_of(entry) not in _owners():
            continue
        for word, after in zip(words, [*words[1:], b""], strict=True):
            name, equals, value = word.partition(b"=")
            if name in (b"--data-root", b"--graph", b"-g"):
                yield os.fsdecode(value if equals else after)


# --- CRI-O ---------------------------------------------------------------------------------------------


def cri_o(gate: str, configurations: Sequence[str]) -> Iterator[str]:
    """Pods of CRI-O, running or not, that were created with a handler by name whose program is the gate.

    CRI-O looks the handler up again for everything that it does to them; once that is gone they cannot even
    be stopped. A pod that got the gate as the default handler notes no handler and takes whichever is the
    default by then, so that it does not need the gate once CRI-O has been restarted without it.
    """
    handlers: set[str] = set()
    stores = set(_CRIO_STORES)
    for path in {*configurations, _CRIO_CONFIG, *_below(_CRIO_DROP_INS)}:
        if path.endswith(".json"):
            continue
        main = _toml(path).get("crio")
        main = main if isinstance(main, dict) else {}
        stores |= {value for key in ("root", "runroot") if isinstance(value := main.get(key), str)}
        runtime = main.get("runtime")
        entries = runtime.get("runtimes") if isinstance(runtime, dict) else None
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            if isinstance(entry, dict) and _same(str(entry.get("runtime_path") or ""), gate):
                handlers.add(name)
    if not handlers:
        return
    for store in stores:
        # Called after the storage driver: overlay-containers.
        for folder in (name for name in _entries(store) if name.endswith("-containers")):
            for identity in _entries(f"{store}/{folder}"):
                annotations = _object(f"{store}/{folder}/{identity}/userdata/config.json").get("annotations")
                told = annotations if isinstance(annotations, dict) else {}
                # Pods' authors can write the handler's annotation, but not into a sandbox.
                if told.get(f"{_CRIO}ContainerType") == "sandbox" and (
                    told.get(f"{_CRIO}RuntimeHandler") in handlers
                ):
                    pod = [told.get(f"{_CRIO}{key}") for key in ("Namespace", "KubeName")]
                    known = all(isinstance(part, str) and part for part in pod)
                    yield "/".join(map(str, pod)) if known else f"cri-o/{identity}"


def _below(folder: str) -> Iterator[str]:
    for path, _, names in os.walk(folder):
        yield from (os.path.join(path, name) for name in names)


def _toml(path: str) -> dict[str, Any]:
    """The TOML document in the file; an empty one if there is none."""
    import tomllib

    try:
        return tomllib.loads((_read(path) or b"").decode())
    except (ValueError, RecursionError):
        return {}


SOURCES: tuple[Source, ...] = (containerd, docker, cri_o)
"""One function a runtime."""


# --- reading -------------------------------------------------------------------------------------------


def _same(path: str, gate: str) -> bool:
    try:
        return bool(path) and (path == gate or os.path.realpath(path) == os.path.realpath(gate))
    except ValueError:  # no file can be called so
        return False


def _owners() -> tuple[int, ...]:
    """Whose containers can need a gate: root's, and those of who asks."""
    return 0, os.getuid()


def _is_ours(folder: str) -> bool:
    """Whether there is such a folder, and nobody else can have put anything into it."""
    try:
        found = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return found.st_uid in _owners() and not found.st_mode & stat.S_IWOTH


def _user_of(process: str) -> int | None:
    """The user that has started a process, whatever it has become since; None if it has ended."""
    found = re.search(rb"^Uid:\s+(\d+)", _read(f"/proc/{process}/status") or b"", re.MULTILINE)
    return int(found[1]) if found else None


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return []


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # it has ended, or belongs to nobody whose task this could be
        return ""


def _read(path: str) -> bytes | None:
    """A file's bytes; None if there is none, or nothing that a runtime has written."""
    try:
        # Looked at first: opening a pipe waits for its writer, and opening a device may do anything.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = file.read(_LIMIT + 1)
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError, ValueError):
        return None
    return found if len(found) <= _LIMIT else None


def _object(path: str) -> dict[str, Any]:
    """The JSON object in the file; an empty one if there is none."""
    try:
        found = json.loads(_read(path) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def main(arguments: Sequence[str]) -> int:
    """Print who uses the gate; 0 if nobody, 1 if somebody, 2 if it cannot be told."""
    if not arguments:
        sys.stderr.write("usage: gate_users.py GATE [CONFIGURATION…]\n")
        return 2
    try:
        found = users(arguments[0], arguments[1:])
    except OSError as error:
        sys.stderr.write(f"cannot tell who uses {arguments[0]!r}: {error}\n")
        return 2
    for user in found:
        sys.stdout.write(f"{ascii(user)[1:-1]}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
