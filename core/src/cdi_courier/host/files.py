"""Files below a root: read with a limit, never written. Paths in and out are those of the host described."""

from __future__ import annotations

import errno
import glob
import os
import stat
from typing import Final

from cdi_courier.errors import HostError, quoted

FILE_LIMIT: Final = 1 << 20
"""Bytes of one file; a runtime's configuration has a few thousand."""

_MOST_FILES: Final = 256


class Root:
    """The host's file system. prefix: the folder that is its ``/``; empty for this machine's own."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix.rstrip("/")

    def real(self, path: str) -> str:
        """Where the host's `path` lies on this machine."""
        return self.prefix + path

    def exists(self, path: str) -> bool:
        """Whether something is there, or cannot be said not to be (no permission, a link to itself)."""
        try:
            os.stat(self.real(path))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return False
        except OSError:
            return True
        return True

    def read(self, path: str, limit: int = FILE_LIMIT) -> bytes:
        """The bytes of a regular file. Raises `HostError` ``HST105``; `FileNotFoundError` if it is not there.

        Never waits for a pipe's other end, and takes no more than `limit` bytes.
        """
        try:
            descriptor = os.open(self.real(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise HostError("HST105", f"{path} is not a regular file", "see what it is")
        with open(descriptor, "rb") as file:
            try:
                data = file.read(limit + 1)
            except OSError as error:
                raise _unreadable(path, error) from None
        if len(data) > limit:
            raise HostError(
                "HST105", f"{path} is larger than {limit} bytes and is not read", "see what it is"
            )
        return data

    def matches(self, pattern: str) -> list[str]:
        """The paths that Go's ``filepath.Glob`` finds, sorted. Raises `HostError` ``HST105`` for too many.

        Unlike a shell's, its ``*`` matches a leading dot (containerd reads ``conf.d/.10-x.toml.swp``, too).
        """
        found = []
        search = glob.iglob(glob.escape(self.prefix) + pattern, include_hidden=True)
        for path in search:
            found.append(path[len(self.prefix) :])
            if len(found) > _MOST_FILES:
                raise HostError("HST105", f"{pattern} matches more than {_MOST_FILES} files")
        return sorted(found)


def read_file(path: str, code: str) -> bytes | None:
    """The bytes of a file of this machine, for an installer; None if it is not there.

    Raises `HostError` with `code`, which is that of whoever asks, for whatever `Root.read` refuses.
    """
    try:
        return Root().read(path)
    except FileNotFoundError:
        return None
    except HostError as error:
        raise HostError(code, error.message, error.hint, file=path) from None


def _unreadable(path: str, error: OSError | ValueError) -> HostError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    hint = "run as root" if isinstance(error, PermissionError) else ""
    return HostError("HST105", f"{quoted(path).strip(chr(34))} cannot be read: {reason}", hint)
