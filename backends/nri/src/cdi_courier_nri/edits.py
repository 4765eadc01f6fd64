"""CDI container edits as an NRI adjustment, and what of them NRI cannot carry.

Sources: docs/facts.md#cdi-injection for what edits mean, and for what the runtime makes of an
adjustment docs/facts.md#nri-ownership, #nri-adjustments-applied. It must not know who gets what, nor what is
done about edits that are lost.

What is the same for every container is made ready and encoded once (`PreparedEdits`). What depends on the
container is looked at each time, and so are the host's device nodes, because a number from an earlier time
may be another device's by now. What the container has already is left out, item by item: claiming it again
could conflict with the plugin that put it there, and would run a hook twice.
"""

from __future__ import annotations

import os
import stat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cdi_courier import oci
from cdi_courier.errors import quoted

from . import messages

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from cdi_courier.cdi.model import ContainerEdits

    Json = Mapping[str, Any]

NriVersion = tuple[int, int]

_CGROUP_RULES_SINCE: NriVersion = (0, 10)
"""From here on a plugin's own device cgroup rules reach the container
(docs/facts.md#nri-adjustments-applied)."""
_NET_AND_RDT_SINCE: NriVersion = (0, 11)

_FEW_VARIABLES: Final = 6
"""Up to so many variables it is quicker to search the request's bytes for them than to read its own."""

_HOOK_FIELDS = {
    # CDI's hook name → the field of NRI's Hooks
    "prestart": "prestart",
    "createRuntime": "create_runtime",
    "createContainer": "create_container",
    "startContainer": "start_container",
    "poststart": "poststart",
    "poststop": "poststop",
}
_SHARED = frozenset({"rshared", "rslave"})

_type_of = attrgetter("type")
_path_of = attrgetter("path")
_destination_of = attrgetter("destination")
_look_of = attrgetter("st_mode", "st_rdev")


class Undeliverable(NamedTuple):
    """One edit that is lost, and why; both for a person."""

    edit: str
    reason: str


class Adjusted(NamedTuple):
    """What `PreparedEdits.encode` could not do.

    lost: edits that the adjustment does not hold.
    unowned: paths of device nodes that should belong to the container's user, whom the runtime does not tell.
    """

    lost: list[Undeliverable]
    unowned: list[str]


