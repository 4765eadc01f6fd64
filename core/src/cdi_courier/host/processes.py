"""What the kernel says of processes: their command lines, their mounts. Only reads ``/proc``."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

from cdi_courier.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdi_courier.host.files import Root

_LIMIT: Final = 1 << 18
_MOUNTS_LIMIT: Final = 4 << 20


def command_line(root: Root, pid: int | None) -> list[str]:
    """The process's arguments; none if it has gone, is not known, or does not show them."""
    if pid is None:
        return []
    with contextlib.suppress(OSError, HostError):
        data = root.read(f"/proc/{pid}/cmdline", _LIMIT)
        # A title that fills the place of the arguments has no zero at its end.
        return [os.fsdecode(word) for word in data.removesuffix(b"\0").split(b"\0")] if data else []
    return []


def environment(root: Root, pid: int) -> dict[str, str]:
    """The process's variables as it was started; none if it has gone, or is not ours to look into."""
    with contextlib.suppress(OSError, HostError):
        data = root.read(f"/proc/{pid}/environ", _LIMIT)
        pairs = (os.fsdecode(word).partition("=") for word in data.split(b"\0"))
        return {name: value for name, equals, value in pairs if equals}
    return {}


def named(root: Root, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """(PID, arguments) of each process of the host whose program has one of the names.

    One in another PID namespace is a container's, such as a cluster in Docker or what a pod calls so. One of
    another user than root and the caller may be called anything by anybody.
    """
    mine = _namespace(root, "self")
    with contextlib.suppress(OSError):
        for entry in os.listdir(root.real("/proc")):
            if entry.isdigit():
                words = command_line(root, int(entry))
                # Behind a blank stands the rest of an overwritten title: "k3s server".
                if (
                    words
                    and os.path.basename(words[0].partition(" ")[0]) in names
                    and (not mine or _namespace(root, entry) in (mine, ""))
                    and _owner(root, entry) in (0, os.geteuid())
                ):
                    yield int(entry), words


def _namespace(root: Root, who: str) -> str:
    """The PID namespace of a process; empty if it has gone, or is not ours to look into."""
    with contextlib.suppress(OSError):
        return os.readlink(root.real(f"/proc/{who}/ns/pid"))
    return ""


def _owner(root: Root, who: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(root.real(f"/proc/{who}")).st_uid
    return None


def option(words: Sequence[str], *names: str) -> str | None:
    """The value of the last such option, written ``--name VALUE`` or ``--name=VALUE``."""
    found = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            if equals:
                found = value
            elif index + 1 < len(words):
                found = words[index + 1]
    return found


def absolute(root: Root, pid: int | None, path: str) -> str:
    """The path as that process means it."""
    if path.startswith("/"):
        return path
    folder = "/"
    with contextlib.suppress(OSError):
        folder = os.readlink(root.real(f"/proc/{pid}/cwd"))
    return os.path.normpath(os.path.join(folder, path))


def mounts(root: Root, pid: int | None) -> list[tuple[str, str]]:
    """(mount point, file system type) as the process sees them, or this one; later ones hide earlier ones."""
    who = "self" if pid is None else str(pid)
    try:
        data = root.read(f"/proc/{who}/mountinfo", _MOUNTS_LIMIT)
    except (OSError, HostError):
        return []
    found = []
    for line in data.splitlines():
        # "36 35 98:0 /root /point options - type source super": proc(5); fields before the dash vary.
        before, dash, after = line.partition(b" - ")
        words = before.split()
        if dash and len(words) > 4 and after:
            found.append((os.fsdecode(words[4]), os.fsdecode(after.split()[0])))
    return found
