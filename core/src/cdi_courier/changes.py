"""What an installer will do to a host, as data, and where it came from.

A backend plans a `ChangeSet`; nothing here knows what is in the files. (Applying and undoing come next.)
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen

Action = Literal["install", "uninstall"]


@frozen
class FileChange:
    """One file as it will be.

    path: absolute. content: its new bytes; None if it is to be removed. mode: of a file that does not exist
    yet; an existing one keeps mode and owner. what: one sentence for a person.
    keys: for a TOML file that is not all ours, the dotted keys that are, each a tuple of its parts: should
    the file have changed by the time of undoing, only they are taken out.
    """

    path: str
    content: bytes | None
    what: str
    mode: int = 0o644
    keys: tuple[tuple[str, ...], ...] = ()


@frozen
class ChangeSet:
    """All that one backend changes for one runtime.

    backend, runtime: the backend's name and the runtime's key; together the name of the manifest.
    files: in the order in which they are written.
    restart: the command that makes the changes effective; ``""`` if none is needed.
    notes: what a person should know or do, such as a RuntimeClass to apply; printed, never executed.
    """

    backend: str
    runtime: str
    files: tuple[FileChange, ...] = ()
    restart: str = ""
    notes: tuple[str, ...] = ()