class PreparedEdits:
    """Container edits made ready for a runtime with one NRI version, (0, 0) if that is not known."""

    def __init__(self, edits: ContainerEdits, nri: NriVersion) -> None:
        # Imported here: a daemon need not wait for it before it registers.
        from cdi_courier.cdi.edits import edits_to_dict

        written = edits_to_dict(edits)
        self.nri = nri
        self._lost: list[Undeliverable] = []
        # Within one adjustment a key may be claimed once, so what CDI lets a later edit replace is replaced
        # here: a variable stays at the place of the first, a node or mount comes last.
        self._env: dict[str, str] = {}
        for item in written.get("env", ()):
            name, _, value = item.partition("=")
            if self._claimable(name, "environment variable"):
                self._env[name] = value
        self._nodes: dict[str, _Node] = {}
        for node in written.get("deviceNodes", ()):
            if self._claimable(node["path"], "device node"):
                self._nodes.pop(node["path"], None)
                self._nodes[node["path"]] = _Node(node)
        self._mounts: dict[str, Json] = {}
        for mount in written.get("mounts", ()):
            if self._claimable(mount["containerPath"], "mount"):
                self._mounts.pop(mount["containerPath"], None)
                self._mounts[mount["containerPath"]] = mount
        self._hooks: list[Json] = list(written.get("hooks", ()))
        self._gids = [gid for gid in dict.fromkeys(written.get("additionalGids", ())) if gid]
        self._drop_narrow_nodes()
        self._linux = self._encode_linux(written)
        self._env_items = frozenset(f"{name}={value}" for name, value in self._env.items())
        self._env_bytes = [item.encode("utf-8", "surrogatepass") for item in self._env_items]
        self._rest = _encode(self._env.items(), self._hooks, self._mounts.values())
        self._host_paths = [node.host_path for node in self._nodes.values()]
        # What the nodes were like when `usual` was made, and what was said of it then.
        self._seen: tuple[Any, ...] | None = None
        self._usual_unowned: list[str] = []
        self.usual = b""
        """The latest adjustment for a container that has nothing of all this, in no user namespace."""

    @property
    def lost(self) -> list[Undeliverable]:
        """What is lost in a container that has nothing yet, whatever the host's nodes are."""
        return [*self._lost, *self._lost_gids(messages.ContainerDetails())]

    def encode(self, container: Any, data: bytes | None = None) -> tuple[bytes, Adjusted]:
        """The edits as an encoded `messages.ContainerAdjustment`, and what is not in it.

        container: its `messages.ContainerDetails` before any adjustment of ours. data: the bytes that was
        read from, if they are there: what they do not hold need not be looked for. Raises `CdiError`
        ``CDI017`` for a device node that the host cannot complete.
        """
        lost = [*self._lost, *self._lost_gids(container)] if self._lost or self._gids else []
        user_namespace = (data is None or b"user" in data) and "user" in map(
            _type_of, container.linux.namespaces
        )
        if user_namespace or not self._all_missing(container, data):
            return self._encode_unusual(container, user_namespace, lost)
        owner = (container.user.uid, container.user.gid) if container.HasField("user") else None
        seen = self._look(owner)
        if seen is None or seen != self._seen:
            known = len(lost)
            data, adjusted = self._encode_unusual(container, user_namespace, lost)
            # What has changed meanwhile, or cannot be told, is not kept.
            if len(lost) > known or seen is None or seen != self._look(owner):
                return data, adjusted
            self.usual, self._seen, self._usual_unowned = data, seen, adjusted.unowned
        return self.usual, Adjusted(lost, self._usual_unowned)

    def _encode_unusual(
        self, container: Any, user_namespace: bool, lost: list[Undeliverable]
    ) -> tuple[bytes, Adjusted]:
        unowned: list[str] = []
        devices, bound = (
            self._encode_nodes(container, user_namespace, lost, unowned) if self._nodes else ([], [])
        )
        linux = self._linux
        if devices:
            linux += messages.EncodedLinuxContainerAdjustment(devices=devices).SerializeToString()
        if bound:
            linux += _encode_rules(bound)
        rest = self._rest
        env, hooks, mounts = self._missing(container)
        if user_namespace or len(env) + len(hooks) + len(mounts) < self._count:
            if user_namespace:
                mounts = [*map(_id_mapped, mounts), *map(_bind_mount, bound)]
            rest = _encode(env, hooks, mounts)
        if linux:
            rest += messages.EncodedContainerAdjustment(linux=linux).SerializeToString()
        return rest, Adjusted(lost, unowned)

    def _all_missing(self, container: Any, data: bytes | None) -> bool:
        """Whether the container has nothing that could be one of the edits already."""
        return (
            self._has_no_variable(container, data)
            and not (self._hooks and container.HasField("hooks"))
            and self._mounts.keys().isdisjoint(map(_destination_of, container.mounts))
            and self._nodes.keys().isdisjoint(map(_path_of, container.linux.devices))
        )

    def _has_no_variable(self, container: Any, data: bytes | None) -> bool:
        if data is not None and len(self._env_bytes) <= _FEW_VARIABLES:
            for item in self._env_bytes:
                if item in data:
                    break
            else:
                return True
        return self._env_items.isdisjoint(container.env)

    def _look(self, owner: tuple[int, int] | None) -> tuple[Any, ...] | None:
        """All that the encoding of the nodes depends on; None if a node cannot be looked at."""
        try:
            return owner, *map(_look_of, map(os.lstat, self._host_paths))
        except (OSError, ValueError):
            return None

    # What is known before any container is

    def _claimable(self, key: str, what: str) -> bool:
        """Whether the key can be claimed. NRI takes a leading ``-`` for the wish to remove.

        Source: docs/facts.md#nri-ownership.
        """
        if not key.startswith("-"):
            return True
        self._lose(f"{what} {quoted(key, 100)}", "NRI takes a leading - for a removal")
        return False

    def _drop_narrow_nodes(self) -> None:
        for path, node in list(self._nodes.items()):
            permissions = node.spec.get("permissions") or "rwm"
            if not {"r", "w"} <= set(permissions) or permissions == "none":
                del self._nodes[path]
                self._lose(
                    f"device node {quoted(path, 100)} with permissions {quoted(permissions)}",
                    "over NRI a device always gets read and write access",
                )

    def _encode_linux(self, written: Json) -> bytes:
        """Network devices and RDT, an encoded `messages.LinuxContainerAdjustment`."""
        old = "the runtime's NRI is older than 0.11"
        linux = messages.LinuxContainerAdjustment()
        for device in written.get("netDevices", ()):
            host, name = device["hostInterfaceName"], device["name"]
            if self.nri < _NET_AND_RDT_SINCE:
                self._lose(f"network device {quoted(host, 100)}", old)
            elif self._claimable(host, "network device"):
                linux.net_devices[host].name = name
        rdt = written.get("intelRdt")
        if rdt is not None and self.nri < _NET_AND_RDT_SINCE:
            self._lose("intelRdt", old)
        elif rdt is not None:
            # CDI replaces the container's settings as a whole, so all three fields are set, also to nothing.
            linux.rdt.schemata.value.extend(rdt.get("schemata") or ())
            linux.rdt.schemata.SetInParent()
            _set(linux.rdt.clos_id, rdt.get("closID", ""))
            _set(linux.rdt.enable_monitoring, rdt.get("enableMonitoring", False))
            for field in ("l3CacheSchema", "memBwSchema"):
                if field in rdt:
                    self._lose(f"intelRdt {field}", "NRI knows only closID, schemata and enableMonitoring")
        data: bytes = linux.SerializeToString()
        return data

    def _lose(self, edit: str, reason: str) -> None:
        self._lost.append(Undeliverable(edit, reason))

    @property
    def _count(self) -> int:
        return len(self._env) + len(self._hooks) + len(self._mounts)

    # What depends on the container

    def _missing(self, container: Any) -> tuple[Collection[tuple[str, str]], list[Json], list[Json]]:
        """Env, hooks and mounts that the container does not have just so."""
        env: Collection[tuple[str, str]] = self._env.items()
        if not self._env_items.isdisjoint(container.env):
            # Of several the last one counts.
            current = dict(item.partition("=")[::2] for item in container.env)
            env = [(name, value) for name, value in env if current.get(name) != value]
        hooks = self._hooks
        if hooks and container.HasField("hooks"):
            present = set(_hooks_of(container.hooks))
            hooks = [hook for hook in hooks if _hook_identity(hook) not in present]
        ours = self._mounts
        same = {
            mount.destination
            for mount in container.mounts
            if mount.destination in ours and _is_same_mount(ours[mount.destination], mount)
        }
        mounts = [mount for destination, mount in ours.items() if destination not in same]
        return env, hooks, mounts

    def _lost_gids(self, container: Any) -> Iterator[Undeliverable]:
        for gid in self._gids:
            if gid not in container.user.additional_gids:
                yield Undeliverable(f"additional group {gid}", "NRI cannot add groups")

    def _encode_nodes(
        self, container: Any, user_namespace: bool, lost: list[Undeliverable], unowned: list[str]
    ) -> tuple[list[bytes], list[Json]]:
        """Device nodes as encoded `messages.LinuxDevice`, and those that have to be bind-mounted instead."""
        nodes = self._nodes
        present = {device.path: device for device in container.linux.devices if device.path in nodes}
        owner = (container.user.uid, container.user.gid) if container.HasField("user") else None
        devices: list[bytes] = []
        bound: list[Json] = []
        for path, prepared in nodes.items():
            node, device = prepared.look(owner)
            if node["type"] not in ("b", "c"):
                lost.append(
                    Undeliverable(
                        f"device node {quoted(path, 100)} of type {node['type']}",
                        "NRI adds a device cgroup rule for every node, and there is none for this type",
                    )
                )
            elif present and path in present and _is_same_device(present[path], node, container):
                pass
            elif not user_namespace or self._is_bound_by_the_runtime(node, lost, bound):
                devices.append(device)
                if owner is None and prepared.leaves_owner_open:
                    unowned.append(path)
        return devices, bound

    def _is_bound_by_the_runtime(self, node: Json, lost: list[Undeliverable], bound: list[Json]) -> bool:
        """Whether a node for a user namespace can be listed as a device; if not, it is put where it belongs.

        Nothing can make a node there, so OCI runtimes bind-mount the host's node of the same path. Is the
        host's path another one, the mount is ours, and so is the device cgroup rule that a listed device
        would have brought.
        """
        path, host_path = node["path"], node["hostPath"]
        name = f"device node {quoted(path, 100)}"
        if not _is_on_host(node):
            what = f"{node['type']} {node['major']}:{node['minor']}"
            reason = (
                f"in a user namespace the host's node is used, and {quoted(host_path, 100)} is not {what}"
            )
            lost.append(Undeliverable(name, reason))
        elif path == host_path:
            return True
        elif self.nri < _CGROUP_RULES_SINCE:
            reason = (
                f"in a user namespace {quoted(host_path, 100)} needs a device cgroup rule of its own, which "
            )
            lost.append(Undeliverable(name, reason + "runtimes drop before NRI 0.10"))
        else:
            bound.append(node)
        return False


