"""The generator: lasting names in, a spec out."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cdi_courier.errors import GenerateError
from cdi_courier.generate.root import Root
from cdi_courier.hookspecs import Generated
from cdi_courier_serial.generator import generate


@pytest.fixture
def host(tmp_path: Path) -> Path:
    (tmp_path / "dev/serial/by-id").mkdir(parents=True)
    return tmp_path


def plug(host: Path, name: str, node: str) -> None:
    (host / "dev/serial/by-id" / name).symlink_to(f"../../{node}")
    try:
        os.mknod(host / "dev" / node, stat.S_IFCHR | 0o660, os.makedev(188, 0))
    except PermissionError:
        pytest.skip("device nodes cannot be made here")


def made(host: Path) -> Generated:
    with Root(str(host)) as root:
        return generate(root, "default")


def test_a_port_has_its_lasting_name_in_the_container(host: Path) -> None:
    """The device and its node bear udev's name; the host's node is where the link leads, without numbers."""
    plug(host, "usb-GPS-if00", "ttyUSB3")
    spec = made(host).spec
    (device,) = spec.devices
    (node,) = device.container_edits.device_nodes

    assert (spec.kind, device.name) == ("example.com/serial", "usb-GPS-if00")
    assert (node.path, node.host_path) == ("/dev/serial/by-id/usb-GPS-if00", "/dev/ttyUSB3")
    assert (node.type, node.major, node.minor) == ("c", 0, 0)


@pytest.mark.parametrize("name", ["usb-a@b", "usb-lost"], ids=["no CDI name", "a link to nowhere"])
def test_what_cannot_be_a_device_is_left_out_with_a_warning(host: Path, name: str) -> None:
    """One port that CDI cannot name, or that has gone, does not keep the others from being offered."""
    plug(host, "usb-good", "ttyUSB0")
    (host / "dev/serial/by-id" / name).symlink_to("../../ttyUSB0" if "@" in name else "../../ttyUSB9")
    found = made(host)

    assert [device.name for device in found.spec.devices] == ["usb-good"]
    assert len(found.warnings) == 1
    assert name in found.warnings[0]


def test_a_host_without_ports_is_an_error_in_words(host: Path) -> None:
    """No empty spec is written."""
    with pytest.raises(GenerateError) as refused:
        made(host)

    assert refused.value.code == "SER002"
