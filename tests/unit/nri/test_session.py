"""A session without a socket: the wire vectors of the contract, every cut, and whatever bytes come."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from cdi_courier.errors import ProtocolError
from cdi_courier_nri import messages, ttrpc
from cdi_courier_nri.mux import SANITY_LIMIT
from cdi_courier_nri.session import (
    RUNTIME_SERVICE,
    Configured,
    CreateContainer,
    Event,
    Ignored,
    Registered,
    Session,
    State,
    Synchronized,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.nri_runtime import (
    NRI_0_6,
    NRI_0_12,
    ConnectionLost,
    GoReader,
    M,
    configure,
    container,
    frame,
    message,
    pod,
    request,
    response,
)


def hexed(text: str) -> bytes:
    return bytes.fromhex(text.replace("|", " "))


# Captured from an NRI 0.12.2 runtime (contract §18).
REGISTER = hexed(
    "00000002 0000004c | 00000042 00000001 01 00 |"
    "0a1c6e72692e706b672e6170692e7631616c706861312e52756e74696d65"
    "120e5265676973746572506c7567696e 1a0c0a06707974657374 12023130 2080e497d012"
)
REGISTERED = hexed("00000002 0000000a | 00000000 00000001 02 00")
CONFIGURE = hexed(
    "00000001 0000005d | 00000053 00000001 01 00 | 0a1b6e72692e706b672e6170692e7631616c706861312e506c7567696e"
    "1209436f6e666967757265 1a23 120a636f6e7461696e657264 1a0676392e392e39 208827 28d00f 320776302e31322e32"
    "20b58fcdb907"
)
CONFIGURED_0X208 = hexed("00000001 0000000f | 00000005 00000001 02 00 | 1203 108804")
SYNCHRONIZED_STREAM_3 = hexed("00000001 0000000a | 00000000 00000003 02 00")
CREATE = hexed(
    "00000001 00000084 | 0000007a 00000005 01 00 | 0a1b6e72692e706b672e6170692e7631616c706861312e506c7567696e"
    "120f437265617465436f6e7461696e6572 1a44 0a1b0a04706f6430120270301a02753022036e733032060a01611201621225"
    "0a066e65776374721204706f64301a0263303a0273684203413d42 5200 5a061a040a001200 | 208fbec5b907"
)
ADJUST = hexed(
    "00000001 00000032 | 00000028 00000005 02 00 | 1226 0a24 2209 0a024b301203767676"
    "4217 0a1576656e646f722e636f6d2f636c6173733d64657630"
)


def started() -> Session:
    session = Session("pytest", "10", nri_version="", register_timeout=5)
    session.start()
    return session


def answers(session: Session) -> list[tuple[int, int, str, bytes]]:
    """(stream, code, message, payload) of each response the session wants sent, read as Go reads."""
    pending = session.outgoing()
    queue = []
    while pending:
        conn, size = int.from_bytes(pending[:4], "big"), int.from_bytes(pending[4:8], "big")
        assert conn == 1
        queue.append(pending[8 : 8 + size])
        pending = pending[8 + size :]
    reader = GoReader(lambda: queue.pop(0))
    result = []
    while queue or reader._buffer:
        stream, kind, data = reader.read_message()
        assert kind == 2
        envelope = M["Response"].FromString(data)
        result.append((stream, envelope.status.code, envelope.status.message, envelope.payload))
    return result


def described(event: Event) -> Any:
    match event:
        case Registered():
            return "registered"
        case Configured():
            return ("configured", event.runtime_name, event.runtime_version, event.nri_version)
        case Synchronized():
            pods, containers = event.listing()
            return ("synchronized", [p.name for p in pods], [c.name for c in containers])
        case CreateContainer():
            return ("create", event.token, event.pod.name, event.container.name, event.timeout_nano)


def held(pieces: list[bytes]) -> tuple[list[Any], bytes]:
    """A conversation: the events and every byte answered; each container is answered by its own name."""
    session = started()
    events: list[Any] = []
    sent = b""
    for piece in pieces:
        for event in session.receive(piece):
            events.append(described(event))
            if isinstance(event, CreateContainer):
                session.reply(event.token, event.container.name.encode())
        sent += session.outgoing()
    return events, sent


CONVERSATION = b"".join(
    (
        request(1, "Configure", configure()),
        response(1),
        request(5, "Synchronize", M["Synchronize"](containers=[container()], more=True).SerializeToString()),
        request(
            7,
            "Synchronize",
            M["Synchronize"](pods=[pod()]).SerializeToString(),
            metadata={"traceparent": "00-a"},
        ),
        frame(1, b""),
        request(9, "StateChange", M["StateChange"](event=99).SerializeToString()),
        request(11, "Nonsense"),
        request(21, "CreateContainer", M["Create"](pod=pod(), container=container("c7")).SerializeToString()),
    )
)
EVENTS = [
    ("configured", "containerd", "v2.3.0", "v0.12.0"),
    "registered",
    ("synchronized", ["pod0"], ["c0"]),
    ("create", 21, "pod0", "c7", 2_000_000_000),
]


def test_registration_is_the_captured_one_byte_for_byte() -> None:
    """RegisterPlugin has the bytes that a runtime was seen to accept."""
    session = Session("pytest", "10", nri_version="", register_timeout=5)

    assert session.start() == REGISTER


def test_the_captured_handshake_is_understood() -> None:
    """The runtime's captured bytes are registration, configuration and a container."""
    session = started()
    events = session.receive(REGISTERED + CONFIGURE)
    assert [described(e) for e in events] == ["registered", ("configured", "containerd", "v9.9.9", "v0.12.2")]
    configured = events[1]
    assert isinstance(configured, Configured)
    assert (configured.registration_timeout_ms, configured.request_timeout_ms) == (5000, 2000)
    assert session.outgoing() == hexed("00000001 0000000e | 00000004 00000001 02 00 | 1202 1008")

    (create,) = session.receive(CREATE)
    assert isinstance(create, CreateContainer)
    assert (create.pod.namespace, dict(create.pod.annotations), create.container.name) == (
        "ns0",
        {"a": "b"},
        "c0",
    )
    assert create.timeout_nano == 1_999_724_303
    assert list(create.details().env) == ["A=B"]


