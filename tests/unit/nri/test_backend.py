"""The NRI backend's answers: what each runtime is sent, and what a container is told."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
from cdi_courier.cdi.registry import Registry
from cdi_courier.dialects import cdi_courier_dialects
from cdi_courier.errors import AnnotationError, CdiError, DeliveryError, PolicyDenied, ProtocolError
from cdi_courier.hookspecs import Choice, ServeContext
from cdi_courier.host.model import Fact, Runtime
from cdi_courier.injector import Injection, Injector
from cdi_courier.request import ContainerRequest
from cdi_courier.settings import RuntimeSettings, Settings, load
from cdi_courier_nri import adjustment, messages, runtimes
from cdi_courier_nri.backend import NriBackend
from cdi_courier_nri.handler import Handler
from cdi_courier_nri.session import Configured, CreateContainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.nri_runtime import wait_until

DIRS = ("/etc/cdi", "/var/run/cdi")
DOMAIN = "nvidia.cdi.k8s.io"
STATUS = "cdi-courier.io/status"


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("containerd", "v2.1.0", "names"),
        ("containerd", "2.2.1-0ubuntu1~24.04.2", "names"),
        ("containerd", "v2.1.5-k3s1", "names"),
        ("containerd", "v2.3.0-12-gabcdef0.m", "names"),
        ("containerd", "v2.4.0-beta.0", "names"),
        ("containerd", "v10.0.0", "names"),
        ("containerd", "1.7.34+unknown", "edits"),
        ("containerd", "v1.7.0", "edits"),
        ("containerd", "v2.0.9", "edits"),
        ("v2", "v2.0.3", "edits"),
        ("cri-o", "1.34.0", "names"),
        ("cri-o", "1.36.1", "names"),
        ("cri-o", "1.33.9", "edits"),
        ("cri-o", "1.26.0", "edits"),
        ("docker", "29.0.0", "edits"),
        ("Containerd", "v2.1.0", "edits"),
        ("", "", "edits"),
        ("containerd", "", "edits"),
        ("containerd", "2.1", "edits"),
        ("containerd", "unknown", "edits"),
        ("containerd", "２.１.０", "edits"),
        ("containerd", "vv2.1.0", "edits"),
        ("containerd", " v2.1.0", "edits"),
    ],
)
def test_names_are_sent_only_to_runtimes_known_to_honour_them(name: str, version: str, expected: str) -> None:
    """containerd since 2.1 and CRI-O since 1.34 get names; everything else would drop them silently."""
    found, why = runtimes.delivery(name, version, DIRS)

    assert found == expected
    assert why


@pytest.mark.parametrize(
    ("dirs", "expected"),
    [
        (("/etc/cdi/", "/var/run//cdi"), "names"),
        (("/var/run/cdi", "/etc/cdi"), "edits"),
        (("/etc/cdi",), "edits"),
        ((*DIRS, "/opt/cdi"), "edits"),
    ],
)
def test_other_directories_mean_edits(dirs: tuple[str, ...], expected: str) -> None:
    """Where our directories are not the runtime's default ones, it could resolve a name differently."""
    found, _ = runtimes.delivery("containerd", "v2.1.0", dirs)

    assert found == expected


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12), st.text(alphabet="v0129.-+x", max_size=30))
def test_any_runtime_gets_one_of_the_two(name: str, version: str) -> None:
    """Whatever a runtime calls itself, the answer is names or edits and never an exception."""
    found, _ = runtimes.delivery(name, version, DIRS)

    assert found in {"names", "edits"}


def answer(data: bytes) -> Any:
    return messages.CreateContainerResponse.FromString(data).adjust


def claimed(data: bytes) -> list[str]:
    return [device.name for device in answer(data).CDI_devices]


NAMES = st.lists(st.from_regex(r"[ab]/[ab]=[ab]{1,2}", fullmatch=True), unique=True, max_size=6)


@settings(max_examples=200, deadline=None)
@given(NAMES, NAMES)
def test_a_reply_never_claims_one_name_twice(names: list[str], present: list[str]) -> None:
    """Each name is claimed once, in order, unless the runtime injects it anyway; the marker holds all."""
    data = adjustment.by_names(names, set(present))

    assert claimed(data) == [name for name in names if name not in present]
    assert dict(answer(data).annotations) == {STATUS: "injected:" + ",".join(names)}
    # On the wire too: a map entry sent twice would parse as one.
    assert data.count(STATUS.encode()) == 1


def test_a_skipped_request_claims_nothing_but_the_marker() -> None:
    """The marker says the code, and no device is claimed."""
    data = adjustment.skipped("POL001")

    assert claimed(data) == []
    assert dict(answer(data).annotations) == {STATUS: "skipped:POL001"}


