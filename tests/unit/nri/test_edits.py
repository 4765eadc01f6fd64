"""Container edits over NRI: what arrives is what CDI says, and what does not is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from cdi_courier.cdi.edits import edits_to_dict
from cdi_courier.cdi.model import ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice
from cdi_courier.errors import CdiError
from cdi_courier.oci import apply_edits
from cdi_courier_nri import adjustment, messages
from cdi_courier_nri.edits import Adjusted, PreparedEdits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import nri_apply
from support.needs import need

NEWEST = (0, 12)
OLDEST = (0, 0)
NULL = {"type": "c", "major": 1, "minor": 3}


def adjusted(
    edits: ContainerEdits,
    config: dict[str, Any] | None = None,
    nri: tuple[int, int] = NEWEST,
    *,
    tells_user: bool = True,
) -> tuple[dict[str, Any], Adjusted]:
    """The config as the runtime makes it, and what the plugin says is missing."""
    config = {} if config is None else config
    shown = nri_apply.request(config, tells_user=tells_user)
    details = messages.decode(messages.CreateContainerDetails, shown).container
    data, report = adjustment.by_edits(["v.com/c=d"], PreparedEdits(edits, nri), details, shown)
    return nri_apply.apply(config, data), report


def lost(report: Adjusted) -> list[str]:
    return [edit for edit, _ in report.lost]


def own_claims(edits: ContainerEdits, config: dict[str, Any]) -> Any:
    """The adjustment itself."""
    details = messages.decode(messages.CreateContainerDetails, nri_apply.request(config)).container
    data, _ = adjustment.by_edits(["v.com/c=d"], PreparedEdits(edits, NEWEST), details)
    return nri_apply.M["Reply"].FromString(data).adjust


# What a few paths, names and numbers can collide in.
PATHS = st.sampled_from(["/a", "/a/b", "/a/b/c", "/z", "/dev/x"])
NUMBERS = st.integers(1, 3)
WORDS = st.sampled_from(["p", "q"])
OPTIONS = st.lists(st.sampled_from(["ro", "rbind", "bind", "rslave", "rshared", "rprivate"]), max_size=3)
IDS = st.none() | st.integers(0, 2)
EDITS = st.builds(
    ContainerEdits,
    env=st.lists(st.builds("{}={}".format, WORDS, WORDS), max_size=4).map(tuple),
    device_nodes=st.lists(
        st.builds(
            DeviceNode,
            path=PATHS,
            type=st.sampled_from("bc"),
            major=NUMBERS,
            minor=NUMBERS,
            file_mode=st.none() | st.integers(0, 0o777),
            permissions=st.sampled_from(["", "rw", "rwm", "mrw"]),
            uid=IDS,
            gid=IDS,
        ),
        max_size=4,
    ).map(tuple),
    hooks=st.lists(
        st.builds(
            Hook,
            hook_name=st.sampled_from(sorted(nri_apply.HOOKS)),
            path=PATHS,
            args=st.lists(WORDS, max_size=2).map(tuple),
            env=st.lists(st.just("A=b"), max_size=1).map(tuple),
            timeout=st.none() | st.integers(0, 2),
        ),
        max_size=4,
    ).map(tuple),
    mounts=st.lists(
        st.builds(
            Mount,
            host_path=PATHS,
            container_path=PATHS,
            options=OPTIONS.map(tuple),
            type=st.sampled_from(["", "bind"]),
        ),
        max_size=5,
    ).map(tuple),
    net_devices=st.lists(
        st.builds(NetDevice, host_interface_name=WORDS, name=WORDS),
        max_size=2,
        unique_by=lambda net: net.host_interface_name,
    ).map(tuple),
    intel_rdt=st.none()
    | st.builds(
        IntelRdt,
        clos_id=st.sampled_from(["", "gold"]),
        schemata=st.none() | st.lists(WORDS, min_size=1, max_size=2).map(tuple),
        enable_monitoring=st.booleans(),
    ),
)
CONFIGS = st.fixed_dictionaries(
    {
        "process": st.fixed_dictionaries(
            {
                "user": st.fixed_dictionaries({"uid": st.integers(0, 2), "gid": st.integers(0, 2)}),
                "env": st.lists(
                    st.builds("{}={}".format, st.sampled_from("pqr"), WORDS),
                    max_size=3,
                    unique_by=lambda item: item[0],
                ),
            }
        ),
        "mounts": st.lists(
            st.fixed_dictionaries(
                {"destination": PATHS, "source": PATHS}, optional={"options": OPTIONS.filter(bool)}
            ),
            max_size=3,
            unique_by=lambda mount: mount["destination"],
        ),
        "linux": st.fixed_dictionaries(
            {
                "devices": st.lists(
                    st.fixed_dictionaries(
                        {"path": PATHS, "type": st.sampled_from("bc"), "major": NUMBERS, "minor": NUMBERS}
                    ),
                    max_size=2,
                    unique_by=lambda device: device["path"],
                ),
            },
            optional={"intelRdt": st.just({"closID": "bronze"})},
        ),
    }
)


def comparable(config: dict[str, Any]) -> dict[str, Any]:
    """What must agree between CDI's own injection and NRI's, in one form."""
    linux = config.get("linux", {})
    return {
        "env": config.get("process", {}).get("env", []),
        "hooks": config.get("hooks", {}),
        "mounts": {
            m["destination"]: (m["source"], m.get("type", ""), m.get("options", []))
            for m in config.get("mounts", [])
        },
        "devices": {
            d["path"]: (d["type"], d["major"], d["minor"], d.get("fileMode"), d.get("uid"), d.get("gid"))
            for d in linux.get("devices", [])
        },
        "netDevices": linux.get("netDevices", {}),
        "intelRdt": {key: value for key, value in linux.get("intelRdt", {}).items() if value},
    }


MOUNTED = {
    "process": {"user": {"uid": 0, "gid": 0}, "env": []},
    "mounts": [{"destination": "/a", "source": "/a", "options": ["rw", "ro"]}],
    "linux": {"devices": []},
}
REMOUNTED = ContainerEdits(mounts=(Mount(host_path="/a", container_path="/a", options=("ro", "rw")),))
"""The same options in another order, which mean something else."""


@settings(max_examples=200, deadline=None)
@given(EDITS, CONFIGS)
@example(REMOUNTED, MOUNTED)
def test_a_container_is_as_cdi_itself_would_have_made_it(
    edits: ContainerEdits, config: dict[str, Any]
) -> None:
    """All kinds of edits have the result of CDI's own injection, and nothing is lost."""
    expected = apply_edits(config, edits_to_dict(edits))
    actual, report = adjusted(edits, config)

    wanted, found = comparable(expected), comparable(actual)
    # A node that the container has already is left as it is, with the owner that it has.
    for path in {device["path"] for device in config["linux"]["devices"]}:
        if path in wanted["devices"]:
            wanted["devices"][path], found["devices"][path] = (
                side["devices"][path][:3] for side in (wanted, found)
            )
    assert found == wanted
    assert report == ([], [])


