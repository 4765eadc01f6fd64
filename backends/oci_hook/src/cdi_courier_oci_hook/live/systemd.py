"""Tells systemd which devices a scope of its may use, so that it does not take them away again. Light module.

systemd writes a scope's device filter anew whenever it is told to reload, from the list that it has. So what
is to stay must be in that list; what is changed only in the filter is lost with the next ``daemon-reload``.
It must not know of cgroup directories and programs (`cgroup`). Source: docs/facts.md#systemd-device-lists.
"""

from __future__ import annotations

import os
import time

from cdi_courier.errors import DeliveryError, quoted

from . import dbus, device_filter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .device_filter import Grant

SECONDS = 5.0
"""How long systemd may take for all answers, whoever is asked; it answers nobody while it reloads."""

_MANAGER, _OBJECT, _INTERFACE = "org.freedesktop.systemd1", "/org/freedesktop/systemd1", ".Manager"
_RUNNING = "/run/systemd/system"
_SOCKETS = (("/run/systemd/private", False), ("/run/dbus/system_bus_socket", True))
_FOLDERS = {device_filter.CHAR: "char", device_filter.BLOCK: "block"}
_ANY_NUMBER = 240  # since this version a device need not have a name in /dev/char


def declare(
    control_group: str, grants: tuple[Grant, ...], root: str = "/", deadline: float = float("inf")
) -> tuple[str, ...]:
    """Add to the DeviceAllow= of the scope whose cgroup this is, and return when systemd has acted on it.

    control_group: its path below the root of the hierarchy, ending in ``….scope``. Nothing is done where
    systemd does not run, has no such unit, or filters no devices for it. What is granted already is not
    added again. root: where the host's files are. deadline: a `time.monotonic` by which this returns, if that
    is sooner than in `SECONDS`. Returns the paths in a bpffs of programs that the unit's BPFProgram= names as
    its device filters: systemd attaches those anew.

    Raises `DeliveryError` ``HOK260`` if systemd runs and does not answer, ``HOK261`` if it refuses, and
    ``HOK262`` if it is too old for a device without a name.
    """
    if not os.path.isdir(os.path.join(root, _RUNNING[1:])):
        return ()
    name = control_group.rpartition("/")[2]
    try:
        connection = _connect(root, min(deadline, time.monotonic() + SECONDS))
        try:
            return _declare(connection, name, control_group, grants, root)
        finally:
            connection.close()
    except TimeoutError:
        raise _unreachable(name, "no answer in time") from None
    except OSError as error:
        raise _unreachable(name, error.strerror or str(error)) from None
    except dbus.MalformedError as error:
        raise _unreachable(name, f"its answer is {error}") from None
    except dbus.CallError as error:
        raise DeliveryError(
            "HOK261",
            f"systemd does not allow the devices to {quoted(name)}: {quoted(error.text or error.name)}",
            "the container would lose them with the next `systemctl daemon-reload`; see `systemctl show` of "
            'that unit, or set [oci_hook] device_cgroup = "best-effort"',
        ) from None


def _declare(
    connection: dbus.Connection, name: str, control_group: str, grants: tuple[Grant, ...], root: str
) -> tuple[str, ...]:
    try:
        (unit,) = connection.call(_MANAGER, _OBJECT, _MANAGER + _INTERFACE, "GetUnit", "s", name)
    except dbus.CallError as error:
        if error.name == "org.freedesktop.systemd1.NoSuchUnit":
            return ()  # a folder that only has such a name
        raise
    if _property(connection, unit, "ControlGroup", "") != control_group:
        return ()  # a unit of the same name elsewhere
    pins = tuple(
        path for attached_to, path in _property(connection, unit, "BPFProgram", []) if attached_to == "device"
    )
    listed = _property(connection, unit, "DeviceAllow", [])
    # The first entry of a list would turn a filter on that keeps everything else out.
    if not listed and _property(connection, unit, "DevicePolicy", "auto") == "auto":
        return pins
    entries = _lacking(listed, grants)
    if not entries:
        return pins
    _need_names(connection, name, entries, root)
    changes = [("DeviceAllow", ("a(ss)", entries))]
    connection.call(
        _MANAGER, _OBJECT, _MANAGER + _INTERFACE, "SetUnitProperties", "sba(sv)", name, True, changes
    )
    # The reply comes before the filter is written, but that comes before the next call is looked at.
    connection.call(_MANAGER, _OBJECT, "org.freedesktop.DBus.Peer", "Ping")
    return pins


def _lacking(listed: list[tuple[str, str]], grants: tuple[Grant, ...]) -> list[tuple[str, str]]:
    """The entries of DeviceAllow= that are to be added."""
    entries = []
    for kind, major, minor, mask in grants:
        path = f"/dev/{_FOLDERS[kind]}/{major}:{minor}"
        access = "".join(letter for letter, bit in device_filter.ACCESS.items() if mask & bit)
        if not any(path == known and set(access) <= set(had) for known, had in listed):
            entries.append((path, access))
    return entries


def _need_names(connection: dbus.Connection, unit: str, entries: list[tuple[str, str]], root: str) -> None:
    nameless = [path for path, _ in entries if not os.path.lexists(os.path.join(root, path[1:]))]
    if not nameless:
        return
    version = str(_get(connection, _OBJECT, _MANAGER + _INTERFACE, "Version"))
    digits = version.lstrip("v")[:3]
    if digits.isdigit() and int(digits) < _ANY_NUMBER:
        raise DeliveryError(
            "HOK262",
            f"systemd {quoted(version)} cannot allow {nameless[0]} for {quoted(unit)}: there is no such link",
            f"create it: `ln -s` the device node to {nameless[0]}; systemd needs none from {_ANY_NUMBER} on",
        )


def _property(connection: dbus.Connection, unit: str, name: str, default: Any) -> Any:
    """A property of a scope; the default where this systemd has none of that name."""
    try:
        value = _get(connection, unit, f"{_MANAGER}.Scope", name)
    except dbus.CallError as error:
        if error.name == "org.freedesktop.DBus.Error.UnknownProperty":
            return default
        raise
    if type(value) is not type(default) or (isinstance(value, list) and not all(map(_is_pair, value))):
        raise dbus.MalformedError(f"not what {name} is")
    return value


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(item, str) for item in value)


def _get(connection: dbus.Connection, path: str, interface: str, name: str) -> Any:
    properties = "org.freedesktop.DBus.Properties"
    values = connection.call(_MANAGER, path, properties, "Get", "ss", interface, name)
    if len(values) != 1:
        raise dbus.MalformedError("not one value")
    return values[0]


def _connect(root: str, deadline: float) -> dbus.Connection:
    """The manager's own socket, which needs no bus daemon; else the bus.

    A socket that only says nothing is not followed by the other: the same systemd is behind both.
    """
    failure: OSError = FileNotFoundError(2, "there is no socket of it")
    for path, bus in _SOCKETS:
        try:
            return dbus.Connection(os.path.join(root, path[1:]), bus=bus, deadline=deadline)
        except FileNotFoundError:
            continue
        except TimeoutError:
            raise
        except OSError as error:
            failure = error
    raise failure


def _unreachable(name: str, why: str) -> DeliveryError:
    return DeliveryError(
        "HOK260",
        f"systemd, which manages {quoted(name)}, cannot be told of the container's devices: {why}",
        "the container would lose them with the next `systemctl daemon-reload`; does `systemctl status` "
        'answer? Else set [oci_hook] device_cgroup = "best-effort"',
    )
