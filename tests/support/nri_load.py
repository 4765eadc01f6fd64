"""The runtime's side of NRI under load: calls several plugins in turn and times them, in its own process.

``python -m support.nri_load [--cpu N] NAME=SOCKET…`` listens on all sockets and says so in one line. Then
each line of its input is a JSON object ``{"do": METHOD, "arguments": […], "more": {…}}`` that calls a method
of `Load`, and is answered by one line, ``{"result": …}`` or ``{"error": TEXT}``. `LoadProcess` is the other
end.

A plugin's time is that from before a request is written until its answer has been read whole. The driver must
not know which plugin is which, or what a good time is. For faults and the protocol's rules there is
`nri_runtime`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from time import clock_gettime_ns, perf_counter_ns, sleep
from typing import Any

from cdi_courier.descriptors import message_classes

from support import nri_runtime
from support.nri_runtime import GO_MAX_DATA, NRI_0_12, M

RECEIVE_SIZE = 65536
ANSWER_TIMEOUT = 10.0
"""Seconds until a plugin that says nothing has failed. Long, because a slow one shall be measured."""

REQUEST_TIMEOUT = 2.0
"""Seconds; the runtimes' default. All parts of a Synchronize have it together
(docs/facts.md#nri-synchronize)."""

_STREAM = 12
"""Where a message's stream id stands behind the header of its first frame (docs/facts.md#nri-frames,
#ttrpc-messages)."""

_ENVELOPE_ROOM = 4096
"""Bytes of a message kept free for the envelope around its payload."""

_ANSWER = message_classes(
    "load.answer",
    {
        "Reply": "1 adjust Adjustment",
        "Adjustment": "3 mounts Named*, 4 env Named*, 6 linux Linux, 8 cdi_devices Named*",
        "Linux": "1 devices Named*",
        "Named": "1 name string",
    },
)["Reply"]


class LoadError(Exception):
    """A plugin did not connect, did not answer, or answered something else than was expected."""


# --- what is said --------------------------------------------------------------------------------------


def realistic_pod(number: int = 0, annotations: Mapping[str, str] | None = None) -> Any:
    """A pod as kubelet makes it, 1 to 2 kB."""
    uid = f"{number:08x}-5c1e-4f0a-9d3b-0f6a6c1d2e3f"
    name = f"trainer-{number:05}-7d9c6b5f4-x2x{number % 97:02}"
    pod = M["Pod"](id=f"{number:064x}", name=name, uid=uid, namespace="gpu-operator", pid=4000 + number)
    pod.labels.update(
        {
            "app.kubernetes.io/name": "trainer",
            "app.kubernetes.io/instance": f"trainer-{number}",
            "app.kubernetes.io/managed-by": "Helm",
            "pod-template-hash": "7d9c6b5f4",
            "io.kubernetes.pod.name": name,
            "io.kubernetes.pod.namespace": "gpu-operator",
            "io.kubernetes.pod.uid": uid,
        }
    )
    pod.annotations.update(
        {
            "kubernetes.io/config.seen": "2026-02-11T09:31:07.123456789Z",
            "kubernetes.io/config.source": "api",
            "cni.projectcalico.org/podIP": "10.244.3.17/32",
            "cni.projectcalico.org/containerID": f"{number:064x}",
            "prometheus.io/scrape": "true",
            "prometheus.io/port": "9400",
            "checksum/config": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        }
    )
    pod.annotations.update(annotations or {})
    pod.ips.append("10.244.3.17")
    return pod


def realistic_container(number: int = 0, name: str = "trainer") -> Any:
    """A container of that pod with 20 variables, 15 mounts and 6 namespaces, about 4 kB."""
    uid = f"{number:08x}-5c1e-4f0a-9d3b-0f6a6c1d2e3f"
    c = M["Container"](id=f"{number + (1 << 200):064x}", pod_sandbox_id=f"{number:064x}", name=name, state=3)
    c.labels.update(
        {
            "io.kubernetes.container.name": name,
            "io.kubernetes.pod.name": f"trainer-{number:05}-7d9c6b5f4-x2x{number % 97:02}",
            "io.kubernetes.pod.namespace": "gpu-operator",
            "io.kubernetes.pod.uid": uid,
        }
    )
    c.annotations.update(
        {
            "io.kubernetes.container.hash": "8a3c1f07",
            "io.kubernetes.container.restartCount": "0",
            "io.kubernetes.container.terminationMessagePath": "/dev/termination-log",
            "io.kubernetes.container.terminationMessagePolicy": "File",
            "io.kubernetes.pod.terminationGracePeriod": "30",
        }
    )
    c.args.extend(["python3", "-m", "trainer.main", "--config=/etc/trainer/config.yaml", "--workers=8"])
    c.env.append("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    c.env.extend(f"TRAINER_SERVICE_{n}_PORT_443_TCP_ADDR=10.96.{n}.{number % 250}" for n in range(19))
    for kind in ("proc", "tmpfs", "devpts", "mqueue", "sysfs", "cgroup"):
        options = ["nosuid", "noexec", "nodev", "ro"]
        c.mounts.add(destination=f"/sys/fs/{kind}", type=kind, source=kind, options=options)
    for n in range(9):
        source = f"/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~configmap/config-{n}"
        options = ["rbind", "rprivate", "ro"]
        c.mounts.add(destination=f"/etc/trainer/conf.d/{n}", type="bind", source=source, options=options)
    for kind in ("pid", "ipc", "uts", "mount", "network", "cgroup"):
        c.linux.namespaces.add(type=kind, path=f"/proc/{4000 + number}/ns/{kind}")
    for minor, path in enumerate(("null", "zero", "full", "random", "urandom", "tty"), 3):
        c.linux.devices.add(path=f"/dev/{path}", type="c", major=1, minor=minor)
    c.linux.cgroups_path = f"kubelet-kubepods-burstable-pod{uid}.slice:cri-containerd:{number:064x}"
    return c


def create_container(annotations: Mapping[str, str]) -> bytes:
    """A realistic CreateContainer in frames. annotations: of the pod, beside the usual ones."""
    create = M["Create"](pod=realistic_pod(0, annotations), container=realistic_container())
    return nri_runtime.request(
        1, "CreateContainer", create.SerializeToString(), timeout=REQUEST_TIMEOUT - 0.0001
    )


def synchronize(count: int, first_stream: int) -> list[bytes]:
    """A realistic Synchronize of so many pods with a container each, in frames, a message an item.

    Split as runtimes do from NRI 0.7 on: into as few messages as Go's ttrpc lets pass. The time left, which
    is written into each, falls as if every message took a moment.
    """
    pods = [realistic_pod(n) for n in range(count)]
    containers = [realistic_container(n) for n in range(count)]
    size = sum(item.ByteSize() + 4 for item in (*pods, *containers))
    messages = max(1, -(-size // (GO_MAX_DATA - _ENVELOPE_ROOM)))
    cuts = [count * n // messages for n in range(messages + 1)]
    parts = []
    for n in range(messages):
        part = slice(cuts[n], cuts[n + 1])
        payload = M["Synchronize"](pods=pods[part], containers=containers[part], more=n < messages - 1)
        parts.append(
            nri_runtime.request(
                first_stream + 2 * n,
                "Synchronize",
                payload.SerializeToString(),
                timeout=REQUEST_TIMEOUT - 0.0001 - 0.02 * n,
            )
        )
    return parts


# --- what is answered ----------------------------------------------------------------------------------


def whole(data: bytes) -> bool:
    """Whether `data`, which begins with a frame, holds the whole message that begins there."""
    end = len(data)
    if end < 18:
        return False
    length, size = struct.unpack_from(">4xII", data)
    if length == 10 + size:
        return end >= 8 + length
    offset, missing = 0, 10 + size
    while missing > 0 and end >= offset + 8:
        (length,) = struct.unpack_from(">4xI", data, offset)
        offset += 8 + length
        missing -= length
    return missing <= 0 and end >= offset


def message(data: bytes) -> tuple[int, int, int, bytes]:
    """(conn, stream, kind, data) of the one message in frames that `data` is. Raises LoadError."""
    conn, _ = struct.unpack_from(">II", data)
    body, offset = b"", 0
    while offset < len(data):
        frame_conn, length = struct.unpack_from(">II", data, offset)
        if frame_conn != conn:
            raise LoadError(f"a frame of connection {frame_conn} inside a message of {conn}")
        body += data[offset + 8 : offset + 8 + length]
        offset += 8 + length
    size, stream, kind, _ = struct.unpack_from(">IIBB", body)
    if len(body) != 10 + size:
        raise LoadError(f"{len(body)} bytes came where one message of {10 + size} was due")
    return conn, stream, kind, body[10:]


def payload_of(data: bytes, stream: int) -> bytes:
    """The payload of a successful response to the request `stream`. Raises LoadError."""
    conn, answered, kind, body = message(data)
    if (conn, answered, kind) != (1, stream, 2):
        raise LoadError(f"connection {conn}, stream {answered}, kind {kind}; a response to {stream} was due")
    response = M["Response"].FromString(body)
    if response.status.code:
        raise LoadError(f"status {response.status.code}: {response.status.message}")
    payload: bytes = response.payload
    return payload


def check(data: bytes, stream: int, expected: Mapping[str, Any]) -> None:
    """Raise LoadError unless `data` is the answer that is expected of CreateContainer.

    expected: ``names``, the CDI names in order; ``devices``, ``mounts`` and ``env``, how many. What is left
    out must be absent.
    """
    adjust = _ANSWER.FromString(payload_of(data, stream)).adjust
    found = {
        "names": [device.name for device in adjust.cdi_devices],
        "devices": len(adjust.linux.devices),
        "mounts": len(adjust.mounts),
        "env": len(adjust.env),
    }
    due = {"names": [], "devices": 0, "mounts": 0, "env": 0, **expected}
    if found != due:
        raise LoadError(f"the answer holds {found}, expected was {due}")


# --- the driver ----------------------------------------------------------------------------------------


class _Plugin:
    """One connected plugin."""

    def __init__(self, name: str, sock: socket.socket) -> None:
        # A timeout of the kernel's: Python's own costs a poll before each recv.
        seconds = struct.pack("ll", int(ANSWER_TIMEOUT), 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, seconds)
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.name = name
        self.sock = sock
        self.pid: int = struct.unpack("3i", credentials)[0]
        self.stream = -1
        # The process' CPU clock: user and system time of all its threads, in nanoseconds up to this moment.
        self._clock = (~self.pid << 3) | 2

    def cpu_ns(self) -> int:
        return clock_gettime_ns(self._clock)

    def read(self) -> bytes:
        """One message in frames."""
        data = b""
        while not whole(data):
            data += self._receive()
        return data

    def call(self, request: bytes) -> tuple[int, bytes]:
        """(nanoseconds, answer) of a request whose stream id is the next."""
        self.stream += 2
        begin = perf_counter_ns()
        try:
            self.sock.sendall(request)
        except OSError as error:
            raise LoadError(f"{self.name} does not take a request: {error}") from error
        answer = self._receive()
        end = perf_counter_ns()
        while not whole(answer):
            answer += self._receive()
            end = perf_counter_ns()
        return end - begin, answer

    def _receive(self) -> bytes:
        try:
            data = self.sock.recv(RECEIVE_SIZE)
        except BlockingIOError:
            raise LoadError(f"{self.name} said nothing for {ANSWER_TIMEOUT:g} s") from None
        except OSError as error:
            raise LoadError(f"the connection of {self.name} failed: {error}") from error
        if not data:
            raise LoadError(f"{self.name} closed the connection")
        return data


class Load:
    """A runtime for several plugins, each on a socket of its own. Use as a context manager.

    sockets: a plugin's name → the path to listen at. Every method returns what JSON can carry; times are in
    nanoseconds, sizes in bytes. Raises LoadError.
    """

    def __init__(self, sockets: Mapping[str, str]) -> None:
        self._listeners = {}
        self._plugins: dict[str, _Plugin] = {}
        self._listings: dict[int, list[bytes]] = {}
        for name, path in sockets.items():
            listener = self._listeners[name] = socket.socket(socket.AF_UNIX)
            listener.settimeout(ANSWER_TIMEOUT)
            listener.bind(path)
            listener.listen()

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._plugins):
            self.drop(name)
        for listener in self._listeners.values():
            listener.close()

    def connect(self, name: str, listed: int = 0) -> dict[str, int]:
        """Wait for a plugin and hold the handshake, with so many pods and containers in Synchronize.

        Returns its ``pid``; ``synchronize``, the time until the last part was answered, and ``cpu``, what it
        spent meanwhile; ``ready``, the time until it had also answered a first CreateContainer, for which
        work that it put off has to be done; ``messages`` and ``size`` of Synchronize.
        """
        try:
            sock, _ = self._listeners[name].accept()
        except TimeoutError:
            raise LoadError(f"{name} did not connect within {ANSWER_TIMEOUT:g} s") from None
        plugin = self._plugins[name] = _Plugin(name, sock)
        conn, stream, kind, data = message(plugin.read())
        envelope = M["Request"].FromString(data)
        if (conn, kind, envelope.method) != (2, 1, "RegisterPlugin"):
            raise LoadError(f"{name} began with {envelope.method!r} on connection {conn}")
        sock.sendall(nri_runtime.response(stream))
        _, answer = plugin.call(nri_runtime.request(1, "Configure", nri_runtime.configure(NRI_0_12)))
        events = M["ConfigureReply"].FromString(payload_of(answer, plugin.stream)).events
        if not events & 1 << 3:
            raise LoadError(f"{name} does not subscribe to CreateContainer: {events:#x}")
        parts = self._listings.get(listed) or self._listings.setdefault(listed, synchronize(listed, 3))
        first = bytearray(create_container({}))
        struct.pack_into(">I", first, _STREAM, 3 + 2 * len(parts))
        cpu, begin = plugin.cpu_ns(), perf_counter_ns()
        answers = [plugin.call(part)[1] for part in parts]
        taken, cpu = perf_counter_ns() - begin, plugin.cpu_ns() - cpu
        payload_of(plugin.call(first)[1], plugin.stream)
        ready = perf_counter_ns() - begin
        for number, answer in enumerate(answers, 1):
            reply = M["SynchronizeReply"].FromString(payload_of(answer, 1 + 2 * number))
            if reply.more != (number < len(parts)) or reply.update:
                raise LoadError(f"{name} answered part {number} of Synchronize with {reply}")
        return {
            "pid": plugin.pid,
            "synchronize": taken,
            "cpu": cpu,
            "ready": ready,
            "messages": len(parts),
            "size": sum(map(len, parts)),
        }

    def drop(self, name: str) -> None:
        """Close a plugin's connection, as a runtime does that stops."""
        plugin = self._plugins.pop(name)
        with contextlib.suppress(OSError):
            plugin.sock.shutdown(socket.SHUT_RDWR)
        plugin.sock.close()

    def calls(
        self,
        plugins: Mapping[str, Mapping[str, Any]],
        annotations: Mapping[str, str],
        calls: int,
        *,
        block: int = 25,
        gap: float = 0.0,
    ) -> dict[str, dict[str, Any]]:
        """Ask every plugin about the same container `calls` times, in blocks of `block` and taking turns.

        plugins: name → what `check` shall find in each of its answers. gap: seconds between an answer and the
        next request, for the cost against load. Who begins changes with every round,
        so that whatever else the machine does meets all of them alike. Returns, by name, ``p50``, ``p99``,
        ``mean``, ``cpu`` a call, ``calls``, and ``percentiles``, 101 of them.
        """
        request = bytearray(create_container(annotations))
        turns = [(self._plugins[name], expected) for name, expected in plugins.items()]
        times: dict[str, list[int]] = {name: [] for name in plugins}
        known: dict[str, bytes] = {}
        for plugin, expected in turns:
            known[plugin.name] = self._first(plugin, request, expected)
        spent = {plugin.name: -plugin.cpu_ns() for plugin, _ in turns}
        collects = gc.isenabled()
        gc.disable()
        try:
            for _ in range(-(-calls // block)):
                for plugin, expected in turns:
                    self._block(plugin, request, block, known[plugin.name], expected, times[plugin.name], gap)
                turns.append(turns.pop(0))
        finally:
            if collects:
                gc.enable()
        for plugin, _ in turns:
            spent[plugin.name] += plugin.cpu_ns()
        return {
            name: {
                "p50": statistics.median(taken),
                "p99": ordered[len(taken) * 99 // 100],
                "mean": statistics.fmean(taken),
                "cpu": spent[name] / len(taken),
                "calls": len(taken),
                "percentiles": [ordered[min(len(taken) - 1, len(taken) * n // 100)] for n in range(101)],
            }
            for name, taken in times.items()
            for ordered in [sorted(taken)]
        }

    def memory(self, name: str) -> dict[str, int]:
        """``rss``, what is resident, and ``pss``, the same with shared pages divided among their users."""
        found = {}
        for line in Path(f"/proc/{self._plugins[name].pid}/smaps_rollup").read_text().splitlines():
            key, _, value = line.partition(":")
            if key in ("Rss", "Pss"):
                found[key.lower()] = int(value.split()[0]) * 1024
        return found

    def _first(self, plugin: _Plugin, request: bytearray, expected: Mapping[str, Any]) -> bytes:
        """A checked answer, which the others are compared with."""
        struct.pack_into(">I", request, _STREAM, plugin.stream + 2)
        _, answer = plugin.call(request)
        _checked(plugin, answer, expected)
        return answer

    def _block(
        self,
        plugin: _Plugin,
        request: bytearray,
        times: int,
        known: bytes,
        expected: Mapping[str, Any],
        taken: list[int],
        gap: float,
    ) -> None:
        head, tail = known[:_STREAM], known[_STREAM + 4 :]
        pack, unpack = struct.Struct(">I").pack_into, struct.Struct(">I").unpack_from
        for _ in range(times):
            if gap:
                sleep(gap)
            pack(request, _STREAM, plugin.stream + 2)
            time, answer = plugin.call(request)
            taken.append(time)
            same = answer[:_STREAM] == head and answer[_STREAM + 4 :] == tail
            if not same or unpack(answer, _STREAM)[0] != plugin.stream:
                _checked(plugin, answer, expected)


def _checked(plugin: _Plugin, answer: bytes, expected: Mapping[str, Any]) -> None:
    try:
        check(answer, plugin.stream, expected)
    except LoadError as error:
        raise LoadError(f"{plugin.name}: {error}") from None


class LoadProcess:
    """`Load` in a process of its own. Use as a context manager; `do` calls a method there.

    sockets: as of `Load`. cpu: the processor it keeps to, if any.
    """

    def __init__(self, sockets: Mapping[str, str], cpu: int | None = None) -> None:
        self._argv = [sys.executable, "-m", "support.nri_load"]
        if cpu is not None:
            self._argv += ["--cpu", str(cpu)]
        self._argv += [f"{name}={path}" for name, path in sockets.items()]

    def __enter__(self) -> LoadProcess:
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
            text=True,
        )
        self._result()
        return self

    def __exit__(self, *_: object) -> None:
        # It ends with its input.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(ANSWER_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]

    def do(self, method: str, *arguments: Any, **more: Any) -> Any:
        """Call a method of `Load` and return its result. Raises LoadError."""
        request = json.dumps({"do": method, "arguments": arguments, "more": more})
        try:
            print(request, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise LoadError("the driver has ended") from None
        return self._result()

    def _result(self) -> Any:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise LoadError(f"the driver ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise LoadError(answer["error"])
        return answer["result"]


def main() -> None:
    """Serve the pipe until it is closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", type=int)
    parser.add_argument("sockets", nargs="+", metavar="NAME=SOCKET")
    arguments = parser.parse_args()
    if arguments.cpu is not None:
        os.sched_setaffinity(0, {arguments.cpu})
    with Load(dict(item.split("=", 1) for item in arguments.sockets)) as load:
        # Plugins may be started now; a floor does not wait for its socket.
        print(json.dumps({"result": "listening"}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            try:
                result = getattr(load, request["do"])(*request["arguments"], **request["more"])
                print(json.dumps({"result": result}), flush=True)
            except (LoadError, OSError) as error:
                print(json.dumps({"error": f"{request['do']}: {error}"}), flush=True)


if __name__ == "__main__":
    main()