@settings(max_examples=50, deadline=None)
@given(EDITS, CONFIGS)
def test_every_node_may_be_read_and_written(edits: ContainerEdits, config: dict[str, Any]) -> None:
    """The device cgroup lets the container open each node that it was given."""
    config["linux"]["resources"] = {"devices": [{"allow": False, "access": "rwm"}]}

    actual, _ = adjusted(edits, config)

    linux = actual["linux"]
    allowed = {
        (rule.get("type"), rule.get("major"), rule.get("minor"))
        for rule in linux["resources"]["devices"]
        if rule["allow"] and {"r", "w"} <= set(rule["access"])
    }
    ours = {node.path for node in edits.device_nodes}
    assert {(d["type"], d["major"], d["minor"]) for d in linux["devices"] if d["path"] in ours} <= allowed


@settings(max_examples=100, deadline=None)
@given(EDITS, CONFIGS)
def test_what_is_there_already_is_not_claimed_again(edits: ContainerEdits, config: dict[str, Any]) -> None:
    """A second injection of the same edits changes nothing, and claims neither hook, variable nor mount."""
    rule = {"allow": True, "access": "rwm"}
    numbers = [{key: d[key] for key in ("type", "major", "minor")} for d in config["linux"]["devices"]]
    config["linux"]["resources"] = {"devices": [{**rule, **device} for device in numbers]}
    once, _ = adjusted(edits, config)

    again = own_claims(edits, once)

    assert comparable(nri_apply.apply(once, nri_apply.M["Reply"](adjust=again).SerializeToString())) == (
        comparable(once)
    )
    assert (len(again.env), len(again.mounts), len(again.linux.devices)) == (0, 0, 0)
    assert not any(getattr(again.hooks, field) for field in nri_apply.HOOKS.values())


