"""Device filters as data: programs of type BPF_PROG_TYPE_CGROUP_DEVICE, read, judged and extended.

Light module, pure: bytes in, bytes out. It must not know where a program came from, what a cgroup is, or that
there are system calls (`bpf`). Source: docs/facts.md#device-filters; the kernel's
Documentation/bpf/standardization/instruction-set.rst.

A program is asked with three words, to which R1 points: the device's type (low half) with the access asked
for (high half), its major and its minor number. It answers in R0: 0 is no. All programs of a cgroup and of
those above it are asked, and one no is enough.

What is granted is put in front of a program, as a prologue that either says yes or falls through to the
first original instruction. Jumps are relative, so the original works unchanged wherever it lies. It reads no
register but R1 and R10 before it has written it, so the prologue may use R0 and R2 to R5, and keeps R1.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Grant = tuple[int, int, int, int]
    """Type, major, minor and access of a device that may be used."""

BLOCK, CHAR = 1, 2
"""Types of devices."""

MKNOD, READ, WRITE = 1, 2, 4
"""Access, to be added up."""

TYPES = {"c": CHAR, "b": BLOCK}
ACCESS = {"r": READ, "w": WRITE, "m": MKNOD}
"""As they are written in devices.allow and in OCI configs."""

MAX_INSTRUCTIONS = 1_000_000
"""The longest program that a kernel takes from root (BPF_COMPLEXITY_LIMIT_INSNS); 4096 before Linux 5.2."""

_ONE = struct.Struct("<BBhi")  # opcode, source and destination register, jump offset, immediate
_SIZE = _ONE.size
_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_CONTEXT_SIZE = 12
_MAX_STEPS = 100_000  # of a judged program; those of container runtimes and systemd take some hundred

_LDX_W, _MOV32_X, _MOV64_K, _AND32_K, _RSH32_K, _JNE_K, _CALL, _EXIT, _LD_IMM64 = (
    0x61,
    0xBC,
    0xB7,
    0x54,
    0x74,
    0x55,
    0x85,
    0x95,
    0x18,
)
# The parts of an opcode, where it is one of a family.
_CLASS_ALU32, _CLASS_JMP, _CLASS_JMP32, _CLASS_ALU64 = 4, 5, 6, 7
_BY_REGISTER = 0x08
_JA, _MOV = 0x00, 0xB0
_SIZES = {0x61: 4, 0x69: 2, 0x71: 1}  # LDX MEM of a word, half a word, a byte


def access(letters: str) -> int:
    """The access that letters name; others are left out."""
    return sum(bit for letter, bit in ACCESS.items() if letter in letters)


def written(grant: Grant) -> str:
    """A grant as devices.allow takes it, such as ``c 1:3 rw``."""
    kind, major, minor, mask = grant
    letters = "".join(letter for letter, bit in ACCESS.items() if mask & bit)
    return f"{'b' if kind == BLOCK else 'c'} {major}:{minor} {letters}"


def merged(grants: Iterable[Grant]) -> tuple[Grant, ...]:
    """The same grants, one a device, in order: who may read and may write may do both at once."""
    access: dict[tuple[int, int, int], int] = {}
    for kind, major, minor, mask in grants:
        access[kind, major, minor] = access.get((kind, major, minor), 0) | mask
    return tuple((*device, access[device]) for device in sorted(access))


def allowing(program: bytes, grants: Iterable[Grant]) -> bytes:
    """A program that says yes to what is granted and otherwise what `program` says.

    A prologue that is there already is extended: what is granted again and again does not make the program
    grow without end.
    """
    known, rest = split(program)
    return prologue(merged((*known, *grants))) + rest


def prologue(grants: Iterable[Grant]) -> bytes:
    """Instructions that end the program with yes for what is granted, and else go on behind themselves."""
    return _HEADER + b"".join(_block(*grant) for grant in grants)


def split(program: bytes) -> tuple[tuple[Grant, ...], bytes]:
    """What a prologue of ours grants, and the program behind it; nothing and all of it if it has none."""
    if not program.startswith(_HEADER):
        return (), program
    grants = []
    at = len(_HEADER)
    while (grant := _grant_at(program, at)) is not None:
        grants.append(grant)
        at += _BLOCK_SIZE
    rest = program[at:]
    # A program that only looks like that may jump back into what would be replaced.
    if not grants or not rest or any(target < 0 for target in _jump_targets(rest)):
        return (), program
    return tuple(grants), rest


def immovable(program: bytes) -> str:
    """Why what the kernel shows of a program cannot be loaded as a program; empty if it can.

    Maps and functions are shown as numbers that mean something else on the way in.
    """
    if not program or len(program) % _SIZE:
        return "the kernel does not show its instructions"
    for opcode, registers, _, _ in _instructions(program):
        if opcode == _CALL:
            return "it calls functions"
        if opcode == _LD_IMM64 and registers >> 4:
            return "it uses maps"
        if registers & 15 > 10 or registers >> 4 > 10:
            return "its constants are blinded"
    return ""


def permits(program: bytes, grant: Grant) -> bool | None:
    """Whether a program says yes to every use that is granted; None if it cannot be told.

    The kernel asks for making a node alone, and for reading and writing alone or together; so another program
    that has its yes in two rules is no denial.
    """
    kind, major, minor, mask = grant
    uses = [use for use in (READ, WRITE, READ | WRITE, MKNOD) if use & ~mask == 0]
    answers = [verdict(program, kind, major, minor, use) for use in uses]
    if False in answers:
        return False
    return None if None in answers else True


def verdict(program: bytes, kind: int, major: int, minor: int, access: int) -> bool | None:
    """What a program says to one use of a device; None if that takes more than arithmetic on its context."""
    code = list(_instructions(program))
    context = struct.pack("<III", access << 16 | kind, major, minor)
    registers: list[int | None] = [None] * 16
    registers[1] = _CONTEXT
    at = 0
    try:
        for _ in range(_MAX_STEPS):
            opcode, pair, offset, immediate = code[at]
            at += 1
            if opcode == _EXIT:
                return _number(registers[0]) != 0
            source, target = pair >> 4, pair & 15
            operation, class_ = opcode & 0xF0, opcode & 7
            if opcode in _SIZES:
                size = _SIZES[opcode]
                if registers[source] != _CONTEXT or not 0 <= offset <= _CONTEXT_SIZE - size:
                    return None
                registers[target] = int.from_bytes(context[offset : offset + size], "little")
            elif opcode == _LD_IMM64 and not source:
                registers[target] = immediate & _MASK32 | (code[at][3] & _MASK32) << 32
                at += 1
            elif class_ in (_CLASS_ALU32, _CLASS_ALU64):
                if offset:
                    return None  # signed division and moves that extend the sign
                bits = 64 if class_ == _CLASS_ALU64 else 32
                operand = registers[source] if opcode & _BY_REGISTER else immediate & _MASK64
                if operation == _MOV and bits == 64:
                    registers[target] = operand  # also a copy of where the context is
                else:
                    registers[target] = _computed(operation, registers[target], _number(operand), bits)
            elif class_ in (_CLASS_JMP, _CLASS_JMP32):
                if operation == _JA:
                    at += offset if class_ == _CLASS_JMP else immediate
                elif _jumps(
                    operation,
                    _number(registers[target]),
                    _number(registers[source]) if opcode & _BY_REGISTER else immediate & _MASK64,
                    64 if class_ == _CLASS_JMP else 32,
                ):
                    at += offset
            else:
                return None
            if at < 0:
                return None
    except (IndexError, _UnknownError):
        pass
    return None


class _UnknownError(Exception):
    """An instruction or a value that is not followed here."""


# A value that no register can have: numbers are kept from 0 to 2**64-1.
_CONTEXT = -1


def _number(value: int | None) -> int:
    if value is None or value < 0:
        raise _UnknownError
    return value


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


# Of the old value, the operand and the number of bits, by the upper half of an opcode: BPF_ADD and so on.
_ARITHMETIC: dict[int, Callable[[int, int, int], int]] = {
    0x00: lambda old, by, _: old + by,
    0x10: lambda old, by, _: old - by,
    0x20: lambda old, by, _: old * by,
    0x30: lambda old, by, _: old // by if by else 0,
    0x40: lambda old, by, _: old | by,
    0x50: lambda old, by, _: old & by,
    0x60: lambda old, by, bits: old << (by & (bits - 1)),
    0x70: lambda old, by, bits: old >> (by & (bits - 1)),
    0x80: lambda old, _by, _: -old,
    0x90: lambda old, by, _: old % by if by else old,
    0xA0: lambda old, by, _: old ^ by,
    0xC0: lambda old, by, bits: _signed(old, bits) >> (by & (bits - 1)),
}
# Of two values and the number of bits: BPF_JEQ and so on.
_COMPARISONS: dict[int, Callable[[int, int, int], bool]] = {
    0x10: lambda left, right, _: left == right,
    0x20: lambda left, right, _: left > right,
    0x30: lambda left, right, _: left >= right,
    0x40: lambda left, right, _: left & right != 0,
    0x50: lambda left, right, _: left != right,
    0x60: lambda left, right, bits: _signed(left, bits) > _signed(right, bits),
    0x70: lambda left, right, bits: _signed(left, bits) >= _signed(right, bits),
    0xA0: lambda left, right, _: left < right,
    0xB0: lambda left, right, _: left <= right,
    0xC0: lambda left, right, bits: _signed(left, bits) < _signed(right, bits),
    0xD0: lambda left, right, bits: _signed(left, bits) <= _signed(right, bits),
}


def _computed(operation: int, old: int | None, operand: int, bits: int) -> int:
    mask = (1 << bits) - 1
    if operation == _MOV:
        return operand & mask
    if operation not in _ARITHMETIC:
        raise _UnknownError
    return _ARITHMETIC[operation](_number(old) & mask, operand & mask, bits) & mask


def _jumps(operation: int, left: int, right: int, bits: int) -> bool:
    mask = (1 << bits) - 1
    if operation not in _COMPARISONS:
        raise _UnknownError
    return _COMPARISONS[operation](left & mask, right & mask, bits)


def _instructions(program: bytes) -> Iterator[tuple[int, int, int, int]]:
    return _ONE.iter_unpack(program)


def _jump_targets(program: bytes) -> Iterator[int]:
    """Where a program's jumps lead, as numbers of instructions from its beginning."""
    for at, (opcode, _, offset, immediate) in enumerate(_instructions(program)):
        operation, class_ = opcode & 0xF0, opcode & 7
        if class_ in (_CLASS_JMP, _CLASS_JMP32) and opcode not in (_CALL, _EXIT):
            yield at + 1 + (immediate if operation == _JA and class_ == _CLASS_JMP32 else offset)


