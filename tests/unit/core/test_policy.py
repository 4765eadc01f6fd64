"""Who may have what: rules, their order, and the refusal that says how to allow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cdi_courier.errors import PolicyDenied
from cdi_courier.policy import Policy, Rule, allowing_rule, judge, require
from cdi_courier.request import ContainerRequest
from cdi_courier.settings import load
from cdi_courier_nri.ttrpc import MAX_TEXT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

GPU = "management.nvidia.com/gpu=all"


def request(
    namespace: str = "default", pod: str = "p", container: str = "c", **more: Any
) -> ContainerRequest:
    return ContainerRequest({}, namespace=namespace, pod=pod, container=container, **more)


def allowed(policy: Policy, namespace: str = "default", device: str = GPU, **more: str) -> bool:
    return judge(policy, request(namespace, **more), device)[0]


@pytest.mark.parametrize("namespace", ["kube-system", "gpu-operator", "nvidia-gpu-operator"])
def test_the_built_in_rule_allows_the_operators_namespaces(namespace: str) -> None:
    """Without any rule the three namespaces may have everything."""
    answer = judge(Policy(), request(namespace), GPU)

    assert answer == (True, "the built-in rule")


@pytest.mark.parametrize("namespace", ["default", "kube-system2", "gpu", "KUBE-SYSTEM", "gpu-operator\n"])
def test_other_namespaces_are_denied_by_default(namespace: str) -> None:
    """Without any rule no other namespace may have anything."""
    may, why = judge(Policy(), request(namespace), GPU)

    assert not may
    assert 'default = "deny"' in why


def test_the_default_can_be_allow() -> None:
    """Where nothing matches, the default decides."""
    found = allowed(Policy(default="allow"))

    assert found


def test_the_first_matching_rule_decides() -> None:
    """Rules are tried in order and later ones are not looked at."""
    allow, deny = Rule("allow", source="one"), Rule("deny", source="two")

    assert judge(Policy([allow, deny]), request(), GPU) == (True, "one")
    assert judge(Policy([deny, allow]), request(), GPU) == (False, "two")


def test_a_rule_can_override_the_built_in_one() -> None:
    """A deny rule of the administrator comes before the built-in rule."""
    policy = Policy([Rule("deny", namespaces=["gpu-operator"])])

    assert not allowed(policy, "gpu-operator")
    assert allowed(policy, "kube-system")


def test_every_list_of_a_rule_must_match() -> None:
    """A rule speaks only of whom all of its lists match."""
    policy = Policy(
        [Rule("allow", namespaces=["a", "b*"], pods=["p?"], containers=["c[12]"], devices=["v/c=x"])]
    )

    answers = [
        allowed(policy, *who, pod=pod, container=container)
        for who, pod, container in [
            (("bb", "v/c=x"), "p1", "c2"),
            (("c", "v/c=x"), "p1", "c2"),
            (("a", "v/c=x"), "p", "c2"),
            (("a", "v/c=x"), "p1", "c3"),
            (("a", "v/c=y"), "p1", "c1"),
        ]
    ]

    assert answers == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("pattern", "device", "covers"),
    [
        ("*", "a/b=c", True),
        ("a/*=x", "a/b=x", True),
        ("a/*=x", "a/b=y=x", False),
        ("a/*=x", "a/b/c=x", True),
        ("*=x", "a/b=x", False),
        ("a/b=*", "a/b=c", True),
        ("*/*=*", "a/b=c", True),
        ("nvidia.com/gpu=[0-3]", "nvidia.com/gpu=3", True),
        ("nvidia.com/gpu=[0-3]", "nvidia.com/gpu=4", False),
        ("nvidia.com/gpu=?", "nvidia.com/gpu=10", False),
        ("*.nvidia.com/gpu=all", "management.nvidia.com/gpu=all", True),
        ("*.nvidia.com/gpu=all", "nvidia.com/gpu=all", False),
        ("nvidia*/gpu=all", "nvidia.com/gpu=all", True),
        ("NVIDIA.com/gpu=all", "nvidia.com/gpu=all", False),
        ("nvidia.com/gpu=a*", "nvidia.com/gpu=all", True),
        ("v*=x", "v/c=x", False),
    ],
)
def test_devices_are_globbed_part_by_part(pattern: str, device: str, covers: bool) -> None:
    """A star matches within vendor, class or name and never spans the signs between them."""
    found = Rule("allow", devices=[pattern]).covers(device)

    assert found == covers


def test_every_name_must_pass() -> None:
    """One refused name refuses the request, and only refused names are told."""
    policy = Policy([Rule("allow", devices=["v/c=a"])])

    with pytest.raises(PolicyDenied) as caught:
        require(policy, request(), ["v/c=a", "v/c=b", "v/c=d"])

    assert caught.value.code == "POL001"
    assert caught.value.fields["devices"] == "v/c=b,v/c=d"
    require(policy, request(), ["v/c=a"])


def test_no_device_needs_no_rule() -> None:
    """Who asks for nothing is not refused, and no rule is named."""
    answer = require(Policy(), request(), [])

    assert answer == ""


def test_the_rules_that_allow_are_named_once_each() -> None:
    """What allowed a request can be told: each rule that decided, in the order of the devices."""
    rules = [
        Rule("allow", devices=["v/c=a", "v/c=b"], source="rule 1 of x"),
        Rule("allow", devices=["v/c=d"], source="rule 2 of x"),
    ]

    answer = require(Policy(rules), request(), ["v/c=d", "v/c=a", "v/c=b"])

    assert answer == "rule 2 of x; rule 1 of x"


def test_rules_do_not_apply_to_local_containers() -> None:
    """Containers that are not Kubernetes' are judged by [policy] local alone."""
    local = request("", origin="local")

    assert judge(Policy([Rule("deny")]), local, GPU) == (True, '[policy] local = "allow"')
    assert judge(Policy([Rule("allow")], default="allow", local="deny"), local, GPU)[0] is False


