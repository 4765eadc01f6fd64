"""CRI-O's files as CRI-O reads them: which, in which order, and what one makes of another."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from cdi_courier.errors import CourierError
from cdi_courier_cri_o import configuration
from hypothesis import given
from hypothesis import strategies as st

from .conftest import Site

SCALARS = st.one_of(st.booleans(), st.integers(0, 9), st.text(max_size=3), st.lists(st.integers(0, 9)))
NAMES = st.sampled_from(["runc", "crun", "x"])
DOCUMENTS = st.fixed_dictionaries(
    {
        "crio": st.fixed_dictionaries(
            {
                "runtime": st.fixed_dictionaries(
                    {
                        "default_runtime": SCALARS,
                        "runtimes": st.dictionaries(NAMES, st.dictionaries(NAMES, SCALARS)),
                    }
                )
            },
            optional={"nri": st.dictionaries(NAMES, SCALARS)},
        )
    }
)


def read(site: Site) -> configuration.Configuration:
    return configuration.read(site.runtime(), site.settings)


def test_every_file_counts_whatever_its_name_and_in_cri_os_order(site: Site) -> None:
    """Editors' backups and files in folders are read too, byte by byte of each part of the path."""
    site.main.write_text("a = 1")
    for name in ("10-b.conf", "10-b/x", "10-b.conf~", ".hidden", "20.bak", "90-cdi-courier.conf", "Z"):
        path = site.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("a = 1")
    found = read(site)

    assert [os.path.relpath(file.path, site.folder) for file in found.files] == [
        "../crio.conf",
        ".hidden",
        "10-b/x",
        "10-b.conf",
        "10-b.conf~",
        "20.bak",
        "Z",
    ]
    assert [os.path.basename(file.path) for file in found.later] == ["Z"]


def test_files_that_are_not_there_are_none(site: Site) -> None:
    """Neither the main file nor the folder has to exist."""
    site.folder.rmdir()

    assert read(site).files == ()


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        pytest.param(lambda path: path.write_text("# Drop-ins\nThese files…"), "not TOML", id="readme"),
        pytest.param(lambda path: path.write_bytes(b"a = '\xff'"), "not TOML", id="no text"),
        pytest.param(lambda path: path.symlink_to(path.parent), "not a regular file", id="link to a folder"),
        pytest.param(lambda path: path.symlink_to(path), "symbolic links", id="link to itself"),
        pytest.param(os.mkfifo, "not a regular file", id="pipe"),
        pytest.param(lambda path: path.symlink_to("gone"), "leads nowhere", id="link to nothing"),
    ],
)
def test_what_cri_o_would_not_start_with_is_named(site: Site, break_it: Any, says: str) -> None:
    """A file that cannot be one of CRI-O's is found before CRI-O finds it at its restart."""
    path = site.folder / "README.md"
    break_it(path)
    error = site.refused()

    assert error.code == "CRI103"
    assert str(path) in error.message
    assert says in error.message.replace("Too many levels of symbolic links", "symbolic links")


def test_a_file_that_goes_while_the_folder_is_read_is_none(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Editors and package managers make and remove files at any time."""
    path = site.folder / "10.conf~"
    monkeypatch.setattr(configuration, "_below", lambda _: [str(path)])

    assert read(site).files == ()


def test_a_byte_order_mark_is_passed_over(site: Site) -> None:
    """As by CRI-O 1.37; the dry run gets the file as it is."""
    data = b"\xef\xbb\xbf[crio.nri]\nenable_nri = false\n"
    (site.folder / "99.conf").write_bytes(data)
    (file,) = read(site).files

    assert (file.document, file.data) == ({"crio": {"nri": {"enable_nri": False}}}, data)


def test_keys_count_whatever_their_case_and_names_as_they_are(site: Site) -> None:
    """As CRI-O 1.37 reads them; what a handler is called, and what is handed on, is not its own."""
    (site.folder / "99.conf").write_text(
        "[CRIO.Nri]\nEnable_NRI = false\n[Crio.Runtime]\nDEFAULT_runtime = 'Mine'\n"
        "[crio.runtime.Runtimes.Mine]\nRuntime_Path = '/x'\n"
        "[crio.runtime.Runtimes.Mine.Default_Annotations]\nKey = 'V'\n"
    )
    stored = read(site).stored["crio"]

    assert stored["nri"] == {"enable_nri": False}
    assert stored["runtime"] == {
        "default_runtime": "Mine",
        "runtimes": {"Mine": {"runtime_path": "/x", "default_annotations": {"Key": "V"}}},
    }
    site.told(cri_o_drop_in={"mode": "nri"})
    assert site.refused().code == "CRI106"


@given(DOCUMENTS, DOCUMENTS)
def test_later_documents_win_key_by_key_and_handlers_as_a_whole(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    """Scalars and arrays are the last one's; a handler is one document's alone; no other is lost."""
    both = configuration.merged([one, other])["crio"]
    first, last = one["crio"]["runtime"]["runtimes"], other["crio"]["runtime"]["runtimes"]

    assert both["runtime"]["default_runtime"] == other["crio"]["runtime"]["default_runtime"]
    assert both["runtime"]["runtimes"] == {**first, **last}
    assert both.get("nri", {}) == {**one["crio"].get("nri", {}), **other["crio"].get("nri", {})}


@given(DOCUMENTS)
def test_merging_changes_no_document(one: dict[str, Any]) -> None:
    """What was read stays as it was read, and once or twice is the same."""
    before = repr(one)
    twice = configuration.merged([one, one])

    assert twice == one
    assert repr(one) == before


def test_what_cri_o_does_not_say_is_said_to_be_unverified(site: Site) -> None:
    """Its files stand for it then, and nobody takes them for its answer."""
    site.live = None
    found = read(site)

    assert found.running is None
    assert "its files stand for" in found.unverified[0]


def test_a_folder_that_may_not_be_read_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken for an empty one."""

    def walk(path: str, onerror: Any) -> list[Any]:
        onerror(PermissionError(13, "Permission denied", path))
        return []

    monkeypatch.setattr(configuration.os, "walk", walk)
    with pytest.raises(CourierError) as caught:
        read(site)

    assert (caught.value.code, str(site.folder) in caught.value.message) == ("CRI103", True)


def test_the_daemon_can_load_it_without_grpcio() -> None:
    """Offers are made in the long-lived process, which is to stay small."""
    code = "import sys, cdi_courier_cri_o.backend, cdi_courier_cri_o.offers; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"
