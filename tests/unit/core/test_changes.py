"""Change-sets: applied all or nothing, undone exactly, whatever moment a crash comes at."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from cdi_courier import changes
from cdi_courier.changes import ChangeSet, FileChange
from cdi_courier.errors import CourierError
from support.needs import needs_root

MAIN = b'# ours\r\nversion = 2\r\nimports = ["a"]\r\n'
EDITED = b'# ours\r\nversion = 2\r\nimports = ["a", "x"]\r\n'
NEW = b"disable = false\n"

# What changes files or folders, or has them reach the disk.
MUTATING = (
    "chmod",
    "fchmod",
    "fchown",
    "fsync",
    "link",
    "makedirs",
    "mkdir",
    "open",
    "replace",
    "rmdir",
    "setxattr",
    "unlink",
    "write",
)

Tree = dict[str, tuple[int, int, int, bytes | str | None]]


def tree(root: Path) -> Tree:
    """Everything below the folder: path → mode, owner, group, and content or link target."""
    found: Tree = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content: bytes | str | None = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(root))] = (status.st_mode, status.st_uid, status.st_gid, content)
    return found


class Host:
    """A folder that stands for the host, and one for the manifests."""

    def __init__(self, root: Path) -> None:
        self.etc = root / "etc"
        self.folder = str(root / "state" / "changes")
        self.main = self.etc / "config.toml"
        self.etc.mkdir()
        self.main.write_bytes(MAIN)
        self.main.chmod(0o640)

    def plan(self, **changed: Any) -> ChangeSet:
        """A new file in two new folders, and one more item in an array of the main file."""
        files = (
            FileChange(str(self.etc / "conf.d/deep/50.toml"), NEW, "is new", mode=0o600),
            FileChange(str(self.main), EDITED, "has an import", items=(("imports", "x"),)),
        )
        return attrs.evolve(ChangeSet("nri", "containerd", files, "true"), **changed)

    def apply(self, plan: ChangeSet | None = None, *, force: bool = False) -> tuple[changes.Step, ...]:
        return changes.apply(plan or self.plan(), folder=self.folder, force=force)

    def undo(self, *, force: bool = False) -> None:
        for manifest in changes.installed(self.folder):
            changes.undo(manifest, folder=self.folder, force=force)

    @property
    def manifests(self) -> list[str]:
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        # What a crash left of a new one bears another name; the next one takes its place.
        return [name for name in names if name.endswith(".json")]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host with one configuration file."""
    return Host(tmp_path)


class Crash(BaseException):
    """The machine has lost its power: nothing handles it."""


class FaultyOs:
    """`os`, whose calls that change something fail from the given one on (a crash), or only that one."""

    def __init__(self, at: int, fault: Callable[[], BaseException], *, once: bool) -> None:
        self.left = at
        self.fault = fault
        self.once = once
        self.reached = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in MUTATING:
            return real

        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0 or (self.left < 0 and not self.once):
                self.reached = True
                raise self.fault()
            return real(*args, **options)

        return call


def faults(
    monkeypatch: pytest.MonkeyPatch,
    action: Callable[[], object],
    fault: Callable[[], BaseException],
    *,
    once: bool,
    again: Callable[[], object],
) -> Iterator[tuple[int, BaseException]]:
    """Do `action` with the first call failing, then the second, and so on until it gets through.

    Yields each call's number and what `action` raised; before each, `again` makes the host anew.
    """
    for at in range(1, 500):
        again()
        faulty = FaultyOs(at, fault, once=once)
        with monkeypatch.context() as patch:
            patch.setattr(changes, "os", faulty)
            try:
                action()
            except (CourierError, Crash) as error:
                raised: BaseException | None = error
            else:
                raised = None
        if not faulty.reached:
            return
        if raised is not None:
            yield at, raised
    raise AssertionError("it never gets through")


def fresh(host: Host, before: Tree) -> None:
    """Make the host what it was, whatever state a crash left it in."""
    host.undo(force=True)
    assert tree(host.etc) == before


def files_of(root: Path) -> Tree:
    """The tree without folders and without what a failed write left beside a file."""
    return {
        name: known
        for name, known in tree(root).items()
        if not stat.S_ISDIR(known[0]) and not name.endswith(".cdi-courier")
    }


def full() -> BaseException:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def code_of(action: Callable[[], object]) -> str:
    with pytest.raises(CourierError) as caught:
        action()
    return caught.value.code


