"""The compiled table: trusted only while it is whole, ours, and made of what there is now."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cdi_courier import compiling, signature, table
from support.needs import needs_root


def compiled(files: Any) -> None:
    """Write the table of what the files are now."""
    compiling.write(compiling.compile_settled(str(files.settings)), str(files.table))


def trusted(files: Any) -> bool:
    return table.read(str(files.table), str(files.settings)) is not None


def test_a_table_that_was_just_compiled_is_trusted(files: Any) -> None:
    """It resolves what the files define, a file's own edits once and first, and knows nothing else."""
    compiled(files)

    known = table.read(str(files.table), str(files.settings))
    assert known is not None
    assert known.resolve(["v.com/c=b", "v.com/c=a"]) == {"env": ["ALL=1", "B=1", "A=1"]}
    assert known.resolve(["v.com/c=z"]) is None
    assert known.log == str(files.log)


def rename_over(path: Path) -> None:
    copy = path.with_suffix(".new")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)


CHANGES: dict[str, Callable[[Any], object]] = {
    "spec-written": lambda f: f.spec("v.json", {"a": {"env": ["A=2"]}}),
    "spec-replaced-by-its-copy": lambda f: rename_over(f.specs / "v.json"),
    "spec-added": lambda f: f.spec("w.json", {"a": {"env": ["A=2"]}}, kind="w.com/c"),
    "spec-removed": lambda f: (f.specs / "v.json").unlink(),
    "spec-of-another-mode": lambda f: (f.specs / "v.json").chmod(0o666),
    "directory-of-another-mode": lambda f: f.specs.chmod(0o777),
    "directory-gone": lambda f: f.specs.rename(f.root / "elsewhere"),
    "settings-written": lambda f: f.configure("policy.local = 'deny'\n"),
    "settings-gone": lambda f: f.settings.unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_table_is_not_trusted_once_what_it_was_made_of_has_changed(
    files: Any, change: Callable[[Any], object]
) -> None:
    """Whatever happens to a spec file, a directory or the settings, the table no longer holds."""
    compiled(files)
    assert trusted(files)

    change(files)

    assert not trusted(files)


@pytest.mark.parametrize("name", ["config.toml", "conf.d/50.toml"], ids=["main", "drop-in"])
def test_a_settings_file_that_appears_ends_the_trust(files: Any, name: str) -> None:
    """In a folder of settings, also a file that was not there counts."""
    place = f"{files.root}/etc/"
    sources = table.settings_sources(place)
    before = table.look(sources)[0]
    path = Path(place) / name
    path.parent.mkdir(parents=True)

    path.touch()

    assert table.look(sources)[0] != before


def test_what_is_no_settings_or_spec_file_does_not_end_the_trust(files: Any) -> None:
    """A file of another kind beside the specs changes nothing."""
    compiled(files)

    (files.specs / "README").touch()

    assert trusted(files)


DAMAGES: dict[str, Callable[[str], str]] = {
    "empty": lambda _: "",
    "cut": lambda text: text[: len(text) // 2],
    "no-object": lambda _: "[]",
    "null": lambda _: "null",
    "nested": lambda _: "[" * 100_000,
    "foreign-format": lambda text: json.dumps({**json.loads(text), "format": table.FORMAT + 1}),
    "foreign-settings": lambda text: json.dumps({**json.loads(text), "settings": "/elsewhere"}),
    "no-signature": lambda text: json.dumps({**json.loads(text), "signature": None}),
    "misshapen-signature": lambda text: json.dumps({**json.loads(text), "signature": [[1, 2, 3]]}),
    "no-keys": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "keys"}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_or_foreign_table_is_none(files: Any, damage: Callable[[str], str]) -> None:
    """Whatever is wrong with the file, the reader gets None and no exception."""
    compiled(files)

    files.table.write_text(damage(files.table.read_text()))

    assert not trusted(files)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


OTHERS: dict[str, Callable[[Path], object]] = {
    "group-writes": lambda path: path.chmod(0o620),
    "everybody-writes": lambda path: path.chmod(0o602),
    "link": replace_by_link,
    "pipe": replace_by_pipe,
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "absent": lambda path: path.unlink(),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_a_table_that_somebody_else_could_have_made_is_none(
    files: Any, change: Callable[[Path], object]
) -> None:
    """Only a regular file that nobody else may write counts, and nothing is waited for."""
    compiled(files)

    change(files.table)

    assert not trusted(files)


@needs_root
def test_a_table_of_another_user_is_none(files: Any) -> None:
    """Neither root's nor ours: not believed."""
    compiled(files)

    os.chown(files.table, 4242, 0)

    assert not trusted(files)


def test_a_table_of_files_that_were_just_written_is_not_kept(
    files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writes within one tick of the clock look the same, so the table of the first must not stay."""
    monkeypatch.setattr(signature, "REST_NS", 1 << 62)
    made = compiling.compile_table(str(files.settings))

    with pytest.raises(ValueError, match="just changing"):
        compiling.write(made, str(files.table))
    assert not files.table.exists()


def test_a_table_of_files_that_changed_meanwhile_is_not_kept(
    files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spec that came while settings were read is in the table or not; it is not settled either way."""
    compiled(files)  # all has rested now
    original = compiling.injector_of

    def slowly(settings: Any) -> Any:
        files.configure("# changed\n")
        return original(settings)

    monkeypatch.setattr(compiling, "injector_of", slowly)

    assert not compiling.compile_table(str(files.settings)).settled


def test_tables_written_at_once_are_each_whole(files: Any) -> None:
    """Whoever reads while several write gets a trusted table every time, and no temporary file is left."""
    made = compiling.compile_settled(str(files.settings))
    compiling.write(made, str(files.table))

    def write() -> None:
        for _ in range(50):
            compiling.write(made, str(files.table))

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        seen.add(trusted(files))
    for writer in writers:
        writer.join()

    assert seen == {True}
    assert os.listdir(files.state) == ["table.json"]


def test_a_table_is_private(files: Any) -> None:
    """It may hold what only root may read in the settings."""
    compiled(files)

    assert files.table.stat().st_mode & 0o777 == 0o600
    assert files.state.stat().st_mode & 0o777 == 0o700


def test_outside_of_user_namespaces_the_table_lies_in_the_state_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The initial namespace's root has no runtime folder to look for."""
    monkeypatch.setattr(table, "outer_uid", lambda: None)

    assert table.place("/run/x") == "/run/x/table.json"


def test_a_rootless_user_has_a_table_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a user namespace it lies in the runtime folder of the user outside, if that is theirs."""
    stat = os.stat
    monkeypatch.setattr(table, "outer_uid", lambda: 1000)
    monkeypatch.setattr(table.os, "stat", lambda path: stat(tmp_path if path == "/run/user/1000" else path))

    assert table.place("/run/x") == "/run/user/1000/cdi-courier/table.json"


def test_a_user_namespace_without_a_runtime_folder_uses_the_state_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The root of a system container is nobody's user outside."""
    monkeypatch.setattr(table, "outer_uid", lambda: 4_000_000_000)

    assert table.place("/run/x") == "/run/x/table.json"
