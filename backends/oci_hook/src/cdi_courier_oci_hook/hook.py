"""The OCI hook of stage createRuntime, or prestart in old days: injects into a container that exists already.

Light module: it runs once per annotated container, as ``python3 -I -S -c COMMAND`` with the command that
`command` makes. The container's state comes on stdin. Nothing is printed on stdout; why a container is
refused goes to stderr, which runc shows, and to the log, for crun does not. Exit status 0 or 1.

What a container that exists cannot be given is worked out first, before anything is touched. It must not know
how devices and mounts get there (`live`).
Source: docs/facts.md#hook-stages, #edits-by-stage, #cri-o-annotations.
"""

from __future__ import annotations

import os
import time

from cdi_courier import editing, fastjson, table
from cdi_courier.errors import CourierError, DeliveryError, quoted
from cdi_courier.oci import process_ids

from . import entry, log
from .live import cgroup, mounts, namespaces, proxy, syscalls
from .live import inject as live

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Literal, NoReturn

    from cdi_courier.request import ContainerRequest
    from cdi_courier.table import DeviceCgroup, Undeliverable

    Json = dict[str, Any]
    # Who runs the hook; what its containers are called, and where, follows from that.
    Kind = Literal["cri-o", "local"]
    Keys = Sequence[tuple[str, bool]]

_RESERVE = 1.0  # seconds before the runtime's own timeout: it would kill without a word
_MOUNT_POINT = "io.kubernetes.cri-o.MountPoint"
_POD_ANNOTATIONS = "io.kubernetes.cri-o.Annotations"
_SANDBOX = "io.kubernetes.cri-o.SandboxID"
_MANAGER = "io.container.manager"
_TYPE = "io.kubernetes.cri-o.ContainerType"
_LARGEST_PID = (1 << 31) - 1
_WHAT = "the container's state on stdin"

# Why what is lost is lost.
_PROCESS = "the runtime has described the container's process already"
_RDT = "the runtime has put the container into its resctrl group already"
_NET = "network devices are moved by the runtime"
_LATER = "the runtime has read its list of hooks, and this stage comes after ours"
_MODE = "in a user namespace the node is the host's, with the host's owner and mode"
_UNKNOWN = "this hook does not know it"

_LOST_WHOLE = {
    "env": lambda item: (f"env {item.partition('=')[0]}", _PROCESS),
    "additionalGids": lambda item: (f"additional group {item}", _PROCESS),
    "netDevices": lambda item: (f"network device {item['hostInterfaceName']}", _NET),
}
_DELIVERED = ("deviceNodes", "mounts", "hooks")


class Installed(entry.Installed):
    """What the installer has told the hook, beside what `entry.Installed` says.

    kind: who runs it. keys: the annotations it is run for, each a key or, if the second is true, the
    beginning of one. timeout: seconds after which the runtime kills it.
    """

    __slots__ = ("keys", "kind", "timeout")

    def __init__(self, *, kind: Kind, keys: Keys = (), timeout: int = 10, **more: Any) -> None:
        more.setdefault("origin", "local" if kind == "local" else "kubernetes")
        super().__init__(**more)
        self.kind: Kind = kind
        self.keys = tuple((key, begins) for key, begins in keys)
        self.timeout = timeout


class Asked:
    """A request and the container that makes it. config: its OCI config; empty if there is none to read."""

    __slots__ = ("config", "request", "root", "state")

    def __init__(self, state: Json, config: Json, root: str, request: ContainerRequest) -> None:
        self.state = state
        self.config = config
        self.root = root
        self.request = request


def command(installed: Installed, path: list[str]) -> str:
    """The Python command of the hook. path: what is put on ``sys.path``."""
    return (
        f"import sys; sys.path += {path!r}; "
        "from cdi_courier_oci_hook.hook import Installed, main; "
        f"main({installed!r})"
    )


def main(installed: Installed) -> NoReturn:
    """Inject what stdin's container asks for and end the process."""
    os._exit(respond(lambda data: _inject_or_go_slow(data, installed), installed))


def respond(inject: Callable[[bytes], None], installed: Installed) -> int:
    """Do it with stdin's state and return 0; or log why it cannot be done, and return 1."""
    return entry.guarded(lambda: inject(entry.read(0, _WHAT)), installed)


def ask(data: bytes, installed: Installed) -> Asked | None:
    """Who asks for what, by the state on stdin; None for a container that this hook is not for.

    Raises `DeliveryError`: ``HOK201`` the state is unusable, ``HOK202`` the config or the root cannot be
    found, ``HOK203`` the annotation is nowhere; `CdiError` ``CDI018``.
    """
    state = _state(data)
    config = _config(state)
    annotations = state.get("annotations") or config.get("annotations") or {}
    if not isinstance(annotations, dict):
        raise _unusable("its annotations are not an object")
    names = {}
    if installed.kind == "cri-o":
        if annotations.get(_MANAGER) == "libpod":
            # Podman may read CRI-O's folder of hooks; it has a hook of its own, which has done all of it.
            return None
        if annotations.get(_TYPE) == "sandbox":
            return None
        names = {
            "namespace": annotations.get("io.kubernetes.pod.namespace", ""),
            "pod": annotations.get("io.kubernetes.pod.name", ""),
            "container": annotations.get("io.kubernetes.container.name", ""),
        }
        if not _has(annotations, installed.keys):
            annotations = _of_sandbox(state, annotations, installed.keys)
    request = editing.request_of({"annotations": annotations}, installed.origin, **names)
    return Asked(state, config, _root(state, config, installed.kind), request)


