"""The dialect: short names in, qualified names out."""

from __future__ import annotations

import pytest
from cdi_courier.errors import AnnotationError
from cdi_courier_serial.dialect import SERIAL


def test_short_names_become_qualified_ones() -> None:
    """Each name gets vendor and class, in the order asked for."""
    assert SERIAL.parse("gps  modem") == ["example.com/serial=gps", "example.com/serial=modem"]


@pytest.mark.parametrize("value", ["gps,modem", "*", "a=b", "example.com/serial=gps", "\x1b[2J"])
def test_what_is_no_name_is_refused_in_one_harmless_line(value: str) -> None:
    """The refusal has the plugin's own code and no control character of the annotation."""
    with pytest.raises(AnnotationError) as refused:
        SERIAL.parse(value)

    assert refused.value.code == "SER001"
    assert str(refused.value).isprintable()


def test_the_key_that_is_nearest_to_the_container_comes_first() -> None:
    """The first form that is present wins, and all are of the plugin's own domain, no other dialect's."""
    assert SERIAL.keys == ("{domain}/container.{container}", "{domain}/pod", "{domain}")
    assert SERIAL.domains == ("serial.example.com",)
