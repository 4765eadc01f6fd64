"""Device filters are judged and extended as the kernel runs them; `tests/e2e` asks the kernel itself."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import pytest
from cdi_courier_oci_hook.live import device_filter
from cdi_courier_oci_hook.live.device_filter import BLOCK, CHAR, MKNOD, READ, WRITE
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bpf_code import EXIT, NO, YES, code

ACCESSES = (MKNOD, READ, WRITE, READ | WRITE)
"""What the kernel asks for."""

# Few values, so that rules and uses meet.
KINDS = st.sampled_from([BLOCK, CHAR])
MAJORS = st.sampled_from([0, 1, 10, 4095])
MINORS = st.sampled_from([0, 3, 11, 0xFFFFF])
MASKS = st.integers(1, 7)
GRANTS = st.lists(st.tuples(KINDS, MAJORS, MINORS, MASKS), min_size=1, max_size=6)
USES = st.tuples(KINDS, MAJORS, MINORS, st.integers(1, 7))
RULES = st.lists(
    st.tuples(st.booleans(), KINDS, st.none() | MAJORS, st.none() | MINORS, MASKS),
    max_size=6,
)
"""Yes or no, to which devices (None: to all), and to what access."""

Rule = tuple[bool, int, int | None, int | None, int]


def compiled(rules: Sequence[Rule], default: bool) -> bytes:
    """The rules as a program in runc's manner, R2 to R5 type, access and numbers; the first match decides."""
    program = code(
        (0x61, 2, 1, 0, 0),
        (0x54, 2, 0, 0, 0xFFFF),
        (0x61, 3, 1, 0, 0),
        (0x74, 3, 0, 0, 16),
        (0x61, 4, 1, 4, 0),
        (0x61, 5, 1, 8, 0),
    )
    for answer, kind, major, minor, mask in rules:
        tests = [(0x55, 2, kind)]
        tests += [(0x55, 4, major)] if major is not None else []
        tests += [(0x55, 5, minor)] if minor is not None else []
        body = [(0xBC, 1, 3, 0, 0), (0x54, 1, 0, 0, mask), (0x5D, 1, 3, 2, 0)]
        end = [(0xB4, 0, 0, 0, int(answer)), (0x95, 0, 0, 0, 0)]
        length = len(tests) + len(body) + len(end)
        jumps = [(op, register, 0, length - 1 - at, value) for at, (op, register, value) in enumerate(tests)]
        program += code(*jumps, *body, *end)
    return program + (YES if default else NO)


def answer(rules: Sequence[Rule], default: bool, use: tuple[int, int, int, int]) -> bool:
    """What the rules say, without a program."""
    kind, major, minor, access = use
    for says, of_kind, of_major, of_minor, mask in rules:
        if (
            of_kind == kind
            and of_major in (None, major)
            and of_minor in (None, minor)
            and access & ~mask == 0
        ):
            return says
    return default


def granted(grants: Sequence[tuple[int, int, int, int]], use: tuple[int, int, int, int]) -> bool:
    """Whether the grants for this device together cover the use."""
    mask = 0
    for *device, access in grants:
        if device == list(use[:3]):
            mask |= access
    return use[3] & ~mask == 0


@settings(max_examples=300, deadline=None)
@given(RULES, st.booleans(), GRANTS, USES)
def test_an_extended_filter_says_yes_to_what_is_granted_and_else_what_it_said(
    rules: Sequence[Rule],
    default: bool,
    grants: Sequence[tuple[int, int, int, int]],
    use: tuple[int, int, int, int],
) -> None:
    """For any filter, any grants and any use, the answer is: granted, or what the filter said before."""
    extended = device_filter.allowing(compiled(rules, default), grants)

    assert device_filter.verdict(extended, *use) == (granted(grants, use) or answer(rules, default, use))