def _inject_or_go_slow(data: bytes, installed: Installed) -> None:
    asked = ask(data, installed)
    if asked is None:
        return
    known = table.read(table.place(installed.state_dir), installed.settings)
    if known is not None:
        installed.log = known.log
        try:
            granted = editing.grant(asked.request, known)
            undeliverable, device_cgroup = known.undeliverable, known.device_cgroup
        except (editing.SlowPath, TypeError, KeyError, IndexError, ValueError, AttributeError):
            pass  # also for a table that is not what it says; the full pipeline makes another
        else:
            if granted is not None:
                deliver(asked, granted, installed, undeliverable=undeliverable, device_cgroup=device_cgroup)
            return
    entry.go_slow_with(data, installed, "hook_main")


def deliver(
    asked: Asked,
    granted: editing.Granted | CourierError,
    installed: Installed,
    *,
    undeliverable: Undeliverable,
    device_cgroup: DeviceCgroup,
) -> None:
    """Put what was granted into the container; all of what can be delivered, or nothing.

    undeliverable, device_cgroup: as in ``[delivery]`` and ``[oci_hook]``.
    Raises `CdiError` ``CDI017``, ``CDI018``; `DeliveryError` from ``HOK204`` on.
    """
    deadline = _deadline(installed.timeout)
    if isinstance(granted, CourierError):
        log.write(installed.log, f"started without its devices: {granted}", log.WARNING)
        return
    syscalls.must_be_supported()
    spaces = namespaces.of(asked.state["pid"])
    wanted = dict(granted.edits)
    # First, for what the runtime runs itself is not lost, whatever its stage.
    wanted["hooks"] = [hook for hook in wanted.get("hooks") or [] if not editing.has_hook(asked.config, hook)]
    lost = undeliverable_edits(wanted, user_namespace=spaces.user is not None)
    if lost:
        error = _undeliverable(granted.names, lost)
        if undeliverable != "warn":
            raise error
        log.write(installed.log, f"started without a part of its devices: {error}", log.WARNING)
    if not asked.config:
        log.write(installed.log, "no config was found beside the state; device nodes are root's", log.WARNING)
    uid, gid = process_ids(asked.config)
    wanted["mounts"] = [
        mount
        for mount in wanted.get("mounts") or []
        if not mounts.unsupported(mount, user_namespace=spaces.user is not None)
    ]

    def allow(rules: Sequence[live.Rule]) -> None:
        now = time.monotonic()
        cgroup.allow(
            asked.state["pid"],
            rules,
            cgroups_path=_cgroups_path(asked.config),
            mode=device_cgroup,
            log_to=installed.log,
            # A systemd that does not answer must not take the time of what comes after: best-effort goes on.
            deadline=now + (deadline - now) / 2,
        )

    live.inject(
        live.Container(asked.state, asked.root, uid=uid, gid=gid),
        spaces,
        wanted,
        allow=allow,
        deadline=deadline,
    )


