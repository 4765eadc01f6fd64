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
from cdi_courier.errors import SettingsError
from cdi_courier.injector import Injection

from . import precreate, wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.compiling import Compiled
    from cdi_courier.request import ContainerRequest

    from . import hook
    from .entry import Installed, Json
    from .wrapper import Wrapped


def precreate_main(installed: Installed, _: Sequence[str]) -> NoReturn:
    """Answer stdin and end the process."""
    os._exit(precreate.respond(lambda data: precreate.answer(data, installed, decide), installed))


def wrapper_main(installed: Wrapped, argv: Sequence[str]) -> NoReturn:
    """Do what the runtime was called for, or refuse, and end the process.

    Settings that cannot be used keep only those away that ask, see `wrapper.may_ask`.
    """

    def decide_for_all(config: Json, request: ContainerRequest, _: Installed) -> editing.Edited | None:
        try:
            return decide(config, request, installed)
        except SettingsError:
            if wrapper.may_ask(request, installed):
                raise
            return None

    os._exit(wrapper.answer(installed, argv, decide_for_all))


def hook_main(installed: hook.Installed, _: Sequence[str]) -> NoReturn:
    """Inject what stdin's container asks for and end the process."""
    from . import hook  # with all of `live`, which the others do without

    os._exit(hook.respond(lambda data: _inject(data, installed), installed))


def decide(config: Json, request: ContainerRequest, installed: Installed) -> editing.Edited | None:
    """What the full pipeline says; None if the container asks for nothing. Raises `CourierError`."""
    result = _compiled(installed).injector.inject(request)
    if result is None:
        return None
    if isinstance(result, Injection):
        nested = table.outer_uid() is not None
        return editing.put_in(config, result.names, edits_to_dict(result.edits), nested=nested)
    return editing.skip(config, result.error)


def _inject(data: bytes, installed: hook.Installed) -> None:
    from . import hook

    asked = hook.ask(data, installed)
    if asked is None:
        return
    compiled = _compiled(installed)
    result = compiled.injector.inject(asked.request)
    if result is None:
        return
    hook.deliver(
        asked,
        editing.Granted(result.names, edits_to_dict(result.edits))
        if isinstance(result, Injection)
        else result.error,
        installed,
        undeliverable=compiled.settings.delivery.undeliverable,
        device_cgroup=compiled.settings.oci_hook.device_cgroup,
    )


def _compiled(installed: Installed) -> Compiled:
    """What holds now, also for the next container's light entry point."""
    compiled = compiling.compile_table(installed.settings)
    installed.log = compiled.settings.oci_hook.log
    # Without a table, or with patterns that look old, every container takes this way, which is only slower.
    with contextlib.suppress(OSError, ValueError):
        compiling.write(compiled, table.place(installed.state_dir))
    with contextlib.suppress(OSError):
        compiling.write_patterns(compiled)
    return compiled
