"""Hosts in a folder, and what real daemons have answered."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cdi_courier.host.files import Root
from cdi_courier.host.model import Host
from cdi_courier.host.sockets import Override

Look = Callable[..., Host]


@pytest.fixture
def data() -> Path:
    """The answers captured from real daemons."""
    return Path(__file__).parents[2] / "data/runtimes"


@pytest.fixture
def root() -> Iterator[Path]:
    """The root of a host without anything; short, since sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="h", dir="/tmp") as name:
        folder = Path(name)
        for inner in ("run", "var", "etc", "proc/self"):
            (folder / inner).mkdir(parents=True)
        (folder / "var/run").symlink_to("../run")
        yield folder


@pytest.fixture
def look(root: Path) -> Look:
    """A function that describes the host, in this process. Keywords: ``[runtimes]``, timeout, total."""
    from cdi_courier.host import probe

    def look_at(
        overrides: dict[str, Override] | None = None,
        *,
        timeout: float = 5.0,
        total: float = 20.0,
        **more: str,
    ) -> Host:
        return probe.host(probe.Request(Root(str(root)), timeout, total, overrides or {}, **more))

    return look_at


@pytest.fixture
def stranger(root: Path) -> Iterator[int]:
    """Another process listens at the default NRI socket; its PID."""
    path = root / "run/nri/nri.sock"
    path.parent.mkdir()
    script = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); "
        "print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate()