def test_a_device_that_others_share_is_given_all_the_same() -> None:
    """A node that is there already is left out alone; the other edits of its device are delivered."""
    node = DeviceNode("/dev/x", type="c", major=7, minor=1)
    edits = ContainerEdits(
        env=("A=b",), device_nodes=(node, DeviceNode("/dev/y", type="c", major=7, minor=2))
    )
    config = {"linux": {"devices": [{"path": "/dev/x", "type": "c", "major": 7, "minor": 1}]}}

    claims = own_claims(edits, config)

    assert [device.path for device in claims.linux.devices] == ["/dev/y"]
    assert [pair.key for pair in claims.env] == ["A"]


@pytest.mark.parametrize(
    ("rules", "claimed"),
    [
        ([], False),
        ([{"allow": True, "type": "c", "major": 7, "minor": 1, "access": "rwm"}], False),
        ([{"allow": True, "type": "a", "access": "rwm"}], False),
        ([{"allow": True, "type": "c", "major": 7, "minor": -1, "access": "rw"}], False),
        ([{"allow": True, "type": "c", "major": 7, "minor": 1, "access": "r"}], True),
        ([{"allow": False, "type": "a", "access": "rwm"}], True),
        ([{"allow": True, "type": "c", "access": "m"}], True),
        ([{"allow": True, "type": "b", "major": 7, "minor": 1, "access": "rwm"}], True),
        ([{"allow": True, "type": "c", "major": 7, "minor": 2, "access": "rwm"}], True),
    ],
)
def test_a_node_counts_as_there_only_with_the_access_we_would_give(rules: list[Any], claimed: bool) -> None:
    """A node that the container may only read, say, is claimed, or what was granted would be less."""
    edits = ContainerEdits(device_nodes=(DeviceNode("/dev/x", type="c", major=7, minor=1),))
    device = {"path": "/dev/x", "type": "c", "major": 7, "minor": 1}

    claims = own_claims(edits, {"linux": {"devices": [device], "resources": {"devices": rules}}})

    assert [d.path for d in claims.linux.devices] == (["/dev/x"] if claimed else [])


def test_hooks_that_kubelet_s_devices_brought_do_not_run_twice() -> None:
    """A hook that the container has with the same stage, path, args and env is not added; others are."""
    hook = Hook("createContainer", "/bin/h", ("h", "x"), ("A=b",))
    others = (Hook("createContainer", "/bin/h", ("h", "y")), Hook("poststop", "/bin/h", ("h", "x"), ("A=b",)))
    there = {"createContainer": [{"path": "/bin/h", "args": ["h", "x"], "env": ["A=b"], "timeout": 1}]}

    actual, _ = adjusted(ContainerEdits(hooks=(hook, *others)), {"hooks": there})

    assert len(actual["hooks"]["createContainer"]) == 2
    assert len(actual["hooks"]["poststop"]) == 1


@pytest.mark.parametrize("nri", [OLDEST, (0, 8), (0, 10), NEWEST])
def test_additional_groups_are_lost_always(nri: tuple[int, int]) -> None:
    """NRI cannot add groups; each is named, except 0 and those the container is in already."""
    config = {"process": {"user": {"uid": 1, "gid": 1, "additionalGids": [5]}}}

    _, report = adjusted(ContainerEdits(env=("A=b",), additional_gids=(44, 0, 5, 44)), config, nri)

    assert lost(report) == ["additional group 44"]


@pytest.mark.parametrize("permissions", ["r", "w", "m", "rm", "wm", "none"])
def test_a_node_with_narrow_permissions_is_never_widened(permissions: str) -> None:
    """NRI would give read and write access, so the node is left out, and path and permissions are named."""
    narrow = DeviceNode("/dev/x", type="c", major=1, minor=3, permissions=permissions)
    wide = DeviceNode("/dev/y", type="c", major=1, minor=5)

    actual, report = adjusted(ContainerEdits(device_nodes=(narrow, wide)))

    assert [device["path"] for device in actual["linux"]["devices"]] == ["/dev/y"]
    assert [rule["minor"] for rule in actual["linux"]["resources"]["devices"]] == [5]
    assert lost(report) == [f'device node "/dev/x" with permissions "{permissions}"']


