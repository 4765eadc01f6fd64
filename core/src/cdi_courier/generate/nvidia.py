"""NVIDIA's GPUs for a container that manages them: every device node and the driver's own files.

What belongs to it is known from NVIDIA's container toolkit (its mode ``management``). The driver is asked
nothing: what lies in the file system tells its version and its parts, so the root folder may be any.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
from typing import TYPE_CHECKING, Final

from cdi_courier.cdi.model import ContainerEdits, Device, DeviceNode, Hook, Mount, Spec
from cdi_courier.errors import GenerateError, quoted
from cdi_courier.generate import elf, loader_cache, nodes
from cdi_courier.hookspecs import Generated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cdi_courier.generate.root import Root

KIND: Final = "management.nvidia.com/gpu"

_NODES: Final = (
    # folder, what a node's name begins with
    ("/dev", "nvidia"),
    ("/dev/nvidia-caps", "nvidia-cap"),
    ("/dev/nvidia-caps-imex-channels", "channel"),
)
# GPUDirect Storage and the fabric's switches: not GPUs, and not to be managed through this device.
_OTHER_NODES: Final = ("nvidia-fs", "nvidia-nvswitch", "nvidia-nvlink")
# The driver makes them when first used, so a host that has just started may lack them.
_EXPECTED_NODES: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm")

_MACHINES: Final = ("x86_64-linux-gnu", "aarch64-linux-gnu", "i386-linux-gnu")
_LIBRARY_FOLDERS: Final = (
    "/usr/lib64",
    "/lib64",
    *(f"{usr}/lib/{machine}" for usr in ("/usr", "") for machine in _MACHINES),
    "/usr/lib",
    "/lib",
    "/usr/lib32",
    *(f"/usr/lib/{machine}/nvidia/current" for machine in _MACHINES),  # Debian's alternatives
    "/usr/lib/nvidia/current",
    "/usr/lib64/nvidia",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
)
_LOADER_CACHE: Final = "/etc/ld.so.cache"
_DRIVER_LIBRARY: Final = re.compile(r"lib(?:cuda|nvidia-ml)\.so\.([0-9]+(?:\.[0-9]+)+)", re.ASCII)
_DRIVER_LINKS: Final = ("libcuda.so.1", "libnvidia-ml.so.1")
_LOADED_VERSION: Final = "/sys/module/nvidia/version"
_VERSION_BYTES: Final = 64

_PROGRAM_FOLDERS: Final = (
    "/usr/bin",
    "/usr/sbin",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/bin",
    "/sbin",
    "/usr/local/nvidia/bin",
    "/usr/local/nvidia/toolkit",
)
_PROGRAMS: Final = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
)
_HOOK: Final = "nvidia-cdi-hook"
# Explicit, because runtimes differ in what a hook without an environment gets.
_HOOK_ENV: Final = ("NVIDIA_CTK_DEBUG=false",)
_SOCKETS: Final = (
    "/var/run/nvidia-persistenced/socket",
    "/var/run/nvidia-fabricmanager/socket",
    "/tmp/nvidia-mps",  # noqa: S108 - where MPS has it
)
_FIRMWARE: Final = "/lib/firmware"

_FILE_OPTIONS: Final = ("ro", "nosuid", "nodev", "rbind", "rprivate")
_SOCKET_OPTIONS: Final = ("nosuid", "nodev", "rbind", "rprivate", "noexec")


def generate(root: Root, _mode: str = "management") -> Generated:
    """Make the spec of `KIND`, with one device ``all``.

    Raises `GenerateError`: ``GEN002`` no device node, ``GEN003`` no driver, or several and none is in use.
    """
    found = _device_nodes(root)
    if not found:
        raise GenerateError(
            "GEN002",
            f"there is no NVIDIA device node in {quoted(root.path)}",
            "load the driver, for example with nvidia-smi or nvidia-modprobe -c 0 -u",
            root=root.path,
        )
    folders = _library_folders(root)
    version = _driver_version(root, folders)
    libraries = _libraries(root, folders, version)
    mounts = [*libraries, *_firmware(root, version), *_programs(root), *_sockets(root)]
    warnings = [
        f"{path} is missing: write the spec anew once it is there"
        for path in _EXPECTED_NODES
        if path not in {node.path for node in found}
    ]
    hook = _program(root, _HOOK)
    hooks: tuple[Hook, ...] = ()
    if hook is not None:
        hooks = tuple(_hooks(hook.container_path, libraries))
    else:
        mounts += _sonames(root, libraries)
        warnings.append(
            f"{_HOOK} is not installed: the loader cache in containers is not updated, so only what looks in "
            f"{', '.join(_folders(libraries))} finds the libraries"
        )
    every: dict[str, Mount] = {}
    for mount in mounts:
        every.setdefault(mount.container_path, mount)
    spec = Spec(
        kind=KIND,
        devices=(Device("all", container_edits=nodes.edits(found)),),
        container_edits=ContainerEdits(
            env=("NVIDIA_VISIBLE_DEVICES=void",),  # NVIDIA's own runtime keeps out
            hooks=hooks,
            mounts=tuple(every[path] for path in sorted(every)),
        ),
    )
    return Generated(spec, f"driver {version}", tuple(warnings))


def _device_nodes(root: Root) -> list[DeviceNode]:
    found = []
    for folder, prefix in _NODES:
        for name in root.names(folder):
            if name.startswith(prefix) and not name.startswith(_OTHER_NODES):
                node = nodes.look(root, f"{folder}/{name}")
                if node is not None and node.type == "c":
                    found.append(node)
    return found


def _library_folders(root: Root) -> list[str]:
    """Where libraries are, without links, each once: what the loader knows, then the usual folders."""
    with root.reader(_LOADER_CACHE) as read:
        known = loader_cache.folders(read(0, loader_cache.LIMIT)) if read else ()
    resolved = (root.resolve(folder) for folder in (*known, *_LIBRARY_FOLDERS))
    return list(dict.fromkeys(folder for folder in resolved if folder is not None))


def _driver_version(root: Root, folders: Iterable[str]) -> str:
    versions: dict[str, str] = {}
    linked = set()
    for folder in folders:
        for name in root.names(folder):
            match = _DRIVER_LIBRARY.fullmatch(name)
            if match and _is_file(root, f"{folder}/{name}"):
                versions.setdefault(match[1], f"{folder}/{name}")
        for link in _DRIVER_LINKS:
            match = _DRIVER_LIBRARY.fullmatch(posixpath.basename(root.resolve(f"{folder}/{link}") or ""))
            if match:
                linked.add(match[1])
    if len(versions) > 1:
        # What is left of an earlier driver: the loaded module decides, else what programs are linked to.
        in_use = {_loaded_version(root)} & versions.keys() or linked & versions.keys()
        if len(in_use) == 1:
            return in_use.pop()
        paths = ", ".join(quoted(path) for path in sorted(versions.values()))
        raise GenerateError(
            "GEN003",
            f"there are several NVIDIA drivers in {quoted(root.path)}, and none of them is in use: {paths}",
            "load one of them, or remove what is left of the others",
            root=root.path,
        )
    if not versions:
        raise GenerateError(
            "GEN003",
            f"there is neither libcuda.so.VERSION nor libnvidia-ml.so.VERSION in {quoted(root.path)}",
            "install the driver's libraries, or name the folder that has them with --root",
            root=root.path,
        )
    return next(iter(versions))


def _loaded_version(root: Root) -> str:
    with root.reader(_LOADED_VERSION) as read:
        return read(0, _VERSION_BYTES).decode("ascii", "replace").strip() if read else ""


def _libraries(root: Root, folders: Iterable[str], version: str) -> list[Mount]:
    found = []
    for folder in folders:
        for place in (folder, root.resolve(f"{folder}/vdpau")):
            if place is not None:
                names = (name for name in root.names(place) if name.endswith(f".so.{version}"))
                found += [_mount(root, place, name) for name in names]
    every = {mount.container_path: mount for mount in found if mount is not None}
    return list(every.values())


def _firmware(root: Root, version: str) -> Iterator[Mount]:
    # Where the kernel looks, in its order: of files with one name the first is the one that is loaded.
    release = os.uname().release
    seen = set()
    for folder in (f"updates/{release}", "updates", release, "."):
        place = posixpath.normpath(f"{_FIRMWARE}/{folder}/nvidia/{version}")
        for name in root.names(place):
            if name.startswith("gsp") and name.endswith(".bin") and name not in seen:
                mount = _mount(root, place, name)
                if mount is not None:
                    seen.add(name)
                    yield mount


def _programs(root: Root) -> Iterator[Mount]:
    for name in _PROGRAMS:
        mount = _program(root, name)
        if mount is not None:
            yield mount


def _program(root: Root, name: str) -> Mount | None:
    for folder in _PROGRAM_FOLDERS:
        found = root.stat(f"{folder}/{name}")
        if found is not None and stat.S_ISREG(found.st_mode) and found.st_mode & 0o111:
            return _mount(root, root.resolve(folder) or folder, name)
    return None


def _sockets(root: Root) -> Iterator[Mount]:
    for path in _SOCKETS:
        host_path = root.resolve(path)
        if host_path is not None:
            yield Mount(host_path, path, _SOCKET_OPTIONS)


def _mount(root: Root, folder: str, name: str) -> Mount | None:
    """A file as it is in a folder; what a link leads to is mounted in the link's place."""
    path = posixpath.join(folder, name)
    host_path = root.resolve(path)
    if host_path is None or not _is_file(root, host_path):
        return None
    return Mount(host_path, path, _FILE_OPTIONS)


