"""What the administrator has settled of a runtime, in its table of ``[runtimes]``, and what counts without.

It reads no file, and knows no runtime: what is usual for one, whoever asks says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cdi_courier.host.model import Runtime
    from cdi_courier.settings import RuntimeSettings, Settings


def table(runtime: Runtime, settings: Settings) -> RuntimeSettings | None:
    """The runtime's table: a socket's path, CRI's or NRI's, beats a kind. None if there is none."""
    for key in (runtime.endpoint, runtime.get("nri_socket", ""), runtime.key, runtime.kind):
        if key and key in settings.runtimes:
            return settings.runtimes[key]
    return None


def config(runtime: Runtime, settings: Settings, usual: str) -> str:
    """Where its main file lies: as settled, else where it was found to be, else where it usually is."""
    own = table(runtime, settings)
    return own.config if own and own.config else str(runtime.get("config", usual))


def restart_command(runtime: Runtime, settings: Settings, usual: str) -> str:
    """What restarts it."""
    own = table(runtime, settings)
    return own.restart if own and own.restart else usual