# The round trip


def test_what_is_applied_is_undone_to_the_last_byte(host: Host):
    """Contents, modes, owners and folders are as before, and no manifest and no leftover stays."""
    before = tree(host.etc)
    steps = host.apply()

    assert [step.path for step in steps] == [file.path for file in host.plan().files]
    assert host.main.read_bytes() == EDITED
    assert stat.S_IMODE(host.main.stat().st_mode) == 0o640
    assert stat.S_IMODE((host.etc / "conf.d/deep/50.toml").stat().st_mode) == 0o600
    assert [name for name in tree(host.etc) if "cdi-courier" in name] == []
    host.undo()
    assert tree(host.etc) == before
    assert host.manifests == []


def test_a_second_time_changes_nothing(host: Host):
    """Applying what is applied already touches no file, and undoing still gives the first original."""
    before = tree(host.etc)
    host.apply()
    identity = [os.stat(file.path).st_ino for file in host.plan().files]

    assert host.apply() == ()
    assert [os.stat(file.path).st_ino for file in host.plan().files] == identity
    host.undo()
    assert tree(host.etc) == before


def test_a_later_plan_keeps_the_first_original(host: Host):
    """A newer version's other content replaces ours, and undoing goes back behind both."""
    before = tree(host.etc)
    host.apply()
    (new, main) = host.plan().files
    host.apply(host.plan(files=(attrs.evolve(new, content=b"other\n"),)))

    assert Path(new.path).read_bytes() == b"other\n"
    host.undo()
    assert tree(host.etc) == before
    assert main.content != MAIN


def test_a_file_that_is_as_planned_without_us_is_not_ours(host: Host):
    """What was there already stays when the rest is undone, and alone it makes no manifest."""
    host.main.write_bytes(EDITED)
    before = tree(host.etc)
    host.apply(host.plan(files=host.plan().files[1:]))

    assert host.manifests == []
    host.apply()
    host.undo()
    assert tree(host.etc) == before


def test_a_removed_file_comes_back_as_it_was(host: Host):
    """A change may remove a file; undoing makes it again with its mode."""
    before = tree(host.etc)
    host.apply(host.plan(files=(FileChange(str(host.main), None, "goes"),)))

    assert not host.main.exists()
    host.undo()
    assert tree(host.etc) == before


def test_two_backends_and_runtimes_have_manifests_of_their_own(host: Host):
    """Any key makes a file name, and undoing one leaves the other."""
    paths = [host.etc / name for name in ("one", "two")]
    for path, key in zip(paths, ("/run/a b.sock", "../x--y"), strict=True):
        host.apply(ChangeSet("nri", key, (FileChange(str(path), b"x", "is new"),)))
    names = [manifest.runtime for manifest in changes.installed(host.folder)]

    assert sorted(names) == ["../x--y", "/run/a b.sock"]
    first = next(m for m in changes.installed(host.folder) if m.runtime == "/run/a b.sock")
    changes.undo(first, folder=host.folder)
    assert [path.exists() for path in paths] == [False, True]


def test_manifests_are_for_root_alone(host: Host):
    """They hold whole configuration files, which may hold secrets."""
    host.apply()
    modes = [os.stat(path).st_mode for path in (host.folder, os.path.join(host.folder, host.manifests[0]))]

    assert [stat.S_IMODE(mode) for mode in modes] == [0o700, 0o600]


def test_a_folder_that_somebody_uses_stays(host: Host):
    """A folder made for a file is kept while it holds somebody else's."""
    host.apply()
    (host.etc / "conf.d/theirs.toml").write_text("")
    host.undo()

    assert sorted(tree(host.etc)) == ["conf.d", "conf.d/theirs.toml", "config.toml"]


