"""What the bpf calls do when the kernel is not of one mind: kernels that real tests do not meet."""

from __future__ import annotations

import errno
import os
import resource
import struct
from typing import Any

import pytest
from cdi_courier_oci_hook.live import bpf
from support.bpf_code import YES

LOAD, QUERY = 5, 16
UNLIMITED = 2**64 - 1


class Calls:
    """bpf(2) that fails with the given errors, one a call, and then succeeds with 7."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: int) -> None:
        self.errors = list(errors)
        self.sizes: list[int] = []
        self.limits: list[tuple[int, int] | None] = []
        monkeypatch.setattr(bpf, "_bpf", self._bpf)
        monkeypatch.setattr(bpf, "_memory_limit", self._memory_limit)

    def _bpf(self, command: int, attributes: Any, size: int) -> int:
        self.sizes.append(size)
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        return 7

    def _memory_limit(self, new: tuple[int, int] | None) -> tuple[int, int]:
        self.limits.append(new)
        if new == (UNLIMITED, UNLIMITED):
            raise OSError(errno.EPERM, "no CAP_SYS_RESOURCE")
        return 65536, 1 << 20


def test_a_verifier_that_was_interrupted_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGAIN means that a signal came in between; five times is enough, as in libbpf."""
    calls = Calls(monkeypatch, *[errno.EAGAIN] * 4)
    assert bpf.load(YES) == 7
    assert len(calls.sizes) == 5

    Calls(monkeypatch, *[errno.EAGAIN] * 5)
    with pytest.raises(BlockingIOError):
        bpf.load(YES)


def test_locked_memory_is_raised_for_the_load_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.11 too little of it is EPERM; as far as it may be raised it is, and then set back."""
    calls = Calls(monkeypatch, errno.EPERM)

    assert bpf.load(YES) == 7
    assert calls.limits == [None, (UNLIMITED, UNLIMITED), (1 << 20, 1 << 20), (65536, 1 << 20)]


def test_a_load_that_is_not_permitted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all the memory there is it is still EPERM, and the limit is what it was."""
    calls = Calls(monkeypatch, errno.EPERM, errno.EPERM)

    with pytest.raises(PermissionError):
        bpf.load(YES)
    assert calls.limits[-1] == (65536, 1 << 20)


def test_the_limit_that_is_read_is_this_processs() -> None:
    """What the system call says is what Python's own module says."""
    soft, hard = (
        UNLIMITED if limit == -1 else limit for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )

    assert bpf._memory_limit(None) == (soft, hard)


@pytest.mark.parametrize("many", [3, 64, 200])
def test_a_query_makes_room_for_what_there_is(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    """64 a cgroup, but with all those above it there may be more; the kernel says how many."""
    rooms = []

    def query(command: int, attributes: Any, size: int) -> int:
        assert (command, size, len(attributes) >= 64) == (QUERY, 64, True)
        room = struct.unpack_from("=I", attributes, 24)[0]
        rooms.append(room)
        struct.pack_into("=I", attributes, 12, 2)
        struct.pack_into("=I", attributes, 24, many)
        if room < many:
            raise OSError(errno.ENOSPC, "no room")
        return 0

    monkeypatch.setattr(bpf, "_bpf", query)

    identifiers, flags = bpf.query(3)
    assert (len(identifiers), flags, rooms) == (many, 2, [64] if many <= 64 else [64, many])


@pytest.mark.parametrize("machine", ["riscv64", "i686", "armv7l"])
def test_an_unknown_machine_is_asked_nothing(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """A wrong number would be another system call."""
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "n", "6.1", "v", machine)))

    assert not bpf.supported()
    with pytest.raises(OSError, match="not implemented"):
        bpf.query(3)
