"""Changes to a host's files: planned as data, shown, written all or nothing, and undone exactly.

A backend plans a `ChangeSet`; nothing here knows what is in the files. What is written is first noted in a
manifest, one a backend and runtime, which holds the original bytes. A file is only ever replaced as a whole,
so whatever moment a crash comes at, every file is as before or as planned, and the manifest knows both:
`apply` again completes, `undo` restores.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import errno
import fcntl
import hashlib
import json
import os
import stat
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote

import attrs
from attrs import field, frozen

from cdi_courier import jsonedit, tomledit
from cdi_courier.errors import CourierError, HostError, printable, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

Action = Literal["install", "uninstall"]

FOLDER: Final = "/var/lib/cdi-courier/changes"
"""Where manifests lie. They hold whole configuration files, so only root may read them."""

_ABSENT = "absent"
_NEW_FOLDER_MODE = 0o755


@frozen
class FileChange:
    """One file as it will be.

    path: absolute. content: its new bytes; None if it is to be removed. mode: of a file that does not exist
    yet; an existing one keeps mode and owner. what: one sentence for a person.
    keys: for a TOML or JSON file that is not all ours, the keys that are, each a tuple of its parts; it is
    JSON if it is called so. items: the same for strings in arrays at a TOML document's root, each as (array,
    string). Should the file have changed by the time of undoing, only keys and items are taken out.
    held: containers that exist may depend on it, so it must outlive them; see `host.gate_users`.
    rewritten: it is all ours and we write it at other times too, so whatever it holds by then is ours. It may
    be in several manifests; the last one that is undone removes it.
    """

    path: str
    content: bytes | None
    what: str
    mode: int = 0o644
    keys: tuple[tuple[str, ...], ...] = ()
    items: tuple[tuple[str, str], ...] = ()
    held: bool = False
    rewritten: bool = False


@frozen
class ChangeSet:
    """All that one backend changes for one runtime.

    backend, runtime: the backend's name and the runtime's key; together the name of the manifest.
    files: in the order in which they are written; undoing goes backwards.
    restart: the command that makes the changes effective; ``""`` if none is needed.
    notes: what a person should know or do, such as a RuntimeClass to apply; printed, never executed.
    """

    backend: str
    runtime: str
    files: tuple[FileChange, ...] = ()
    restart: str = ""
    notes: tuple[str, ...] = ()


@frozen
class Step:
    """One file on its way: what is there, and what will be; None where there is no file."""

    path: str
    before: bytes | None
    after: bytes | None
    what: str = ""
    # Of a file that is made; one that is replaced keeps its own.
    mode: int = 0o644
    owner: tuple[int, int] | None = None
    folders: tuple[str, ...] = ()


@frozen
class Entry:
    """One file in a manifest.

    original: its bytes before the first `apply`; None if there was none. mode, owner: of that file.
    accepted: the SHA-256 of every content that it may have by our doing.
    folders: made for it, outermost first. keys, items, held, rewritten: as in `FileChange`.
    """

    path: str
    what: str
    original: bytes | None
    mode: int
    owner: tuple[int, int] | None
    accepted: tuple[str, ...]
    folders: tuple[str, ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()
    items: tuple[tuple[str, str], ...] = ()
    held: bool = False
    rewritten: bool = False


@frozen
class Manifest:
    """What has been done for one backend and runtime. state: pending while files are being written."""

    backend: str
    runtime: str
    restart: str
    state: Literal["pending", "complete"]
    entries: tuple[Entry, ...] = field(default=())


# --- looking -------------------------------------------------------------------------------------------


def show(steps: Iterable[Step]) -> str:
    """The steps as a unified diff for a person; not for `patch`, since control characters are escaped."""
    lines: list[str] = []
    for step in steps:
        old, new = (
            f"{step.path}" if content is not None else "/dev/null" for content in (step.before, step.after)
        )
        diff = difflib.unified_diff(_lines(step.before), _lines(step.after), old, new, lineterm="")
        for line in diff:
            text = printable(line.removesuffix("\n"))
            lines.append(text)
            if line[:1] in "+- " and not line.endswith("\n") and not line.startswith(("--- ", "+++ ")):
                lines.append("\\ No newline at end of file")
    return "".join(f"{line}\n" for line in lines)


def installed(folder: str = FOLDER) -> tuple[Manifest, ...]:
    """Every manifest there is, by name. Raises `CourierError` ``CHG001``, ``CHG004``."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise _failed(error, folder, "list") from None
    found = (_load(os.path.join(folder, name)) for name in names)
    return tuple(manifest for manifest in found if manifest is not None)


