"""A plugin that the runtime has launched itself: fd 3 and three environment variables.

The runtime starts every executable ``NN-NAME`` of its plugin directory, with no arguments, no PATH and all
standard streams on /dev/null, kills it when it stops, and never starts it again.
Source: docs/facts.md#nri-launched-plugins.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import NoReturn

from cdi_courier.errors import HostError, quoted

LABEL = "the runtime that launched this plugin"

_VARIABLE = "NRI_PLUGIN_SOCKET"


def adopt() -> socket.socket | None:
    """The socket of a launched plugin; None if nobody has launched us.

    What it takes it takes for good: children see neither the variable nor the descriptor. Raises `HostError`
    ``HST004`` if the variable does not hold the number of a connected unix socket.
    """
    text = os.environ.pop(_VARIABLE, None)
    if text is None:
        return None
    try:
        found = socket.socket(fileno=int(text))
        found.set_inheritable(False)
        if found.family == socket.AF_UNIX and found.type == socket.SOCK_STREAM:
            found.getpeername()
            return found
        reason = "it is another kind of socket"
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise HostError(
        "HST004",
        f"{_VARIABLE}={quoted(text)} is no connected unix socket: {reason}",
        "a runtime sets it for plugins that it launches; unset it to run the daemon otherwise",
    )


def ended() -> NoReturn:
    """The session is over: nothing can bring it back. Raises `HostError` ``HST005``."""
    raise HostError(
        "HST005",
        "the connection to the runtime that launched this plugin has ended",
        "the runtime launches plugins only when it starts; restart it, or run cdi-courier as a service",
    )


def main() -> NoReturn:
    """The command ``cdi-courier-nri``, made to be linked as ``NN-cdi-courier`` into a plugin directory."""
    # -P: the working directory is the runtime's and must not be imported from.
    argv = [sys.executable, "-P", "-m", "cdi_courier", "run", "--backend", "nri"]
    os.execv(argv[0], argv)  # noqa: S606 - no shell is the point
