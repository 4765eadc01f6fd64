"""Which cgroup version containers of a runtime live in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdi_courier.host import processes

if TYPE_CHECKING:
    from cdi_courier.host.answers import Findings
    from cdi_courier.host.files import Root

_POINT: Final = "/sys/fs/cgroup"
_TYPES: Final = {"cgroup2": 2, "tmpfs": 1, "cgroup": 1}


def learn(root: Root, pid: int | None, findings: Findings) -> None:
    """Note ``cgroup_version`` by what is mounted at /sys/fs/cgroup, as the low-level runtimes decide it.

    The hybrid layout is version 1. pid: the runtime's, whose mounts count; None: our own.
    """
    for whose in (pid, None):
        types = [type_ for point, type_ in processes.mounts(root, whose) if point == _POINT]
        if types:
            # The last one mounted is the one that is seen.
            source = f"{types[-1]} at {_POINT}" + (f" of process {whose}" if whose else "")
            findings.learn("cgroup_version", _TYPES.get(types[-1]), source)
            return