def preview(changes: ChangeSet, *, folder: str = FOLDER, force: bool = False) -> tuple[Step, ...]:
    """What `apply` would do now. Raises what `apply` raises before it writes anything."""
    path = _manifest_path(folder, changes.backend, changes.runtime)
    return _prepare(changes, _load(path), _shared(folder, path), force=force)[1]


def preview_undo(
    manifest: Manifest, *, folder: str = FOLDER, force: bool = False, keep: Collection[str] = ()
) -> tuple[Step, ...]:
    """What `undo` would do now. Raises what `undo` raises before it writes anything."""
    stays = {*keep, *_shared(folder, _manifest_path(folder, manifest.backend, manifest.runtime))}
    return tuple(
        step
        for entry in reversed(manifest.entries)
        if entry.path not in stays and (step := _undoing(entry, force=force)).before != step.after
    )


def without_ours(backend: str, runtime: str, *, folder: str = FOLDER) -> dict[str, bytes | None]:
    """Path → what the file would hold without what this backend has installed for the runtime.

    What a plan that edits files starts from, so that installing twice is installing once. None where there
    would be no file. Raises `CourierError` ``CHG001`` to ``CHG004``.
    """
    known = _load(_manifest_path(folder, backend, runtime))
    entries = known.entries if known else ()
    return {entry.path: _undoing(entry, force=False).after for entry in entries}


# --- doing ---------------------------------------------------------------------------------------------


def apply(changes: ChangeSet, *, folder: str = FOLDER, force: bool = False) -> tuple[Step, ...]:
    """Write the files, all or none, and return what was done; nothing if all is as planned already.

    The originals that a manifest holds stay those of the first time.
    force: write also over a file that somebody changed since it was installed.
    Raises `CourierError`: ``CHG001`` not permitted or not possible, ``CHG002`` something else is in a file's
    place, ``CHG003`` changed since, ``CHG004`` a manifest that cannot be read, ``CHG005`` failed midway and
    could not be put back, ``CHG006`` not editable, ``CHG009`` another one is at work.
    """
    path = _manifest_path(folder, changes.backend, changes.runtime)
    if not changes.files:
        return ()
    with _alone(folder):
        old = _load(path)
        entries, steps = _prepare(changes, old, _shared(folder, path), force=force)
        if not entries:
            return ()
        pending = Manifest(changes.backend, changes.runtime, changes.restart, "pending", entries)
        complete = attrs.evolve(
            pending,
            state="complete",
            entries=tuple(_settled(entry, changes.files) for entry in entries),
        )
        if not steps and old == complete:
            return ()
        _save(path, pending)
        try:
            _transact(steps, lambda: _save(path, complete))
        except CourierError as error:
            if error.code != "CHG005":
                # Should this fail too: a pending manifest whose files are as before does no harm.
                with contextlib.suppress(CourierError):
                    _save(path, old)
            raise
    return steps


def undo(
    manifest: Manifest, *, folder: str = FOLDER, force: bool = False, keep: Collection[str] = ()
) -> tuple[Step, ...]:
    """Make every file what it was before, all or none, forget the manifest, and return what was done.

    keep: paths of files that stay as they are; what the manifest knows of them is kept too, so that undoing
    again removes them. A file that was changed since loses only our keys and items, if that is known of it;
    otherwise ``CHG003`` is raised, unless `force` restores the original over it. Raises as `apply`.
    """
    path = _manifest_path(folder, manifest.backend, manifest.runtime)
    with _alone(folder):
        current = _load(path)
        if current is None:
            return ()
        steps = preview_undo(current, folder=folder, force=force, keep=keep)
        _transact(steps, lambda: None)
        # Should this fail: the manifest stays, and undoing again goes on here.
        left = tuple(entry for entry in current.entries if entry.path in keep)
        for entry in reversed(current.entries):
            if entry.path not in keep:
                _tidy(entry)
        _save(path, attrs.evolve(current, entries=left) if left else None)
    return steps


def _shared(folder: str, mine: str) -> dict[str, Entry]:
    """The files that other manifests have as well, where it does not matter who has written them last."""
    found: dict[str, Entry] = {}
    try:
        paths = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".json")]
    except OSError:
        return found  # there is none, or the caller will say why it cannot be read
    for path in paths:
        # Another's manifest that is broken is no hindrance to this one.
        with contextlib.suppress(CourierError):
            other = _load(path) if path != mine else None
            found |= {entry.path: entry for entry in (other.entries if other else ()) if entry.rewritten}
    return found


