"""A container's root file system: its paths are found and made without ever leaving it. Light module.

Whoever made the image decides what lies there, and a shared volume may change while this looks. So every
path is resolved by the kernel below a descriptor of the root (``openat2`` with ``RESOLVE_IN_ROOT``), and what
is then done is done to the descriptor that came out. No path is resolved and then used. Missing folders are
made one at a time, each below a descriptor of the one before.

It must not know devices, CDI, or how the process came into the container's mount namespace.
Source: docs/facts.md#container-paths.
"""

from __future__ import annotations

import errno
import os
import stat

from cdi_courier.errors import DeliveryError, quoted

from . import mountinfo, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_IN_ROOT = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS
_CHILD = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_ATTEMPTS = 128  # the kernel gives up with EAGAIN where ".." meets a rename; what never rests is refused
_LINKS = 40  # as many as the kernel follows
_DIRECTORY_MODE = 0o755
_FILE_MODE = 0o644

_KERNELS = frozenset(
    ("proc", "sysfs", "cgroup", "cgroup2", "securityfs", "debugfs", "tracefs", "bpf", "selinuxfs", "configfs")
)


class Rootfs:
    """The root file system that a process in the container's mount namespace works on.

    root: descriptor of its directory. proc: descriptor of this process's own folder in the host's ``/proc``,
    opened before anything of the container could be in the way. host: devices of all file systems that the
    host has mounted, as in `mountinfo.Mount`.

    What is made is noted, and `roll_back` takes it away again.
    """

    def __init__(self, root: int, proc: int, host: Iterable[str]) -> None:
        self.root = root
        self._proc = proc
        self._host = frozenset(host)
        self._mounts: dict[int, mountinfo.Mount] = {}
        self._undo: list[Callable[[], None]] = []
        self._root_mount = self._mount_number(root)
        found = syscalls.look(root)
        self._root_identity = (found.st_dev, found.st_ino)

    def find(self, path: str) -> int | None:
        """An ``O_PATH`` descriptor of what is at a container's path, links followed; None if nothing is.

        Raises `DeliveryError` ``HOK210``.
        """
        try:
            return self._open(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _refused(path, error) from None

    def parent(self, path: str) -> tuple[int, str]:
        """A descriptor of the folder that a path lies in, made if need be, and the path's last component.

        Raises `DeliveryError` ``HOK210`` and ``HOK211``.
        """
        parts = _parts(path)
        if parts[-1] == "..":
            raise _no_place(path)
        try:
            return self._folder(parts[:-1], path), parts[-1]
        except OSError as error:
            raise _refused(path, error) from None

    def make(self, path: str, *, directory: bool) -> int:
        """Make an empty directory or file where there is nothing yet, with the folders that it lies in.

        A dangling link is followed: its target is what is made, inside the root. Raises `DeliveryError`
        ``HOK210``, and ``HOK211`` if that would be on a file system that the host has mounted too.
        """
        try:
            return self._make(_parts(path), path, directory=directory)
        except OSError as error:
            raise _refused(path, error) from None

    def is_own(self, descriptor: int) -> bool:
        """Whether it lies on the root's own mount."""
        return self._mount_number(descriptor) == self._root_mount

    def is_shared(self, descriptor: int) -> bool:
        """Whether it lies on a file system, other than the root's, that the host has mounted as well.

        A bind mount of the host's ``/dev`` is one: what is changed there is changed on the host.
        """
        return not self.is_own(descriptor) and self.mount_of(descriptor).device in self._host

    def mount_of(self, descriptor: int) -> mountinfo.Mount:
        """The mount that it lies on. Raises `OSError` if there is no such mount any more."""
        number = self._mount_number(descriptor)
        if number not in self._mounts:
            self._mounts = mountinfo.parse(syscalls.read_at(self._proc, "mountinfo"))
        try:
            return self._mounts[number]
        except KeyError:
            raise OSError(errno.ESTALE, "its mount is not listed") from None

    def is_mount_point(self, descriptor: int) -> bool:
        """Whether something is mounted right there."""
        return self.path_of(descriptor) == self.mount_of(descriptor).point

    def is_root(self, descriptor: int) -> bool:
        """Whether it is the root itself."""
        found = syscalls.look(descriptor)
        return (found.st_dev, found.st_ino) == self._root_identity and self.is_own(descriptor)

    def is_kernels(self, descriptor: int) -> bool:
        """Whether it lies on a file system whose files are the kernel's, such as ``/proc``."""
        return self.mount_of(descriptor).type in _KERNELS

    def path_of(self, descriptor: int) -> str:
        """Where it is, as the kernel says. To be shown and compared, never to be used."""
        return syscalls.read_link(self._proc, f"fd/{descriptor}")

    def change_mode(self, descriptor: int, mode: int) -> None:
        """Change the mode of what an ``O_PATH`` descriptor refers to; no call of its own does that."""
        syscalls.change_mode(f"fd/{descriptor}", mode, self._proc)

    def on_failure(self, undo: Callable[[], None]) -> None:
        """Note what takes away something just made."""
        self._undo.append(undo)

    def at_descriptor(self, call: Callable[[str], None], descriptor: int) -> None:
        """Call with a path that leads to what a descriptor refers to, for calls that only take paths."""
        folder = os.open("fd", syscalls.O_PATH, dir_fd=self._proc)
        try:
            syscalls.go_to(folder)
            call(str(descriptor))
        finally:
            os.close(folder)
            os.fchdir(self.root)

    def roll_back(self) -> None:
        """Take away what was made, the latest first, as far as that is possible."""
        while self._undo:
            try:
                self._undo.pop()()
            except OSError:
                continue  # the mount namespace ends with the container; what else is there to be done?

    def _mount_number(self, descriptor: int) -> int:
        for line in syscalls.read_at(self._proc, f"fdinfo/{descriptor}").split(b"\n"):
            if line.startswith(b"mnt_id:"):
                return int(line[7:])
        raise OSError(errno.ENOSYS, "the kernel does not tell its mount")

    def _open(self, path: str, flags: int = 0) -> int:
        for _ in range(_ATTEMPTS):
            try:
                return syscalls.openat2(self.root, path, os.O_PATH | flags, _IN_ROOT)
            except BlockingIOError:
                continue
        raise OSError(errno.EAGAIN, "it does not stop changing")

    def _make(self, parts: list[str], path: str, *, directory: bool) -> int:
        for _ in range(_LINKS):
            folder = self._folder(parts[:-1], path)
            try:
                return self._make_child(folder, parts[-1], path, directory=directory)
            except _Link as link:
                parts = _through(parts[:-1], link.target, [])
                if not parts:
                    break
            finally:
                os.close(folder)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def _folder(self, parts: list[str], path: str) -> int:
        """A descriptor of a folder; what is missing is made."""
        for _ in range(_LINKS):
            there, at = self._deepest(parts)
            try:
                _must_lead_somewhere(parts[there:])
                for position in range(there, len(parts)):
                    child = self._make_child(at, parts[position], path, directory=True)
                    os.close(at)
                    at = child
            except _Link as link:
                os.close(at)
                parts = _through(parts[:position], link.target, parts[position + 1 :])
            except BaseException:
                os.close(at)
                raise
            else:
                return at
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def _deepest(self, parts: list[str]) -> tuple[int, int]:
        """How many of the parts are there already, and a descriptor of the folder that they lead to."""
        for there in range(len(parts), 0, -1):
            try:
                return there, self._open("/".join(parts[:there]), os.O_DIRECTORY)
            except FileNotFoundError:
                continue
        return 0, self._open(".", os.O_DIRECTORY)

    def _make_child(self, folder: int, name: str, path: str, *, directory: bool) -> int:
        """Open one component, made if it is missing. Raises `_Link` if a link is there instead."""
        _must_lead_somewhere([name])
        if self.is_shared(folder):
            try:
                return self._open_child(folder, name, directory=directory)
            except FileNotFoundError:
                raise DeliveryError(
                    "HOK211",
                    f"{quoted(path)} does not exist in the container, and would have to be made in "
                    f"{quoted(self.path_of(folder))}, on a file system that the host has mounted too",
                    "make it there, or leave that volume out of the container",
                ) from None
        kept = os.dup(folder)
        try:
            if directory:
                syscalls.make_directory(folder, name, _DIRECTORY_MODE)
            else:
                syscalls.make_node(folder, name, stat.S_IFREG | _FILE_MODE)
        except FileExistsError:
            os.close(kept)
        except BaseException:
            os.close(kept)
            raise
        else:
            self.on_failure(lambda: syscalls.remove(kept, name, is_directory=directory))
        return self._open_child(folder, name, directory=directory)

    def _open_child(self, folder: int, name: str, *, directory: bool) -> int:
        try:
            # Without O_NOFOLLOW: with it, a descriptor of the link itself would come out.
            return syscalls.openat2(folder, name, os.O_PATH | (os.O_DIRECTORY if directory else 0), _CHILD)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            try:
                target = syscalls.read_link(folder, name)
            except OSError:
                raise error from None
            raise _Link(target) from None


def _must_lead_somewhere(missing: Sequence[str]) -> None:
    if ".." in missing:
        raise OSError(errno.ENOENT, '".." follows a folder that does not exist')


class _Link(Exception):  # noqa: N818 - no error: a way to go on
    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.target = target


def _parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not path.startswith("/") or not parts or "\0" in path:
        raise _no_place(path)
    return parts


def _no_place(path: str) -> DeliveryError:
    return DeliveryError(
        "HOK210",
        f"{quoted(path)} is no path at which something can be put into a container",
        "correct the CDI spec: a path is absolute, names something, and is not the root itself",
    )


def _through(before: list[str], target: str, after: list[str]) -> list[str]:
    """The parts of a path in which a link was met. They are resolved anew, by the kernel."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    return ([] if target.startswith("/") else before) + parts + after


def _refused(path: str, error: OSError) -> DeliveryError:
    return DeliveryError(
        "HOK210",
        f"{quoted(path)} cannot be found or made in the container: {error.strerror}",
        "what does the image have there? See docs/live-injection.md",
    )
