"""What a runtime makes of an adjustment: Go's generator over an OCI config, for tests that compare results.

An independent judge: its own message table and its own rules, from docs/facts.md#nri-messages,
#nri-ownership, #nri-adjustments-applied.
"""

from __future__ import annotations

import copy
import posixpath
from typing import Any

from cdi_courier.descriptors import message_classes

M = message_classes(
    "fake.apply",
    {
        "Create": "2 container Container",
        "Container": "8 env string*, 9 mounts Mount*, 10 hooks Hooks, 11 linux Linux, 21 user User",
        "Linux": "1 namespaces Namespace*, 2 devices Device*, 3 resources Resources",
        "Namespace": "1 type string, 2 path string",
        "User": "1 uid uint32, 2 gid uint32, 3 additional_gids uint32*",
        "Reply": "1 adjust Adjustment",
        "Adjustment": """2 annotations map<string,string>, 3 mounts Mount*, 4 env Pair*, 5 hooks Hooks,
            6 linux LinuxAdjustment, 8 cdi_devices Cdi*""",
        "LinuxAdjustment": """1 devices Device*, 2 resources Resources, 9 net_devices map<string,Net>,
            11 rdt Rdt""",
        "Resources": "7 devices Rule*",
        "Rule": "1 allow bool, 2 type string, 3 major Int64, 4 minor Int64, 5 access string",
        "Net": "1 name string",
        "Rdt": "1 clos_id Text, 2 schemata Texts, 3 enable_monitoring Bool, 4 remove bool",
        "Cdi": "1 name string",
        "Pair": "1 key string, 2 value string",
        "Mount": "1 destination string, 2 type string, 3 source string, 4 options string*",
        "Hooks": """1 prestart Hook*, 2 create_runtime Hook*, 3 create_container Hook*,
            4 start_container Hook*, 5 poststart Hook*, 6 poststop Hook*""",
        "Hook": "1 path string, 2 args string*, 3 env string*, 4 timeout Int64",
        "Device": """1 path string, 2 type string, 3 major int64, 4 minor int64, 5 file_mode Uint32,
            6 uid Uint32, 7 gid Uint32""",
        "Bool": "1 value bool",
        "Int64": "1 value int64",
        "Uint32": "1 value uint32",
        "Text": "1 value string",
        "Texts": "1 value string*",
    },
)

HOOKS = {
    "prestart": "prestart",
    "createRuntime": "create_runtime",
    "createContainer": "create_container",
    "startContainer": "start_container",
    "poststart": "poststart",
    "poststop": "poststop",
}


class Conflict(Exception):  # noqa: N818 - says what it is
    """The plugin claimed one key twice: the runtime fails the container."""


def request(config: dict[str, Any], *, tells_user: bool = True) -> bytes:
    """The payload of CreateContainer that shows an OCI config to a plugin."""
    message = M["Create"]()
    container = message.container
    process, linux = config.get("process", {}), config.get("linux", {})
    container.env.extend(process.get("env", ()))
    for mount in config.get("mounts", ()):
        container.mounts.add(**mount)
    container.hooks.SetInParent()
    for name, hooks in config.get("hooks", {}).items():
        for hook in hooks:
            written = getattr(container.hooks, HOOKS[name]).add(
                path=hook["path"], args=hook.get("args", ()), env=hook.get("env", ())
            )
            if "timeout" in hook:
                written.timeout.value = hook["timeout"]
    container.linux.resources.SetInParent()
    for namespace in linux.get("namespaces", ()):
        container.linux.namespaces.add(**namespace)
    for device in linux.get("devices", ()):
        container.linux.devices.add(**{key: device[key] for key in ("path", "type", "major", "minor")})
    for rule in linux.get("resources", {}).get("devices", ()):
        written = container.linux.resources.devices.add(
            allow=rule["allow"], type=rule.get("type", ""), access=rule.get("access", "")
        )
        for key in ("major", "minor"):
            if key in rule:
                getattr(written, key).value = rule[key]
                getattr(written, key).SetInParent()
    if tells_user:
        user = process.get("user", {})
        container.user.uid, container.user.gid = user.get("uid", 0), user.get("gid", 0)
        container.user.additional_gids.extend(user.get("additionalGids", ()))
        container.user.SetInParent()
    data: bytes = message.SerializeToString()
    return data


