"""Applying edits to an OCI config: what the reference's scenarios leave open, bad shapes, immutability."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from cdi_courier.errors import CdiError, CourierError
from cdi_courier.oci import apply_edits
from hypothesis import given, settings
from hypothesis import strategies as st

NULL = {"path": "/dev/null", "type": "c", "major": 1, "minor": 3, "fileMode": 0o666}
ALL_EDITS: dict[str, Any] = {
    "env": ["A=1"],
    "deviceNodes": [NULL],
    "netDevices": [{"hostInterfaceName": "eth0", "name": "net1"}],
    "mounts": [{"hostPath": "/s", "containerPath": "/t"}],
    "hooks": [{"hookName": "prestart", "path": "/h"}],
    "intelRdt": {"closID": "c"},
    "additionalGids": [5],
}


def test_everything_is_created_where_nothing_is() -> None:
    """Into an empty config go all kinds of edits, with the parents they need."""
    assert apply_edits({}, ALL_EDITS) == {
        "process": {"user": {"uid": 0, "gid": 0, "additionalGids": [5]}, "cwd": "", "env": ["A=1"]},
        "linux": {
            "devices": [NULL],
            "resources": {"devices": [{"allow": True, "type": "c", "major": 1, "minor": 3, "access": "rwm"}]},
            "netDevices": {"eth0": {"name": "net1"}},
            "intelRdt": {"closID": "c"},
        },
        "mounts": [{"destination": "/t", "source": "/s"}],
        "hooks": {"prestart": [{"path": "/h"}]},
    }


def test_explicit_nulls_are_absent() -> None:
    """A runtime may write null for what it does not use, at any level."""
    nulls: dict[str, Any] = {"process": None, "linux": None, "mounts": None, "hooks": None}
    inner: dict[str, Any] = {
        "process": {"user": None, "env": None},
        "linux": {"devices": None, "resources": {"devices": None}, "netDevices": None, "namespaces": None},
        "hooks": {"prestart": None},
    }

    assert apply_edits(nulls, ALL_EDITS) == apply_edits({}, ALL_EDITS)
    assert apply_edits(inner, ALL_EDITS)["linux"] == {
        **apply_edits({}, ALL_EDITS)["linux"],
        "namespaces": None,
    }


def test_no_edits_change_nothing() -> None:
    """Not even parents are created, and mounts keep their order."""
    config = {"mounts": [{"destination": "/a/b"}, {"destination": "/a"}], "x": None}

    for edits in ({}, {"env": [], "additionalGids": [0]}, {"intelRdt": None}):
        assert apply_edits(config, edits) == config


def test_unknown_fields_are_kept() -> None:
    """Whatever a newer runtime writes is still there afterwards."""
    config = {"new": {"a": [1, None]}, "linux": {"new": 1.5}, "process": {"new": True, "user": {"new": "x"}}}

    edited = apply_edits(config, ALL_EDITS)

    assert (edited["new"], edited["linux"]["new"]) == ({"a": [1, None]}, 1.5)
    assert (edited["process"]["new"], edited["process"]["user"]["new"]) == (True, "x")


@pytest.mark.parametrize(
    ("options", "kind", "added"),
    [
        ([], "bind", ["idmap"]),
        ([], "", []),
        (["bind"], "", ["idmap"]),
        (["rbind"], "", ["ridmap"]),
        (["rbind", "bind"], "", ["idmap"]),
        (["bind", "rbind"], "bind", ["ridmap"]),
        (["ridmap", "bind"], "bind", []),
        (["ro"], "tmpfs", []),
    ],
)
def test_a_bind_mount_in_a_user_namespace_gets_an_id_map(
    options: list[str], kind: str, added: list[str]
) -> None:
    """The last bind option says which; one that is there already stays alone."""
    mount = {"hostPath": "/s", "containerPath": "/t", "options": options, "type": kind}
    config = {"linux": {"namespaces": [{"type": "pid"}, {"type": "user", "path": "/x"}]}}

    edited = apply_edits(config, {"mounts": [mount]})

    assert edited["mounts"][0].get("options", []) == options + added
    assert "options" not in apply_edits({}, {"mounts": [{**mount, "options": []}]})["mounts"][0]


def test_mounts_are_sorted_by_depth_alone() -> None:
    """Parents before children, everything else in its order; slashes are counted in the cleaned path."""
    before = ["/a/b/c", "//x//y/", "/b", "/", "m", "/a/../c", None]
    config = {"mounts": [{} if place is None else {"destination": place} for place in before]}

    edited = apply_edits(config, {"mounts": [{"hostPath": "/s", "containerPath": "/a"}]})

    assert [mount.get("destination") for mount in edited["mounts"]] == (
        ["m", None, "/b", "/", "/a/../c", "/a", "//x//y/", "/a/b/c"]
    )


def test_gids_are_added_once_and_never_zero() -> None:
    """The container's own stay first."""
    config = {"process": {"user": {"uid": 1, "gid": 1, "additionalGids": [7, 5]}}}

    edited = apply_edits(config, {"additionalGids": [5, 0, 6, 6]})

    assert edited["process"]["user"] == {"uid": 1, "gid": 1, "additionalGids": [7, 5, 6]}


