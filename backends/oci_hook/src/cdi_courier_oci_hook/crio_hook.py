"""What makes CRI-O run the hook for live injection: a hook JSON in a folder that it watches already.

Nothing needs a restart. Never a ``precreate`` hook there: CRI-O does not start with a stage that it does not
know. It reads no file and writes none.
Source: docs/facts.md#cri-o-hooks, #wrapper-calls.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from cdi_courier.errors import HostError, quoted
from cdi_courier.hookspecs import Offer
from cdi_courier.host.low_level import is_sandboxed

from . import NAME, hooksd

if TYPE_CHECKING:
    from cdi_courier.changes import ChangeSet
    from cdi_courier.hookspecs import Needs
    from cdi_courier.host.model import Runtime
    from cdi_courier.settings import Settings

_OCI: Final = "oci"
_FIRST_WITH_CREATE_RUNTIME: Final = (1, 19, 0)


def directory(runtime: Runtime) -> str | None:
    """The folder for our hook; None if CRI-O is not known to watch any.

    Of those that are there, since no other is watched before CRI-O starts again, the last in /etc, else the
    last: the usual one below /usr is read by Podman too.
    """
    named = [os.path.normpath(path) for path in runtime.get("hooks_dirs") or () if path.startswith("/")]
    watched = [path for path in named if os.path.isdir(path)] or named
    preferred = [path for path in watched if path.startswith("/etc/")] or watched
    return preferred[-1] if preferred else None


def offer(runtime: Runtime) -> Offer:
    """Ready where our hook lies in a folder that CRI-O watches; a file away, or impossible."""
    default = runtime.get("default_handler")
    handler = runtime.get("handlers", {}).get(default)
    if handler is not None and (handler["type"] != _OCI or is_sandboxed(handler["path"])):
        return _offer(
            "impossible",
            f"the default handler {default} runs no container of this kernel that a hook could inject into",
        )
    folder = directory(runtime)
    if folder is not None and os.path.isfile(f"{folder}/{hooksd.NAME}"):
        return _offer("nothing", "its createRuntime hook is installed")
    return _offer("install", "a createRuntime hook injects into the created container")


def _offer(needs: Needs, reason: str) -> Offer:
    return Offer(NAME, "partial", needs, reason)


def plan(runtime: Runtime, settings: Settings) -> ChangeSet:
    """What has this CRI-O run the hook. Raises `CourierError`: ``HOK230`` no folder is known, ``SET005``."""
    from cdi_courier.changes import ChangeSet

    folder = directory(runtime)
    if folder is None:
        because = f": {runtime.problems[0]}" if runtime.problems else ""
        raise HostError(
            "HOK230",
            f"the hooks directories that CRI-O watches are not known{because}",
            "start CRI-O, or set hooks_dir in its configuration",
        )
    lost = (
        "env, additional groups, network devices and hooks of later stages cannot be injected; "
        f'[delivery] undeliverable = "{settings.delivery.undeliverable}" says what becomes of a container '
        "whose devices need them"
    )
    version = runtime.version_tuple
    old = version is not None and version < _FIRST_WITH_CREATE_RUNTIME
    return ChangeSet(
        NAME,
        runtime.key,
        hooksd.files(settings, folder, "cri-o", stage="prestart" if old else "createRuntime"),
        notes=(
            f"CRI-O watches {quoted(folder, None)}: the next container is injected into, without a restart",
            lost,
            "install again after a change of [annotations] or [oci_hook], of hooks_dir, or of our place",
        ),
    )
