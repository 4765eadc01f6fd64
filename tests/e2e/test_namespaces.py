"""The namespaces in which runtimes are tried by hand: what is in them ends, and nothing of them stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import host
from support.lab import unsuitable
from support.namespaces import Namespaces
from support.needs import need
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

PREFIX = "cdi-namespaces-"

_HOLDER = f"""
import sys
from support.namespaces import Namespaces
with Namespaces({PREFIX!r}, "true", pids=sys.argv[1] == "pids") as made:
    print(made.pid, made.root, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _root() -> None:
    need(unsuitable())


@pytest.mark.parametrize("kind", ["pids", "mounts"])
def test_namespaces_end_with_their_process_however_that_ends(kind: str) -> None:
    """Of a killed test run the next one removes the folder, and the first process is gone by itself."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as holder:
        assert holder.stdout is not None
        pid, root = holder.stdout.readline().split()
        holder.kill()
    wait_for(lambda: not host.lives(int(pid)), 10, "the namespaces to end")
    left = Path(root).exists()

    with Namespaces(PREFIX, "true") as made:
        assert left
        assert not Path(root).exists()
        assert made.root.exists()
    assert not made.root.exists()


def test_what_was_started_in_a_pid_namespace_ends_with_it() -> None:
    """Also what has left its session and ignores being asked."""
    with Namespaces(PREFIX, "setsid sh -c 'trap \"\" TERM HUP; sleep 1000' &") as made:
        inside = f"/proc/{made.pid}/ns/pid"
        space = os.readlink(inside)

        def there() -> list[str]:
            return [name for name in os.listdir("/proc") if _space(name) == space and host.lives(int(name))]

        assert len(there()) >= 3

    assert there() == []


def _space(name: str) -> str:
    """The PID namespace of what has that name in `/proc`; empty where that is no process."""
    try:
        return os.readlink(f"/proc/{name}/ns/pid")
    except OSError:
        return ""


def test_a_setup_that_fails_is_told_with_what_it_said() -> None:
    """Nothing of it is left."""
    made = Namespaces(PREFIX, "echo it is broken >&2; false")
    with pytest.raises(RuntimeError, match="it is broken"), made:
        pass

    assert not made.root.exists()
