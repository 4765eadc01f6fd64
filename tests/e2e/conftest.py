"""What end-to-end tests stand on: real containerds, one of a kind a session, clean for each test; and hosts.

Where no runtime can be had, the tests are skipped with the reason; in CI (``CI`` in the environment) that is
a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import debian13 as debian13_module
from support import debs, rootfs, vm
from support.box import Box
from support.containerd import SUITES_1_7, SUITES_2, Handler, runc_of
from support.debian13 import Served
from support.lab import NEWER, Lab, unsuitable
from support.needs import need
from support.packages import Packages
from support.product import install_product


@pytest.fixture(scope="session")
def packages() -> Packages:
    """Debian's packages, on a machine that can run what is in them."""
    need(unsuitable())
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


@pytest.fixture(scope="session")
def debian_packages(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the Debian packages of this checkout; built once."""
    folder = tmp_path_factory.mktemp("deb")
    debs.build(folder)
    return folder


@pytest.fixture(scope="session")
def bookworm(packages: Packages) -> Path:
    """A pristine root of Debian 12 that boots and has what the product needs; `Box` starts from it."""
    return rootfs.root(packages, "bookworm", (*rootfs.SYSTEM, *rootfs.LIBRARIES))


@pytest.fixture(scope="session")
def trixie(packages: Packages) -> Path:
    """A pristine root of Debian 13 as `bookworm`, with a kernel, containerd and runc: for `Box` and `VM`."""
    include = (*rootfs.SYSTEM, *rootfs.LIBRARIES, *vm.KERNEL, "containerd", "runc")
    return rootfs.root(packages, "trixie", include, files=vm.SETTINGS)


@pytest.fixture
def box(bookworm: Path) -> Iterator[Box]:
    """A Debian 12 of its own with a real systemd and the product, for one test."""
    with Box(bookworm, prepare=install_product) as box:
        yield box


@pytest.fixture(scope="session")
def debian13(packages: Packages, trixie: Path, debian_packages: Path) -> Iterator[Served]:
    """A virtual Debian 13 whose containerd 1.7 is served by the daemon; one for all tests; see `host13`."""
    need(vm.unsuitable())
    with debian13_module.machine(packages, trixie, debian_packages) as machine:
        served = debian13_module.serve(machine)
        yield served
        served.cri.close()


@pytest.fixture
def host13(debian13: Served) -> Iterator[Served]:
    """`debian13` without pods, served again whatever a test did; its daemon has logged no traceback."""
    yield debian13
    debian13.restore()
    assert "Traceback" not in debian13.vm.journal("cdi-courier")
