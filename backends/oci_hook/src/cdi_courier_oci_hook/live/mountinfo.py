"""What ``/proc/PID/mountinfo`` says: bytes in, mounts by their number out. Light module; it reads nothing.

Source: proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class Mount:
    """One mount.

    device: ``MAJOR:MINOR`` of the file system, the same for all its mounts. root: the folder of the file
    system that is seen at `point`, where it is mounted, as the reader of mountinfo sees it. options: of this
    mount. shared: whether what is mounted on it appears at its peers. type, super_options: the file system's.
    """

    __slots__ = ("device", "options", "point", "root", "shared", "super_options", "type")

    def __init__(
        self,
        device: str,
        root: str,
        point: str,
        options: Iterable[str],
        type_: str,
        super_options: Iterable[str],
        *,
        shared: bool,
    ) -> None:
        self.device = device
        self.root = root
        self.point = point
        self.options = frozenset(options)
        self.shared = shared
        self.type = type_
        self.super_options = frozenset(super_options)


def parse(data: bytes) -> dict[int, Mount]:
    """Mounts by number, as they are listed: what covers another comes later.

    Lines that are not as documented are left out: nothing is concluded from them.
    """
    mounts = {}
    for line in data.split(b"\n"):
        words = line.split(b" ")
        try:
            # An unknown number of optional fields ends with a dash.
            dash = words.index(b"-", 6)
            number = int(words[0])
            device, root, point, options = words[2:6]
            type_, _, super_options = words[dash + 1 : dash + 4]
        except (ValueError, IndexError):
            continue
        mounts[number] = Mount(
            device.decode("ascii", "replace"),
            os.fsdecode(_plain(root)),
            os.fsdecode(_plain(point)),
            options.decode("ascii", "replace").split(","),
            type_.decode("ascii", "replace"),
            super_options.decode("ascii", "replace").split(","),
            shared=any(word.startswith(b"shared:") for word in words[6:dash]),
        )
    return mounts


def _plain(text: bytes) -> bytes:
    r"""Without the escapes of blank, tab, line feed and backslash: ``\040`` and so on."""
    if b"\\" not in text:
        return text
    first, *rest = text.split(b"\\")
    plain = [first]
    for part in rest:
        try:
            plain.append(bytes([int(part[:3], 8)]) + part[3:])
        except ValueError:
            plain.append(b"\\" + part)
    return b"".join(plain)
