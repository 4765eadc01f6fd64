"""How a file is read for an installer: whatever lies there, an answer comes, with the asker's code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cdi_courier.errors import HostError
from cdi_courier.host import files


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    """Bytes are bytes, also behind a link; an empty file is not a missing one."""
    (tmp_path / "a").write_bytes(b"\xff\0")
    (tmp_path / "b").touch()
    (tmp_path / "c").symlink_to("a")

    assert [files.read_file(str(tmp_path / name), "NRI105") for name in "abc"] == [b"\xff\0", b"", b"\xff\0"]


@pytest.mark.parametrize("name", ["none", "file/below", "dangling"])
def test_what_is_not_there_is_none(tmp_path: Path, name: str) -> None:
    """A link to nothing is nothing, and below a file there is nothing either."""
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nothing")

    assert files.read_file(str(tmp_path / name), "NRI105") is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "not a regular file"),
        (Path.mkdir, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.symlink_to(path), "Too many levels"),
        (lambda path: path.write_bytes(b"#" * (files.FILE_LIMIT + 1)), "larger than"),
    ],
    ids=["pipe", "folder", "device", "loop", "huge"],
)
def test_what_cannot_be_read_is_refused_with_the_askers_code(
    tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    """Nothing is waited for, and nothing is read without end."""
    path = tmp_path / "file"
    make(path)
    with pytest.raises(HostError, match=words) as caught:
        files.read_file(str(path), "HOK112")

    assert caught.value.code == "HOK112"
    assert caught.value.fields == {"file": str(path)}


def test_a_path_that_no_file_can_have_is_refused() -> None:
    """A zero byte, as an import of containerd's may hold, is shown harmlessly."""
    with pytest.raises(HostError) as caught:
        files.read_file("/a\0b", "HOK112")

    assert caught.value.code == "HOK112"
    assert "\0" not in str(caught.value)
