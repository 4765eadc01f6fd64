"""What a CRI-O is configured to do: as it runs, and as its files say it will after the next restart.

Both are needed: no reload makes handlers or NRI effective (docs/facts.md#cri-o-reload), and
of a CRI-O that does not run there are only files. It reads and writes nothing, and must not know what is to
be changed. The daemon loads it, so that grpcio is not to be had here.
"""

from __future__ import annotations

import codecs
import contextlib
import os
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, field, frozen
from cdi_courier import tomledit
from cdi_courier.errors import CourierError, HostError, quoted
from cdi_courier.host import unix_http
from cdi_courier.host.answers import from_toml, table, text
from cdi_courier.host.files import Root

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cdi_courier.host.model import Runtime
    from cdi_courier.settings import Settings

# As in `cdi_courier.host.crio`, which brings grpcio.
MAIN: Final = "/etc/crio/crio.conf"
DROP_IN: Final = "90-cdi-courier.conf"

_MOST_FILES: Final = 1000
# Each entry of these maps replaces an earlier one of its name as a whole (docs/facts.md#cri-o-configuration).
_MAPS: Final = (("crio", "runtime", "runtimes"), ("crio", "runtime", "workloads"))


@frozen
class ConfigFile:
    """One of CRI-O's files, in the order in which it reads them."""

    path: str
    data: bytes
    document: Mapping[str, Any]


@frozen
class Configuration:
    """What is known of one CRI-O's configuration.

    running: what it runs with, or None where it cannot be asked. main: its first file, whether or not it
    exists. folder: that of drop-ins. files: what it will read at its next start, in that order, without ours.
    ours: what our drop-in says by now; empty if there is none. unverified: what could not be learnt, one
    sentence each.
    """

    running: Mapping[str, Any] | None
    main: str
    folder: str
    files: tuple[ConfigFile, ...]
    ours: Mapping[str, Any] = field(factory=dict)
    unverified: tuple[str, ...] = ()

    @property
    def drop_in(self) -> str:
        """Where our file lies, or will lie."""
        return os.path.join(self.folder, DROP_IN)

    @property
    def stored(self) -> dict[str, Any]:
        """What the files say, without ours and without CRI-O's defaults."""
        return merged(file.document for file in self.files)

    @property
    def to_come(self) -> dict[str, Any]:
        """What a CRI-O that starts now will run with, but for its defaults: the files, ours in its place."""
        later = self.later
        before = [file.document for file in self.files if file not in later]
        return merged([*before, self.ours, *(file.document for file in later)])

    @property
    def later(self) -> tuple[ConfigFile, ...]:
        """The files that CRI-O reads after ours."""
        return tuple(
            file
            for file in self.files
            if file.path != self.main and _order(self.folder, file.path) > _order(self.folder, self.drop_in)
        )


def read(runtime: Runtime, settings: Settings) -> Configuration:
    """The configuration of this CRI-O. Raises `HostError` ``CRI103`` for a file it could not start with."""
    running, unverified = None, []
    if runtime.endpoint:
        try:
            answer = unix_http.get(Root(), runtime.endpoint, "/config", settings.probe.timeout)
            running = from_toml(answer, f"GET /config at {runtime.endpoint}")
        except HostError as error:
            unverified.append(f"its files stand for what CRI-O runs with, since {error.message}")
    else:
        unverified.append("CRI-O does not run; what is planned follows from its files and its defaults alone")
    return evolve(from_files(runtime, settings), running=running, unverified=tuple(unverified))


def from_files(runtime: Runtime, settings: Settings) -> Configuration:
    """As `read`, but CRI-O is not asked."""
    main, folder = runtime.get("config", MAIN), settings.cri_o_drop_in.config_dir
    ours: Mapping[str, Any] = {}
    # One that is broken will be written anew.
    with contextlib.suppress(FileNotFoundError, HostError, ValueError):
        ours = tomledit.parse(Root().read(os.path.join(folder, DROP_IN)))
    return Configuration(None, main, folder, tuple(_files(main, folder)), ours)


def merged(documents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What CRI-O makes of documents, one upon the other: of scalars and arrays the last, handlers whole."""
    result: dict[str, Any] = {}
    for document in documents:
        _merge(result, document, ())
    return result


def handlers_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The runtime handlers of a document: name → table."""
    return table(document, "crio", "runtime", "runtimes")


def default_of(document: Mapping[str, Any]) -> str:
    """The name of the default handler; ``""`` if the document does not say it."""
    return text(table(document, "crio", "runtime").get("default_runtime")) or ""


def _merge(target: dict[str, Any], source: Mapping[str, Any], path: tuple[str, ...]) -> None:
    for key, value in source.items():
        known = target.get(key)
        if isinstance(value, dict) and path not in _MAPS:
            inner = target[key] = dict(known) if isinstance(known, dict) else {}
            _merge(inner, value, (*path, key))
        else:
            target[key] = value


def _files(main: str, folder: str) -> Iterable[ConfigFile]:
    for path in (main, *_below(folder)):
        if os.path.abspath(path) == os.path.abspath(os.path.join(folder, DROP_IN)):
            continue
        try:
            data = Root().read(path)
        except FileNotFoundError:
            if path != main and os.path.islink(path):
                raise _unusable(path, "it is a link that leads nowhere") from None
            continue
        except HostError as error:
            raise _unusable(path, error.message) from None
        try:
            yield ConfigFile(path, data, _folded(tomledit.parse(data.removeprefix(codecs.BOM_UTF8)), ()))
        except ValueError as error:
            raise _unusable(path, f"it is not TOML: {error}") from None


def _folded(source: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The document with CRI-O's own keys in lower case, which CRI-O reads in any; names stay as they are."""
    own = path[:-1] in _MAPS if len(path) > 3 else path not in _MAPS
    result: dict[str, Any] = {}
    for key, value in source.items():
        name = key.lower() if own else key
        known = result.get(name)
        if isinstance(value, dict):
            folded = _folded(value, (*path, name))
            result[name] = merged((known, folded)) if isinstance(known, dict) else folded
        else:
            result[name] = value
    return result


def _below(folder: str) -> Sequence[str]:
    """Everything in the folder that is no folder, in CRI-O's order; it reads all, whatever the name."""
    found: list[str] = []
    for path, folders, names in os.walk(folder, onerror=_unlisted):
        # A link to a folder is no folder to CRI-O's walk; it tries to read it as a file, and fails.
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        found += [os.path.join(path, name) for name in (*names, *links)]
        if len(found) > _MOST_FILES:
            raise _unusable(folder, f"it has more than {_MOST_FILES} files")
    return sorted(found, key=lambda path: _order(folder, path))


def _unlisted(error: OSError) -> None:
    if isinstance(error, FileNotFoundError):
        return
    raise _unusable(str(error.filename), error.strerror or str(error))


def _order(folder: str, path: str) -> tuple[bytes, ...]:
    return tuple(map(os.fsencode, os.path.relpath(path, folder).split(os.sep)))


def _unusable(path: str, why: str) -> CourierError:
    return HostError(
        "CRI103",
        f"CRI-O may not start again: {quoted(path, None)}: {why}",
        "CRI-O reads every file in its drop-in folder, whatever its name; mend this one or move it away",
        file=path,
    )
