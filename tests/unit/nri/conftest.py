"""Where the NRI tests have their socket."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """A short socket path: pytest's own may be longer than an address holds."""
    folder = os.open(tmp_path, os.O_PATH)
    yield f"/proc/{os.getpid()}/fd/{folder}/nri.sock"
    os.close(folder)
