"""Joining edits, writing them as dicts, and completing device nodes from the host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cdi_courier.cdi.edits import complete_node, concatenate, edits_to_dict
from cdi_courier.cdi.model import ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice
from cdi_courier.errors import CdiError


def test_edits_are_joined_in_order() -> None:
    """Lists are appended without removing anything; the last intelRdt stands for all."""
    first = ContainerEdits(
        env=("A=1",),
        device_nodes=(DeviceNode("/a"),),
        net_devices=(NetDevice("a", "b"),),
        hooks=(Hook("prestart", "/h"),),
        mounts=(Mount("/a", "/b"),),
        intel_rdt=IntelRdt("x", schemata=("s",)),
        additional_gids=(5,),
    )
    second = ContainerEdits(env=("A=1",), intel_rdt=IntelRdt("y"), additional_gids=(5, 0))

    joined = concatenate([first, ContainerEdits(), second, ContainerEdits()])

    assert joined.env == ("A=1", "A=1")
    assert joined.intel_rdt == IntelRdt("y")
    assert joined.additional_gids == (5, 5, 0)
    assert (joined.device_nodes, joined.net_devices) == (first.device_nodes, first.net_devices)
    assert (joined.hooks, joined.mounts) == (first.hooks, first.mounts)
    assert concatenate([]) == ContainerEdits()


def test_zero_is_written_where_it_differs_from_absent() -> None:
    """A fileMode of 0 is a mode; a major of 0 is none."""
    edits = ContainerEdits(
        device_nodes=(DeviceNode("/a", file_mode=0, uid=0, gid=0), DeviceNode("/b")),
        hooks=(Hook("prestart", "/h", timeout=0),),
        intel_rdt=IntelRdt(schemata=()),
    )

    assert edits_to_dict(edits) == {
        "deviceNodes": [{"path": "/a", "fileMode": 0, "uid": 0, "gid": 0}, {"path": "/b"}],
        "hooks": [{"hookName": "prestart", "path": "/h", "timeout": 0}],
        "intelRdt": {"schemata": []},
    }
    assert edits_to_dict(ContainerEdits()) == {}


def test_a_node_is_completed_without_touching_the_model() -> None:
    """Type, numbers and mode come from the host; owner and permissions stay as the spec has them."""
    node = DeviceNode("/dev/x", host_path="/dev/null", permissions="r", uid=7)
    found = Path("/dev/null").stat()

    done = complete_node(node)

    assert done == DeviceNode("/dev/x", "/dev/null", "c", 1, 3, found.st_mode & 0o7777, "r", 7)
    assert node.type == ""


def test_a_node_is_looked_at_each_time(tmp_path: Path) -> None:
    """A node that is gone or has changed since is noticed."""
    path = tmp_path / "node"
    node = DeviceNode(str(path))
    os.mkfifo(path, 0o600)
    first = complete_node(node)
    path.chmod(0o640)
    second = complete_node(node)
    path.unlink()

    assert (first.type, first.file_mode, second.file_mode) == ("p", 0o600, 0o640)
    with pytest.raises(CdiError, match="CDI017"):
        complete_node(node)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (DeviceNode("/nowhere"), "No such file"),
        (DeviceNode("/dev/x", host_path="/nowhere"), 'on the host "/nowhere"'),
        (DeviceNode("/dev"), "not a device node"),
        (DeviceNode("/dev/null", type="b"), "on the host it is c"),
        (DeviceNode("/dev/null", type="u"), "on the host it is c"),
        (DeviceNode("/dev/null", type="c", host_path="/dev/null/"), "Not a directory"),
        (DeviceNode("/a\0b"), "null byte"),
    ],
)
def test_a_node_that_cannot_be_completed_is_named(node: DeviceNode, reason: str) -> None:
    """With its path in the container, on the host where that differs, and why."""
    with pytest.raises(CdiError) as caught:
        complete_node(node)

    assert caught.value.code == "CDI017"
    assert reason in caught.value.message
    assert caught.value.fields["node"] == node.path


@pytest.mark.parametrize("path", ["/nowhere", "/dev", "/a\0b"])
def test_a_node_complete_in_itself_needs_no_host(path: str) -> None:
    """Type and major suffice; the mode stays open."""
    node = DeviceNode(path, type="c", major=9)

    assert complete_node(node) == DeviceNode(path, path, "c", 9)
