"""The full pipeline behind the light entry points: for what the compiled table cannot answer.

It compiles the table anew, so that the next container is answered from it, and answers from the pipeline
itself, which also knows other annotation dialects and why a name does not resolve.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NoReturn

from cdi_courier import compiling, editing, table
from cdi_courier.cdi.edits import edits_to_dict
from cdi_courier.injector import Injection

from . import precreate

if TYPE_CHECKING:
    from .precreate import Installed


def main(installed: Installed) -> NoReturn:
    """Answer stdin and end the process."""
    os._exit(precreate.respond(lambda data: answer(data, installed), installed))


def answer(data: bytes, installed: Installed) -> bytes:
    """The config to print for the config `data`; the same bytes if the container asks for nothing.

    Raises `CourierError`.
    """
    config = precreate.parse(data)
    request = editing.request_of(config, installed.origin)
    compiled = compiling.compile_table(installed.settings)
    installed.log = compiled.settings.oci_hook.log
    # Without a table every container takes this way, which is only slower.
    with contextlib.suppress(OSError, ValueError):
        compiling.write(compiled, table.place(installed.state_dir))
    result = compiled.injector.inject(request)
    if result is None:
        return data
    if isinstance(result, Injection):
        nested = table.outer_uid() is not None
        edited = editing.put_in(config, result.names, edits_to_dict(result.edits), nested=nested)
    else:
        edited = editing.skip(config, result.error)
    return precreate.render(edited, installed)