def apply(config: dict[str, Any], reply: bytes) -> dict[str, Any]:
    """The config with a CreateContainerResponse applied. Raises Conflict."""
    adjust = M["Reply"].FromString(reply).adjust
    result = copy.deepcopy(config)
    _claim("env", (pair.key for pair in adjust.env))
    _claim("mounts", (mount.destination for mount in adjust.mounts))
    _claim("devices", (device.path for device in adjust.linux.devices))
    _claim("CDI_devices", (device.name for device in adjust.cdi_devices))
    assert not adjust.cdi_devices, "these are resolved by the runtime, not here"
    _env(result, adjust.env)
    for name, field in HOOKS.items():
        for hook in getattr(adjust.hooks, field):
            result.setdefault("hooks", {}).setdefault(name, []).append(_hook(hook))
    linux = result.setdefault("linux", {})
    rules = linux.setdefault("resources", {}).setdefault("devices", [])
    for device in adjust.linux.devices:
        devices = linux.setdefault("devices", [])
        devices[:] = [other for other in devices if other["path"] != device.path]
        devices.append(_device(device))
        access = "rwm" if device.type == "b" else "rw"
        rules.append(
            {
                "allow": True,
                "type": device.type,
                "major": device.major,
                "minor": device.minor,
                "access": access,
            }
        )
    for rule in adjust.linux.resources.devices:
        rules.append(
            {
                "allow": rule.allow,
                "type": rule.type,
                "major": rule.major.value,
                "minor": rule.minor.value,
                "access": rule.access,
            }
        )
    for host, device in adjust.linux.net_devices.items():
        linux.setdefault("netDevices", {})[host] = {"name": device.name}
    if adjust.linux.HasField("rdt"):
        _rdt(linux.setdefault("intelRdt", {}), adjust.linux.rdt)
    _mounts(result, adjust.mounts)
    return result


def _claim(what: str, keys: Any) -> None:
    seen: set[str] = set()
    for key in keys:
        assert not key.startswith("-"), f"{what} {key} is a removal"
        if key in seen:
            raise Conflict(f"{what} {key}")
        seen.add(key)


def _env(config: dict[str, Any], adjustments: Any) -> None:
    if not adjustments:
        return
    wanted = {pair.key: pair.value for pair in adjustments}
    old = config.setdefault("process", {}).get("env", [])
    env = [
        f"{name}={wanted.pop(name, value)}" for name, mark, value in (e.partition("=") for e in old) if mark
    ]
    config["process"]["env"] = env + [f"{name}={value}" for name, value in wanted.items()]


def _hook(hook: Any) -> dict[str, Any]:
    written: dict[str, Any] = {"path": hook.path}
    if hook.args:
        written["args"] = list(hook.args)
    if hook.env:
        written["env"] = list(hook.env)
    if hook.HasField("timeout"):
        written["timeout"] = hook.timeout.value
    return written


def _device(device: Any) -> dict[str, Any]:
    written = {key: getattr(device, key) for key in ("path", "type", "major", "minor")}
    for key, field in (("fileMode", "file_mode"), ("uid", "uid"), ("gid", "gid")):
        if device.HasField(field):
            written[key] = getattr(device, field).value
    return written


def _rdt(rdt: dict[str, Any], adjustment: Any) -> None:
    for key, field in (
        ("closID", "clos_id"),
        ("schemata", "schemata"),
        ("enableMonitoring", "enable_monitoring"),
    ):
        if adjustment.HasField(field):
            value = getattr(adjustment, field).value
            value = list(value) if key == "schemata" else value
            # Go leaves empty values out.
            rdt.pop(key, None)
            if value:
                rdt[key] = value


def _mounts(config: dict[str, Any], adjustments: Any) -> None:
    if not adjustments:
        return
    mounts = config.setdefault("mounts", [])
    propagation = ""
    for mount in adjustments:
        mounts[:] = [other for other in mounts if other["destination"] != mount.destination]
        written = {"destination": mount.destination, "source": mount.source}
        if mount.type:
            written["type"] = mount.type
        if mount.options:
            written["options"] = list(mount.options)
        for option in mount.options:
            if option in ("rprivate", "rshared", "rslave"):
                propagation = option
        if propagation in ("rshared", "rslave"):
            # Here Go looks whether the source is shared, and refuses the container if it is not.
            assert propagation in mount.options, f"{mount.destination} inherits {propagation}"
        mounts.append(written)
    mounts.sort(key=lambda mount: (_depth(mount["destination"]), mount["destination"]))


def _depth(destination: str) -> int:
    clean = posixpath.normpath(destination)
    return clean.count("/") - (1 if clean.startswith("//") else 0)
