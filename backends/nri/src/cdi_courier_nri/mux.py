"""Frames of the NRI multiplexer: several logical connections over one socket (docs/facts.md#nri-frames).

No I/O: bytes in, frames out, and the other way round. It knows nothing of what the frames carry, except
that the Go reader at the other end reads ttrpc messages and that this decides where frames may be cut.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from cdi_courier.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLUGIN_CONN: Final = 1
"""Logical connection of the Plugin service: the runtime asks, the plugin answers
(docs/facts.md#nri-connections)."""

RUNTIME_CONN: Final = 2
"""Logical connection of the Runtime service: the plugin asks, the runtime answers
(docs/facts.md#nri-connections)."""

SINGLE_FRAME_LIMIT: Final = 4096
"""Largest message that may travel as one frame: the buffer of ttrpc's reader in Go
(docs/facts.md#nri-frames)."""

SANITY_LIMIT: Final = 64 * 1024 * 1024
"""Largest frame or message accepted. Go has none; NRI before 0.7 sends up to 16 MiB
(docs/facts.md#nri-frames, #nri-synchronize)."""

FRAME: Final = Struct(">II")
"""A frame's header: conn_id, payload_length (docs/facts.md#nri-frames)."""


class RecordReader:
    """Cuts a byte stream into records: a fixed header that tells the length of the rest, and the rest.

    Both layers of the protocol are of this kind. What arrives whole is cut out of the piece it came in. A
    record that does not is gathered, and copied once more when its last piece is there.
    """

    __slots__ = ("_body", "_head", "_header", "_missing", "_size", "_unpack")

    def __init__(self, header: Struct) -> None:
        self._unpack: Callable[[bytes, int], tuple[int, ...]] = header.unpack_from
        self._size = header.size
        # Either the beginning of a header, or a header, what came after it, and how many bytes have not.
        self._head = b""
        self._header: tuple[int, ...] = ()
        self._body = bytearray()
        self._missing = 0

    @property
    def partial(self) -> bool:
        """Whether a record has begun and is not complete."""
        return bool(self._missing or self._head)

    def receive(self, data: bytes) -> Iterator[tuple[tuple[int, ...], bytes]]:
        """Take the next piece of the stream; yield the records it completes as (header fields, rest).

        Iterate to the end before the next piece. Each record is yielded before the header behind it is
        looked at, so that the order in which things are found does not depend on the cuts. Raises what
        `_length` raises, as soon as the offending header is complete; nothing can be read after that.
        """
        size, offset = self._size, 0
        if self._missing:
            if len(data) < self._missing:
                self._body += data
                self._missing -= len(data)
                return
            offset, self._missing = self._missing, 0
            # Data whose header travelled alone is not copied at all.
            last = data[:offset]
            last, self._body = b"".join((self._body, last)) if self._body else last, bytearray()
            yield self._header, last
        elif self._head:
            data = self._head + data
        end = len(data)
        while end - offset >= size:
            header = self._unpack(data, offset)
            start = offset + size
            stop = start + self._length(header)
            if stop > end:
                self._header, self._missing = header, stop - end
                self._body += data[start:]
                offset = end
                break
            yield header, data[start:stop]
            offset = stop
        self._head = data[offset:]

    def _length(self, header: tuple[int, ...]) -> int:
        """Length in bytes of what follows `header`. Raises ProtocolError if there can be no such header."""
        raise NotImplementedError


class FrameReader(RecordReader):
    """Frames out of a socket's bytes: ((conn_id, length), payload).

    Frames of ids that nobody opened are returned too; dropping them silently is the caller's part
    (docs/facts.md#nri-connections). Until the first header that NRI can have sent, anything else means that
    the socket is not NRI's.
    """

    __slots__ = ("recognised",)

    def __init__(self) -> None:
        super().__init__(FRAME)
        self.recognised = False

    def _length(self, header: tuple[int, ...]) -> int:
        conn, length = header
        if not self.recognised:
            if conn not in (PLUGIN_CONN, RUNTIME_CONN) or length > SANITY_LIMIT:
                raise ProtocolError(
                    "NRI006",
                    f"this does not look like an NRI socket: it begins with {FRAME.pack(conn, length)!r}",
                    "check that nri.sockets names the runtime's NRI socket and not its CRI or API socket",
                )
            self.recognised = True
        if length > SANITY_LIMIT:
            raise ProtocolError(
                "NRI007", f"the runtime announces a frame of {length} bytes", "restart the runtime"
            )
        return length


def frames(conn: int, header: bytes, data: bytes) -> bytes:
    """Build the frames that carry one ttrpc message, given as its 10-byte header and its data.

    One frame where the Go reader's buffer holds the message; else exactly two, the header and the data.
    Any other cut of a larger message kills the connection without a word, or fills the receiver's queue
    of 256 frames (docs/facts.md#nri-frames).
    """
    length = len(header) + len(data)
    if length <= SINGLE_FRAME_LIMIT:
        return FRAME.pack(conn, length) + header + data
    return b"".join((FRAME.pack(conn, len(header)), header, FRAME.pack(conn, len(data)), data))