class _Node:
    """One device node of the edits, and its encoding for as long as the host's node stays what it is."""

    __slots__ = ("_encoded", "_known", "host_path", "leaves_owner_open", "spec")

    def __init__(self, spec: Json) -> None:
        self.spec = spec
        self.leaves_owner_open = "uid" not in spec or "gid" not in spec
        self.host_path = spec.get("hostPath") or spec["path"]
        self._known: tuple[Any, ...] | None = None
        self._encoded: tuple[Json, bytes] = {}, b""

    def look(self, owner: tuple[int, int] | None) -> tuple[Json, bytes]:
        """The node as the host completes it now, and as `messages.LinuxDevice`. Raises `CdiError` ``CDI017``.

        owner: uid and gid of the container's user, for what the spec leaves open; None if nobody tells.
        """
        try:
            found = os.lstat(self.host_path)
        except (OSError, ValueError):
            return self._encode(oci.complete_node(self.spec), owner)  # type: ignore[arg-type]
        known = found.st_mode, found.st_rdev, owner
        if known != self._known:
            self._encoded = self._encode(oci.complete_node(self.spec, lambda _: found), owner)  # type: ignore[arg-type]
            self._known = known
        return self._encoded

    def _encode(self, node: Json, owner: tuple[int, int] | None) -> tuple[Json, bytes]:
        device = messages.LinuxDevice(
            path=node["path"], type=node["type"], major=node["major"], minor=node["minor"]
        )
        if "fileMode" in node:
            _set(device.file_mode, node["fileMode"])
        uid, gid = owner or (0, 0)
        for key, field, default in (("uid", device.uid, uid), ("gid", device.gid, gid)):
            number = node.get(key, default or None)
            if number is not None:
                _set(field, number)
        return node, device.SerializeToString()


