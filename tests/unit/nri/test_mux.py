"""Frames: cut anywhere on the way in, cut as Go's reader needs it on the way out."""

from __future__ import annotations

import pytest
from cdi_courier.errors import ProtocolError
from cdi_courier_nri.mux import SANITY_LIMIT, FrameReader, frames
from support.nri_runtime import frame


def received(pieces: list[bytes]) -> list[tuple[int, bytes]]:
    reader = FrameReader()
    return [(header[0], payload) for piece in pieces for header, payload in reader.receive(piece)]


STREAM = frame(1, b"abc") + frame(2, b"") + frame(7, b"for nobody") + frame(2, b"x" * 300)
EXPECTED = [(1, b"abc"), (2, b""), (7, b"for nobody"), (2, b"x" * 300)]


def test_frames_come_out_whole_wherever_the_stream_is_cut() -> None:
    """Two pieces cut at any offset hold the same frames as the whole."""
    for cut in range(len(STREAM) + 1):
        assert received([STREAM[:cut], STREAM[cut:]]) == EXPECTED


def test_frames_come_out_whole_byte_by_byte() -> None:
    """A stream that arrives in single bytes holds the same frames."""
    assert received([STREAM[i : i + 1] for i in range(len(STREAM))]) == EXPECTED


def test_a_reader_knows_whether_a_frame_has_begun() -> None:
    """`partial` is true exactly between the first and the last byte of a frame."""
    reader = FrameReader()
    assert list(reader.receive(frame(1, b"abc")[:-1])) == []
    assert reader.partial

    assert list(reader.receive(b"c")) == [((1, 3), b"abc")]
    assert not reader.partial


@pytest.mark.parametrize(
    "first",
    [b"HTTP/1.1 400 Bad Request\r\n", bytes(8), b"\0\0\x12\x04\0\0\0\0\0", frame(1, b"")[:4] + b"\xff" * 4],
    ids=["http", "zeros", "http2", "length"],
)
def test_a_stream_that_nri_cannot_begin_with_is_recognised_by_its_first_header(first: bytes) -> None:
    """Eight bytes suffice to say that a socket is not NRI's."""
    with pytest.raises(ProtocolError, match="does not look like an NRI socket"):
        received([first[:8]])


def test_a_frame_beyond_the_sanity_limit_is_an_error_before_it_arrives() -> None:
    """The announced length alone is enough."""
    reader = FrameReader()
    assert list(reader.receive(frame(1, b""))) == [((1, 0), b"")]
    with pytest.raises(ProtocolError, match="NRI007"):
        list(reader.receive((1).to_bytes(4, "big") + (SANITY_LIMIT + 1).to_bytes(4, "big")))


@pytest.mark.parametrize("size", [0, 1, 4085, 4086])
def test_a_small_message_is_one_frame(size: int) -> None:
    """A message of at most 4096 bytes with its header travels in one frame."""
    header, data = b"h" * 10, b"d" * size
    assert frames(1, header, data) == frame(1, header + data)


@pytest.mark.parametrize("size", [4087, 4096, 4097, 10_000, 4_194_304])
def test_a_large_message_is_two_frames(size: int) -> None:
    """Any larger message travels as its header alone and its data alone."""
    header, data = b"h" * 10, b"d" * size
    assert frames(2, header, data) == frame(2, header) + frame(2, data)
