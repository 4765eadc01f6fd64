"""Policy and limits at their edges, through the first half of the pipeline: settings in, a verdict out.

Names, namespaces and annotations are whatever a pod's author likes; rules and limits are root's.
"""

from __future__ import annotations

import unicodedata
from fnmatch import fnmatchcase
from pathlib import Path

import attrs
import pytest
from cdi_courier.cdi.registry import Registry
from cdi_courier.dialects import cdi_courier_dialects
from cdi_courier.errors import AnnotationError, PolicyDenied
from cdi_courier.injector import Grant, Injector
from cdi_courier.policy import BUILT_IN
from cdi_courier.request import ContainerRequest
from cdi_courier.settings import AnnotationsSettings, PolicyRule, PolicySettings, Settings
from hypothesis import example, given
from hypothesis import strategies as st

DOMAIN = "nvidia.cdi.k8s.io"
SAMPLE = "cdi-devices.noderesource.dev"
DEVICE = "v.com/c=a"

# What Kubernetes allows for names, and what a runtime could hand on if something else did not check it.
NAMES = st.one_of(
    st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True),
    st.text("*?[]!-ab\\", min_size=1, max_size=6),
    st.text(min_size=1, max_size=12),
    st.sampled_from(
        ["a" * 253, "ü" * 253, "\u202egpu-operator", "gpu-operator\n", "GPU-OPERATOR", "ｇpu-operator"]
    ),
)


def injector(*rules: PolicyRule, default: str = "deny", **annotations: object) -> Injector:
    policy = PolicySettings(
        default=default, rules=rules, sources=tuple(f"rule {n}" for n, _ in enumerate(rules))
    )  # type: ignore[arg-type]
    settings = Settings(policy=policy, annotations=AnnotationsSettings(**annotations))  # type: ignore[arg-type]
    return Injector(settings, Registry(()), cdi_courier_dialects())


def granted(made: Injector, request: ContainerRequest) -> bool:
    try:
        return isinstance(made.grant(request), Grant)
    except PolicyDenied:
        return False


def asks(
    value: str = DEVICE, namespace: str = "ns", pod: str = "p", container: str = "c"
) -> ContainerRequest:
    return ContainerRequest({DOMAIN: value}, namespace=namespace, pod=pod, container=container)


@given(count=st.integers(1, 9), limit=st.integers(1, 9), repeat=st.booleans())
def test_as_many_names_as_the_limit_and_not_one_more(count: int, limit: int, repeat: bool) -> None:
    """max_names counts different names; whoever asks for more is refused with ANN004 whatever the rules."""
    names = [f"v.com/c=d{n}" for n in range(count)] * (2 if repeat else 1)
    made = injector(default="allow", max_names=limit)

    if count <= limit:
        grant = made.grant(asks(",".join(names)))
        assert isinstance(grant, Grant)
        assert len(grant.requested) == count
    else:
        with pytest.raises(AnnotationError) as caught:
            made.grant(asks(",".join(names)))
        assert caught.value.code == "ANN004"


@given(value=st.text(max_size=40), limit=st.integers(1, 60))
def test_a_value_longer_than_the_limit_in_bytes_is_not_even_read(value: str, limit: int) -> None:
    """max_length counts UTF-8's bytes; beyond it the cause is ANN003 and never what the value says."""
    made = injector(default="allow", max_length=limit)
    codes = set()
    try:
        made.grant(asks(value))
    except AnnotationError as error:
        codes = {error.code}

    assert ("ANN003" in codes) is (len(value.encode()) > limit)


@given(dialects=st.lists(st.sampled_from(["nvidia", "device-injector"]), unique=True))
def test_only_the_dialects_that_are_switched_on_are_answered(dialects: list[str]) -> None:
    """A pod that asks in both gets what those ask for that are on, in their order; without any, nothing."""
    request = ContainerRequest(
        {DOMAIN: "v.com/c=n", f"{SAMPLE}/pod": '["v.com/c=i"]'}, namespace="ns", pod="p", container="c"
    )
    asked = {"nvidia": "v.com/c=n", "device-injector": "v.com/c=i"}

    grant = injector(default="allow", dialects=tuple(dialects)).grant(request)

    assert list(grant.requested if isinstance(grant, Grant) else ()) == [asked[name] for name in dialects]


