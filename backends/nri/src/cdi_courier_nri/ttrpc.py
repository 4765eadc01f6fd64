"""The ttrpc messages of both logical connections of a trunk (docs/facts.md#ttrpc-messages).

No I/O. It knows streams, envelopes and their limits; which services and methods there are it does not.
"""

from __future__ import annotations

import functools
from struct import Struct
from typing import TYPE_CHECKING, Final

from cdi_courier.errors import ProtocolError, printable

from . import messages
from .mux import (
    FRAME,
    PLUGIN_CONN,
    RUNTIME_CONN,
    SANITY_LIMIT,
    SINGLE_FRAME_LIMIT,
    FrameReader,
    RecordReader,
    frames,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DATA: Final = 4_194_304
"""Largest data of a message that Go's ttrpc takes (docs/facts.md#ttrpc-size-limit). More kills the
connection, so it is never sent."""

MAX_TEXT: Final = 4096
"""Characters of a status' text. It ends up in a gRPC trailer and a pod's event: no place for books."""

# Status codes (docs/facts.md#ttrpc-status-codes).
UNKNOWN: Final = 2
INVALID_ARGUMENT: Final = 3
DEADLINE_EXCEEDED: Final = 4
NOT_FOUND: Final = 5
PERMISSION_DENIED: Final = 7
RESOURCE_EXHAUSTED: Final = 8
FAILED_PRECONDITION: Final = 9
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13

_REQUEST: Final = 1
_RESPONSE: Final = 2
_HEADER = Struct(">IIBB")  # data_length, stream_id, type, flags (docs/facts.md#ttrpc-messages)
_LONE = Struct(">IIIIBB")  # a frame's header and a message's


class Request:
    """A request of the runtime. timeout_nano: nanoseconds it had left when sent, 0 for no limit."""

    __slots__ = ("method", "payload", "service", "stream", "timeout_nano")

    def __init__(self, stream: int, service: str, method: str, payload: bytes, timeout_nano: int) -> None:
        self.stream = stream
        self.service = service
        self.method = method
        self.payload = payload
        self.timeout_nano = timeout_nano


class Response:
    """The runtime's response to a request of ours. code: 0 for success, else message says why not."""

    __slots__ = ("code", "message", "payload", "stream")

    def __init__(self, stream: int, code: int, message: str, payload: bytes) -> None:
        self.stream = stream
        self.code = code
        self.message = message
        self.payload = payload


class _MessageReader(RecordReader):
    """Messages out of one logical connection's bytes: ((data_length, stream, type, flags), data)."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_HEADER)

    def _length(self, header: tuple[int, ...]) -> int:
        length = header[0]
        if length > SANITY_LIMIT:
            raise ProtocolError(
                "NRI007", f"the runtime announces a message of {length} bytes", "restart the runtime"
            )
        return length


class Trunk:
    """Both logical connections over one socket: we serve the first and call over the second.

    Guards the rules of stream ids (docs/facts.md#ttrpc-streams): each request has a new odd id, each has
    exactly one response. What is to be sent gathers until `outgoing` is called.
    """

    __slots__ = ("_frames", "_in_order", "_last_request", "_next_call", "_open", "_out", "_readers")

    def __init__(self) -> None:
        self._frames = FrameReader()
        self._readers = {PLUGIN_CONN: _MessageReader(), RUNTIME_CONN: _MessageReader()}
        # Whether the next byte begins a frame and a message, and the peer has been recognised.
        self._in_order = False
        self._open: set[int] = set()
        self._last_request = -1
        self._next_call = 1
        self._out: list[bytes] = []

    @property
    def partial(self) -> bool:
        """Whether a message has begun to arrive and is not complete."""
        return self._frames.partial or any(reader.partial for reader in self._readers.values())

    def receive(self, data: bytes) -> Iterator[Request | Response]:
        """Take the next bytes of the socket; yield the messages they complete, in order of arrival.

        Iterate to the end before the next bytes. What is not worth yielding is answered when its turn comes.
        Raises ProtocolError where the bytes cannot be NRI's, after all messages before them.
        """
        if lone := self.lone(data):
            if self.accept(lone[0]) and (request := self.opened(*lone)):
                yield request
            return
        self._in_order = False
        for (conn, _), payload in self._frames.receive(data):
            reader = self._readers.get(conn)
            if reader is None:
                continue
            for (_, stream, kind, _), body in reader.receive(payload):
                if kind == _REQUEST and conn == PLUGIN_CONN:
                    if self.accept(stream) and (request := self.opened(stream, body)):
                        yield request
                elif kind == _RESPONSE and conn == RUNTIME_CONN:
                    yield _response(stream, body)
                # Unknown types are ignored (docs/facts.md#ttrpc-messages); so is a known one on the
                # connection where it has no sense.
        self._in_order = self._frames.recognised and not self.partial

    def lone(self, data: bytes) -> tuple[int, bytes] | None:
        """Stream id and body of the one request that `data` is; None if that is for `receive`.

        Who gets one owes the stream an answer once it has been accepted.
        """
        return _lone_request(data) if self._in_order else None

    def accept(self, stream: int) -> bool:
        """Whether a request may have this stream id; what is answered if it may not is sent by this."""
        if stream <= self._last_request or not stream & 1:
            # Go's server answers so too. Nothing is owed for the id itself: its first request may be open.
            self._send(
                PLUGIN_CONN,
                stream,
                _RESPONSE,
                _status(INVALID_ARGUMENT, f"stream id {stream} is not new and odd"),
            )
            return False
        self._last_request = stream
        self._open.add(stream)
        return True

    def opened(self, stream: int, body: bytes) -> Request | None:
        """The request that was accepted; None if it is unreadable, which is then its answer."""
        try:
            request = messages.Request.FromString(body)
            return Request(stream, request.service, request.method, request.payload, request.timeout_nano)
        except Exception as error:  # noqa: BLE001 - see messages.decode, which would cost a call here
            self.fail(stream, INVALID_ARGUMENT, f"undecodable request: {error}")
            return None

    def outgoing(self) -> bytes:
        """Hand out, once, what must be written to the socket now."""
        out = self._out
        if not out:
            return b""
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return data

    def call(self, service: str, method: str, payload: bytes, timeout_nano: int) -> int:
        """Send a request; return its stream id, which the response will carry."""
        stream = self._next_call
        self._next_call += 2
        request = messages.Request(service=service, method=method, payload=payload, timeout_nano=timeout_nano)
        self._send(RUNTIME_CONN, stream, _REQUEST, request.SerializeToString())
        return stream

    def respond(self, stream: int, payload: bytes) -> bool:
        """Answer a request with success. False if `payload` was too large and an error was sent instead.

        Raises LookupError if the request does not exist or has been answered.
        """
        field = _payload_field(len(payload))
        size = len(field) + len(payload)
        if size > MAX_DATA:
            self.fail(
                stream, RESOURCE_EXHAUSTED, f"NRI014: the answer has {size} bytes, NRI carries {MAX_DATA}"
            )
            return False
        self._open.remove(stream)
        length = _HEADER.size + size
        if length <= SINGLE_FRAME_LIMIT:
            # As `_send` does it, in one step.
            self._out.append(_LONE.pack(PLUGIN_CONN, length, size, stream, _RESPONSE, 0) + field + payload)
        else:
            self._send(PLUGIN_CONN, stream, _RESPONSE, field + payload)
        return True

    def fail(self, stream: int, code: int, message: str) -> None:
        """Answer a request with an error status. Raises LookupError as `respond` does."""
        self._open.remove(stream)
        self._send(PLUGIN_CONN, stream, _RESPONSE, _status(code, message))

    def _send(self, conn: int, stream: int, kind: int, data: bytes) -> None:
        self._out.append(frames(conn, _HEADER.pack(len(data), stream, kind, 0), data))


def _lone_request(data: bytes) -> tuple[int, bytes] | None:
    """Stream id and body if `data` is just one request in the frames that Go cuts; else None, whatever it is.

    That is what nearly every read brings, and the readers take three times as long for it. Go's writer sends
    a message in one frame, or its first 4,096 bytes in one and the rest in another
    (docs/facts.md#nri-frames).
    """
    end = len(data)
    if end < _LONE.size:
        return None
    conn, length, size, stream, kind, _ = _LONE.unpack_from(data)
    if conn != PLUGIN_CONN or kind != _REQUEST:
        return None
    if length == size + _HEADER.size:
        return (stream, data[_LONE.size :]) if end == size + _LONE.size else None
    second = FRAME.size + length
    if length != SINGLE_FRAME_LIMIT or end != size + _LONE.size + FRAME.size:
        return None
    if FRAME.unpack_from(data, second) != (PLUGIN_CONN, size + _HEADER.size - length):
        return None
    return stream, data[_LONE.size : second] + data[second + FRAME.size :]


@functools.lru_cache(256)
def _payload_field(size: int) -> bytes:
    """What stands before the payload in an encoded `messages.Response`: its number and its length, if any."""
    if not size:
        return b""
    if size < 0x80:
        return bytes((0x12, size))
    head = bytearray(b"\x12")
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head)


def _response(stream: int, body: bytes) -> Response:
    try:
        response = messages.decode(messages.Response, body)
    except messages.Undecodable as error:
        raise ProtocolError("NRI016", f"what the runtime sent is {error}") from error
    return Response(stream, response.status.code, response.status.message, response.payload)


def _status(code: int, message: str) -> bytes:
    text = printable(message)
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - 1] + "…"
    data: bytes = messages.Response(status=messages.Status(code=code, message=text)).SerializeToString()
    return data
