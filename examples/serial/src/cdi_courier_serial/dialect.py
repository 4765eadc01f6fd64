"""The dialect ``serial``: a pod names its ports without vendor and class, with blanks between them.

``serial.example.com/container.main: gps modem`` asks for ``example.com/serial=gps`` and
``example.com/serial=modem``. It must not know which ports there are: that is for the CDI registry.
"""

from __future__ import annotations

from typing import Final

from cdi_courier.annotations import Dialect
from cdi_courier.errors import AnnotationError, quoted
from cdi_courier.names import invalid_qualified

KIND: Final = "example.com/serial"


def parse(value: str) -> list[str]:
    """``"gps modem"`` → qualified names. Raises `AnnotationError` ``SER001``.

    Annotations are hostile: what is shown of them goes through `quoted`.
    """
    ports = value.split()
    for port in ports:
        reason = invalid_qualified(f"{KIND}={port}")
        if reason is not None:
            raise AnnotationError(
                "SER001",
                f"{quoted(port)} cannot be a serial port: {reason}",
                "name ports as `cdi-courier devices` does, without what stands before the =, blanks between",
            )
    return [f"{KIND}={port}" for port in ports]


# `domains` of its own: without them it would answer those of [annotations] domains, beside other dialects.
SERIAL: Final = Dialect(
    "serial",
    ("{domain}/container.{container}", "{domain}/pod", "{domain}"),
    parse,
    domains=("serial.example.com",),
)