@settings(max_examples=200, deadline=None)
@given(RULES, st.booleans(), GRANTS, GRANTS, USES)
def test_grants_add_up_in_one_prologue(
    rules: Sequence[Rule],
    default: bool,
    first: list[tuple[int, int, int, int]],
    second: list[tuple[int, int, int, int]],
    use: tuple[int, int, int, int],
) -> None:
    """Granting twice is granting both at once, to the byte, so the program grows by new devices alone."""
    original = compiled(rules, default)
    twice = device_filter.allowing(device_filter.allowing(original, first), second)

    assert twice == device_filter.allowing(original, first + second)
    assert device_filter.allowing(twice, first) == twice
    assert device_filter.split(twice) == (device_filter.merged(first + second), original)


@given(RULES, st.booleans(), st.tuples(KINDS, MAJORS, MINORS, MASKS))
def test_a_filter_permits_a_grant_if_it_says_yes_to_each_of_its_uses(
    rules: Sequence[Rule], default: bool, grant: tuple[int, int, int, int]
) -> None:
    """It is asked all that the kernel would ask: making the node, reading, writing, and both at once."""
    uses = [(*grant[:3], access) for access in ACCESSES if access & ~grant[3] == 0]

    assert device_filter.permits(compiled(rules, default), grant) == all(
        answer(rules, default, use) for use in uses
    )


def test_reading_and_writing_each_is_not_both_at_once() -> None:
    """A filter with one rule for reading and one for writing denies what opens a device for both."""
    rules = [(True, CHAR, 1, 3, READ), (True, CHAR, 1, 3, WRITE), (True, CHAR, 1, 3, MKNOD)]
    program = compiled(rules, default=False)

    assert device_filter.permits(program, (CHAR, 1, 3, READ | WRITE)) is False
    assert [device_filter.permits(program, (CHAR, 1, 3, mask)) for mask in (READ, WRITE | MKNOD)] == [
        True
    ] * 2


@given(st.binary(max_size=400), USES)
def test_no_bytes_upset_the_judge(program: bytes, use: tuple[int, int, int, int]) -> None:
    """Whatever is taken for a program, judging it ends with yes, no or unknown."""
    whole = program[: len(program) // 8 * 8]

    assert device_filter.verdict(whole, *use) in (True, False, None)
    assert isinstance(device_filter.immovable(whole), str)
    assert device_filter.split(whole)[1] == whole


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        pytest.param(NO + YES, False, id="what is behind the exit is not run"),
        pytest.param(code((0x05, 0, 0, 1, 0)) + NO[:8] + YES, True, id="jump"),
        pytest.param(code((0x06, 0, 0, 0, 1)) + NO[:8] + YES, True, id="long jump"),
        pytest.param(code((0x18, 0, 0, 0, 0), (0, 0, 0, 0, 1), EXIT), True, id="64-bit constant"),
        pytest.param(code((0x71, 0, 1, 2, 0), EXIT), True, id="a byte of the access"),
        pytest.param(code((0x69, 0, 1, 0, 0), (0xA7, 0, 0, 0, CHAR), EXIT), False, id="half a word"),
        pytest.param(code((0xBF, 6, 1, 0, 0), (0x61, 0, 6, 4, 0), EXIT), True, id="moved context"),
        pytest.param(
            code((0xB7, 0, 0, 0, -1), (0x67, 0, 0, 0, 32), (0xBC, 0, 0, 0, 0), EXIT),
            False,
            id="a 32-bit move clears the upper half",
        ),
        pytest.param(
            code((0xB7, 0, 0, 0, -8), (0xC7, 0, 0, 0, 63), (0x07, 0, 0, 0, 1), EXIT),
            False,
            id="a shift that keeps the sign",
        ),
        pytest.param(
            code((0xB7, 0, 0, 0, -1), (0xC5, 0, 0, 1, 0), EXIT) + NO,
            False,
            id="a comparison of signed numbers",
        ),
        pytest.param(code((0xB7, 0, 0, 0, 7), (0x37, 0, 0, 0, 0), EXIT), False, id="divided by zero is zero"),
        pytest.param(code((0xB7, 0, 0, 0, 7), (0x97, 0, 0, 0, 0), EXIT), True, id="the rest by zero is all"),
        pytest.param(code((0x61, 0, 1, 12, 0), EXIT), None, id="beyond the context"),
        pytest.param(code((0x7B, 10, 1, -8, 0)) + YES, None, id="the stack"),
        pytest.param(code((0x85, 0, 0, 0, 1)) + YES, None, id="a function"),
        pytest.param(code((0x18, 2, 1, 0, 5), (0, 0, 0, 0, 0)) + YES, None, id="a map"),
        pytest.param(code((0x05, 0, 0, -1, 0)), None, id="a loop without end"),
        pytest.param(code((0x05, 0, 0, -9, 0)), None, id="a jump to before the beginning"),
        pytest.param(code((0xBF, 0, 5, 0, 0), EXIT), None, id="a register that nothing was written to"),
        pytest.param(code((0xBF, 0, 1, 0, 0), EXIT), None, id="an address for an answer"),
        pytest.param(b"", None, id="nothing"),
    ],
)
def test_a_program_is_followed_as_the_instruction_set_says(program: bytes, expected: bool | None) -> None:
    """What is more than arithmetic on the words that a program is asked with is unknown, never guessed."""
    assert device_filter.verdict(program, CHAR, 1, 3, READ) is expected


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        pytest.param(YES, "", id="arithmetic"),
        pytest.param(code((0x18, 2, 0, 0, 5), (0, 0, 0, 0, 0)) + YES, "", id="a constant"),
        pytest.param(code((0x18, 2, 1, 0, 5), (0, 0, 0, 0, 0)) + YES, "it uses maps", id="a map"),
        pytest.param(code((0x85, 0, 0, 0, 1)) + YES, "it calls functions", id="a helper"),
        pytest.param(code((0x85, 0, 1, 0, 1)) + YES, "it calls functions", id="a function of its own"),
        pytest.param(code((0xB7, 11, 0, 0, 1)) + YES, "its constants are blinded", id="blinded"),
        pytest.param(b"", "the kernel does not show its instructions", id="nothing"),
        pytest.param(YES[:-1], "the kernel does not show its instructions", id="half an instruction"),
    ],
)
def test_what_cannot_be_loaded_again_is_told(program: bytes, reason: str) -> None:
    """The kernel shows numbers of maps and functions that mean nothing when a program is loaded."""
    assert device_filter.immovable(program) == reason


