"""What the entry points that edit OCI configs share: what they were told, the answer, and how they refuse.

Light module. It must not know where a config comes from or goes. `precreate` and `wrapper` are the entry
points, `slow` is where both go on when the compiled table cannot answer.
"""

from __future__ import annotations

import os

from cdi_courier import editing, fastjson, table
from cdi_courier.errors import CourierError, DeliveryError, quoted

from . import log

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    from cdi_courier.editing import Edited
    from cdi_courier.request import ContainerRequest, Origin

    Json = dict[str, Any]
    # Config and request → what to put in, or None; raises `editing.SlowPath` and `CourierError`.
    Decide = Callable[[Json, ContainerRequest, "Installed"], Edited | None]

LONGEST = 64 << 20
"""Bytes of a config; real ones have some ten thousand."""


class Installed:
    """What the installer has told an entry point; nothing of it is looked up when that runs.

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
        names = [name for kind in reversed(type(self).__mro__) for name in getattr(kind, "__slots__", ())]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def decide(config: Json, request: ContainerRequest, installed: Installed) -> Edited | None:
    """What the compiled table says; None if the container asks for nothing.

    Raises `editing.SlowPath` if only the full pipeline can tell, and `CourierError`.
    """
    known = table.read(table.place(installed.state_dir), installed.settings)
    if known is None:
        raise editing.SlowPath
    installed.log = known.log
    try:
        return editing.edit(config, request, known, nested=table.outer_uid() is not None)
    except (TypeError, KeyError, IndexError, ValueError, AttributeError):
        # A table that is not what it says; the full pipeline makes another.
        raise editing.SlowPath from None


def guarded(work: Callable[[], None], installed: Installed, told: Callable[[str], None] | None = None) -> int:
    """Do it and return 0; or log why it cannot be done, and return 1.

    told: also gets what is logged.
    """
    try:
        work()
    except CourierError as error:
        text = str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is: no traceback, and the container is refused
        what = quoted(f"{type(error).__name__}: {error}")
        text = f"HOK004: an internal error: {what} (report it with this message)"
    else:
        return 0
    log.write(installed.log, text)
    if told is not None:
        told(text)
    return 1


def parse(data: bytes, what: str) -> Json:
    """The config that `data` is. what: says of it where it is.

    Raises `DeliveryError` ``HOK002`` if it is no JSON.
    """
    try:
        config: Json = fastjson.loads(data)
    except (ValueError, RecursionError) as error:
        raise unusable(what, f"is not JSON: {error}") from None
    return config


def render(edited: Edited, installed: Installed, what: str) -> bytes:
    """An answer as bytes; what is skipped is logged. what: as in `parse`.

    Raises `DeliveryError` ``HOK002``.
    """
    if edited.skipped is not None:
        log.write(installed.log, f"started without its devices: {edited.skipped}", log.WARNING)
    try:
        return fastjson.dumps(edited.config)
    except (ValueError, RecursionError) as error:
        raise unusable(what, f"cannot be written as JSON again: {error}") from None


def unusable(what: str, why: str) -> DeliveryError:
    """A config that nothing can be done with. what, why: the sentence's parts."""
    return DeliveryError(
        "HOK002", f"{what} {why}", "is it the container engine that made this? Report its version"
    )


_SLOW = """\
import sys
try:
    from {module} import {kind}
    from cdi_courier_oci_hook.slow import {call} as go
except Exception as error:
    why = f"{{type(error).__name__}}: {{error}}"
    sys.path += {path!r}
    from {module} import {kind}
    from {lacking} import lacking
    go = lambda installed, argv: lacking(installed, argv, why)
go({installed!r}, sys.argv[1:])
"""


def go_slow(
    installed: Installed, call: str, arguments: Sequence[str] = (), lacking: str = __name__
) -> NoReturn:
    """Go on in this process as the interpreter that has everything, with the same stdin.

    call: a function of `slow`, called with `installed` and the rest of ``sys.argv``. lacking: the module
    whose function of this name is called should that interpreter have the product no more, as a virtual
    environment has not when the system's Python is upgraded. Raises `DeliveryError` ``HOK003``.
    """
    kind = type(installed)
    script = _SLOW.format(
        module=kind.__module__,
        kind=kind.__name__,
        call=call,
        path=[os.path.dirname(os.path.dirname(str(module.__file__))) for module in (table, log)],
        lacking=lacking,
        installed=installed,
    )
    try:
        argv = [installed.interpreter, "-I", "-c", script, *arguments]
        os.execve(installed.interpreter, argv, os.environ)  # noqa: S606 - our own, by absolute path
    except OSError as error:
        raise DeliveryError(
            "HOK003",
            f"{quoted(installed.interpreter)} cannot be run: {error.strerror}",
            "was the product removed or moved? `cdi-courier install` once more, or `cdi-courier uninstall`",
        ) from None


def lacking(installed: Installed, _: Sequence[str], why: str) -> NoReturn:
    """Say that the interpreter that had everything does not have it any more, and end the process."""

    def refuse() -> None:
        raise lacks(installed, why)

    os._exit(guarded(refuse, installed))


def lacks(installed: Installed, why: str) -> DeliveryError:
    """The refusal of who can only be answered by an interpreter that lacks the product. why: what it says."""
    return DeliveryError(
        "HOK003",
        f"{quoted(installed.interpreter)} lacks what cdi-courier needs: {quoted(why)}",
        "was it upgraded? Install the product for it again, then `cdi-courier install` once more",
    )


def go_slow_with(data: bytes, installed: Installed, call: str) -> NoReturn:
    """As `go_slow`, where stdin has been read already. data: all of it."""
    try:
        descriptor = os.memfd_create("stdin")
        write(descriptor, data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.dup2(descriptor, 0)
    except OSError as error:
        raise DeliveryError(
            "HOK003", f"stdin cannot be handed on: {error.strerror}", "is the machine out of memory?"
        ) from None
    go_slow(installed, call)


def read(descriptor: int, what: str) -> bytes:
    """All of it. what: as in `parse`. Raises `DeliveryError` ``HOK002``."""
    pieces = []
    size = 0
    try:
        while piece := os.read(descriptor, 1 << 20):
            pieces.append(piece)
            size += len(piece)
            if size > LONGEST:
                raise unusable(what, f"is larger than {LONGEST} bytes")
    except OSError as error:
        raise unusable(what, f"cannot be read: {error.strerror}") from None
    return b"".join(pieces)


def write(descriptor: int, data: bytes) -> None:
    """Write all of it. Raises `OSError`."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
