"""What changes when settings are read again while the daemon runs, key by key. Pure; it reads nothing.

Most keys count from the next request on. Some are what the daemon stands on (sockets, names, files that are
open): they keep their values until a restart, and whoever changed them is told so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdi_courier.settings import Settings

RESTART: Final = (
    "backends.choose",
    "backends.disabled",
    "nri.sockets",
    "nri.plugin_name",
    "nri.plugin_index",
    "service.state_dir",
    "service.log_format",
    "metrics.listen",
)
"""Keys that count from the start of the daemon to its end."""

_INSTALLED: Final = ("oci_hook", "cri_o_drop_in")  # sections that `install` writes into the host
_COMPILED: Final = ("oci_hook.log", "oci_hook.device_cgroup")  # but these hooks read in the compiled table

_FOLLOWS: Final = ("policy.sources",)  # where rules stand; no key of its own


@frozen
class Change:
    """What reading settings again comes to.

    settings: those in force from now on: the new ones, but for keys that need a restart.
    changed: keys that count at once. restart: keys that were changed and do not count before a restart.
    install: keys that were changed and count when `cdi-courier install` is run.
    """

    settings: Settings
    changed: tuple[str, ...]
    restart: tuple[str, ...]
    install: tuple[str, ...]


def counts(key: str) -> Literal["reload", "restart", "install"]:
    """What has to happen before a key of the settings, such as ``nri.sockets``, counts."""
    if key in RESTART:
        return "restart"
    return "install" if key.partition(".")[0] in _INSTALLED and key not in _COMPILED else "reload"


def compare(old: Settings, new: Settings) -> Change:
    """From the settings in force and those just read to what is in force from now on."""
    differing = list(_differing(old, new))
    restart, install, changed = (
        tuple(key for key in differing if counts(key) == when) for when in ("restart", "install", "reload")
    )
    settings = new
    for key in restart:
        section, _, name = key.partition(".")
        kept = attrs.evolve(getattr(settings, section), **{name: getattr(getattr(old, section), name)})
        settings = attrs.evolve(settings, **{section: kept})
    return Change(settings, changed, restart, install)


def in_words(change: Change, files: Sequence[str]) -> str:
    """What counts now, for the log."""
    read = ", ".join(files) or "no file: the defaults count"
    changed = ", ".join(change.changed) or "nothing that counts at once"
    text = f"settings read again from {read}; changed: {changed}"
    if change.install:
        text += f"; {', '.join(change.install)}: counts once `cdi-courier install` is run again"
    return text


def _differing(old: Settings, new: Settings) -> Iterator[str]:
    for section in attrs.fields(type(old)):
        before, after = getattr(old, section.name), getattr(new, section.name)
        if before == after or section.metadata.get("internal"):
            continue
        if not attrs.has(type(before)):
            yield from (f"{section.name}.{key}" for key in _keys(before, after))
            continue
        for field in attrs.fields(type(before)):
            key = f"{section.name}.{field.name}"
            if getattr(before, field.name) != getattr(after, field.name) and key not in _FOLLOWS:
                yield key


def _keys(before: Any, after: Any) -> list[str]:
    return [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
