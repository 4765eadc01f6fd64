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
from cdi_courier.settings import DeliverySettings, PolicyRule, PolicySettings, Settings

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


def test_whoever_may_have_the_same_gets_the_same_grant(registry: Registry) -> None:
    """Two pods of a namespace that ask alike share one object, those of another namespace do not."""
    made = injector(registry)
    asking = {KEY: "v.com/c=a"}
    first = made.grant(ContainerRequest(asking, namespace="gpu-operator", pod="p", container="c"))
    second = made.grant(ContainerRequest(asking, namespace="gpu-operator", pod="q", container="d"))
    third = made.grant(ContainerRequest(asking, namespace="kube-system", pod="p", container="c"))

    assert first is second
    assert third is not first


@pytest.mark.parametrize("field", ["pods", "containers"])
def test_a_grant_is_not_another_s_where_a_rule_looks_at_names(registry: Registry, field: str) -> None:
    """What one pod or container was granted is refused to the next one that the rule does not name."""
    rule = PolicyRule("allow", namespaces=("team",), **{field: ("good",)})
    policy = PolicySettings(rules=(rule,), sources=("rule 1",))
    made = Injector(attrs.evolve(Settings(), policy=policy), registry, [NVIDIA])

    def request(name: str) -> ContainerRequest:
        return ContainerRequest({KEY: "v.com/c=a"}, namespace="team", pod=name, container=name)

    assert made.grant(request("good"))
    with pytest.raises(PolicyDenied, match='"bad"'):
        made.grant(request("bad"))


def test_a_refusal_names_whoever_asks_now(registry: Registry) -> None:
    """Of two pods that are refused the same, each is told its own name."""
    made = injector(registry, on_denied="skip")
    refused = [
        made.grant(ContainerRequest({KEY: "v.com/c=a"}, namespace="team", pod=pod, container="c"))
        for pod in ("p1", "p2")
    ]

    assert [type(found) for found in refused] == [Skipped, Skipped]
    assert ["team/p1" in str(refused[0].error), "team/p2" in str(refused[1].error)] == [True, True]  # type: ignore[union-attr]
