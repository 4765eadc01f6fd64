"""What a CDI spec says, as frozen values. Source: docs/facts.md#cdi-model.

Attribute names are ours, names on the wire stand in each field's metadata, and so does the type on the
wire, from which `decode` derives how a field is read and `edits` how it is written. This module must not
know files, YAML or which values are valid.

0 and absent differ for ``fileMode``, ``uid``, ``gid`` and ``timeout``; empty and absent for ``schemata``.
Everywhere else the zero value means absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import attrs
from attrs import frozen


class Scalar(NamedTuple):
    """A scalar on the wire. `low` and `high` bound integers."""

    name: str
    low: int = 0
    high: int = 0


class ListOf(NamedTuple):
    """A list of scalars or of objects. `null`: what a null element means, None if it is an error."""

    item: Scalar | type[Any]
    null: Any = None


class Object(NamedTuple):
    """A nested object. `cls` is the model class."""

    cls: type[Any]


class StringMap(NamedTuple):
    """A mapping of strings to strings."""


Wire = Scalar | ListOf | Object | StringMap

STRING: Final = Scalar("string")
BOOL: Final = Scalar("boolean")
INT64: Final = Scalar("integer", -(2**63), 2**63 - 1)
UINT32: Final = Scalar("integer", 0, 2**32 - 1)
STRINGS: Final = ListOf(STRING, "")
UINT32S: Final = ListOf(UINT32, 0)

NO_ANNOTATIONS: Final[Mapping[str, str]] = MappingProxyType({})


def _field(wire: str, kind: Wire, default: Any = "") -> Any:
    return attrs.field(default=default, metadata={"wire": wire, "kind": kind})


@frozen
class DeviceNode:
    """A device node to create in the container; what is absent comes from the host's node."""

    path: str = _field("path", STRING)
    host_path: str = _field("hostPath", STRING)
    type: str = _field("type", STRING)
    major: int = _field("major", INT64, 0)
    minor: int = _field("minor", INT64, 0)
    file_mode: int | None = _field("fileMode", UINT32, None)
    permissions: str = _field("permissions", STRING)
    uid: int | None = _field("uid", UINT32, None)
    gid: int | None = _field("gid", UINT32, None)


@frozen
class NetDevice:
    """A network interface of the host to move into the container."""

    host_interface_name: str = _field("hostInterfaceName", STRING)
    name: str = _field("name", STRING)


@frozen
class Hook:
    """An OCI hook. `hook_name` is the list it belongs to, e.g. ``createContainer``."""

    hook_name: str = _field("hookName", STRING)
    path: str = _field("path", STRING)
    args: tuple[str, ...] = _field("args", STRINGS, ())
    env: tuple[str, ...] = _field("env", STRINGS, ())
    timeout: int | None = _field("timeout", INT64, None)


@frozen
class Mount:
    """A mount of a host path into the container."""

    host_path: str = _field("hostPath", STRING)
    container_path: str = _field("containerPath", STRING)
    options: tuple[str, ...] = _field("options", STRINGS, ())
    type: str = _field("type", STRING)


@frozen
class IntelRdt:
    """Intel Resource Director Technology settings; replace a container's own as a whole."""

    clos_id: str = _field("closID", STRING)
    l3_cache_schema: str = _field("l3CacheSchema", STRING)
    mem_bw_schema: str = _field("memBwSchema", STRING)
    schemata: tuple[str, ...] | None = _field("schemata", STRINGS, None)
    enable_monitoring: bool = _field("enableMonitoring", BOOL, default=False)


@frozen
class ContainerEdits:
    """What a device, or a whole spec, changes in a container."""

    env: tuple[str, ...] = _field("env", STRINGS, ())
    device_nodes: tuple[DeviceNode, ...] = _field("deviceNodes", ListOf(DeviceNode), ())
    net_devices: tuple[NetDevice, ...] = _field("netDevices", ListOf(NetDevice), ())
    hooks: tuple[Hook, ...] = _field("hooks", ListOf(Hook), ())
    mounts: tuple[Mount, ...] = _field("mounts", ListOf(Mount), ())
    intel_rdt: IntelRdt | None = _field("intelRdt", Object(IntelRdt), None)  # noqa: RUF009 - attrs.field
    additional_gids: tuple[int, ...] = _field("additionalGids", UINT32S, ())


NO_EDITS: Final = ContainerEdits()


@frozen
class Device:
    """A device of a spec. `name` is what follows ``=`` in its qualified name."""

    name: str = _field("name", STRING)
    annotations: Mapping[str, str] = _field("annotations", StringMap(), NO_ANNOTATIONS)
    container_edits: ContainerEdits = _field("containerEdits", Object(ContainerEdits), NO_EDITS)  # noqa: RUF009 - attrs.field


@frozen
class Spec:
    """One CDI spec file. `kind` is ``vendor/class``."""

    cdi_version: str = _field("cdiVersion", STRING)
    kind: str = _field("kind", STRING)
    annotations: Mapping[str, str] = _field("annotations", StringMap(), NO_ANNOTATIONS)
    # A null element is a device without a name, which validation refuses.
    devices: tuple[Device, ...] = _field("devices", ListOf(Device, Device()), ())
    container_edits: ContainerEdits = _field("containerEdits", Object(ContainerEdits), NO_EDITS)  # noqa: RUF009 - attrs.field
