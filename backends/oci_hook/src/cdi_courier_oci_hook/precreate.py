"""Podman's ``precreate`` hook: an OCI config on stdin, the complete and possibly edited one on stdout.

Light module: it runs once per container, as ``python3 -I -S -c COMMAND`` with the command that `command`
makes. What cannot be answered from the compiled table is handed to `slow`, in the same process by exec.
Source: contracts hooks-and-runtimes.md a.4.

Whatever comes on stdin, stdout gets a whole config or nothing. The caller discards stderr and keeps only the
exit status, 0 or 1, so a refusal is logged as well.
"""

from __future__ import annotations

import json
import os

from cdi_courier import editing, table
from cdi_courier.errors import CourierError, DeliveryError, quoted

from . import log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from cdi_courier.request import Origin

    Json = dict[str, Any]

_LONGEST = 64 << 20  # bytes of a config; real ones have some ten thousand
_PIECE = 1 << 20


class Installed:
    """What the installer has told the hook; nothing of it is looked up when the hook runs.

    interpreter: a Python that has the product and what it needs. settings: where settings are, as
    `table.settings_sources` takes it. state_dir: where the table is, see `table.place`. log: ``[oci_hook]
    log``, for as long as the settings cannot be read. origin: of the containers, as in `ContainerRequest`.
    """

    __slots__ = ("interpreter", "log", "origin", "settings", "state_dir")

    def __init__(
        self,
        *,
        interpreter: str,
        settings: str,
        state_dir: str,
        log: str = "journal",
        origin: Origin = "local",
    ) -> None:
        self.interpreter = interpreter
        self.settings = settings
        self.state_dir = state_dir
        self.log = log
        self.origin: Origin = origin

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"Installed({facts})"


def command(installed: Installed, path: list[str]) -> str:
    """The Python command of the hook. path: what is put on ``sys.path``."""
    return (
        f"import sys; sys.path += {path!r}; "
        "from cdi_courier_oci_hook.precreate import Installed, main; "
        f"main({installed!r})"
    )


def main(installed: Installed) -> NoReturn:
    """Answer stdin and end the process."""
    # Nothing is buffered, so nothing is lost; tearing the interpreter down takes a tenth of the whole.
    os._exit(respond(lambda data: answer(data, installed), installed))


def answer(data: bytes, installed: Installed) -> bytes:
    """The config to print for the config `data`: the same bytes if the container asks for nothing.

    Does not return if only the full pipeline can tell. Raises `CourierError`.
    """
    config = parse(data)
    request = editing.request_of(config, installed.origin)
    known = table.read(table.place(installed.state_dir), installed.settings)
    if known is not None:
        installed.log = known.log
        try:
            edited = editing.edit(config, request, known, nested=table.outer_uid() is not None)
        except (editing.SlowPath, TypeError, KeyError, IndexError, ValueError, AttributeError):
            pass  # also for a table that is not what it says; the full pipeline makes another
        else:
            return data if edited is None else render(edited, installed)
    return _go_slow(data, installed)


def respond(answer_to: Callable[[bytes], bytes], installed: Installed) -> int:
    """Print the answer to stdin and return 0; or log why there is none, and return 1 with nothing printed."""
    try:
        _write(1, answer_to(_read(0)))
    except CourierError as error:
        log.write(installed.log, str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is: no traceback, and the container is refused
        text = quoted(f"{type(error).__name__}: {error}")
        log.write(installed.log, f"HOK004: an internal error: {text} (report it with this message)")
    else:
        return 0
    return 1


def parse(data: bytes) -> Json:
    """The config that `data` is. Raises `DeliveryError` ``HOK002`` if it is no JSON."""
    try:
        config: Json = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _unusable(f"is not JSON: {error}") from None
    return config


def render(edited: editing.Edited, installed: Installed) -> bytes:
    """An answer as bytes; what is skipped is logged. Raises `DeliveryError` ``HOK002``."""
    if edited.skipped is not None:
        log.write(installed.log, f"started without its devices: {edited.skipped}", log.WARNING)
    try:
        return json.dumps(edited.config, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise _unusable(f"cannot be written as JSON again: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _unusable(why: str) -> DeliveryError:
    return DeliveryError(
        "HOK002",
        f"the OCI config on stdin {why}",
        "is it the container engine that runs this? Report its version",
    )


def _go_slow(data: bytes, installed: Installed) -> NoReturn:
    """Go on as the interpreter that has everything, with the same stdin."""
    script = (
        "from cdi_courier_oci_hook.precreate import Installed; "
        f"from cdi_courier_oci_hook.slow import main; main({installed!r})"
    )
    try:
        descriptor = os.memfd_create("config")
        _write(descriptor, data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.dup2(descriptor, 0)
        argv = [installed.interpreter, "-I", "-c", script]
        os.execve(installed.interpreter, argv, os.environ)  # noqa: S606 - our own, by absolute path
    except OSError as error:
        raise DeliveryError(
            "HOK003",
            f"{quoted(installed.interpreter)} cannot be run: {error.strerror}",
            "was the product removed or moved? `cdi-courier install` once more, or `cdi-courier uninstall`",
        ) from None


def _read(descriptor: int) -> bytes:
    pieces = []
    size = 0
    try:
        while piece := os.read(descriptor, _PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > _LONGEST:
                raise _unusable(f"is larger than {_LONGEST} bytes")
    except OSError as error:
        raise _unusable(f"cannot be read: {error.strerror}") from None
    return b"".join(pieces)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