def _prepare(
    changes: ChangeSet, old: Manifest | None, shared: Mapping[str, Entry], *, force: bool
) -> tuple[tuple[Entry, ...], tuple[Step, ...]]:
    """The manifest's entries while writing, and the steps."""
    entries = {entry.path: entry for entry in (old.entries if old else ())}
    steps = []
    for change in changes.files:
        current, status = _read(change.path)
        known = entries.get(change.path) or (shared.get(change.path) if change.rewritten else None)
        if known is None and current == change.content:
            continue  # it is so without us, and will stay so
        folders = _missing_folders(change.path)
        if known is None:
            known = Entry(
                change.path,
                change.what,
                current,
                change.mode if status is None else stat.S_IMODE(status.st_mode),
                None if status is None else (status.st_uid, status.st_gid),
                (),
            )
        elif _digest(current) not in (*known.accepted, _digest(known.original)):
            known = _rebased(known, current, change, force=force)
        entries[change.path] = attrs.evolve(
            known,
            what=change.what,
            accepted=tuple(dict.fromkeys((*known.accepted, _digest(current), _digest(change.content)))),
            folders=tuple(dict.fromkeys((*known.folders, *folders))),
            keys=tuple(dict.fromkeys((*known.keys, *change.keys))),
            items=tuple(dict.fromkeys((*known.items, *change.items))),
            held=known.held or change.held,
            rewritten=change.rewritten,
        )
        if current != change.content:
            steps.append(
                Step(change.path, current, change.content, change.what, change.mode, folders=folders)
            )
    return tuple(entries.values()), tuple(steps)


def _rebased(known: Entry, current: bytes | None, change: FileChange, *, force: bool) -> Entry:
    """The entry of a file that somebody changed since it was installed: their version less our part."""
    if known.rewritten:
        return known
    if current is not None and (known.keys or known.items) and current != change.content:
        return attrs.evolve(known, original=_without_ours(known, current), accepted=())
    if force or current is None or current == change.content:
        return known
    raise _changed_since(known.path)


def _settled(entry: Entry, files: Sequence[FileChange]) -> Entry:
    """The entry once its file is written: nothing else than that content is ours any more."""
    for change in files:
        if change.path == entry.path:
            return attrs.evolve(entry, accepted=(_digest(change.content),))
    return entry


def _undoing(entry: Entry, *, force: bool) -> Step:
    current, _ = _read(entry.path)
    digest = _digest(current)
    if digest == _digest(entry.original) or (current is None and (entry.keys or entry.items)):
        after = current
    elif digest in entry.accepted or force or entry.rewritten:
        after = entry.original
    elif current is not None and (entry.keys or entry.items):
        after = _without_ours(entry, current)
    else:
        raise _changed_since(entry.path)
    return Step(entry.path, current, after, entry.what, entry.mode, entry.owner, _missing_folders(entry.path))


def _without_ours(entry: Entry, current: bytes) -> bytes:
    # No TOML begins so, and a daemon's file may be called anything.
    editor = jsonedit if current.lstrip().startswith(b"{") else tomledit
    original: dict[str, Any] = {}
    if entry.original is not None:
        with contextlib.suppress(ValueError, CourierError):
            original = editor.parse(entry.original)
    try:
        for array, item in entry.items:
            before = original.get(array)
            if before is None or item not in before:
                current = tomledit.take_out(current, array, item, keep=before is not None)
        if entry.keys:
            current = editor.remove(current, entry.keys, original)
    except CourierError as error:
        raise HostError(
            "CHG003",
            f"{quoted(entry.path, None)} was changed after cdi-courier wrote it, and {error.message}",
            "take out by hand what cdi-courier put there, or give --force to restore what was there before",
            file=entry.path,
        ) from None
    return current


def _changed_since(path: str) -> CourierError:
    return HostError(
        "CHG003",
        f"{quoted(path, None)} was changed after cdi-courier wrote it",
        "look at it, then give --force to write over it",
        file=path,
    )


# --- the manifest --------------------------------------------------------------------------------------


def _manifest_path(folder: str, backend: str, runtime: str) -> str:
    return os.path.join(folder, f"{quote(backend, safe='')}--{quote(runtime, safe='')}.json")


