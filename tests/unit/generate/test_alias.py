"""A name for any device: what the command line says is what the spec says."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cdi_courier.cdi.model import ContainerEdits, DeviceNode, Mount
from cdi_courier.cdi.validate import load_spec, minimum_version
from cdi_courier.errors import CourierError
from cdi_courier.generate import alias, write
from cdi_courier.generate.root import Root
from support.fake_host import FakeHost, needs_nodes


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path / "root")


def edits(
    host: FakeHost, *paths: str, env: tuple[str, ...] = (), mounts: tuple[str, ...] = ()
) -> ContainerEdits:
    with Root(str(host.root)) as root:
        made = alias.generate(root, "v.com/serial=gps", paths=paths, env=env, mounts=mounts)
    assert load_spec(write.to_bytes(made.spec, "generate alias")).kind == "v.com/serial"
    (device,) = made.spec.devices
    assert device.name == "gps"
    return device.container_edits


@needs_nodes
@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK], ids=["c", "b"])
def test_a_node_is_described_without_its_numbers(host: FakeHost, kind: int) -> None:
    """A node has type, mode and group; its numbers are the runtime's to look up for each container."""
    host.node("/dev/a", 99, 1, mode=0o660, gid=20, kind=kind)
    made = edits(host, "/dev/a")

    type_ = "c" if kind == stat.S_IFCHR else "b"
    assert made.device_nodes == (
        DeviceNode("/dev/a", type=type_, file_mode=0o660, permissions="rwm", gid=20),
    )
    assert made.additional_gids == (20,)


@needs_nodes
def test_nodes_are_sorted_and_each_is_there_once(host: FakeHost) -> None:
    """The order on the command line, or a second mention, changes nothing."""
    for minor, name in enumerate("abc"):
        host.node(f"/dev/{name}", 99, minor)
    made = edits(host, "/dev/c", "/dev/a", "/dev/b", "/dev/a")

    assert [node.path for node in made.device_nodes] == ["/dev/a", "/dev/b", "/dev/c"]


@needs_nodes
def test_a_link_to_a_node_keeps_its_name_in_the_container(host: FakeHost) -> None:
    """Where a stable name is a link, the container has the node under that name."""
    host.node("/dev/ttyUSB3", 188, 3)
    host.link("/dev/serial/by-id/gps", "../../ttyUSB3")
    (node,) = edits(host, "/dev/serial/by-id/gps").device_nodes

    assert (node.path, node.host_path) == ("/dev/serial/by-id/gps", "/dev/ttyUSB3")


@needs_nodes
def test_paths_are_written_the_shortest_way(host: FakeHost) -> None:
    """Slashes and dots that mean nothing do not come into the spec."""
    host.node("/dev/a", 99, 1)
    host.file("/etc/x")
    made = edits(host, "///dev//./a", mounts=("//etc/./x:///x/",))

    assert [node.path for node in made.device_nodes] == ["/dev/a"]
    assert [(mount.host_path, mount.container_path) for mount in made.mounts] == [("/etc/x", "/x")]


@needs_nodes
@pytest.mark.parametrize(
    ("path", "words"),
    [("dev/a", "not an absolute path"), ("/dev/b", "there is nothing"), ("/etc/x", "not a device node")],
    ids=["relative", "missing", "a-file"],
)
def test_what_is_wrong_with_a_node_is_said(host: FakeHost, path: str, words: str) -> None:
    """Each cause has its own words."""
    host.node("/dev/a", 99, 1)
    host.file("/etc/x")
    with pytest.raises(CourierError, match=f"GEN004.*{words}"):
        edits(host, path)


@needs_nodes
@pytest.mark.parametrize("option", ["env", "mount"])
def test_what_is_no_text_cannot_be_in_a_spec(host: FakeHost, option: str) -> None:
    """Bytes of the command line that are not UTF-8 are the option's fault, and no generator's."""
    host.node("/dev/a", 99, 1)
    host.file("/etc/x")
    given = {"env": {"env": ("A=\udcff",)}, "mount": {"mounts": ("/etc/x:/\udcff",)}}[option]
    with pytest.raises(CourierError, match=rf"GEN004.*--{option} .*not UTF-8"):
        edits(host, "/dev/a", **given)


@needs_nodes
def test_mounts_and_variables_are_as_they_were_given(host: FakeHost) -> None:
    """Options are those given and else the safe ones; a bind option is never missing."""
    host.node("/dev/a", 99, 1)
    host.file("/etc/x")
    host.file("/opt/y/z")
    made = edits(
        host,
        "/dev/a",
        env=("A=1", "B=", "C=x=y"),
        mounts=("/opt/y:/z:rw,bind", "/etc/x:/x", "/etc/x:/w:noexec"),
    )

    assert made.env == ("A=1", "B=", "C=x=y")
    assert made.mounts == (
        Mount("/etc/x", "/w", ("noexec", "rbind")),
        Mount("/etc/x", "/x", ("ro", "nosuid", "nodev", "rbind", "rprivate")),
        Mount("/opt/y", "/z", ("rw", "bind")),
    )


@needs_nodes
@pytest.mark.parametrize("option", ["node", "env", "mount"])
@pytest.mark.parametrize(
    "text",
    ["", "=", "a", "/nothing:/x", "relative:/x", "/etc/x:relative", "/etc/x:/x:ro:more", "/etc/x", "\x1b[2J"],
    ids=ascii,
)
def test_what_makes_no_sense_is_said_so(host: FakeHost, option: str, text: str) -> None:
    """An unusable node, variable or mount is GEN004, which quotes it."""
    host.node("/dev/a", 99, 1)
    host.file("/etc/x")
    given = {
        "node": ((text,), (), ()),
        "env": (("/dev/a",), (text,), ()),
        "mount": (("/dev/a",), (), (text,)),
    }
    paths, env, mounts = given[option]

    with pytest.raises(CourierError) as caught:
        edits(host, *paths, env=env, mounts=mounts)
    assert caught.value.code == "GEN004"
    assert f"--{option}" in caught.value.message
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "gps", "v.com/serial", "v.com/serial=", "v/../x=y"], ids=ascii)
def test_the_name_must_be_qualified(host: FakeHost, name: str) -> None:
    """A name that no annotation could ask for is CDI001."""
    with Root(str(host.root)) as root, pytest.raises(CourierError) as caught:
        alias.generate(root, name, paths=(), env=(), mounts=())
    assert caught.value.code == "CDI001"


@needs_nodes
@pytest.mark.parametrize(
    ("name", "version"), [("v.com/a.b=x", "0.6.0"), ("v.com/a=0", "0.5.0"), ("v/a=x", "0.3.0")]
)
def test_the_version_follows_from_the_name(host: FakeHost, name: str, version: str) -> None:
    """A digit first, or a dot in the class, needs the version that allows it."""
    host.node("/dev/a", 99, 1)
    with Root(str(host.root)) as root:
        made = alias.generate(root, name, paths=("/dev/a",), env=(), mounts=())

    assert minimum_version(made.spec)[0] == version
