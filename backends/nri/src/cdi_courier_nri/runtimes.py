"""What a runtime makes of an adjustment: may it be sent CDI names, or must it be sent edits?

A runtime that does not honour CDI names over NRI drops them without an error, so everything not known to
honour them gets edits. Source: contracts nri-protocol.md section 11; design section 4.
"""

from __future__ import annotations

import posixpath
import re
from typing import Literal

Delivery = Literal["names", "edits"]

# The first version that injects the CDI names of an NRI reply, whatever its CRI configuration says.
_NAMES_SINCE = {"containerd": (2, 1, 0), "cri-o": (1, 34, 0)}

# The directories a runtime reads unless its configuration says otherwise.
_DEFAULT_DIRS = ("/etc/cdi", "/var/run/cdi")


def parse_version(text: str) -> tuple[int, int, int] | None:
    """The first three numbers of a version string, a leading ``v`` allowed; None if they are not there.

    >>> parse_version("v2.1.5-k3s1")
    (2, 1, 5)
    """
    match = re.match(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})", text, re.ASCII)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3]))


def delivery(name: str, version: str, cdi_dirs: tuple[str, ...]) -> tuple[Delivery, str]:
    """What ``[nri] delivery = "auto"`` means for this runtime, and why, for a person.

    name, version: as Configure tells them. cdi_dirs: ours; the runtime's are taken to be the defaults.
    """
    since = _NAMES_SINCE.get(name)
    if since is None:
        return "edits", f"{name or 'an unnamed runtime'} is not known to honour CDI names over NRI"
    found = parse_version(version)
    if found is None or found < since:
        return "edits", f"{name} honours CDI names over NRI only since {'.'.join(map(str, since))}"
    if tuple(posixpath.normpath(d) for d in cdi_dirs) != _DEFAULT_DIRS:
        return "edits", "[cdi] dirs are not the default ones, and the runtime may read others"
    return "names", f"{name} {'.'.join(map(str, found))} resolves CDI names itself"