def test_a_program_that_only_looks_extended_is_left_whole() -> None:
    """A jump from behind a prologue back into it means that it is none of ours, and it is not replaced."""
    ours = device_filter.prologue([(CHAR, 1, 3, READ)])
    strange = ours + code((0x15, 2, 0, -4, 9)) + NO

    assert device_filter.split(strange) == ((), strange)
    assert device_filter.split(ours + NO) == (((CHAR, 1, 3, READ),), NO)


def test_the_prologue_keeps_the_register_that_the_original_needs() -> None:
    """R1 is never written to: the first original instruction finds it as the kernel passes it."""
    program = device_filter.prologue([(CHAR, 1, 3, READ), (BLOCK, 7, 0, WRITE)])
    written = {
        registers & 15
        for opcode, registers, _, _ in struct.iter_unpack("<BBhi", program)
        if opcode & 7 in (0, 1, 4, 7)
    }

    assert written == {0, 2, 3, 4, 5}


@pytest.mark.parametrize("count", [1, 100, 1000])
def test_a_long_prologue_jumps_no_further_than_over_its_own_block(count: int) -> None:
    """However many devices are granted, no jump comes near what its 16 bits can hold."""
    grants = [(CHAR, 1, minor, READ) for minor in range(count)]
    program = device_filter.prologue(grants)

    assert len(program) // 8 == 6 + 8 * count
    assert max(offset for op, _, offset, _ in struct.iter_unpack("<BBhi", program) if op == 0x55) == 7
    assert device_filter.verdict(program + NO, CHAR, 1, count - 1, READ) is True


def test_grants_are_written_as_devices_allow_takes_them() -> None:
    """Letters and numbers of a written grant are those of the grant, for every access."""
    for (kind, number), mask in itertools.product(device_filter.TYPES.items(), range(1, 8)):
        letter, numbers, access = device_filter.written((number, 10, 229, mask)).split(" ")

        assert (letter, numbers, device_filter.access(access)) == (kind, "10:229", mask)