@pytest.mark.parametrize("named", [False, True], ids=["without-a-name", "under-a-name"])
def test_symbolic_links_are_followed_and_stay(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
):
    """The file that a link leads to is replaced where it lies; a link to nowhere leads to the new file."""
    if named:
        monkeypatch.setattr(changes.os, "O_TMPFILE", os.O_DIRECTORY)  # as on file systems without it
    target = tmp_path / "real.toml"
    host.main.rename(target)
    host.main.symlink_to(target)
    (host.etc / "conf.d").symlink_to(tmp_path / "drop-ins")
    (tmp_path / "drop-ins").mkdir()
    (tmp_path / "drop-ins" / "nowhere.toml").symlink_to("made.toml")
    before = tree(tmp_path)
    (_, main) = host.plan().files
    host.apply(host.plan(files=(FileChange(str(host.etc / "conf.d/nowhere.toml"), NEW, "is new"), main)))

    assert (host.main.is_symlink(), target.read_bytes()) == (True, EDITED)
    assert (tmp_path / "drop-ins/made.toml").read_bytes() == NEW
    host.undo()
    after = {name: found for name, found in tree(tmp_path).items() if not name.startswith("state")}
    assert after == before


def test_extended_attributes_are_kept(host: Host):
    """Labels and the like are those of the file that was replaced, before and after undoing."""
    try:
        os.setxattr(host.main, "user.label", b"theirs")
    except OSError:
        pytest.skip("this file system has no extended attributes")
    host.apply()

    assert os.getxattr(host.main, "user.label") == b"theirs"
    host.undo()
    assert os.getxattr(host.main, "user.label") == b"theirs"


@needs_root
def test_the_owner_is_kept(host: Host):
    """Somebody's file stays theirs; a removed one is made again as theirs, with its special bits."""
    os.chown(host.main, 1234, 2345)
    host.main.chmod(0o2750)
    before = tree(host.etc)
    host.apply()
    after = host.main.stat()

    assert (after.st_uid, after.st_gid, stat.S_IMODE(after.st_mode)) == (1234, 2345, 0o2750)
    host.undo()
    assert tree(host.etc) == before
    host.apply(host.plan(files=(FileChange(str(host.main), None, "goes"),)))
    host.undo()
    assert tree(host.etc) == before


# Changed since


def test_only_our_item_leaves_a_file_that_was_changed_since(host: Host):
    """Their edits stay byte for byte, our item goes, and nothing else of ours is left."""
    host.apply()
    host.main.write_bytes(EDITED.replace(b'"a"', b"'b'") + b"# theirs\r\n")
    host.undo()

    assert host.main.read_bytes() == MAIN.replace(b'"a"', b"'b'") + b"# theirs\r\n"
    assert sorted(tree(host.etc)) == ["config.toml"]


def test_only_our_keys_leave_a_file_that_was_changed_since(host: Host):
    """A key in a table goes, or gets the value it had; their edits stay."""
    host.main.write_bytes(b"[a]\nold = 1\n")
    change = FileChange(
        str(host.main), b"[a]\nold = 2\nnew = 3\n", "has keys", keys=(("a", "old"), ("a", "new"))
    )
    host.apply(host.plan(files=(change,)))
    host.main.write_bytes(b"# theirs\n[a]\nold = 2\nnew = 3\n[b]\n")
    host.undo()

    assert host.main.read_bytes() == b"# theirs\n[a]\nold = 1\n[b]\n"


def test_an_item_that_was_theirs_already_stays(host: Host):
    """An item that the original has is never taken out, although it is named as ours."""
    host.main.write_bytes(b'imports = ["x"]\nold = 1\n')
    change = FileChange(str(host.main), b'imports = ["x"]\n', "is shorter", items=(("imports", "x"),))
    host.apply(host.plan(files=(change,)))
    host.main.write_bytes(b'# theirs\nimports = ["x"]\n')
    host.undo()

    assert host.main.read_bytes() == b'# theirs\nimports = ["x"]\n'


def test_installing_over_their_edits_makes_them_the_original(host: Host):
    """Installed, edited by somebody, installed again: undoing gives their version without our item."""
    host.apply()
    theirs = b"# theirs\n" + MAIN
    host.main.write_bytes(b"# theirs\n" + EDITED)
    (new, main) = host.plan().files
    host.apply(host.plan(files=(new, attrs.evolve(main, content=b"# theirs\n" + EDITED + b"# more\n"))))
    host.undo()

    assert host.main.read_bytes() == theirs


@pytest.mark.parametrize("again", ["undo", "apply"])
def test_a_file_all_ours_that_was_changed_since_is_not_touched(host: Host, again: str):
    """Neither undoing nor installing writes over somebody's edits, or anything else, unless forced."""
    before = tree(host.etc)
    host.apply()
    drop_in = host.etc / "conf.d/deep/50.toml"
    drop_in.write_bytes(b"theirs")
    changed = tree(host.etc)

    assert code_of(getattr(host, again)) == "CHG003"
    assert tree(host.etc) == changed
    assert host.manifests != []
    getattr(host, again)(force=True)
    assert (drop_in.exists() and drop_in.read_bytes()) == (NEW if again == "apply" else False)
    host.undo()
    assert tree(host.etc) == before


