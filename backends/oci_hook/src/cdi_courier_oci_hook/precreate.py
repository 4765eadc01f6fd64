"""Podman's ``precreate`` hook: an OCI config on stdin, the complete and possibly edited one on stdout.

Light module: it runs once per container, as ``python3 -I -S -c COMMAND`` with the command that `command`
makes. What cannot be answered from the compiled table is handed to `slow`, in the same process by exec.
Source: docs/facts.md#podman-precreate.

Whatever comes on stdin, stdout gets a whole config or nothing. The caller discards stderr and keeps only the
exit status, 0 or 1, so a refusal is logged as well.
"""

from __future__ import annotations

import os

from cdi_courier import editing

from . import entry
from .entry import Installed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

__all__ = ["Installed", "answer", "command", "main", "respond"]

_WHAT = "the OCI config on stdin"


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
    os._exit(respond(lambda data: _answer_or_go_slow(data, installed), installed))


def answer(data: bytes, installed: Installed, decide: entry.Decide = entry.decide) -> bytes:
    """The config to print for the config `data`: the same bytes if the container asks for nothing.

    Raises `editing.SlowPath` if only the full pipeline can tell, and `CourierError`.
    """
    config = entry.parse(data, _WHAT)
    edited = decide(config, editing.request_of(config, installed.origin), installed)
    return data if edited is None else entry.render(edited, installed, _WHAT)


def respond(answer_to: Callable[[bytes], bytes], installed: Installed) -> int:
    """Print the answer to stdin and return 0; or log why there is none, and return 1 with nothing printed."""
    return entry.guarded(lambda: entry.write(1, answer_to(entry.read(0, _WHAT))), installed)


def _answer_or_go_slow(data: bytes, installed: Installed) -> bytes:
    try:
        return answer(data, installed)
    except editing.SlowPath:
        pass
    return entry.go_slow_with(data, installed, "precreate_main")
