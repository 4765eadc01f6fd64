"""Finding entry points without the library, held against the library."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from cdi_courier import entry_points
from cdi_courier.plugins import discover
from hypothesis import example, given
from hypothesis import strategies as st

GROUP = "cdi_courier"

pieces = st.text("ab.:[]-_ ü\t", min_size=1, max_size=6)
pairs = st.builds("{}{}{}".format, pieces, st.sampled_from(["=", " = ", "=\t="]), pieces).filter(
    lambda line: not line.strip().endswith("]")
)
sections = st.builds(
    lambda header, found: "\n".join([header, *found]),
    st.sampled_from([f"[{GROUP}]", f"[{GROUP}]", f" [[{GROUP}]]", f"[ {GROUP} ]", "[console_scripts]"]),
    st.lists(pairs | st.sampled_from(["# c = d", "", "nri = pkg.mod", "  x.y=pkg:attr [more]"]), max_size=4),
)
texts = st.lists(sections, max_size=3).map("\n".join)
contents = st.none() | st.builds(
    lambda text, end: text.replace("\n", end).encode(), texts, st.sampled_from(["\n", "\r\n"])
)
folders = st.builds(
    "{}{}{}".format,
    st.sampled_from(["a", "b", "c.d", "E_f", "g-2", "h", "i", "j"]),
    st.sampled_from(["-1", "-1-py3"]),
    st.sampled_from([".dist-info", ".egg-info"]),
)
roots = st.lists(st.dictionaries(folders, contents, max_size=3), max_size=3)
"""Folders of metadata as installers write them; a name may come twice, and a file be about others."""

odd_folders = st.sampled_from(
    ["A-1.dist-info", "a.dist-info", "-1.dist-info", "a-1.DIST-INFO", "c__d-2.egg-info"]
)
odd_contents = contents | st.binary(max_size=8) | st.sampled_from([b"[cdi_courier]\nnothing", b"[x]\n\xff=1"])
odd_roots = st.lists(st.dictionaries(folders | odd_folders, odd_contents, max_size=2), max_size=2)


@contextmanager
def searched(paths: list[str]) -> Iterator[None]:
    before = sys.path[:]
    sys.path[:] = paths
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def laid_out(layout: list[dict[str, bytes | None]]) -> Iterator[list[Path]]:
    """Folders of metadata in folders that the interpreter searches; None: without entry points."""
    with TemporaryDirectory() as name:
        paths = [Path(name, f"root{number}") for number in range(len(layout))]
        for path, found in zip(paths, layout, strict=True):
            path.mkdir()
            for folder, data in found.items():
                (path / folder).mkdir()
                if data is not None:
                    (path / folder / "entry_points.txt").write_bytes(data)
        with searched([*map(str, paths), f"{name}/not-there"]):
            yield paths


def by_the_library() -> list[tuple[str, str]] | None:
    """What the library finds; None where it fails."""
    try:
        return [(point.name, point.value) for point in metadata.entry_points(group=GROUP)]
    except Exception:  # noqa: BLE001 - it raises various things
        return None


def is_plain(layout: list[dict[str, bytes | None]]) -> bool:
    """Whether no distribution of ours is there twice."""
    every = [folder.partition("-")[0] for found in layout for folder in found]
    ours = [
        f.partition("-")[0]
        for found in layout
        for f, data in found.items()
        if GROUP.encode() in (data or b"")
    ]
    return all(every.count(name) == 1 for name in ours)


@given(roots)
def test_what_is_found_is_what_the_library_finds(layout: list[dict[str, bytes | None]]) -> None:
    """As installers lay metadata out, the answer is the library's, and it is not asked for it."""
    with laid_out(layout):
        found, theirs = entry_points.plain(GROUP), by_the_library()

    if is_plain(layout):
        assert found is not None
        assert [tuple(point) for point in found] == theirs
    else:
        assert found is None


@given(odd_roots)
@example([{"a-1.dist-info": b"[cdi_courier]\nnri = new\n"}, {"A-2.dist-info": b"[cdi_courier]\nnri = old\n"}])
@example([{"a-1.dist-info": None}, {"a-2.dist-info": b"[cdi_courier]\nnri = old\n"}])
def test_however_metadata_is_laid_out_nothing_else_is_found(layout: list[dict[str, bytes | None]]) -> None:
    """The library is asked, or fails at it, or has the same answer."""
    with laid_out(layout):
        found, theirs = entry_points.plain(GROUP), by_the_library()

    if found is not None and theirs is not None:
        assert [tuple(point) for point in found] == theirs


