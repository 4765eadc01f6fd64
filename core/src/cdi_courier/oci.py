"""Apply merged CDI edits to an OCI runtime config: dict in, new dict out. Light module.

Source: docs/facts.md#cdi-injection. `edits` are container edits with their names on the wire, as
`cdi.edits.edits_to_dict` writes them and the compiled table keeps them. The config comes from a runtime and
is not trusted to have the right shape: what is not what the OCI specification says is an error in words.
It must not know spec files, names or where a config is read from.

The input is never changed, also not when something fails midway. Device nodes are looked at each time:
a number from an earlier time may be another device's by now.
"""

from __future__ import annotations

import os
import stat

from cdi_courier.errors import CdiError, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Json = dict[str, Any]


def apply_edits(config: Json, edits: Json) -> Json:
    """Return a copy of `config` with `edits` applied, in the order that CDI prescribes.

    Fields that CDI does not know are kept. Raises `CdiError`: ``CDI017`` a device node that the host
    cannot complete, ``CDI018`` a config that is not shaped as the OCI specification says.
    """
    if not isinstance(config, dict):
        raise _misshapen("the config", "an object")
    try:
        edited: Json = _copy(config)
    except RecursionError:
        raise CdiError("CDI018", "the OCI config is nested too deeply") from None
    _apply_env(edited, edits.get("env") or [])
    _apply_device_nodes(edited, edits.get("deviceNodes") or [])
    _apply_net_devices(edited, edits.get("netDevices") or [])
    _apply_mounts(edited, edits.get("mounts") or [])
    _apply_hooks(edited, edits.get("hooks") or [])
    if edits.get("intelRdt") is not None:
        _object(edited, "linux")["intelRdt"] = _copy(edits["intelRdt"])
    _apply_gids(edited, edits.get("additionalGids") or [])
    return edited