@pytest.mark.parametrize("kind", ["p", "u"])
def test_types_that_no_cgroup_rule_exists_for_are_lost(kind: str) -> None:
    """A fifo or an unbuffered device would come with a device cgroup rule that OCI runtimes refuse."""
    node = DeviceNode("/dev/x", type=kind, major=1, minor=3)

    actual, report = adjusted(ContainerEdits(device_nodes=(node,)))

    assert "devices" not in actual["linux"]
    assert lost(report) == [f'device node "/dev/x" of type {kind}']


@pytest.mark.parametrize("nri", [OLDEST, (0, 8), (0, 10)])
def test_before_nri_0_11_rdt_and_network_devices_are_lost(nri: tuple[int, int]) -> None:
    """Older runtimes skip these fields without a word, so each is named."""
    edits = ContainerEdits(net_devices=(NetDevice("eth1", "net0"),), intel_rdt=IntelRdt(clos_id="gold"))

    actual, report = adjusted(edits, {}, nri)

    assert "netDevices" not in actual["linux"]
    assert "intelRdt" not in actual["linux"]
    assert lost(report) == ['network device "eth1"', "intelRdt"]


def test_rdt_schemata_of_the_old_kind_are_lost() -> None:
    """NRI has no fields for l3CacheSchema and memBwSchema; what it has is delivered."""
    rdt = IntelRdt(clos_id="gold", l3_cache_schema="L3:0=f", mem_bw_schema="MB:0=50")

    actual, report = adjusted(ContainerEdits(intel_rdt=rdt))

    assert actual["linux"]["intelRdt"] == {"closID": "gold"}
    assert lost(report) == ["intelRdt l3CacheSchema", "intelRdt memBwSchema"]


def test_what_nri_would_take_for_a_removal_is_lost() -> None:
    """A key that begins with a minus would remove something, so it is not sent, and named."""
    edits = ContainerEdits(
        env=("-A=b", "B=c"),
        device_nodes=(DeviceNode("-/dev/x", type="c", major=1, minor=3),),
        mounts=(Mount("/a", "-/b"),),
        net_devices=(NetDevice("-eth", "n"),),
    )

    actual, report = adjusted(edits)

    assert actual["process"]["env"] == ["B=c"]
    assert lost(report) == [
        'environment variable "-A"',
        'device node "-/dev/x"',
        'mount "-/b"',
        'network device "-eth"',
    ]


def test_host_facts_are_those_of_this_moment(tmp_path: Path) -> None:
    """Numbers and mode of a node come from the host at each injection, not from an earlier one."""
    host = tmp_path / "node"
    prepared = PreparedEdits(ContainerEdits(device_nodes=(DeviceNode("/dev/x", str(host)),)), NEWEST)
    details = messages.ContainerDetails()

    def device() -> tuple[int, int, int]:
        encoded, _ = prepared.encode(details)
        (found,) = messages.ContainerAdjustment.FromString(encoded).linux.devices
        return found.major, found.minor, found.file_mode.value

    os.mkfifo(host)
    assert lost(prepared.encode(details)[1]) == ['device node "/dev/x" of type p']
    host.unlink()
    host.symlink_to("/dev/null")
    with pytest.raises(CdiError, match="CDI017"):
        device()
    for numbers, mode in (((1, 3), 0o600), ((1, 5), 0o644)):
        host.unlink()
        need("" if os.geteuid() == 0 else "only root makes device nodes")
        os.mknod(host, 0o020000 | mode, os.makedev(*numbers))
        host.chmod(mode)
        assert device() == (*numbers, mode)


@pytest.mark.parametrize(
    ("node", "tells_user", "owner", "unowned"),
    [
        (DeviceNode("/dev/x", **NULL), True, (7, 8), []),  # type: ignore[arg-type]
        (DeviceNode("/dev/x", **NULL, uid=0, gid=0), True, (0, 0), []),  # type: ignore[arg-type]
        (DeviceNode("/dev/x", **NULL, uid=3), True, (3, 8), []),  # type: ignore[arg-type]
        (DeviceNode("/dev/x", **NULL), False, (None, None), ["/dev/x"]),  # type: ignore[arg-type]
        (DeviceNode("/dev/x", **NULL, uid=0), False, (0, None), ["/dev/x"]),  # type: ignore[arg-type]
        (DeviceNode("/dev/x", **NULL, uid=0, gid=4), False, (0, 4), []),  # type: ignore[arg-type]
    ],
)
def test_a_node_belongs_to_the_container_s_user_if_the_runtime_tells_it(
    node: DeviceNode, tells_user: bool, owner: tuple[Any, Any], unowned: list[str]
) -> None:
    """The spec's owner wins, then the container's user; where nobody tells, the node is named."""
    config = {"process": {"user": {"uid": 7, "gid": 8}}}

    actual, report = adjusted(ContainerEdits(device_nodes=(node,)), config, tells_user=tells_user)

    (device,) = actual["linux"]["devices"]
    assert (device.get("uid"), device.get("gid")) == owner
    assert report.unowned == unowned


