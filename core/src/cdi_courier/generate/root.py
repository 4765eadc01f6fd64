"""A host's files below a root folder, which no symbolic link leads out of.

Paths are absolute and as the host has them, without the folder in front; so are the targets of links. Each
component is opened relative to the one before and links are followed here, not by the kernel: an absolute
link, or one with too many ``..``, ends within the root as it would on that host. It must not know what the
files are for.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, Final, Self

from cdi_courier.errors import GenerateError, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LINKS: Final = 40  # the kernel's own limit (MAXSYMLINKS)
_COMPONENTS: Final = 4096
_LOOK: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class Root:
    """The host below the folder `path`; a context manager that holds it open.

    Raises `GenerateError` ``GEN001`` if it is no folder or cannot be opened. Of what lies below it, whatever
    is missing, unreadable or loops is said to be absent.
    """

    def __init__(self, path: str = "/") -> None:
        self.path = os.path.abspath(path)
        try:
            self._root = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise GenerateError(
                "GEN001", f"the root folder {quoted(path)} cannot be used: {reason}", path=path
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder; may be called twice."""
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def resolve(self, path: str) -> str | None:
        """The path without links, as the host has it; None if it leads nowhere, or is not printable."""
        with self._walk(path) as found:
            return found[0] if found is not None and found[0].isprintable() else None

    def stat(self, path: str, *, follow: bool = True) -> os.stat_result | None:
        """What lies at `path`, or where a link there leads to; None if nothing."""
        with self._walk(path, follow=follow) as found:
            return None if found is None else os.fstat(found[1])

    def names(self, folder: str) -> list[str]:
        """What a folder holds, sorted; empty if there is none. Names that are not printable are left out."""
        with self._walk(folder) as found:
            if found is None:
                return []
            try:
                reader = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=found[1])
            except OSError:
                return []
            try:
                return sorted(name for name in os.listdir(reader) if name.isprintable())
            except OSError:
                return []
            finally:
                os.close(reader)

    @contextlib.contextmanager
    def reader(self, path: str) -> Iterator[Callable[[int, int], bytes] | None]:
        """A function that reads a regular file: offset and size in bytes → at most so many; else None."""
        with self._walk(path) as found:
            descriptor = -1
            if found is not None and stat.S_ISREG(os.fstat(found[1]).st_mode):
                with contextlib.suppress(OSError):
                    descriptor = os.open(f"/proc/self/fd/{found[1]}", os.O_RDONLY | os.O_CLOEXEC)

            def read(offset: int, size: int) -> bytes:
                try:
                    return os.pread(descriptor, size, offset)
                except (OSError, OverflowError):
                    return b""

            try:
                yield read if descriptor >= 0 else None
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    @contextlib.contextmanager
    def _walk(self, path: str, *, follow: bool = True) -> Iterator[tuple[str, int] | None]:
        """The place where a path leads to: its path without links, and a descriptor of the kind O_PATH."""
        # The folders on the way, outermost first: `..` is the one before, and never the root's own parent.
        opened: list[tuple[str, int]] = [("", os.dup(self._root))]
        try:
            yield self._descend(path, opened, follow=follow)
        finally:
            for _, descriptor in opened:
                os.close(descriptor)

    @staticmethod
    def _descend(path: str, opened: list[tuple[str, int]], *, follow: bool) -> tuple[str, int] | None:
        todo = path.split("/")[::-1]
        links = 0
        for _ in range(_COMPONENTS):
            if not todo:
                return "/" + "/".join(name for name, _ in opened[1:]), opened[-1][1]
            name = todo.pop()
            if name in ("", "."):
                continue
            if name == "..":
                if len(opened) > 1:
                    os.close(opened.pop()[1])
                continue
            try:
                descriptor = os.open(name, _LOOK, dir_fd=opened[-1][1])
            except (OSError, ValueError):
                return None
            opened.append((name, descriptor))
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISLNK(mode) or not (follow or todo):
                if todo and not stat.S_ISDIR(mode):
                    return None
                continue
            links += 1
            target = os.readlink("", dir_fd=descriptor)
            os.close(opened.pop()[1])
            if links > _LINKS:
                return None
            if target.startswith("/"):
                while len(opened) > 1:
                    os.close(opened.pop()[1])
            todo += target.split("/")[::-1]
        return None
