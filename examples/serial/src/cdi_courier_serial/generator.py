"""The generator ``serial``: a CDI device for each serial port that udev has a lasting name for.

It reads the host below a `Root`, which no link leads out of, and writes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
from cdi_courier.cdi.model import Device, Spec
from cdi_courier.errors import GenerateError
from cdi_courier.generate import nodes
from cdi_courier.hookspecs import Generated
from cdi_courier.names import invalid_qualified

from .dialect import KIND

if TYPE_CHECKING:
    from cdi_courier.generate.root import Root

FOLDER: Final = "/dev/serial/by-id"


def generate(root: Root, _: str) -> Generated:
    """One device a link in `FOLDER`, in the order of their names. Raises `GenerateError` ``SER002``."""
    devices = []
    warnings = []
    for name in root.names(FOLDER):
        link = f"{FOLDER}/{name}"
        target = root.resolve(link)
        node = None if target is None else nodes.look(root, target)
        if node is None or node.type != "c":
            warnings.append(f"{link} leads to no character device; it is left out")
        elif reason := invalid_qualified(f"{KIND}={name}"):
            warnings.append(f"{link} is left out: {reason}")
        else:
            # The container has the port under its lasting name. Its numbers are left out, so that they are
            # looked up for each container: after plugging in anew they may be another port's.
            node = attrs.evolve(node, path=link, host_path=node.path, major=0, minor=0)
            devices.append(Device(name, container_edits=nodes.edits([node])))
    if not devices:
        raise GenerateError("SER002", f"there is no serial port in {FOLDER}", "plug one in; udev names it")
    return Generated(Spec(kind=KIND, devices=tuple(devices)), f"{FOLDER}", tuple(warnings))
