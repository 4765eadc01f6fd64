"""CDI container edits as an NRI adjustment, and what of them NRI cannot carry.

Sources: contracts cdi.md section 7 for what edits mean, nri-protocol.md §9 and §10 for what the runtime makes
of an adjustment. It must not know who gets what, nor what is done about edits that are lost.

What is the same for every container is made ready once (`PreparedEdits`); what depends on the container or on
the host's device nodes is looked at each time, because a number from an earlier time may be another device's
by now. What the container has already is left out, item by item: claiming it again could conflict with the
plugin that put it there, and would run a hook twice.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from cdi_courier import oci
from cdi_courier.cdi.edits import edits_to_dict
from cdi_courier.errors import quoted

from . import messages

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from cdi_courier.cdi.model import ContainerEdits

    Json = Mapping[str, Any]

NriVersion = tuple[int, int]

_CGROUP_RULES_SINCE: NriVersion = (0, 10)
"""From here on a plugin's own device cgroup rules reach the container (lessons-nri.md 38)."""
_NET_AND_RDT_SINCE: NriVersion = (0, 11)

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


class Undeliverable(NamedTuple):
    """One edit that is lost, and why; both for a person."""

    edit: str
    reason: str


class Adjusted(NamedTuple):
    """What `PreparedEdits.adjust` could not do.

    lost: edits that the adjustment does not hold.
    unowned: paths of device nodes that should belong to the container's user, whom the runtime does not tell.
    """

    lost: list[Undeliverable]
    unowned: list[str]