def test_the_captured_adjustment_is_produced_byte_for_byte() -> None:
    """An adjustment of one variable and one CDI device has the captured bytes."""
    session = started()
    (create,) = session.receive(CREATE)
    adjust = messages.CreateContainerResponse()
    adjust.adjust.env.add(key="K0", value="vvv")
    adjust.adjust.CDI_devices.add(name="vendor.com/class=dev0")
    assert isinstance(create, CreateContainer)
    assert session.reply(create.token, adjust)

    assert session.outgoing() == ADJUST


def test_a_success_with_nothing_to_say_has_no_data() -> None:
    """The answer to Synchronize is the captured response of zero bytes."""
    session = started()
    session.receive(request(3, "Synchronize"))

    assert session.outgoing() == SYNCHRONIZED_STREAM_3


def test_a_message_layer_response_is_the_captured_one() -> None:
    """A ConfigureResponse of another mask has the captured bytes."""
    trunk = ttrpc.Trunk()
    (configure_request,) = trunk.receive(CONFIGURE)
    trunk.respond(configure_request.stream, messages.ConfigureResponse(events=0x208).SerializeToString())

    assert trunk.outgoing() == CONFIGURED_0X208


def test_a_conversation_is_the_same_wherever_it_is_cut() -> None:
    """Every cut in two gives the same events and the same bytes as no cut."""
    whole = held([CONVERSATION])
    assert whole[0] == EVENTS
    for cut in range(len(CONVERSATION) + 1):
        assert held([CONVERSATION[:cut], CONVERSATION[cut:]]) == whole


