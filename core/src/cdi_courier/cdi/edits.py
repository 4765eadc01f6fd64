"""Container edits: joining those of several devices, and writing them as the plain dicts that `oci` applies.

What the host adds to a device node is looked up by `oci`, which is light; here is only its face for the
model. Nothing here is cached: a node is looked at each time it is delivered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from cdi_courier import oci
from cdi_courier.cdi.model import ContainerEdits, DeviceNode


def concatenate(parts: Iterable[ContainerEdits]) -> ContainerEdits:
    """Join edits in order: lists are appended, a later ``intelRdt`` replaces an earlier one as a whole."""
    every = list(parts)
    return ContainerEdits(
        env=tuple(item for edits in every for item in edits.env),
        device_nodes=tuple(item for edits in every for item in edits.device_nodes),
        net_devices=tuple(item for edits in every for item in edits.net_devices),
        hooks=tuple(item for edits in every for item in edits.hooks),
        mounts=tuple(item for edits in every for item in edits.mounts),
        intel_rdt=next((edits.intel_rdt for edits in reversed(every) if edits.intel_rdt is not None), None),
        additional_gids=tuple(item for edits in every for item in edits.additional_gids),
    )


def edits_to_dict(edits: ContainerEdits) -> dict[str, Any]:
    """Write edits with their names on the wire; what is absent, empty or zero is left out.

    ``fileMode``, ``uid``, ``gid`` and ``timeout`` are written when they are 0, ``schemata`` and
    ``intelRdt`` when they are empty.
    """
    return to_dict(edits)


def to_dict(value: Any) -> dict[str, Any]:
    """Write any object of `model` with its names on the wire."""
    written = {}
    for field in attrs.fields(type(value)):
        item = getattr(value, field.name)
        if item is not None and item != field.default:
            written[field.metadata["wire"]] = _plain(item)
    return written


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return to_dict(value) if attrs.has(type(value)) else value


def complete_node(node: DeviceNode) -> DeviceNode:
    """Fill in from the host what a device node leaves open. Source: docs/facts.md#cdi-injection.

    The result has a type, numbers and, where the host has the node, a mode; uid and gid stay as they are,
    because they follow the container's user. Raises `CdiError` ``CDI017`` that names the node.
    """
    facts = oci.complete_node(to_dict(node))
    return attrs.evolve(
        node,
        host_path=facts["hostPath"],
        type=facts["type"],
        major=facts["major"],
        minor=facts["minor"],
        file_mode=facts.get("fileMode"),
    )
