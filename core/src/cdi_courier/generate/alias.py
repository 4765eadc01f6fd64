"""A CDI name for any device: the spec of what the command line says."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Final

import attrs

from cdi_courier.cdi.model import Device, DeviceNode, Mount, Spec
from cdi_courier.errors import GenerateError, quoted
from cdi_courier.generate import nodes
from cdi_courier.hookspecs import Generated
from cdi_courier.names import parse_qualified

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdi_courier.generate.root import Root

_DEFAULT_OPTIONS: Final = ("ro", "nosuid", "nodev", "rbind", "rprivate")


def generate(
    root: Root, name: str, *, paths: Iterable[str], env: Iterable[str], mounts: Iterable[str]
) -> Generated:
    """Make a spec with the one device `name`, ``VENDOR/CLASS=NAME``.

    paths: of device nodes, or of links to them. env: ``K=V``. mounts: ``SRC:DST`` or ``SRC:DST:OPTIONS``,
    options separated by commas. Raises `CdiError` ``CDI001`` for the name, `GenerateError` ``GEN004`` for
    anything else.
    """
    vendor, class_, device = parse_qualified(name)
    made = nodes.edits(_node(root, path) for path in dict.fromkeys(paths))
    every = {mount.container_path: mount for mount in (_mount(root, text) for text in mounts)}
    made = attrs.evolve(
        made,
        env=tuple(_variable(text) for text in env),
        mounts=tuple(every[path] for path in sorted(every)),
    )
    return Generated(Spec(kind=f"{vendor}/{class_}", devices=(Device(device, container_edits=made),)))


def _node(root: Root, path: str) -> DeviceNode:
    clean = _clean(path)
    if not clean.startswith("/"):
        raise _unusable(f"--node {quoted(path)} is not an absolute path")
    host_path = root.resolve(clean)
    if host_path is None:
        raise _unusable(f"--node {quoted(path)}: there is nothing, or nothing that a spec could name")
    node = nodes.look(root, host_path)
    if node is None:
        raise _unusable(f"--node {quoted(path)} is not a device node")
    # Numbers are left out: they may be another device's after the next plugging in, so that the runtime
    # looks at the node each time. The type stays, which it compares.
    return attrs.evolve(node, path=clean, host_path="" if node.path == clean else node.path, major=0, minor=0)


def _clean(path: str) -> str:
    # Two slashes in front, which mean what one does on Linux, POSIX keeps.
    return posixpath.normpath(f"/{path.lstrip('/')}" if path.startswith("/") else path)


def _variable(text: str) -> str:
    if text.find("=") < 1:
        raise _unusable(f"--env {quoted(text)} is not NAME=VALUE")
    _must_be_text("--env", text)
    return text


def _mount(root: Root, text: str) -> Mount:
    source, _, rest = text.partition(":")
    target, _, listed = rest.partition(":")
    if not (source.startswith("/") and target.startswith("/")) or ":" in listed:
        raise _unusable(f"--mount {quoted(text)} is not SRC:DST or SRC:DST:OPTIONS with absolute paths")
    _must_be_text("--mount", text)
    if root.stat(source) is None:
        raise _unusable(f"--mount {quoted(text)}: there is no {quoted(source)}")
    options = tuple(option for option in listed.split(",") if option) or _DEFAULT_OPTIONS
    if not {"bind", "rbind"} & set(options):
        options = (*options, "rbind")  # without it runtimes take the source for a file system's name
    return Mount(_clean(source), _clean(target), options)


def _must_be_text(option: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # what the command line had was other bytes
        raise _unusable(f"{option} {quoted(text)} is not UTF-8, which a spec file is") from None


def _unusable(reason: str) -> GenerateError:
    return GenerateError("GEN004", reason)