@settings(deadline=None)
@given(st.lists(st.integers(0, len(CONVERSATION)), max_size=40))
def test_a_conversation_is_the_same_in_any_pieces(cuts: list[int]) -> None:
    """Any number of cuts changes nothing."""
    edges = [0, *sorted(cuts), len(CONVERSATION)]

    assert held([CONVERSATION[a:b] for a, b in pairwise(edges)]) == held([CONVERSATION])


def reframed(stream: bytes, size: int) -> bytes:
    """The same messages in frames of `size` bytes, which a sender may choose as it likes."""
    result = b""
    while stream:
        conn, length = int.from_bytes(stream[:4], "big"), int.from_bytes(stream[4:8], "big")
        payload, stream = stream[8 : 8 + length], stream[8 + length :]
        result += b"".join(frame(conn, payload[i : i + size]) for i in range(0, length, size))
    return result


@pytest.mark.parametrize("size", [1, 3, 9, 10, 11])
def test_frames_need_not_match_messages(size: int) -> None:
    """Headers split over frames and frames of one byte are the same conversation."""
    assert held([reframed(CONVERSATION, size)]) == held([CONVERSATION])


def test_all_answers_of_a_conversation() -> None:
    """Each request has one answer on its stream: mask, `more` echoed, success, 12 for the unknown."""
    session = started()
    events = session.receive(CONVERSATION)
    create = events[-1]
    assert isinstance(create, CreateContainer)
    session.refuse(create.token, 7, "no")

    assert answers(session) == [
        (1, 0, "", b"\x10\x08"),
        (5, 0, "", b"\x10\x01"),
        (7, 0, "", b""),
        (9, 0, "", b""),
        (11, 12, 'method "Nonsense"', b""),
        (21, 7, "no", b""),
    ]


@pytest.mark.parametrize(
    "method",
    [
        "Shutdown",
        "StateChange",
        "UpdateContainer",
        "StopContainer",
        "UpdatePodSandbox",
        "ValidateContainerAdjustment",
    ]
    + [f"{when}PodSandbox" for when in ("Run", "Stop", "Remove", "PostUpdate")]
    + [
        "PostCreateContainer",
        "StartContainer",
        "PostStartContainer",
        "PostUpdateContainer",
        "RemoveContainer",
    ],
)
def test_calls_never_subscribed_to_succeed(method: str) -> None:
    """Every method of the contract's table has an empty success, whatever it carries."""
    session = started()
    assert session.receive(request(1, method, b"\xff\xff")) == []

    assert answers(session) == [(1, 0, "", b"")]


def test_an_unknown_service_is_unimplemented() -> None:
    """A known method of another service gets code 12."""
    session = started()
    session.receive(request(1, "Configure", service="x.Y"))

    assert answers(session) == [(1, 12, 'service "x.Y"', b"")]


@pytest.mark.parametrize("method", ["Configure", "Synchronize", "CreateContainer"])
def test_an_undecodable_payload_is_an_error_status(method: str) -> None:
    """A payload that is no message is answered with code 13, and the session goes on."""
    session = started()
    assert session.receive(request(1, method, b"\x0a\x7f")) == []
    assert [(stream, code) for stream, code, _, _ in answers(session)] == [(1, 13)]

    assert len(session.receive(request(3, "Configure", configure()))) == 1


def test_an_undecodable_envelope_is_an_error_status() -> None:
    """A request that is no message is answered with code 3."""
    session = started()
    session.receive(frame(1, message(1, 1, b"\x0a\x7f")))

    assert [(stream, code) for stream, code, _, _ in answers(session)] == [(1, 3)]


