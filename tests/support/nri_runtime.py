"""The runtime's side of NRI for tests: a socket, a handshake, and faults that no real one shows on demand.

An independent judge: it shares no protocol code with the product, only the builder of message classes.
It reads as Go's ttrpc does under Go's multiplexer, so a frame that would kill a real connection kills this
one (docs/facts.md#nri-frames). It has the habits of whichever NRI version it is told to be, and drops
a plugin for the reasons for which that version does.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import select
import signal
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from cdi_courier.descriptors import message_classes

from .waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

PLUGIN_SERVICE = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Runtime"
GO_BUFFER = 4096
GO_QUEUE = 256
GO_MAX_DATA = 4_194_304
OLD_FRAME_LIMIT = 1 << 24
"""Largest frame that Go's multiplexer sends before NRI 0.7 (docs/facts.md#nri-frames)."""

PATIENCE = 10.0
"""Seconds after which a test that waits for an answer fails; no runtime's deadline."""

CREATE_CONTAINER_BIT = 0x0008
_LAUNCH_INDEX = "10"

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
        "Int": "1 value int64",
        "Unsigned": "1 value uint32",
        "Bool": "1 value bool",
        "Text": "1 value string",
        "Texts": "1 value string*",
        "Pod": """1 id string, 2 name string, 3 uid string, 4 namespace string, 5 labels map<string,string>,
            6 annotations map<string,string>, 7 runtime_handler string, 9 pid uint32, 10 ips string*""",
        "Mount": "1 destination string, 2 type string, 3 source string, 4 options string*",
        "Device": """1 path string, 2 type string, 3 major int64, 4 minor int64, 5 file_mode Unsigned,
            6 uid Unsigned, 7 gid Unsigned""",
        "CgroupRule": "1 allow bool, 2 type string, 3 major Int, 4 minor Int, 5 access string",
        "Hook": "1 path string, 2 args string*, 3 env string*, 4 timeout Int",
        "Hooks": """1 prestart Hook*, 2 create_runtime Hook*, 3 create_container Hook*,
            4 start_container Hook*, 5 poststart Hook*, 6 poststop Hook*""",
        "Rlimit": "1 type string, 2 hard uint64, 3 soft uint64",
        "User": "1 uid uint32, 2 gid uint32, 3 additional_gids uint32*",
        "NetDevice": "1 name string",
        "Rdt": "1 clos_id Text, 2 schemata Texts, 3 enable_monitoring Bool, 4 remove bool",
        "Memory": "1 limit Int, 2 reservation Int, 3 swap Int",
        "Cpu": "1 shares Int, 2 quota Int, 3 period Int, 6 cpus string, 7 mems string",
        "Hugepages": "1 page_size string, 2 limit uint64",
        "Pids": "1 limit int64",
        "Resources": """1 memory Memory, 2 cpu Cpu, 3 hugepage_limits Hugepages*,
            6 unified map<string,string>, 7 devices CgroupRule*, 8 pids Pids""",
        "Namespace": "1 type string, 2 path string",
        "Linux": """1 namespaces Namespace*, 2 devices Device*, 3 resources Resources, 4 oom_score_adj Int,
            5 cgroups_path string, 9 sysctl map<string,string>, 10 net_devices map<string,NetDevice>,
            12 rdt Rdt""",
        "Cdi": "1 name string",
        "Container": """1 id string, 2 pod_sandbox_id string, 3 name string, 4 state int32,
            5 labels map<string,string>, 6 annotations map<string,string>, 7 args string*, 8 env string*,
            9 mounts Mount*, 10 hooks Hooks, 11 linux Linux, 12 pid uint32, 13 rlimits Rlimit*,
            20 cdi_devices Cdi*, 21 user User""",
        "Synchronize": "1 pods Pod*, 2 containers Container*, 3 more bool",
        "SynchronizeReply": "1 update Pair*, 2 more bool",
        "Create": "1 pod Pod, 2 container Container",
        "LinuxAdjustment": """1 devices Device*, 2 resources Resources, 3 cgroups_path string,
            4 oom_score_adj Int, 7 namespaces Namespace*, 8 sysctl map<string,string>,
            9 net_devices map<string,NetDevice>, 11 rdt Rdt""",
        "Adjustment": """2 annotations map<string,string>, 3 mounts Mount*, 4 env Pair*, 5 hooks Hooks,
            6 linux LinuxAdjustment, 7 rlimits Rlimit*, 8 cdi_devices Cdi*, 9 args string*""",
        "CreateReply": "1 adjust Adjustment",
        "StateChange": "1 event int32, 2 pod Pod, 3 container Container",
    },
)