def test_what_was_written_over_by_force_is_not_ours(host: Host):
    """Somebody's version that --force replaced and that they put back is theirs still."""
    drop_in = host.etc / "conf.d/deep/50.toml"
    host.apply()
    drop_in.write_bytes(b"theirs")
    host.apply(force=True)
    drop_in.write_bytes(b"theirs")

    assert code_of(host.undo) == "CHG003"
    assert drop_in.read_bytes() == b"theirs"


def test_a_changed_file_that_is_no_toml_any_more_is_not_touched(host: Host):
    """Where our item cannot be found out, undoing refuses in words; forced, it restores the original."""
    before = tree(host.etc)
    host.apply()
    host.main.write_bytes(b"imports = [")

    assert code_of(host.undo) == "CHG003"
    host.undo(force=True)
    assert tree(host.etc) == before


def test_files_removed_since_are_no_hindrance(host: Host):
    """Of what is gone nothing of ours is left, so undoing does the rest."""
    host.apply()
    host.main.unlink()
    (host.etc / "conf.d/deep/50.toml").unlink()
    host.undo()

    assert tree(host.etc) == {}
    assert host.manifests == []


# Crashes and failures


@pytest.mark.parametrize("cure", ["undo", "apply"])
@pytest.mark.parametrize("named", [False, True], ids=["without-a-name", "under-a-name"])
def test_a_crash_at_any_moment_of_applying_can_be_repaired(
    host: Host, monkeypatch: pytest.MonkeyPatch, cure: str, named: bool
):
    """Every file is as before or as planned; then undoing gives the original, applying completes."""
    if named:
        monkeypatch.setattr(changes.os, "O_TMPFILE", os.O_DIRECTORY)
    before = tree(host.etc)
    host.apply()
    planned = tree(host.etc)
    host.undo()
    number = 0
    for number, _ in faults(monkeypatch, host.apply, Crash, once=False, again=lambda: fresh(host, before)):
        found = files_of(host.etc).items()
        assert all(known in (before.get(name), planned.get(name)) for name, known in found), number
        getattr(host, cure)()
        assert tree(host.etc) == (planned if cure == "apply" else before), number
        if cure == "undo":
            assert host.manifests == []

    assert number > 20


def test_a_crash_at_any_moment_of_undoing_can_be_repaired(host: Host, monkeypatch: pytest.MonkeyPatch):
    """Undoing again gives the original, whatever the first attempt came to."""
    before = tree(host.etc)

    def again() -> None:
        fresh(host, before)
        host.apply()

    number = 0
    for number, _ in faults(monkeypatch, host.undo, Crash, once=False, again=again):
        host.undo()
        assert tree(host.etc) == before, number
        assert host.manifests == []

    assert number > 15


def test_a_crash_while_installing_anew_keeps_the_first_original(host: Host, monkeypatch: pytest.MonkeyPatch):
    """A second plan that a crash interrupts does not cost the original."""
    before = tree(host.etc)
    (new, main) = host.plan().files
    other = host.plan(
        files=(attrs.evolve(new, content=b"other\n"), attrs.evolve(main, content=EDITED + b"# more\n"))
    )

    def again() -> None:
        fresh(host, before)
        host.apply()

    number = 0
    for number, _ in faults(monkeypatch, lambda: host.apply(other), Crash, once=False, again=again):
        host.undo()
        assert tree(host.etc) == before, number

    assert number > 20


@pytest.mark.parametrize("action", ["apply", "undo"])
def test_a_failure_at_any_moment_leaves_all_as_it_was(
    host: Host, monkeypatch: pytest.MonkeyPatch, action: str
):
    """One call that fails, such as for a full disk, is an error with a code, and no file is changed by half.

    Undoing may fail after all is restored; then only the manifest is left, for a second attempt.
    """
    before, old = tree(host.etc), files_of(host.etc)
    host.apply()
    planned, new = tree(host.etc), files_of(host.etc)
    allowed = (old,) if action == "apply" else (new, old)

    def again() -> None:
        fresh(host, before)
        if action == "undo":
            host.apply()

    number = 0
    for number, error in faults(monkeypatch, getattr(host, action), full, once=True, again=again):
        assert isinstance(error, CourierError), number
        assert error.code == "CHG001", number
        assert files_of(host.etc) in allowed, number
        getattr(host, action)()
        assert tree(host.etc) == (planned if action == "apply" else before), number

    assert number > 15


