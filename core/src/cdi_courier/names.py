"""Qualified CDI device names, ``vendor/class=name``. Light module. Source: docs/facts.md#cdi-names.

Splitting never trims and validation is ASCII only: names come from pods, and ``str.isalnum`` would let
Arabic digits through.
"""

from __future__ import annotations

from cdi_courier.errors import CdiError, quoted

_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_ALNUM = _LETTERS | frozenset("0123456789")
_KIND_MIDDLE = _ALNUM | frozenset("_-.")
_NAME_MIDDLE = _ALNUM | frozenset("_-.:")


def split_kind(kind: str) -> tuple[str, str]:
    """Cut ``vendor/class`` at the first slash; ``("", kind)`` if either part would be empty."""
    vendor, slash, class_ = kind.partition("/")
    if not slash or not vendor or not class_:
        return "", kind
    return vendor, class_


def split_device(device: str) -> tuple[str, str, str]:
    """Cut ``vendor/class=name``; ``("", "", device)`` if it does not have that shape. Validates nothing."""
    kind, equals, name = device.partition("=")
    if equals and name:
        vendor, class_ = split_kind(kind)
        if vendor:
            return vendor, class_, name
    return "", "", device


def invalid_vendor(vendor: str) -> str | None:
    """Why this is not a vendor name, or None."""
    return _invalid(vendor, "vendor", _LETTERS, _KIND_MIDDLE, "letters, digits, _ - .")


def invalid_class(class_: str) -> str | None:
    """Why this is not a class name, or None."""
    return _invalid(class_, "class", _LETTERS, _KIND_MIDDLE, "letters, digits, _ - .")


def invalid_device_name(name: str) -> str | None:
    """Why this is not a device name (the part after ``=``), or None."""
    return _invalid(name, "device name", _ALNUM, _NAME_MIDDLE, "letters, digits, _ - . :")


def invalid_qualified(device: str) -> str | None:
    """Why this is not a qualified device name, or None if it is one."""
    vendor, class_, name = split_device(device)
    if not vendor:
        return "it does not have the form VENDOR/CLASS=NAME"
    return invalid_vendor(vendor) or invalid_class(class_) or invalid_device_name(name)


def parse_qualified(device: str) -> tuple[str, str, str]:
    """``(vendor, class, name)`` of a qualified device name; raises `CdiError` ``CDI001``."""
    reason = invalid_qualified(device)
    if reason is not None:
        raise CdiError(
            "CDI001",
            f"{quoted(device)} is not a qualified CDI device name: {reason}",
            "write VENDOR/CLASS=NAME, for example management.nvidia.com/gpu=all",
        )
    return split_device(device)


def _invalid(text: str, what: str, ends: frozenset[str], middle: frozenset[str], allowed: str) -> str | None:
    if not text:
        return f"its {what} is empty"
    if text[0] not in ends:
        first = "letter" if ends is _LETTERS else "letter or digit"
        return f"its {what} {quoted(text)} does not begin with an ASCII {first}"
    if not middle.issuperset(text):
        return f"its {what} {quoted(text)} holds something else than {allowed}"
    if text[-1] not in _ALNUM:
        return f"its {what} {quoted(text)} does not end with a letter or digit"
    return None
