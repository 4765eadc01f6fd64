"""The device cgroup of version 2: programs, replaced by such as say yes to more. Light module.

It must not know whose cgroup it is (`cgroup`), nor what a program looks like (`device_filter`).
Source: docs/facts.md#device-filters.

A program is never changed: a new one is loaded and attached in the place of the old one, in one step from
Linux 5.6 on. That does not grow without end, since a program that says yes already is left alone. So what was
found out about a program holds as long as it is kept open, and is found out once.
"""

from __future__ import annotations

import errno
import os

from cdi_courier.errors import DeliveryError, quoted

from . import bpf, device_filter
from .refusals import BEST_EFFORT, NOT_PERMITTED, not_permitted, unreadable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .device_filter import Grant

_ROUNDS = 4  # systemd may write its program anew while this works


class _Work:
    """One call of `allow`, and what it has found out.

    opened, undo: as there. judged: ids of programs that are done with, for they say yes, or their no is
    tolerated. made: id of a program → descriptor of what takes its place.
    """

    __slots__ = ("grants", "judged", "made", "opened", "path", "tolerate", "undo")

    def __init__(
        self,
        path: str,
        grants: tuple[Grant, ...],
        opened: list[int],
        undo: list[Callable[[], None]],
        tolerate: Callable[[DeliveryError], None],
    ) -> None:
        self.path = path
        self.grants = grants
        self.opened = opened
        self.undo = undo
        self.tolerate = tolerate
        self.judged: set[int] = set()
        self.made: dict[int, int] = {}

    def keep(self, descriptor: int) -> int:
        self.opened.append(descriptor)
        return descriptor


class _Exchange:
    """A program of a cgroup and what takes its place; descriptors."""

    __slots__ = ("flags", "folder", "new", "old")

    def __init__(self, folder: int, flags: int, old: int, new: int) -> None:
        self.folder = folder
        self.flags = flags
        self.old = old
        self.new = new


def allow(
    path: str,
    folders: list[str],
    grants: tuple[Grant, ...],
    *,
    own: bool,
    pins: tuple[str, ...],
    tolerate: Callable[[DeliveryError], None],
    opened: list[int],
    undo: list[Callable[[], None]],
) -> None:
    """Have every program that is asked about a cgroup say yes to the devices.

    path: the cgroup, for messages. folders: its directory, and those of the cgroups above it whose programs
    may be replaced. own: whether any may be; the others are only asked. pins: where in a bpffs systemd takes
    programs from. tolerate: raises a refusal by those others, or not. opened: gets descriptors, to be closed
    when nothing is to be undone any more. undo: gets what puts the old programs back, also where they are
    pinned.

    Raises `DeliveryError` ``HOK251`` to ``HOK264``.
    """
    if not bpf.supported():
        raise DeliveryError(
            "HOK259",
            f"device filters of cgroup version 2 cannot be changed on {quoted(os.uname().machine)}",
            "this works on x86_64 and aarch64; deliver by NRI or the runtime wrapper instead",
        )
    work = _Work(path, grants, opened, undo, tolerate)
    levels = [work.keep(_open_folder(folder)) for folder in folders]
    # Everything is loaded, and has a name in the bpffs, before anything is attached.
    plan = _plan(work, levels[0], levels if own else [])
    staged = [(pin, old) for pin in pins if (old := _stage(work, pin)) is not None]
    for _ in range(_ROUNDS):
        if not plan:
            break
        for exchange in plan:
            _exchange(work, exchange)
        plan = _plan(work, levels[0], levels if own else [])
    else:
        raise DeliveryError(
            "HOK264",
            f"the device filters of cgroup {quoted(path)} cannot be replaced: they keep changing or are "
            "attached by links",
            "what manages this cgroup besides the container runtime? `bpftool cgroup show` shows its filters",
        )
    for pin, old in staged:
        _put_in_place(work, pin, old)


def _plan(work: _Work, leaf: int, changeable: list[int]) -> list[_Exchange]:
    """What is to be exchanged, loaded and not yet attached. leaf, changeable: directories of cgroups."""
    try:
        # In this order: what is attached to the container's cgroups in between is none of those above.
        effective, _ = bpf.query(leaf, effective=True)
        attached = [(folder, *bpf.query(folder)) for folder in changeable]
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS):
            return []  # a kernel without device programs has no filter either
        if error.errno in NOT_PERMITTED:
            raise not_permitted(f"ask for the device filters of cgroup {quoted(work.path)}", error) from None
        raise _failed("ask for the device filters", work.path, error) from None
    ours = {identifier for _, identifiers, _ in attached for identifier in identifiers}
    for identifier in effective:
        if identifier not in ours and identifier not in work.judged:
            _need_yes(work, identifier)
            work.judged.add(identifier)
    plan = []
    for folder, identifiers, flags in attached:
        for identifier in identifiers:
            found = None if identifier in work.judged else _program(work, identifier)
            if found is None:
                continue
            old, code = found
            new = _replacement(work, identifier, code)
            if new is not None:
                plan.append(_Exchange(folder, flags & (bpf.ALLOW_MULTI | bpf.ALLOW_OVERRIDE), old, new))
    return plan


def _program(work: _Work, identifier: int) -> tuple[int, bytes] | None:
    """A program's descriptor and instructions; None if it is gone by now."""
    try:
        descriptor = work.keep(bpf.program(identifier))
        return descriptor, bpf.instructions(descriptor)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        if error.errno in NOT_PERMITTED:
            raise not_permitted(f"read a device filter of cgroup {quoted(work.path)}", error) from None
        raise _failed("read a device filter", work.path, error) from None