def test_stream_ids_must_be_new_and_odd() -> None:
    """Gaps are fine; even, repeated and smaller ids get code 3; the first of two is still answered."""
    session = started()
    events = []
    for stream in (1, 7, 8, 7, 5, 9):
        events += session.receive(request(stream, "CreateContainer"))
    assert [e.token for e in events if isinstance(e, CreateContainer)] == [1, 7, 9]
    assert [(stream, code) for stream, code, _, _ in answers(session)] == [(8, 3), (7, 3), (5, 3)]

    session.reply(7, b"")
    with pytest.raises(LookupError):
        session.reply(7, b"")


def test_what_makes_no_sense_is_ignored() -> None:
    """Unknown types, data messages, frames for nobody, requests on 2 and stray responses change nothing."""
    session = started()
    stray = [
        frame(1, message(1, 3, b"data")),
        frame(1, message(1, 77, b"?")),
        frame(1, message(1, 2, b"")),
        frame(2, message(1, 1, b"")),
        frame(9, b"\xff" * 20),
        response(3),
    ]
    assert session.receive(b"".join(stray)) == []
    assert session.outgoing() == b""

    assert held([b"".join(stray) + CONVERSATION]) == held([CONVERSATION])


def test_a_refused_registration_ends_the_session_with_the_runtimes_words() -> None:
    """The runtime's text is quoted, made printable, and final, even after Configure."""
    session = started()
    session.receive(request(1, "Configure", configure()))
    with pytest.raises(ProtocolError, match=r"NRI008.*bad \\u001b name.*code 2"):
        session.receive(response(1, code=2, text="bad \x1b name"))
    assert session.state is State.CLOSED

    with pytest.raises(ProtocolError, match="closed"):
        session.receive(b"")


def test_the_registration_has_one_reply() -> None:
    """What comes on its stream after that means nothing, not even if it is an error."""
    session = started()
    session.receive(response(1))

    assert session.receive(response(1, code=2, text="no")) == []


def test_a_second_list_is_a_list_of_its_own() -> None:
    """What an earlier Synchronize of the same session held is not listed again."""
    listed = M["Synchronize"](pods=[pod()]).SerializeToString()
    session = started()
    events = session.receive(request(1, "Synchronize", listed) + request(3, "Synchronize", listed))

    assert [described(event) for event in events] == [("synchronized", ["pod0"], [])] * 2


def test_an_undecodable_registration_reply_is_a_protocol_error() -> None:
    """Nothing can be concluded from such a reply, so the session ends."""
    with pytest.raises(ProtocolError, match="NRI016"):
        started().receive(frame(2, message(1, 2, b"\xff")))


def test_an_old_runtime_tells_no_timeouts() -> None:
    """Absent timeouts and versions are 0 and empty, and a request without a timeout has 0."""
    session = started()
    configured, create = session.receive(
        request(1, "Configure", configure(NRI_0_6), timeout=0) + request(3, "CreateContainer", timeout=0)
    )
    assert isinstance(configured, Configured)
    assert isinstance(create, CreateContainer)

    assert (configured.request_timeout_ms, configured.nri_version, create.timeout_nano) == (0, "", 0)


def test_states_follow_the_runtime() -> None:
    """The state is what the runtime has done with us, whenever the registration's reply comes."""
    session = Session("p", "10")
    seen = [session.state]
    session.start()
    more = M["Synchronize"](more=True).SerializeToString()
    for data in (
        b"",
        request(1, "Configure", configure()),
        response(1),
        request(3, "Synchronize", more),
        request(5, "CreateContainer"),
        request(7, "Synchronize"),
    ):
        session.receive(data)
        seen.append(session.state)

    assert [state.value for state in seen] == [
        "idle",
        "registering",
        "configured",
        "configured",
        "synchronizing",
        "synchronizing",
        "active",
    ]


