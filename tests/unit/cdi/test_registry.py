"""The registry always answers from the files as they are, and an untrusted or broken file never hides."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cdi_courier.cdi import registry as registry_module
from cdi_courier.cdi import trust
from cdi_courier.cdi.model import Spec
from cdi_courier.cdi.registry import Registry
from cdi_courier.cdi.snapshot import Snapshot
from cdi_courier.cdi.trust import acceptable_owners
from cdi_courier.cdi.validate import load_spec
from cdi_courier.errors import CdiError
from cdi_courier.signature import file_identity
from support.needs import needs_root
from support.waiting import wait_for


def spec(kind: str = "v.com/c", *names: str, env: str = "A=1", own: str = "") -> str:
    """The text of a valid spec with these devices, each with one environment variable."""
    devices = "".join(f"- {{name: {name}, containerEdits: {{env: ['{env}']}}}}\n" for name in names or ("d",))
    general = f"containerEdits: {{env: ['{own}']}}\n" if own else ""
    return f"cdiVersion: 0.5.0\nkind: {kind}\n{general}devices:\n{devices}"


def env_of(snapshot: Snapshot, name: str = "v.com/c=d") -> tuple[str, ...]:
    """What a device puts into the environment."""
    return snapshot.resolve([name]).edits.env


@pytest.fixture
def low(tmp_path: Path) -> Path:
    """The directory of low priority."""
    folder = tmp_path / "low"
    folder.mkdir()
    return folder


@pytest.fixture
def high(tmp_path: Path) -> Path:
    """The directory of high priority."""
    folder = tmp_path / "high"
    folder.mkdir()
    return folder


@pytest.fixture
def registry(low: Path, high: Path) -> Registry:
    """A registry of both."""
    return Registry([str(low), str(high)])


# --- directories, priorities, conflicts ----------------------------------------------------------------


def test_missing_directories_are_skipped_silently(tmp_path: Path, high: Path) -> None:
    """Neither the first nor the last directory has to exist."""
    (high / "a.yaml").write_text(spec())

    snapshot = Registry([str(tmp_path / "none"), str(high), str(tmp_path / "neither")]).snapshot()

    assert (list(snapshot.devices), snapshot.dir_errors) == (["v.com/c=d"], {})
    assert snapshot.found == (str(high),)


def test_the_later_directory_wins(low: Path, high: Path, registry: Registry) -> None:
    """A device in a later directory silently shadows one in an earlier, and only its file's edits count."""
    (low / "a.yaml").write_text(spec(env="A=low", own="G=low"))
    (high / "a.yaml").write_text(spec(env="A=high", own="G=high"))

    snapshot = registry.snapshot()

    assert env_of(snapshot) == ("G=high", "A=high")
    assert (snapshot.errors, snapshot.conflicts) == ({}, {})
    assert len(snapshot.specs) == 2


def test_a_conflict_in_a_low_directory_defeats_a_high_one(low: Path, high: Path, registry: Registry) -> None:
    """Two definitions in one directory make a device unresolvable, whoever else defines it; others stay."""
    (low / "a.yaml").write_text(spec("v.com/c", "d", "only"))
    (low / "b.yaml").write_text(spec())
    (high / "c.yaml").write_text(spec())

    snapshot = registry.snapshot()

    assert list(snapshot.devices) == ["v.com/c=only"]
    assert dict(snapshot.conflicts) == {"v.com/c=d": (f"{low}/a.yaml", f"{low}/b.yaml")}
    assert {path: len(errors) for path, errors in snapshot.errors.items()} == {
        f"{low}/a.yaml": 1,
        f"{low}/b.yaml": 1,
    }


def test_a_directory_that_is_a_file_is_an_error_and_the_scan_goes_on(low: Path, high: Path) -> None:
    """A listing error stands under its directory; what follows is still read."""
    (low / "file").write_text("")
    (high / "a.yaml").write_text(spec())

    snapshot = Registry([str(low / "file"), str(high)]).snapshot()

    assert [error.code for error in snapshot.dir_errors.values()] == ["CDI009"]
    assert list(snapshot.devices) == ["v.com/c=d"]