def test_what_cannot_be_put_back_is_said_and_can_be_repaired(host: Host, monkeypatch: pytest.MonkeyPatch):
    """If everything fails from some moment on, putting back too, the manifest is there for later."""
    before = tree(host.etc)
    codes = set()
    for number, error in faults(monkeypatch, host.apply, full, once=False, again=lambda: fresh(host, before)):
        assert isinstance(error, CourierError)
        codes.add(error.code)
        host.undo()
        assert tree(host.etc) == before, number

    assert codes == {"CHG001", "CHG005"}


# What stands in the way


def test_a_folder_in_the_files_place_is_said(host: Host):
    """Nothing is written, and the message says what is in the way."""
    host.main.unlink()
    host.main.mkdir()

    assert code_of(host.apply) == "CHG002"
    assert sorted(tree(host.etc)) == ["config.toml"]


def test_a_pipe_in_the_files_place_is_said(host: Host):
    """A pipe without a writer holds nobody up."""
    host.main.unlink()
    os.mkfifo(host.main)

    assert code_of(host.apply) == "CHG002"


def test_a_file_in_a_folders_place_is_said(host: Host):
    """A path that leads through a file cannot be written."""
    (host.etc / "conf.d").write_text("")

    assert code_of(host.apply) == "CHG001"


def test_a_link_to_itself_is_said(host: Host):
    """A loop of symbolic links is an error and no hang."""
    host.main.unlink()
    host.main.symlink_to(host.main)

    assert code_of(host.apply) == "CHG001"