def complete_node(node: Json, lstat: Callable[[str], os.stat_result] = os.lstat) -> Json:
    """Return a device node with what it leaves open filled in from the host (docs/facts.md#cdi-injection).

    `node` is a CDI device node; the result always has ``path``, ``hostPath``, ``type``, ``major`` and
    ``minor``, and ``fileMode`` unless the node is complete in itself and missing on the host. A symbolic
    link is not followed. lstat: tells what the host has at a path, for whoever has looked already. Raises
    `CdiError` ``CDI017``.
    """
    done = dict(node)
    path = node["path"]
    host_path = done["hostPath"] = node.get("hostPath") or path
    kind = node.get("type") or ""
    major = done["major"] = node.get("major") or 0
    done["minor"] = node.get("minor") or 0
    minimal = bool(kind) and (major != 0 or kind == "p")
    reason = ""
    host_kind = ""
    try:
        found = lstat(host_path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    else:
        host_kind = _NODE_TYPES.get(stat.S_IFMT(found.st_mode), "")
        reason = "" if host_kind else "it is not a device node"
    if reason:
        if minimal:
            return done
        raise _bad_node(path, host_path, reason)
    if done.get("fileMode") is None:
        done["fileMode"] = stat.S_IMODE(found.st_mode)
    if minimal:
        return done
    if kind and kind != host_kind:
        raise _bad_node(path, host_path, f"the spec says type {kind}, on the host it is {host_kind}")
    done["type"] = host_kind
    if host_kind != "p" and major == 0:
        done["major"] = os.major(found.st_rdev)
        done["minor"] = os.minor(found.st_rdev)
    return done


_NODE_TYPES = {stat.S_IFBLK: "b", stat.S_IFCHR: "c", stat.S_IFIFO: "p"}


def _bad_node(path: str, host_path: str, reason: str) -> CdiError:
    at = "" if host_path == path else f" (on the host {quoted(host_path)})"
    return CdiError(
        "CDI017",
        f"device node {quoted(path)}{at} cannot be injected: {reason}",
        "is the device plugged in and its driver loaded? A spec made for other hardware must be made anew",
        node=path,
        host_path=host_path,
    )


def _apply_env(config: Json, env: list[str]) -> None:
    if not env:
        return
    current = _list(_process(config), "env", "process.env", str)
    index = {item.partition("=")[0]: position for position, item in enumerate(current)}
    for item in env:
        key = item.partition("=")[0]
        if key in index:
            current[index[key]] = item
        else:
            index[key] = len(current)
            current.append(item)


def _apply_device_nodes(config: Json, nodes: list[Json]) -> None:
    if not nodes:
        return
    uid, gid = process_ids(config)
    linux = _object(config, "linux")
    devices = _list(linux, "devices", "linux.devices", dict)
    for spec in nodes:
        node = complete_node(spec)
        device = {"path": node["path"], "type": node["type"], "major": node["major"], "minor": node["minor"]}
        for key, default in (("fileMode", None), ("uid", uid or None), ("gid", gid or None)):
            value = node.get(key)
            if value is None:
                value = default
            if value is not None:
                device[key] = value
        _replace_device(devices, device)
        if node["type"] in ("b", "c"):
            rule = {"allow": True, "type": node["type"], "major": node["major"], "minor": node["minor"]}
            permissions = node.get("permissions") or "rwm"
            if permissions != "none":
                rule["access"] = permissions
            resources = _object(linux, "resources", "linux.resources")
            _list(resources, "devices", "linux.resources.devices", dict).append(rule)


def _replace_device(devices: list[Json], device: Json) -> None:
    """Remove the first device with the same path; a second one is replaced in place, else it is appended."""
    same = [position for position, other in enumerate(devices) if other.get("path") == device["path"]]
    if len(same) > 1:
        devices[same[1]] = device
    if same:
        del devices[same[0]]
    if len(same) <= 1:
        devices.append(device)


def _apply_net_devices(config: Json, net_devices: list[Json]) -> None:
    if not net_devices:
        return
    current = _object(_object(config, "linux"), "netDevices", "linux.netDevices")
    for device in net_devices:
        current[device["hostInterfaceName"]] = {"name": device["name"]}


def _apply_mounts(config: Json, mounts: list[Json]) -> None:
    if not mounts:
        return
    current = _list(config, "mounts", "mounts", dict)
    for mount in current:
        if not isinstance(_absent_if_null(mount, "destination", ""), str):
            raise _misshapen("mounts[].destination", "a string")
    user_namespace = has_user_namespace(config)
    for spec in mounts:
        destination = spec["containerPath"]
        mount = {"destination": destination, "source": spec["hostPath"]}
        options = list(spec.get("options") or [])
        if spec.get("type"):
            mount["type"] = spec["type"]
        if user_namespace:
            options += id_map_option(mount.get("type"), options)
        if options:
            mount["options"] = options
        for position, other in enumerate(current):
            if other.get("destination") == destination:
                del current[position]
                break
        current.append(mount)
    # Parents before children is the whole promise; the sort is stable and looks at nothing else.
    current.sort(key=lambda mount: _depth(_absent_if_null(mount, "destination", "")))


def id_map_option(kind: str | None, options: list[str]) -> list[str]:
    """The option, as a list of one or none, without which a bind mount in a user namespace is nobody's.

    kind, options: the mount's type and options, which are not changed. Source: docs/facts.md#cdi-injection.
    """
    if "idmap" in options or "ridmap" in options:
        return []
    found = ["idmap"] if kind == "bind" else []
    for option in options:
        if option in ("bind", "rbind"):
            found = ["idmap" if option == "bind" else "ridmap"]
    return found


def has_user_namespace(config: Json) -> bool:
    """Whether the container has a user namespace, new or joined. Raises `CdiError` ``CDI018``."""
    linux = _absent_if_null(config, "linux", {})
    if not isinstance(linux, dict):
        raise _misshapen("linux", "an object")
    namespaces = _absent_if_null(linux, "namespaces", [])
    if not isinstance(namespaces, list) or not all(isinstance(item, dict) for item in namespaces):
        raise _misshapen("linux.namespaces", "a list of objects")
    return any(item.get("type") == "user" for item in namespaces)


def _depth(destination: str) -> int:
    # normpath keeps a leading "//", which POSIX leaves to the implementation; Go does not.
    clean = os.path.normpath(destination)
    return clean.count("/") - (1 if clean.startswith("//") else 0)


def _apply_hooks(config: Json, hooks: list[Json]) -> None:
    if not hooks:
        return
    current = _object(config, "hooks")
    for spec in hooks:
        name = spec["hookName"]
        hook = {"path": spec["path"]}
        hook.update({key: list(spec[key]) for key in ("args", "env") if spec.get(key)})
        if spec.get("timeout") is not None:
            hook["timeout"] = spec["timeout"]
        _list(current, name, f"hooks.{name}", dict).append(hook)


def _apply_gids(config: Json, gids: list[int]) -> None:
    wanted = [gid for gid in gids if gid]
    if not wanted:
        return
    process = _process(config)
    user = _object(process, "user", "process.user", {"uid": 0, "gid": 0})
    current = _list(user, "additionalGids", "process.user.additionalGids", int)
    for gid in wanted:
        if gid not in current:
            current.append(gid)


def _process(config: Json) -> Json:
    return _object(config, "process", "process", {"user": {"uid": 0, "gid": 0}, "cwd": ""})


def process_ids(config: Json) -> tuple[int, int]:
    """Uid and gid of the container's process, 0 where it does not say. Raises `CdiError` ``CDI018``."""
    process = _absent_if_null(config, "process", {})
    if not isinstance(process, dict):
        raise _misshapen("process", "an object")
    user = _absent_if_null(process, "user", {})
    if not isinstance(user, dict):
        raise _misshapen("process.user", "an object")
    ids = [_absent_if_null(user, key, 0) for key in ("uid", "gid")]
    if not all(type(number) is int and 0 <= number < 1 << 32 for number in ids):
        raise _misshapen("process.user.uid and gid", "an integer of 32 bits")
    return ids[0], ids[1]


def _absent_if_null(parent: Json, key: str, absent: Any) -> Any:
    value = parent.get(key)
    return absent if value is None else value


def _object(parent: Json, key: str, where: str = "", fresh: Json | None = None) -> Json:
    """Return ``parent[key]``, made if it is absent or null."""
    if parent.get(key) is None:
        parent[key] = {} if fresh is None else fresh
    value = parent[key]
    if not isinstance(value, dict):
        raise _misshapen(where or key, "an object")
    return value


def _list(parent: Json, key: str, where: str, of: type) -> list[Any]:
    """Return the list ``parent[key]``, made if it is absent or null; its items are of type `of`."""
    if parent.get(key) is None:
        parent[key] = []
    value = parent[key]
    if not isinstance(value, list) or not all(isinstance(item, of) for item in value):
        names = {str: "strings", dict: "objects", int: "integers"}
        raise _misshapen(where, f"a list of {names[of]}")
    return value


def _misshapen(where: str, what: str) -> CdiError:
    return CdiError("CDI018", f"the OCI config is not usable: {where} is not {what}")


def _copy(value: Any) -> Any:
    # The module copy is not light; configs are JSON, so two kinds of containers are all there is.
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
