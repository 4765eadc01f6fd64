"""Reads the SONAME of a shared library: the name under which programs ask the loader for it.

Source: the ELF gABI, chapters 4 and 5. Only what is needed is read, however large the library; a file that
is not what it should be has no SONAME. Sections are not looked at: a stripped library need not have any.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    Read = Callable[[int, int], bytes]

_SEGMENTS: Final = 512
_DYNAMIC_BYTES: Final = 64 * 1024
_LONGEST_NAME: Final = 255  # of a file, in bytes
_PT_LOAD: Final = 1
_PT_DYNAMIC: Final = 2
_DT_NULL: Final = 0
_DT_STRTAB: Final = 5
_DT_SONAME: Final = 14
_ORDERS: Final = {1: "<", 2: ">"}
# By class: the header's e_phoff … e_phnum with their offset, a program header, a dynamic entry.
_LAYOUTS: Final = {
    1: (28, "I10xHH", "IIIIIIII", "iI"),
    2: (32, "Q14xHH", "IIQQQQQQ", "qQ"),
}
_WIDE: Final = 2


def soname(read: Read) -> str | None:
    """The SONAME, always a plain file name; None if there is none.

    read: offset and size in bytes → what the file has there, which may be less.
    """
    ident = read(0, 64)
    if ident[:4] != b"\x7fELF" or len(ident) < 52 or ident[4] not in _LAYOUTS or ident[5] not in _ORDERS:
        return None
    offset, header, segment, entry = _LAYOUTS[ident[4]]
    order = _ORDERS[ident[5]]
    try:
        table, size, count = struct.unpack_from(order + header, ident, offset)
    except struct.error:
        return None
    program = struct.Struct(order + segment)
    if size != program.size or count > _SEGMENTS:
        return None
    data = read(table, size * count)
    loads = []
    dynamic = b""
    for index in range(len(data) // size):
        fields = program.unpack_from(data, index * size)
        # The two classes have the flags at different places.
        kind, (start, address, _, length) = fields[0], fields[2:6] if ident[4] == _WIDE else fields[1:5]
        if kind == _PT_LOAD:
            loads.append((address, start, length))
        elif kind == _PT_DYNAMIC and not dynamic:
            dynamic = read(start, min(length, _DYNAMIC_BYTES))
    return _name(read, _values(dynamic, struct.Struct(order + entry)), loads)


def _values(dynamic: bytes, entry: struct.Struct) -> dict[int, int]:
    values: dict[int, int] = {}
    for tag, value in entry.iter_unpack(dynamic[: len(dynamic) // entry.size * entry.size]):
        if tag == _DT_NULL:
            break
        values.setdefault(tag, value)
    return values


def _name(read: Read, values: dict[int, int], loads: list[tuple[int, int, int]]) -> str | None:
    if _DT_STRTAB not in values or _DT_SONAME not in values:
        return None
    wanted = values[_DT_STRTAB] + values[_DT_SONAME]
    for address, start, length in loads:
        if address <= wanted < address + length:
            raw, end, _ = read(start + wanted - address, _LONGEST_NAME + 1).partition(b"\0")
            name = raw.decode("ascii", "replace")
            plain = name.isascii() and name.isprintable() and "/" not in name and name not in ("", ".", "..")
            return name if end and plain else None
    return None
