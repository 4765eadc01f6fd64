"""What a test needs of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
"""Of the distribution's own programs, not a version manager's or a virtual environment's."""

_APT = 300.0


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 and not os.environ.get("CI"), reason="only root can be, or give to, somebody else"
)
"""Of a test that does what only root can; in CI it runs, and fails, whoever runs it."""


def need(reason: str) -> None:
    """Skip the test for this reason, if there is one; in CI fail it."""
    if reason and os.environ.get("CI"):
        pytest.fail(f"CI must run these tests: {reason}")
    if reason:
        pytest.skip(reason)


def need_program(name: str) -> None:
    """Have apt install the package of that name, unless its program is there. Raises CalledProcessError."""
    if shutil.which(name, path=PATH):
        return
    # An index that has grown old names versions which the archive no longer has.
    for words in (["update"], ["install", "-y", "--no-install-recommends", name]):
        argv = ["apt-get", "-qq", *words]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(argv, env=environment, check=True, timeout=_APT, stdout=subprocess.DEVNULL)
