"""systemd is asked over its own socket or the bus, briefly, and told only what it does not know."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cdi_courier.errors import DeliveryError
from cdi_courier_oci_hook.live import dbus, systemd
from cdi_courier_oci_hook.live.device_filter import BLOCK, CHAR, READ, WRITE
from hypothesis import given
from hypothesis import strategies as st

GROUP = "/kubepods.slice/cri-c1.scope"
GRANTS = ((CHAR, 1, 11, READ | WRITE), (BLOCK, 7, 0, READ))
ENTRIES = [("/dev/char/1:11", "rw"), ("/dev/block/7:0", "r")]
UNIT = "/org/freedesktop/systemd1/unit/cri_2dc1_2escope"

TEXT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]))
BASIC = {
    "y": st.integers(0, 255),
    "u": st.integers(0, 2**32 - 1),
    "s": TEXT,
    "o": TEXT,
    "g": st.sampled_from(["", "s", "a(ss)", "sba(sv)"]),
}
TYPES = st.recursive(
    st.sampled_from(sorted(BASIC)),
    lambda inner: (
        inner.map("a{}".format) | st.lists(inner, min_size=1, max_size=3).map(lambda m: f"({''.join(m)})")
    ),
    max_leaves=5,
)


def members(signature: str) -> list[str]:
    """The single types of a signature."""
    found = []
    while signature:
        depth, end = 0, 0
        while True:
            depth += (signature[end] == "(") - (signature[end] == ")")
            end += 1
            if not depth and signature[end - 1] != "a":
                break
        found.append(signature[:end])
        signature = signature[end:]
    return found


def values(signature: str) -> st.SearchStrategy[Any]:
    """Values of one type."""
    if signature in BASIC:
        return BASIC[signature]
    if signature[0] == "a":
        return st.lists(values(signature[1:]), max_size=4)
    return st.tuples(*(values(member) for member in members(signature[1:-1])))


# The wire


def test_a_call_is_written_as_the_specification_says() -> None:
    """Every byte of a call: head, fields and body, each aligned and counted."""
    message = dbus.message(7, "d.e", "/p", "i.f", "Do", "sb", "x", True)

    assert message == b"".join(
        [
            b"l\1\0\1" + b"\x0c\0\0\0" + b"\7\0\0\0" + b"\x48\0\0\0",
            b"\1\1o\0" + b"\2\0\0\0" + b"/p\0" + bytes(5),
            b"\2\1s\0" + b"\3\0\0\0" + b"i.f\0" + bytes(4),
            b"\3\1s\0" + b"\2\0\0\0" + b"Do\0" + bytes(5),
            b"\6\1s\0" + b"\3\0\0\0" + b"d.e\0" + bytes(4),
            b"\x08\1g\0" + b"\2sb\0",
            b"\1\0\0\0" + b"x\0" + bytes(2) + b"\1\0\0\0",
        ]
    )


@given(st.data(), st.lists(TYPES, max_size=4))
def test_what_is_written_is_read(data: st.DataObject, types: list[str]) -> None:
    """Values of any types come back as they were, in variants as well."""
    written = [data.draw(values(one)) for one in types]
    signature = "".join(types)

    assert dbus.unmarshalled(signature, dbus.marshalled(signature, written)) == written
    in_variants = dbus.marshalled("v" * len(types), list(zip(types, written, strict=True)))
    assert dbus.unmarshalled("v" * len(types), in_variants) == written


@given(st.text("ybusogvanqixtdh(){}", max_size=12), st.binary(max_size=120))
def test_bytes_that_are_no_values_are_malformed(signature: str, data: bytes) -> None:
    """Whatever comes is read or is malformed, and never more than it is."""
    with contextlib.suppress(dbus.MalformedError):
        dbus.unmarshalled(signature, data)


@pytest.mark.parametrize("signature", ["a" * 40 + "y", "(" * 40 + "y" + ")" * 40, "v"])
def test_values_within_each_other_have_a_limit(signature: str) -> None:
    """A message of nothing but beginnings does not exhaust the stack."""
    data = b"\x01v\0" * 400 if signature == "v" else (400).to_bytes(4, "little") * 101

    with pytest.raises(dbus.MalformedError):
        dbus.unmarshalled(signature, data)


# A manager that answers


class Manager:
    """What a socket of systemd's answers. properties: of the unit; asked: members and bodies of the calls."""

    def __init__(self, root: Path, where: str = "run/systemd/private") -> None:
        self.root = root
        self.properties: dict[str, tuple[str, Any]] = {
            "ControlGroup": ("s", GROUP),
            "DevicePolicy": ("s", "strict"),
            "DeviceAllow": ("a(ss)", [("/dev/char/1:3", "rwm")]),
            "BPFProgram": ("a(ss)", []),
            "Version": ("s", "257.13-1~deb13u1"),
        }
        self.errors: dict[str, str] = {}
        self.asked: list[tuple[str, list[Any]]] = []
        self.said = b"OK 0123456789abcdef\r\n"
        self.garble: Callable[[bytes], bytes] = lambda reply: reply
        self.greeting = b""
        (root / "run/systemd/system").mkdir(parents=True, exist_ok=True)
        path = root / where
        path.parent.mkdir(parents=True, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(10)
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        # As sd-bus does: what comes in the same piece as BEGIN is not looked at.
        first = connection.recv(4096)
        assert first == b"\0AUTH EXTERNAL " + str(os.geteuid()).encode().hex().encode() + b"\r\nBEGIN\r\n"
        connection.sendall(self.said)
        if not self.said.startswith(b"OK"):
            return
        buffer = b""
        while piece := connection.recv(4096):
            buffer += piece
            while len(buffer) >= 16:
                body, fields = (int.from_bytes(buffer[at : at + 4], "little") for at in (4, 12))
                size = 16 + -(-fields // 8) * 8 + body
                if len(buffer) < size:
                    break
                message, buffer = buffer[:size], buffer[size:]
                connection.sendall(self.garble(self._reply(message, size - body)))

    def _reply(self, message: bytes, at: int) -> bytes:
        serial = int.from_bytes(message[8:12], "little")
        fields_end = 16 + int.from_bytes(message[12:16], "little")
        fields = dict(dbus.unmarshalled("a(yv)", message[12:16] + bytes(4) + message[16:fields_end])[0])
        body = dbus.unmarshalled(fields.get(8, ""), message[at:])
        member = fields[3]
        self.asked.append((member, body))
        name = body[1] if member == "Get" else member
        if name in self.errors:
            return self._message(3, serial, "s", [f"no {name}"], [(4, ("s", self.errors[name]))])
        if member == "GetUnit":
            return self.greeting + self._message(2, serial, "o", [UNIT])
        if member == "Hello":
            signal = self._message(4, 0, "s", [":1.1"], [(1, ("o", "/")), (3, ("s", "NameAcquired"))])
            return self._message(2, serial, "s", [":1.1"]) + signal
        if member == "Get":
            return self._message(2, serial, "v", [self.properties[name]])
        return self._message(2, serial, "", [])

    @staticmethod
    def _message(kind: int, serial: int, signature: str, body: list[Any], more: Any = ()) -> bytes:
        data = dbus.marshalled(signature, body)
        fields = [(5, ("u", serial)), *more, *([(8, ("g", signature))] if signature else [])]
        head = dbus.marshalled("yyyyuua(yv)", [ord("l"), kind, 0, 1, len(data), 99, fields])
        return head + bytes(-len(head) % 8) + data


@pytest.fixture
def root() -> Iterator[Path]:
    """A host's root with a path short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="cdi-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def manager(root: Path) -> Iterator[Manager]:
    """A systemd that manages the scope, with a list of devices."""
    manager = Manager(root)
    yield manager
    manager.close()


def declare(root: Path) -> tuple[str, ...]:
    return systemd.declare(GROUP, GRANTS, str(root))


def code_of(root: Path) -> str:
    with pytest.raises(DeliveryError) as caught:
        declare(root)
    return caught.value.code


def changes(manager: Manager) -> list[Any]:
    return [body for member, body in manager.asked if member == "SetUnitProperties"]


def test_the_scope_gets_the_devices_until_it_ends(root: Path, manager: Manager) -> None:
    """They are added to its list at run time, under the names that systemd takes for numbers."""
    assert declare(root) == ()
    assert changes(manager) == [["cri-c1.scope", 1, [("DeviceAllow", ENTRIES)]]]


def test_an_answer_to_something_else_is_passed_over(root: Path, manager: Manager) -> None:
    """Only the reply to the call counts, and not one that comes before it."""
    stray = manager._message(2, 4711, "s", ["x"]) + manager._message(3, 4711, "s", ["x"])
    manager.garble = lambda reply: stray + reply
    declare(root)

    assert changes(manager) == [["cri-c1.scope", 1, [("DeviceAllow", ENTRIES)]]]


def test_it_is_waited_until_systemd_has_acted(root: Path, manager: Manager) -> None:
    """The last call is one that is answered only after the filter was written."""
    declare(root)

    assert [member for member, _ in manager.asked][-2:] == ["SetUnitProperties", "Ping"]


def test_what_is_listed_already_is_not_listed_again(root: Path, manager: Manager) -> None:
    """Only what is lacking is added, so running twice adds nothing."""
    manager.properties["DeviceAllow"] = ("a(ss)", [("/dev/char/1:11", "rwm"), ("/dev/block/7:0", "w")])
    declare(root)
    assert changes(manager) == [["cri-c1.scope", 1, [("DeviceAllow", ENTRIES[1:])]]]

    manager.properties["DeviceAllow"] = ("a(ss)", ENTRIES)
    declare(root)
    assert len(changes(manager)) == 1


@pytest.mark.parametrize(
    ("policy", "expected"), [("auto", 0), ("strict", 1), ("closed", 1)], ids=["auto", "strict", "closed"]
)
def test_a_scope_without_a_filter_gets_none(root: Path, manager: Manager, policy: str, expected: int) -> None:
    """With policy auto the first entry of a list would keep out all other devices."""
    manager.properties |= {"DevicePolicy": ("s", policy), "DeviceAllow": ("a(ss)", [])}
    declare(root)

    assert len(changes(manager)) == expected


def test_a_unit_elsewhere_with_the_same_name_is_left_alone(root: Path, manager: Manager) -> None:
    """A container within a container may have such a name too."""
    manager.properties["ControlGroup"] = ("s", "/other.slice/cri-c1.scope")
    declare(root)

    assert changes(manager) == []


def test_a_folder_that_is_no_unit_is_nothing_to_do(root: Path, manager: Manager) -> None:
    """The name alone makes no unit: systemd says whether it has one."""
    manager.errors["GetUnit"] = "org.freedesktop.systemd1.NoSuchUnit"
    declare(root)

    assert [member for member, _ in manager.asked] == ["GetUnit"]


def test_where_systemd_does_not_run_nothing_is_asked(root: Path) -> None:
    """Sockets that something left behind do not count."""
    (root / "run/systemd").mkdir(parents=True)
    (root / "run/systemd/private").touch()

    assert declare(root) == ()


def test_pinned_programs_are_told(root: Path, manager: Manager) -> None:
    """Of a unit's programs only those that filter devices."""
    pins = [("egress", "/sys/fs/bpf/e"), ("device", "/sys/fs/bpf/crun/c1_scope")]
    manager.properties |= {
        "BPFProgram": ("a(ss)", pins),
        "DevicePolicy": ("s", "auto"),
        "DeviceAllow": ("a(ss)", []),
    }

    assert declare(root) == ("/sys/fs/bpf/crun/c1_scope",)


def test_a_systemd_without_pinned_programs_has_none(root: Path, manager: Manager) -> None:
    """Before 249 there is no such property."""
    manager.errors["BPFProgram"] = "org.freedesktop.DBus.Error.UnknownProperty"

    assert declare(root) == ()


def test_the_bus_is_asked_where_there_is_no_socket_of_systemds(root: Path) -> None:
    """A bus wants a greeting first, and sends signals in between."""
    manager = Manager(root, "run/dbus/system_bus_socket")
    declare(root)
    manager.close()

    assert [member for member, _ in manager.asked][:2] == ["Hello", "GetUnit"]
    assert len(changes(manager)) == 1


@pytest.mark.parametrize("version", ["239", "v234-5", "239.1"])
def test_an_old_systemd_needs_a_name_for_the_device(root: Path, manager: Manager, version: str) -> None:
    """Before 240 it looks the number up at the name, so without one it is refused with the command."""
    manager.properties["Version"] = ("s", version)
    (root / "dev/block").mkdir(parents=True)
    (root / "dev/block/7:0").symlink_to("/dev/loop0")

    assert code_of(root) == "HOK262"
    assert changes(manager) == []
    (root / "dev/char").mkdir()
    (root / "dev/char/1:11").symlink_to("/dev/kmsg")
    declare(root)
    assert len(changes(manager)) == 1


@pytest.mark.parametrize("member", ["GetUnit", "DeviceAllow", "SetUnitProperties", "Ping"])
def test_a_refusal_is_passed_on_in_systemds_words(root: Path, manager: Manager, member: str) -> None:
    """Whichever call it is that systemd refuses."""
    manager.errors[member] = "org.freedesktop.DBus.Error.AccessDenied"

    with pytest.raises(DeliveryError, match=f'HOK261: .*"cri-c1.scope": "no {member}"'):
        declare(root)


@pytest.mark.parametrize(
    "garble",
    [
        pytest.param(lambda reply: b"", id="silence"),
        pytest.param(lambda reply: reply[:20], id="half a reply"),
        pytest.param(lambda reply: b"B" + reply[1:], id="the other byte order"),
        pytest.param(lambda reply: reply[:4] + b"\xff\xff\xff\x7f" + reply[8:], id="a huge body"),
        pytest.param(lambda reply: reply[:12] + b"\xff\xff\xff\xff" + reply[16:], id="huge fields"),
        pytest.param(lambda reply: reply[:16] + b"\xff" * (len(reply) - 16), id="garbage"),
        pytest.param(lambda reply: reply[:1] + b"\4" + reply[2:], id="nothing but signals"),
    ],
)
def test_what_is_no_answer_ends_in_words_and_in_time(
    root: Path, manager: Manager, monkeypatch: pytest.MonkeyPatch, garble: Callable[[bytes], bytes]
) -> None:
    """A hook never waits longer than its deadline for systemd, whatever that sends."""
    monkeypatch.setattr(systemd, "SECONDS", 0.3)
    manager.garble = garble
    begin = time.monotonic()

    assert code_of(root) == "HOK260"
    assert time.monotonic() - begin < 5


def test_the_callers_deadline_counts_where_it_is_sooner(root: Path, manager: Manager) -> None:
    """What is left until the runtime kills the hook is all that systemd gets."""
    manager.garble = lambda _: b""
    begin = time.monotonic()

    with pytest.raises(DeliveryError, match=r"HOK260: .*no answer in time"):
        systemd.declare(GROUP, GRANTS, str(root), begin + 0.3)
    assert time.monotonic() - begin < systemd.SECONDS


def test_a_socket_that_says_nothing_is_the_only_one_that_is_asked(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung systemd hangs on its bus too: what a hook waits is one time limit, not one a socket."""
    monkeypatch.setattr(systemd, "SECONDS", 0.3)
    (root / "run/systemd/system").mkdir(parents=True)
    (root / "run/dbus").mkdir()
    with socket.socket(socket.AF_UNIX) as private, socket.socket(socket.AF_UNIX) as bus:
        for listener, where in ((private, "systemd/private"), (bus, "dbus/system_bus_socket")):
            listener.bind(str(root / "run" / where))
            listener.listen()
            listener.setblocking(False)
        begin = time.monotonic()

        assert code_of(root) == "HOK260"
        assert time.monotonic() - begin < 5
        private.accept()[0].close()
        with pytest.raises(BlockingIOError):
            bus.accept()


@pytest.mark.parametrize(
    "value", [("s", "x"), ("a(ss)", []), ("au", [1])], ids=["text", "another list", "numbers"]
)
def test_a_property_of_another_type_is_no_answer(
    root: Path, manager: Manager, value: tuple[str, Any]
) -> None:
    """Nothing is concluded from what is not as documented."""
    name = "DevicePolicy" if value[0] != "s" else "DeviceAllow"
    manager.properties |= {"DeviceAllow": ("a(ss)", []), name: value}

    assert code_of(root) == "HOK260"


@pytest.mark.parametrize("said", [b"REJECTED EXTERNAL\r\n", b"x" * 600], ids=["rejected", "no line"])
def test_a_refused_authentication_is_said(root: Path, manager: Manager, said: bytes) -> None:
    """Without permission to talk to it systemd counts as unreachable."""
    manager.said = said

    assert code_of(root) == "HOK260"


@pytest.mark.parametrize("left", [True, False], ids=["nobody listens", "no socket"])
def test_a_systemd_that_cannot_be_reached_is_said(root: Path, left: bool) -> None:
    """It runs, for its folder is there, but nobody answers."""
    (root / "run/systemd/system").mkdir(parents=True)
    if left:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(root / "run/systemd/private"))

    assert code_of(root) == "HOK260"
