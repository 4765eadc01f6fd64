"""The runtime's side of NRI for tests: a socket, a handshake, and faults that no real one shows on demand.

An independent judge: it shares no protocol code with the product, only the builder of message classes.
It reads as Go's ttrpc does under Go's multiplexer, so a frame that would kill a real connection kills this
one (contracts/nri-protocol.md §2.4).
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from cdi_courier.descriptors import message_classes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PLUGIN_SERVICE = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Runtime"
GO_BUFFER = 4096
GO_QUEUE = 256
GO_MAX_DATA = 4_194_304

M = message_classes(
    "fake.runtime",
    {
        "Pair": "1 key string, 2 value string",
        "Request": """1 service string, 2 method string, 3 payload bytes, 4 timeout_nano int64,
            5 metadata Pair*""",
        "Status": "1 code int32, 2 message string",
        "Response": "1 status Status, 2 payload bytes",
        "Register": "1 plugin_name string, 2 plugin_idx string, 3 nri_version string",
        "Configure": """1 config string, 2 runtime_name string, 3 runtime_version string,
            4 registration_timeout int64, 5 request_timeout int64, 6 nri_version string""",
        "ConfigureReply": "2 events int32",
        "Pod": """1 id string, 2 name string, 3 uid string, 4 namespace string, 5 labels map<string,string>,
            6 annotations map<string,string>, 9 pid uint32, 10 ips string*""",
        "Mount": "1 destination string, 2 type string, 3 source string, 4 options string*",
        "Device": "1 path string, 2 type string, 3 major int64, 4 minor int64",
        "Namespace": "1 type string, 2 path string",
        "Linux": "1 namespaces Namespace*, 2 devices Device*, 5 cgroups_path string",
        "Cdi": "1 name string",
        "Container": """1 id string, 2 pod_sandbox_id string, 3 name string, 4 state int32,
            5 labels map<string,string>, 6 annotations map<string,string>, 7 args string*, 8 env string*,
            9 mounts Mount*, 11 linux Linux, 12 pid uint32, 20 cdi_devices Cdi*""",
        "Synchronize": "1 pods Pod*, 2 containers Container*, 3 more bool",
        "SynchronizeReply": "1 update Pair*, 2 more bool",
        "Create": "1 pod Pod, 2 container Container",
        "Adjustment": "2 annotations map<string,string>, 3 mounts Mount*, 4 env Pair*, 8 cdi_devices Cdi*",
        "CreateReply": "1 adjust Adjustment",
        "StateChange": "1 event int32, 2 pod Pod, 3 container Container",
    },
)


@dataclass(frozen=True)
class Habits:
    """What tells one NRI version from another on the wire."""

    runtime_name: str = "containerd"
    runtime_version: str = "v2.3.0"
    nri_version: str = "v0.12.0"
    registration_timeout_ms: int = 5000
    request_timeout_ms: int = 2000
    dedicated_calls: bool = True
    splits_synchronize: bool = True


NRI_0_12 = Habits()
NRI_0_8 = Habits(runtime_version="v2.1.0", nri_version="", dedicated_calls=False)
NRI_0_6 = Habits(
    runtime_version="1.7.24",
    nri_version="",
    registration_timeout_ms=0,
    request_timeout_ms=0,
    dedicated_calls=False,
    splits_synchronize=False,
)


class ConnectionLost(Exception):  # noqa: N818 - says what happened
    """The plugin closed the connection, or broke a rule that makes Go close it; the text says which."""


@dataclass(frozen=True)
class Reply:
    """What the plugin answered. code 0: success."""

    code: int
    message: str
    payload: bytes

    @property
    def adjust(self) -> Any:
        """The adjustment in the answer to CreateContainer."""
        return M["CreateReply"].FromString(self.payload).adjust


def frame(conn: int, payload: bytes) -> bytes:
    """One frame of the multiplexer."""
    return struct.pack(">II", conn, len(payload)) + payload


def message(stream: int, kind: int, data: bytes) -> bytes:
    """One ttrpc message without frames. kind: 1 request, 2 response."""
    return struct.pack(">IIBB", len(data), stream, kind, 0) + data


def go_frames(conn: int, data: bytes) -> bytes:
    """A ttrpc message in the frames that Go sends: 4096 bytes, then all the rest."""
    if len(data) <= GO_BUFFER:
        return frame(conn, data)
    return frame(conn, data[:GO_BUFFER]) + frame(conn, data[GO_BUFFER:])


def request(
    stream: int,
    method: str,
    payload: bytes = b"",
    *,
    timeout: float = 2.0,
    service: str = PLUGIN_SERVICE,
    metadata: dict[str, str] | None = None,
) -> bytes:
    """A request of the runtime on connection 1, in frames."""
    envelope = M["Request"](service=service, method=method, payload=payload, timeout_nano=int(timeout * 1e9))
    for key, value in (metadata or {}).items():
        envelope.metadata.add(key=key, value=value)
    return go_frames(1, message(stream, 1, envelope.SerializeToString()))


def response(stream: int, payload: bytes = b"", *, code: int = 0, text: str = "") -> bytes:
    """A response of the runtime on connection 2, in frames."""
    envelope = M["Response"](payload=payload)
    if code:
        envelope.status.code, envelope.status.message = code, text
    return go_frames(2, message(stream, 2, envelope.SerializeToString()))


def configure(habits: Habits = NRI_0_12) -> bytes:
    """The payload of Configure."""
    payload: bytes = M["Configure"](
        runtime_name=habits.runtime_name,
        runtime_version=habits.runtime_version,
        registration_timeout=habits.registration_timeout_ms,
        request_timeout=habits.request_timeout_ms,
        nri_version=habits.nri_version,
    ).SerializeToString()
    return payload


def pod(name: str = "pod0", namespace: str = "ns", **annotations: str) -> Any:
    """A pod; its id is derived from its name."""
    return M["Pod"](id=f"p-{name}", name=name, uid=f"u-{name}", namespace=namespace, annotations=annotations)


def container(name: str = "c0", of: str = "pod0", **annotations: str) -> Any:
    """A container of the pod named `of`, with a little of all that a runtime sends."""
    c = M["Container"](id=f"c-{name}", pod_sandbox_id=f"p-{of}", name=name, state=3, annotations=annotations)
    c.args.extend(["sh", "-c", "true"])
    c.env.append("A=B")
    c.mounts.add(destination="/proc", type="proc", source="proc", options=["nosuid"])
    c.linux.namespaces.add(type="pid")
    c.linux.devices.add(path="/dev/null", type="c", major=1, minor=3)
    return c


class GoReader:
    """Go's ttrpc channel over one logical connection: a bufio.Reader of 4096 bytes over a frame a read."""

    def __init__(self, frames: Callable[[], bytes]) -> None:
        self._frames = frames
        self._buffer = b""

    def read_message(self) -> tuple[int, int, bytes]:
        """(stream, type, data) of the next message. Raises ConnectionLost where Go would fail."""
        size, stream, kind, _ = struct.unpack(">IIBB", self._read_full(10))
        if size > GO_MAX_DATA:
            # Go discards the data through the same buffer, which the second frame does not fit into (§3.5).
            raise ConnectionLost(f"message of {size} bytes")
        return stream, kind, self._read_full(size)

    def _read_full(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            if not self._buffer:
                room = size if size >= GO_BUFFER else GO_BUFFER
                data = self._frames()
                if len(data) > room:
                    raise ConnectionLost(
                        f"frame of {len(data)} bytes into a buffer of {room}: cannot allocate memory"
                    )
                self._buffer = data
            part, self._buffer = self._buffer[:size], self._buffer[size:]
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class Peer:
    """One connected plugin, seen from the runtime."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.lost = threading.Event()
        self.ready = threading.Event()
        """Set once the handshake is over and the plugin is in the runtime's list."""
        self.paused = threading.Event()
        """Cleared, the socket is not read: a runtime that hangs."""
        self.paused.set()
        self.events = 0
        self.registered_as = ("", "", "")
        self._why = ""
        self._queues: dict[int, queue.Queue[bytes | None]] = {1: queue.Queue(), 2: queue.Queue()}
        self._readers = {conn: GoReader(partial(self._next_frame, conn)) for conn in self._queues}
        self._stream = -1
        self._timeout = 10.0
        self._lock = threading.Lock()
        self._answers: dict[int, Reply] = {}
        threading.Thread(target=self._demultiplex, daemon=True).start()

    def read_request(self) -> tuple[int, Any]:
        """(stream, envelope) of the plugin's next request on connection 2."""
        stream, kind, data = self._read(2)
        assert kind == 1, kind
        return stream, M["Request"].FromString(data)

    def send(self, data: bytes) -> None:
        """Write raw bytes. A dead connection raises ConnectionLost."""
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def start(self, method: str, payload: bytes = b"", *, timeout: float = 2.0, **more: Any) -> int:
        """Send a request; return its stream for `finish`."""
        self._stream += 2
        self.send(request(self._stream, method, payload, timeout=timeout, **more))
        return self._stream

    def finish(self, stream: int) -> Reply:
        """Wait for the answer of a stream. Answers of others are kept."""
        while stream not in self._answers:
            got, kind, data = self._read(1)
            assert kind == 2, kind
            envelope = M["Response"].FromString(data)
            self._answers[got] = Reply(envelope.status.code, envelope.status.message, envelope.payload)
        return self._answers.pop(stream)

    def call(self, method: str, payload: bytes = b"", **more: Any) -> Reply:
        """Send a request and wait for its answer."""
        with self._lock:
            return self.finish(self.start(method, payload, **more))

    def create_container(self, pod: Any, container: Any, **more: Any) -> Reply:
        """Ask the plugin about a new container."""
        return self.call(
            "CreateContainer", M["Create"](pod=pod, container=container).SerializeToString(), **more
        )

    def close(self) -> None:
        """Close the connection, as a runtime does that drops a plugin or stops."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _read(self, conn: int) -> tuple[int, int, bytes]:
        try:
            return self._readers[conn].read_message()
        except ConnectionLost:
            self.close()
            raise

    def _next_frame(self, conn: int) -> bytes:
        try:
            data = self._queues[conn].get(timeout=self._timeout)
        except queue.Empty:
            raise ConnectionLost(f"nothing within {self._timeout} s") from None
        if data is None:
            self._queues[conn].put(None)
            raise ConnectionLost(self._why)
        return data

    def _demultiplex(self) -> None:
        try:
            while True:
                conn, size = struct.unpack(">II", self._receive(8))
                data = self._receive(size)
                if conn in self._queues:
                    if self._queues[conn].qsize() >= GO_QUEUE:
                        self._why = "failed to queue payload for reading"
                        break
                    self._queues[conn].put(data)
        except (ConnectionLost, OSError) as error:
            self._why = str(error)
        for frames in self._queues.values():
            frames.put(None)
        self.lost.set()

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            self.paused.wait()
            part = self.sock.recv(min(size - len(data), 1 << 20))
            if not part:
                raise ConnectionLost("the plugin closed the connection")
            data += part
        return bytes(data)


FAULTS = (
    "close at accept",
    "close after RegisterPlugin",
    "close after registered",
    "close after Configure",
    "close after part of Synchronize",
    "silence",
    "silence after registered",
    "silence after Configure",
    "garbage",
    "refuse",
)
"""What can go wrong in a handshake."""


@dataclass
class NriRuntime:
    """A runtime on a unix socket. As a context manager it listens; `peer` is the newest connected plugin.

    faults: what goes wrong, one for each connection in turn; later connections are healthy.
    configure_first: send Configure before the reply to RegisterPlugin, as runtimes often do.
    listed: (pods, containers) of each message of Synchronize.
    """

    path: str
    habits: Habits = NRI_0_12
    faults: Iterable[str] = ()
    configure_first: bool = False
    listed: list[tuple[list[Any], list[Any]]] = field(default_factory=lambda: [([], [])])
    synchronize_timeout: float = 2.0

    def __post_init__(self) -> None:
        self.peers: list[Peer] = []
        self.accepted = 0
        self.errors: list[str] = []
        self._faults = list(self.faults)
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> NriRuntime:
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def listen(self) -> None:
        """Make the socket anew and accept plugins, as a runtime does at start."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close everything and remove the socket."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        if self._listener:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for peer in self.peers:
            peer.close()
        if self._thread:
            self._thread.join(5)

    def plugin(self, number: int = 1, timeout: float = 10.0) -> Peer:
        """The n-th plugin connection that finished its handshake; waits for it."""
        with self._changed:
            ok = self._changed.wait_for(lambda: len(self._ready()) >= number, timeout)
        assert ok, f"no plugin within {timeout} s; {self.errors}"
        return self._ready()[number - 1]

    def wait_accepted(self, number: int, timeout: float = 10.0) -> None:
        """Wait until so many connections have been accepted."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.accepted >= number, timeout), self.accepted

    def _ready(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.ready.is_set()]

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            peer = Peer(sock)
            with self._changed:
                self.accepted += 1
                self.peers.append(peer)
                self._changed.notify_all()
            fault = self._faults.pop(0) if self._faults else ""
            try:
                self._handshake(peer, fault)
            except ConnectionLost as error:
                self.errors.append(str(error))
                peer.close()
            with self._changed:
                self._changed.notify_all()

    def _handshake(self, peer: Peer, fault: str) -> None:
        if fault == "close at accept":
            return peer.close()
        if fault == "silence":
            return None
        if fault == "garbage":
            return peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        stream, envelope = peer.read_request()
        assert (envelope.service, envelope.method) == (RUNTIME_SERVICE, "RegisterPlugin")
        register = M["Register"].FromString(envelope.payload)
        peer.registered_as = (register.plugin_name, register.plugin_idx, register.nri_version)
        if fault == "close after RegisterPlugin":
            return peer.close()
        if fault == "refuse":
            return peer.send(response(stream, code=2, text="invalid plugin \x1b[31mname"))
        pending = peer.start("Configure", configure(self.habits)) if self.configure_first else 0
        peer.send(response(stream))
        if fault == "close after registered":
            return peer.close()
        if fault == "silence after registered":
            return None
        reply = peer.finish(pending or peer.start("Configure", configure(self.habits)))
        assert reply.code == 0, reply
        peer.events = M["ConfigureReply"].FromString(reply.payload).events
        if fault == "close after Configure":
            return peer.close()
        if fault == "silence after Configure":
            return None
        for number, (pods, containers) in enumerate(self.listed, 1):
            more = number < len(self.listed)
            part = M["Synchronize"](pods=pods, containers=containers, more=more)
            if fault == "close after part of Synchronize":
                part.more = True
            reply = peer.call("Synchronize", part.SerializeToString(), timeout=self.synchronize_timeout)
            answer = M["SynchronizeReply"].FromString(reply.payload)
            assert (reply.code, answer.more, len(answer.update)) == (0, part.more, 0), reply
            if fault == "close after part of Synchronize":
                return peer.close()
        peer.ready.set()
        return None


def wait_until(condition: Callable[[], object], what: str, timeout: float = 10.0) -> None:
    """Wait for a condition with a deadline. Raises AssertionError naming `what`."""
    end = time.monotonic() + timeout
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        pause.wait(0.002)