class PreparedEdits:
    """Container edits made ready for a runtime with one NRI version, (0, 0) if that is not known."""

    def __init__(self, edits: ContainerEdits, nri: NriVersion) -> None:
        written = edits_to_dict(edits)
        self._nri = nri
        self._lost: list[Undeliverable] = []
        # Within one adjustment a key may be claimed once, so what CDI lets a later edit replace is replaced
        # here: a variable stays at the place of the first, a node or mount comes last.
        self._env: dict[str, str] = {}
        for item in written.get("env", ()):
            name, _, value = item.partition("=")
            if self._claimable(name, "environment variable"):
                self._env[name] = value
        self._nodes: dict[str, Json] = {}
        for node in written.get("deviceNodes", ()):
            if self._claimable(node["path"], "device node"):
                self._nodes.pop(node["path"], None)
                self._nodes[node["path"]] = node
        self._mounts: dict[str, Json] = {}
        for mount in written.get("mounts", ()):
            if self._claimable(mount["containerPath"], "mount"):
                self._mounts.pop(mount["containerPath"], None)
                self._mounts[mount["containerPath"]] = mount
        self._hooks: list[Json] = list(written.get("hooks", ()))
        self._gids = [gid for gid in dict.fromkeys(written.get("additionalGids", ())) if gid]
        self._drop_narrow_nodes()
        self._fixed = messages.ContainerAdjustment()
        self._put_linux(written)
        self._linux_only = messages.ContainerAdjustment()
        self._linux_only.CopyFrom(self._fixed)
        self._put(self._fixed, self._env.items(), self._hooks, self._mounts.values())

    def adjust(self, adjustment: Any, container: Any) -> Adjusted:
        """Put the edits into `adjustment`, a `messages.ContainerAdjustment`; say what is not in it.

        container: its `messages.ContainerDetails` before any adjustment of ours. Raises `CdiError` ``CDI017``
        for a device node that the host cannot complete.
        """
        lost = [*self._lost, *self._lost_gids(container)]
        unowned: list[str] = []
        user_namespace = any(namespace.type == "user" for namespace in container.linux.namespaces)
        env, hooks, mounts = self._missing(container)
        if user_namespace or len(env) + len(hooks) + len(mounts) < self._count:
            if user_namespace:
                mounts = [_id_mapped(mount) for mount in mounts]
            adjustment.MergeFrom(self._linux_only)
            self._put(adjustment, env, hooks, mounts)
        else:
            adjustment.MergeFrom(self._fixed)
        if self._nodes:
            self._put_nodes(adjustment, container, user_namespace, lost, unowned)
        return Adjusted(lost, unowned)

    # What is known before any container is

    def _claimable(self, key: str, what: str) -> bool:
        """Whether the key can be claimed. NRI takes a leading ``-`` for the wish to remove (§9)."""
        if not key.startswith("-"):
            return True
        self._lose(f"{what} {quoted(key, 100)}", "NRI takes a leading - for a removal")
        return False

    def _drop_narrow_nodes(self) -> None:
        for path, node in list(self._nodes.items()):
            permissions = node.get("permissions") or "rwm"
            if not {"r", "w"} <= set(permissions) or permissions == "none":
                del self._nodes[path]
                self._lose(
                    f"device node {quoted(path, 100)} with permissions {quoted(permissions)}",
                    "over NRI a device always gets read and write access",
                )

    def _put_linux(self, written: Json) -> None:
        old = "the runtime's NRI is older than 0.11"
        linux = self._fixed.linux
        for device in written.get("netDevices", ()):
            host, name = device["hostInterfaceName"], device["name"]
            if self._nri < _NET_AND_RDT_SINCE:
                self._lose(f"network device {quoted(host, 100)}", old)
            elif self._claimable(host, "network device"):
                linux.net_devices[host].name = name
        rdt = written.get("intelRdt")
        if rdt is None:
            return
        if self._nri < _NET_AND_RDT_SINCE:
            self._lose("intelRdt", old)
            return
        # CDI replaces the container's settings as a whole, so all three fields are set, also to nothing.
        linux.rdt.schemata.value.extend(rdt.get("schemata") or ())
        linux.rdt.schemata.SetInParent()
        _set(linux.rdt.clos_id, rdt.get("closID", ""))
        _set(linux.rdt.enable_monitoring, rdt.get("enableMonitoring", False))
        for field in ("l3CacheSchema", "memBwSchema"):
            if field in rdt:
                self._lose(f"intelRdt {field}", "NRI knows only closID, schemata and enableMonitoring")

    def _lose(self, edit: str, reason: str) -> None:
        self._lost.append(Undeliverable(edit, reason))

    @property
    def _count(self) -> int:
        return len(self._env) + len(self._hooks) + len(self._mounts)

    # What depends on the container

    def _missing(self, container: Any) -> tuple[Collection[tuple[str, str]], list[Json], list[Json]]:
        """Env, hooks and mounts that the container does not have just so."""
        env: Collection[tuple[str, str]] = self._env.items()
        if env:
            # The last of several counts.
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

    @staticmethod
    def _put(
        adjustment: Any, env: Iterable[tuple[str, str]], hooks: Iterable[Json], mounts: Iterable[Json]
    ) -> None:
        for name, value in env:
            adjustment.env.add(key=name, value=value)
        for hook in hooks:
            written = getattr(adjustment.hooks, _HOOK_FIELDS[hook["hookName"]]).add(
                path=hook["path"], args=hook.get("args", ()), env=hook.get("env", ())
            )
            if "timeout" in hook:
                _set(written.timeout, hook["timeout"])
        # To the runtimes, a mount without a propagation of its own has that of the mount before it, and
        # rshared and rslave are refused unless the source is shared. So those come last; the runtime sorts
        # by depth anyway.
        for mount in sorted(mounts, key=lambda mount: not _SHARED.isdisjoint(mount.get("options", ()))):
            adjustment.mounts.add(
                destination=mount["containerPath"],
                source=mount["hostPath"],
                type=mount.get("type", ""),
                options=mount.get("options", ()),
            )

    def _put_nodes(
        self,
        adjustment: Any,
        container: Any,
        user_namespace: bool,
        lost: list[Undeliverable],
        unowned: list[str],
    ) -> None:
        nodes = self._nodes
        present = {device.path: device for device in container.linux.devices if device.path in nodes}
        user = container.user if container.HasField("user") else None
        devices = adjustment.linux.devices
        for path, spec in nodes.items():
            node = oci.complete_node(spec)  # type: ignore[arg-type]
            kind, major, minor = node["type"], node["major"], node["minor"]
            if kind not in ("b", "c"):
                lost.append(
                    Undeliverable(
                        f"device node {quoted(path, 100)} of type {kind}",
                        "NRI adds a device cgroup rule for every node, and there is none for this type",
                    )
                )
                continue
            if path in present and _is_same_device(present[path], kind, major, minor, container):
                continue
            if user_namespace and not self._bind_node(adjustment, node, lost):
                continue
            device = devices.add(path=path, type=kind, major=major, minor=minor)
            if "fileMode" in node:
                _set(device.file_mode, node["fileMode"])
            for key, field in (("uid", device.uid), ("gid", device.gid)):
                number = node.get(key)
                if number is None and user is not None:
                    number = getattr(user, key) or None
                if number is not None:
                    _set(field, number)
            if user is None and ("uid" not in node or "gid" not in node):
                unowned.append(path)

    def _bind_node(self, adjustment: Any, node: Json, lost: list[Undeliverable]) -> bool:
        """Deliver a node to a user namespace; whether it still has to be listed as a device.

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
            return False
        if path == host_path:
            return True
        if self._nri < _CGROUP_RULES_SINCE:
            reason = (
                f"in a user namespace {quoted(host_path, 100)} needs a device cgroup rule of its own, which "
            )
            lost.append(Undeliverable(name, reason + "runtimes drop before NRI 0.10"))
            return False
        adjustment.mounts.add(
            destination=path, source=host_path, type="bind", options=("bind", "rw", "nosuid", "noexec")
        )
        rule = adjustment.linux.resources.devices.add(allow=True, type=node["type"], access="rw")
        _set(rule.major, node["major"])
        _set(rule.minor, node["minor"])
        return False


def _set(optional: Any, value: Any) -> None:
    """Set one of NRI's optional wrappers, whose presence is what counts: also to 0 or nothing (§8)."""
    optional.value = value
    optional.SetInParent()


def _id_mapped(mount: Json) -> Json:
    options = list(mount.get("options", ()))
    return {**mount, "options": options + oci.id_map_option(mount.get("type"), options)}


def _is_same_mount(ours: Json, theirs: Any) -> bool:
    same = ours["hostPath"] == theirs.source and ours.get("type", "") == theirs.type
    return same and set(ours.get("options", ())) == set(theirs.options)


def _is_same_device(theirs: Any, kind: str, major: int, minor: int, container: Any) -> bool:
    """Whether the container has this very device at this path, with the access that we would give."""
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
