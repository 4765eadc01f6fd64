"""Paths of a container are found and made inside its root, whatever the image has there."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cdi_courier.errors import DeliveryError
from cdi_courier_oci_hook.live import mountinfo
from cdi_courier_oci_hook.live.rootfs import Rootfs
from hypothesis import example, given
from hypothesis import strategies as st

NAMES = st.sampled_from("abc")
PARTS = st.lists(st.sampled_from(["a", "b", "c", "..", "."]), min_size=1, max_size=5)
LINKS = 40


@contextmanager
def opened(root: Path) -> Iterator[Rootfs]:
    """The folder as a container's root; nothing counts as shared with the host."""
    descriptors = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in (root, "/proc/self")]
    try:
        yield Rootfs(descriptors[0], descriptors[1], ())
    finally:
        os.chdir("/")
        for descriptor in descriptors:
            os.close(descriptor)


def fill(root: Path, tree: Any, outside: Path) -> None:
    """Write a tree. tree: name → a dict (folder), None (file), or a link's text; ``@`` is the outside."""
    for name, what in tree.items():
        if isinstance(what, dict):
            (root / name).mkdir()
            fill(root / name, what, outside)
        elif what is None:
            (root / name).write_text("x")
        else:
            (root / name).symlink_to(what.replace("@", str(outside)))


def digest(folder: Path) -> list[tuple[str, int, int]]:
    """Everything in a folder: path, mode and time of change."""
    found = [(str(p), p.lstat().st_mode, p.lstat().st_ctime_ns) for p in sorted(folder.rglob("*"))]
    return [(str(folder), folder.stat().st_mode, folder.stat().st_ctime_ns), *found]


def resolved(root: Path, path: str, *, dots: bool = True) -> Path | int:
    """What a resolver says that walks the tree by hand and never goes above the root; or an errno.

    dots: whether "a/." can only be a folder; otherwise it is what "a" is.
    """
    stack: list[str] = []
    waiting = path.split("/")
    links = 0
    while waiting:
        part = waiting.pop(0)
        if part in ("", ".") and not dots:
            continue
        here = root.joinpath(*stack)
        if not here.is_dir() or here.is_symlink():
            return errno.ENOTDIR
        if part in ("", "."):
            continue
        if part == "..":
            stack = stack[:-1]
            continue
        target = here / part
        if target.is_symlink():
            links += 1
            if links > LINKS:
                return errno.ELOOP
            text = os.readlink(target)
            if text.startswith("/"):
                stack = []
            waiting = [*text.split("/"), *waiting]
        elif not target.exists():
            return errno.ENOENT
        else:
            stack.append(part)
    return root.joinpath(*stack)


LINK_TEXT = st.one_of(
    PARTS.map("/".join),
    PARTS.map(lambda parts: "/" + "/".join(parts)),
    PARTS.map(lambda parts: "../../../../.." + "/" + "/".join(parts)),
    st.sampled_from(["@", "@/f", "/proc/self/root", "/proc/self/cwd", "/", ".", ".."]),
)
TREES = st.recursive(
    st.none() | LINK_TEXT,
    lambda inner: st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=9,
)
ROOTS = st.dictionaries(NAMES, TREES, max_size=3)


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside")
    (folder / "f").write_text("the host's")
    (folder / "a").mkdir()
    return folder


@given(tree=ROOTS, path=PARTS.map(lambda parts: "/" + "/".join(parts)))
def test_what_is_found_is_what_a_careful_walk_finds(outside: Path, tree: Any, path: str) -> None:
    """The same file, or nothing, or a refusal; never anything of the host."""
    with tempfile.TemporaryDirectory() as name, opened(Path(name)) as rootfs:
        fill(Path(name), tree, outside)
        wanted = resolved(Path(name), path)
        try:
            found = rootfs.find(path)
        except DeliveryError:
            assert wanted in (errno.ENOTDIR, errno.ELOOP)
        else:
            if found is None:
                assert wanted == errno.ENOENT
            else:
                assert isinstance(wanted, Path)
                assert os.path.samestat(os.fstat(found), wanted.lstat())
                os.close(found)


@given(tree=ROOTS, path=PARTS.map(lambda parts: "/" + "/".join(parts)), directory=st.booleans())
@example(tree={"a": "b/."}, path="/a", directory=False)
@example(tree={"a": "b/"}, path="/a", directory=False)
def test_what_is_made_is_inside_and_is_found_then(
    outside: Path, tree: Any, path: str, directory: bool
) -> None:
    """Through links to nowhere as well; nothing of the host changes, and on failure nothing is left."""
    before = digest(outside)
    with tempfile.TemporaryDirectory() as name, opened(Path(name)) as rootfs:
        root = Path(name)
        fill(root, tree, outside)
        there = {str(p) for p in root.rglob("*")}
        try:
            made = rootfs.make(path, directory=directory)
        except DeliveryError:
            pass
        else:
            # "/a/." names a folder; made as a file, it is the file "/a", also where a link says so.
            wanted = resolved(root, path, dots=False)
            assert isinstance(wanted, Path)
            assert os.path.samestat(os.fstat(made), wanted.lstat())
            os.close(made)
        rootfs.roll_back()

        assert {str(p) for p in root.rglob("*")} == there
        assert digest(outside) == before