def _code(*instructions: tuple[int, int, int, int, int]) -> bytes:
    """Instructions given as opcode, destination, source, offset, immediate."""
    return b"".join(
        _ONE.pack(opcode, source << 4 | target, offset, immediate)
        for opcode, target, source, offset, immediate in instructions
    )


_HEADER = _code(
    (_LDX_W, 2, 1, 0, 0),  # R2 = type and access
    (_MOV32_X, 3, 2, 0, 0),
    (_RSH32_K, 3, 0, 0, 16),  # R3 = access
    (_AND32_K, 2, 0, 0, 0xFFFF),  # R2 = type
    (_LDX_W, 4, 1, 4, 0),  # R4 = major
    (_LDX_W, 5, 1, 8, 0),  # R5 = minor
)


def _block(kind: int, major: int, minor: int, mask: int) -> bytes:
    return _code(
        (_JNE_K, 2, 0, 7, kind),
        (_JNE_K, 4, 0, 6, major),
        (_JNE_K, 5, 0, 5, minor),
        (_MOV32_X, 0, 3, 0, 0),
        (_AND32_K, 0, 0, 0, ~mask & 0xFFFF),  # also any access that the kernel may come to know
        (_JNE_K, 0, 0, 2, 0),
        (_MOV64_K, 0, 0, 0, 1),
        (_EXIT, 0, 0, 0, 0),
    )


_BLOCK_SIZE = len(_block(CHAR, 0, 0, 0))


def _grant_at(program: bytes, at: int) -> Grant | None:
    """What the block of a prologue at this byte grants; None if there is no block."""
    block = program[at : at + _BLOCK_SIZE]
    if len(block) < _BLOCK_SIZE:
        return None
    immediates = [immediate for _, _, _, immediate in _instructions(block)]
    kind, major, minor = immediates[:3]
    grant = kind, major, minor, ~immediates[4] & 0xFFFF
    return grant if block == _block(*grant) else None
