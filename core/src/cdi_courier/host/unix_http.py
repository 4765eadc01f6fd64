"""One HTTP GET over a Unix socket, the whole of it under one deadline. It knows no API."""

from __future__ import annotations

import io
import time
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING, Final, cast

from cdi_courier.errors import HostError, quoted
from cdi_courier.host import sockets
from cdi_courier.host.answers import late

if TYPE_CHECKING:
    import socket

    from cdi_courier.host.files import Root

_LIMIT: Final = 4 << 20  # bytes; a configuration has a few thousand
_OK: Final = 200


def get(root: Root, path: str, target: str, timeout: float) -> bytes:
    """The body of ``GET target`` from the socket at `path`.

    timeout: seconds until the last byte. Raises `HostError` as `sockets.connect`, and ``HST104`` for an
    answer that is none: another status than 200, too long, cut off, or not HTTP.
    """
    what = f"GET {target} at {path}"
    deadline = time.monotonic() + timeout
    try:
        with sockets.connect(root, path, timeout) as connection:
            request = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            connection.sendall(request.encode())
            data = _until_closed(connection, deadline, what, timeout)
    except TimeoutError:
        raise late(what, timeout) from None
    except OSError as error:
        raise HostError("HST104", f"{what}: the connection broke: {error.strerror or error}") from None
    return _body(data, what)


def _until_closed(connection: socket.socket, deadline: float, what: str, timeout: float) -> bytes:
    data = bytearray()
    while True:
        # The socket's timeout is for one read: who sends a byte a second would go on for ever.
        left = deadline - time.monotonic()
        if left <= 0:
            raise late(what, timeout)
        connection.settimeout(left)
        part = connection.recv(1 << 16)
        if not part:
            return bytes(data)
        data += part
        if len(data) > _LIMIT:
            raise HostError("HST104", f"{what}: the answer is larger than {_LIMIT} bytes")


class _Received:
    """What `HTTPResponse` wants of a socket, when everything has been received."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _body(data: bytes, what: str) -> bytes:
    try:
        response = HTTPResponse(cast("socket.socket", _Received(data)), method="GET")
        response.begin()
        body = response.read()
    except (HTTPException, ValueError) as error:
        text = quoted(f"{type(error).__name__}: {error}", 80)
        raise HostError("HST104", f"{what}: the answer is not HTTP: {text}") from None
    if response.status != _OK:
        raise HostError("HST104", f"{what}: status {response.status}")
    return body
