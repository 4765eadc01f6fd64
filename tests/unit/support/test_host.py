"""What the tests' own helpers say of processes and of folders that were left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import host


@pytest.fixture
def unburied() -> Iterator[int]:
    """A process, the first of a group of its own, that has ended and that nobody has waited for."""
    with subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        yield process.pid


def test_a_process_that_nobody_has_buried_does_not_live(unburied: int) -> None:
    """Neither it nor its group, although the kernel still knows both."""
    os.kill(unburied, 0)
    os.killpg(unburied, 0)

    assert (host.lives(unburied), host.lives_in_group(unburied)) == (False, False)
    assert (host.lives(os.getpid()), host.lives_in_group(os.getpgrp())) == (True, True)


def test_only_folders_of_processes_that_are_gone_are_orphans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a process that lives, one without a note and one of another prefix are nobody's to remove."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine, left, other = (host.new_folder(prefix) for prefix in ("cdi-x-", "cdi-x-", "cdi-y-"))
    (tmp_path / "cdi-x-unsigned").mkdir()
    for folder in (left, other):
        (folder / host.OWNER).write_text(f"{os.getpid()} 1")  # of this number, but begun at another time

    assert host.orphans("cdi-x-") == [left]
    assert mine.parent == tmp_path
