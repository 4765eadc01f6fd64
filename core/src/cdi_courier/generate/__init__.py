"""CDI spec files for hardware that nothing else writes one for.

A generator looks at a host below a root folder and returns a spec; which devices there are is all that it
knows. `root` reads that host without ever leaving the folder, `write` puts the spec into a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdi_courier.hookspecs import Generator, hookimpl

if TYPE_CHECKING:
    from cdi_courier.generate.root import Root
    from cdi_courier.hookspecs import Generated


def _nvidia(root: Root, mode: str) -> Generated:
    # Imported when it is called: the daemon discovers generators and never needs one.
    from cdi_courier.generate import nvidia

    return nvidia.generate(root, mode)


BUILT_IN: Final = (
    Generator("nvidia", "NVIDIA GPUs, from the driver that is installed", _nvidia, ("management",)),
)


@hookimpl
def cdi_courier_generators() -> tuple[Generator, ...]:
    """The generators that come with cdi-courier."""
    return BUILT_IN