def _load(path: str) -> Manifest | None:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _failed(error, path, "read") from None
    try:
        document = json.loads(data)
        return Manifest(
            backend=document["backend"],
            runtime=document["runtime"],
            restart=document["restart"],
            state={"pending": "pending", "complete": "complete"}[document["state"]],  # type: ignore[arg-type]
            entries=tuple(map(_entry_from, document["files"])),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise HostError(
            "CHG004",
            f"the manifest {quoted(path, None)} cannot be used: {quoted(f'{type(error).__name__}: {error}')}",
            "restore it from a backup, or undo by hand what it lists and remove it",
            file=path,
        ) from None


def _entry_from(data: dict[str, Any]) -> Entry:
    original = data["original"]
    return Entry(
        path=data["path"],
        what=data["what"],
        original=None if original is None else base64.b64decode(original, validate=True),
        mode=data["mode"],
        owner=None if data["owner"] is None else (data["owner"][0], data["owner"][1]),
        accepted=tuple(data["sha256"]),
        folders=tuple(data["folders"]),
        keys=tuple(map(tuple, data["keys"])),
        items=tuple((array, item) for array, item in data["items"]),
        # Manifests of earlier versions do not have these.
        held=data.get("held", False) is True,
        rewritten=data.get("rewritten", False) is True,
    )


def _entry_to(entry: Entry) -> dict[str, Any]:
    return {
        "path": entry.path,
        "what": entry.what,
        "original": None if entry.original is None else base64.b64encode(entry.original).decode(),
        "mode": entry.mode,
        "owner": entry.owner,
        "sha256": entry.accepted,
        "folders": entry.folders,
        "keys": entry.keys,
        "items": entry.items,
        "held": entry.held,
        "rewritten": entry.rewritten,
    }


def _save(path: str, manifest: Manifest | None) -> None:
    """Write the manifest, or remove it."""
    content = None
    if manifest is not None:
        document = {
            "backend": manifest.backend,
            "runtime": manifest.runtime,
            "restart": manifest.restart,
            "state": manifest.state,
            "files": [_entry_to(entry) for entry in manifest.entries],
        }
        content = json.dumps(document, indent=1).encode()
    try:
        _put(path, content, 0o600, None)
    except OSError as error:
        raise _failed(error, path, "write") from None


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Holds the folder of manifests, which is made when it is missing."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _failed(error, folder, "write in") from None
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise HostError(
                "CHG009", "another install or uninstall is at work", "wait for it to end"
            ) from None
        yield
    finally:
        os.close(number)


# --- files ---------------------------------------------------------------------------------------------


def _transact(steps: Sequence[Step], finish: Callable[[], None]) -> None:
    """Do every step and then `finish`, or nothing."""
    begun: list[Step] = []
    try:
        for step in steps:
            begun.append(step)
            _step(step)
        finish()
    except CourierError as failure:
        try:
            for step in reversed(begun):
                _put_back(step)
        except OSError as second:
            raise HostError(
                "CHG005",
                f"{failure.message}; what was written before cannot be put back: "
                f"{quoted(step.path, None)}: {second.strerror}",
                "mend the cause, then run `cdi-courier uninstall` or the same install again",
                file=step.path,
            ) from None
        raise


def _step(step: Step) -> None:
    try:
        _make_folders(step.folders)
        _put(step.path, step.after, step.mode, step.owner)
    except OSError as error:
        raise _failed(error, step.path, "write") from None


def _put_back(step: Step) -> None:
    if _read_real(step.path)[0] != step.before:
        _put(step.path, step.before, step.mode, step.owner)
    _remove_leftover(step.path)
    _remove_folders(step.folders)


def _read(path: str) -> tuple[bytes | None, os.stat_result | None]:
    """A file's bytes and status, or two None. Raises `HostError` ``CHG001``, ``CHG002``."""
    try:
        return _read_real(path)
    except OSError as error:
        raise _failed(error, path, "read") from None


def _read_real(path: str) -> tuple[bytes | None, os.stat_result | None]:
    try:
        # Not waiting for a writer, should somebody have put a pipe there.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None, None
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise HostError(
                "CHG002",
                f"{quoted(path, None)} is no regular file",
                "see what it is, and move it away",
                file=path,
            )
        with open(number, "rb", closefd=False) as file:
            return file.read(), status
    finally:
        os.close(number)


def _put(path: str, content: bytes | None, mode: int, owner: tuple[int, int] | None) -> None:
    """Replace the file in one step, through a new one beside it; None removes it.

    A symlink is followed and stays. mode, owner: of a file that does not exist yet.
    """
    real = os.path.realpath(path)
    folder = os.path.dirname(real)
    if content is None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(real)
        _remove_leftover(path)
        _sync(folder)
        return
    _remove_leftover(path)
    *elsewhere, here = _stages(real)
    for staged in elsewhere:
        try:
            _put_through(staged, real, content, mode, owner)
        except OSError as error:
            # Another file system, or a folder that nobody may write in.
            if error.errno not in (errno.EXDEV, errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            _remove_leftover(path)
        else:
            return
    _put_through(here, real, content, mode, owner)


def _put_through(staged: str, real: str, content: bytes, mode: int, owner: tuple[int, int] | None) -> None:
    folder = os.path.dirname(real)
    number, named = _new_file(folder, staged)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(number, left) :]
        _dress(number, real, mode, owner)
        os.fsync(number)
        if not named:
            # With a directory given, although the path is absolute, Python has the link followed.
            os.link(f"/proc/self/fd/{number}", staged, src_dir_fd=number, follow_symlinks=True)
    finally:
        os.close(number)
    os.replace(staged, real)
    _sync(folder)


def _new_file(folder: str, staged: str) -> tuple[int, bool]:
    """A file to write, and whether it bears the name `staged` already."""
    # Without a name as long as it is not complete: some readers of a folder read every file in it.
    try:
        return os.open(folder, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600), False
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    return os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), True


