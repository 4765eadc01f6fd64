"""Coverage-guided fuzzing of the NRI session: whatever a runtime says, and however its bytes are cut.

The input is a program for the runtime's side: its first byte says how the bytes are cut, and whether what
follows is the stream itself or operations (`_OPERATIONS`) that build frames, messages and requests around
fuzzed contents. Without them, almost no input would get past the lengths of three nested headers.

Arguments are libFuzzer's, as in fuzz_decode.py.
"""

import sys
from pathlib import Path
from struct import unpack_from

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["cdi_courier_nri"]):
    from cdi_courier_nri.session import Configured, CreateContainer, Registered, Session, State, Synchronized
    from cdi_courier_nri.ttrpc import MAX_DATA
from cdi_courier.errors import ProtocolError
from support.nri_runtime import PLUGIN_SERVICE, M, frame, go_frames, go_messages, message, request, response

_METHODS = (
    "Configure",
    "Synchronize",
    "CreateContainer",
    "StateChange",
    "Shutdown",
    "RunPodSandbox",
    "",
    "\x1b\u00e9",
)

_SIZES = (0, 1, 4082, 4083, 4084, 10_000, MAX_DATA - 5, MAX_DATA)
"""Bytes of a container's adjustment: around Go's buffer, and up to and above what ttrpc takes."""

CREATE_CONTAINER = M["Request"](service=PLUGIN_SERVICE, method="CreateContainer").SerializeToString()
"""How the envelope of a container's request begins."""

RAW = 0x80
"""In the first byte: what follows is the stream itself. The other bits are the pieces' size, less one."""


class Cursor:
    """Reads the input from the front; beyond its end everything is zero."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    @property
    def at_end(self) -> bool:
        """Whether nothing is left."""
        return self._offset >= len(self._data)

    def byte(self) -> int:
        """Take the next byte."""
        return (self._take(1) or b"\0")[0]

    def text(self) -> bytes:
        """Take a length and so many bytes."""
        return self._take(self.byte())

    def _take(self, size: int) -> bytes:
        part = self._data[self._offset : self._offset + size]
        self._offset += size
        return part


class Runtime:
    """Builds the runtime's stream. Stream ids go up by themselves, except where an operation says."""

    def __init__(self) -> None:
        self._stream = -1

    def raw(self, cursor: Cursor) -> bytes:
        """Bytes as they are."""
        return cursor.text()

    def frame(self, cursor: Cursor) -> bytes:
        """A frame of any connection with anything in it."""
        return frame(cursor.byte() & 3, cursor.text())

    def message(self, cursor: Cursor) -> bytes:
        """A message of any type and stream on any connection."""
        return frame(cursor.byte() & 3, message(cursor.byte(), cursor.byte(), cursor.text()))

    def request(self, cursor: Cursor) -> bytes:
        """A request that is in order, with any payload."""
        self._stream += 2
        return request(self._stream, _METHODS[cursor.byte() & 7], cursor.text())

    def large(self, cursor: Cursor) -> bytes:
        """A request that does not fit into one frame of Go's."""
        self._stream += 2 + 2 * (cursor.byte() & 7)
        return request(self._stream, _METHODS[cursor.byte() & 7], cursor.text() * 64)

    def envelope(self, cursor: Cursor) -> bytes:
        """A request that may be undecodable."""
        self._stream += 2
        return go_frames(1, message(self._stream, 1, cursor.text()))

    def response(self, cursor: Cursor) -> bytes:
        """A response to us or to nobody."""
        return response(cursor.byte() & 3, cursor.text(), code=cursor.byte() & 1, text="no")

    def dust(self, cursor: Cursor) -> bytes:
        """A request in frames of a few bytes."""
        self._stream += 2
        whole = request(self._stream, _METHODS[cursor.byte() & 7], cursor.text())[8:]
        size = 1 + (cursor.byte() & 15)
        return b"".join(frame(1, whole[i : i + size]) for i in range(0, len(whole), size))


_OPERATIONS = (
    Runtime.raw,
    Runtime.frame,
    Runtime.message,
    Runtime.request,
    Runtime.large,
    Runtime.envelope,
    Runtime.response,
    Runtime.dust,
)


def pieces_of(data: bytes) -> tuple[list[bytes], int]:
    """The stream in the pieces in which it was built, and the size into which it is to be cut besides."""
    first = data[0]
    if first & RAW:
        return [data[1:]], (first & 0x7F) + 1
    cursor, runtime, pieces = Cursor(data[1:]), Runtime(), []
    while not cursor.at_end:
        pieces.append(_OPERATIONS[cursor.byte() & 7](runtime, cursor))
    return pieces, first + 1


