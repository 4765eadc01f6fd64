"""One session of an NRI plugin with a runtime (docs/facts.md#nri-methods, #nri-handshake).

No I/O, no clock, no log. It knows how a session goes; what is done about a container is its user's part.

Theory of operation. Two conversations run over the one socket. Over the first, we ask to be registered and
get one reply. Over the second, the runtime configures us, tells us what exists, and then asks about every
container. The runtime starts the second as soon as it has read our request, so Configure may overtake the
reply to RegisterPlugin. Hence two rules:

1. The state follows the second conversation alone, by `_NEXT`. The reply to RegisterPlugin moves nothing
   if it is a success, and ends the session if it is an error, whatever the state: the runtime has then
   forgotten us but leaves the socket open.
2. Every request is answered, in every state. The table says what a request means for the state, never
   whether it is allowed: an answer out of turn costs nothing, a missing one costs the whole connection.
   A runtime before NRI 0.7 asks plugins that it launched about containers without ever synchronizing them.

Bytes go in through `receive` and events come out; answers that need no decision are queued at once, those
to CreateContainer are given through `reply` or `refuse`. `outgoing` hands out the bytes to send.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from cdi_courier.errors import ProtocolError, quoted

from . import messages
from .ttrpc import INTERNAL, UNIMPLEMENTED, Request, Response, Trunk

if TYPE_CHECKING:
    from collections.abc import Callable

PLUGIN_SERVICE: Final = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE: Final = "nri.pkg.api.v1alpha1.Runtime"

REGISTER_TIMEOUT: Final = 45.0
"""Seconds we tell the runtime we wait for RegisterPlugin. Its accept loop is serial, so on a busy node our
turn may come late; Go's fixed 5 s are known to be too few (docs/facts.md#nri-handshake)."""

DEFAULT_REQUEST_TIMEOUT_MS: Final = 2000
"""The runtime's request timeout where it does not tell (docs/facts.md#nri-timeouts: NRI before 0.7)."""


class State(Enum):
    """How far the runtime has come with us."""

    IDLE = "idle"
    REGISTERING = "registering"
    CONFIGURED = "configured"
    SYNCHRONIZING = "synchronizing"
    ACTIVE = "active"
    CLOSED = "closed"


_NEXT: Final[dict[State, dict[str, State]]] = {
    # state → what came → new state; what is missing changes nothing
    State.IDLE: {"start": State.REGISTERING},
    State.REGISTERING: {
        "Configure": State.CONFIGURED,
        "Synchronize": State.ACTIVE,
        "Synchronize more": State.SYNCHRONIZING,
        "CreateContainer": State.ACTIVE,
        "refused": State.CLOSED,
    },
    State.CONFIGURED: {
        "Synchronize": State.ACTIVE,
        "Synchronize more": State.SYNCHRONIZING,
        "CreateContainer": State.ACTIVE,
        "refused": State.CLOSED,
    },
    State.SYNCHRONIZING: {
        "Synchronize": State.ACTIVE,
        "refused": State.CLOSED,
    },
    State.ACTIVE: {"refused": State.CLOSED},
    State.CLOSED: {},
}

_LOST: Final[dict[State, tuple[str, str]]] = {
    # what a connection that ends in this state means: (words, what to do)
    State.IDLE: ("before anything was sent", ""),
    State.REGISTERING: (
        "before it answered the registration",
        "is this an NRI socket? else see the runtime's log; its plugin_registration_timeout may be too short",
    ),
    State.CONFIGURED: (
        "after configuring the plugin and before synchronizing it",
        "the runtime's log says why; its plugin_request_timeout may be too short",
    ),
    State.SYNCHRONIZING: (
        "while synchronizing",
        "the runtime's log says why; with many containers its plugin_request_timeout may be too short",
    ),
    State.ACTIVE: (
        "",
        "it was stopped or restarted, or an answer came too late for its plugin_request_timeout",
    ),
    State.CLOSED: ("", ""),
}