def _encode(env: Iterable[tuple[str, str]], hooks: Iterable[Json], mounts: Iterable[Json]) -> bytes:
    adjustment = messages.ContainerAdjustment()
    for name, value in env:
        adjustment.env.add(key=name, value=value)
    for hook in hooks:
        written = getattr(adjustment.hooks, _HOOK_FIELDS[hook["hookName"]]).add(
            path=hook["path"], args=hook.get("args", ()), env=hook.get("env", ())
        )
        if "timeout" in hook:
            _set(written.timeout, hook["timeout"])
    # To the runtimes, a mount without a propagation of its own has that of the mount before it, and rshared
    # and rslave are refused unless the source is shared. So those come last; the runtime sorts by depth.
    for mount in sorted(mounts, key=lambda mount: not _SHARED.isdisjoint(mount.get("options", ()))):
        adjustment.mounts.add(
            destination=mount["containerPath"],
            source=mount["hostPath"],
            type=mount.get("type", ""),
            options=mount.get("options", ()),
        )
    data: bytes = adjustment.SerializeToString()
    return data


def _encode_rules(nodes: Iterable[Json]) -> bytes:
    linux = messages.LinuxContainerAdjustment()
    for node in nodes:
        rule = linux.resources.devices.add(allow=True, type=node["type"], access="rw")
        _set(rule.major, node["major"])
        _set(rule.minor, node["minor"])
    data: bytes = linux.SerializeToString()
    return data