@pytest.mark.parametrize(
    ("links", "path"),
    [
        ({"a": "@"}, "/a/new"),
        ({"a": "../../../../../../../..@"}, "/a/new"),
        ({"a": "b", "b": "c", "c": "@"}, "/a/new"),
        ({"a": "/proc/self/root@"}, "/a/new"),
        ({"a": "/proc/self/cwd"}, "/a/new"),
        ({"a": "@/f"}, "/a"),
        ({"a": {"b": "../../../../../..@/a"}}, "/a/b/x/y/z"),
    ],
    ids=["absolute", "relative", "chained", "proc root", "proc cwd", "file", "deep"],
)
def test_a_link_that_leads_out_leads_into_the_root(outside: Path, links: Any, path: str) -> None:
    """As it would for the container's own processes: what is missing is made inside."""
    before = digest(outside)
    with tempfile.TemporaryDirectory() as name, opened(Path(name)) as rootfs:
        fill(Path(name), links, outside)
        made = rootfs.make(path, directory=True)
        where = rootfs.path_of(made)
        os.close(made)

        assert where.startswith(f"{name}/")
        assert digest(outside) == before


@pytest.mark.parametrize(
    "links", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "a/x"}], ids=["itself", "each other", "below itself"]
)
def test_a_loop_is_refused(outside: Path, links: Any) -> None:
    """Whether it is looked for or made."""
    with tempfile.TemporaryDirectory() as name, opened(Path(name)) as rootfs:
        fill(Path(name), links, outside)
        for call in (lambda: rootfs.find("/a/b"), lambda: rootfs.make("/a/b", directory=True)):
            with pytest.raises(DeliveryError, match="HOK210"):
                call()


@pytest.mark.parametrize("path", ["/", "//", "/.", "", "relative", "/a\0b"], ids=repr)
def test_a_path_that_is_none_is_refused(tmp_path: Path, path: str) -> None:
    """The root itself cannot be a target either."""
    with opened(tmp_path) as rootfs, pytest.raises(DeliveryError, match="HOK210"):
        rootfs.make(path, directory=True)


@pytest.mark.parametrize("path", ["/..", "/a/..", "/a/../.."], ids=repr)
def test_a_node_is_never_put_above_its_folder(tmp_path: Path, path: str) -> None:
    """The folder may be the root: the name that is then used by itself would lead out of it."""
    (tmp_path / "a").symlink_to("/")
    with opened(tmp_path) as rootfs, pytest.raises(DeliveryError, match="HOK210"):
        rootfs.parent(path)


@pytest.mark.parametrize("path", ["/a/../b", "/x/a/../../b"])
def test_what_goes_up_from_where_nothing_is_makes_nothing(tmp_path: Path, path: str) -> None:
    """It can only be a mistake; no folder is left of it."""
    with opened(tmp_path) as rootfs, pytest.raises(DeliveryError, match="HOK210"):
        rootfs.make(path, directory=True)

    assert list(tmp_path.iterdir()) == []


def test_modes_do_not_depend_on_who_calls(tmp_path: Path) -> None:
    """Folders are for all to enter, files for all to read, as runtimes make them."""
    before = os.umask(0)
    try:
        with opened(tmp_path) as rootfs:
            os.close(rootfs.make("/d/e/f", directory=False))
    finally:
        os.umask(before)

    assert [stat.S_IMODE((tmp_path / path).stat().st_mode) for path in ("d", "d/e", "d/e/f")] == [
        0o755,
        0o755,
        0o644,
    ]


FIELD = st.binary(max_size=12).filter(lambda text: b"\0" not in text)


def escaped(text: bytes) -> bytes:
    """As the kernel writes paths into mountinfo."""
    return b"".join(b"\\%03o" % byte if byte in b" \t\n\\" else bytes([byte]) for byte in text)


@given(
    number=st.integers(0, 1 << 31),
    root=FIELD,
    point=FIELD,
    optional=st.lists(st.sampled_from([b"shared:7", b"master:3", b"propagate_from:2", b"unbindable"])),
    source=FIELD,
)
def test_a_line_of_mountinfo_is_read_back(
    number: int, root: bytes, point: bytes, optional: list[bytes], source: bytes
) -> None:
    """Whatever is in paths, and however many optional fields there are."""
    line = b" ".join(
        [
            b"%d 2 0:57 %s %s ro,nosuid" % (number, escaped(b"/" + root), escaped(b"/" + point)),
            *optional,
            b"- tmpfs %s rw,mode=755" % (escaped(source) or b"none"),
        ]
    )
    (found,) = mountinfo.parse(line + b"\n").items()

    assert found[0] == number
    assert (os.fsencode(found[1].point), found[1].device) == (b"/" + point, "0:57")
    assert os.fsencode(found[1].root) == b"/" + root
    assert (found[1].type, found[1].options) == ("tmpfs", {"ro", "nosuid"})
    assert found[1].super_options == {"rw", "mode=755"}
    assert found[1].shared == (b"shared:7" in optional)


@given(st.binary(max_size=200))
def test_no_mountinfo_makes_it_crash(data: bytes) -> None:
    """Of what is not as documented nothing is concluded."""
    assert all(type(number) is int for number in mountinfo.parse(data))


def test_the_machines_own_mounts_are_read() -> None:
    """The root is one of them."""
    mounts = mountinfo.parse(Path("/proc/self/mountinfo").read_bytes())

    assert "/" in {mount.point for mount in mounts.values()}
