"""Single-instance locks: one holder, told by pid, and nothing left behind."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from cdi_courier import locks
from cdi_courier.errors import HostError
from hypothesis import given
from hypothesis import strategies as st

HOLDER = """
import sys
from pathlib import Path
from cdi_courier.locks import exclusive
with exclusive(Path(sys.argv[1]), "it"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of socket locks, moved to where a test may write."""
    path = tmp_path / "run" / "locks"
    monkeypatch.setattr(locks, "socket_locks", lambda: path)
    return path


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock `tmp_path / "lock"`."""
    arguments = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def refusal(path: Path, code: str) -> HostError:
    with pytest.raises(HostError) as caught, locks.exclusive(path, "the thing"):
        pass
    assert caught.value.code == code
    return caught.value


def test_a_second_holder_is_refused_with_the_firsts_pid(tmp_path: Path) -> None:
    """While a lock is held, who asks for it is told who holds it and what it is for."""
    with locks.exclusive(tmp_path / "lock", "the thing"):
        error = refusal(tmp_path / "lock", "HST002")

    assert f"pid {os.getpid()}" in error.message
    assert "the thing" in error.message


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    """After its holder is done a lock is free and its file and folders are gone."""
    path = tmp_path / "a" / "b" / "lock"
    for _ in range(2):
        with locks.exclusive(path, "it"):
            assert path.read_text() == f"{os.getpid()}\n"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    assert list(tmp_path.iterdir()) == []


def test_an_exception_releases_the_lock(tmp_path: Path) -> None:
    """A holder that fails leaves nothing behind."""
    with pytest.raises(ZeroDivisionError), locks.exclusive(tmp_path / "a" / "lock", "it"):
        raise ZeroDivisionError

    assert list(tmp_path.iterdir()) == []


def test_a_refused_holder_leaves_the_firsts_file_alone(tmp_path: Path) -> None:
    """A refusal neither removes nor changes the lock file."""
    with locks.exclusive(tmp_path / "lock", "it"):
        refusal(tmp_path / "lock", "HST002")

        refusal(tmp_path / "lock", "HST002")


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    """Only folders that were made are removed."""
    (tmp_path / "a").mkdir()
    with locks.exclusive(tmp_path / "a" / "b" / "lock", "it"):
        pass

    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert list((tmp_path / "a").iterdir()) == []


def test_another_processes_lock_is_respected(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    """A lock held by another process is refused with that process' pid."""
    error = refusal(tmp_path / "lock", "HST002")

    assert f"pid {other.pid}" in error.message


def test_a_killed_processes_lock_is_free(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    """The file of a holder that was killed remains and is no obstacle."""
    other.kill()
    other.wait()
    assert (tmp_path / "lock").exists()

    with locks.exclusive(tmp_path / "lock", "it"):
        held = (tmp_path / "lock").read_text()

    assert held == f"{os.getpid()}\n"
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("content", [b"", b"999999999\n", b"\xff" * 100, b"1\n" * 50])
def test_a_stale_file_is_no_obstacle(tmp_path: Path, content: bytes) -> None:
    """Whatever an old lock file holds, its lock is free and its content is replaced."""
    (tmp_path / "lock").write_bytes(content)

    with locks.exclusive(tmp_path / "lock", "it"):
        held = (tmp_path / "lock").read_text()

    assert held == f"{os.getpid()}\n"


def test_a_symlink_in_the_locks_place_is_refused(tmp_path: Path) -> None:
    """A symlink that lies where the lock belongs is not followed, and its target is untouched."""
    target = tmp_path / "precious"
    target.write_text("content")
    (tmp_path / "lock").symlink_to(target)

    error = refusal(tmp_path / "lock", "HST003")

    assert str(tmp_path / "lock") in error.message
    assert target.read_text() == "content"


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A lock whose folder cannot be made is HST003 with the cause."""
    (tmp_path / "a").touch()

    error = refusal(tmp_path / "a" / "b" / "lock", "HST003")

    assert "Not a directory" in error.message or "File exists" in error.message


def test_a_refusal_leaves_no_folder(tmp_path: Path) -> None:
    """Where the lock file cannot be made, the folders made for it are removed again."""
    name = "x" * 300

    refusal(tmp_path / "a" / name, "HST003")

    assert list(tmp_path.iterdir()) == []


def test_two_paths_to_one_socket_are_one_lock(tmp_path: Path, folder: Path) -> None:
    """A socket reached through a symlink has the lock of the socket itself."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    with (
        locks.runtime_socket(str(tmp_path / "real" / "nri.sock")),
        pytest.raises(HostError) as caught,
        locks.runtime_socket(str(tmp_path / "link" / ".." / "link" / "nri.sock")),
    ):
        pass

    assert caught.value.code == "HST002"
    assert "nri.sock" in caught.value.message
    assert not folder.exists()


def test_two_sockets_are_two_locks(tmp_path: Path, folder: Path) -> None:
    """Different sockets do not hinder each other, and need not exist."""
    with locks.runtime_socket(str(tmp_path / "a")), locks.runtime_socket(str(tmp_path / "b")):
        held = list(folder.iterdir())

    assert len(held) == 2


def test_the_lock_of_a_socket_has_a_readable_name(folder: Path) -> None:
    """An administrator sees whose lock it is; the path is quoted, so two paths never have one name."""
    with locks.runtime_socket("/nowhere/a%2Fb/nri.sock"):
        (lock,) = folder.iterdir()

        assert lock.name == "nowhere%2Fa%252Fb%2Fnri.sock"


@given(st.binary(min_size=1, max_size=40))
def test_the_lock_of_a_socket_has_the_name_that_every_release_gives_it(path: bytes) -> None:
    """The name of a lock is what two releases have in common: the path, percent-encoded."""
    name = os.fsdecode(b"/nowhere/" + path.replace(b"\0", b"").replace(b"/", b"-"))

    assert locks._name_of(name) == quote(os.fsencode(os.path.realpath(name))[1:], safe="")


def test_the_longest_paths_have_locks_too(folder: Path) -> None:
    """A path longer than a file name can be is locked like any other, each by itself."""
    deep = "/" + "/".join("d" * 200 for _ in range(15))

    with locks.runtime_socket(deep + "/a"), locks.runtime_socket(deep + "/b"):
        assert len(list(folder.iterdir())) == 2
