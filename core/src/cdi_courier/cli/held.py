"""Files that containers depend on, such as a runtime wrapper: whether they may go yet."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cdi_courier import changes
from cdi_courier.errors import HostError, quoted
from cdi_courier.host import gate_users

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.changes import Manifest
    from cdi_courier.settings import Settings

_MOST_NAMED = 20
_NOBODY = "HST101: "  # what begins like this says that a runtime is down
_READY_TIMEOUT = 15.0  # seconds from the restart until the runtime tells what it calls
_READY_PAUSE = 0.25


def of(manifest: Manifest) -> tuple[str, ...]:
    """The paths of those that the manifest knows."""
    return tuple(entry.path for entry in manifest.entries if entry.held)


def must_be_unused(manifest: Manifest, settings: Settings) -> None:
    """Raises `HostError` ``CHG011`` if a container needs one of them, or if that cannot be told."""
    files = [entry.path for entry in manifest.entries]
    # Where a runtime keeps its containers may stand in a file that was left as it is.
    files += [own.config for own in settings.runtimes.values() if own.config]
    for path in of(manifest):
        try:
            users = gate_users.users(path, files)
        except OSError as error:
            raise HostError(
                "CHG011", f"cannot tell which containers use {quoted(path, None)}: {error}", "run as root"
            ) from None
        if users:
            raise _used(path, users)


def called(manifest: Manifest, settings: Settings) -> tuple[str, ...]:
    """All of them, if a runtime that runs would call one for its next container, or may; else none."""
    from cdi_courier.host.describe import describe

    paths = of(manifest)
    if not paths:
        return ()
    host = describe(settings)
    # A socket that nobody listens at is an answer: who listened there calls nothing now.
    unknown = [problem for problem in host.problems if not problem.startswith(_NOBODY)]
    if unknown and all(runtime.key != manifest.runtime for runtime in host.runtimes):
        return paths  # whether it is there could not be learnt
    found = set()
    for runtime in host.runtimes:
        handlers = runtime.get("handlers")
        if handlers is None and runtime.key == manifest.runtime:
            return paths  # it is there, and did not tell
        found |= {handler["path"] for handler in (handlers or {}).values()}
    return paths if found.intersection(paths) else ()


def finish(manifest: Manifest, settings: Settings, *, force: bool = False) -> tuple[changes.Step, ...]:
    """Remove what was kept, after a restart. Raises `HostError` ``CHG011``, ``CHG013`` where it must stay."""
    must_be_unused(manifest, settings)
    deadline = time.monotonic() + _READY_TIMEOUT
    while still := called(manifest, settings):
        if time.monotonic() >= deadline:
            break
        time.sleep(_READY_PAUSE)
    if still:
        raise HostError(
            "CHG013",
            f"{quoted(still[0], None)} stays, because {manifest.runtime} still calls it",
            "see whether it was restarted, then run `cdi-courier uninstall` again",
        )
    return changes.undo(manifest, folder=changes.FOLDER, force=force)


def _used(path: str, users: Sequence[str]) -> HostError:
    # In one line, whatever a pod is called.
    shown = ", ".join(quoted(user)[1:-1] for user in users[:_MOST_NAMED])
    if len(users) > _MOST_NAMED:
        shown += f" and {len(users) - _MOST_NAMED} more"
    count = "1 container uses" if len(users) == 1 else f"{len(users)} containers use"
    return HostError(
        "CHG011",
        f"{count} {quoted(path, None)}, so nothing is taken back: {shown}",
        'remove them first; with [oci_hook] handler_mode = "named", another install and a restart, new '
        "containers do without it",
    )
