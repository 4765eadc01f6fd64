"""The compiled table: settings, policy and every device's edits in one file, for who starts once a container.

Light module. Written by `compiling`, also by the processes that read it; it must not know how. A table is
trusted only while everything it was made of is as it was then, so a reader gets the right answer or None,
which means: do it the slow way. It answers only what it knows: a name that is not in it may still exist.

The file is a JSON object: ``format``, ``settings`` (`Table.settings`), ``signature`` (what `look` returned),
``log``, ``keys`` and ``foreign_keys`` (key forms, families of ``[prefix, container's name follows]``),
``max_names``, ``max_length``, ``skip_denied``, ``undeliverable``, ``device_cgroup``, ``policy``, ``files``
(edits of each spec file itself) and ``devices`` (qualified name → [index in ``files``, edits]).
"""

from __future__ import annotations

import errno
import os
import stat

from cdi_courier import fastjson
from cdi_courier.annotations import comma_list
from cdi_courier.policy import Policy, Rule
from cdi_courier.signature import directory_identity, look_at_file, names_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, Literal

    from cdi_courier.annotations import KeyFamily

    Json = dict[str, Any]
    Undeliverable = Literal["fail", "warn"]
    DeviceCgroup = Literal["enforce", "best-effort"]
    # A file, or a directory of which the names that end so count.
    Source = tuple[str, tuple[str, ...] | None]

FORMAT = 2
"""Changes with the meaning of anything in the file."""

NAME = "table.json"

_LONGEST = 1 << 28  # bytes; what is larger is no table of ours


class Table:
    """A table that holds now. All parts are as the settings and spec files say.

    settings: where the settings were read, as in `settings_sources`.
    families, foreign: compiled annotation keys, of the comma list and of other dialects.
    log, device_cgroup: as in ``[oci_hook]``. skip_denied: ``[delivery] on_denied`` is ``skip``.
    undeliverable: as in ``[delivery]``.
    """

    __slots__ = (
        "_document",
        "device_cgroup",
        "families",
        "foreign",
        "log",
        "max_length",
        "max_names",
        "settings",
        "skip_denied",
        "undeliverable",
    )

    def __init__(self, document: Json) -> None:
        self._document = document
        self.settings: str = document["settings"]
        self.families: tuple[KeyFamily, ...] = _families(document["keys"])
        self.foreign: tuple[KeyFamily, ...] = _families(document["foreign_keys"])
        self.max_names: int = document["max_names"]
        self.max_length: int = document["max_length"]
        self.skip_denied: bool = document["skip_denied"]
        self.log: str = document["log"]
        self.undeliverable: Undeliverable = document["undeliverable"]
        self.device_cgroup: DeviceCgroup = document["device_cgroup"]

    def policy(self) -> Policy:
        """The policy in force."""
        described = self._document["policy"]
        return Policy(
            [Rule(**rule) for rule in described["rules"]],
            default=described["default"],
            local=described["local"],
        )

    def resolve(self, names: Iterable[str]) -> Json | None:
        """The merged edits of `names`, which has no duplicates; None if the table does not know one of them.

        Merged as CDI prescribes (docs/facts.md#cdi-injection): a spec file's own edits once and before those
        of its first device, lists appended, a later ``intelRdt`` in the place of an earlier one.
        """
        devices, files = self._document["devices"], self._document["files"]
        merged: Json = {}
        used = set()
        for name in names:
            if name not in devices:
                return None
            index, edits = devices[name]
            if index not in used:
                used.add(index)
                _append(merged, files[index])
            _append(merged, edits)
        return merged


def read(path: str, settings: str) -> Table | None:
    """The table at `path`, or None if it cannot be trusted. Never raises for what is there.

    It is trusted if only root or this user may write it, if it is of this format and made of `settings`, and
    if everything that it was made of is as it was.
    """
    data = _read(path)
    if data is None:
        return None
    try:
        document = fastjson.loads(data)
        if document["format"] != FORMAT or document["settings"] != settings:
            return None
        recorded = document["signature"]
        sources = [(source, None if ends is None else tuple(ends)) for source, ends, _ in recorded]
        return Table(document) if look(sources)[0] == recorded else None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None


def look(sources: Iterable[Source]) -> tuple[list[Any], int]:
    """What the sources are now, comparable and plain in JSON, and the newest time stamp of all in ns."""
    newest = 0
    signature: list[Any] = []
    for path, ends in sources:
        if ends is None:
            identity: Any = list(look_at_file(path))
            newest = max(newest, *identity[3:5], 0)
        else:
            identity, stamp = _look_at_directory(path, ends)
            newest = max(newest, stamp)
        signature.append([path, None if ends is None else list(ends), identity])
    return signature, newest


def settings_sources(settings: str) -> list[Source]:
    """The files that settings come from. settings: a file, or a folder with a slash at its end."""
    if settings.endswith("/"):
        return [(f"{settings}config.toml", None), (f"{settings}conf.d", (".toml",))]
    return [(settings, None)]


def place(state_dir: str) -> str:
    """Where the table lies: in the state directory, or in a rootless user's own runtime folder.

    A rootless engine runs hooks as root of a user namespace and without an environment.
    """
    owner = outer_uid()
    if owner is not None:
        folder = f"/run/user/{owner}"
        try:
            if os.stat(folder).st_uid == os.geteuid():
                return f"{folder}/cdi-courier/{NAME}"
        except OSError:
            pass  # the root of a container, say
    return f"{state_dir}/{NAME}"


def outer_uid() -> int | None:
    """Who this user namespace's root is outside; None in the initial one, or where nothing tells."""
    try:
        with open("/proc/self/uid_map", encoding="utf-8") as file:
            first, outside, length = map(int, file.readline().split())
    except (OSError, ValueError):
        return None
    return None if (first, outside, length) == (0, 0, 4294967295) else outside


def _read(path: str) -> bytes | None:
    """What the file holds; None if there is none, or somebody else might have written it."""
    try:
        # Without waiting for the other end, should it be a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        found = os.fstat(descriptor)
        ours = found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022
        if not ours or not stat.S_ISREG(found.st_mode) or found.st_size > _LONGEST:
            return None
        data = b""
        while len(data) < found.st_size and (part := os.read(descriptor, found.st_size - len(data))):
            data += part
    except OSError:
        return None
    else:
        return data
    finally:
        os.close(descriptor)


def _look_at_directory(path: str, ends: Sequence[str]) -> tuple[Any, int]:
    try:
        found = os.stat(path)
        names = names_in(path, ends)
    except OSError as error:
        return (None if error.errno == errno.ENOENT else [[error.errno], []]), 0
    newest = max(found.st_mtime_ns, found.st_ctime_ns)
    files = []
    for name in names:
        identity = look_at_file(f"{path}/{name}")
        newest = max(newest, *identity[3:5], 0)
        files.append([name, list(identity)])
    return [list(directory_identity(found)), files], newest


def _families(described: Sequence[Any]) -> tuple[KeyFamily, ...]:
    return tuple((tuple((prefix, scoped) for prefix, scoped in forms), comma_list) for forms in described)


def _append(merged: Json, edits: Mapping[str, Any]) -> None:
    for key, value in edits.items():
        if isinstance(value, list):
            merged[key] = merged.get(key, []) + value
        else:
            merged[key] = value
