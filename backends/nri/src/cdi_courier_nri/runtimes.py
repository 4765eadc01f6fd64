"""What a runtime makes of an adjustment: may it be sent CDI names, and which fields of edits does it know?

A runtime that does not honour CDI names over NRI drops them without an error, so everything not known to
honour them gets edits. Source: docs/facts.md#cdi-names-over-nri, #nri-in-runtimes.
"""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Delivery = Literal["names", "edits"]

# The first version that injects the CDI names of an NRI reply, whatever its CRI configuration says.
_NAMES_SINCE = {"containerd": (2, 1, 0), "cri-o": (1, 34, 0)}

# Runtime version → the NRI version in it, descending.
_NRI_OF = {
    "containerd": (
        ((2, 3, 0), (0, 12)),
        ((2, 2, 1), (0, 11)),
        ((2, 2, 0), (0, 10)),
        ((2, 0, 0), (0, 8)),
        ((1, 7, 26), (0, 8)),
        ((1, 7, 14), (0, 6)),
    ),
    "cri-o": (((1, 35, 0), (0, 11)), ((1, 34, 0), (0, 10)), ((1, 32, 0), (0, 9)), ((1, 31, 0), (0, 6))),
}

# What containerd 2.0.0 to 2.0.3 calls itself.
_ALIASES = {"v2": "containerd"}

# The directories a runtime reads unless its configuration says otherwise.
_DEFAULT_DIRS = ("/etc/cdi", "/var/run/cdi")


def parse_version(text: str) -> tuple[int, int, int] | None:
    """The first three numbers of a version string, a leading ``v`` allowed; None if they are not there.

    >>> parse_version("v2.1.5-k3s1")
    (2, 1, 5)
    """
    match = re.match(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})", text, re.ASCII)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def kind(name: str) -> str:
    """The runtime's kind, as ``[runtimes]`` has it, from the name that it tells."""
    return _ALIASES.get(name, name)


def nri_version(name: str, version: str, told: str) -> tuple[int, int]:
    """The NRI version that a runtime speaks, as far as it can be known; (0, 0) if it cannot.

    told: `Configured.nri_version`. Anything but a version there, such as ``(devel)``, is at least 0.12,
    because runtimes before that tell nothing.
    """
    if told:
        match = re.match(r"v?(\d{1,6})\.(\d{1,6})\.", told, re.ASCII)
        return max((0, 12), (int(match[1]), int(match[2]))) if match else (0, 12)
    found = parse_version(version)
    for since, nri in _NRI_OF.get(kind(name), ()):
        if found is not None and found >= since:
            return nri
    return 0, 0


def delivery(
    name: str,
    version: str,
    cdi_dirs: Sequence[str],
    *,
    runtime_dirs: Sequence[str] | None = None,
    cdi_enabled: bool | None = None,
) -> tuple[Delivery, str]:
    """What ``[nri] delivery = "auto"`` means for this runtime, and why, for a person.

    name, version: as Configure tells them. cdi_dirs: ours. runtime_dirs, cdi_enabled: the runtime's, as its
    description says; None where it does not, in which case the directories are taken to be the defaults.
    """
    who = kind(name)
    since = _NAMES_SINCE.get(who)
    if since is None:
        return "edits", f"{name or 'an unnamed runtime'} is not known to honour CDI names over NRI"
    found = parse_version(version)
    by_switch = who == "containerd" and found is not None and (1, 7, 30) <= found < (2, 0, 0)
    if found is None or (found < since and not by_switch):
        return "edits", f"{name} honours CDI names over NRI only since {'.'.join(map(str, since))}"
    if by_switch and not cdi_enabled:
        state = "its CDI is off" if cdi_enabled is False else "it has not said that its CDI is on"
        return "edits", f"containerd 1.7 honours CDI names over NRI only with enable_cdi, and {state}"
    if cdi_enabled is False:
        # It resolves names all the same, but only from the default directories.
        runtime_dirs = _DEFAULT_DIRS
    ours = _normal(cdi_dirs)
    if runtime_dirs is None and ours != _DEFAULT_DIRS:
        return "edits", "[cdi] dirs are not the default ones, and the runtime may read others"
    if runtime_dirs is not None and _normal(runtime_dirs) != ours:
        return (
            "edits",
            f"the runtime reads CDI files from {', '.join(runtime_dirs)}, we from {', '.join(ours)}",
        )
    return "names", f"{name} {'.'.join(map(str, found))} resolves CDI names itself"


def _normal(dirs: Sequence[str]) -> tuple[str, ...]:
    return tuple(posixpath.normpath(path) for path in dirs)