def described(event: object) -> object:
    """All that can be known of an event. Reading on demand gives a ProtocolError or a result."""
    try:
        match event:
            case Registered():
                return "registered"
            case Configured():
                return (event.config, event.runtime_name, event.request_timeout_ms, event.nri_version)
            case Synchronized():
                pods, containers = event.listing()
                return (event.timeout_nano, len(pods), len(containers))
            case CreateContainer():
                details = event.details()
                return (event.token, event.pod.name, event.container.name, len(details.env))
    except ProtocolError as error:
        return str(error)
    raise AssertionError(event)


def retained(session: Session) -> int:
    """Bytes of the stream that the session keeps, because they are no whole message yet."""
    trunk = session._trunk
    readers = [trunk._frames, *trunk._readers.values()]
    return sum(len(reader._head) + len(reader._body) for reader in readers)


def requests_in(stream: bytes) -> list[tuple[int, bytes]]:
    """Stream id and envelope of the requests that are whole in what a runtime has sent."""
    carried = b""
    while len(stream) >= 8:
        conn, size = unpack_from(">II", stream)
        if conn == 1 and len(stream) >= 8 + size:
            carried += stream[8 : 8 + size]
        stream = stream[8 + size :]
    found = []
    while len(carried) >= 10:
        size, number, kind = unpack_from(">IIB", carried)
        if kind == 1 and len(carried) >= 10 + size:
            found.append((number, carried[10 : 10 + size]))
        carried = carried[10 + size :]
    return found


def as_go_writes(envelope: bytes) -> bool:
    """Whether no field stands twice in the envelope of a request for a container.

    One that comes alone is read in one go with what it holds, others in two steps. Protocol buffers let the
    first merge two payloads where the second takes the last, and let a later method replace the one that was
    seen. Go writes each field once and in order, so what such an envelope means is nobody's business.
    """
    if not envelope.startswith(CREATE_CONTAINER):
        return True
    try:
        return bool(M["Request"].FromString(envelope).SerializeToString() == envelope)
    except Exception:  # noqa: BLE001 - whatever this release of protobuf raises
        return False


def held(pieces: list[bytes]) -> tuple[list[object], bytes, str]:
    """A conversation: its events, what was answered, and the error that ended it or nothing.

    Containers are answered at the end, so that the answers' order does not depend on the cuts.
    """
    session = Session("p", "10")
    sent = session.start()
    events: list[object] = []
    creates: list[CreateContainer] = []
    told = 0
    for piece in pieces:
        told += len(piece)
        try:
            new = session.receive(piece)
        except ProtocolError as error:
            assert session.state is State.CLOSED
            return events, sent + session.outgoing(), str(error)
        sent += session.outgoing()
        events += map(described, new)
        creates += [event for event in new if isinstance(event, CreateContainer)]
        assert retained(session) <= (told if session.partial else 0)
    # A request has 18 bytes at least, and its answer repeats, escapes and explains no more than this.
    assert len(sent) <= 1024 + 100 * told
    for event in creates:
        name = event.container.name
        if event.token & 2:
            session.refuse(event.token, 7, name * 400)
        else:
            size = _SIZES[len(name) % len(_SIZES)]
            assert session.reply(event.token, b"x" * size) == (size < MAX_DATA)
    sent += session.outgoing()
    assert session.lost().code == "NRI010"
    return events, sent, ""


def one_input(data: bytes) -> None:
    """Hold the conversation whole, piece by piece and cut evenly: one outcome, which Go can read.

    Each request that came whole has one answer. With an envelope that Go would not write, the outcomes may
    differ (`as_go_writes`).
    """
    if not data:
        return
    pieces, size = pieces_of(data)
    whole = b"".join(pieces)
    requests = requests_in(whole)
    same = all(as_go_writes(envelope) for _, envelope in requests)
    events, sent, error = held([whole])
    for other in (pieces, [whole[i : i + size] for i in range(0, len(whole), size)]):
        more, also, trouble = held(other)
        if not same:
            continue
        assert (also, trouble) == (sent, error)
        # Events of the piece that an error came in are lost with it.
        assert more[: len(events)] == events if error else more == events, (more, events)
    answers = go_messages(sent)
    assert {(conn, kind) for conn, _, kind, _ in answers} <= {(2, 1), (1, 2)}
    if not error:
        assert sorted(stream for conn, stream, _, _ in answers if conn == 1) == sorted(
            stream for stream, _ in requests
        )


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
