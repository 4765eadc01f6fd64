"""The dialect: short names in, qualified names out."""

from __future__ import annotations

import pytest
from cdi_courier.annotations import compile_keys, requested_devices
from cdi_courier.errors import AnnotationError
from cdi_courier_serial.dialect import SERIAL


def asked(value: str, key: str = "serial.example.com") -> dict[str, str]:
    return requested_devices({key: value}, "main", compile_keys([SERIAL], ["nvidia.cdi.k8s.io"]))


@pytest.mark.parametrize("form", ["", "/pod", "/container.main"], ids=["bare", "pod", "container"])
def test_short_names_become_qualified_ones(form: str) -> None:
    """Each name gets vendor and class, in the order asked for, whatever the key's form."""
    found = asked("gps  modem", f"serial.example.com{form}")

    assert list(found) == ["example.com/serial=gps", "example.com/serial=modem"]


@pytest.mark.parametrize("value", ["gps,modem", "*", "a=b", "example.com/serial=gps", "\x1b[2J"])
def test_what_is_no_name_is_refused_in_one_harmless_line(value: str) -> None:
    """The refusal has the plugin's own code and no control character of the annotation."""
    with pytest.raises(AnnotationError) as refused:
        asked(value)

    assert refused.value.code == "SER001"
    assert str(refused.value).isprintable()


def test_the_domains_of_other_dialects_are_left_to_them() -> None:
    """An annotation of the NVIDIA domain is not this dialect's."""
    assert asked("gps", "nvidia.cdi.k8s.io") == {}
