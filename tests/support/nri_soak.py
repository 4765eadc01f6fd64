"""The runtime's side of NRI for endurance: different containers without end, many requests under way at once.

Unlike `nri_load` it measures no times, and unlike `nri_runtime` it is made to be fast: a request is a
template into which a number is written, so that no two pods have the same name, uid or id. It must not know
what the plugin should answer, only how to tell answers apart; tests judge.
"""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .nri_load import LoadError, realistic_container, realistic_pod
from .nri_runtime import NRI_0_12, Habits, M, configure, request, response

NUMBER = "<NUMBER>"
"""Stands for the number of a request in what is written into its template."""

WINDOW = 32
"""Requests that are on their way at once."""

_ANSWER_TIMEOUT = 20.0
_REQUEST_TIMEOUT = 2.0
# Where a message's stream id stands behind the header of its first frame: docs/facts.md#nri-frames.
_STREAM = 12
_RECEIVE = 1 << 18


def template(annotations: Mapping[str, str], namespace: str = "gpu-operator") -> bytes:
    """A realistic CreateContainer of a pod with these annotations beside the usual ones, in frames."""
    pod, container = realistic_pod(0, annotations), realistic_container()
    pod.name, pod.uid, pod.id = f"trainer-{NUMBER}", f"{NUMBER}-5c1e-4f0a", f"{NUMBER}{'0' * 56}"
    pod.namespace = namespace
    container.id, container.pod_sandbox_id = f"{NUMBER}{'c' * 56}", pod.id
    payload = M["Create"](pod=pod, container=container).SerializeToString()
    return request(1, "CreateContainer", payload, timeout=_REQUEST_TIMEOUT)


class SoakRuntime:
    """A runtime for one plugin. As a context manager it listens at `path`; `connect` waits for the plugin."""

    def __init__(self, path: str, templates: Mapping[str, bytes]) -> None:
        self.path = path
        self.asked = 0
        """Requests so far; the next one's number."""
        self._templates = dict(templates)
        self._sock: socket.socket | None = None
        self._stream = -1
        self._bytes = bytearray()  # of frames
        self._messages = bytearray()  # of the connection 1, without frames

    def __enter__(self) -> SoakRuntime:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(_ANSWER_TIMEOUT)
        self._listener.bind(self.path)
        self._listener.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()
        self._listener.close()
        Path(self.path).unlink(missing_ok=True)

    def connect(
        self, pods: Iterable[Any] = (), containers: Iterable[Any] = (), habits: Habits = NRI_0_12
    ) -> None:
        """Wait for the plugin and shake hands, telling it what exists. Raises LoadError, OSError."""
        self._sock, _ = self._listener.accept()
        self._sock.settimeout(_ANSWER_TIMEOUT)
        self._stream = -1
        self._bytes.clear()
        self._messages.clear()
        # RegisterPlugin is on the connection 2; it is small, so it comes in one frame.
        while len(self._bytes) < 8 or len(self._bytes) < 8 + struct.unpack_from(">4xI", self._bytes)[0]:
            self._receive()
        (stream,) = struct.unpack_from(">I", self._bytes, _STREAM)
        self._bytes.clear()
        self._sock.sendall(response(stream))
        self._call("Configure", configure(habits))
        listing = M["Synchronize"](pods=pods, containers=containers, more=False)
        self._call("Synchronize", listing.SerializeToString())

    def drop(self) -> None:
        """Close the connection, as a runtime does that stops."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def ask(self, kinds: Iterable[str]) -> Counter[tuple[str, str]]:
        """Ask about a container of each kind, a key of the templates; (kind, `verdict`) → how many.

        Raises LoadError, OSError where an answer does not come.
        """
        found: Counter[tuple[str, str]] = Counter()
        kinds = list(kinds)
        for start in range(0, len(kinds), WINDOW):
            pending: dict[int, str] = {}
            batch = []
            for kind in kinds[start : start + WINDOW]:
                self._stream += 2
                made = bytearray(
                    self._templates[kind].replace(NUMBER.encode(), b"%08x" % (self.asked & 0xFFFFFFFF))
                )
                struct.pack_into(">I", made, _STREAM, self._stream)
                self.asked += 1
                pending[self._stream] = kind
                batch.append(made)
            self._send(b"".join(batch))
            while pending:
                stream, data = self._next()
                found[pending.pop(stream), verdict(data)] += 1
        return found

    def _call(self, method: str, payload: bytes) -> bytes:
        self._stream += 2
        self._send(request(self._stream, method, payload, timeout=_REQUEST_TIMEOUT))
        stream, data = self._next()
        if stream != self._stream:
            raise LoadError(f"an answer to {stream} where one to {self._stream}, {method}, was due")
        return data

    def _send(self, data: bytes) -> None:
        if self._sock is None:
            raise LoadError("no plugin is connected")
        self._sock.sendall(data)

    def _next(self) -> tuple[int, bytes]:
        """(stream, `Response`) of the next answer."""
        while True:
            if len(self._messages) >= 10:
                size, stream, kind = struct.unpack_from(">IIB", self._messages)
                if kind != 2:
                    raise LoadError(f"a message of type {kind} where an answer was due")
                if len(self._messages) >= 10 + size:
                    data = bytes(self._messages[10 : 10 + size])
                    del self._messages[: 10 + size]
                    return stream, data
            self._take_frames()

    def _take_frames(self) -> None:
        taken = False
        while len(self._bytes) >= 8:
            conn, length = struct.unpack_from(">II", self._bytes)
            if len(self._bytes) < 8 + length:
                break
            if conn != 1:
                raise LoadError(f"a frame of the connection {conn}")
            self._messages += self._bytes[8 : 8 + length]
            del self._bytes[: 8 + length]
            taken = True
        if not taken:
            self._receive()

    def _receive(self) -> None:
        assert self._sock is not None
        data = self._sock.recv(_RECEIVE)
        if not data:
            raise LoadError("the plugin closed the connection")
        self._bytes += data


def verdict(data: bytes) -> str:
    """What a `Response` says of a container: a refusal's code, ``names``, ``edits``, ``marked`` or ``""``.

    marked: it is told why it has nothing, and has nothing else. Empty: the plugin has nothing to do with it.
    """
    answer = M["Response"].FromString(data)
    if answer.status.code:
        return str(answer.status.message.partition(":")[0])
    adjust = M["CreateReply"].FromString(answer.payload).adjust
    if adjust.cdi_devices:
        return "names"
    if adjust.env or adjust.mounts or adjust.linux.devices:
        return "edits"
    return "marked" if adjust.annotations else ""