_EMPTY_ANSWERS: Final = frozenset(
    {
        # Never subscribed to, yet answered: on NRI 0.12 the dedicated calls, before it StateChange, which is
        # a success for any event number, and Shutdown, which no runtime sends so far
        # (docs/facts.md#nri-methods). A zero-length message is the success of each of them.
        "Shutdown",
        "StateChange",
        "UpdateContainer",
        "StopContainer",
        "UpdatePodSandbox",
        "ValidateContainerAdjustment",
        "RunPodSandbox",
        "StopPodSandbox",
        "RemovePodSandbox",
        "PostUpdatePodSandbox",
        "PostCreateContainer",
        "StartContainer",
        "PostStartContainer",
        "PostUpdateContainer",
        "RemoveContainer",
    }
)


def _string(number: int, text: str) -> bytes:
    return bytes((number << 3 | 2, len(text))) + text.encode()


_CREATE_CONTAINER: Final = _string(1, PLUGIN_SERVICE) + _string(2, "CreateContainer")
"""How the envelope of every CreateContainer begins: Go writes the fields in order, each once. One that does
not begin so is read in two steps, as all other requests are."""


class Registered:
    """The runtime has accepted the plugin's name and index. May come after Configured."""

    __slots__ = ()


class Configured:
    """The runtime has introduced itself. All strings are as it sent them.

    request_timeout_ms, registration_timeout_ms: 0 where the runtime does not tell (NRI before 0.7).
    nri_version: ``""`` where the runtime does not tell (NRI before 0.12).
    config: the plugin's configuration file; only a launched plugin gets one
    (docs/facts.md#nri-launched-plugins).
    """

    __slots__ = (
        "config",
        "nri_version",
        "registration_timeout_ms",
        "request_timeout_ms",
        "runtime_name",
        "runtime_version",
    )

    def __init__(self, request: Any) -> None:
        self.config: str = request.config
        self.runtime_name: str = request.runtime_name
        self.runtime_version: str = request.runtime_version
        self.registration_timeout_ms: int = request.registration_timeout
        self.request_timeout_ms: int = request.request_timeout
        self.nri_version: str = request.NRI_version


class Synchronized:
    """The runtime has listed what exists, in one or several messages, and the last one has been answered.

    timeout_nano: nanoseconds the runtime still waited for the answer when it sent the last message.
    size: bytes of all messages together.
    """

    __slots__ = ("_parts", "size", "timeout_nano")

    def __init__(self, parts: list[bytes], timeout_nano: int) -> None:
        self._parts = parts
        self.size = sum(map(len, parts))
        self.timeout_nano = timeout_nano

    def listing(self) -> tuple[list[Any], list[Any]]:
        """All pods (`messages.PodSandbox`) and containers (`messages.ListedContainer`); can be had once.

        They are read here and not on receipt, so that the answer, which all messages together have one
        request timeout for, does not wait for it. A container may refer to a pod of a later message; being
        listed says nothing of who handled it (docs/facts.md#nri-synchronize). Raises ProtocolError if a part
        is no such list.
        """
        pods: list[Any] = []
        containers: list[Any] = []
        parts, self._parts = self._parts, []
        for part in parts:
            request = _decode(messages.SynchronizeRequest, part)
            pods.extend(request.pods)
            containers.extend(request.containers)
        return pods, containers


class CreateContainer:
    """A container is about to be created and waits for `Session.reply` or `Session.refuse`.

    token: which request this is.
    pod: `messages.AskingPod`; container: `messages.Container`, the few fields that every answer needs.
    timeout_nano: nanoseconds the runtime still waits, counted from when it sent the request; 0: unlimited.
    data: bytes that hold the request; protobuf writes each string in it as it is.
    """

    __slots__ = ("_enveloped", "container", "data", "pod", "timeout_nano", "token")

    def __init__(
        self, token: int, request: Any, data: bytes, timeout_nano: int, *, enveloped: bool = False
    ) -> None:
        """Take a `messages.CreateContainerRequest` and its bytes, or with those the envelope around it."""
        self.token = token
        self.pod = request.pod
        self.container = request.container
        self.timeout_nano = timeout_nano
        self.data = data
        self._enveloped = enveloped

    def details(self) -> Any:
        """Read the container's `messages.ContainerDetails`: what is in it before any adjustment of ours.

        Only when asked for, because it costs three times what all else in the request does. Raises
        ProtocolError if it is unreadable.
        """
        data = self.data
        if self._enveloped:
            try:
                return messages.EnvelopedDetails.FromString(data).payload.container
            except Exception:  # noqa: BLE001 - as in _lone_container
                data = _decode(messages.Request, data).payload
        return _decode(messages.CreateContainerDetails, data).container