@pytest.fixture
def config(tmp_path: Path) -> Settings:
    """Settings whose spec folder holds vendor.com/gpu=a and =b, with names forced."""
    folder = tmp_path / "cdi"
    folder.mkdir()
    edits = {"containerEdits": {"env": ["A=b"]}}
    spec = {"cdiVersion": "0.6.0", "kind": "vendor.com/gpu", "devices": [{"name": n, **edits} for n in "ab"]}
    (folder / "v.json").write_text(json.dumps(spec))
    file = tmp_path / "x.toml"
    file.write_text(
        f'[cdi]\ndirs = ["{folder}"]\ntrust = "any"\n[nri]\ndelivery = "names"\nsockets = ["{tmp_path}/s"]\n'
    )
    return load([file])


def write(config: Settings, **devices: dict[str, Any]) -> None:
    """Replace the spec file: device name → its edits."""
    path = Path(config.cdi.dirs[0]) / "v.json"
    made = [{"name": name, "containerEdits": edits or {"env": ["A=b"]}} for name, edits in devices.items()]
    partial = path.with_suffix(".new")
    partial.write_text(json.dumps({"cdiVersion": "0.7.0", "kind": "vendor.com/gpu", "devices": made}))
    partial.rename(path)


def context(config: Settings) -> ServeContext:
    registry = Registry(config.cdi.dirs, trust=config.cdi.trust, max_file_size=config.cdi.max_file_size)
    return ServeContext(config, Injector(config, registry, cdi_courier_dialects()))


def changed(config: Settings, section: str, **values: Any) -> Settings:
    return attrs.evolve(config, **{section: attrs.evolve(getattr(config, section), **values)})


def event(
    value: str | None, namespace: str = "gpu-operator", present: tuple[str, ...] = ()
) -> CreateContainer:
    request = messages.CreateContainerRequest()
    request.pod.namespace, request.pod.name, request.container.name = namespace, "pod", "c"
    if value is not None:
        request.pod.annotations[DOMAIN] = value
    for name in present:
        request.container.CDI_devices.add(name=name)
    return CreateContainer(1, request, request.SerializeToString(), 0)


def handler_of(made: ServeContext, path: str = "/run/nri.sock") -> Handler:
    return Handler(made, path, ThreadPoolExecutor(1))


def answered(handler: Handler, asked: CreateContainer) -> bytes:
    """The answer, as the connection gets it: perhaps later, perhaps by a function."""
    try:
        found = handler.create_container(asked, 1.0)
        found = found.result(10) if isinstance(found, Future) else found
        data: bytes = found() if callable(found) else found
    finally:
        handler.answered()
    return data


def created(config: Settings, *arguments: Any, **more: Any) -> bytes:
    return answered(handler_of(context(config)), event(*arguments, **more))


@pytest.mark.parametrize("value", [None, "", " "])
def test_who_asks_for_nothing_gets_an_empty_reply(config: Settings, value: str | None) -> None:
    """A container without a request is answered with no bytes, whatever its namespace."""
    data = created(config, value, "default")

    assert data == b""


def test_an_allowed_request_is_answered_with_its_names(config: Settings) -> None:
    """The names are claimed in the order asked for, once each, with the marker."""
    data = created(config, "vendor.com/gpu=b, vendor.com/gpu=a,vendor.com/gpu=b")

    assert claimed(data) == ["vendor.com/gpu=b", "vendor.com/gpu=a"]
    assert answer(data).annotations[STATUS] == "injected:vendor.com/gpu=b,vendor.com/gpu=a"


def test_names_already_present_are_left_out(config: Settings) -> None:
    """A name the runtime injects anyway is not claimed again, or its hooks would run twice."""
    data = created(config, "vendor.com/gpu=a,vendor.com/gpu=b", present=("vendor.com/gpu=a", "x/y=z"))

    assert claimed(data) == ["vendor.com/gpu=b"]


@pytest.mark.parametrize(
    ("value", "namespace", "error", "code"),
    [
        ("vendor.com/gpu=a", "default", PolicyDenied, "POL001"),
        ("vendor.com/gpu=a", "", PolicyDenied, "POL001"),
        ("vendor.com/gpu=none", "gpu-operator", CdiError, "CDI"),
        ("vendor.com/gpu=a,vendor.com/gpu=none", "gpu-operator", CdiError, "CDI"),
        ("gpu", "default", AnnotationError, "ANN001"),
        ("vendor.com/gpu=a,", "default", AnnotationError, "ANN002"),
    ],
)
def test_a_refusal_is_raised_and_logged(
    config: Settings, caplog: pytest.LogCaptureFixture, value: str, namespace: str, error: type, code: str
) -> None:
    """A denied, unresolvable or malformed request raises its error, and the log says who was refused."""
    with pytest.raises(error) as caught:
        created(config, value, namespace)

    assert caught.value.code.startswith(code)
    (record,) = [r for r in caplog.records if r.name == "cdi_courier.nri"]
    assert record.levelname == "WARNING"
    assert f"refused {namespace}/pod/c: {code}" in record.getMessage()


