"""The NRI backend's answers: what each runtime is sent, and what a container is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from cdi_courier.cdi.registry import Registry
from cdi_courier.dialects import cdi_courier_dialects
from cdi_courier.errors import AnnotationError, CdiError, CourierError, DeliveryError, PolicyDenied
from cdi_courier.hookspecs import ServeContext
from cdi_courier.injector import Injector
from cdi_courier.settings import Settings, load
from cdi_courier_nri import adjustment, messages, runtimes
from cdi_courier_nri.backend import Handler, NriBackend
from cdi_courier_nri.session import Configured, CreateContainer
from hypothesis import given, settings
from hypothesis import strategies as st

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


def created(config: Settings, *arguments: Any, **more: Any) -> bytes:
    return Handler(context(config)).create_container(event(*arguments, **more), 1.0)


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


def configured(name: str, version: str) -> Configured:
    request = messages.ConfigureRequest(runtime_name=name, runtime_version=version)
    made = Configured.__new__(Configured)
    made.runtime_name, made.runtime_version = request.runtime_name, request.runtime_version
    return made


@pytest.mark.parametrize("delivery", ["edits", "auto"])
def test_edits_are_refused_while_they_are_not_built(config: Settings, delivery: str) -> None:
    """Before the runtime has introduced itself, and where edits are set, the answer is DLV001."""
    with pytest.raises(DeliveryError) as caught:
        created(changed(config, "nri", delivery=delivery), "vendor.com/gpu=a")

    assert caught.value.code == "DLV001"
    assert "edits are not built yet" in caught.value.message
    assert 'delivery = "names"' in caught.value.hint


@pytest.mark.parametrize(
    ("delivery", "version", "dirs", "sent"),
    [
        ("names", "v1.7.0", None, True),
        ("edits", "v2.1.0", DIRS, False),
        ("auto", "v2.1.0", None, False),
        ("auto", "v2.1.0", DIRS, True),
        ("auto", "v2.0.0", DIRS, False),
    ],
)
def test_configure_decides_what_is_sent(
    config: Settings, delivery: str, version: str, dirs: tuple[str, ...] | None, sent: bool
) -> None:
    """auto goes by the runtime's version and our directories; names and edits are taken at their word."""
    told = changed(config, "nri", delivery=delivery)
    made = context(told)
    if dirs is not None:
        made = ServeContext(changed(told, "cdi", dirs=dirs), made.injector)
    handler = Handler(made)

    handler.configured(configured("containerd", version))
    try:
        found = claimed(handler.create_container(event("vendor.com/gpu=a"), 1.0))
    except CourierError as error:
        found = [error.code]

    assert found == (["vendor.com/gpu=a"] if sent else ["DLV001"])


def test_who_asks_for_nothing_is_answered_whatever_the_delivery(config: Settings) -> None:
    """A plain container is never refused for what could not be delivered to others."""
    data = created(changed(config, "nri", delivery="edits"), None)

    assert data == b""


def test_the_backend_offers_itself_always(config: Settings) -> None:
    """The offer needs nothing and names the socket, which need not be there."""
    offer = NriBackend().offer(config)

    assert (offer.backend, offer.needs) == ("nri", "nothing")
    assert config.nri.sockets[0] in offer.reason