def test_a_directory_listed_twice_is_scanned_twice(low: Path) -> None:
    """Its files shadow themselves, which is no conflict."""
    (low / "a.yaml").write_text(spec())

    snapshot = Registry([str(low), f"{low}/."]).snapshot()

    assert (list(snapshot.devices), len(snapshot.specs), snapshot.conflicts) == (["v.com/c=d"], 2, {})


def test_only_the_exact_extensions_count(low: Path, registry: Registry) -> None:
    """``.json`` and ``.yaml`` in lower case, hidden files included, directories and their files not."""
    for index, name in enumerate((".json", ".h.yaml", "b.json", "c.yml", "d.JSON", "e.json~", "f.yaml.bak")):
        (low / name).write_text(spec("v.com/c", f"d{index}"))
    (low / "sub.json").mkdir()
    (low / "sub.json" / "x.json").write_text(spec())

    snapshot = registry.snapshot()

    assert sorted(snapshot.devices) == ["v.com/c=d0", "v.com/c=d1", "v.com/c=d2"]
    assert snapshot.errors == {}


def test_files_are_read_in_bytewise_order(low: Path, registry: Registry) -> None:
    """A name that is no UTF-8 sorts by its bytes, after every ASCII name and before longer characters."""
    names = [b"a.yaml", b"\x80.yaml", "é.yaml".encode(), "\U0001f600.yaml".encode()]
    for index, name in enumerate(reversed(names)):
        Path(os.fsdecode(os.fsencode(low) + b"/" + name)).write_text(spec("v.com/c", f"d{index}"))

    assert [os.fsencode(Path(file.path).name) for file in registry.snapshot().specs] == sorted(names)


# --- what is noticed -----------------------------------------------------------------------------------


def _edit_in_place(low: Path) -> None:
    (low / "a.yaml").write_text(spec(env="A=2"))


def _rename_over(low: Path) -> None:
    (low.parent / "new").write_text(spec(env="A=2"))
    (low.parent / "new").rename(low / "a.yaml")


def _delete_and_move_in(low: Path) -> None:
    (low / "a.yaml").unlink()
    (low.parent / "new").write_text(spec(env="A=2"))
    (low.parent / "new").rename(low / "b.yaml")


def _hard_link(low: Path) -> None:
    (low / "a.yaml").unlink()
    (low.parent / "new").write_text(spec(env="A=2"))
    (low / "b.yaml").hardlink_to(low.parent / "new")


def _symlink(low: Path) -> None:
    (low / "a.yaml").unlink()
    (low.parent / "new").write_text(spec(env="A=2"))
    (low / "b.yaml").symlink_to("../new")


def _replace_directory(low: Path) -> None:
    low.rename(low.parent / "old")
    low.mkdir()
    (low / "a.yaml").write_text(spec(env="A=2"))


def _same_size_and_mtime(low: Path) -> None:
    before = (low / "a.yaml").stat()
    (low / "a.yaml").write_text(spec(env="A=2"))
    os.utime(low / "a.yaml", ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        _edit_in_place,
        _rename_over,
        _delete_and_move_in,
        _hard_link,
        _symlink,
        _replace_directory,
        _same_size_and_mtime,
    ],
)
def test_a_change_is_seen_at_once(change: Callable[[Path], None], low: Path, registry: Registry) -> None:
    """Whatever replaces A=1 by A=2, the next answer says so, and until then `current` has none."""
    (low / "a.yaml").write_text(spec(env="A=1"))
    assert env_of(registry.snapshot()) == ("A=1",)

    change(low)

    assert registry.current() is None
    assert env_of(registry.snapshot()) == ("A=2",)


def _make_missing_directory(low: Path) -> None:
    (low.parent / "none").mkdir()


@pytest.mark.parametrize(
    "change",
    [
        _edit_in_place,
        _rename_over,
        _delete_and_move_in,
        _hard_link,
        _symlink,
        _replace_directory,
        _same_size_and_mtime,
        lambda low: (low / "a.yaml").unlink(),
        lambda low: (low / "a.yaml").chmod(0o640),
        lambda low: (low / "b.yaml").write_text("x"),
        lambda low: low.rename(low.parent / "gone"),
        lambda low: low.chmod(0o711),
        _make_missing_directory,
    ],
)
def test_a_change_of_what_has_rested_is_seen_at_once(change: Callable[[Path], None], low: Path) -> None:
    """Where a look had become one comparison, any change still makes the next look say no."""
    (low / "a.yaml").write_text(spec(env="A=1"))
    registry = Registry([str(low.parent / "none"), str(low)])
    wait_for(lambda: registry.snapshot() and registry.current(), 10, "the files to rest")
    assert registry.current() is registry.current() is not None

    change(low)

    assert registry.current() is None