@pytest.mark.parametrize(
    ("setting", "value", "namespace", "code"),
    [
        ("on_denied", "vendor.com/gpu=a", "default", "POL001"),
        ("on_unresolvable", "vendor.com/gpu=none", "gpu-operator", "CDI"),
        ("on_unresolvable", "vendor.com/gpu=a,vendor.com/gpu=none", "gpu-operator", "CDI"),
    ],
)
def test_a_skipped_request_is_marked_and_logged(
    config: Settings, caplog: pytest.LogCaptureFixture, setting: str, value: str, namespace: str, code: str
) -> None:
    """With skip the container starts without any device, and marker and log say why."""
    data = created(changed(config, "delivery", **{setting: "skip"}), value, namespace)

    assert claimed(data) == []
    assert answer(data).annotations[STATUS].startswith(f"skipped:{code}")
    assert "skipped" in caplog.text


def test_a_malformed_annotation_is_never_skipped(config: Settings) -> None:
    """The skip settings are about denied and unresolvable names, not about what does not parse."""
    skipping = changed(config, "delivery", on_denied="skip", on_unresolvable="skip")

    with pytest.raises(AnnotationError) as caught:
        created(skipping, "gpu")

    assert caught.value.code == "ANN001"


def configured(name: str = "containerd", version: str = "v1.7.0", nri: str = "") -> Configured:
    return Configured(messages.ConfigureRequest(runtime_name=name, runtime_version=version, NRI_version=nri))


@pytest.mark.parametrize(
    ("delivery", "version", "dirs", "names"),
    [
        ("names", "v1.7.0", None, True),
        ("edits", "v2.1.0", DIRS, False),
        ("auto", "v2.1.0", None, False),
        ("auto", "v2.1.0", DIRS, True),
        ("auto", "v2.0.0", DIRS, False),
    ],
)
def test_configure_decides_what_is_sent(
    config: Settings, delivery: str, version: str, dirs: tuple[str, ...] | None, names: bool
) -> None:
    """auto goes by the runtime's version and our directories; names and edits are taken at their word."""
    told = changed(config, "nri", delivery=delivery)
    made = context(told)
    if dirs is not None:
        made = ServeContext(changed(told, "cdi", dirs=dirs), made.injector)
    handler = handler_of(made)

    handler.configured(configured(version=version))
    data = answered(handler, event("vendor.com/gpu=a"))

    assert claimed(data) == (["vendor.com/gpu=a"] if names else [])
    assert [pair.key for pair in answer(data).env] == ([] if names else ["A"])
    assert answer(data).annotations[STATUS] == "injected:vendor.com/gpu=a"


@pytest.mark.parametrize("delivery", ["edits", "auto"])
def test_before_the_runtime_has_introduced_itself_edits_are_sent(config: Settings, delivery: str) -> None:
    """Every runtime takes edits, so they are what an unknown one gets."""
    data = created(changed(config, "nri", delivery=delivery), "vendor.com/gpu=a")

    assert [(pair.key, pair.value) for pair in answer(data).env] == [("A", "b")]


@pytest.mark.parametrize(
    ("name", "version", "told", "expected"),
    [
        ("containerd", "v1.7.24", "", (0, 6)),
        ("containerd", "1.7.26+unknown", "", (0, 8)),
        ("v2", "v2.0.1", "", (0, 8)),
        ("containerd", "v2.1.9", "", (0, 8)),
        ("containerd", "v2.2.0", "", (0, 10)),
        ("containerd", "v2.2.1", "", (0, 11)),
        ("containerd", "v2.3.0", "v0.12.0", (0, 12)),
        ("containerd", "v2.9.0", "v0.14.1", (0, 14)),
        ("containerd", "v2.3.0", "(devel)", (0, 12)),
        ("containerd", "v2.3.0", "0.0.0-unknown", (0, 12)),
        ("cri-o", "1.33.1", "", (0, 9)),
        ("cri-o", "1.36.0", "", (0, 11)),
        ("cri-o", "1.28.0", "", (0, 0)),
        ("docker", "29.0.0", "", (0, 0)),
        ("containerd", "unknown", "", (0, 0)),
        ("", "", "", (0, 0)),
    ],
)
def test_the_nri_version_is_told_or_follows_from_the_runtime(
    name: str, version: str, told: str, expected: tuple[int, int]
) -> None:
    """Since 0.12 runtimes tell it; before, their own version says it; else the oldest is assumed."""
    found = runtimes.nri_version(name, version, told)

    assert found == expected


