"""That CRI-O really has NRI on: by its own introduction. For commands, after a restart.

Every plugin that registers is one more while containers start, which NRI before 0.6.1 may not survive
(docs/facts.md#nri-registration-deadlock). So the session of a daemon that runs counts, where there is one.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

from cdi_courier import status
from cdi_courier.errors import HostError

from . import offers, ways

if TYPE_CHECKING:
    from cdi_courier.host.model import Runtime
    from cdi_courier.settings import Settings

_PAUSE: Final = 0.1
_MORE: Final = 5.0  # seconds for the introduction, beside the pause before the daemon connects again
_FIRST_WITH_SAFE_NRI: Final = (1, 31, 0)  # docs/facts.md#nri-registration-deadlock


def nri(runtime: Runtime, settings: Settings, *, canary: bool) -> str:
    """What was seen of it; ``""`` if nothing was tried.

    canary: whether a plugin may be registered for it where that might hurt. Raises `HostError` ``CRI115`` if
    the daemon that runs gets no session, and as the NRI backend's `probe`.
    """
    socket = offers.nri_socket(runtime)
    deadline = time.monotonic() + settings.nri.reconnect_max + _MORE
    while (session := _session(settings, socket)) is not None:
        if session.get("state") in ("active", "idle"):
            return f"the daemon (process {session['pid']}) has an NRI session with CRI-O"
        if time.monotonic() >= deadline:
            raise HostError(
                "CRI115",
                f"the daemon (process {session['pid']}) gets no NRI session at {socket}: "
                f"{session.get('cause') or session.get('state') or 'it does not try'}",
                "name the socket in [nri] sockets; see the daemon's log",
            )
        time.sleep(_PAUSE)
    version = runtime.version_tuple
    if not canary and (version is None or version < _FIRST_WITH_SAFE_NRI):
        return ""
    backend = ways.backend("nri", settings)
    return "" if backend is None else backend.probe(runtime, settings)


def _session(settings: Settings, socket: str) -> dict[str, Any] | None:
    """What the daemon that runs says of this socket, with its ``pid``; None if none runs or can be asked."""
    try:
        report = status.ask(settings.service.state_dir)
    except (OSError, ValueError):
        return None
    if report is None:
        return None
    runtimes = report.get("runtimes")
    for entry in runtimes.values() if isinstance(runtimes, dict) else ():
        path = entry.get("socket") if isinstance(entry, dict) else None
        if isinstance(path, str) and os.path.realpath(path) == os.path.realpath(socket):
            return {**entry, "pid": report.get("pid")}
    return {"pid": report.get("pid")}
