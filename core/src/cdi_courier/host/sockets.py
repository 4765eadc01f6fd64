"""Where container runtimes listen, and who listens there. It speaks no protocol.

The list is that of the distributions; ``[runtimes]`` adds to it and takes away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from typing import TYPE_CHECKING, Final

from attrs import evolve, field, frozen

from cdi_courier.errors import HostError
from cdi_courier.host import listeners
from cdi_courier.host.model import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdi_courier.host.files import Root
    from cdi_courier.host.model import Kind

CRI_DOCKERD: Final = ("/run/cri-dockerd.sock", "/var/run/cri-dockerd.sock")
"""The CRI in front of Docker; its endpoint is Docker to the kubelet."""

_INIT: Final = 1
_LONGEST_PATH: Final = 107  # bytes: sun_path less its closing zero


@frozen
class Override:
    """One table of ``[runtimes]``, as far as looking for runtimes is concerned; see `RuntimeSettings`."""

    ignore: bool = False
    endpoint: str = ""
    config: str = ""


@frozen
class Candidate:
    """A socket that a runtime may listen at.

    kind: what it should be; None: to be found out. key: the table of ``[runtimes]`` that names this very
    socket, or ``""``. distribution: as the fact. config: the main configuration file by ``[runtimes]``, or
    ``""``.
    """

    path: str
    kind: Kind | None = None
    key: str = ""
    distribution: tuple[str, ...] = field(default=())
    config: str = ""


# path → kind, and the distributions that use it.
_KNOWN: Final[Sequence[tuple[str, Kind, tuple[str, ...]]]] = (
    ("/run/containerd/containerd.sock", "containerd", ()),
    ("/run/k3s/containerd/containerd.sock", "containerd", ("k3s", "rke2")),
    ("/run/k0s/containerd.sock", "containerd", ("k0s",)),
    ("/var/snap/microk8s/common/run/containerd.sock", "containerd", ("microk8s",)),
    ("/run/crio/crio.sock", "cri-o", ()),
    ("/var/run/crio/crio.sock", "cri-o", ()),
    ("/run/docker.sock", "docker", ()),
    ("/var/run/docker.sock", "docker", ()),
)


def candidates(root: Root, overrides: Mapping[str, Override], runtime_dir: str = "") -> list[Candidate]:
    """The sockets to ask: those that exist, and those that ``[runtimes]`` names whether they exist or not.

    runtime_dir: the caller's ``XDG_RUNTIME_DIR``, where rootless runtimes listen; or ``""``. A socket with
    two names comes once.
    """
    found: list[Candidate] = []
    ignored = {_identity(root, key) for key, override in overrides.items() if override.ignore}
    for key, override in overrides.items():
        kind = next((kind for kind in KINDS if kind == key), None)
        path = override.endpoint or ("" if kind else key)
        if path and not override.ignore:
            found.append(Candidate(path.removeprefix("unix://"), kind, key, config=override.config))
    moved = {candidate.kind for candidate in found if candidate.kind}
    known = list(_KNOWN)
    if runtime_dir.startswith("/"):
        known.append((f"{runtime_dir}/docker.sock", "docker", ()))
    for path, kind, distribution in known:
        override = overrides.get(kind, Override())
        plain = not distribution  # [runtimes.containerd] is not about k3s'
        if override.ignore or (plain and kind in moved) or not root.exists(path):
            continue
        found.append(
            Candidate(path, kind, distribution=distribution, config=override.config if plain else "")
        )
    taken: dict[object, Candidate] = {}
    for candidate in found:
        identity = _identity(root, candidate.path)
        if identity in ignored:
            continue
        first = taken.setdefault(identity, candidate)
        # Where [runtimes] names a known socket, what is known of it holds.
        taken[identity] = evolve(
            first,
            kind=first.kind or candidate.kind,
            distribution=first.distribution or candidate.distribution,
            config=first.config or candidate.config,
        )
    return list(taken.values())


def is_usual(path: str) -> bool:
    """Whether it is where a runtime listens by default."""
    return any(path == known for known, _, _ in _KNOWN)


def same(root: Root, one: str, other: str) -> bool:
    """Whether both paths are one socket."""
    return _identity(root, one) == _identity(root, other)


@frozen
class Peer:
    """Who listens: both None where it cannot be told (another PID namespace, or systemd on its behalf)."""

    pid: int | None
    user: int | None = None


def peer(root: Root, path: str, timeout: float) -> Peer:
    """Connect, look who is there, and close; nothing is sent.

    Raises `HostError`: ``HST101`` nobody can be there, ``HST102`` no permission, ``HST103`` no answer,
    ``HST104`` not a socket of this sort.
    """
    with connect(root, path, timeout) as connection:
        size = struct.calcsize("3i")
        pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    # The kernel notes who called listen(): systemd does so for a service that it starts on demand.
    return Peer(pid, user) if pid > _INIT else Peer(None)


def listener(root: Root, path: str, pid: int | None, timeout: float) -> Peer:
    """As `peer`, but without connecting where the kernel can tell that `pid` listens there."""
    if pid is not None and listeners.listens(root, path, pid):
        return Peer(pid)
    return peer(root, path, timeout)


def connect(root: Root, path: str, timeout: float) -> socket.socket:
    """A connected stream socket with this timeout. Raises as `peer`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout)
        connection.connect(address(root, path))
    except HostError:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        raise _refusal(root, path, error, timeout) from None
    return connection


def address(root: Root, path: str) -> str:
    """What to connect to. Raises `HostError` ``HST104`` for a path that no socket can have."""
    real = root.real(path)
    if len(os.fsencode(real)) > _LONGEST_PATH or "\0" in real or not path.startswith("/"):
        raise HostError("HST104", f"{path}: no socket can have this path", "it must be absolute and short")
    return real


def _refusal(root: Root, path: str, error: OSError, timeout: float) -> HostError:
    # EAGAIN: the backlog is full, because who listens does not accept; a non-blocking connect says so.
    if isinstance(error, TimeoutError) or error.errno == errno.EAGAIN:
        return HostError(
            "HST103", f"{path} did not accept a connection within {timeout:.3g} s", "the runtime may hang"
        )
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return HostError("HST101", f"{path} does not exist", "the runtime is down, or listens elsewhere")
    if isinstance(error, PermissionError):
        return HostError("HST102", f"{path}: permission denied", "run as root")
    if isinstance(error, ConnectionRefusedError):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(root.real(path)).st_mode):
                return HostError("HST101", f"{path} is not a socket", "remove it, or correct [runtimes]")
        return HostError("HST101", f"nobody listens at {path}", "the runtime is down and left its socket")
    if error.errno == errno.ELOOP:
        return HostError("HST101", f"{path} is a symbolic link to itself", "remove it")
    return HostError("HST104", f"{path} cannot be connected to: {error.strerror}")


def _identity(root: Root, path: str) -> object:
    real = root.real(path)
    try:
        found = os.stat(real)
    except (OSError, ValueError):
        # /run and /var/run are one folder, whatever is in it.
        return os.path.join(os.path.realpath(os.path.dirname(real)), os.path.basename(real))
    return (found.st_dev, found.st_ino)
