"""What tells two states of files and directories apart, a few ``stat`` calls. Light module.

It must not know what is in a file or whose it may be. Shared by `cdi.registry`, which keeps what it has read
in memory, and `table`, which keeps it on disk.

The kernel's time stamps tick every 1 to 10 ms, and two writes within a tick look the same. So what was
changed just before it was read has not `has_rested`, and what was read of it must not be kept.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

FileIdentity = tuple[int, ...]
"""What tells two states of a file apart, or the errno of looking at it."""

OWNER = slice(5, 8)
"""uid, gid and mode of a file's identity."""

# Longer than the longest tick of a kernel (10 ms at 100 Hz); time stamps never run ahead of the clock by
# more than a file server's clock does, which the second figure allows for.
REST_NS = 30_000_000
AHEAD_NS = 2_000_000_000


def file_identity(found: os.stat_result) -> FileIdentity:
    """What tells two states of a file apart."""
    return (
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
        found.st_uid,
        found.st_gid,
        found.st_mode,
    )


def look_at_file(path: str) -> FileIdentity:
    """The identity of a file, links followed, or one number: the errno of looking at it."""
    try:
        return file_identity(os.stat(path))
    except OSError as error:
        return (error.errno or 0,)


def directory_identity(found: os.stat_result) -> tuple[int, ...]:
    """What a directory is, without its time stamps: its files are compared one by one."""
    return found.st_dev, found.st_ino, found.st_uid, found.st_gid, found.st_mode


def names_in(directory: str, extensions: Sequence[str]) -> list[str]:
    """The names in a directory that end so, bytewise sorted; an extension alone is one. Raises `OSError`."""
    names = [name for name in os.listdir(directory) if name.endswith(tuple(extensions))]
    # The order of code points is that of UTF-8's bytes, except for bytes that are no UTF-8.
    names.sort(key=None if all(map(str.isascii, names)) else os.fsencode)
    return names


def has_rested(newest_ns: int, now_ns: int) -> bool:
    """Whether what changes from now on will have another time stamp.

    newest_ns: the newest stamp of what was looked at. now_ns: the clock before that.
    """
    return not now_ns - REST_NS <= newest_ns <= now_ns + AHEAD_NS
