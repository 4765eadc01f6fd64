"""The pipeline: what each step's answer means for the whole."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from cdi_courier.annotations import NVIDIA
from cdi_courier.cdi.registry import Registry
from cdi_courier.errors import AnnotationError, CdiError, PolicyDenied
from cdi_courier.injector import Injection, Injector, Skipped
from cdi_courier.request import ContainerRequest
from cdi_courier.settings import DeliverySettings, Settings

KEY = "nvidia.cdi.k8s.io"


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """Two devices in one file, which has an edit of its own."""
    devices = [{"name": name, "containerEdits": {"env": [f"{name}=1"]}} for name in ("a", "b")]
    spec = {
        "cdiVersion": "0.5.0",
        "kind": "v.com/c",
        "devices": devices,
        "containerEdits": {"env": ["ALL=1"]},
    }
    (tmp_path / "v.json").write_text(json.dumps(spec))
    return Registry((str(tmp_path),), trust="any")


def injector(registry: Registry, **delivery: str) -> Injector:
    """An injector with these ``[delivery]`` settings."""
    settings = attrs.evolve(Settings(), delivery=DeliverySettings(**delivery))  # type: ignore[arg-type]
    return Injector(settings, registry, [NVIDIA])


def ask(value: str | None, namespace: str = "gpu-operator") -> ContainerRequest:
    """A container whose pod has this annotation, or none."""
    annotations = {} if value is None else {KEY: value}
    return ContainerRequest(annotations, namespace=namespace, pod="p", container="c")


def test_an_injection_has_names_edits_and_provenance(registry: Registry, tmp_path: Path) -> None:
    """What is granted comes in the order asked for, with its annotation and its spec file."""
    injection = injector(registry).inject(ask("v.com/c=b, v.com/c=a,v.com/c=b"))

    assert isinstance(injection, Injection)
    assert injection.names == ("v.com/c=b", "v.com/c=a")
    assert injection.edits.env == ("ALL=1", "b=1", "a=1")
    assert injection.annotations == dict.fromkeys(injection.names, KEY)
    assert injection.files == dict.fromkeys(injection.names, str(tmp_path / "v.json"))


class Untouchable:
    """A registry that must not be asked."""

    def snapshot(self) -> None:
        """Fail."""
        raise AssertionError("the registry was asked")


@pytest.mark.parametrize("value", [None, "", " \n"])
def test_a_request_that_names_nothing_costs_no_scan(value: str | None) -> None:
    """Without a name the registry is not even asked."""
    assert injector(Untouchable()).inject(ask(value)) is None  # type: ignore[arg-type]


def test_who_may_not_ask_learns_nothing_of_the_registry() -> None:
    """The policy is asked first: a refusal is the same whether the device exists or not."""
    with pytest.raises(PolicyDenied):
        injector(Untouchable()).inject(ask("v.com/c=a", namespace="default"))  # type: ignore[arg-type]


def test_one_unresolvable_name_fails_the_whole_request(registry: Registry) -> None:
    """No container gets half of what it asks for."""
    with pytest.raises(CdiError, match=r"v\.com/c=z"):
        injector(registry).inject(ask("v.com/c=a,v.com/c=z"))


@pytest.mark.parametrize(
    ("setting", "value", "namespace", "code"),
    [
        ("on_denied", "v.com/c=a", "default", "POL001"),
        ("on_unresolvable", "v.com/c=a,v.com/c=z", "gpu-operator", "CDI012"),
    ],
)
def test_skip_leaves_the_whole_request_unanswered(
    registry: Registry, setting: str, value: str, namespace: str, code: str
) -> None:
    """With skip the answer names the cause and no device, also none that could be had."""
    skipped = injector(registry, **{setting: "skip"}).inject(ask(value, namespace))

    assert isinstance(skipped, Skipped)
    assert skipped.error.code == code


def test_a_malformed_annotation_is_never_skipped(registry: Registry) -> None:
    """Both skip settings leave an annotation that does not parse an error."""
    with pytest.raises(AnnotationError):
        injector(registry, on_denied="skip", on_unresolvable="skip").inject(ask("v.com/c=a,"))