def _need_yes(work: _Work, identifier: int) -> None:
    """Refuse, if that is not tolerated, where a program that may not be replaced says no."""
    found = _program(work, identifier)
    if found is None:
        return
    where = "`bpftool cgroup tree` shows where it is attached"
    for grant in work.grants:
        text = f"{device_filter.written(grant)} to cgroup {quoted(work.path)}"
        answer = device_filter.permits(found[1], grant)
        if answer is False:
            refusal = DeliveryError(
                "HOK254",
                f"program {identifier}, a device filter that is not the container's own, denies {text}",
                f"{where}: allow the device there (DeviceAllow= of a systemd unit), {BEST_EFFORT}",
            )
            work.tolerate(refusal)
        elif answer is None:
            refusal = DeliveryError(
                "HOK255",
                f"whether program {identifier}, a device filter that is not the container's own, allows "
                f"{text} cannot be told: it uses maps or functions",
                f"{where}; {BEST_EFFORT}",
            )
            work.tolerate(refusal)


def _replacement(work: _Work, identifier: int, code: bytes) -> int | None:
    """A program that says yes to the grants and else what this one says; None if this one does already."""
    if identifier in work.judged:
        return None
    if identifier not in work.made:
        if all(device_filter.permits(code, grant) for grant in work.grants):
            work.judged.add(identifier)
            return None
        work.made[identifier] = _loaded(work, code)
    return work.made[identifier]


def _loaded(work: _Work, code: bytes) -> int:
    """A new program that says yes to the grants and else what the old one says."""
    reason = device_filter.immovable(code)
    new = b"" if reason else device_filter.allowing(code, work.grants)
    if len(new) // 8 > device_filter.MAX_INSTRUCTIONS:
        reason = f"with the devices it would have more than {device_filter.MAX_INSTRUCTIONS} instructions"
    if reason:
        raise DeliveryError(
            "HOK256",
            f"a device filter of cgroup {quoted(work.path)} cannot be extended: {reason}",
            "deliver by NRI or the runtime wrapper instead, before the container has a filter",
        )
    try:
        loaded = work.keep(bpf.load(new))
        work.judged.add(bpf.identifier(loaded))
    except bpf.Refused as error:
        raise DeliveryError(
            "HOK257",
            f"the kernel refuses the extended device filter of cgroup {quoted(work.path)}: {error.strerror}",
            f"report this with the kernel's version and what it says: {quoted(error.log, 500)}",
        ) from None
    except OSError as error:
        if error.errno in NOT_PERMITTED:
            raise not_permitted(f"load a device filter for cgroup {quoted(work.path)}", error) from None
        raise _failed("load a device filter", work.path, error) from None
    return loaded


def _exchange(work: _Work, exchange: _Exchange) -> None:
    folder, flags, old, new = exchange.folder, exchange.flags, exchange.old, exchange.new
    try:
        _swap(folder, flags, old, new)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return  # the old one is gone: look again
        if error.errno in NOT_PERMITTED:
            raise not_permitted(f"replace a device filter of cgroup {quoted(work.path)}", error) from None
        raise _failed("replace a device filter", work.path, error) from None
    work.undo.append(lambda: _swap(folder, flags, new, old))


def _swap(folder: int, flags: int, old: int, new: int) -> None:
    """Attach a program in the place of another, at no time neither of them."""
    if not flags & bpf.ALLOW_MULTI:
        bpf.attach(folder, new, flags)
        return
    try:
        bpf.attach(folder, new, flags, replaced=old)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Before Linux 5.6. Both must say yes for a moment, which is never more than was allowed.
        bpf.attach(folder, new, flags)
        try:
            bpf.detach(folder, old)
        except OSError:
            bpf.detach(folder, new)
            raise


def _stage(work: _Work, path: str) -> int | None:
    """Pin the extended program beside that which systemd takes the unit's device filter from.

    Returns a descriptor of that one, or None if it says yes already.
    """
    temporary = _beside(path)
    try:
        old = work.keep(bpf.pinned(path))
        new = _replacement(work, bpf.identifier(old), bpf.instructions(old))
        if new is None:
            return None
        _unlink(temporary)  # of a process that was killed
        bpf.pin(new, temporary)
    except OSError as error:
        raise _not_pinned(path, error) from None
    work.undo.append(lambda: _unlink(temporary))
    return old


def _put_in_place(work: _Work, path: str, old: int) -> None:
    """Have systemd find the extended program, with which all is done that may well fail."""
    temporary = _beside(path)
    try:
        os.rename(temporary, path)
    except OSError as error:
        raise _not_pinned(path, error) from None

    def put_back() -> None:
        bpf.pin(old, temporary)
        os.rename(temporary, path)

    work.undo.append(put_back)


def _beside(path: str) -> str:
    return f"{path}_cdi_courier"  # a bpffs takes no dots


def _unlink(path: str) -> None:
    try:  # noqa: SIM105 - contextlib is not light
        os.unlink(path)
    except FileNotFoundError:
        pass


def _not_pinned(path: str, error: OSError) -> DeliveryError:
    return DeliveryError(
        "HOK263",
        f"the device filter that systemd reads from {quoted(path)} cannot be extended: {error.strerror}",
        "the container would lose its devices with the next `systemctl daemon-reload`; is that a bpffs?",
    )


def _open_folder(folder: str) -> int:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise unreadable(folder, error) from None


def _failed(what: str, path: str, error: OSError) -> DeliveryError:
    return DeliveryError(
        "HOK258",
        f"cannot {what} of cgroup {quoted(path)}: {error.strerror}",
        "report this with the kernel's version",
    )