@pytest.mark.parametrize(
    "change", [_rename_over, _delete_and_move_in, _hard_link, _symlink, _replace_directory]
)
def test_another_file_is_seen_without_the_rule_of_rest(
    change: Callable[[Path], None], low: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and identities tell, also long after the first file was written."""
    monkeypatch.setattr(registry_module.time, "time_ns", lambda: 2**62)
    (low / "a.yaml").write_text(spec(env="A=1"))
    assert env_of(registry.snapshot()) == ("A=1",)
    assert registry.current() is not None

    change(low)

    assert registry.current() is None
    assert env_of(registry.snapshot()) == ("A=2",)


_STAT_FIELDS = "st_dev st_ino st_size st_mtime_ns st_ctime_ns st_uid st_gid st_mode"


@pytest.mark.parametrize("name", _STAT_FIELDS.split(" "))
def test_everything_stat_says_of_a_file_counts(name: str) -> None:
    """Two states of a file that differ in one of these are different states."""
    before = dict.fromkeys(_STAT_FIELDS.split(" "), 1)
    states = [SimpleNamespace(**before), SimpleNamespace(**{**before, name: 2})]

    first, second = (file_identity(state) for state in states)

    assert first != second


def test_the_target_of_a_link_is_watched(low: Path, high: Path, registry: Registry) -> None:
    """Editing, swapping or removing what a link leads to is seen, as is a swapped link on the way."""
    for name in ("one", "two"):
        (low / name).mkdir()
        (low / name / "s").write_text(spec(env=f"A={name}"))
    (low / "..data").symlink_to("one")
    (high / "a.yaml").symlink_to("../low/..data/s")
    seen = [env_of(registry.snapshot())]

    (low / "one" / "s").write_text(spec(env="A=edited"))
    seen.append(env_of(registry.snapshot()))
    (low / "..new").symlink_to("two")
    (low / "..new").rename(low / "..data")
    seen.append(env_of(registry.snapshot()))
    (low / "two" / "s").unlink()

    assert seen == [("A=one",), ("A=edited",), ("A=two",)]
    assert [error.code for error in registry.snapshot().errors[f"{high}/a.yaml"]] == ["CDI002"]


def test_a_deleted_file_takes_its_devices_along(low: Path, registry: Registry) -> None:
    """Deletion and a directory that vanishes leave nothing behind."""
    (low / "a.yaml").write_text(spec())
    assert registry.snapshot().devices

    (low / "a.yaml").unlink()
    assert not registry.snapshot().devices
    low.rmdir()

    assert str(low) not in registry.snapshot().found


def test_a_directory_that_appears_later_is_read(tmp_path: Path) -> None:
    """A registry may be older than its directories."""
    registry = Registry([str(tmp_path / "later")])
    assert not registry.snapshot().devices

    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "a.json").write_text(spec())

    assert list(registry.snapshot().devices) == ["v.com/c=d"]


def test_an_unchanged_registry_answers_with_the_same_snapshot(
    low: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the files have rested nothing is read again, and a rescan reads only what has changed."""
    (low / "a.yaml").write_text(spec())
    (low / "b.yaml").write_text(spec("v.com/e"))
    monkeypatch.setattr(registry_module.time, "time_ns", lambda: 2**62)  # long after
    first = registry.snapshot()
    read: list[str] = []

    def load(data: bytes, path: str) -> Spec:
        read.append(path)
        return load_spec(data, path)

    monkeypatch.setattr(registry_module, "load_spec", load)

    assert registry.current() is not None
    assert registry.snapshot() is first
    (low / "b.yaml").write_text(spec("v.com/f"))
    assert registry.current() is None
    assert "v.com/f=d" in registry.snapshot().devices
    assert read == [f"{low}/b.yaml"]


@pytest.mark.parametrize(
    ("age_ns", "changed"), [(0, True), (10_000_000, True), (-10_000_000, True), (40_000_000, False)]
)
def test_a_file_written_just_before_is_read_again(
    age_ns: int, changed: bool, low: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writes within one tick of the kernel's clock look the same, so a fresh file counts as changed."""
    (low / "a.yaml").write_text(spec())
    now = (low / "a.yaml").stat().st_ctime_ns + age_ns
    monkeypatch.setattr(registry_module.time, "time_ns", lambda: now)

    registry.snapshot()

    assert (registry.current() is None) is changed


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_file_that_changes_while_it_is_read_is_read_again(
    moment: str, low: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write before or after the bytes are taken is in the next answer."""
    (low / "a.yaml").write_text(spec(env="A=1"))
    original = os.read
    pending = [spec(env="A=2")]

    def read(descriptor: int, size: int) -> bytes:
        if moment == "before" and pending:
            (low / "a.yaml").write_text(pending.pop())
        data = original(descriptor, size)
        if moment == "after" and pending:
            (low / "a.yaml").write_text(pending.pop())
        return data

    monkeypatch.setattr(registry_module.os, "read", read)
    registry.snapshot()

    assert env_of(registry.snapshot()) == ("A=2",)


def test_a_file_that_appears_during_a_scan_is_in_the_next_answer(
    low: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was listed is remembered, not what is there afterwards."""
    (low / "a.yaml").write_text(spec())
    pending = [spec("v.com/e")]

    def load(data: bytes, path: str) -> Spec:
        if pending:
            (low / "b.yaml").write_text(pending.pop())
        return load_spec(data, path)

    monkeypatch.setattr(registry_module, "load_spec", load)
    registry.snapshot()

    assert "v.com/e=d" in registry.snapshot().devices


# --- files that are not specs --------------------------------------------------------------------------


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _directory_link(path: Path) -> None:
    path.symlink_to(".")


def _dangling(path: Path) -> None:
    path.symlink_to("nothing")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _empty(path: Path) -> None:
    path.touch()


def _too_large(path: Path) -> None:
    path.write_text(spec() + "#" * 5000)


def _garbage(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\xff")


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (_fifo, "CDI002"),
        (_socket, "CDI002"),
        (_directory_link, "CDI002"),
        (_dangling, "CDI002"),
        (_loop, "CDI002"),
        (_empty, "CDI003"),
        (_too_large, "CDI002"),
        (_garbage, "CDI003"),
    ],
)
def test_what_is_no_spec_is_an_error_of_its_own(
    make: Callable[[Path], None], code: str, low: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It blocks nothing, hides nothing and spoils nothing else."""
    monkeypatch.chdir(low)  # a socket's path is short
    make(Path("x.yaml"))
    (low / "y.yaml").write_text(spec())

    snapshot = Registry([str(low)], max_file_size=4096).snapshot()

    assert {path: [error.code for error in errors] for path, errors in snapshot.errors.items()} == {
        f"{low}/x.yaml": [code]
    }
    assert list(snapshot.devices) == ["v.com/c=d"]


def test_a_fifo_that_takes_a_files_place_does_not_block(tmp_path: Path) -> None:
    """Between looking and opening anything can happen; opening waits for nobody."""
    os.mkfifo(tmp_path / "x.yaml")

    assert registry_module._read(str(tmp_path / "x.yaml"), 100)[1] is None


def test_a_file_of_exactly_the_limit_is_read(low: Path) -> None:
    """The limit is inclusive."""
    (low / "a.yaml").write_text(spec())
    size = (low / "a.yaml").stat().st_size

    assert Registry([str(low)], max_file_size=size).snapshot().devices
    assert not Registry([str(low)], max_file_size=size - 1).snapshot().devices


def test_a_file_that_may_not_be_opened_is_an_error(
    low: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permission denied is remembered until the file changes; a lack of descriptors is not."""
    (low / "a.yaml").write_text(spec())
    codes = []
    for number in (13, 24):

        def refuse(*_: Any, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(registry_module.os, "open", refuse)
            another = Registry(registry.dirs)
            codes += [error.code for error in another.snapshot().errors[f"{low}/a.yaml"]]
        codes.append(another.current() is None)

    assert codes == ["CDI002", False, "CDI002", True]


# --- trust ---------------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize(
    ("uid", "gid", "mode", "trusted"),
    [
        (0, 0, 0o600, True),
        (0, 0, 0o664, True),
        (0, 7, 0o644, True),
        (0, 7, 0o664, False),
        (0, 0, 0o646, False),
        (1000, 0, 0o644, False),
    ],
)
def test_only_what_root_alone_may_write_is_trusted(
    uid: int, gid: int, mode: int, trusted: bool, low: Path, registry: Registry
) -> None:
    """Owner, group and mode decide; a file that fails has an error that names them and the cure."""
    (low / "a.yaml").write_text(spec())
    os.chown(low / "a.yaml", uid, gid)
    (low / "a.yaml").chmod(mode)

    snapshot = registry.snapshot()

    assert bool(snapshot.devices) is trusted
    if not trusted:
        error = snapshot.errors[f"{low}/a.yaml"][0]
        assert error.code == "CDI007"
        assert f"{mode:04o}" in error.message or f"uid {uid}" in error.message
        assert "trust" in error.hint
    assert Registry(registry.dirs, trust="any").snapshot().devices


@needs_root
def test_an_untrusted_file_makes_its_names_unresolvable_everywhere(
    low: Path, high: Path, registry: Registry
) -> None:
    """The runtime would use it, so a trusted file's definition of the same name does not help."""
    (low / "a.yaml").write_text(spec("v.com/c", "d", "e"))
    (high / "b.yaml").write_text(spec())
    os.chown(high / "b.yaml", 1000, 0)

    snapshot = registry.snapshot()

    assert list(snapshot.devices) == ["v.com/c=e"]
    assert snapshot.explain("v.com/c=d").code == "CDI007"
    assert str(high / "b.yaml") in snapshot.explain("v.com/c=d").message


@needs_root
def test_an_untrusted_file_is_not_suspected_of_other_names(low: Path, registry: Registry) -> None:
    """What it defines is known, so it does not stand in the explanation of a name that it does not define."""
    (low / "a.yaml").write_text(spec("v.com/c", "d"))
    os.chown(low / "a.yaml", 1000, 0)
    (low / "b.yaml").write_text(spec("v.com/c", "e"))

    assert registry.snapshot().explain("v.com/c=x").code == "CDI012"


@needs_root
def test_an_untrusted_file_that_is_no_spec_is_only_an_error(low: Path, registry: Registry) -> None:
    """The runtime ignores it as well."""
    (low / "a.yaml").write_text("{")
    os.chown(low / "a.yaml", 1000, 0)
    (low / "b.yaml").write_text(spec())

    snapshot = registry.snapshot()

    assert list(snapshot.devices) == ["v.com/c=d"]
    assert [error.code for error in snapshot.errors[f"{low}/a.yaml"]] == ["CDI003"]


@needs_root
@pytest.mark.parametrize(
    ("uid", "gid", "mode", "trusted"),
    [
        (1000, 0, 0o755, False),
        (0, 0, 0o777, False),
        (0, 1000, 0o775, False),
        (0, 0, 0o775, True),
        (0, 1000, 0o1777, True),
        (0, 1000, 0o755, True),
    ],
)
def test_a_directory_others_may_change_is_not_trusted(
    uid: int, gid: int, mode: int, trusted: bool, low: Path, registry: Registry
) -> None:
    """Nobody but root may put files into it or swap them; a sticky one lets nobody swap root's."""
    (low / "a.yaml").write_text(spec())
    os.chown(low, uid, gid)
    low.chmod(mode)

    assert bool(registry.snapshot().devices) is trusted


@needs_root
def test_a_link_made_by_somebody_else_is_not_trusted(low: Path, high: Path, registry: Registry) -> None:
    """In a sticky directory anybody can link to a file of root's that was never meant to be a spec here."""
    (low / "target").write_text(spec())
    (high / "a.yaml").symlink_to(low / "target")
    assert registry.snapshot().devices

    os.chown(high / "a.yaml", 1000, 0, follow_symlinks=False)

    assert Registry(registry.dirs).snapshot().explain("v.com/c=d").code == "CDI007"


@needs_root
def test_a_change_of_owner_or_mode_is_seen(low: Path, registry: Registry) -> None:
    """chown and chmod are changes like any other."""
    (low / "a.yaml").write_text(spec())
    states = [bool(registry.snapshot().devices)]
    (low / "a.yaml").chmod(0o666)
    states.append(bool(registry.snapshot().devices))
    (low / "a.yaml").chmod(0o644)
    states.append(bool(registry.snapshot().devices))
    low.chmod(0o777)
    states.append(bool(registry.snapshot().devices))

    assert states == [True, False, True, False]


def test_in_a_user_namespace_caller_and_overflow_uid_are_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the initial user namespace only root is."""
    monkeypatch.setattr(trust, "_is_initial_user_namespace", lambda: True)
    assert acceptable_owners() == {0}
    monkeypatch.setattr(trust, "_is_initial_user_namespace", lambda: False)
    monkeypatch.setattr(trust, "_overflow_uid", lambda: 65000)

    assert acceptable_owners() == {0, os.geteuid(), 65000}
    assert trust.distrust(65000, 65000, stat.S_IFREG | 0o644, acceptable_owners()) == ""


# --- resolving and explaining --------------------------------------------------------------------------


def test_resolving_puts_a_files_own_edits_once_before_its_first_device(low: Path, registry: Registry) -> None:
    """Order: global edits of A, its device, global edits of B, its device, another device of A."""
    (low / "a.yaml").write_text(spec("v.com/a", "d1", "d2", env="D=a", own="G=a"))
    (low / "b.yaml").write_text(spec("v.com/b", "e1", env="D=b", own="G=b"))

    resolution = registry.snapshot().resolve(["v.com/a=d2", "v.com/b=e1", "v.com/a=d1"])

    assert resolution.edits.env == ("G=a", "D=a", "G=b", "D=b", "D=a")
    assert resolution.files == {
        "v.com/a=d2": f"{low}/a.yaml",
        "v.com/b=e1": f"{low}/b.yaml",
        "v.com/a=d1": f"{low}/a.yaml",
    }


def test_asking_for_nothing_gives_no_edits(registry: Registry) -> None:
    """An empty request resolves to empty edits and no files."""
    resolution = registry.snapshot().resolve([])

    assert (resolution.edits.env, resolution.files) == ((), {})


def explained(snapshot: Snapshot, name: str) -> CdiError:
    """The error of resolving one name, which must be what `explain` says of it."""
    with pytest.raises(CdiError) as caught:
        snapshot.resolve([name])
    assert str(caught.value) == str(snapshot.explain(name))
    return caught.value


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("gpu0", "CDI001", "VENDOR/CLASS=NAME"),
        ("", "CDI001", "VENDOR/CLASS=NAME"),
        ("w.com/c=d", "CDI010", "known vendors: v.com"),
        ("v.com/x=d", "CDI011", "its classes: c, many"),
        ("v.com/c=x", "CDI012", "known: v.com/c=d, v.com/c=e"),
        ("v.com/many=gpu17x", "CDI012", "v.com/many=gpu17"),
    ],
)
def test_an_unknown_name_is_explained_by_what_is_known(
    name: str, code: str, words: str, low: Path, registry: Registry
) -> None:
    """The code says how far the name is right, and the text shows what stands there instead."""
    (low / "a.yaml").write_text(spec("v.com/c", "d", "e"))
    (low / "b.yaml").write_text(spec("v.com/many", *(f"gpu{number}" for number in range(100))))

    error = explained(registry.snapshot(), name)

    assert error.code == code
    assert words in str(error)


def test_a_conflict_is_explained_by_its_files(low: Path, registry: Registry) -> None:
    """The reader learns which files to look at."""
    (low / "a.yaml").write_text(spec())
    (low / "b.yaml").write_text(spec())

    error = explained(registry.snapshot(), "v.com/c=d")

    assert error.code == "CDI008"
    assert f"{low}/a.yaml, {low}/b.yaml" in error.message


def test_a_broken_file_that_might_define_the_name_is_named(low: Path, registry: Registry) -> None:
    """With its reason; a broken file that is known to be of another kind is not suspected."""
    (low / "mine.yaml").write_text(spec("v.com/c", "x").replace("env:", "environment:"))
    (low / "other.yaml").write_text(spec("w.com/c").replace("0.5.0", "9.9.9"))
    (low / "good.yaml").write_text(spec("v.com/c", "d"))
    snapshot = registry.snapshot()

    error = explained(snapshot, "v.com/c=x")

    assert error.code == "CDI013"
    assert "mine.yaml:4: devices[0].containerEdits.environment: there is no such field" in error.message
    assert "other.yaml" not in error.message
    assert "other.yaml" in explained(snapshot, "w.com/c=d").message


def test_a_file_that_cannot_even_be_parsed_is_suspected_of_everything(low: Path, registry: Registry) -> None:
    """Nothing is known of what it would define."""
    (low / "bad.json").write_text("{")

    error = explained(registry.snapshot(), "v.com/c=d")

    assert (error.code, "bad.json" in error.message) == ("CDI013", True)


def test_an_unreadable_directory_is_suspected(low: Path) -> None:
    """It stands in the explanation of every unknown name."""
    (low / "file").write_text("")

    error = explained(Registry([str(low / "file")]).snapshot(), "v.com/c=d")

    assert (error.code, str(low / "file") in error.message) == ("CDI013", True)


def test_no_spec_files_at_all_is_said(tmp_path: Path, low: Path) -> None:
    """No directories configured, none there and none with a spec are three different things."""
    texts = [
        explained(Registry(dirs).snapshot(), "v.com/c=d")
        for dirs in ([], [str(tmp_path / "none")], [str(low)])
    ]

    assert {error.code for error in texts} == {"CDI014"}
    assert "no directory is configured" in texts[0].message
    assert "exists" in texts[1].message
    assert "has a valid spec file" in texts[2].message


def test_every_unresolvable_name_is_explained(low: Path, registry: Registry) -> None:
    """One error for all of them, each with its own code."""
    (low / "a.yaml").write_text(spec())

    with pytest.raises(CdiError) as caught:
        registry.snapshot().resolve(["v.com/c=d", "v.com/c=x", "w.com/c=d", "nonsense", "v.com/c=x"])

    assert caught.value.code == "CDI015"
    assert caught.value.message.startswith("3 of 5 devices cannot be resolved")
    for words in ('CDI012 device "v.com/c=x"', 'CDI010 device "w.com/c=d"', 'CDI001 "nonsense"'):
        assert words in caught.value.message


def test_explaining_a_name_that_resolves_is_a_mistake(low: Path, registry: Registry) -> None:
    """There is nothing to explain."""
    (low / "a.yaml").write_text(spec())

    with pytest.raises(ValueError, match="resolves"):
        registry.snapshot().explain("v.com/c=d")


def test_explanations_are_harmless_and_bounded(low: Path, registry: Registry) -> None:
    """Hostile names, many devices and many broken files make neither control characters nor novels."""
    (low / "a.yaml").write_text(spec("v.com/c", *(f"d{number}" for number in range(2000))))
    for number in range(50):
        (low / f"bad{number}\x1b[31m.json").write_text('{"kind": "' + "\x85" * 1000)
    snapshot = registry.snapshot()
    names = [f"v.com/c=x{'y' * 5000}{number}" for number in range(60)] + [
        "\x1b[31m\n",
        "v.com/c=\u202e" * 1000,
    ]

    with pytest.raises(CdiError) as caught:
        snapshot.resolve(names)
    texts = [str(caught.value), *(str(snapshot.explain(name)) for name in names)]

    assert all(text.isprintable() for text in texts)
    assert max(map(len, texts[1:])) < 3000
    assert len(texts[0]) < 60_000


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_too_large, "it is larger than 4096 bytes"),
        (os.mkfifo, "it is not a regular file"),
        (os.mkdir, "it is not a regular file"),
    ],
    ids=["large", "fifo", "folder"],
)
def test_a_file_that_cannot_be_a_spec_is_refused_for_what_it_is(
    make: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    """A file that was named is not told to be one of two things."""
    make(tmp_path / "x.yaml")
    with pytest.raises(CdiError) as caught:
        registry_module.load_file(str(tmp_path / "x.yaml"), 4096)

    assert caught.value.code == "CDI002"
    assert caught.value.message.endswith(why)