def test_a_read_only_file_system_is_said(host: Host):
    """The message says that it is read-only, and nothing is changed."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    before = tree(host.etc)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(host.etc)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        host.main.write_bytes(MAIN)
        subprocess.run(["mount", "-o", "remount,ro", str(host.etc)], check=True)
        with pytest.raises(CourierError) as caught:
            host.apply()

        assert caught.value.code == "CHG001"
        assert "read-only" in caught.value.hint
        assert host.main.read_bytes() == MAIN
        assert host.manifests == []
    finally:
        subprocess.run(["umount", str(host.etc)], check=True)
    assert tree(host.etc) == before


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param("[]", id="no-object"),
        pytest.param('{"backend": "nri"}', id="incomplete"),
        pytest.param('{"backend":"a","runtime":"b","restart":"","state":"x","files":[]}', id="odd-state"),
        pytest.param(
            json.dumps(
                {
                    "backend": "a",
                    "runtime": "b",
                    "restart": "",
                    "state": "complete",
                    "files": [{"path": "/x", "what": "", "original": "***"}],
                }
            ),
            id="odd-bytes",
        ),
    ],
)
def test_a_manifest_that_cannot_be_used_is_said(host: Host, content: str):
    """Nothing is installed or undone on top of what is not understood."""
    host.apply()
    path = Path(host.folder) / host.manifests[0]
    path.write_text(content)
    planned = tree(host.etc)

    assert code_of(host.apply) == "CHG004"
    assert code_of(host.undo) == "CHG004"
    assert tree(host.etc) == planned


def test_two_at_a_time_are_refused(host: Host, monkeypatch: pytest.MonkeyPatch):
    """Who comes while another is writing gets an error and writes nothing."""
    codes = []
    real = changes._transact

    def meanwhile(*arguments: Any) -> None:
        codes.append(code_of(host.apply))
        real(*arguments)

    monkeypatch.setattr(changes, "_transact", meanwhile)
    host.apply()

    assert codes == ["CHG009"]


# Showing


def test_the_difference_is_shown_for_a_person(host: Host):
    """A unified diff; carriage returns and a missing last line feed are visible, and nothing is written."""
    before = tree(host.etc)
    change = FileChange(str(host.main), EDITED + b"\x1b[2J", "has an import")
    text = changes.show(changes.preview(host.plan(files=(change,)), folder=host.folder))

    assert text == (
        f"--- {host.main}\n"
        f"+++ {host.main}\n"
        "@@ -1,3 +1,4 @@\n"
        " # ours\\u000d\n"
        " version = 2\\u000d\n"
        '-imports = ["a"]\\u000d\n'
        '+imports = ["a", "x"]\\u000d\n'
        "+\\u001b[2J\n"
        "\\ No newline at end of file\n"
    )
    assert tree(host.etc) == before


def test_new_and_removed_files_are_shown_against_nothing(host: Host):
    """As `diff` has it, what is not there is /dev/null; undoing shows the opposite."""
    host.apply()
    manifest = changes.installed(host.folder)[0]
    text = changes.show(changes.preview_undo(manifest))

    assert "+++ /dev/null\n@@ -1 +0,0 @@\n-disable = false\n" in text
    assert '-imports = ["a", "x"]' in text


# Files that containers depend on, and files that others write


def held(host: Host, **changed: Any) -> FileChange:
    """A wrapper, as an installation writes it."""
    gate = FileChange(str(host.etc.parent / "bin/gate"), b"old", "the gate", mode=0o755, held=True)
    return attrs.evolve(gate, **changed)


def test_what_is_kept_goes_when_undone_again(host: Host):
    """The other files are as before at once, and in the end nothing is left."""
    before = files_of(host.etc.parent)
    gate = held(host)
    host.apply(host.plan(files=(gate, *host.plan().files)))
    (manifest,) = changes.installed(host.folder)
    changes.undo(manifest, folder=host.folder, keep=[gate.path])
    (left,) = changes.installed(host.folder)

    assert [(entry.path, entry.held) for entry in left.entries] == [(gate.path, True)]
    assert Path(gate.path).read_bytes() == b"old"
    assert host.main.read_bytes() == MAIN
    assert not (host.etc / "conf.d").exists()
    changes.undo(left, folder=host.folder)
    assert changes.installed(host.folder) == ()
    assert files_of(host.etc.parent) == before


def test_what_is_kept_can_be_installed_over(host: Host):
    """The originals are those of then, whatever was undone between."""
    gate = held(host)
    host.apply(host.plan(files=(gate, *host.plan().files)))
    changes.undo(changes.installed(host.folder)[0], folder=host.folder, keep=[gate.path])
    host.main.write_bytes(b"version = 3\n")
    plan = host.plan(files=(held(host, content=b"new"), FileChange(str(host.main), b"ours", "is ours")))
    host.apply(plan)
    host.undo()

    assert host.main.read_bytes() == b"version = 3\n"
    assert not Path(gate.path).exists()


@pytest.mark.parametrize("again", [False, True], ids=["undone", "installed-again-and-undone"])
def test_what_we_write_at_other_times_too_is_ours_whatever_it_holds(host: Host, again: bool):
    """It is no change by somebody else, and needs no force."""
    patterns = held(host, rewritten=True)
    host.apply(host.plan(files=(patterns,)))
    Path(patterns.path).write_bytes(b"written by the daemon")
    if again:
        host.apply(host.plan(files=(attrs.evolve(patterns, content=b"newer"),)))
    host.undo()

    assert not Path(patterns.path).exists()


def test_what_several_share_goes_with_the_last(host: Host):
    """Each manifest knows of it; as long as another does, it stays, and then its folder goes too."""
    before = files_of(host.etc.parent)
    patterns = held(host, rewritten=True)
    host.apply(host.plan(files=(patterns,)))
    host.apply(host.plan(runtime="docker", files=(attrs.evolve(patterns, content=b"newer"),)))
    first, second = changes.installed(host.folder)

    assert changes.preview_undo(first, folder=host.folder) == ()
    changes.undo(first, folder=host.folder)
    assert Path(patterns.path).read_bytes() == b"newer"
    changes.undo(second, folder=host.folder)
    assert files_of(host.etc.parent) == before


def test_a_broken_manifest_of_another_is_no_hindrance(host: Host):
    """Only who asks for that one is told."""
    host.apply()
    (manifest,) = changes.installed(host.folder)
    (Path(host.folder) / "nri--docker.json").write_text("{")
    host.apply()
    changes.undo(manifest, folder=host.folder)

    assert host.main.read_bytes() == MAIN
    assert code_of(lambda: changes.installed(host.folder)) == "CHG004"


def test_manifests_of_earlier_versions_are_read(host: Host):
    """They know nothing of held files, and have none."""
    host.apply()
    (path,) = Path(host.folder).glob("*.json")
    document = json.loads(path.read_text())
    for file in document["files"]:
        assert (file.pop("held"), file.pop("rewritten")) == (False, False)
    path.write_text(json.dumps(document))
    (manifest,) = changes.installed(host.folder)

    assert not any(entry.held or entry.rewritten for entry in manifest.entries)
    host.undo()
    assert host.main.read_bytes() == MAIN


def test_the_files_are_known_as_they_would_be_without_ours(host: Host):
    """What a new plan starts from has neither our import nor our file, but what others did since."""
    assert changes.without_ours("nri", "containerd", folder=host.folder) == {}
    host.apply()
    host.main.write_bytes(EDITED + b"theirs = 1\r\n")

    assert changes.without_ours("nri", "containerd", folder=host.folder) == {
        str(host.main): MAIN + b"theirs = 1\r\n",
        str(host.etc / "conf.d/deep/50.toml"): None,
    }


def test_only_our_keys_leave_a_json_file_that_was_changed_since(host: Host):
    """Their keys stay, one of ours gets its value of then, the other goes with what it was in."""
    path = host.etc / "daemon.json"
    path.write_text('{"default": "theirs"}')
    keys = (("runtimes", "ours"), ("default",))
    content = b'{"default": "ours", "runtimes": {"ours": {}}}'
    host.apply(host.plan(files=(FileChange(str(path), content, "adds ours", keys=keys),)))
    path.write_text('{"default": "ours", "runtimes": {"ours": {}}, "added": 1}')
    host.undo()

    assert json.loads(path.read_text()) == {"default": "theirs", "added": 1}


def test_a_json_file_that_cannot_be_read_any_more_is_not_touched(host: Host):
    """What cannot be understood cannot be taken out of."""
    path = host.etc / "daemon.json"
    host.apply(host.plan(files=(FileChange(str(path), b"{}", "adds ours", keys=(("ours",),)),)))
    path.write_text("{")

    assert code_of(host.undo) == "CHG003"
    assert path.read_text() == "{"


@pytest.mark.parametrize("named", [False, True], ids=["without-a-name", "under-a-name"])
@pytest.mark.parametrize("exists", [False, True], ids=["new", "replaced"])
def test_a_folder_of_drop_ins_never_has_a_second_name_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool, exists: bool
):
    """CRI-O would read it too; the file is complete beside the folder before it comes into it."""
    if named:
        monkeypatch.setattr(changes.os, "O_TMPFILE", os.O_DIRECTORY)
    path = tmp_path / "crio.conf.d/90.conf"
    path.parent.mkdir()
    if exists:
        path.write_bytes(b"old")
    seen: list[list[str]] = []
    real = os.replace

    def replace(source: str, target: str) -> None:
        seen.append(os.listdir(path.parent))
        real(source, target)

    monkeypatch.setattr(changes.os, "replace", replace)
    changes._put(str(path), NEW, 0o644, None)

    assert seen == [["90.conf"] if exists else []]
    assert path.read_bytes() == NEW
    assert os.listdir(tmp_path) == ["crio.conf.d"]


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EROFS, errno.EACCES])
def test_a_folder_of_drop_ins_that_is_a_mount_gets_its_file_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
):
    """Where nothing can be put beside the folder, the file is made in it, and nothing else stays."""
    path = tmp_path / "conf.d/90.conf"
    path.parent.mkdir()
    real = os.link

    def link(source: str, target: str, **more: Any) -> None:
        if os.path.dirname(target) != str(path.parent):
            raise OSError(error, os.strerror(error))
        real(source, target, **more)

    monkeypatch.setattr(changes.os, "link", link)
    changes._put(str(path), NEW, 0o644, None)

    assert path.read_bytes() == NEW
    assert os.listdir(path.parent) == ["90.conf"]
    assert os.listdir(tmp_path) == ["conf.d"]


def test_another_failure_beside_a_folder_of_drop_ins_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A full disk is not taken for a reason to write in the folder."""
    (tmp_path / "conf.d").mkdir()

    def link(*_: object, **__: object) -> None:
        raise full()

    monkeypatch.setattr(changes.os, "link", link)
    with pytest.raises(OSError, match="No space"):
        changes._put(str(tmp_path / "conf.d/x"), NEW, 0o644, None)

    assert os.listdir(tmp_path / "conf.d") == []