@dataclass(frozen=True)
class Habits:
    """A runtime with an NRI version, and what tells that version from others on the wire.

    nri: the version of the library; runtime_name, runtime_version: as sent in Configure.
    registration_timeout, request_timeout: seconds; whether they are told is the version's habit.
    Source: docs/facts.md#nri-in-runtimes.
    """

    nri: tuple[int, int, int]
    runtime_name: str
    runtime_version: str
    registration_timeout: float = 5.0
    request_timeout: float = 2.0

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.nri))} in {self.runtime_name} {self.runtime_version}"

    @property
    def told_registration_timeout_ms(self) -> int:
        return round(self.registration_timeout * 1000) if self.nri >= (0, 7, 0) else 0

    @property
    def told_request_timeout_ms(self) -> int:
        return round(self.request_timeout * 1000) if self.nri >= (0, 7, 0) else 0

    @property
    def told_version(self) -> str:
        return "v" + ".".join(map(str, self.nri)) if self.nri >= (0, 12, 0) else ""

    @property
    def splits_synchronize(self) -> bool:
        """Since 0.7; before, one message of up to 16 MiB, and of a larger one only the beginning.

        Source: docs/facts.md#nri-synchronize.
        """
        return self.nri >= (0, 7, 0)

    @property
    def synchronizes_launched(self) -> bool:
        """Since 0.7 a plugin that the runtime launched is synchronized, too.

        Source: docs/facts.md#nri-launched-plugins.
        """
        return self.nri >= (0, 7, 0)

    @property
    def forgets(self) -> bool:
        """Before 0.7, a failed Synchronize leaves the plugin connected and never called again.

        Source: docs/facts.md#nri-handshake.
        """
        return self.nri < (0, 7, 0)

    @property
    def dedicated_calls(self) -> bool:
        """Since 0.12, events have calls of their own; StateChange is what code 12 falls back to.

        Source: docs/facts.md#nri-methods.
        """
        return self.nri >= (0, 12, 0)

    @property
    def strict_names(self) -> bool:
        """Since 0.12, a plugin's name is made of `[A-Za-z0-9_.+-]` (docs/facts.md#nri-plugin-names)."""
        return self.nri >= (0, 12, 0)

    @property
    def events(self) -> int:
        """The bits of all events it knows. Others are refused; none means all (docs/facts.md#nri-events)."""
        return 0x3FFF if self.nri >= (0, 10, 0) else 0x07FF

    def launched_name(self, index: str, name: str) -> str:
        """NRI_PLUGIN_NAME of a launched plugin: with its index before 0.4.

        Source: docs/facts.md#nri-launched-plugins.
        """
        return name if self.nri >= (0, 4, 0) else f"{index}-{name}"


NRI_0_2 = Habits((0, 2, 0), "cri-o", "1.26.1", registration_timeout=2.0)
NRI_0_3 = Habits((0, 3, 0), "containerd", "v1.7.0")
NRI_0_4 = Habits((0, 4, 0), "containerd", "v1.7.7")
NRI_0_5 = Habits((0, 5, 0), "cri-o", "1.29.0")
NRI_0_6 = Habits((0, 6, 1), "containerd", "1.7.24")
NRI_0_7 = Habits((0, 7, 0), "unheard-of", "")  # no release of a runtime is known to hold it
NRI_0_8 = Habits((0, 8, 0), "containerd", "v2.1.0")
NRI_0_8_V2 = Habits((0, 8, 0), "v2", "v2.0.0")  # the name that containerd 2.0.0-2.0.3 gives itself
NRI_0_8_OLD = Habits((0, 8, 0), "containerd", "1.7.34+unknown")
NRI_0_9 = Habits((0, 9, 0), "cri-o", "1.32.0")
NRI_0_10 = Habits((0, 10, 0), "containerd", "v2.2.0")
NRI_0_11 = Habits((0, 11, 0), "cri-o", "1.36.0")
NRI_0_12 = Habits((0, 12, 0), "containerd", "v2.3.0")

