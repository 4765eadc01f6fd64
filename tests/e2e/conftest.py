"""What end-to-end tests stand on: real containerds, one of a kind a session, clean for each test.

Where no runtime can be had, the tests are skipped with the reason; in CI (``CI`` in the environment) that is
a failure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.containerd import SUITES_1_7, SUITES_2, Handler, runc_of
from support.lab import NEWER, Lab, unsuitable
from support.packages import Packages


@pytest.fixture(scope="session")
def packages() -> Packages:
    """Debian's packages, on a machine that can run what is in them."""
    reason = unsuitable()
    if reason and os.environ.get("CI"):
        pytest.fail(f"CI must run these tests: {reason}")
    if reason:
        pytest.skip(reason)
    return Packages()


def newer_runc(packages: Packages) -> dict[str, Handler]:
    """The handler `NEWER`: a runc that knows mounts with mapped owners, which the machine's does not."""
    return {NEWER: Handler(runc_of(packages, "sid"))}


@pytest.fixture(scope="session")
def containerd21(packages: Packages) -> Iterator[Lab]:
    """A lab with containerd 2.1 or newer, shared by the session; `lab` gives it out clean."""
    with Lab(SUITES_2, packages=packages, handlers=newer_runc(packages)) as lab:
        yield lab


@pytest.fixture(scope="session")
def containerd17(packages: Packages) -> Iterator[Lab]:
    """A lab with containerd 1.7, shared by the session; `lab17` gives it out clean."""
    with Lab(SUITES_1_7, packages=packages, handlers=newer_runc(packages)) as lab:
        yield lab


@pytest.fixture
def lab(containerd21: Lab) -> Iterator[Lab]:
    """containerd 2.1 or newer with no pods, no CDI files and no `cdi-courier` running."""
    yield containerd21
    containerd21.reset()


@pytest.fixture
def lab17(containerd17: Lab) -> Iterator[Lab]:
    """containerd 1.7, otherwise as `lab`."""
    yield containerd17
    containerd17.reset()
