"""Which decoded specs are valid. Source: docs/facts.md#cdi-versions, #cdi-validation.

The order of checks is the reference's. Two tables and one walk: a new spec version is an entry in `VERSIONS`
and its fields in `model`. What the loader does not check is not checked here either: annotations, absolute
paths, timeouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from cdi_courier.cdi.decode import Path, Problem, decode_spec, spec_error
from cdi_courier.cdi.model import (
    ContainerEdits,
    Device,
    DeviceNode,
    Hook,
    IntelRdt,
    Mount,
    NetDevice,
    Spec,
)
from cdi_courier.errors import quoted
from cdi_courier.names import invalid_class, invalid_device_name, invalid_vendor, split_kind

_Gate = tuple[type[Any], str, Callable[[Any], bool]]


def _set(attribute: str) -> Callable[[Any], bool]:
    """Whether an attribute is used: not empty, not zero, not absent."""
    return lambda value: bool(getattr(value, attribute))


def _present(attribute: str) -> Callable[[Any], bool]:
    """Whether an attribute is there at all, be it empty."""
    return lambda value: getattr(value, attribute) is not None


# Version → what only files of at least this version may use: (class, field on the wire, is it used).
# Ascending. Versions before 0.3.0 are known, but everything needs 0.3.0.
VERSIONS: Final[dict[str, tuple[_Gate, ...]]] = {
    "0.1.0": (),
    "0.2.0": (),
    "0.3.0": ((Spec, "", lambda _: True),),
    "0.4.0": ((Mount, "type", _set("type")),),
    "0.5.0": (
        (Device, "name", lambda device: device.name[:1] in frozenset("0123456789")),
        (DeviceNode, "hostPath", _set("host_path")),
    ),
    "0.6.0": (
        (Spec, "annotations", _set("annotations")),
        (Device, "annotations", _set("annotations")),
        (Spec, "kind", lambda spec: "." in split_kind(spec.kind)[1]),
    ),
    "0.7.0": (
        (ContainerEdits, "intelRdt", _present("intel_rdt")),
        (ContainerEdits, "additionalGids", _set("additional_gids")),
    ),
    "0.8.0": (),
    "1.0.0": (),
    "1.1.0": (
        (ContainerEdits, "netDevices", _set("net_devices")),
        (IntelRdt, "schemata", _present("schemata")),
        (IntelRdt, "enableMonitoring", _set("enable_monitoring")),
    ),
}
_ORDER: Final = {version: rank for rank, version in enumerate(VERSIONS)}

HOOK_NAMES: Final = (
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
)
DEVICE_TYPES: Final = ("", "b", "c", "u", "p")
_CLOS_ID_BYTES: Final = 4096


def load_spec(data: bytes, file: str = "") -> Spec:
    """Decode and validate. Raises `CdiError` that says file, line and path: ``CDI003`` to ``CDI006``."""
    spec = decode_spec(data, file)
    problem = find_problem(spec)
    if problem is not None:
        raise spec_error(problem, data, file, kind=spec.kind)
    return spec


def find_problem(spec: Spec) -> Problem | None:
    """Return the first reason why a spec is invalid, or None."""
    return next(_problems(spec), None)


def minimum_version(spec: Spec) -> tuple[str, Path]:
    """Return the lowest version that may say what `spec` says, and the path of what needs it."""
    parts = list(_parts(spec))
    for version in reversed(VERSIONS):
        for cls, wire, used in VERSIONS[version]:
            for path, part in parts:
                if type(part) is cls and used(part):
                    return version, (*path, wire) if wire else path
    return "0.3.0", ()


def _parts(spec: Spec) -> Iterator[tuple[Path, Any]]:
    yield (), spec
    yield from _edit_parts(("containerEdits",), spec.container_edits)
    for index, device in enumerate(spec.devices):
        yield ("devices", index), device
        yield from _edit_parts(("devices", index, "containerEdits"), device.container_edits)


def _edit_parts(path: Path, edits: ContainerEdits) -> Iterator[tuple[Path, Any]]:
    yield path, edits
    for index, node in enumerate(edits.device_nodes):
        yield (*path, "deviceNodes", index), node
    for index, mount in enumerate(edits.mounts):
        yield (*path, "mounts", index), mount
    if edits.intel_rdt is not None:
        yield (*path, "intelRdt"), edits.intel_rdt


def _invalid(reason: str, *path: str | int, hint: str = "") -> Problem:
    return Problem("CDI006", reason, path=path, hint=hint)


def _problems(spec: Spec) -> Iterator[Problem]:
    yield from _version_problems(spec)
    vendor, class_ = split_kind(spec.kind)
    for reason in (invalid_vendor(vendor), invalid_class(class_)):
        if reason:
            yield _invalid(f"{quoted(spec.kind, 100)} is not VENDOR/CLASS: {reason}", "kind")
    yield from _edits_problems(("containerEdits",), spec.container_edits)
    seen: set[str] = set()
    for index, device in enumerate(spec.devices):
        path: Path = ("devices", index)
        reason = invalid_device_name(device.name)
        if reason:
            yield _invalid(f"{quoted(device.name, 100)} is not a device name: {reason}", *path, "name")
        if not _has_edits(device.container_edits):
            hint = "the edits of the spec as a whole do not count; give the device at least one of its own"
            yield _invalid(f"device {quoted(device.name, 100)} has no edits", *path, hint=hint)
        yield from _edits_problems((*path, "containerEdits"), device.container_edits)
        if device.name in seen:
            yield _invalid(f"device {quoted(device.name, 100)} occurs twice in this file", *path, "name")
        seen.add(device.name)
    if not spec.devices:
        yield _invalid("a spec needs at least one device", "devices")


def _version_problems(spec: Spec) -> Iterator[Problem]:
    version = spec.cdi_version.removeprefix("v")
    path: Path = ("cdiVersion",)
    if version not in VERSIONS:
        known = f"known are {', '.join(VERSIONS)}"
        yield Problem("CDI005", f"unknown CDI version {quoted(spec.cdi_version, 40)}", path=path, hint=known)
        return
    minimum, cause = minimum_version(spec)
    if _ORDER[version] < _ORDER[minimum]:
        reason = f"this needs cdiVersion {minimum}, the file declares {version}"
        yield Problem("CDI005", reason, path=cause or path, hint=f'declare cdiVersion: "{minimum}"')


def _has_edits(edits: ContainerEdits) -> bool:
    return bool(
        edits.env
        or edits.device_nodes
        or edits.net_devices
        or edits.hooks
        or edits.mounts
        or edits.additional_gids
        or edits.intel_rdt is not None
    )


def _edits_problems(path: Path, edits: ContainerEdits) -> Iterator[Problem]:
    yield from _env_problems((*path, "env"), edits.env)
    for index, node in enumerate(edits.device_nodes):
        yield from _node_problems((*path, "deviceNodes", index), node)
    for index, hook in enumerate(edits.hooks):
        yield from _hook_problems((*path, "hooks", index), hook)
    for index, mount in enumerate(edits.mounts):
        if not mount.host_path:
            yield _invalid("hostPath is missing or empty", *path, "mounts", index)
        if not mount.container_path:
            yield _invalid("containerPath is missing or empty", *path, "mounts", index)
    if edits.intel_rdt is not None and not _valid_clos_id(edits.intel_rdt.clos_id):
        hint = "allowed are / and names of up to 4095 bytes without slash and line feed, but . and .."
        yield _invalid("not a closID", *path, "intelRdt", "closID", hint=hint)
    yield from _net_problems((*path, "netDevices"), edits.net_devices)


def _env_problems(path: Path, env: tuple[str, ...]) -> Iterator[Problem]:
    for index, item in enumerate(env):
        if item.find("=") < 1:
            yield _invalid(f"{quoted(item, 60)} is not NAME=VALUE", *path, index)


def _node_problems(path: Path, node: DeviceNode) -> Iterator[Problem]:
    if not node.path:
        yield _invalid("path is missing or empty", *path)
    if node.type not in DEVICE_TYPES:
        yield _invalid(f"{quoted(node.type, 20)} is none of the types b, c, u and p", *path, "type")
    if node.permissions != "none" and not frozenset("rwm").issuperset(node.permissions):
        yield _invalid(f"{quoted(node.permissions, 20)} is neither of r, w, m nor none", *path, "permissions")


def _hook_problems(path: Path, hook: Hook) -> Iterator[Problem]:
    if hook.hook_name not in HOOK_NAMES:
        yield _invalid(f"{quoted(hook.hook_name, 40)} is none of {', '.join(HOOK_NAMES)}", *path, "hookName")
    if not hook.path:
        yield _invalid("path is missing or empty", *path)
    yield from _env_problems((*path, "env"), hook.env)


def _valid_clos_id(clos_id: str) -> bool:
    if clos_id == "/":
        return True
    short = len(clos_id.encode(errors="surrogatepass")) < _CLOS_ID_BYTES
    return short and clos_id not in (".", "..") and "/" not in clos_id and "\n" not in clos_id


def _net_problems(path: Path, devices: tuple[NetDevice, ...]) -> Iterator[Problem]:
    hosts: set[str] = set()
    names: set[str] = set()
    for index, device in enumerate(devices):
        for wire, value, seen in (
            ("hostInterfaceName", device.host_interface_name, hosts),
            ("name", device.name, names),
        ):
            if not value:
                yield _invalid(f"{wire} is missing or empty", *path, index)
            if value in seen:
                yield _invalid(f"{quoted(value, 60)} occurs twice", *path, index, wire)
            seen.add(value)
