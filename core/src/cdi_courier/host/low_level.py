"""What is known of low-level runtimes by their programs' names. It looks at none of them."""

from __future__ import annotations

import posixpath
from typing import Final

_SANDBOXED: Final = ("runsc", "kata-runtime", "containerd-shim-kata-v2")


def is_sandboxed(program: str) -> bool:
    """Whether it runs containers behind a kernel of their own.

    Then nothing can be injected into them from here, and what a wrapper writes into a bundle means something
    else (docs/facts.md#wrapper-calls). program: its path, or its name.
    """
    return posixpath.basename(program) in _SANDBOXED