def test_the_plain_case_is_read_without_the_library() -> None:
    """Distributions with plain lines, and others without any, are not a case for the library."""
    layout: list[dict[str, bytes | None]] = [
        {
            "cdi_courier_nri-0.1.0.dist-info": (
                b"[console_scripts]\ncdi-courier-nri = cdi_courier_nri.launched:main\n\n"
                b"[cdi_courier]\nnri = cdi_courier_nri.backend\n"
            ),
            "other-1.egg-info": b"[console_scripts]\nother = other:main\n",
            "none-1.dist-info": None,
        },
        {"mine-2.dist-info": b"[cdi_courier]\nmine = mine.plugin:made.here\n"},
    ]
    with laid_out(layout):
        found = entry_points.plain(GROUP)

    assert found is not None
    assert sorted(found) == [("mine", "mine.plugin:made.here"), ("nri", "cdi_courier_nri.backend")]


def test_what_is_installed_here_is_plain() -> None:
    """The product's own packages, installed as its developers do, need no library to be found."""
    found = entry_points.plain(GROUP)

    assert found is not None
    assert {"nri", "oci_hook", "cri_o_drop_in"} <= {point.name for point in found}
    assert found == by_the_library()


def test_an_archive_or_another_finder_is_for_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where metadata may lie that is no folder of a folder, the library is asked."""
    archive = tmp_path / "packages.zip"
    archive.touch()
    with searched([str(archive)]):
        assert entry_points.plain(GROUP) is None
    egg = tmp_path / "mine.egg"
    egg.mkdir()
    with searched([str(egg)]):
        assert entry_points.plain(GROUP) is None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, SimpleNamespace(find_distributions=None)])
    with searched([]):
        assert entry_points.plain(GROUP) is None


def test_where_the_plain_reading_gives_up_the_library_answers() -> None:
    """Of a distribution that is installed twice, the library says which one counts."""
    layout: list[dict[str, bytes | None]] = [
        {"a-2.dist-info": b"[cdi_courier]\nnri = new\n"},
        {"A-1.dist-info": b"[cdi_courier]\nnri = old\n"},
    ]
    with laid_out(layout):
        assert entry_points.plain(GROUP) is None
        (point,) = entry_points.installed(GROUP)

    assert point == metadata.EntryPoint("nri", "new", GROUP)


@pytest.mark.parametrize(
    "value",
    [
        "os.path",
        "os:path.join",
        "os : path [extra]",
        "os.path [a, b]",
        "not_a_module_of_ours",
        "os:not_there",
    ],
)
def test_what_a_line_names_is_loaded(value: str) -> None:
    """A line names a module, or something in it, as the library takes it, or fails as it does there."""
    assert outcome(entry_points.Plain("x", value)) == outcome(metadata.EntryPoint("x", value, GROUP))


def outcome(point: entry_points.EntryPoint) -> object:
    """What an entry point loads, or how it fails."""
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        return str(error)


def test_a_broken_line_is_one_plugin_s_trouble() -> None:
    """A file that the library fails at is a reported plugin if it is about ours, and else nothing."""
    layout: list[dict[str, bytes | None]] = [
        {
            "a-1.dist-info": b"[cdi_courier]\nno value\nodd = a b\nfine = cdi_courier.names\n",
            "b-1.dist-info": b"[console_scripts]\nno value\n",
        },
        {"c-1.dist-info": b"[cdi_courier]\nthis = \xff\n"},
    ]
    with laid_out(layout):
        assert by_the_library() is None
        found = discover(found=entry_points.installed(GROUP))

    assert sorted(found.problems) == ["no value", "odd", "this"]
    assert "module:attribute, not 'a b'" in found.problems["odd"].message


def test_a_plugin_that_is_installed_beside_the_product_is_found(tmp_path: Path) -> None:
    """A new process finds somebody else's plugin in another of its folders, without importing the library."""
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[cdi_courier]\ntheirs = theirs\n")
    (tmp_path / "theirs.py").write_text("")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "from cdi_courier import entry_points\n"
        "names = [point.name for point in entry_points.installed('cdi_courier')]\n"
        "print('nri' in names, 'theirs' in names, 'importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "True True False"
