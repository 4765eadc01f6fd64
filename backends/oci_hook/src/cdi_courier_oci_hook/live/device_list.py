"""The device cgroup of version 1: a list of devices a cgroup, in files. Light module.

It must not know whose cgroup it is (`cgroup`). Source: the kernel's admin-guide/cgroup-v1/devices.rst.
"""

from __future__ import annotations

import os

from cdi_courier.errors import DeliveryError, quoted

from . import device_filter
from .refusals import NOT_PERMITTED, not_permitted, unreadable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .device_filter import Grant

    Entry = tuple[int, str, str, int]
    """Type, numbers as text, ``*`` for all, and access. Type 0 is both."""


def allow(folder: str, grants: tuple[Grant, ...], undo: list[Callable[[], None]]) -> None:
    """Allow the devices in one cgroup. The one above it must allow them already.

    folder: the cgroup's directory. undo: gets what takes back that which was not allowed before.
    Raises `DeliveryError` ``HOK251``, ``HOK253`` or ``HOK257``.
    """
    listed = entries(folder)
    for grant in grants:
        missing = grant[3] & ~access(listed, grant)
        # Also where everything seems to be allowed: the list does not show the exceptions to that.
        try:
            _write(folder, "devices.allow", grant)
        except OSError as error:
            if not missing:
                continue
            text = device_filter.written(grant)
            if error.errno in NOT_PERMITTED:
                raise not_permitted(f"allow {text} in {quoted(folder)}", error) from None
            raise DeliveryError(
                "HOK257",
                f"{quoted(folder)} does not take {text}: {error.strerror}",
                "report this with the kernel's version",
            ) from None
        if missing:
            undo.append(_taking_back(folder, (*grant[:3], missing)))


def allows(folder: str, grant: Grant) -> bool:
    """Whether a cgroup's list has a device. Raises `DeliveryError` ``HOK251``."""
    return not grant[3] & ~access(entries(folder), grant)


def entries(folder: str) -> list[Entry]:
    """A cgroup's list. Raises `DeliveryError` ``HOK251``."""
    path = os.path.join(folder, "devices.list")
    try:
        with open(path) as file:
            lines = file.read().split("\n")
    except OSError as error:
        raise unreadable(path, error) from None
    found = []
    for line in lines:
        kind, _, rest = line.partition(" ")
        numbers, _, letters = rest.partition(" ")
        major, _, minor = numbers.partition(":")
        if kind == "a" or kind in device_filter.TYPES:
            found.append((device_filter.TYPES.get(kind, 0), major, minor, device_filter.access(letters)))
    return found


def access(listed: list[Entry], grant: Grant) -> int:
    """The access to a grant's device that a list gives."""
    kind, major, minor, _ = grant
    mask = 0
    for of_kind, of_major, of_minor, given in listed:
        if of_kind in (0, kind) and of_major in ("*", str(major)) and of_minor in ("*", str(minor)):
            mask |= given
    return mask


def _taking_back(folder: str, grant: Grant) -> Callable[[], None]:
    return lambda: _write(folder, "devices.deny", grant)


def _write(folder: str, name: str, grant: Grant) -> None:
    descriptor = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, device_filter.written(grant).encode())
    finally:
        os.close(descriptor)