def test_a_container_without_synchronize_makes_the_session_active() -> None:
    """Old runtimes never synchronize plugins that they launched, but do ask them."""
    session = started()
    session.receive(request(1, "Configure", configure()) + request(3, "CreateContainer"))

    assert session.state is State.ACTIVE


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "before it answered the registration"),
        (request(1, "Configure"), "before synchronizing"),
        (request(1, "Synchronize", M["Synchronize"](more=True).SerializeToString()), "while synchronizing"),
        (request(1, "Synchronize"), "the runtime closed the connection"),
    ],
    ids=["registering", "configured", "synchronizing", "active"],
)
def test_a_lost_connection_says_at_which_stage(data: bytes, words: str) -> None:
    """The text for the log names the stage that was reached."""
    session = started()
    session.receive(data)

    assert words in str(session.lost())


def test_a_list_of_twelve_megabytes_in_two_frames_is_understood() -> None:
    """One unsplit Synchronize of old runtimes, received in pieces of a socket's size."""
    pods = [pod(f"pod{i}") for i in range(500)]
    containers = [container(f"c{i}", of=f"pod{i // 4}", filler="x" * 6000) for i in range(2000)]
    data = request(1, "Synchronize", M["Synchronize"](pods=pods, containers=containers).SerializeToString())
    assert len(data) > 12_000_000
    session = started()
    events: list[Event] = []
    for start in range(0, len(data), 65536):
        assert events == []
        events += session.receive(data[start : start + 65536])
    (event,) = events
    assert isinstance(event, Synchronized)
    listed = event.listing()

    assert [len(part) for part in listed] == [500, 2000]
    assert [listed[1][-1].pod_sandbox_id, listed[1][-1].state] == ["p-pod499", 3]


def test_an_unreadable_list_is_found_when_it_is_read() -> None:
    """The answer does not wait for the list; reading a bad one is a ProtocolError."""
    session = started()
    (event,) = session.receive(request(1, "Synchronize", b"\x0a\x02\x0a\x7f"))
    assert answers(session) == [(1, 0, "", b"")]
    assert isinstance(event, Synchronized)

    with pytest.raises(ProtocolError, match="NRI016"):
        event.listing()


@pytest.mark.parametrize("data", [4086, 4087, 4096, 4097, 10_000, 4_194_304])
def test_answers_of_every_size_survive_the_go_reader(data: int) -> None:
    """The response is read whole by a reader that fails on any frame it has no room for."""
    overhead = 1 + len(_varint(data)) + 0
    payload = b"x" * (data - overhead)
    session = started()
    session.receive(request(1, "CreateContainer"))
    assert session.reply(1, payload)

    assert answers(session) == [(1, 0, "", payload)]


def test_an_answer_too_large_for_ttrpc_is_an_error_status() -> None:
    """One byte above the limit, the container is refused instead of the connection lost."""
    session = started()
    session.receive(request(1, "CreateContainer"))
    assert not session.reply(1, b"x" * (4_194_304 + 1 - 5))
    ((stream, code, text, _),) = answers(session)

    assert (stream, code, "4194305" in text) == (1, 8, True)


def _varint(number: int) -> bytes:
    result = b""
    while number > 127:
        result += bytes([number & 127 | 128])
        number >>= 7
    return result + bytes([number])


def test_a_refusal_is_printable_valid_and_of_bounded_length() -> None:
    """Control characters and surrogates are escaped, endless texts are cut."""
    session = started()
    session.receive(request(1, "CreateContainer") + request(3, "CreateContainer"))
    session.refuse(1, 2, "a\x1b\udc80")
    session.refuse(3, 2, "x" * 100_000)
    (_, _, first, _), (_, _, second, _) = answers(session)

    assert (first, len(second), second[-1]) == ("a\\u001b\\udc80", 4096, "…")


def test_the_version_told_is_only_told() -> None:
    """RegisterPlugin carries name, index, version and a timeout of more than 30 s on the Runtime service."""
    sent = Session("cdi-courier", "10").start()
    envelope = M["Request"].FromString(sent[18:])
    register = M["Register"].FromString(envelope.payload)

    assert (envelope.service, envelope.method) == (RUNTIME_SERVICE, "RegisterPlugin")
    assert (register.plugin_name, register.plugin_idx, register.nri_version) == (
        "cdi-courier",
        "10",
        "v0.12.2",
    )
    assert envelope.timeout_nano >= 30_000_000_000