@given(
    namespace=NAMES,
    pod=NAMES,
    container=NAMES,
    pattern=NAMES,
    which=st.sampled_from(["namespaces", "pods", "containers"]),
)
@example(namespace="*", pod="*", container="*", pattern="team", which="namespaces")
@example(namespace="[a-z]", pod="p", container="c", pattern="a", which="namespaces")
def test_a_name_is_text_and_only_a_rule_s_pattern_is_a_pattern(
    namespace: str, pod: str, container: str, pattern: str, which: str
) -> None:
    """Globs in what a pod is called match nothing; a rule matches exactly what its own pattern matches."""
    rule = attrs.evolve(PolicyRule("allow"), **{which: (pattern,)})
    text = {"namespaces": namespace, "pods": pod, "containers": container}[which]

    found = granted(injector(rule), asks(namespace=namespace, pod=pod, container=container))

    assert found is (fnmatchcase(text, pattern) or namespace in BUILT_IN.namespaces)


@given(namespace=NAMES, pod=NAMES, container=NAMES)
def test_nobody_is_taken_for_somebody_else(namespace: str, pod: str, container: str) -> None:
    """Only the very namespaces of the built-in rule get anything by it: no look-alike, case or blank does."""
    found = granted(injector(), asks(namespace=namespace, pod=pod, container=container))

    assert found is (namespace in BUILT_IN.namespaces)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_the_two_ways_to_write_a_letter_are_two_names(form: str) -> None:
    """Nothing is normalized: what the runtime says and what the rule says are compared as they are."""
    rule = PolicyRule("allow", namespaces=(unicodedata.normalize("NFC", "é"),))

    found = granted(injector(rule), asks(namespace=unicodedata.normalize(form, "é")))

    assert found is (form == "NFC")


@given(namespace=NAMES, pod=NAMES, container=NAMES, devices=st.integers(1, 64))
def test_a_refusal_fits_and_is_printable_whoever_asks(
    namespace: str, pod: str, container: str, devices: int
) -> None:
    """Names of 253 characters, of any script or of none, neither cut the message nor reach a terminal."""
    value = ",".join(f"v.com/c=d{n}" for n in range(devices))
    if namespace in BUILT_IN.namespaces:
        return

    with pytest.raises(PolicyDenied) as caught:
        injector().grant(asks(value, namespace, pod, container))

    text = str(caught.value)
    assert text.startswith("POL001: ")
    assert len(text) <= 4096
    assert text.replace("\n", "").isprintable()


@given(
    rules=st.lists(
        st.tuples(st.sampled_from(["allow", "deny"]), st.sampled_from(["ns", "n*", "*", "x", "?"]))
    ),
    default=st.sampled_from(["allow", "deny"]),
)
def test_the_first_rule_that_matches_decides_however_many_there_are(
    rules: list[tuple[str, str]], default: str
) -> None:
    """Rules are tried in order, then the built-in one, then the default."""
    made = injector(*(PolicyRule(a, namespaces=(n,)) for a, n in rules), default=default)  # type: ignore[arg-type]
    expected = next((action for action, name in rules if fnmatchcase("ns", name)), default)

    assert granted(made, asks()) is (expected == "allow")


@given(container=NAMES, other=NAMES)
def test_an_annotation_for_a_container_is_for_no_other(container: str, other: str) -> None:
    """The name behind the dot is compared as it is: globs, blanks and scripts in it mean themselves."""
    request = ContainerRequest(
        {f"{DOMAIN}/container.{container}": DEVICE}, namespace="ns", pod="p", container=other
    )

    found = injector(default="allow").requested(request)

    assert (found != {}) is (container == other)


def test_the_limits_of_the_settings_hold_in_a_file_too(tmp_path: Path) -> None:
    """A limit below one is no limit and is refused where it stands."""
    from cdi_courier.errors import SettingsError
    from cdi_courier.settings import load

    file = tmp_path / "x.toml"
    for key in ("max_names", "max_length"):
        file.write_text(f"[annotations]\n{key} = 0\n")
        with pytest.raises(SettingsError) as caught:
            load([file])
        assert f"line 2, annotations.{key}: expected a number at least 1" in caught.value.message
