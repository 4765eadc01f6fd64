"""The kubelet's questions to a runtime: who are you, how are you, which cgroup driver. Only asks.

It imports grpcio, so only the probing process may import it. Field numbers: the public ``runtime.v1`` API;
only fields that are used are listed.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import grpc  # type: ignore[import-untyped,unused-ignore]
from attrs import frozen

from cdi_courier.descriptors import message_classes
from cdi_courier.errors import HostError, quoted
from cdi_courier.host import sockets
from cdi_courier.host.answers import Findings, from_json, late, strings, text, version_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdi_courier.host.files import Root

MESSAGES: Final = message_classes(
    "runtime.v1",
    {
        "VersionRequest": "1 version string",
        "VersionResponse": "1 version string, 2 runtime_name string, 3 runtime_version string, "
        "4 runtime_api_version string",
        "StatusRequest": "1 verbose bool",
        "StatusResponse": "2 info map<string,string>, 3 runtime_handlers RuntimeHandler*",
        "RuntimeHandler": "1 name string",
        "RuntimeConfigRequest": "",
        "RuntimeConfigResponse": "1 linux LinuxRuntimeConfiguration",
        "LinuxRuntimeConfiguration": "1 cgroup_driver int32",
    },
)

_CGROUP_DRIVERS: Final = {0: "systemd", 1: "cgroupfs"}
_CODES: Final = grpc.StatusCode

STATUS: Final = "CRI Status"


@frozen
class Answer:
    """What the CRI told.

    name: ``containerd``, ``cri-o``, or what else it calls itself; ``""`` if it did not tell. config: the
    verbose status' ``config``, an object whose shape is the runtime's own; empty if there is none. handlers:
    names it lists (containerd ≥ 2.0, CRI-O ≥ 1.30), the default one as ``""``.
    served: whether there is a CRI here at all.
    """

    name: str
    findings: Findings
    config: Mapping[str, Any]
    handlers: tuple[str, ...]
    served: bool = True


class Unimplemented(Exception):  # noqa: N818 - an answer, as gRPC's status is
    """The server does not know the method."""


class Client:
    """One gRPC connection to the socket, made when it is first asked."""

    def __init__(self, root: Root, path: str) -> None:
        self.path = path
        # The authority: Go's gRPC refuses the one that is made of a path.
        self._channel = grpc.insecure_channel(
            f"unix:{quote(sockets.address(root, path))}",
            options=[
                ("grpc.default_authority", "localhost"),
                ("grpc.enable_http_proxy", 0),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.enable_retries", 0),
            ],
        )

    def close(self) -> None:
        """Give the connection back; calls under way end."""
        self._channel.close()

    def start(self, method: str, request: Any, response: Any, timeout: float) -> Any:
        """A call under way, for `finish`. method: ``/package.Service/Method``."""
        rpc = self._channel.unary_unary(
            method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        return rpc.future(request, timeout=timeout)

    def finish(self, call: Any, method: str, timeout: float, limit: int = 200) -> Any:
        """The response of a call. Raises `Unimplemented`; `HostError` ``HST103``, ``HST104``.

        limit: characters of what the runtime says that are told.
        """
        try:
            # gRPC ends the call in time; the second timeout is for a gRPC that does not.
            # Not `result`: what it raises is the call itself, whose traceback then holds the call for ever.
            error = call.exception(timeout=timeout + 1)
        except (grpc.FutureTimeoutError, grpc.FutureCancelledError):
            raise late(f"{method} at {self.path}", timeout) from None
        if error is None:
            return call.result()
        code, details = error.code(), error.details() or ""
        if code == _CODES.UNIMPLEMENTED:
            raise Unimplemented(method)
        if code == _CODES.DEADLINE_EXCEEDED:
            raise late(f"{method} at {self.path}", timeout)
        raise HostError("HST104", f"{method} at {self.path} failed: {code.name}: {quoted(details, limit)}")


@contextlib.contextmanager
def client(root: Root, path: str) -> Iterator[Client]:
    """A `Client` that is closed in the end. Raises `HostError` ``HST104`` for an impossible path."""
    opened = Client(root, path)
    try:
        yield opened
    finally:
        opened.close()


def ask(root: Root, path: str, timeout: float) -> Answer:
    """All that the CRI at the socket tells. Raises `HostError` if it does not even tell its name.

    timeout: seconds for all of it. What else is not answered is one of the findings' problems.
    """
    deadline = time.monotonic() + timeout

    def left() -> float:
        return max(0.01, deadline - time.monotonic())

    version = MESSAGES["VersionRequest"](version="v1")
    questions = {
        "Version": version,
        "Status": MESSAGES["StatusRequest"](verbose=True),
        "RuntimeConfig": MESSAGES["RuntimeConfigRequest"](),
    }
    with client(root, path) as connection:
        calls = {
            name: connection.start(_method(name), request, MESSAGES[f"{name}Response"], timeout)
            for name, request in questions.items()
        }
        responses: dict[str, Any] = {}
        problems: list[HostError] = []
        for name, call in calls.items():
            try:
                responses[name] = connection.finish(call, _method(name), left())
            except Unimplemented:
                pass
            except HostError as error:
                if name == "Version":
                    raise
                problems.append(error)
        if "Version" not in responses:
            # CRI-O before 1.23 and containerd before 1.6: the same message under the older name.
            method = _method("Version", "runtime.v1alpha2")
            call = connection.start(method, version, MESSAGES["VersionResponse"], left())
            with contextlib.suppress(Unimplemented):
                responses["Version"] = connection.finish(call, method, left())
    answer = read(responses)
    for problem in problems:
        answer.findings.trouble(problem)
    return answer


def read(responses: Mapping[str, Any]) -> Answer:
    """What the responses say, by the name of their method; any of them may be missing."""
    findings = Findings()
    if "Version" not in responses:
        return Answer("", findings, {}, (), served=False)
    name, findings.version = strings(
        (responses["Version"].runtime_name, version_of(responses["Version"].runtime_version))
    )
    if "RuntimeConfig" in responses and responses["RuntimeConfig"].HasField("linux"):
        driver = responses["RuntimeConfig"].linux.cgroup_driver
        findings.learn("cgroup_driver", _CGROUP_DRIVERS.get(driver), "CRI RuntimeConfig")
    config: Mapping[str, Any] = {}
    handlers: tuple[str, ...] = ()
    if "Status" in responses:
        status = responses["Status"]
        handlers = strings(handler.name for handler in status.runtime_handlers)
        raw = status.info.get("config", "")
        if raw:
            try:
                config = from_json(raw, f"the configuration in {STATUS}")
            except HostError as error:
                findings.trouble(error)
    return Answer(text(name) or "", findings, config, handlers)


def _method(name: str, package: str = "runtime.v1") -> str:
    return f"/{package}.RuntimeService/{name}"
