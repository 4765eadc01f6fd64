"""Writes a generated spec as a file that every runtime reads the same.

Nothing in the file tells a time or this program's version: the same spec is the same bytes, and what has not
changed is not written again.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import stat
import tempfile
from typing import TYPE_CHECKING, Any, Final

import attrs
import yaml

from cdi_courier.cdi.edits import to_dict
from cdi_courier.cdi.validate import load_spec, minimum_version
from cdi_courier.errors import CdiError, GenerateError, printable, quoted
from cdi_courier.names import split_kind

if TYPE_CHECKING:
    from cdi_courier.cdi.model import Spec

FOLDER: Final = "/var/run/cdi"
"""The folder of specs that do not outlive a boot."""

# Readable for everybody, as rootless runtimes read it too.
_MODE: Final = 0o644
_FOLDER_MODE: Final = 0o755
# What YAML 1.2, too, takes for nothing but a string; everything else is quoted.
_PLAIN: Final = re.compile(
    r"""/[A-Za-z0-9/._+-]*                  # a path
    | [A-Z_]{2,}=[A-Za-z0-9/._+-]*        # a variable
    | [a-z]{2,}[./-][A-Za-z0-9/._+-]*     # a kind, a program
    | [A-Za-z][A-Za-z0-9]+                # a word""",
    re.ASCII | re.VERBOSE,
)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - every mount has its own list of options
        return True


def _string(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # What YAML 1.1 takes for something else is quoted without being told.
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if _PLAIN.fullmatch(text) else '"'
    )


_Dumper.add_representer(str, _string)


def default_path(kind: str, name: str = "") -> str:
    """Where the spec of a kind belongs: one file a kind, or one a device of a kind if it is named."""
    vendor, class_ = split_kind(kind)
    return posixpath.join(FOLDER, f"{vendor}-{class_}{f'_{name}' if name else ''}.yaml")


def to_bytes(spec: Spec, command: str) -> bytes:
    """A spec file of the lowest version that can say it. command: what made it, for the first line.

    Raises `GenerateError` ``GEN006`` if the spec is not valid.
    """
    spec = attrs.evolve(spec, cdi_version=minimum_version(spec)[0])
    header = printable(command).replace("\n", " ")
    text = yaml.dump(to_dict(spec), Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=2**16)
    data = (
        f"# Made by cdi-courier {header}.\n# Changes are lost when that is run again.\n---\n{text}".encode()
    )
    try:
        load_spec(data)
    except CdiError as error:
        raise GenerateError("GEN006", f"what was generated is not a valid CDI spec: {error}") from None
    return data


def write(path: str, data: bytes) -> bool:
    """Replace the file at `path` at once, with its folder made if missing; False if it holds `data` already.

    Raises `GenerateError` ``GEN005``; then nothing has changed.
    """
    temporary = ""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        _must_be_a_files_place(path)
        if _content(path, len(data)) == data:
            return False
        if not os.path.isdir(folder):
            os.makedirs(folder, exist_ok=True)
            os.chmod(folder, _FOLDER_MODE)
        # Not a name that runtimes read as a spec.
        descriptor, temporary = tempfile.mkstemp(".tmp", ".cdi-courier.", folder)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, _MODE)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError | ValueError):
            raise _unwritable(path, getattr(error, "strerror", None) or str(error)) from None
        raise  # somebody has had enough, or it is a mistake of ours
    return True


def _must_be_a_files_place(path: str) -> None:
    """Raises `GenerateError` where something else than a file would be replaced, which root may do."""
    try:
        kind = stat.S_IFMT(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    # /dev/stdout and its like are links to what a process has open, and the host's, not this spec's.
    if kind not in (stat.S_IFREG, stat.S_IFLNK) or (
        kind == stat.S_IFLNK and os.readlink(path).startswith("/proc/")
    ):
        raise _unwritable(path, "it is no regular file")


def _unwritable(path: str, reason: str) -> GenerateError:
    return GenerateError(
        "GEN005",
        f"{quoted(path)} cannot be written: {reason}",
        "run as root, or name another file with --output; --dry-run prints it",
        file=path,
    )


def _content(path: str, size: int) -> bytes | None:
    """What a regular file holds, up to one byte more than `size`; None if it cannot be read."""
    try:
        # Not a link: what runtimes trust is who owns it, so it becomes a file of ours.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(size + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