def test_what_was_injected_is_logged_when_the_answer_is_on_its_way(
    config: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says what the runtime was told, once, and not before it was told."""
    caplog.set_level("INFO", "cdi_courier.nri")
    handler = handler_of(context(config))
    made = handler.create_container(event("vendor.com/gpu=a"), 1.0)
    made.result(10)()

    assert "injected" not in caplog.text
    handler.answered()
    handler.answered()
    assert caplog.text.count("injected gpu-operator/pod/c: vendor.com/gpu=a") == 1


def test_an_answer_that_was_never_sent_is_not_logged_as_an_injection(
    config: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the connection ends first, the next session says so, and nothing claims an injection."""
    handler = handler_of(context(config))
    made = handler.create_container(event("vendor.com/gpu=a"), 1.0)
    made.result(10)()

    handler.configured(configured())
    handler.answered()

    assert "not injected gpu-operator/pod/c: the connection ended" in caplog.text
    assert ": injected" not in caplog.text


LOSSY = {"env": ["A=b"], "additionalGids": [44]}


def test_what_cannot_be_delivered_fails_and_is_named(
    config: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """The refusal names the devices, the edit, why it is lost, and the setting that tolerates it."""
    write(config, a=LOSSY)

    with pytest.raises(DeliveryError) as caught:
        created(changed(config, "nri", delivery="edits"), "vendor.com/gpu=a")

    text = str(caught.value)
    assert caught.value.code == "DLV001"
    for words in ("vendor.com/gpu=a", "additional group 44", "cannot add groups", 'undeliverable = "warn"'):
        assert words in text
    assert "refused gpu-operator/pod/c: DLV001" in caplog.text


def test_what_cannot_be_delivered_is_left_out_with_warn(
    config: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """With warn the container gets the rest, and the log names what is missing."""
    write(config, a=LOSSY)
    tolerant = changed(changed(config, "nri", delivery="edits"), "delivery", undeliverable="warn")

    data = created(tolerant, "vendor.com/gpu=a")

    assert [pair.key for pair in answer(data).env] == ["A"]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "gpu-operator/pod/c misses edits" in warning
    assert "additional group 44" in warning


def test_names_lose_nothing(config: Settings) -> None:
    """By names the runtime itself injects, so what edits would lose is no reason to refuse."""
    write(config, a=LOSSY)

    data = created(config, "vendor.com/gpu=a")

    assert claimed(data) == ["vendor.com/gpu=a"]


def test_many_lost_edits_make_a_text_of_bounded_length(config: Settings) -> None:
    """The first few are named and the others counted, because a pod's event has little room."""
    write(config, a={"additionalGids": list(range(1, 1000))})

    with pytest.raises(DeliveryError) as caught:
        created(changed(config, "nri", delivery="edits"), "vendor.com/gpu=a")

    assert "additional group 8" in caught.value.message
    assert "and 991 more" in caught.value.message
    assert len(str(caught.value)) < 1000


def test_a_runtime_that_does_not_tell_users_is_named_once(
    config: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Device nodes stay root's where the user is not told; the log says so once a session."""
    write(config, a={"deviceNodes": [{"path": "/dev/x", "type": "c", "major": 1, "minor": 3}]})
    handler = handler_of(context(changed(config, "nri", delivery="edits")))

    def warnings() -> list[str]:
        return [
            r.getMessage() for r in caplog.records if "does not tell the container's user" in r.getMessage()
        ]

    for session in (1, 2):
        handler.configured(configured())
        for _ in range(3):
            answered(handler, event("vendor.com/gpu=a"))
        assert len(warnings()) == session


def test_files_are_read_only_if_they_have_changed_and_never_in_the_connection_s_thread(
    config: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded is answered at once, what must be read is read by another thread."""
    made = context(config)
    handler = handler_of(made)
    readers = []
    snapshot = made.injector.registry.snapshot

    def reading() -> Any:
        readers.append(threading.current_thread())
        return snapshot()

    monkeypatch.setattr(made.injector.registry, "snapshot", reading)

    first = handler.create_container(event("vendor.com/gpu=a"), 1.0)
    assert isinstance(first, Future)
    assert claimed(first.result(10)()) == ["vendor.com/gpu=a"]
    wait_until(lambda: settled(made), "the files to be old enough to be relied on")
    second = handler.create_container(event("vendor.com/gpu=b"), 1.0)
    assert claimed(second) == ["vendor.com/gpu=b"]
    write(config, z={})
    third = handler.create_container(event("vendor.com/gpu=z"), 1.0)
    assert claimed(third.result(10)()) == ["vendor.com/gpu=z"]
    assert len(readers) == 2
    assert threading.current_thread() not in readers


def settled(made: ServeContext) -> bool:
    registry = made.injector.registry
    Registry.snapshot(registry)
    return registry.current() is not None


@pytest.mark.parametrize("value", [None, "", "vendor.com/gpu=a,", "vendor.com/gpu=denied"])
def test_who_gets_nothing_waits_for_no_file(config: Settings, value: str | None) -> None:
    """A container that asks for nothing, or may not have it, is answered before any spec file is read."""
    handler = handler_of(context(config))

    try:
        data = handler.create_container(event(value, "default"), 1.0)
    except (AnnotationError, PolicyDenied):
        data = b""

    assert data == b""


def test_what_was_made_ready_is_not_used_for_changed_edits(config: Settings) -> None:
    """Edits are prepared once for as long as their file stays the same, and anew when it changes."""
    handler = handler_of(context(changed(config, "nri", delivery="edits")))
    seen = []

    for value in ("b", "c", "d"):
        write(config, a={"env": [f"A={value}"]})
        seen += [answer(answered(handler, event("vendor.com/gpu=a"))).env[0].value for _ in range(2)]

    assert seen == ["b", "b", "c", "c", "d", "d"]


# The audit


def listed(**containers: tuple[str | None, dict[str, str]]) -> tuple[list[Any], list[Any]]:
    """Synchronize's lists: container name → (what its pod asks for, the container's annotations)."""
    pods, found = [], []
    for name, (value, marks) in containers.items():
        pods.append(messages.PodSandbox(id=f"p-{name}", name=f"pod-{name}", namespace="gpu-operator"))
        if value is not None:
            pods[-1].annotations[DOMAIN] = value
        found.append(
            messages.ListedContainer(
                id=name, pod_sandbox_id=f"p-{name}", name=name, state=3, annotations=marks
            )
        )
    return pods, found


def test_containers_that_ask_and_have_no_marker_are_reported(
    config: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """At Synchronize each is named with pod, container, devices and the cure; all others are left unsaid."""
    handler = handler_of(context(config))
    pods, containers = listed(
        asks=("vendor.com/gpu=a,vendor.com/gpu=b", {"other": "x"}),
        handled=("vendor.com/gpu=a", {STATUS: "injected:vendor.com/gpu=a"}),
        skipped=("vendor.com/gpu=a", {STATUS: "skipped:POL001"}),
        plain=(None, {}),
        stopped=("vendor.com/gpu=a", {}),
    )
    containers[-1].state = 4
    orphan = messages.ListedContainer(id="o", pod_sandbox_id="nobody", name="o", state=3)

    handler.synchronized(pods, [*containers, orphan])

    (missed,) = handler.missed
    assert str(missed.request) == "gpu-operator/pod-asks/asks"
    assert missed.names == ("vendor.com/gpu=a", "vendor.com/gpu=b")
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert line.startswith(
        "missed gpu-operator/pod-asks/asks: it runs without vendor.com/gpu=a,vendor.com/gpu=b;"
    )
    assert "delete the pod" in line


@pytest.mark.parametrize(
    ("value", "settings_", "cure"),
    [
        ("vendor.com/gpu=a", {"on_denied": "fail"}, "would be refused: POL001"),
        ("vendor.com/gpu=a", {"on_denied": "skip"}, "would not get them either: POL001"),
        ("gpu", {}, "would be refused: ANN001"),
    ],
)
def test_the_cure_fits_the_case(config: Settings, value: str, settings_: dict[str, str], cure: str) -> None:
    """Where a new container would be refused too, deleting the pod is not what is advised."""
    handler = handler_of(context(changed(config, "delivery", **settings_)))
    pods, containers = listed(asks=(value, {}))
    pods[0].namespace = "default"

    handler.synchronized(pods, containers)

    (missed,) = handler.missed
    assert cure in missed.cure
    assert "delete" not in missed.cure


def test_the_next_synchronize_replaces_what_was_missed(config: Settings) -> None:
    """What is kept is what exists: containers that are gone are forgotten."""
    handler = handler_of(context(config))
    handler.synchronized(*listed(asks=("vendor.com/gpu=a", {})))

    handler.synchronized(*listed(other=(None, {})))

    assert handler.missed == ()


@pytest.mark.parametrize(
    ("known", "idle"),
    [
        ({}, False),
        ({"containerd": {"backend": "nri"}}, False),
        ({"containerd": {"endpoint": "/x"}}, False),
        ({"cri-o": {"ignore": True}}, False),
        ({"containerd": {"ignore": True}}, True),
        ({"containerd": {"backend": "oci_hook"}}, True),
        ({"/run/nri.sock": {"backend": "oci_hook"}}, True),
        ({"/run/nri.sock": {"backend": "nri"}, "containerd": {"ignore": True}}, False),
    ],
)
def test_a_runtime_that_belongs_to_another_backend_is_left_alone(
    config: Settings, known: dict[str, dict[str, Any]], idle: bool
) -> None:
    """Its containers are neither given devices nor audited; a socket's entry counts before its kind's."""
    theirs = {key: RuntimeSettings(**values) for key, values in known.items()}
    handler = handler_of(context(attrs.evolve(config, runtimes=theirs)))
    handler.configured(configured())

    handler.synchronized(*listed(asks=("vendor.com/gpu=a", {})))
    data = answered(handler, event("vendor.com/gpu=a"))

    assert (data == b"") is idle
    assert (handler.missed == ()) is idle


def test_who_asks_for_nothing_is_answered_whatever_the_delivery(config: Settings) -> None:
    """A plain container is never refused for what could not be delivered to others."""
    data = created(changed(config, "nri", delivery="edits"), None)

    assert data == b""


# Beside the description of the host


def described(**facts: Any) -> Choice:
    """A choice for containerd 2.1 with these facts, served by nri."""
    known = {name: Fact(value, "a test") for name, value in facts.items()}
    runtime = Runtime("containerd", "containerd", "2.1.9", "/run/containerd/containerd.sock", known)
    return Choice(runtime, (), "nri", "nri", "", "", {})


class Described:
    """What is chosen, as the service tells it; `found` may change."""

    def __init__(self) -> None:
        self.found: Choice | None = None

    def __call__(self, kind: str, socket: str) -> Choice | None:
        return self.found


def test_what_the_host_is_found_to_be_changes_what_is_sent(config: Settings) -> None:
    """Edits until the runtime is known to read our directories, names from then on, edits again otherwise."""
    host = Described()
    made = attrs.evolve(context(changed(config, "nri", delivery="auto")), chosen=host)
    handler = handler_of(made)
    handler.configured(configured(version="v2.1.9"))
    sent = []

    for found in (None, described(cdi_spec_dirs=list(config.cdi.dirs)), described(cdi_spec_dirs=["/x"])):
        host.found = found
        handler.reconsider()
        sent.append("names" if claimed(answered(handler, event("vendor.com/gpu=a"))) else "edits")

    assert sent == ["edits", "names", "edits"]


def test_a_runtime_that_another_backend_serves_is_left_alone_from_then_on(
    config: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the active backend delivers; who else would, says so once and answers nothing."""
    host = Described()
    handler = handler_of(attrs.evolve(context(config), chosen=host))
    handler.configured(configured())
    assert answered(handler, event("vendor.com/gpu=a")) != b""

    host.found = attrs.evolve(described(), active="oci_hook")
    handler.reconsider()
    handler.reconsider()

    assert answered(handler, event("vendor.com/gpu=a")) == b""
    assert caplog.text.count("backend oci_hook serves them") == 1


@pytest.mark.parametrize(
    ("known", "idle"),
    [
        ({"/run/containerd/containerd.sock": {"ignore": True}}, True),
        ({"/run/containerd/containerd.sock": {"backend": "oci_hook"}}, True),
        ({"/run/containerd/containerd.sock": {"backend": "nri"}, "containerd": {"ignore": True}}, False),
        ({"/run/other.sock": {"ignore": True}}, False),
    ],
)
def test_a_runtime_is_known_by_its_cri_socket_once_it_is_described(
    config: Settings, known: dict[str, dict[str, Any]], idle: bool
) -> None:
    """[runtimes] may name the socket of the runtime's API, which only the description connects with NRI's."""
    host = Described()
    theirs = {key: RuntimeSettings(**values) for key, values in known.items()}
    handler = handler_of(attrs.evolve(context(attrs.evolve(config, runtimes=theirs)), chosen=host))
    handler.configured(configured())

    host.found = attrs.evolve(described(), active=None)
    handler.reconsider()

    assert (answered(handler, event("vendor.com/gpu=a")) == b"") is idle


def test_a_session_that_serves_is_not_silenced_by_a_probe_that_could_not_tell(config: Settings) -> None:
    """A description that finds nobody active does not overrule the runtime, which has introduced itself."""
    host = Described()
    handler = handler_of(attrs.evolve(context(config), chosen=host))
    handler.configured(configured())

    host.found = attrs.evolve(described(), active=None)
    handler.reconsider()

    assert answered(handler, event("vendor.com/gpu=a")) != b""


@pytest.mark.parametrize(
    ("found", "looks"),
    [(None, 1), (described(), 0), (attrs.evolve(described(), active=None), 1)],
    ids=["not described", "as described", "described as not served"],
)
def test_a_runtime_that_is_not_what_was_described_is_looked_at(
    config: Settings, found: Choice | None, looks: int
) -> None:
    """A session with a runtime that the description does not know so has the host described anew."""
    host, asked = Described(), []
    host.found = found
    made = attrs.evolve(context(config), chosen=host, look=lambda: asked.append(1))

    handler_of(made).configured(configured(version="v2.1.9"))
    same = len(asked)
    handler_of(made).configured(configured(version="v2.2.0"))

    assert (same, len(asked) - same) == (looks, 1)


def test_the_status_says_what_became_of_whom(config: Settings) -> None:
    """Counts, state and the latest decisions are plain JSON."""
    handler = handler_of(context(config))
    handler.configured(configured("v2", "v2.0.1"))
    handler.observe("active", 12.5, "")
    answered(handler, event("vendor.com/gpu=a"))
    answered(handler, event(None))
    with pytest.raises(PolicyDenied):
        answered(handler, event("vendor.com/gpu=a", "default"))
    handler.synchronized(*listed(asks=("vendor.com/gpu=a", {})))

    status, decisions = json.loads(json.dumps([handler.status(), handler.decisions()]))

    assert (status["state"], status["since"], status["kind"]) == ("active", 12.5, "containerd")
    assert status["counts"] == {
        "requests": 3,
        "injected": 1,
        "skipped": 0,
        "refused": 1,
        "unresolved": 0,
        "undeliverable": 0,
        "missed": 1,
    }
    assert (status["refusals"], status["skips"]) == ({"POL001": 1}, {})
    assert status["kinds"] == {"vendor.com/gpu": 1}
    assert status["missed"][0]["devices"] == ["vendor.com/gpu=a"]
    assert [(d["verdict"], d["container"]) for d in decisions] == [
        ("injected", "gpu-operator/pod/c"),
        ("refused", "default/pod/c"),
    ]
    assert decisions[1]["cause"].startswith("POL001: ")
    assert [decision["code"] for decision in decisions] == ["", "POL001"]
    assert decisions[0]["rule"] == "the built-in rule"
    assert "[policy] default" in decisions[1]["rule"]
    assert all(0 <= decision["duration"] < 10 for decision in decisions)
    assert {decision["runtime"] for decision in decisions} == {"v2 v2.0.1"}


def test_decisions_are_the_latest_only(config: Settings) -> None:
    """However many containers there were, the status stays small."""
    handler = handler_of(context(config))

    for _ in range(300):
        answered(handler, event("vendor.com/gpu=a"))

    assert len(handler.decisions()) == 100
    assert handler.status()["counts"]["injected"] == 300


def test_what_would_be_lost_is_known_without_a_container(config: Settings) -> None:
    """By edits the backend names it; by names nothing is lost."""
    write(config, a=LOSSY)
    made = context(config)
    request = ContainerRequest({DOMAIN: "vendor.com/gpu=a"}, namespace="gpu-operator", container="c")
    injection = made.injector.inject(request)
    assert isinstance(injection, Injection)
    runtime = described(cdi_spec_dirs=list(config.cdi.dirs)).runtime

    by = {
        way: NriBackend().undeliverable(runtime, injection, changed(config, "nri", delivery=way))
        for way in ("auto", "names", "edits")
    }

    assert by == {"auto": (), "names": (), "edits": [("additional group 44", "NRI cannot add groups")]}


# New settings under way


def test_a_request_that_waits_ends_with_the_settings_it_began_with(config: Settings) -> None:
    """What is answered by after a reload counts for the next request; the one under way keeps its terms."""
    handler = handler_of(context(config))
    waiting = handler.create_container(event("vendor.com/gpu=a"), 1.0)
    assert isinstance(waiting, Future)

    other = context(changed(changed(config, "nri", delivery="edits"), "cdi", dirs=("/nowhere",)))
    handler.reload(other.settings, other.injector)
    data = waiting.result(10)()

    assert claimed(data) == ["vendor.com/gpu=a"]
    with pytest.raises(CdiError):
        answered(handler, event("vendor.com/gpu=a"))


def test_a_reload_and_a_new_description_do_not_undo_each_other(config: Settings) -> None:
    """What the host is found to be is judged by the settings in force, not by those of the start."""
    host = Described()
    made = attrs.evolve(context(changed(config, "nri", delivery="auto")), chosen=host)
    handler = handler_of(made)
    handler.configured(configured(version="v2.1.9"))

    forced = context(changed(config, "nri", delivery="edits"))
    handler.reload(forced.settings, forced.injector)
    host.found = described(cdi_spec_dirs=list(config.cdi.dirs))
    handler.reconsider()

    assert claimed(answered(handler, event("vendor.com/gpu=a"))) == []
    assert handler.status()["why"] == '[nri] delivery = "edits"'


def test_a_refusal_that_is_the_connection_s_is_counted_instead_of_the_answer(
    config: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """An answer that NRI does not carry is no injection: counts, decisions and log say refused."""
    caplog.set_level("INFO", "cdi_courier.nri")
    handler = handler_of(context(config))
    asked = event("vendor.com/gpu=a")
    made = handler.create_container(asked, 1.0)
    made.result(10)()

    handler.failed(asked, ProtocolError("NRI014", "too large"))
    handler.answered()

    counts = handler.status()["counts"]
    assert (counts["injected"], counts["refused"]) == (0, 1)
    assert handler.refusals == {"NRI014": 1}
    assert "injected" not in caplog.text


def test_a_request_that_ran_out_of_time_is_told_with_its_devices_and_how_long_it_took(
    config: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was decided by then, but what was asked for is known, and since when."""
    clock = iter([100.0, 101.4])
    handler = handler_of(context(config))
    asked = event("vendor.com/gpu=a")
    monkeypatch.setattr("cdi_courier_nri.handler.time.monotonic", lambda: next(clock, 101.4))
    waiting = handler.create_container(asked, 1.0)

    handler.failed(asked, ProtocolError("NRI015", "too late"))
    handler.answered()

    assert isinstance(waiting, Future)
    (told,) = handler.decisions()
    assert (told["code"], told["devices"]) == ("NRI015", ["vendor.com/gpu=a"])
    assert told["duration"] == pytest.approx(1.4)


def test_the_kinds_that_are_counted_are_bounded(config: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many vendors a host's files name, there are so many series and one for the rest."""
    monkeypatch.setattr("cdi_courier_nri.handler._MAX_KINDS", 1)
    handler = handler_of(context(config))
    edits = {"containerEdits": {"env": ["A=b"]}}
    spec = {"cdiVersion": "0.6.0", "kind": "other.com/x", "devices": [{"name": "a", **edits}]}
    (Path(config.cdi.dirs[0]) / "w.json").write_text(json.dumps(spec))

    for value in ("vendor.com/gpu=a", "other.com/x=a", "other.com/x=a", "vendor.com/gpu=b"):
        answered(handler, event(value))

    assert handler.kinds == {"vendor.com/gpu": 2, "other": 2}


HOSTILE = st.text(max_size=253)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(HOSTILE, HOSTILE)
def test_whatever_a_pod_is_called_its_decision_is_one_line_and_json(
    config: Settings, caplog: pytest.LogCaptureFixture, pod: str, container: str
) -> None:
    """Unicode, control characters and globs in names neither forge a line nor break the status."""
    caplog.clear()
    handler = handler_of(context(config))
    asked = event("vendor.com/gpu=a", "default")
    asked.pod.name, asked.container.name = pod, container

    with pytest.raises(PolicyDenied):
        answered(handler, asked)

    (record,) = [r for r in caplog.records if "refused" in r.getMessage()]
    assert record.getMessage().isprintable()
    assert json.loads(json.dumps(handler.decisions()))[0]["container"].isprintable()


# What is left unread


@given(
    st.dictionaries(
        st.sampled_from([DOMAIN, f"{DOMAIN}/pod", f"{DOMAIN}/container.c", "other", f"x.{DOMAIN}"])
        | st.text(),
        st.text(),
    )
)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_ignored_unread_asks_for_nothing(config: Settings, annotations: dict[str, str]) -> None:
    """Whoever has an annotation of ours is read, whatever else there is; the count has all of them."""
    made = context(config)
    handler = handler_of(made)
    request = messages.CreateContainerRequest()
    request.pod.namespace, request.pod.name, request.container.name = "n", "p", "c"
    request.pod.annotations.update(annotations)
    ignored = handler.ignores(request.SerializeToString())

    asks = {DOMAIN, f"{DOMAIN}/pod", f"{DOMAIN}/container.c"} & set(annotations)
    assert not (ignored and asks)
    assert handler.counts["requests"] == ignored
