"""What the gate of the runtime wrapper looks for in a config, with ``grep -F``. Light module.

A config without any of these lines' texts asks for nothing; one with is looked at by who can read JSON. The
file's first line names the settings that the others were made of: no text of a config that means anything, so
it does no harm as a pattern, and a file without it is not believed. It must not know who looks.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdi_courier.annotations import KeyFamily

NAME = "patterns"

# The gate compares time stamps of settings and patterns, some shells in whole seconds only. So what changes
# while or just after settings are read has to look newer than the patterns.
_MARGIN_NS = 1_100_000_000

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def header(settings: str) -> str:
    """The first line, without its end. settings: as `table.settings_sources` takes it."""
    return f"cdi-courier patterns for {settings}"


def texts(families: Iterable[KeyFamily]) -> list[str]:
    r"""What a JSON text has that holds a key of these: the opening quote and the key's plain beginning.

    The rest is left out because encoders differ: json-c writes ``/`` as ``\/``, Python other alphabets as
    ``\u…``, Go ``&`` so. Relied on: no encoder escapes a letter, digit, dot, dash or underscore of ASCII. Who
    does so by hand hides the annotation and gets no device.
    """
    found: dict[str, None] = {}
    for forms, _ in families:
        for prefix, _ in forms:
            end = next((at for at, char in enumerate(prefix) if char not in _PLAIN), len(prefix))
            found[f'"{prefix[:end]}'] = None
    return list(found)


def render(settings: str, families: Iterable[KeyFamily]) -> bytes:
    """The file's content."""
    return "".join(f"{line}\n" for line in (header(settings), *texts(families))).encode(
        errors="surrogateescape"
    )


def write(folder: str, settings: str, families: Iterable[KeyFamily], as_of_ns: int) -> bool:
    """Put the file in its place as a whole, if `folder` is there; return whether that was done.

    A file that was made of other settings is another installation's and stays.
    as_of_ns: the clock before the settings were looked at. Raises `OSError`.
    """
    path = f"{folder}/{NAME}"
    content = render(settings, families)
    try:
        with open(path, "rb") as file:
            first = file.readline()
    except FileNotFoundError:
        if not os.path.isdir(folder):
            return False
    else:
        if first and first != content[: content.index(b"\n") + 1]:
            return False
    temporary = f"{folder}/.{NAME}.{os.getpid()}"
    _unlink(temporary)
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
    )
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.utime(temporary, ns=(as_of_ns - _MARGIN_NS, as_of_ns - _MARGIN_NS))
        os.rename(temporary, path)
    except BaseException:
        _unlink(temporary)
        raise
    return True


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return
