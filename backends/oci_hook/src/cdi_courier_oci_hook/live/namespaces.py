"""The namespaces of a container's first process: which are its own, and how to get into them. Light module.

A container without a mount namespace of its own is refused: what would be put into it would be on the host.
Source: docs/facts.md#live-namespaces, #user-namespaces, setns(2).
"""

from __future__ import annotations

import os

from cdi_courier.errors import DeliveryError

from . import syscalls

# The user namespace last: after it this process has no rights to enter the others.
_ORDER = ("cgroup", "ipc", "uts", "net", "pid", "mnt", "user")


class Namespaces:
    """Those namespaces of a process that this one is not in: kind → descriptor.

    proc: descriptor of the process's folder in ``/proc``.
    """

    __slots__ = ("own", "proc")

    def __init__(self, proc: int, own: dict[str, int]) -> None:
        self.proc = proc
        self.own = own

    @property
    def user(self) -> int | None:
        """The container's user namespace, if that is not ours."""
        return self.own.get("user")

    def inner_pid(self) -> int:
        """The process's number in its own PID namespace. Raises `DeliveryError` ``HOK208``."""
        try:
            status = syscalls.read_at(self.proc, "status")
            line = next(line for line in status.split(b"\n") if line.startswith(b"NSpid:"))
            return int(line.split()[-1])
        except (OSError, StopIteration, ValueError, IndexError):
            raise _gone("its number in its PID namespace cannot be read") from None

    def enter(self, kinds: tuple[str, ...]) -> None:
        """Join those of the kinds that are the container's own. For a child with one thread only.

        Raises `DeliveryError` ``HOK208``.
        """
        for kind in _ORDER:
            if kind in kinds and kind in self.own:
                try:
                    syscalls.enter(self.own[kind])
                except OSError as error:
                    raise _gone(f"its {kind} namespace cannot be entered: {error.strerror}") from None


def of(pid: int) -> Namespaces:
    """The namespaces of a process, as the host numbers it.

    The descriptors are the caller's to close, or left to the end of the process. Raises `DeliveryError`:
    ``HOK207`` it has no mount namespace of its own, ``HOK208`` they cannot be looked at.
    """
    opened: list[int] = []
    try:
        return _of(pid, opened)
    except BaseException:
        for descriptor in opened:
            os.close(descriptor)
        raise


def _of(pid: int, opened: list[int]) -> Namespaces:
    own = {}
    try:
        proc = syscalls.open_at(None, f"/proc/{pid}", syscalls.O_PATH | os.O_DIRECTORY)
        opened.append(proc)
        for kind in _ORDER:
            try:
                theirs = syscalls.open_at(proc, f"ns/{kind}", os.O_RDONLY)
            except FileNotFoundError:
                continue  # a kernel without this kind
            opened.append(theirs)
            found, ours = syscalls.look(theirs), syscalls.look_at(f"/proc/self/ns/{kind}")
            if (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino):
                os.close(opened.pop())
            else:
                own[kind] = theirs
    except OSError as error:
        raise _gone(str(error.strerror)) from None
    if "mnt" not in own:
        raise DeliveryError(
            "HOK207",
            "the container has no mount namespace of its own: what is injected would be on the host",
            "give it one, or leave the annotation out",
        )
    return Namespaces(proc, own)


def _gone(why: str) -> DeliveryError:
    return DeliveryError(
        "HOK208",
        f"the namespaces of the container's process cannot be used: {why}",
        "did the runtime end it meanwhile? Look for its own error first",
    )
