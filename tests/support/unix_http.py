"""HTTP over a Unix socket, from the client's side. It must not know who answers."""

from __future__ import annotations

import http.client
import os
import socket
from pathlib import Path


class UnixConnection(http.client.HTTPConnection):
    """A connection to whoever listens at the path. timeout: in seconds, for each read and write."""

    def __init__(self, path: Path, timeout: float = 20.0) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(os.fspath(self._path))
