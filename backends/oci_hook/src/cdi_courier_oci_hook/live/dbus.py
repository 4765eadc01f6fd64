"""As much of D-Bus as it takes to ask systemd a question: a connection, a call, its reply. Light module.

It must not know what is asked. Written out because a hook must be fast and must not hang: starting busctl six
times costs more than the rest of the hook, it need not be there, and a child holds the hook's stderr.
Source: the D-Bus specification 0.43, little-endian, without signals and descriptors.

What is marshalled is given as Python values: int for ``y b u``, str for ``s o g``, a list for ``a``, a tuple
for ``( )``, and a pair of signature and value for ``v``.
"""

from __future__ import annotations

import _socket
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CALL, _REPLY, _ERROR = 1, 2, 3
_PATH, _INTERFACE, _MEMBER, _ERROR_NAME, _REPLY_SERIAL, _DESTINATION, _SIGNATURE = 1, 2, 3, 4, 5, 6, 8
_LONGEST = 1 << 20  # bytes of a message; the replies looked for have some hundred
_LONGEST_LINE = 512
_DEEPEST = 16  # containers within each other
_ALIGNMENT = {"y": 1, "b": 4, "u": 4, "a": 4, "s": 4, "o": 4, "g": 1, "v": 1, "(": 8, "n": 2, "q": 2}
_ALIGNMENT |= {"i": 4, "x": 8, "t": 8, "d": 8, "h": 4, "{": 8}


class MalformedError(Exception):
    """What was received is no D-Bus, or more of it than is understood here."""