def _dress(number: int, real: str, mode: int, owner: tuple[int, int] | None) -> None:
    """Owner, extended attributes and mode of the file that is replaced, or those for a new one."""
    try:
        status = os.stat(real)
    except FileNotFoundError:
        if owner is not None:
            os.fchown(number, *owner)
        os.fchmod(number, mode)
        return
    os.fchown(number, status.st_uid, status.st_gid)
    try:
        names = os.listxattr(real)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        names = []
    for name in names:
        os.setxattr(number, name, os.getxattr(real, name))
    # Last, because a change of owner takes bits away.
    os.fchmod(number, stat.S_IMODE(status.st_mode))


def _stages(real: str) -> tuple[str, ...]:
    """Where the new file may be called something else before it is the file, the best place first.

    CRI-O reads every file of its folder of drop-ins, whatever its name: one that a crash has left there would
    be one too many, and one that is not complete keeps CRI-O from starting.
    """
    folder, name = os.path.split(real)
    outer, inner = os.path.split(folder)
    places = (outer, folder) if inner.endswith(".d") else (folder,)
    return tuple(os.path.join(place, f".{name}.cdi-courier") for place in places)


def _remove_leftover(path: str) -> None:
    for staged in _stages(os.path.realpath(path)):
        # Asked first: a read-only file system refuses to remove even what is not there.
        if os.path.lexists(staged):
            os.unlink(staged)


def _missing_folders(path: str) -> tuple[str, ...]:
    missing = []
    folder = os.path.dirname(os.path.realpath(path))
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return tuple(reversed(missing))


def _make_folders(folders: Sequence[str]) -> None:
    for folder in folders:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, _NEW_FOLDER_MODE)
            os.chmod(folder, _NEW_FOLDER_MODE)
        _sync(os.path.dirname(folder))


def _remove_folders(folders: Sequence[str]) -> None:
    """Remove those that are empty; somebody else's files keep them."""
    for folder in reversed(folders):
        if not os.path.lexists(folder):
            continue
        try:
            os.rmdir(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                raise
            return
        _sync(os.path.dirname(folder))


def _tidy(entry: Entry) -> None:
    """Remove what writing a file has made beside it."""
    try:
        _remove_leftover(entry.path)
        _remove_folders(entry.folders)
    except OSError as error:
        raise _failed(error, os.path.dirname(entry.path), "tidy up") from None


def _sync(folder: str) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _digest(content: bytes | None) -> str:
    return _ABSENT if content is None else hashlib.sha256(content).hexdigest()


def _lines(content: bytes | None) -> list[str]:
    # Only the line feed ends a line: str.splitlines would cut at a carriage return too.
    lines = (content or b"").decode(errors="replace").split("\n")
    return [f"{line}\n" for line in lines[:-1]] + [line for line in lines[-1:] if line]


def _failed(error: OSError, path: str, verb: str) -> HostError:
    hints = {
        errno.EROFS: "the file system is read-only; change the image that the host is made from",
        errno.EACCES: "run as root",
        errno.EPERM: "run as root; see `lsattr` whether it is immutable",
        errno.ELOOP: "a symbolic link leads to itself; mend it",
        errno.ENOTDIR: "a file is in the place of one of its folders",
        errno.EBUSY: "something is mounted there; change what is mounted",
        errno.ENOSPC: "make room on the file system",
    }
    return HostError(
        "CHG001",
        f"cannot {verb} {quoted(path, None)}: {error.strerror or error}",
        hints.get(error.errno or 0, ""),
        file=path,
    )