VERSIONS = (
    NRI_0_2,
    NRI_0_3,
    NRI_0_4,
    NRI_0_5,
    NRI_0_6,
    NRI_0_7,
    NRI_0_8,
    NRI_0_8_V2,
    NRI_0_8_OLD,
    NRI_0_9,
    NRI_0_10,
    NRI_0_11,
    NRI_0_12,
)
"""All of them, for tests that hold whatever the version."""

EVENTS = {
    "RunPodSandbox": 1,
    "StopPodSandbox": 2,
    "RemovePodSandbox": 3,
    "PostCreateContainer": 5,
    "StartContainer": 6,
    "PostStartContainer": 7,
    "PostUpdateContainer": 9,
    "RemoveContainer": 11,
    "PostUpdatePodSandbox": 13,
}
"""Events that StateChange carries, and since 0.12 calls of these names (docs/facts.md#nri-methods,
#nri-events)."""


class ConnectionLost(Exception):  # noqa: N818 - says what happened
    """The plugin closed the connection, or broke a rule that makes Go close it; the text says which."""


class DeadlineExceeded(ConnectionLost):
    """The plugin did not answer in time. The connection is still open; to close it is the runtime's part."""


class TooLargeToSend(Exception):  # noqa: N818 - says what happened
    """The runtime's own library did not send a request, or only its first 4096 bytes."""


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


@dataclass(frozen=True)
class Creation:
    """What became of a container. error: why it was not created, else empty.

    adjustments: of the plugins in the order in which they were asked. dropped: the plugins that it was
    created without, since they did not answer in time or properly.
    """

    error: str
    adjustments: list[Any]
    dropped: list[str]


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


def _envelope(
    method: str,
    payload: bytes = b"",
    *,
    timeout: float = 2.0,
    service: str = PLUGIN_SERVICE,
    metadata: dict[str, str] | None = None,
) -> bytes:
    envelope = M["Request"](service=service, method=method, payload=payload, timeout_nano=int(timeout * 1e9))
    for key, value in (metadata or {}).items():
        envelope.metadata.add(key=key, value=value)
    data: bytes = envelope.SerializeToString()
    return data


def request(stream: int, method: str, payload: bytes = b"", **more: Any) -> bytes:
    """A request of the runtime on connection 1, in frames. more: timeout, service, metadata."""
    return go_frames(1, message(stream, 1, _envelope(method, payload, **more)))


def response(stream: int, payload: bytes = b"", *, code: int = 0, text: str = "") -> bytes:
    """A response of the runtime on connection 2, in frames."""
    envelope = M["Response"](payload=payload)
    if code:
        envelope.status.code, envelope.status.message = code, text
    return go_frames(2, message(stream, 2, envelope.SerializeToString()))


def configure(habits: Habits = NRI_0_12, config: str = "") -> bytes:
    """The payload of Configure. config: only launched plugins get one.

    Source: docs/facts.md#nri-launched-plugins.
    """
    payload: bytes = M["Configure"](
        config=config,
        runtime_name=habits.runtime_name,
        runtime_version=habits.runtime_version,
        registration_timeout=habits.told_registration_timeout_ms,
        request_timeout=habits.told_request_timeout_ms,
        nri_version=habits.told_version,
    ).SerializeToString()
    return payload