class CallError(Exception):
    """The callee answers with an error. name: of the error, dotted; text: for people."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, text)
        self.name = name
        self.text = text


class Connection:
    """An authenticated connection; close it. bus: whether a bus is at the other end, and not a peer.

    deadline: a `time.monotonic` by which every call must have ended; a later one raises `TimeoutError`.
    Raises `OSError` and `MalformedError`, like its methods.
    """

    def __init__(self, path: str, *, bus: bool, deadline: float) -> None:
        self._deadline = deadline
        self._serial = 0
        self._received = b""
        self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        try:
            self._wait()
            self._socket.connect(path)
            self._authenticate()
            if bus:
                at = "org.freedesktop.DBus"
                self.call(at, "/org/freedesktop/DBus", at, "Hello")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it."""
        self._socket.close()

    def call(
        self, destination: str, path: str, interface: str, member: str, signature: str = "", *body: Any
    ) -> list[Any]:
        """Call a method and return what it returns. Raises `CallError` as well."""
        self._serial += 1
        self._send(message(self._serial, destination, path, interface, member, signature, *body))
        while True:
            kind, serial, fields, values = self._receive()
            if serial != self._serial or kind not in (_REPLY, _ERROR):
                continue  # a signal: a bus greets with one
            if kind == _ERROR:
                text = values[0] if values and isinstance(values[0], str) else ""
                raise CallError(str(fields.get(_ERROR_NAME, "")), text)
            return values

    def _authenticate(self) -> None:
        # All at once, as sd-bus does: systemd does not look again at a message that came with BEGIN, and a
        # message that is sent when the answer is here cannot come with what was sent before it.
        user = str(os.geteuid()).encode().hex().encode()
        self._send(b"\0AUTH EXTERNAL " + user + b"\r\nBEGIN\r\n")
        line = b""
        while not line.endswith(b"\r\n"):
            line += self._take(1)
            if len(line) > _LONGEST_LINE:
                raise MalformedError("an answer without end to the authentication")
        if not line.startswith(b"OK "):
            raise PermissionError(13, f"authentication refused: {line.decode(errors='replace').strip()}")

    def _receive(self) -> tuple[int, int, dict[int, Any], list[Any]]:
        head = self._take(16)
        size = int.from_bytes(head[4:8], "little")
        fields_size = int.from_bytes(head[12:16], "little")
        if head[:1] != b"l" or size > _LONGEST or fields_size > _LONGEST:
            raise MalformedError("a message that is too long or not little-endian")
        padded = -(-fields_size // 8) * 8
        rest = self._take(padded + size)
        # The array of fields begins at byte 12 of a message, where no padding is between its length and them.
        fields = dict(unmarshalled("a(yv)", head[12:16] + bytes(4) + rest[:fields_size])[0])
        signature = str(fields.get(_SIGNATURE, ""))
        wanted = fields.get(_REPLY_SERIAL)
        serial = wanted if isinstance(wanted, int) else 0
        try:
            values = unmarshalled(signature, rest[padded:])
        except MalformedError:
            if serial == self._serial:
                raise
            values = []
        return head[1], serial, fields, values

    def _send(self, data: bytes) -> None:
        self._wait()
        self._socket.sendall(data)

    def _take(self, count: int) -> bytes:
        while len(self._received) < count:
            self._wait()
            piece = self._socket.recv(65536)
            if not piece:
                raise ConnectionResetError(104, "the connection was closed")
            self._received += piece
        taken, self._received = self._received[:count], self._received[count:]
        return taken

    def _wait(self) -> None:
        """Have the next system call wait until the deadline at most."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)


def message(
    serial: int, destination: str, path: str, interface: str, member: str, signature: str = "", *body: Any
) -> bytes:
    """A method call, as it goes over the wire."""
    data = marshalled(signature, list(body))
    fields: list[tuple[int, tuple[str, str]]] = [
        (_PATH, ("o", path)),
        (_INTERFACE, ("s", interface)),
        (_MEMBER, ("s", member)),
        (_DESTINATION, ("s", destination)),
    ]
    if signature:
        fields.append((_SIGNATURE, ("g", signature)))
    head = marshalled("yyyyuua(yv)", [ord("l"), _CALL, 0, 1, len(data), serial, fields])
    return head + bytes(-len(head) % 8) + data


def marshalled(signature: str, values: list[Any]) -> bytes:
    """Values of these types, beginning at a multiple of 8 bytes."""
    out = bytearray()
    at = 0
    for value in values:
        end = _end_of_type(signature, at)
        _write(out, signature[at:end], value)
        at = end
    if at != len(signature):
        raise ValueError(f"{len(values)} values do not make {signature!r}")
    return bytes(out)


def unmarshalled(signature: str, data: bytes) -> list[Any]:
    """The values of these types, beginning at a multiple of 8 bytes. Raises `MalformedError`."""
    values = []
    at = where = 0
    while at < len(signature):
        end = _end_of_type(signature, at)
        value, where = _read(signature[at:end], data, where, 0)
        values.append(value)
        at = end
    return values


def _end_of_type(signature: str, at: int) -> int:
    """Where the single complete type ends that begins there."""
    while signature[at : at + 1] == "a":
        at += 1
    if signature[at : at + 1] not in ("(", "{"):
        if signature[at : at + 1] not in _ALIGNMENT:
            raise MalformedError(f"not a signature: {signature!r}")
        return at + 1
    depth = 0
    for end in range(at, len(signature)):
        depth += (signature[end] in "({") - (signature[end] in ")}")
        if not depth:
            return end + 1
    raise MalformedError(f"not a signature: {signature!r}")


def _write(out: bytearray, signature: str, value: Any) -> None:
    kind = signature[0]
    out += bytes(-len(out) % _ALIGNMENT[kind])
    if kind == "y":
        out.append(value)
    elif kind in "bu":
        out += int(value).to_bytes(4, "little")
    elif kind in "so":
        text = value.encode()
        out += len(text).to_bytes(4, "little") + text + b"\0"
    elif kind == "g":
        out += bytes([len(value)]) + value.encode() + b"\0"
    elif kind == "v":
        _write(out, "g", value[0])
        _write(out, value[0], value[1])
    elif kind == "(":
        at = 1
        for member in value:
            end = _end_of_type(signature, at)
            _write(out, signature[at:end], member)
            at = end
    elif kind == "a":
        length_at = len(out)
        out += bytes(4)
        out += bytes(-len(out) % _ALIGNMENT[signature[1]])
        begin = len(out)
        for item in value:
            _write(out, signature[1:], item)
        out[length_at : length_at + 4] = (len(out) - begin).to_bytes(4, "little")
    else:
        raise ValueError(f"{kind!r} is not written here")


def _read(signature: str, data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """The value of the type at this byte, and where it ends."""
    if depth > _DEEPEST:
        raise MalformedError("containers too deep")
    kind = signature[0]
    if kind not in _ALIGNMENT:
        raise MalformedError(f"not a signature: {signature!r}")
    at += -at % _ALIGNMENT[kind]
    if kind in "ybu":
        raw, end = _piece(data, at, 1 if kind == "y" else 4)
        return int.from_bytes(raw, "little"), end
    if kind in "so":
        size, end = _length(data, at, 4)
        return _text(data, end, size)
    if kind == "g":
        size, end = _length(data, at, 1)
        return _text(data, end, size)
    if kind == "v":
        inner, at = _read("g", data, at, depth)
        if not inner or _end_of_type(inner, 0) != len(inner):
            raise MalformedError("a variant of not one type")
        return _read(inner, data, at, depth + 1)
    if kind == "(":
        members = []
        inside = 1
        while inside < len(signature) - 1:
            end = _end_of_type(signature, inside)
            value, at = _read(signature[inside:end], data, at, depth + 1)
            members.append(value)
            inside = end
        return tuple(members), at
    if kind == "a":
        size, at = _length(data, at, 4)
        at += -at % _ALIGNMENT.get(signature[1], 1)
        end = at + size
        if end > len(data):
            raise MalformedError("an array that is longer than its message")
        items = []
        while at < end:
            before = at
            item, at = _read(signature[1:], data, at, depth + 1)
            if at <= before:
                raise MalformedError("an array of nothing")
            items.append(item)
        return items, at
    raise MalformedError(f"a value of type {kind!r}")


def _piece(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if at + size > len(data):
        raise MalformedError("a message that ends early")
    return data[at : at + size], at + size


def _length(data: bytes, at: int, size: int) -> tuple[int, int]:
    raw, end = _piece(data, at, size)
    return int.from_bytes(raw, "little"), end


def _text(data: bytes, at: int, size: int) -> tuple[str, int]:
    raw, end = _piece(data, at, size + 1)
    return raw[:-1].decode(errors="surrogateescape"), end