def _bind_mount(node: Json) -> Json:
    options = ["bind", "rw", "nosuid", "noexec"]
    return {"containerPath": node["path"], "hostPath": node["hostPath"], "type": "bind", "options": options}


def _set(optional: Any, value: Any) -> None:
    """Set one of NRI's optional wrappers, whose presence is what counts: also to 0 or nothing.

    Source: docs/facts.md#nri-optional-values.
    """
    optional.value = value
    optional.SetInParent()


def _id_mapped(mount: Json) -> Json:
    options = list(mount.get("options", ()))
    return {**mount, "options": options + oci.id_map_option(mount.get("type"), options)}


def _is_same_mount(ours: Json, theirs: Any) -> bool:
    same = ours["hostPath"] == theirs.source and ours.get("type", "") == theirs.type
    # In their order: of two that contradict each other the last one counts.
    return same and [*ours.get("options", ())] == [*theirs.options]


def _is_same_device(theirs: Any, ours: Json, container: Any) -> bool:
    """Whether the container has this very device at this path, with the access that we would give."""
    kind, major, minor = ours["type"], ours["major"], ours["minor"]
    if (theirs.type, theirs.major, theirs.minor) != (kind, major, minor):
        return False
    rules = container.linux.resources.devices
    # No rules at all: the runtime does not show them.
    return not rules or any(
        rule.allow
        and rule.type in ("a", "", kind)
        and _covers(rule, "major", major)
        and _covers(rule, "minor", minor)
        and {"r", "w"} <= set(rule.access)
        for rule in rules
    )


def _covers(rule: Any, field: str, number: int) -> bool:
    return not rule.HasField(field) or getattr(rule, field).value in (-1, number)


def _is_on_host(node: Json) -> bool:
    try:
        found = os.lstat(node["hostPath"])
    except (OSError, ValueError):
        return False
    is_kind = stat.S_ISBLK if node["type"] == "b" else stat.S_ISCHR
    numbers = (os.major(found.st_rdev), os.minor(found.st_rdev))
    return is_kind(found.st_mode) and numbers == (node["major"], node["minor"])


def _hooks_of(hooks: Any) -> Iterator[tuple[Any, ...]]:
    for name, field in _HOOK_FIELDS.items():
        for hook in getattr(hooks, field):
            yield name, hook.path, tuple(hook.args), tuple(hook.env)


def _hook_identity(hook: Json) -> tuple[Any, ...]:
    return hook["hookName"], hook["path"], tuple(hook.get("args", ())), tuple(hook.get("env", ()))
