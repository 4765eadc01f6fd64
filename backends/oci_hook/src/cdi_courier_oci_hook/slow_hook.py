"""The full pipeline behind `hook`, as `slow` is behind `precreate`: for what the table cannot answer.

The injection itself is the light modules' here too.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NoReturn

from cdi_courier import compiling, editing, table
from cdi_courier.cdi.edits import edits_to_dict
from cdi_courier.injector import Injection

from . import hook, precreate

if TYPE_CHECKING:
    from cdi_courier.errors import CourierError

    from .hook import Installed


def main(installed: Installed) -> NoReturn:
    """Inject what stdin's container asks for and end the process."""
    os._exit(precreate.respond(lambda data: answer(data, installed), installed))


def answer(data: bytes, installed: Installed) -> bytes:
    """As `hook.answer`, without a table. Raises `CourierError`."""
    asked = hook.ask(data, installed)
    if asked is None:
        return b""
    compiled = compiling.compile_table(installed.settings)
    installed.log = compiled.settings.oci_hook.log
    # Without a table every container takes this way, which is only slower.
    with contextlib.suppress(OSError, ValueError):
        compiling.write(compiled, table.place(installed.state_dir))
    result = compiled.injector.inject(asked.request)
    granted: editing.Granted | CourierError | None = None
    if isinstance(result, Injection):
        granted = editing.Granted(result.names, edits_to_dict(result.edits))
    elif result is not None:
        granted = result.error
    hook.deliver(
        asked,
        granted,
        installed,
        undeliverable=compiled.settings.delivery.undeliverable,
        cgroup=compiled.settings.oci_hook.device_cgroup,
    )
    return b""