def test_permissions_none_make_a_rule_without_access() -> None:
    """The device is there and the rule allows nothing."""
    edited = apply_edits({}, {"deviceNodes": [{**NULL, "permissions": "none"}]})

    assert edited["linux"]["resources"]["devices"] == [{"allow": True, "type": "c", "major": 1, "minor": 3}]


@pytest.mark.parametrize(
    "config",
    [
        None,
        [],
        "x",
        {"process": []},
        {"process": {"env": "A=1"}},
        {"process": {"env": [1]}},
        {"process": {"user": 5}},
        {"process": {"user": {"uid": "0"}}},
        {"process": {"user": {"uid": True}}},
        {"process": {"user": {"gid": -1}}},
        {"process": {"user": {"uid": 1.0}}},
        {"process": {"user": {"additionalGids": ["5"]}}},
        {"linux": "x"},
        {"linux": {"devices": {}}},
        {"linux": {"devices": [1]}},
        {"linux": {"resources": []}},
        {"linux": {"resources": {"devices": [None]}}},
        {"linux": {"netDevices": []}},
        {"linux": {"namespaces": {}}},
        {"linux": {"namespaces": ["user"]}},
        {"mounts": {}},
        {"mounts": ["x"]},
        {"mounts": [{"destination": 5}]},
        {"hooks": []},
        {"hooks": {"prestart": {}}},
        {"hooks": {"prestart": ["x"]}},
    ],
    ids=json.dumps,
)
def test_a_config_of_the_wrong_shape_is_an_error_in_words(config: Any) -> None:
    """The place is named; there is no traceback for what a runtime wrote."""
    with pytest.raises(CdiError) as caught:
        apply_edits(config, ALL_EDITS)

    assert caught.value.code == "CDI018"


def test_a_config_without_end_is_an_error_in_words() -> None:
    """Depth is an error like any other."""
    config: Any = {}
    for _ in range(100_000):
        config = {"x": config}

    with pytest.raises(CdiError, match="CDI018"):
        apply_edits(config, ALL_EDITS)
    while config:  # a chain this long must not be freed recursively either
        config = config.pop("x", None)


def test_a_failure_midway_leaves_the_config_as_it_was() -> None:
    """Environment comes before device nodes; after an error neither is there."""
    config: dict[str, Any] = {"process": {"env": ["X=1"]}}

    with pytest.raises(CdiError, match="CDI017"):
        apply_edits(config, {"env": ["A=1"], "deviceNodes": [NULL, {"path": "/nowhere"}]})

    assert config == {"process": {"env": ["X=1"]}}


def test_the_result_shares_nothing_with_its_inputs() -> None:
    """Whoever changes the result changes neither config nor edits."""
    config = {"process": {"env": ["X=1"]}, "other": {"a": []}}
    before = copy.deepcopy((config, ALL_EDITS))
    edited = apply_edits(config, ALL_EDITS)

    edited["other"]["a"].append(1)
    edited["linux"]["intelRdt"]["closID"] = "x"
    edited["process"]["env"].clear()

    assert (config, ALL_EDITS) == before


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2**33)
    | st.sampled_from(["", "/a", "user", "A=1", "/dev/null"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["destination", "path", "type", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
_objects = st.lists(
    st.fixed_dictionaries({}, optional={"path": _json, "destination": st.just("/t"), "type": _json})
)
_configs = st.fixed_dictionaries(
    {},
    optional={
        "process": st.fixed_dictionaries({}, optional={"env": st.just(["A=0", "B=1"]) | _json, "user": _json})
        | _json,
        "linux": st.fixed_dictionaries(
            {}, optional={"devices": _objects | _json, "namespaces": _objects | _json}
        )
        | _json,
        "mounts": _objects | _json,
        "hooks": st.dictionaries(st.just("prestart"), _objects | _json) | _json,
    },
)
_edits = st.lists(st.sampled_from(sorted(ALL_EDITS)), unique=True).map(
    lambda keys: {key: ALL_EDITS[key] for key in keys}
)


@settings(max_examples=200, deadline=None)
@given(_configs, _edits)
def test_applying_edits_never_changes_its_input(config: dict[str, Any], edits: dict[str, Any]) -> None:
    """Whatever the shape of the config, it and the edits are as before; the only failure is ours."""
    before = copy.deepcopy((config, edits))
    try:
        edited = apply_edits(config, edits)
    except CourierError:
        edited = None

    assert (config, edits) == before
    assert edited is None or set(edited) >= set(config)
