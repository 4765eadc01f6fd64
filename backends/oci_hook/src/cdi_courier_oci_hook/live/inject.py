"""Puts devices, mounts and hooks into a container that exists and has not started. Light module.

In the host's view everything is looked up and taken along: the nodes' numbers, copies of the mounts. Then a
child goes into the container's mount namespace and puts it there, and waits: only when the hooks have run as
well is it told to leave things as they are. If it is told otherwise, or nothing because this process has been
killed, it takes away what it made. The host's own mounts and files are never touched.

It must not know annotations, policy or settings. Source: docs/facts.md#live-containers, #user-namespaces.
"""

from __future__ import annotations

import os
import time

from cdi_courier import fastjson
from cdi_courier.errors import DeliveryError, printable, quoted
from cdi_courier.oci import complete_node, id_map_option

from . import mountinfo, mounts, nodes, proxy, syscalls
from .rootfs import Rootfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from .mounts import Prepared
    from .namespaces import Namespaces

    Json = dict[str, Any]
    Rule = tuple[str, int, int, str]

_KEEP = b"k"


class Container:
    """What is known of a container.

    state: the OCI state, with ``pid`` as the host numbers it. root: absolute path of its root file system in
    its mount namespace, where the root has not been changed yet. uid, gid: of its process, which own device
    nodes that name no owner.
    """

    __slots__ = ("gid", "root", "state", "uid")

    def __init__(self, state: Json, root: str, *, uid: int = 0, gid: int = 0) -> None:
        self.state = state
        self.root = root
        self.uid = uid
        self.gid = gid


def inject(
    container: Container,
    spaces: Namespaces,
    edits: Json,
    *,
    allow: Callable[[Sequence[Rule]], None],
    deadline: float,
) -> None:
    """Deliver edits; all of them, or none.

    spaces: those of the container's process. edits: CDI container edits as `cdi_courier.oci.apply_edits`
    takes them, of which only ``deviceNodes``, ``mounts`` and ``hooks`` of `proxy.STAGES` are looked at.
    allow: has the device cgroup allow devices. deadline: a `time.monotonic` by which all must be done.
    Raises `CdiError` ``CDI017``, `DeliveryError` ``HOK206`` to ``HOK220`` and what `allow` raises.
    """
    completed = [_completed(node, container) for node in edits.get("deviceNodes") or []]
    # As in a config: what comes later takes the place of an earlier one.
    made = {node["path"]: node for node in completed}
    mounted = {mount["containerPath"]: mount for mount in edits.get("mounts") or []}
    prepared: list[Prepared] = []
    helper = None
    try:
        # One after the other: what has been taken is let go of, should the next fail.
        prepared.extend(_prepared(mount, spaces) for mount in sorted(mounted.values(), key=_depth))
        if spaces.user is not None:
            # Nobody can make a node that works there: what user namespaces mount has no devices.
            prepared.extend(mounts.prepare_node(node) for node in made.values())
            made = {}
        rules = _rules(completed)
        if rules:
            allow(rules)
        if prepared or made:
            helper = _Helper(container, spaces, prepared, list(made.values()), deadline)
    finally:
        for taken in prepared:
            os.close(taken.tree)
    try:
        proxy.run(edits.get("hooks") or [], container.state, spaces, container.root, deadline)
    except BaseException:
        if helper is not None:
            helper.end(b"")
        raise
    if helper is not None:
        helper.end(_KEEP)


class _Helper:
    """The child in the container's mount namespace: made when it has done its work, until `end`.

    Raises `DeliveryError` when made, of what the child could not do; then there is nothing left of it, or
    will be nothing once a file system answers that it is waiting for.
    """

    def __init__(
        self,
        container: Container,
        spaces: Namespaces,
        prepared: Sequence[Prepared],
        made: Sequence[Json],
        deadline: float,
    ) -> None:
        pipes: list[int] = []
        try:
            # What the host has mounted, looked up here: inside, it could not be told.
            found = mountinfo.parse(syscalls.read_at(None, "/proc/self/mountinfo"))
            host = {mount.device for mount in found.values()}
            for _ in range(2):
                pipes += syscalls.pipe()
            self._pid = syscalls.fork()
        except OSError as error:
            for descriptor in pipes:
                os.close(descriptor)
            raise _broken(str(error.strerror)) from None
        answer, tell, listen, self._verdict = pipes
        if self._pid == 0:
            os.close(answer)
            os.close(self._verdict)
            _be(container, spaces, prepared, made, host, tell, listen)
        os.close(tell)
        os.close(listen)
        said = _all_of(answer, deadline)
        os.close(answer)
        if said is None:
            os.close(self._verdict)
            raise _broken(
                "it does not end in time",
                "does a file system not answer, of a volume for example, where something is put?",
            )
        if said != _KEEP:
            self.end(b"")
            raise _told(said)

    def end(self, verdict: bytes) -> None:
        """Tell the child whether to leave things as they are, and wait for its end."""
        try:  # noqa: SIM105 - contextlib is not light
            os.write(self._verdict, verdict)
        except OSError:
            pass  # it has ended, which its status tells
        os.close(self._verdict)
        _, status = os.waitpid(self._pid, 0)
        if verdict and status:
            raise _broken(f"wait status {status}")