def _is_file(root: Root, path: str) -> bool:
    found = root.stat(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def _folders(libraries: Iterable[Mount]) -> list[str]:
    return sorted({posixpath.dirname(mount.container_path) for mount in libraries})


def _hooks(path: str, libraries: list[Mount]) -> Iterator[Hook]:
    links = sorted(_links(libraries))
    if links:
        yield _hook(path, "create-symlinks", "--link", links)
    yield _hook(path, "update-ldcache", "--folder", _folders(libraries))


def _links(libraries: Iterable[Mount]) -> Iterator[str]:
    """The links that are no SONAME, so that nobody else makes them: ``TARGET::LINK``."""
    for mount in libraries:
        folder, name = posixpath.split(mount.container_path)
        stem = name.partition(".so.")[0]
        if stem in ("libcuda", "libnvidia-opticalflow"):
            yield f"{stem}.so.1::{folder}/{stem}.so"
        elif stem == "libGLX_nvidia":
            yield f"{name}::{folder}/libGLX_indirect.so.0"


def _hook(path: str, what: str, option: str, values: list[str]) -> Hook:
    options = [word for value in values for word in (option, value)]
    return Hook("createContainer", path, (_HOOK, what, *options), _HOOK_ENV)


def _sonames(root: Root, libraries: Iterable[Mount]) -> Iterator[Mount]:
    for mount in libraries:
        with root.reader(mount.host_path) as read:
            name = elf.soname(read) if read else None
        if name is not None:
            path = posixpath.join(posixpath.dirname(mount.container_path), name)
            yield Mount(mount.host_path, path, _FILE_OPTIONS)
