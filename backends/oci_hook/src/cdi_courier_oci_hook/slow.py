"""The full pipeline behind the light entry points: for what the compiled table cannot answer.

It compiles the table anew, so that the next container is answered from it, and answers from the pipeline
itself, which also knows other annotation dialects and why a name does not resolve.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any, NoReturn

from cdi_courier import compiling, editing, patterns, table
from cdi_courier.cdi.edits import edits_to_dict
from cdi_courier.errors import SettingsError
from cdi_courier.injector import Injection

from . import precreate, wrapper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.compiling import Compiled
    from cdi_courier.request import ContainerRequest

    from . import hook
    from .entry import Installed
    from .wrapper import Wrapped


def precreate_main(installed: Installed, _: Sequence[str]) -> NoReturn:
    """Answer stdin and end the process."""
    os._exit(precreate.respond(lambda data: precreate.answer(data, installed, decide), installed))


def wrapper_main(installed: Wrapped, argv: Sequence[str]) -> NoReturn:
    """Do what the runtime was called for, or refuse, and end the process."""
    os._exit(wrapper.answer(installed, argv, functools.partial(_decide_for_all, gate_dir=installed.gate_dir)))


def hook_main(installed: hook.Installed, _: Sequence[str]) -> NoReturn:
    """Inject what stdin's container asks for and end the process."""
    from . import hook  # with all of `live`, which the others do without

    os._exit(hook.respond(lambda data: _inject(data, installed), installed))


def decide(config: dict[str, Any], request: ContainerRequest, installed: Installed) -> editing.Edited | None:
    """What the full pipeline says; None if the container asks for nothing. Raises `CourierError`."""
    result = _compiled(installed).injector.inject(request)
    if result is None:
        return None
    if isinstance(result, Injection):
        nested = table.outer_uid() is not None
        return editing.put_in(config, result.names, edits_to_dict(result.edits), nested=nested)
    return editing.skip(config, result.error)


def _decide_for_all(
    config: dict[str, Any], request: ContainerRequest, installed: Installed, *, gate_dir: str
) -> editing.Edited | None:
    """As `decide`, for every container of a node: settings that cannot be used keep only those away that ask.

    Hooks are called for annotated containers alone, the wrapper for whatever is created while the settings
    are newer than the gate's patterns. What asks is then what those say, which were made when settings last
    could be used.
    """
    try:
        return decide(config, request, installed)
    except SettingsError:
        if _may_ask(request, installed.settings, gate_dir):
            raise
        return None


def _may_ask(request: ContainerRequest, settings: str, gate_dir: str) -> bool:
    try:
        with open(os.path.join(gate_dir, patterns.NAME), encoding="utf-8", errors="surrogateescape") as file:
            header, *texts = file.read().splitlines()
    except (OSError, ValueError):
        return True
    beginnings = tuple(text.removeprefix('"') for text in texts)
    return header != patterns.header(settings) or any(
        key.startswith(beginnings) for key in request.annotations
    )


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