def test_a_missing_namespace_is_refused_whatever_the_rules() -> None:
    """Without a namespace no rule can be applied, so even allow-all refuses."""
    with pytest.raises(PolicyDenied) as caught:
        require(Policy([Rule("allow")], default="allow"), request(""), [GPU])

    assert "namespace" in caught.value.message
    assert "policy.rules" not in caught.value.hint


def test_the_refusal_says_who_what_and_which_rule() -> None:
    """The message names container, pod, device and the deciding rule."""
    policy = Policy([Rule("deny", source="rule 2 of /etc/x.toml")])

    with pytest.raises(PolicyDenied) as caught:
        require(policy, request("ns", "pod", "con"), [GPU])

    message = caught.value.message
    assert all(part in message for part in ('"con"', '"ns/pod"', f'"{GPU}"', "rule 2 of /etc/x.toml"))


def pasted(denied: PolicyDenied, path: Path) -> Path:
    """The file that a reader of the refusal would write."""
    path.write_text(denied.hint.partition(":\n")[2])
    return path


def refused(policy: Policy, who: ContainerRequest, devices: list[str]) -> PolicyDenied:
    with pytest.raises(PolicyDenied) as caught:
        require(policy, who, devices)
    return caught.value


def test_the_refusals_toml_allows_a_local_container(tmp_path: Path) -> None:
    """Pasting a local container's refusal into a file allows local containers."""
    who = request("", origin="local")
    denied = refused(Policy(local="deny"), who, [GPU])

    policy = load([pasted(denied, tmp_path / "x.toml")]).policy.compiled()

    require(policy, who, [GPU])
    assert not allowed(policy)


def test_the_refusals_toml_overrides_the_rule_that_refused(tmp_path: Path) -> None:
    """Pasted into a file that is read last, the TOML wins over an earlier file's deny rule."""
    first = tmp_path / "10.toml"
    first.write_text('[[policy.rules]]\naction = "deny"\n')
    denied = refused(load([first]).policy.compiled(), request(), [GPU])

    policy = load([first, pasted(denied, tmp_path / "99.toml")]).policy.compiled()

    require(policy, request(), [GPU])
    assert f"rule 1 of {first}" in denied.message
    assert not allowed(policy, "other")


HOSTILE = [
    "*",
    "?",
    "[a]",
    "[!a]",
    "a*b",
    "]",
    "[",
    "\\",
    '"',
    "a\nb",
    "\x1b[0m",
    "é",
    "a]b[c",
    "${x}",
    "]]\n[x",
    "-",
    "[]]",
]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    namespace=st.one_of(
        st.sampled_from(HOSTILE),
        st.text(alphabet=st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=8),
        st.text(alphabet="*?[]!ab-\\", min_size=1, max_size=8),
    ),
    other=st.text(alphabet="*?[]!ab-\\", min_size=1, max_size=4),
    devices=st.lists(
        st.from_regex(r"[a-z]/[a-z]=[a-z0-9]{1,3}", fullmatch=True), min_size=1, max_size=3, unique=True
    ),
)
def test_the_refusals_toml_allows_exactly_that_request(
    tmp_path: Path, namespace: str, other: str, devices: list[str]
) -> None:
    """Pasted into a file it allows those devices in that very namespace, hostile or not, and nothing else."""
    if namespace in {"kube-system", "gpu-operator", "nvidia-gpu-operator"}:
        return
    denied = refused(Policy(), request(namespace), devices)

    policy = load([pasted(denied, tmp_path / "x.toml")]).policy.compiled()

    require(policy, request(namespace), devices)
    assert not allowed(policy, namespace, "zz/zz=zz")
    assert allowed(policy, other, devices[0]) == (other == namespace)
    assert not allowed(policy, namespace + "x", devices[0])


@given(
    namespace=st.text(min_size=1, max_size=300),
    names=st.lists(st.text("ab0", min_size=1, max_size=400), min_size=1, max_size=64, unique=True),
    reasons=st.integers(1, 5),
)
@settings(max_examples=60)
def test_a_refusal_arrives_whole(namespace: str, names: list[str], reasons: int) -> None:
    """However much is asked for, code, cause and a whole rule, or where to get it, fit into NRI's status."""
    devices = [f"v.com/c{i % reasons}=x{name}" for i, name in enumerate(names)]
    rules = [Rule("deny", devices=[f"v.com/c{i}=*"], source=f"rule {i}") for i in range(reasons)]
    denied = refused(Policy(rules), request(namespace, "p" * 300, "c" * 300), devices)
    whole = denied.hint.endswith("]\n") and all(f'"{device}"' in denied.hint for device in devices)

    assert len(str(denied)) <= MAX_TEXT
    assert whole or "policy check" in denied.hint
    assert whole or len(allowing_rule(request(namespace), devices)) > 1500