class Ignored:
    """A container is about to be created, and the answer that nothing is changed has been given."""

    __slots__ = ()


Event = Registered | Configured | Synchronized | CreateContainer | Ignored
_IGNORED: Final = Ignored()


class Session:
    """The plugin's side of one connection: `start`, then `receive` until the connection ends.

    plugin_index: two digits, a string. nri_version: what RegisterPlugin says; the runtime only logs it.
    ignores: whether the bytes of a CreateContainer, unread, say already that nothing shall be changed; it is
        not asked about those that come in an unusual form.
    After a ProtocolError the session is closed and knows nothing more.
    """

    def __init__(
        self,
        plugin_name: str,
        plugin_index: str,
        *,
        nri_version: str = messages.NRI_VERSION,
        register_timeout: float = REGISTER_TIMEOUT,
        ignores: Callable[[bytes], bool] | None = None,
    ) -> None:
        self.state = State.IDLE
        self._ignores = ignores
        self.registered = False
        self._register = messages.RegisterPluginRequest(
            plugin_name=plugin_name, plugin_idx=plugin_index, NRI_version=nri_version
        )
        self._register_timeout_nano = int(register_timeout * 1e9)
        self._register_stream = 0
        self._trunk = Trunk()
        self._parts: list[bytes] = []
        self._lone = self._trunk.lone
        self.outgoing: Callable[[], bytes] = self._trunk.outgoing
        """What must be written to the socket now; each byte is handed out once."""
        self._methods: dict[str, Callable[[Request], Event | None]] = {
            "CreateContainer": self._create_container,
            "Synchronize": self._synchronize,
            "Configure": self._configure,
        }

    @property
    def partial(self) -> bool:
        """Whether a message has begun to arrive and is not complete."""
        return self._trunk.partial

    def start(self) -> bytes:
        """Begin: the bytes of RegisterPlugin, which is called exactly once in a session.

        Source: docs/facts.md#nri-handshake.
        """
        if self.state is not State.IDLE:
            raise RuntimeError("a session starts once")
        self._advance("start")
        self._register_stream = self._trunk.call(
            RUNTIME_SERVICE, "RegisterPlugin", self._register.SerializeToString(), self._register_timeout_nano
        )
        return self.outgoing()

    def receive(self, data: bytes) -> list[Event]:
        """Take the next bytes of the socket, cut anywhere; return what they bring about.

        Raises ProtocolError, and nothing else, where the runtime does not follow the protocol or does not
        want us. That is final.
        """
        if self.state is State.CLOSED:
            raise ProtocolError("NRI007", "the session is closed")
        if self.state is State.ACTIVE and (lone := self._lone(data)):
            stream, body = lone
            if body.startswith(_CREATE_CONTAINER):
                event = self._lone_container(stream, body)
                return [event] if event else []
        events: list[Event] = []
        try:
            for message in self._trunk.receive(data):
                event = self._request(message) if message.__class__ is Request else self._response(message)  # type: ignore[arg-type]
                if event:
                    events.append(event)
        except ProtocolError:
            self.state = State.CLOSED
            raise
        return events

    def lost(self, how: str = "the runtime closed the connection") -> ProtocolError:
        """Close the session because its connection ended; return what that means now, for the log.

        how: the bare fact, e.g. an error of the operating system.
        """
        words, hint = _LOST[self.state]
        self.state = State.CLOSED
        return ProtocolError("NRI010", f"{how} {words}".rstrip(), hint)

    def reply(self, token: int, response: Any) -> bool:
        """Answer a CreateContainer event.

        response: a `messages.CreateContainerResponse` or its bytes; empty bytes change nothing. Returns
        False if the response was larger than NRI carries, which the runtime has then been told as an error.
        Raises LookupError if the event has been answered.
        """
        return self._trunk.respond(
            token, response if response.__class__ is bytes else response.SerializeToString()
        )

    def refuse(self, token: int, code: int, message: str) -> None:
        """Answer a CreateContainer event with an error status: the container is not created.

        code: a status code of `ttrpc`. message: ends up in the pod's events. Raises LookupError as above.
        Source: docs/facts.md#nri-failures.
        """
        self._trunk.fail(token, code, message)

    def _request(self, request: Request) -> Event | None:
        method = request.method
        if request.service == PLUGIN_SERVICE:
            handle = self._methods.get(method)
            if handle:
                try:
                    return handle(request)
                except messages.Undecodable as error:
                    self._trunk.fail(request.stream, INTERNAL, f"undecodable {method}: {error}")
                    return None
            if method in _EMPTY_ANSWERS:
                self._trunk.respond(request.stream, b"")
                return None
            unknown = f"method {quoted(method)}"
        else:
            unknown = f"service {quoted(request.service)}"
        # NRI relies on this code to fall back from a dedicated call to StateChange
        # (docs/facts.md#nri-methods).
        self._trunk.fail(request.stream, UNIMPLEMENTED, unknown)
        return None

    def _configure(self, request: Request) -> Event:
        configure = messages.decode(messages.ConfigureRequest, request.payload)
        response = messages.ConfigureResponse(events=messages.CREATE_CONTAINER_EVENT)
        self._trunk.respond(request.stream, response.SerializeToString())
        self._advance("Configure")
        return Configured(configure)

    def _synchronize(self, request: Request) -> Event | None:
        more = messages.decode(messages.SynchronizeMore, request.payload).more
        self._parts.append(request.payload)
        # A part that is not the last must be answered with the same flag and without updates
        # (docs/facts.md#nri-synchronize).
        self._trunk.respond(request.stream, messages.SynchronizeResponse(more=more).SerializeToString())
        if more:
            self._advance("Synchronize more")
            return None
        parts, self._parts = self._parts, []
        self._advance("Synchronize")
        return Synchronized(parts, request.timeout_nano)

    def _create_container(self, request: Request) -> Event:
        payload = request.payload
        event = CreateContainer(
            request.stream,
            messages.decode(messages.CreateContainerRequest, payload),
            payload,
            request.timeout_nano,
        )
        if self.state is not State.ACTIVE:
            self._advance("CreateContainer")
        return event

    def _lone_container(self, stream: int, body: bytes) -> Event | None:
        """`_create_container` for what nearly every read of an active session brings."""
        trunk = self._trunk
        if not trunk.accept(stream):
            return None
        if self._ignores is not None and self._ignores(body):
            trunk.respond(stream, b"")
            return _IGNORED
        try:
            envelope = messages.EnvelopedCreateContainer.FromString(body)
        except Exception:  # noqa: BLE001 - see messages.decode; read in two steps, it is said what is wrong
            request = trunk.opened(stream, body)
            return self._request(request) if request else None
        return CreateContainer(stream, envelope.payload, body, envelope.timeout_nano, enveloped=True)

    def _response(self, response: Response) -> Event | None:
        if response.stream != self._register_stream or self.registered:
            return None
        if response.code:
            self._advance("refused")
            raise ProtocolError(
                "NRI008",
                f"the runtime refused the registration: {quoted(response.message)} (code {response.code})",
                "check nri.plugin_name and nri.plugin_index",
            )
        self.registered = True
        return Registered()

    def _advance(self, what: str) -> None:
        self.state = _NEXT[self.state].get(what, self.state)


def _decode(message: Any, data: bytes) -> Any:
    try:
        return messages.decode(message, data)
    except messages.Undecodable as error:
        raise ProtocolError("NRI016", f"what the runtime sent is {error}") from error