def _deadline(timeout: float) -> float:
    """The `time.monotonic` by which all must be done: soon after, the runtime kills without a word.

    timeout: the runtime's, in seconds from when it started this process. What has passed since counts, such
    as the start of the interpreter that has everything.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            # Behind the name, which may hold blanks and brackets, the 22nd field of all.
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        passed = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        passed = 0.0
    return time.monotonic() + max(timeout - max(passed, 0.0) - _RESERVE, _RESERVE)


def undeliverable_edits(edits: Json, *, user_namespace: bool = False) -> list[tuple[str, str]]:
    """What of CDI edits cannot be put into a container that exists, each with the reason.

    edits: as `cdi_courier.oci.apply_edits` takes them. user_namespace: whether the container has one.
    """
    lost = []
    for key, value in edits.items():
        if key in _LOST_WHOLE:
            lost += [_LOST_WHOLE[key](item) for item in value]
        elif key == "intelRdt":
            lost.append(("intelRdt", _RDT))
        elif key not in _DELIVERED:
            lost.append((key, _UNKNOWN))
    for node in edits.get("deviceNodes") or []:
        named = [name for name in ("fileMode", "uid", "gid") if node.get(name) is not None]
        if user_namespace and named:
            lost.append((f"{' and '.join(named)} of device node {node['path']}", _MODE))
    for mount in edits.get("mounts") or []:
        reason = mounts.unsupported(mount, user_namespace=user_namespace)
        if reason:
            lost.append((f"mount {mount['containerPath']}", reason))
    lost += [
        (f"{hook['hookName']} hook {hook['path']}", _LATER)
        for hook in edits.get("hooks") or []
        if hook["hookName"] not in proxy.STAGES
    ]
    return lost


def _undeliverable(names: Sequence[str], lost: Sequence[tuple[str, str]]) -> DeliveryError:
    what = "; ".join(f"{quoted(edit)} ({reason})" for edit, reason in lost)
    return DeliveryError(
        "HOK204",
        f"{', '.join(names)}: not everything can be put into a container that exists: {what}",
        'use NRI or the runtime wrapper, or set [delivery] undeliverable = "warn" to start without these',
    )


def _state(data: bytes) -> Json:
    try:
        state = fastjson.loads(data)
    except (ValueError, RecursionError) as error:
        raise _unusable(f"it is not JSON: {error}") from None
    if not isinstance(state, dict):
        raise _unusable("it is not an object")
    pid = state.get("pid")
    if type(pid) is not int or not 0 < pid <= _LARGEST_PID:
        # A hook of a later stage would see none, or that of another PID namespace.
        raise _unusable("it names no process")
    if not isinstance(state.get("bundle", ""), str) or not isinstance(state.get("root", ""), str):
        raise _unusable("bundle or root is not a string")
    return state


def _config(state: Json) -> Json:
    """The container's OCI config; empty where the state does not say where it is."""
    bundle = state.get("bundle") or "/"
    # crun before 1.27 may say "/" (crun#2025). Both runtimes run hooks in the bundle, so that tells too.
    for folder in (bundle, "." if bundle == "/" else bundle):
        config = _json_file(f"{folder}/config.json")
        if config is not None:
            return config
    return {}


def _json_file(path: str) -> Json | None:
    """An object from a file that a runtime or engine wrote; None if there is none."""
    try:
        with open(path, "rb") as file:
            found = fastjson.loads(file.read())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DeliveryError(
            "HOK202",
            f"the container's config {quoted(path)} cannot be read: {why}",
            "report the runtime and its version",
        ) from None
    return found if isinstance(found, dict) else {}


def _root(state: Json, config: Json, kind: Kind) -> str:
    """The absolute path of the container's root, in its mount namespace before the root changes."""
    bundle = state.get("bundle") or "/"
    described = config.get("root")
    found = described.get("path") if isinstance(described, dict) else None
    if not found:
        found = state.get("root")
    if not found and kind == "cri-o":
        # CRI-O writes it after the pod's annotations, so it cannot be forged there; elsewhere it could.
        found = (state.get("annotations") or {}).get(_MOUNT_POINT)
    if not isinstance(found, str) or not found:
        raise DeliveryError(
            "HOK202",
            "nothing tells where the container's root file system is",
            "report the runtime and its version",
        )
    if not found.startswith("/"):
        found = f"{os.getcwd() if bundle == '/' else bundle}/{found}"
    return os.path.normpath(found)


def _has(annotations: Json, keys: Keys) -> bool:
    return any(
        any(name.startswith(key) for name in annotations) if begins else key in annotations
        for key, begins in keys
    )


def _of_sandbox(state: Json, annotations: Json, keys: Keys) -> Json:
    """The pod's annotations, by the config of its sandbox.

    CRI-O before 1.24 runs hooks for them, but gives them to the sandbox alone. Its config lies beside the
    container's. Raises `DeliveryError` ``HOK203`` if they are not there either: a container that asks must
    not start as if it had not.
    """
    sandbox = annotations.get(_SANDBOX)
    if isinstance(sandbox, str) and sandbox.isalnum() and sandbox.isascii():
        containers = os.path.dirname(os.path.dirname(os.path.normpath(state.get("bundle") or "/")))
        config = _json_file(f"{containers}/{sandbox}/userdata/config.json") or {}
        try:
            found = fastjson.loads(((config.get("annotations") or {}).get(_POD_ANNOTATIONS) or "{}").encode())
        except (ValueError, TypeError, AttributeError, RecursionError):
            found = {}
        if isinstance(found, dict) and _has(found, keys):
            return {**annotations, **found}
    raise DeliveryError(
        "HOK203",
        "the annotation for which the runtime runs this hook is neither in the container's state nor in its "
        "sandbox's config",
        "which version of CRI-O is it? From 1.24 on it is in the state",
    )


def _cgroups_path(config: Json) -> str:
    linux = config.get("linux")
    found = linux.get("cgroupsPath") if isinstance(linux, dict) else None
    return found if isinstance(found, str) else ""


def _unusable(why: str) -> DeliveryError:
    return DeliveryError(
        "HOK201",
        f"the container's state on stdin is not usable: {why}",
        "this is a hook of the stages createRuntime and prestart; report the runtime and its version",
    )