def create(name: str = "c0", of: str = "pod0", **annotations: str) -> bytes:
    """The payload of CreateContainer for a container of that name."""
    payload: bytes = M["Create"](
        pod=pod(of), container=container(name, of, **annotations)
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
    c.hooks.SetInParent()
    c.linux.namespaces.add(type="pid")
    null = c.linux.devices.add(path="/dev/null", type="c", major=1, minor=3)
    null.file_mode.value = 0o666
    c.linux.resources.devices.add(allow=False, access="rwm")
    return c


class GoReader:
    """Go's ttrpc channel over one logical connection: a bufio.Reader of 4096 bytes over a frame a read."""

    def __init__(self, frames: Callable[[], bytes]) -> None:
        self._frames = frames
        self._buffer = b""

    @property
    def empty(self) -> bool:
        """Whether every byte of the frames read so far belonged to a message read so far."""
        return not self._buffer

    def read_message(self) -> tuple[int, int, bytes]:
        """(stream, type, data) of the next message. Raises ConnectionLost where Go would fail."""
        size, stream, kind, _ = struct.unpack(">IIBB", self._read_full(10))
        if size > GO_MAX_DATA:
            # Go discards the data through the same buffer, which the second frame does not fit into
            # (docs/facts.md#ttrpc-size-limit).
            raise ConnectionLost(f"message of {size} bytes")
        return stream, kind, self._read_full(size)

    def _read_full(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            if not self._buffer:
                room = size if size >= GO_BUFFER else GO_BUFFER
                data = self._frames()
                if not data:
                    raise ConnectionLost("an empty frame, which is an empty read for Go")
                if len(data) > room:
                    raise ConnectionLost(
                        f"frame of {len(data)} bytes into a buffer of {room}: cannot allocate memory"
                    )
                self._buffer = data
            part, self._buffer = self._buffer[:size], self._buffer[size:]
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def go_messages(sent: bytes) -> list[tuple[int, int, int, bytes]]:
    """(conn, stream, type, data) of each message in bytes that a plugin sent, read as Go reads them.

    Raises ConnectionLost where Go would fail, and at an incomplete frame or message.
    """
    queues: dict[int, list[bytes]] = {1: [], 2: []}
    offset = 0
    while offset < len(sent):
        if len(sent) - offset < 8:
            raise ConnectionLost("half a frame header")
        conn, size = struct.unpack_from(">II", sent, offset)
        offset += 8 + size
        if offset > len(sent) or conn not in queues:
            raise ConnectionLost(f"half a frame, or one for nobody: connection {conn}, {size} bytes")
        queues[conn].append(sent[offset - size : offset])
    found = []
    for conn, frames in queues.items():
        reader = GoReader(partial(_first, frames))
        while frames or not reader.empty:
            found.append((conn, *reader.read_message()))
    return found


def _first(frames: list[bytes]) -> bytes:
    if not frames:
        raise ConnectionLost("half a message")
    return frames.pop(0)


class Peer:
    """One connected plugin, seen from the runtime."""

    def __init__(self, sock: socket.socket, habits: Habits = NRI_0_12, pid: int = 0) -> None:
        self.sock = sock
        self.habits = habits
        self.lost = threading.Event()
        self.ready = threading.Event()
        """Set once the handshake is over and the plugin is in the runtime's list."""
        self.forgotten = threading.Event()
        """Set if the plugin stays connected and is never called again: a failed Synchronize before 0.7."""
        self.events = 0
        self.registered_as = ("", "", "")
        self.register_stream = 0
        self.pid = pid
        """Process id of a launched plugin, else 0."""
        self.received = 0
        """Bytes read from the plugin so far."""
        self._why = ""
        self._queues: dict[int, queue.Queue[bytes | None]] = {1: queue.Queue(), 2: queue.Queue()}
        self._until = {1: 0.0, 2: 0.0}
        self._readers = {conn: GoReader(partial(self._next_frame, conn)) for conn in self._queues}
        self._stream = -1
        self._lock = threading.Lock()
        self._answers: dict[int, Reply] = {}
        self._answered: set[int] = set()
        self._reading = threading.Event()
        self._reading.set()
        self._process = os.pidfd_open(pid) if pid else None
        self._thread = threading.Thread(target=self._demultiplex, daemon=True)
        self._thread.start()

    @property
    def active(self) -> bool:
        """Whether the plugin is in the runtime's list."""
        return self.ready.is_set() and not self.lost.is_set()

    def read_request(self, within: float = PATIENCE) -> tuple[int, Any]:
        """(stream, envelope) of the plugin's next request on connection 2."""
        stream, kind, data = self._read(2, within)
        if kind != 1:
            raise ConnectionLost(f"a message of type {kind} on connection 2")
        return stream, M["Request"].FromString(data)

    def send(self, data: bytes) -> None:
        """Write raw bytes. A dead connection raises ConnectionLost."""
        try:
            self.sock.sendall(data)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def start(self, method: str, payload: bytes = b"", **more: Any) -> int:
        """Send a request; return its stream for `finish`. more: timeout, service, metadata.

        Raises TooLargeToSend where the version's library does; the stream id is gone then
        (docs/facts.md#ttrpc-streams, #ttrpc-size-limit).
        """
        self._stream += 2
        data = _envelope(method, payload, **more)
        if self.habits.nri >= (0, 7, 0) and len(data) > GO_MAX_DATA:
            raise TooLargeToSend(f"message of {len(data)} bytes")
        whole = message(self._stream, 1, data)
        if len(whole) - GO_BUFFER > OLD_FRAME_LIMIT:
            self.send(frame(1, whole[:GO_BUFFER]))
            raise TooLargeToSend("message too long")
        self.send(go_frames(1, whole))
        return self._stream

    def skip_streams(self, count: int) -> None:
        """Let stream ids go unused, as the runtime does with requests that it does not send."""
        self._stream += 2 * count

    def finish(self, stream: int, within: float = PATIENCE) -> Reply:
        """Wait for the answer of a stream, `within` seconds. Answers of others are kept."""
        while stream not in self._answers:
            got, kind, data = self._read(1, within)
            if kind != 2 or got in self._answered:
                raise ConnectionLost(f"a message of type {kind} on connection 1, stream {got}")
            envelope = M["Response"].FromString(data)
            self._answered.add(got)
            self._answers[got] = Reply(envelope.status.code, envelope.status.message, envelope.payload)
        return self._answers.pop(stream)

    def call(self, method: str, payload: bytes = b"", *, within: float = PATIENCE, **more: Any) -> Reply:
        """Send a request and wait for its answer. within: the runtime's own deadline in seconds."""
        with self._lock:
            return self.finish(self.start(method, payload, **more), within)

    def create_container(self, pod: Any, container: Any, **more: Any) -> Reply:
        """Ask this plugin about a new container, without the runtime's deadline."""
        return self.call(
            "CreateContainer", M["Create"](pod=pod, container=container).SerializeToString(), **more
        )

    def announce(self, event: str, pod: Any, container: Any = None) -> list[Reply]:
        """Tell an event (a key of EVENTS) as this version does; the answers, in order.

        Since 0.12 by a call of its own, and by StateChange if that is unimplemented
        (docs/facts.md#nri-methods).
        """
        replies = []
        if self.habits.dedicated_calls:
            payload = M["Create"](pod=pod, container=container)
            replies.append(self.call(event, payload.SerializeToString()))
            if replies[0].code != 12:
                return replies
        payload = M["StateChange"](event=EVENTS[event], pod=pod, container=container)
        return [*replies, self.call("StateChange", payload.SerializeToString())]

    def pause(self) -> None:
        """Stop reading the socket: a runtime that hangs. What is being read is still read."""
        self._reading.clear()

    def resume(self) -> None:
        """Read the socket again."""
        self._reading.set()

    def close(self) -> None:
        """Close the connection, as a runtime does that drops a plugin or stops."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self._reading.set()

    def drop(self) -> None:
        """Close the connection and kill the process if the runtime has launched it.

        Source: docs/facts.md#nri-launched-plugins.
        """
        self.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            self.exit_status()

    def exit_status(self, within: float = PATIENCE) -> int:
        """Wait until a launched plugin has ended; its status, negative for a signal."""
        assert self._process is not None
        poller = select.poll()
        poller.register(self._process, select.POLLIN)
        assert poller.poll(within * 1000), f"process {self.pid} has not ended within {within} s"
        _, status = os.waitpid(self.pid, 0)
        os.close(self._process)
        self._process = None
        return os.waitstatus_to_exitcode(status)

    def join(self) -> None:
        """Wait until nothing of this connection is left: after `close`."""
        self._thread.join(PATIENCE)

    def _read(self, conn: int, within: float) -> tuple[int, int, bytes]:
        self._until[conn] = time.monotonic() + within
        try:
            return self._readers[conn].read_message()
        except DeadlineExceeded:
            raise
        except ConnectionLost:
            self.close()
            raise

    def _next_frame(self, conn: int) -> bytes:
        left = self._until[conn] - time.monotonic()
        if left <= 0:
            # Whoever looks too late does not find what came in time, either.
            raise DeadlineExceeded("deadline exceeded")
        try:
            data = self._queues[conn].get(timeout=left)
        except queue.Empty:
            raise DeadlineExceeded("deadline exceeded") from None
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
            self._reading.wait()
            part = self.sock.recv(min(size - len(data), 1 << 20))
            if not part:
                raise ConnectionLost("the plugin closed the connection")
            data += part
            self.received += len(part)
        return bytes(data)


STAGES = ("accepted", "registering", "registered", "configured", "synchronizing", "active")
"""How far a connection has come when a fault can happen to it.

registering: RegisterPlugin has been read and not answered. registered, configured: the call of that name is
over. synchronizing: a first part of the list has been answered. active: the handshake is over.
"""


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one connection: at `stage`, `act` happens to the plugin, and then nothing."""

    stage: str
    act: Callable[[Peer], object]
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.stage}"


def closes(peer: Peer) -> None:
    """Close the connection."""
    peer.close()


def falls_silent(peer: Peer) -> None:
    """Say nothing more and stay connected."""


def sends(data: bytes) -> Callable[[Peer], None]:
    """Send bytes, whatever they are, and stay connected."""
    return lambda peer: peer.send(data)


def dies_after(data: bytes) -> Callable[[Peer], None]:
    """Send bytes and close."""

    def act(peer: Peer) -> None:
        peer.send(data)
        peer.close()

    return act


def refuses(peer: Peer) -> None:
    """Answer RegisterPlugin with an error and leave the connection open, as Go does.

    Source: docs/facts.md#nri-handshake.
    """
    peer.send(response(peer.register_stream, code=2, text="invalid plugin \x1b[31mname"))


GARBAGE = b"HTTP/1.1 400 Bad Request\r\n\r\n"
HALF_A_FRAME = frame(1, message(9, 1, b"x" * 100))[:50]

FAULTS = (
    *(Fault(stage, closes, "closes") for stage in STAGES),
    *(Fault(stage, falls_silent, "silent") for stage in STAGES[:-1]),
    *(Fault(stage, sends(GARBAGE), "garbage") for stage in STAGES),
    *(Fault(stage, dies_after(HALF_A_FRAME), "dies in a frame") for stage in STAGES),
    *(Fault(stage, sends(HALF_A_FRAME), "stops in a frame") for stage in STAGES[:-1]),
    Fault("registering", refuses, "refuses"),
)
"""What is wrong at every stage where it is wrong; to be silent in an active session is no fault."""


class _HandshakeEnds(Exception):  # noqa: N818 - says what happened
    """A fault has been done; nothing more happens on this connection."""


@dataclass
class NriRuntime:
    """A runtime on a unix socket. As a context manager it listens; `plugin` waits for a connected plugin.

    faults: what goes wrong, one for each connection in turn; later connections are healthy.
    configure_first: send Configure before the reply to RegisterPlugin, as runtimes often do.
    listed: (pods, containers) of each message of Synchronize. What is too large for one message is split
        further where the version does so.
    synchronize_timeout: seconds for all parts together; None: the request timeout, as in every version.
    """

    path: str
    habits: Habits = NRI_0_12
    faults: Iterable[Fault] = ()
    configure_first: bool = False
    listed: list[tuple[list[Any], list[Any]]] = field(default_factory=lambda: [([], [])])
    synchronize_timeout: float | None = None

    def __post_init__(self) -> None:
        self.peers: list[Peer] = []
        self.accepted = 0
        self.errors: list[str] = []
        """Why connections ended before they were active, except by faults that were asked for."""
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
        """Close everything, end launched plugins and remove the socket."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        if self._listener:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for peer in self.peers:
            peer.drop()
        if self._thread:
            self._thread.join(PATIENCE)
        for peer in self.peers:
            peer.drop()
            peer.join()

    def launch(self, argv: list[str], *, name: str = "plugin", config: str = "") -> Peer:
        """Start a plugin as the runtime does with what lies in its plugin directory, and shake hands.

        It gets one end of a socket pair as descriptor 3, an environment of exactly three variables, and
        nothing behind its standard streams (docs/facts.md#nri-launched-plugins). Raises ConnectionLost if the
        handshake fails.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            pid = os.posix_spawn(
                argv[0],
                argv,
                {
                    "NRI_PLUGIN_NAME": self.habits.launched_name(_LAUNCH_INDEX, name),
                    "NRI_PLUGIN_IDX": _LAUNCH_INDEX,
                    "NRI_PLUGIN_SOCKET": "3",
                },
                file_actions=[
                    # First, because the pair may have any numbers, those of the standard streams included.
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3),
                    *((os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)),
                ],
            )
        peer = Peer(ours, self.habits, pid)
        self.peers.append(peer)
        try:
            self._handshake(peer, self._next_fault(), launched=(name, _LAUNCH_INDEX), config=config)
        except ConnectionLost:
            peer.drop()
            raise
        return peer

    def create_container(self, pod: Any, container: Any, *, timeout: float | None = None) -> Creation:
        """Create a container as the runtime does: ask every active plugin, by index, and merge.

        A plugin that does not answer within `timeout` seconds (None: the request timeout) or breaks the
        protocol is dropped, and the container is created without it. An error status or two claims on one
        item fail the container.
        Source: docs/facts.md#nri-ownership, #nri-failures.
        """
        timeout = self.habits.request_timeout if timeout is None else timeout
        payload = M["Create"](pod=pod, container=container).SerializeToString()
        claims: dict[str, str] = {}
        creation = Creation("", [], [])
        for peer in sorted(self.active(), key=lambda peer: peer.registered_as[1]):
            if not peer.events & CREATE_CONTAINER_BIT:
                continue
            name = "-".join(peer.registered_as[1::-1])
            try:
                reply = peer.call("CreateContainer", payload, timeout=timeout, within=timeout)
            except ConnectionLost:
                peer.drop()
                creation.dropped.append(name)
                continue
            if reply.code:
                return Creation(reply.message, [], creation.dropped)
            for claim in _claims(reply.adjust):
                if claim in claims:
                    error = f'plugins "{claims[claim]}" and "{name}" both tried to set {claim}'
                    return Creation(error, [], creation.dropped)
                claims[claim] = name
            creation.adjustments.append(reply.adjust)
        return creation

    def active(self) -> list[Peer]:
        """The plugins in the runtime's list, by the order in which they came."""
        return [peer for peer in self.peers if peer.active]

    def plugin(self, number: int = 1) -> Peer:
        """The n-th plugin connection that finished its handshake; waits for it."""
        with self._changed:
            ok = self._changed.wait_for(lambda: len(self._ready()) >= number, PATIENCE)
        assert ok, f"no plugin within {PATIENCE} s; {self.errors}"
        return self._ready()[number - 1]

    def wait_accepted(self, number: int) -> None:
        """Wait until so many connections have been accepted."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.accepted >= number, PATIENCE), self.accepted

    def _ready(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.ready.is_set()]

    def _accept(self, listener: socket.socket) -> None:
        # One plugin at a time: the next is accepted when this one's handshake is over
        # (docs/facts.md#nri-socket).
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            peer = Peer(sock, self.habits)
            with self._changed:
                self.accepted += 1
                self.peers.append(peer)
                self._changed.notify_all()
            try:
                self._handshake(peer, self._next_fault())
            except ConnectionLost as error:
                self.errors.append(str(error))
                if not peer.forgotten.is_set():
                    peer.close()
            with self._changed:
                self._changed.notify_all()

    def _next_fault(self) -> Fault:
        return self._faults.pop(0) if self._faults else Fault("", falls_silent)

    def _handshake(
        self, peer: Peer, fault: Fault, launched: tuple[str, str] | None = None, config: str = ""
    ) -> None:
        """Do the handshake up to the fault's stage. Raises ConnectionLost if the plugin fails it."""
        with contextlib.suppress(_HandshakeEnds):
            for stage in self._stages(peer, launched, config):
                if stage == fault.stage:
                    with contextlib.suppress(ConnectionLost):
                        fault.act(peer)
                    raise _HandshakeEnds

    def _stages(self, peer: Peer, launched: tuple[str, str] | None, config: str) -> Iterator[str]:
        habits, timeout = self.habits, self.habits.request_timeout
        yield "accepted"
        stream, envelope = peer.read_request(habits.registration_timeout)
        if (envelope.service, envelope.method) != (RUNTIME_SERVICE, "RegisterPlugin"):
            raise ConnectionLost(f"{envelope.service}/{envelope.method} instead of RegisterPlugin")
        register = M["Register"].FromString(envelope.payload)
        name, index = launched or (register.plugin_name, register.plugin_idx)
        peer.registered_as = (name, index, register.nri_version)
        peer.register_stream = stream
        yield "registering"
        if trouble := _bad_name(name, index, strict=habits.strict_names):
            # The connection stays open and is forgotten (docs/facts.md#nri-handshake).
            self.errors.append(trouble)
            peer.send(response(stream, code=2, text=trouble))
            raise _HandshakeEnds
        pending = peer.start("Configure", configure(habits, config)) if self.configure_first else 0
        peer.send(response(stream))
        yield "registered"
        pending = pending or peer.start("Configure", configure(habits, config), timeout=timeout)
        reply = peer.finish(pending, timeout)
        events = M["ConfigureReply"].FromString(reply.payload).events
        if reply.code or events & ~habits.events:
            raise ConnectionLost(reply.message or f"invalid plugin events: {events:#x}")
        peer.events = events or habits.events
        yield "configured"
        if not launched or habits.synchronizes_launched:
            try:
                yield from self._synchronize(peer)
            except (ConnectionLost, TooLargeToSend) as error:
                if habits.forgets and isinstance(error, DeadlineExceeded | TooLargeToSend):
                    peer.forgotten.set()
                raise ConnectionLost(f"failed to synchronize: {error}") from error
        peer.ready.set()
        yield "active"

    def _synchronize(self, peer: Peer) -> Iterator[str]:
        timeout = self.synchronize_timeout
        end = time.monotonic() + (self.habits.request_timeout if timeout is None else timeout)
        waiting = [(pods, containers, True) for pods, containers in self.listed]
        waiting[-1] = (*waiting[-1][:2], False)
        while waiting:
            pods, containers, more = waiting.pop(0)
            part = M["Synchronize"](pods=pods, containers=containers, more=more)
            left = max(end - time.monotonic(), 1e-9)
            try:
                stream = peer.start("Synchronize", part.SerializeToString(), timeout=left)
            except TooLargeToSend:
                if not self.habits.splits_synchronize:
                    raise
                p, c = (len(pods) + 1) // 2, (len(containers) + 1) // 2
                waiting[:0] = [(pods[:p], containers[:c], True), (pods[p:], containers[c:], more)]
                continue
            reply = peer.finish(stream, left)
            answer = M["SynchronizeReply"].FromString(reply.payload)
            if reply.code:
                raise ConnectionLost(reply.message)
            if more and (not answer.more or answer.update):
                raise ConnectionLost("plugin does not handle split sync requests")
            yield "synchronizing"


def _bad_name(name: str, index: str, *, strict: bool) -> str:
    """Why a runtime refuses a plugin of that name and index; empty if it does not.

    Source: docs/facts.md#nri-plugin-names.
    """
    if not re.fullmatch("[0-9]{2}", index):
        return f"invalid plugin index {index!r}"
    if not name or (strict and not re.fullmatch("[A-Za-z0-9_.+-]+", name)):
        return f"invalid plugin name {name!r}"
    return ""


def _claims(adjust: Any) -> list[str]:
    """The items of an adjustment that no other may set, one of its own items included.

    Source: docs/facts.md#nri-ownership.
    """
    return [
        *(f"Annotations {key}" for key in adjust.annotations),
        *(f"Mounts {mount.destination}" for mount in adjust.mounts),
        *(f"Env {pair.key}" for pair in adjust.env),
        *(f"Devices {device.path}" for device in adjust.linux.devices),
        *(f"CdiDevices {device.name}" for device in adjust.cdi_devices),
        *(f"Rlimits {limit.type}" for limit in adjust.rlimits),
        *(f"Sysctl {key}" for key in adjust.linux.sysctl),
        *(f"LinuxNetDevices {key}" for key in adjust.linux.net_devices),
    ]


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition, looking often. Raises WaitTimeoutError naming `what`."""
    wait_for(condition, PATIENCE, what, pause=0.002)
