"""A CRI-O of any version, and a containerd, in Python: they answer with what real daemons answered.

gRPC and HTTP come in on one Unix socket, as CRI-O serves them: the first bytes tell them apart, and gRPC is
spliced to an inner server. They run no containers. They must not know who asks.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from cdi_courier.descriptors import message_classes
from google.protobuf import json_format

# Not the product's tables: what it reads must be what others write.
MESSAGES = message_classes(
    "fake.runtime",
    {
        "VersionResponse": "1 version string, 2 runtime_name string, 3 runtime_version string, "
        "4 runtime_api_version string",
        "StatusResponse": "1 status RuntimeStatus, 2 info map<string,string>, "
        "3 runtime_handlers RuntimeHandler*",
        "RuntimeStatus": "1 conditions RuntimeCondition*",
        "RuntimeCondition": "1 type string, 2 status bool, 3 reason string, 4 message string",
        "RuntimeHandler": "1 name string, 2 features RuntimeHandlerFeatures",
        "RuntimeHandlerFeatures": "1 recursive_read_only_mounts bool, 2 user_namespaces bool",
        "RuntimeConfigResponse": "1 linux LinuxRuntimeConfiguration",
        "LinuxRuntimeConfiguration": "1 cgroup_driver int32",
        "PluginsResponse": "1 plugins Plugin*",
        "Plugin": "1 type string, 2 id string, 5 exports map<string,string>, 6 capabilities string*, "
        "7 init_err RpcStatus",
        "RpcStatus": "1 code int32, 2 message string",
        "ContainerdVersion": "1 version string, 2 revision string",
    },
)
SYSTEMD, CGROUPFS = 0, 1

CRI = "/runtime.v1.RuntimeService/"
_HTTP2 = b"PRI * HTTP/2"


def message(name: str, values: Mapping[str, Any]) -> bytes:
    """The message's bytes; fields that the table lacks are left out."""
    built = json_format.ParseDict(values, MESSAGES[name](), ignore_unknown_fields=True)
    return bytes(built.SerializeToString())


class Refusal(Exception):  # noqa: N818 - an answer, as gRPC's status is
    """What a method fails with: the status' text, its code is UNKNOWN."""


Answer = bytes | Callable[[bytes], bytes]


