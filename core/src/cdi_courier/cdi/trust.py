"""Whose spec files count: a spec decides what enters a container, so only root may write one.

Judges owner and mode of what it is handed; it must not know what is in a file. Inside a user namespace
(rootless Podman runs hooks in one) the caller is as good as root, and files of the real root appear to
belong to the overflow uid.
"""

from __future__ import annotations

import os
import stat
from typing import Final

_IDENTITY: Final = ["0", "0", "4294967295"]
_DEFAULT_OVERFLOW_UID: Final = 65534


def acceptable_owners() -> frozenset[int]:
    """Return the uids whose files are trusted in this process's user namespace."""
    if _is_initial_user_namespace():
        return frozenset({0})
    return frozenset({0, os.geteuid(), _overflow_uid()})


def distrust(uid: int, gid: int, mode: int, owners: frozenset[int]) -> str:
    """Return why a file with this owner and mode is not trusted; empty if it is."""
    mode = stat.S_IMODE(mode)
    if uid not in owners:
        return f"it belongs to uid {uid}, not to root"
    if mode & stat.S_IWOTH:
        return f"everybody may write it (mode {mode:04o})"
    if mode & stat.S_IWGRP and gid != 0:
        return f"group {gid} may write it (mode {mode:04o})"
    return ""


def distrust_directory(uid: int, gid: int, mode: int, owners: frozenset[int]) -> str:
    """Return why files in a directory with this owner and mode are not trusted; empty if they may be."""
    mode = stat.S_IMODE(mode)
    if uid not in owners:
        return f"its directory belongs to uid {uid}, not to root"
    if mode & stat.S_ISVTX:
        return ""  # others may add files, which are then theirs, but not replace root's
    if mode & stat.S_IWOTH:
        return f"everybody may replace files in its directory (mode {mode:04o})"
    if mode & stat.S_IWGRP and gid != 0:
        return f"group {gid} may replace files in its directory (mode {mode:04o})"
    return ""


def _is_initial_user_namespace() -> bool:
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() == _IDENTITY
    except OSError:
        # Without /proc nothing is known; the stricter answer is the safe one.
        return True


def _overflow_uid() -> int:
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return _DEFAULT_OVERFLOW_UID
