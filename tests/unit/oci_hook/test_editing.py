"""The light way and the full pipeline are one: same config, same refusal."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cdi_courier import compiling, editing
from cdi_courier.cdi.edits import edits_to_dict
from cdi_courier.editing import STATUS_ANNOTATION
from cdi_courier.errors import CdiError, CourierError
from cdi_courier.injector import Injection
from cdi_courier.oci import apply_edits
from cdi_courier.request import ContainerRequest
from cdi_courier.table import Table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KEY = "nvidia.cdi.k8s.io"
INJECTOR_KEY = "cdi-devices.noderesource.dev"

names = st.sampled_from("ab")
kinds = st.sampled_from(["v.com/c", "w.org/c"])
nodes = st.fixed_dictionaries(
    {"path": st.sampled_from(["/dev/x", "/dev/y"]), "hostPath": st.sampled_from(["/dev/null", "/dev/zero"])},
    optional={"permissions": st.sampled_from(["r", "rw", "none"]), "uid": st.sampled_from([0, 7])},
)
mounts = st.fixed_dictionaries(
    {"hostPath": st.just("/usr"), "containerPath": st.sampled_from(["/m", "/m/n", "/o"])},
    optional={"options": st.lists(st.sampled_from(["ro", "bind"]), max_size=2)},
)
hooks = st.fixed_dictionaries(
    {"hookName": st.sampled_from(["createContainer", "poststop"]), "path": st.sampled_from(["/h", "/i"])},
    optional={"args": st.lists(st.sampled_from("xy"), max_size=2), "timeout": st.sampled_from([0, 5])},
)
edits = st.fixed_dictionaries(
    {},
    optional={
        "env": st.lists(st.sampled_from(["A=1", "A=2", "B=1"]), max_size=2),
        "deviceNodes": st.lists(nodes, max_size=2),
        "mounts": st.lists(mounts, max_size=2),
        "hooks": st.lists(hooks, max_size=2),
        "additionalGids": st.lists(st.integers(0, 3), max_size=2),
        "intelRdt": st.fixed_dictionaries({}, optional={"closID": st.sampled_from("pq")}),
    },
)
specs = st.fixed_dictionaries(
    {
        "cdiVersion": st.just("0.7.0"),
        "kind": kinds,
        "devices": st.lists(
            st.fixed_dictionaries({"name": names, "containerEdits": edits}),
            min_size=1,
            max_size=2,
            unique_by=lambda device: device["name"],
        ),
        "containerEdits": edits,
    }
)
qualified = st.builds("{}={}".format, kinds, names)
values = st.one_of(
    st.lists(qualified, max_size=4).map(", ".join),
    st.sampled_from(["", "v.com/c", "v.com/c=a,", "v.com/c=a,é/c=a"]),
)
keys = st.sampled_from([KEY, f"{KEY}/pod", f"{KEY}/container.c", "amd.cdi.k8s.io", "other"])
configs = st.fixed_dictionaries(
    {"annotations": st.dictionaries(keys, values, max_size=3)},
    optional={
        "process": st.fixed_dictionaries({"env": st.lists(st.sampled_from(["A=0", "C=1"]), max_size=2)}),
        "mounts": st.lists(st.sampled_from([{"destination": "/m"}, {"destination": "/o/p"}]), max_size=2),
        "hooks": st.just({"poststop": [{"path": "/h"}]}),
    },
)
policies = st.sampled_from(
    [
        "",
        "policy.local = 'deny'\npolicy.default = 'allow'\n",
        "policy.local = 'deny'\ndelivery.on_denied = 'skip'\n",
        "[[policy.rules]]\naction = 'deny'\ndevices = ['v.com/*=a']\n[[policy.rules]]\naction = 'allow'\n",
        "annotations.max_names = 2\nannotations.domains = ['amd.cdi.k8s.io', 'nvidia.cdi.k8s.io']\n",
        "annotations.max_length = 12\n",
    ]
)
requests = st.sampled_from([("local", "", ""), ("kubernetes", "ns", "c"), ("kubernetes", "kube-system", "c")])


def without_present_hooks(config: dict[str, Any], merged: dict[str, Any]) -> dict[str, Any]:
    """The edits without the one hook that a config of `configs` may have."""
    if "hooks" not in config:
        return merged
    present = {"hookName": "poststop", "path": "/h"}
    return {**merged, "hooks": [hook for hook in merged.get("hooks", []) if hook != present]}


def in_full(config: dict[str, Any], request: ContainerRequest, made: compiling.Compiled) -> Any:
    """What the pipeline says: a config, None, or the refusal's code and text."""
    try:
        result = made.injector.inject(request)
    except CourierError as error:
        return str(error)
    if result is None:
        return None
    if isinstance(result, Injection):
        merged = without_present_hooks(config, edits_to_dict(result.edits))
        config, status = apply_edits(config, merged), "injected:" + ",".join(result.names)
    else:
        status = f"skipped:{result.error.code}"
    return {**config, "annotations": {**config["annotations"], STATUS_ANNOTATION: status}}


