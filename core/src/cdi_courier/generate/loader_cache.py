"""Reads glibc's loader cache, ``/etc/ld.so.cache``: in which folders the loader finds libraries.

Source: glibc's sysdeps/generic/dl-cache.h. The present format stands alone or behind the one of libc5, whose
entries are the same ones over again. Bytes in, values out; garbage holds no folders.
"""

from __future__ import annotations

import posixpath
import struct
import sys
from typing import Final

LIMIT: Final = 16 * 1024 * 1024
"""Bytes of a cache that are worth reading; real ones have a few hundred thousand at most."""

_MAGIC: Final = b"glibc-ld.so.cache1.1"
_OLD_MAGIC: Final = b"ld.so-1.7.0\0"
_OLD_ENTRY: Final = 12
_HEADER: Final = 48
_ALIGNMENT: Final = 8
_LONGEST_PATH: Final = 4096
# The low bits of the flags: which byte order the entries have; 0 before glibc 2.33.
_ORDERS: Final = {2: "<", 3: ">"}
_NATIVE: Final = "<" if sys.byteorder == "little" else ">"


def folders(data: bytes) -> tuple[str, ...]:
    """The folders of all libraries in a cache, each once, in the order of the cache."""
    start = _start(data)
    if start is None or len(data) < start + _HEADER:
        return ()
    order = _ORDERS.get(data[start + 28] & 3, _NATIVE)
    (count,) = struct.unpack_from(order + "I", data, start + 20)
    # flags, key, value, osversion, hwcap; key and value are offsets from the header.
    entry = struct.Struct(order + "iIIIQ")
    found: dict[str, None] = {}
    for index in range(min(count, (len(data) - start - _HEADER) // entry.size)):
        _, _, value, _, _ = entry.unpack_from(data, start + _HEADER + index * entry.size)
        path = _string(data, start + value)
        if path.startswith("/") and path.isprintable():
            found.setdefault(posixpath.dirname(path))
    return tuple(found)


def _start(data: bytes) -> int | None:
    if data.startswith(_MAGIC):
        return 0
    if data.startswith(_OLD_MAGIC) and len(data) >= len(_OLD_MAGIC) + 4:
        count: int = struct.unpack_from(_NATIVE + "I", data, len(_OLD_MAGIC))[0]
        end = len(_OLD_MAGIC) + 4 + count * _OLD_ENTRY
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if data.startswith(_MAGIC, start):
            return start
    return None


def _string(data: bytes, offset: int) -> str:
    end = data.find(b"\0", offset, offset + _LONGEST_PATH)
    try:
        return data[offset:end].decode() if end > 0 else ""
    except UnicodeDecodeError:
        return ""
