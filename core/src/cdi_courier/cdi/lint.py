"""Advice about spec files that are valid and yet unwise. Nothing here decides whether a file is used."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cdi_courier.cdi.validate import minimum_version
from cdi_courier.errors import quoted
from cdi_courier.names import split_kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdi_courier.cdi.model import ContainerEdits, Spec

_DNS = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", re.ASCII)
_ANNOTATION_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]{0,61})?[A-Za-z0-9]", re.ASCII)


def advice(spec: Spec) -> list[str]:
    """What could be better, one sentence each. Source: docs/facts.md#cdi-validation, #cdi-names."""
    return list(_advice(spec))


def _advice(spec: Spec) -> Iterator[str]:
    vendor, class_ = split_kind(spec.kind)
    if 1 in (len(vendor), len(class_)):
        # Version 1.1.0 of the reference's library, which containerd 2.1 has, indexes past the end.
        yield f"kind {quoted(spec.kind)}: containerd 2.1 crashes on a vendor or class of one letter"
    if not _DNS.fullmatch(vendor) or len(vendor) > 253:
        yield f"kind {quoted(spec.kind)}: the specification wants the vendor to be a DNS name in lower case"
    needed, _ = minimum_version(spec)
    if spec.cdi_version.removeprefix("v") != needed:
        yield f"cdiVersion {spec.cdi_version}: {needed} says the same and is read by older runtimes too"
    for where, pairs in [
        ("annotations", spec.annotations),
        *((f"devices[{i}].annotations", device.annotations) for i, device in enumerate(spec.devices)),
    ]:
        for key in pairs:
            prefix, slash, name = key.rpartition("/")
            if not _ANNOTATION_NAME.fullmatch(name) or (slash and not _DNS.fullmatch(prefix.lower())):
                yield f"{where}: {quoted(key)} is no annotation key as Kubernetes has them"
    yield from _edits("containerEdits", spec.container_edits)
    for index, device in enumerate(spec.devices):
        yield from _edits(f"devices[{index}].containerEdits", device.container_edits)


def _edits(where: str, edits: ContainerEdits) -> Iterator[str]:
    paths = [(f"deviceNodes[{i}].path", node.path) for i, node in enumerate(edits.device_nodes)]
    paths += [(f"hooks[{i}].path", hook.path) for i, hook in enumerate(edits.hooks)]
    for i, mount in enumerate(edits.mounts):
        paths.append((f"mounts[{i}].containerPath", mount.container_path))
        if mount.host_path.startswith(".") or "/" in mount.host_path:
            paths.append((f"mounts[{i}].hostPath", mount.host_path))
    for field, path in paths:
        if not path.startswith("/"):
            yield f"{where}.{field}: {quoted(path)} is not absolute"
    for i, hook in enumerate(edits.hooks):
        if hook.timeout is not None and hook.timeout <= 0:
            yield f"{where}.hooks[{i}].timeout: {hook.timeout} s; runtimes differ in what that means"
        if hook.hook_name == "prestart":
            yield f"{where}.hooks[{i}].hookName: prestart is deprecated; createRuntime runs at that time"
