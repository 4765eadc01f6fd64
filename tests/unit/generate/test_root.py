"""The host below a root folder: what is in it is found, and nothing else ever."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cdi_courier.errors import GenerateError
from cdi_courier.generate.root import Root
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_host import FakeHost


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    (tmp_path / "secret").write_text("outside")
    return FakeHost(tmp_path / "root")


@pytest.fixture
def root(host: FakeHost) -> Iterator[Root]:
    with Root(str(host.root)) as opened:
        yield opened


@pytest.mark.parametrize(
    "target",
    ["/secret", "../secret", "../../../../secret", "/../secret", "./../secret", "/proc/self/root/secret"],
    ids=str,
)
def test_a_link_does_not_lead_out(host: FakeHost, root: Root, tmp_path: Path, target: str) -> None:
    """What a link would find outside is not there, and a file of that name inside is."""
    host.link("/link", target)
    host.link("/real", str(tmp_path / "secret"))

    assert root.resolve("/link") is None
    assert root.resolve("/real") is None
    assert root.resolve("/../secret") is None

    host.file("/secret", b"inside")
    with root.reader("/link") as read:
        found = None if read is None else read(0, 99)

    assert found == (None if "proc" in target else b"inside")


def test_an_absolute_link_is_the_hosts_own(host: FakeHost, root: Root) -> None:
    """Links between folders of the host are followed as on that host, and the path has none left."""
    host.file("/usr/lib/a/x.so.1.2", b"x")
    host.link("/lib", "usr/lib")
    host.link("/etc/alternatives/x", "/lib/a/x.so.1.2")
    host.link("/usr/lib/x.so.1", "/etc/alternatives/x")

    assert root.resolve("/lib/x.so.1") == "/usr/lib/a/x.so.1.2"
    assert root.resolve("/lib/.././lib//a/") == "/usr/lib/a"
    assert root.names("/lib") == ["a", "x.so.1"]


def test_links_that_go_round_lead_nowhere(host: FakeHost, root: Root) -> None:
    """A loop, of links or of folders, is an absent file."""
    host.link("/a", "b")
    host.link("/b", "/a/c")
    host.link("/self", "self/self")

    assert [root.resolve(path) for path in ("/a", "/b", "/self")] == [None] * 3


@pytest.mark.parametrize(("links", "found"), [(40, "/end"), (41, None)])
def test_as_many_links_are_followed_as_the_kernel_follows(
    host: FakeHost, root: Root, links: int, found: str | None
) -> None:
    """A chain of 40 links leads to its end, and one of 41 nowhere."""
    host.file("/end")
    for number in range(links):
        host.link(f"/{number}", f"{number + 1}" if number + 1 < links else "end")

    assert root.resolve("/0") == found
    assert (kernels_answer(host.root, "/0") is None) == (found is None)


def test_only_regular_files_are_read(host: FakeHost, root: Root) -> None:
    """A FIFO, which would block, a socket and a folder have no reader."""
    os.mkfifo(host.at("/fifo"))
    host.socket("/run/socket")

    for path in ("/fifo", "/run/socket", "/run", "/nothing"):
        with root.reader(path) as read:
            assert read is None


def test_a_file_is_read_from_any_place(host: FakeHost, root: Root) -> None:
    """Bytes come from where they are asked for; beyond the end, or at an impossible place, there are none."""
    host.file("/f", b"0123456789")

    with root.reader("/f") as read:
        assert read is not None
        assert [read(2, 3), read(8, 9), read(10, 1), read(2**63, 1), read(2**70, 1)] == [
            b"234",
            b"89",
            b"",
            b"",
            b"",
        ]


@pytest.mark.parametrize("kind", ["missing", "file", "nul"])
def test_a_root_that_is_no_folder_is_said_so(tmp_path: Path, kind: str) -> None:
    """A root that is missing, a file or no path at all is GEN001."""
    (tmp_path / "file").touch()
    path = "\0" if kind == "nul" else str(tmp_path / kind)

    with pytest.raises(GenerateError) as caught:
        Root(path)
    assert caught.value.code == "GEN001"


def test_no_descriptor_stays_open(host: FakeHost) -> None:
    """Whatever is looked at, found or not, every descriptor is closed again."""
    host.file("/usr/lib/x", b"x")
    host.link("/l", "usr/../usr/lib/x")
    host.link("/loop", "loop")
    before = len(os.listdir("/proc/self/fd"))
    with Root(str(host.root)) as root:
        for path in ("/l", "/loop", "/none/x", "/usr/lib/x/y", "/usr"):
            root.resolve(path)
            root.names(path)
            root.stat(path, follow=False)
            with root.reader(path):
                pass

    assert len(os.listdir("/proc/self/fd")) == before


_OPENAT2 = 437
_IN_ROOT = 0x10
_NAMES = ["a", "b", "c", "..", "."]
_paths = st.builds(
    lambda absolute, parts, end: absolute * "/" + "/".join(parts) + end * "/",
    st.booleans(),
    st.lists(st.sampled_from(_NAMES), min_size=1, max_size=4),
    st.sampled_from([0, 0, 0, 1]),
)
_trees = st.dictionaries(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join),
    st.one_of(st.just("file"), _paths),
    max_size=6,
)


def kernels_answer(root: Path, path: str) -> tuple[int, int] | None:
    """What openat2 with RESOLVE_IN_ROOT finds."""
    libc = ctypes.CDLL(None, use_errno=True)
    how = (ctypes.c_uint64 * 3)(os.O_PATH | os.O_CLOEXEC, 0, _IN_ROOT)
    folder = os.open(root, os.O_PATH)
    try:
        found = libc.syscall(_OPENAT2, folder, path.encode(), ctypes.byref(how), ctypes.sizeof(how))
        if found < 0:
            if ctypes.get_errno() == 38:
                pytest.skip("the kernel has no openat2")
            return None
        try:
            seen = os.fstat(found)
        finally:
            os.close(found)
    finally:
        os.close(folder)
    return seen.st_dev, seen.st_ino


@settings(max_examples=300, deadline=None)
@given(_trees, st.lists(_paths, min_size=1, max_size=5))
def test_the_kernel_finds_the_same(tree: dict[str, str], paths: list[str]) -> None:
    """For any folders, links and paths, what is found is what the kernel finds in that root."""
    base = Path(tempfile.mkdtemp())
    try:
        for name in "abc":
            (base / name).write_text("outside")
        place = base / "root"
        place.mkdir()
        for name, what in tree.items():
            made = place / name
            try:
                made.parent.mkdir(parents=True, exist_ok=True)
                made.write_text("") if what == "file" else made.symlink_to(what)
            except OSError:
                continue  # a file where a folder is wanted
        with Root(str(place)) as root:
            for path in paths:
                found = root.stat(path)
                resolved = root.resolve(path)

                assert (found and (found.st_dev, found.st_ino)) == kernels_answer(place, path)
                if resolved is not None:
                    assert os.path.realpath(str(place) + resolved) == os.path.normpath(str(place) + resolved)
    finally:
        shutil.rmtree(base)