def lightly(config: dict[str, Any], request: ContainerRequest, known: Table) -> Any:
    try:
        edited = editing.edit(config, request, known)
    except CourierError as error:
        return str(error)
    return None if edited is None else edited.config


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(specs, max_size=3), configs, policies, requests)
def test_the_light_way_says_what_the_full_pipeline_says(
    written: list[Any], config: dict[str, Any], policy: str, who: tuple[Any, str, str]
) -> None:
    """For any specs, annotations, policy and config: the same result, or the same refusal to the letter.

    Only what does not resolve is left to the full pipeline.
    """
    origin, namespace, container = who
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number, spec in enumerate(written):
            (root / f"{number}.json").write_text(json.dumps(spec))
        (root / "config.toml").write_text(f"cdi.dirs = ['{root}']\ncdi.trust = 'any'\n{policy}")
        made = compiling.compile_table(str(root / "config.toml"))
        known = Table(json.loads(json.dumps(made.document)))
        request = editing.request_of(config, origin, namespace=namespace, container=container)
        before = json.dumps(config)
        expected = in_full(config, request, made)
        try:
            found = lightly(config, request, known)
        except editing.SlowPath:
            assert isinstance(expected, str)
            assert expected.startswith("CDI0")
            return

    assert found == expected
    assert json.dumps(config) == before


def a_table(files: Any) -> Table:
    return Table(json.loads(json.dumps(compiling.compile_table(str(files.settings)).document)))


def ask(value: str, key: str = KEY, **more: Any) -> dict[str, Any]:
    return {"annotations": {key: value}, **more}


def test_a_key_of_another_dialect_takes_the_slow_way(files: Any) -> None:
    """Its value is not for the light way to read, whatever else is asked for."""
    files.configure("annotations.dialects = ['nvidia', 'device-injector']\n")
    known = a_table(files)
    config = {"annotations": {KEY: "v.com/c=a", INJECTOR_KEY: "[v.com/c=b]"}}

    with pytest.raises(editing.SlowPath):
        editing.edit(config, editing.request_of(config, "local"), known)


def test_a_dialect_that_is_configured_but_not_used_costs_nothing(files: Any) -> None:
    """Without a key of the other dialect the light way answers."""
    files.configure("annotations.dialects = ['nvidia', 'device-injector']\n")
    config = ask("v.com/c=a")

    edited = editing.edit(config, editing.request_of(config, "local"), a_table(files))

    assert edited is not None
    assert edited.names == ("v.com/c=a",)


HOOK = {"path": "/h", "args": ["h", "x"], "env": ["E=1"], "timeout": 5}