def test_the_other_reader_enforces_gos_rule() -> None:
    """The judge used above does refuse one frame of 4097 bytes, and takes 4096."""
    data = message(1, 2, b"x" * 4086)
    assert GoReader(lambda: data).read_message()[2] == b"x" * 4086
    longer = message(1, 2, b"x" * 4087)
    with pytest.raises(ConnectionLost, match="4097"):
        GoReader(lambda: longer).read_message()


ANYTHING = st.one_of(
    st.binary(max_size=200),
    st.builds(frame, st.integers(0, 3), st.binary(max_size=100)),
    st.builds(
        lambda conn, stream, kind, data: frame(conn, message(stream, kind, data)),
        st.integers(1, 2),
        st.integers(0, 9),
        st.integers(0, 4),
        st.binary(max_size=60),
    ),
    st.builds(
        request,
        st.integers(0, 9),
        st.sampled_from(["Configure", "Synchronize", "CreateContainer", "StateChange", "Shutdown", "é"]),
        st.one_of(st.binary(max_size=60), st.just(configure(NRI_0_12))),
    ),
    st.builds(response, st.integers(0, 3), code=st.integers(0, 3), text=st.text(max_size=20)),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(ANYTHING, max_size=8))
def test_any_bytes_give_events_or_a_protocol_error(pieces: list[bytes]) -> None:
    """Nothing but ProtocolError comes out of a session, and every event can be answered."""
    session = started()
    try:
        for piece in pieces:
            for event in session.receive(piece):
                described_or_refused(session, event)
    except ProtocolError:
        assert session.state is State.CLOSED
    else:
        answers(session)


@settings(max_examples=300, deadline=None)
@given(st.lists(ANYTHING, max_size=6), st.integers(1, 30))
@example([b"", request(1, "Configure", configure()), frame(0, b"")], 1)
def test_any_bytes_have_one_outcome_wherever_they_are_cut(pieces: list[bytes], size: int) -> None:
    """Answers and error are the same, and no event is another; a piece with an error has no events."""
    stream = b"".join(pieces)
    events, sent, error = outcome([stream])
    for other in (pieces, [stream[i : i + size] for i in range(0, len(stream), size)]):
        more, also, trouble = outcome(other)

        assert (also, trouble) == (sent, error)
        assert more[: len(events)] == events
        assert error or more == events


def outcome(pieces: list[bytes]) -> tuple[list[Any], bytes, str]:
    session = started()
    events: list[Any] = []
    for piece in pieces:
        try:
            events += [(type(event), getattr(event, "token", 0)) for event in session.receive(piece)]
        except ProtocolError as error:
            return events, session.outgoing(), str(error)
    return events, session.outgoing(), ""


def test_the_first_thing_wrong_is_the_one_told() -> None:
    """A refusal is the cause, even if what follows in the same piece cannot be read."""
    with pytest.raises(ProtocolError, match="NRI008"):
        started().receive(response(1, code=2, text="no") + b"\xff" * 8)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["pod", "container", "next part"]), max_size=30).filter(bool),
    st.booleans(),
)
def test_a_list_is_the_same_in_any_parts(order: list[str], nothing_last: bool) -> None:
    """Pods and containers come in whatever messages and order; the list is complete and in order."""
    parts = [M["Synchronize"](more=True)]
    for number, what in enumerate([*order, *(["next part"] if nothing_last else [])]):
        if what == "next part":
            parts.append(M["Synchronize"](more=True))
        elif what == "pod":
            parts[-1].pods.append(pod(f"pod{number}"))
        else:
            parts[-1].containers.append(container(f"c{number}"))
    parts[-1].more = False
    session = started()
    events: list[Event] = []
    for number, part in enumerate(parts):
        assert events == []
        events += session.receive(request(1 + 2 * number, "Synchronize", part.SerializeToString()))
    (event,) = events
    assert isinstance(event, Synchronized)
    pods, containers = event.listing()

    assert [p.name for p in pods] == [f"pod{i}" for i, what in enumerate(order) if what == "pod"]
    assert [c.name for c in containers] == [f"c{i}" for i, what in enumerate(order) if what == "container"]
    assert [payload for *_, payload in answers(session)] == [b"\x10\x01"] * (len(parts) - 1) + [b""]


