"""Device programs, written instruction by instruction. It must not know what is done to them."""

from __future__ import annotations

import struct


def code(*instructions: tuple[int, int, int, int, int]) -> bytes:
    """Instructions given as opcode, destination, source, offset, immediate."""
    return b"".join(
        struct.pack("<BBhi", opcode, source << 4 | target, offset, immediate)
        for opcode, target, source, offset, immediate in instructions
    )


EXIT = (0x95, 0, 0, 0, 0)
YES, NO = (code((0xB7, 0, 0, 0, answer), EXIT) for answer in (1, 0))
"""Programs that say the same to everything."""
