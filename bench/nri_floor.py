"""The least that an NRI plugin in Python can do: what bench/nri.py measures the product against.

``python bench/nri_floor.py SOCKET``. It registers, subscribes to CreateContainer, looks three annotation keys
up and answers with the CDI names it finds there. It has one blocking socket and ends with it; it has no
policy, no registry, no log, and checks nothing, so that whatever else a plugin does shows in the ratio.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from struct import Struct
from typing import Any

from cdi_courier.descriptors import message_classes

KEYS = ("nvidia.cdi.k8s.io/container.", "nvidia.cdi.k8s.io/pod", "nvidia.cdi.k8s.io")
PLUGIN, RUNTIME = 1, 2  # logical connections, docs/facts.md#nri-connections
REQUEST, RESPONSE = 1, 2  # kinds of docs/facts.md#ttrpc-messages
CREATE_CONTAINER = 1 << 3  # docs/facts.md#nri-events

M = message_classes(
    "floor",
    {
        "Request": "1 service string, 2 method string, 3 payload bytes",
        "Response": "2 payload bytes",
        "Register": "1 name string, 2 index string",
        "Subscription": "2 events int32",
        "Listing": "3 more bool",
        "Listed": "2 more bool",
        "Pair": "1 key string, 2 value string",
        "Pod": "6 annotations Pair*",
        "Container": "3 name string",
        "Create": "1 pod Pod, 2 container Container",
        "Device": "1 name string",
        "Adjustment": "8 devices Device*",
        "Created": "1 adjust Adjustment",
    },
)
FRAME = Struct(">II")
MESSAGE = Struct(">IIBB")


def received(sock: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """(stream, kind, data) of each message, until the runtime closes."""
    raw = bytearray()
    unread = {PLUGIN: bytearray(), RUNTIME: bytearray()}

    def fill(size: int) -> bool:
        while len(raw) < size:
            data = sock.recv(65536)
            if not data:
                return False
            raw.extend(data)
        return True

    while fill(FRAME.size):
        conn, length = FRAME.unpack_from(raw)
        end = FRAME.size + length
        if not fill(end):
            return
        message = unread[conn]
        message += raw[FRAME.size : end]
        del raw[:end]
        while len(message) >= MESSAGE.size:
            size, stream, kind, _ = MESSAGE.unpack_from(message)
            end = MESSAGE.size + size
            if len(message) < end:
                break
            yield stream, kind, bytes(message[MESSAGE.size : end])
            del message[:end]


def framed(conn: int, stream: int, kind: int, data: bytes) -> bytes:
    """A message in one frame; everything said here is short enough for that."""
    return FRAME.pack(conn, MESSAGE.size + len(data)) + MESSAGE.pack(len(data), stream, kind, 0) + data


def created(payload: bytes) -> Any:
    """The answer to CreateContainer: the names that the first annotation present asks for."""
    asked = M["Create"].FromString(payload)
    annotations = {pair.key: pair.value for pair in asked.pod.annotations}
    container, pod, bare = KEYS
    value = annotations.get(container + asked.container.name) or annotations.get(pod) or annotations.get(bare)
    answer = M["Created"]()
    if value:
        for name in value.split(","):
            answer.adjust.devices.add(name=name.strip())
    return answer


ANSWERS = {
    "CreateContainer": created,
    "Configure": lambda _: M["Subscription"](events=CREATE_CONTAINER),
    "Synchronize": lambda payload: M["Listed"](more=M["Listing"].FromString(payload).more),
}


def main(path: str) -> None:
    """Serve the runtime that listens at `path` until it closes."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    register = M["Request"](
        service="nri.pkg.api.v1alpha1.Runtime",
        method="RegisterPlugin",
        payload=M["Register"](name="floor", index="10").SerializeToString(),
    )
    sock.sendall(framed(RUNTIME, 1, REQUEST, register.SerializeToString()))
    for stream, kind, data in received(sock):
        if kind == REQUEST:
            request = M["Request"].FromString(data)
            payload = ANSWERS[request.method](request.payload).SerializeToString()
            response = M["Response"](payload=payload).SerializeToString()
            sock.sendall(framed(PLUGIN, stream, RESPONSE, response))


if __name__ == "__main__":
    main(sys.argv[1])