def test_what_is_announced_takes_no_memory_before_it_comes() -> None:
    """A frame and a message of 64 MiB cost what has arrived of them."""
    session = started()
    session.receive(b"")
    tracemalloc.start()
    size = SANITY_LIMIT - 10
    announced = frame(1, b"")[:4] + (size + 10).to_bytes(4, "big") + message(1, 1, b"")[4:]
    assert session.receive(announced[:8] + size.to_bytes(4, "big") + announced[8:]) == []
    assert session.receive(b"x" * 1000) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert session.partial
    assert peak < 100_000


def described_or_refused(session: Session, event: Event) -> None:
    try:
        described(event)
        if isinstance(event, CreateContainer):
            event.details()
    except ProtocolError:
        pass
    if isinstance(event, CreateContainer):
        session.refuse(event.token, 2, "no")


def active(ignores: Callable[[bytes], bool] | None = None) -> Session:
    """A session that the runtime has configured and synchronized."""
    session = Session("courier", "10", ignores=ignores)
    session.start()
    session.receive(request(1, "Configure", configure()) + request(3, "Synchronize"))
    session.outgoing()
    return session


def asked(session: Session, pieces: list[bytes]) -> tuple[list[Any], list[tuple[int, int, str, bytes]]]:
    """What an active session makes of a request: events and answers, those to containers left out."""
    events = [in_depth(event) for piece in pieces for event in session.receive(piece)]
    return events, answers(session)


def in_depth(event: Event) -> tuple[object, str]:
    """The event, and its details or why there are none."""
    details = ""
    if isinstance(event, CreateContainer):
        try:
            details = str(event.details())
        except ProtocolError as error:
            details = str(error)
    return described(event), details


def field(number: int, value: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return bytes([number << 3 | 2, len(value)]) + value


@settings(deadline=None)
@given(
    st.binary(max_size=60)
    | st.sampled_from([M["Create"](pod=pod()).SerializeToString(), b""])
    # What only the second reading looks at: the container's fields in depth, mostly not in order.
    | st.builds(
        lambda number, value: field(2, field(number, value)), st.integers(1, 15), st.binary(max_size=9)
    )
)
@example(field(2, field(8, b"\xff")))
def test_a_request_that_comes_whole_is_read_as_one_in_pieces(payload: bytes) -> None:
    """The short way of a lone CreateContainer leads to the same event, details and errors in the same words."""
    data = request(5, "CreateContainer", payload)

    assert asked(active(), [data]) == asked(active(), [data[:7], data[7:]])


def test_what_is_ignored_is_answered_with_nothing_and_once() -> None:
    """A container of which the bytes say enough gets an empty success, and its stream id is used up."""
    session = active(lambda _: True)
    data = request(5, "CreateContainer", M["Create"](pod=pod()).SerializeToString())

    (event,) = session.receive(data)
    assert isinstance(event, Ignored)
    assert answers(session) == [(5, 0, "", b"")]
    assert session.receive(data) == []
    assert [(stream, code) for stream, code, _, _ in answers(session)] == [(5, 3)]


def test_the_bytes_of_other_requests_are_not_asked_about() -> None:
    """Only CreateContainer can be ignored."""
    seen: list[bytes] = []
    session = active(lambda data: bool(seen.append(data)))
    session.receive(request(5, "StateChange", b""))
    session.receive(request(7, "Configure", configure()))

    assert seen == []
