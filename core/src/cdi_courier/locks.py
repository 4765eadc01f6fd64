"""Single-instance locks by ``flock``: one daemon a state directory, one a runtime socket.

Two plugins of one name on one NRI socket break every container they both touch (docs/facts.md#nri-ownership),
so the lock of a socket lies in one place for the whole host, whatever the state directory is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from typing import TYPE_CHECKING, Final

from cdi_courier.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_ATTEMPTS = 5
_CURES: Final = {
    errno.EROFS: "have that file system mounted writable, or set service.state_dir",
    errno.ENOSPC: "make room there (blocks or inodes), or set service.state_dir",
    errno.EDQUOT: "make room there, or set service.state_dir",
    errno.EMFILE: "raise the limit of open files (LimitNOFILE= of the unit, ulimit -n)",
    errno.ENFILE: "see what has opened all files that the host allows (fs.file-max)",
}
_LONGEST_NAME: Final = 200  # bytes; a file name may have 255
_QUOTED: Final = re.compile(rb"[^A-Za-z0-9_.~-]")


def socket_locks() -> str:
    """The folder of the runtime sockets' locks; the user's own runtime folder when not root."""
    if os.geteuid() == 0:
        return "/run/cdi-courier/locks"
    import platformdirs  # only for users

    return os.path.join(platformdirs.user_runtime_dir("cdi-courier"), "locks")


@contextlib.contextmanager
def runtime_socket(path: str) -> Iterator[None]:
    """Hold the lock of a runtime's socket, which need not exist yet. Raises `HostError` ``HST002``."""
    folder = socket_locks()
    own = folder, os.path.dirname(folder)
    with exclusive(os.path.join(folder, _name_of(path)), f"the runtime socket {path}", own):
        yield


def _name_of(path: str) -> str:
    """A file name for a path: one for all ways to write it."""
    # The real path: /var/run/nri/nri.sock and /run/nri/nri.sock are one socket.
    real = os.path.realpath(path)
    # As `urllib.parse.quote` writes it, which takes a millisecond to load.
    name = _QUOTED.sub(lambda found: b"%%%02X" % ord(found[0]), os.fsencode(real.removeprefix("/"))).decode()
    if len(name) <= _LONGEST_NAME:
        return name
    # hashlib brings OpenSSL, 3 MB of the daemon's memory; no real socket has such a path.
    import hashlib

    return hashlib.sha256(os.fsencode(real)).hexdigest()


@contextlib.contextmanager
def exclusive(path: str | os.PathLike[str], what: str, own: Sequence[str] = ()) -> Iterator[None]:
    """Hold `path` locked; its folder is made (0700) if missing, and what was made is removed afterwards.

    own: folders that nobody but this program uses; they are removed when empty, whoever made them.
    Raises `HostError`: ``HST002`` another process holds it, ``HST003`` the lock file cannot be made.
    """
    path = os.fspath(path)
    made: list[str] = []
    descriptor = -1
    try:
        descriptor = _make(path, what, made)
        yield
    finally:
        if descriptor >= 0:
            # Unlinked while it is held: whoever waits for it finds that it is no longer the file at `path`.
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(descriptor)
        for folder in dict.fromkeys((*own, *reversed(made))):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _make(path: str, what: str, made: list[str]) -> int:
    try:
        for attempt in range(_ATTEMPTS):
            for folder in _missing(os.path.dirname(path)):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, mode=0o700)
                    made.append(folder)
            try:
                return _lock(path, what)
            except FileNotFoundError:
                # Another process has just removed the empty folder.
                if attempt == _ATTEMPTS - 1:
                    raise
    except OSError as error:
        raise HostError(
            "HST003",
            f"cannot make the lock file {path}: {error.strerror}",
            _CURES.get(error.errno or 0, "run as root, or set service.state_dir"),
        ) from None
    raise AssertionError


def _missing(folder: str) -> list[str]:
    """What must be made for a folder to be there, in that order."""
    missing = []
    while folder and not os.path.exists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing[::-1]


def _lock(path: str, what: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise HostError(
                "HST002",
                f"another cdi-courier{f' (pid {holder})' if holder.isdigit() else ''} already serves {what}",
                "stop it first; two on one socket would break every container they both touch",
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                # For people only; on a full disk the lock holds without it.
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{os.getpid()}\n".encode())
                return descriptor
        os.close(descriptor)