@pytest.mark.parametrize(
    ("present", "count"),
    [
        ([HOOK], 1),
        ([{**HOOK, "timeout": 6}], 2),
        ([{"path": "/h"}], 2),
        ([], 1),
        (None, 1),
    ],
    ids=["identical", "another-timeout", "other-arguments", "none", "null"],
)
def test_a_hook_that_is_there_to_the_letter_is_not_doubled(
    files: Any, present: list[Any] | None, count: int
) -> None:
    """An engine that has injected the device itself has left its hooks; any other hook is kept beside."""
    files.spec("h.json", {"h": {"hooks": [{"hookName": "createContainer", **HOOK}]}}, kind="h.com/c")
    config = ask("h.com/c=h", hooks={"createContainer": present})

    edited = editing.edit(config, editing.request_of(config, "local"), a_table(files))

    assert edited is not None
    assert len(edited.config["hooks"]["createContainer"]) == count


def test_injecting_twice_is_injecting_once(files: Any) -> None:
    """A config that went through already comes out the same, its hooks and its cgroup's rules included."""
    edits = {
        "hooks": [{"hookName": "createContainer", **HOOK}],
        "deviceNodes": [{"path": "/dev/demo0", "hostPath": "/dev/null"}],
        "mounts": [{"hostPath": "/usr", "containerPath": "/m"}],
    }
    files.spec("h.json", {"h": edits}, kind="h.com/c")
    config, known = ask("v.com/c=a,h.com/c=h"), a_table(files)

    once = editing.edit(config, editing.request_of(config, "local"), known)
    assert once is not None
    twice = editing.edit(once.config, editing.request_of(once.config, "local"), known)

    assert twice is not None
    assert len(once.config["linux"]["resources"]["devices"]) == 1
    assert twice.config == once.config


@pytest.mark.parametrize(
    "config",
    [[], None, "x", 1, {"annotations": []}, {"annotations": {"a": 1}}, {"annotations": {"a": None}}],
    ids=["list", "null", "string", "number", "list-of-annotations", "numeric-value", "null-value"],
)
def test_a_config_that_is_none_is_refused_in_words(config: Any) -> None:
    """What is no object, or has annotations that are not strings, is CDI018."""
    with pytest.raises(CdiError, match="CDI018"):
        editing.request_of(config, "local")


def test_the_marker_takes_the_place_of_a_forged_one(files: Any) -> None:
    """Who writes annotations cannot decide what the marker says."""
    config = {"annotations": {KEY: "v.com/c=a", STATUS_ANNOTATION: "injected:v.com/c=b"}}

    edited = editing.edit(config, editing.request_of(config, "local"), a_table(files))

    assert edited is not None
    assert edited.config["annotations"][STATUS_ANNOTATION] == "injected:v.com/c=a"


OTHER = {"path": "/dev/demo0", "hostPath": "/dev/null"}
OWN_BEFORE = {
    "path": "/dev/zero",
    "hostPath": "/dev/null",
    "permissions": "none",
}  # the next of this path counts
SAME = {"path": "/dev/zero"}
OWN_NAMESPACE = {"linux": {"namespaces": [{"type": "user"}]}}


@pytest.mark.parametrize(
    ("nested", "own", "bound"),
    [(False, {}, False), (True, {}, True), (False, OWN_NAMESPACE, True)],
    ids=["initial", "rootless", "container-of-its-own"],
)
def test_in_a_user_namespace_a_node_of_another_path_is_bound(
    files: Any, nested: bool, own: dict[str, Any], bound: bool
) -> None:
    """OCI runtimes bind the host's node of the same path there; the cgroup's permission stays in any case."""
    files.spec("n.json", {"n": {"deviceNodes": [OTHER, OWN_BEFORE, SAME]}}, kind="n.com/c")
    config = ask("n.com/c=n", **own)

    edited = editing.edit(config, editing.request_of(config, "local"), a_table(files), nested=nested)

    assert edited is not None
    linux = edited.config["linux"]
    mount = {
        "destination": "/dev/demo0",
        "source": "/dev/null",
        "type": "bind",
        "options": ["bind", "rw", "nosuid", "noexec"],
    }
    assert edited.config.get("mounts", []) == ([mount] if bound else [])
    assert [device["path"] for device in linux["devices"]] == ["/dev/demo0"] * (not bound) + ["/dev/zero"]
    assert [rule["minor"] for rule in linux["resources"]["devices"]] == [3, 3, 5]