USER_NAMESPACE = {"linux": {"namespaces": [{"type": "pid"}, {"type": "user", "path": "/proc/1/ns/user"}]}}


@settings(max_examples=100, deadline=None)
@given(OPTIONS, st.sampled_from(["", "bind"]))
def test_mounts_into_a_user_namespace_are_id_mapped_as_cdi_does(options: list[str], kind: str) -> None:
    """The mount has the options that CDI's own injection would have given it there."""
    edits = ContainerEdits(mounts=(Mount("/a", "/b", tuple(options), kind),))
    expected = apply_edits(USER_NAMESPACE, edits_to_dict(edits))

    actual, report = adjusted(edits, USER_NAMESPACE)

    assert actual["mounts"] == expected["mounts"]
    assert report.lost == []


def test_in_a_user_namespace_a_node_of_the_same_path_is_the_host_s() -> None:
    """OCI runtimes bind-mount the host's node there, so it is listed as a device like elsewhere."""
    actual, report = adjusted(ContainerEdits(device_nodes=(DeviceNode("/dev/null"),)), USER_NAMESPACE)

    assert [d["path"] for d in actual["linux"]["devices"]] == ["/dev/null"]
    assert "mounts" not in actual
    assert report.lost == []


def test_in_a_user_namespace_a_node_of_another_path_becomes_a_bind_mount() -> None:
    """The host's node is mounted at the path, with a device cgroup rule, and no device is listed."""
    node = DeviceNode("/dev/courier0", "/dev/null")

    actual, report = adjusted(ContainerEdits(device_nodes=(node,)), USER_NAMESPACE)

    assert "devices" not in actual["linux"]
    assert actual["mounts"] == [
        {
            "destination": "/dev/courier0",
            "source": "/dev/null",
            "type": "bind",
            "options": ["bind", "rw", "nosuid", "noexec"],
        }
    ]
    assert actual["linux"]["resources"]["devices"] == [
        {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "rw"}
    ]
    assert report.lost == []


@pytest.mark.parametrize("nri", [OLDEST, (0, 8)])
def test_without_cgroup_rules_such_a_node_is_lost(nri: tuple[int, int]) -> None:
    """Before NRI 0.10 runtimes drop a plugin's cgroup rules, so the node would be there and not open."""
    node = DeviceNode("/dev/courier0", "/dev/null")

    actual, report = adjusted(ContainerEdits(device_nodes=(node,)), USER_NAMESPACE, nri)

    assert "mounts" not in actual
    assert lost(report) == ['device node "/dev/courier0"']


@pytest.mark.parametrize("path", ["/dev/null", "/dev/not-there"])
def test_in_a_user_namespace_a_node_that_the_host_has_not_is_lost(path: str) -> None:
    """Nobody can make a node there, and the host's one of that path would be another device."""
    node = DeviceNode(path, type="c", major=1, minor=5)

    actual, report = adjusted(ContainerEdits(device_nodes=(node,)), USER_NAMESPACE)

    assert "devices" not in actual["linux"]
    assert lost(report) == [f'device node "{path}"']


@settings(max_examples=50, deadline=None)
@given(EDITS, st.lists(CONFIGS, min_size=2, max_size=4))
def test_what_a_container_gets_does_not_depend_on_those_before_it(
    edits: ContainerEdits, configs: list[dict[str, Any]]
) -> None:
    """What was encoded for one container is used for another, and a request's bytes are believed, only where
    reading its fields says the same.
    """
    kept = PreparedEdits(edits, NEWEST)
    shown = [nri_apply.request(config) for config in configs]
    details = [messages.decode(messages.CreateContainerDetails, data).container for data in shown]

    answers = [
        adjustment.by_edits(["v.com/c=d"], kept, container, data)
        for container, data in zip(details, shown, strict=True)
    ]

    assert answers == [
        adjustment.by_edits(["v.com/c=d"], PreparedEdits(edits, NEWEST), container) for container in details
    ]
