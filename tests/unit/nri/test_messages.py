"""The message table, on any protobuf."""

from __future__ import annotations

import pytest
from cdi_courier_nri import messages
from support.nri_runtime import M


@pytest.mark.parametrize(
    "data", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\x08" + b"\xff" * 11], ids=repr
)
def test_bytes_that_are_no_message_are_undecodable(data: bytes) -> None:
    """Truncated data, invalid UTF-8 and endless numbers are one kind of error."""
    with pytest.raises(messages.Undecodable, match="ListedContainer"):
        messages.decode(messages.ListedContainer, data)


def test_an_adjustment_has_nri_s_field_numbers() -> None:
    """Device, its cgroup rule, hook and net device encode to the bytes that Go expects.

    Source: docs/facts.md#nri-messages.
    """
    adjust = messages.ContainerAdjustment()
    device = adjust.linux.devices.add(path="/d", type="c", major=1, minor=3)
    device.file_mode.value = 0o666
    device.uid.SetInParent()
    adjust.linux.resources.devices.add(allow=True, type="c", access="rw").major.value = -1
    adjust.linux.net_devices["e"].name = "f"
    adjust.linux.rdt.clos_id.value = "g"
    adjust.hooks.create_container.add(path="/h", args=["h"]).timeout.value = 5

    expected = (
        "2a0d 1a0b 0a022f68 120168 22020805 "
        "323f"
        "0a12 0a022f64 120163 1801 2003 2a0308b603 3200"
        "1218 3a16 0801 120163 1a0b08ffffffffffffffffff01 2a027277"
        "4a08 0a0165 1203 0a0166"
        "5a05 0a03 0a0167"
    )
    assert adjust.SerializeToString() == bytes.fromhex(expected)


def test_what_is_not_declared_is_skipped() -> None:
    """A request with fields that nobody reads decodes to those that somebody does."""
    container = M["Container"](id="i", name="n", args=["a"], labels={"l": "v"}, pid=7)
    container.cdi_devices.add(name="v/c=n")
    seen = messages.Container.FromString(container.SerializeToString())

    assert (seen.name, [d.name for d in seen.CDI_devices]) == ("n", ["v/c=n"])