def _be(
    container: Container,
    spaces: Namespaces,
    prepared: Sequence[Prepared],
    made: Sequence[Json],
    host: set[str],
    tell: int,
    listen: int,
) -> NoReturn:
    """The child's whole life."""
    rootfs = None
    try:
        _let_go_of_output()
        os.umask(0)
        rootfs = _entered(container, spaces, host)
        for mount in prepared:
            mounts.attach(rootfs, mount)
        for node in made:
            nodes.put(rootfs, node)
        said = _KEEP
    except DeliveryError as error:
        said = fastjson.dumps([error.code, error.message, error.hint])
    except BaseException as error:  # noqa: BLE001 - this process is a copy of the caller's and must end here
        said = fastjson.dumps([f"{type(error).__name__}: {error}"])
    status = 1
    try:
        if said == _KEEP and _says(tell, said):
            os.close(tell)
            status = 0 if os.read(listen, 1) == _KEEP else 1
        if status and rootfs is not None:
            rootfs.roll_back()
        if said != _KEEP:
            _says(tell, said)
    finally:
        os._exit(status)


def _says(tell: int, said: bytes) -> bool:
    """Tell the caller; whether that still listens."""
    try:
        os.write(tell, said)
    except OSError:
        return False
    return True


def _entered(container: Container, spaces: Namespaces, host: set[str]) -> Rootfs:
    """Go into the mount namespace and to the container's root."""
    proc = syscalls.open_at(None, "/proc/self", syscalls.O_PATH | os.O_DIRECTORY)
    spaces.enter(("mnt",))
    try:
        # While this is still root: the container's may not look into the folders that it lies in.
        root = syscalls.open_at(None, container.root, syscalls.O_PATH | os.O_DIRECTORY)
        top = syscalls.open_at(None, "/", syscalls.O_PATH | os.O_DIRECTORY)
        syscalls.go_to(root)
        if spaces.user is not None:
            spaces.enter(("user",))
            syscalls.become_root()
        rootfs = Rootfs(root, proc, host)
        if rootfs.is_own(top):
            raise DeliveryError(
                "HOK209",
                f"the container's root {quoted(container.root)} is not mounted in its mount namespace yet",
                "does the runtime run createRuntime hooks when the specification says? Report its version",
            )
        if rootfs.mount_of(root).shared:
            raise DeliveryError(
                "HOK216",
                "nothing can be mounted in the container: its root's mounts appear on the host too",
                "leave linux.rootfsPropagation of its config private or slave",
            )
    except OSError as error:
        raise DeliveryError(
            "HOK208",
            f"the container's root {quoted(container.root)} cannot be opened: {error.strerror}",
            "did the runtime end it meanwhile? Look for its own error first",
        ) from None
    os.close(top)
    return rootfs


def _let_go_of_output() -> None:
    """A runtime waits until its hook's output is closed by all; this process may outlive the hook."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)


def _completed(node: Json, container: Container) -> Json:
    done = complete_node(node)
    for key, default in (("uid", container.uid), ("gid", container.gid)):
        if done.get(key) is None:
            done[key] = default
    return done


def _prepared(mount: Json, spaces: Namespaces) -> Prepared:
    owners = None
    if spaces.user is not None:
        options = list(mount.get("options") or [])
        options += id_map_option(mount.get("type"), options)
        mount = {**mount, "options": options}
        if {"idmap", "ridmap"} & {*options}:
            owners = spaces.user
    return mounts.prepare(mount, owners=owners)


def _depth(mount: Json) -> int:
    """Parents before children."""
    return len([part for part in mount["containerPath"].split("/") if part not in ("", ".")])


def _rules(completed: Sequence[Json]) -> list[Rule]:
    """What the device cgroup is to allow; type, numbers and access of each."""
    rules = []
    for node in completed:
        access = node.get("permissions") or "rwm"
        if node["type"] in ("b", "c") and access != "none":
            rules.append((node["type"], node["major"], node["minor"], access))
    return rules


def _all_of(descriptor: int, deadline: float) -> bytes | None:
    """What comes through a pipe until it is closed; None if that takes too long."""
    data = b""
    while syscalls.is_readable(descriptor, deadline - time.monotonic()):
        part = os.read(descriptor, 1 << 16)
        if not part:
            return data
        data += part
    return None


def _told(said: bytes) -> DeliveryError:
    """The error that the child has told."""
    try:
        words = fastjson.loads(said)
    except ValueError:
        return _broken("it ended without a word")
    return DeliveryError(*words) if len(words) == 3 else _broken(printable(words[0]))


def _broken(why: str, hint: str = "report it with this message") -> DeliveryError:
    return DeliveryError(
        "HOK220", f"the process that works in the container's mount namespace failed: {why}", hint
    )