class FakeRuntime:
    """A server on one Unix socket. Use as a context manager.

    grpc_answers: ``/package.Service/Method`` → the response's bytes, or a function that makes them of the
    request's and may raise `Refusal`; all else is UNIMPLEMENTED. http_answers:
    target → the body; all else is 404. asked: what came in, in order.
    """

    def __init__(
        self,
        path: Path,
        grpc_answers: Mapping[str, Answer],
        http_answers: Mapping[str, bytes] | None = None,
    ) -> None:
        self.path = path
        self.asked: list[str] = []
        self.grpc_answers: dict[str, Answer] = dict(grpc_answers)
        self.http_answers = dict(http_answers or {})
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> FakeRuntime:
        with contextlib.ExitStack() as ends:
            # An abstract name: no file stays behind, however the process ends.
            self._inner = f"cdi-fake-{uuid.uuid4()}"
            pool = ends.enter_context(ThreadPoolExecutor(4))
            server = grpc.server(pool, handlers=[_Handler(self.grpc_answers, self.asked)])
            server.add_insecure_port(f"unix-abstract:{self._inner}")
            server.start()
            ends.callback(lambda: server.stop(None).wait())
            self.path.parent.mkdir(parents=True, exist_ok=True)
            listener = ends.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(self.path))
            ends.callback(self.path.unlink)
            listener.listen(64)
            acceptor = threading.Thread(target=self._accept, args=(listener,))
            acceptor.start()
            ends.callback(acceptor.join)
            # Ends accept(), which closing alone does not.
            ends.callback(listener.shutdown, socket.SHUT_RDWR)
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            begin = b""
            while len(begin) < len(_HTTP2):
                part = connection.recv(65536)
                if not part:
                    return
                begin += part
            if begin.startswith(_HTTP2):
                self._splice(connection, begin)
            else:
                self._answer(connection, begin)

    def _splice(self, connection: socket.socket, begin: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as inner:
            inner.connect(f"\0{self._inner}")
            inner.sendall(begin)
            back = threading.Thread(target=_copy, args=(inner, connection), daemon=True)
            back.start()
            _copy(connection, inner)
            back.join()

    def _answer(self, connection: socket.socket, request: bytes) -> None:
        while b"\r\n\r\n" not in request:
            request += connection.recv(65536)
        target = request.split(b" ", 2)[1].decode()
        self.asked.append(f"GET {target}")
        body = self.http_answers.get(target)
        if body is None:
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone")
            return
        # Chunked, in pieces, as Go does for what it does not know the length of.
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        for start in range(0, len(body), 1000):
            piece = body[start : start + 1000]
            connection.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        connection.sendall(b"0\r\n\r\n")


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, answers: Mapping[str, Answer], asked: list[str]) -> None:
        self._answers, self._asked = answers, asked

    def service(self, details: Any) -> Any:
        self._asked.append(details.method)
        answer = self._answers.get(details.method)
        if answer is None:
            return None

        def reply(request: bytes, context: Any) -> bytes:
            if isinstance(answer, bytes):
                return answer
            try:
                return answer(request)
            except Refusal as error:
                context.abort(grpc.StatusCode.UNKNOWN, str(error))
                raise

        return grpc.unary_unary_rpc_method_handler(reply)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(65536):
            target.sendall(part)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def crio(
    path: Path, data: Path, version: str = "1.36.3", variant: str = "nri-on", *, http: bool = True
) -> FakeRuntime:
    """A CRI-O of this version (docs/facts.md#cri-o-versions).

    data: the folder of captured answers, which are 1.36.3's; for an older version, what it does not have is
    taken out. variant: ``nri-on``, ``nri-off`` or ``extra-handler``. http: False answers every GET with 404.
    """
    minor = int(version.split(".")[1])
    told = json.loads((data / "crio-1.36.3-version.json").read_text()) | {"runtime_version": version}
    status = json.loads((data / f"crio-1.36.3-status-verbose-{variant}.json").read_text())
    config = (data / f"crio-1.36.3-http-config-{variant}.toml").read_text()
    if minor < 28:
        status.pop("info")
    elif minor < 33:
        full = json.loads(status["info"]["config"])
        status["info"]["config"] = json.dumps({"sandboxImage": full["sandboxImage"]})
    if minor < 30:
        status.pop("runtime_handlers")
        config = config.replace("enable_nri = true", "enable_nri = false")
    if minor < 34:
        config = config[: config.index("    [crio.nri.default_validator]")]
    if minor < 27:
        config = re.sub(r" +nri_(disable_connections|plugin_\w+) = .*\n", "", config)
    if minor < 26:
        config = config[: config.index("  [crio.nri]")]
    answers = {
        f"{CRI}Version": message("VersionResponse", told),
        f"{CRI}Status": message("StatusResponse", status),
    }
    if minor >= 28:
        driver = {"linux": {"cgroup_driver": CGROUPFS}}
        answers[f"{CRI}RuntimeConfig"] = message("RuntimeConfigResponse", driver)
    bodies = {"/config": config.encode(), "/info": (data / "crio-1.36.3-http-info.json").read_bytes()}
    return FakeRuntime(path, answers, bodies if http else {})


def containerd(path: Path, data: Path, version: str, variant: str) -> FakeRuntime:
    """A containerd whose answers were captured. version, variant: as in the files' names."""
    captured = {
        name: json.loads((data / f"containerd-{version}-{name}{suffix}.json").read_text())
        for name, suffix in (
            ("version", ""),
            ("status-verbose", f"-{variant}"),
            ("introspection", f"-{variant}"),
        )
    }
    answers = {
        f"{CRI}Version": message("VersionResponse", captured["version"]),
        f"{CRI}Status": message("StatusResponse", captured["status-verbose"]),
        "/containerd.services.introspection.v1.Introspection/Plugins": message(
            "PluginsResponse", {"plugins": captured["introspection"]}
        ),
        "/containerd.services.version.v1.Version/Version": message(
            "ContainerdVersion", {"version": captured["version"]["runtime_version"]}
        ),
    }
    if version.startswith("2."):
        driver = {"linux": {"cgroup_driver": CGROUPFS}}
        answers[f"{CRI}RuntimeConfig"] = message("RuntimeConfigResponse", driver)
    return FakeRuntime(path, answers)


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A socket that this process listens at and never answers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        yield listener
    path.unlink(missing_ok=True)


def stale(path: Path) -> None:
    """A socket's file that nobody listens at."""
    with listening(path):
        kept = path.with_suffix(".kept")
        path.rename(kept)
    kept.rename(path)
