"""The description of the host, made by a child process that ends, so that grpcio never loads here."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Final

from cdi_courier.errors import HostError, quoted
from cdi_courier.host import children
from cdi_courier.host.model import Host, from_json

if TYPE_CHECKING:
    from cdi_courier.settings import Settings

TIMEOUT: Final = 10.0
"""Seconds for the whole description, or more if one probe may take longer; it usually takes half a second."""

_SHOWN: Final = 300
_START: Final = 1.0  # seconds for the child's start and end, or half of the time if that is less
# -P: what lies in the working directory is no module of ours.
_COMMAND: Final = ("-P", "-m", "cdi_courier.host")
_ENVIRONMENT: Final = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0", "PYTHONUTF8": "1"}


def describe(settings: Settings, timeout: float | None = None, *, root: str = "") -> Host:
    """The container runtimes of this host, as they are now.

    timeout: seconds for all of it, one more if the machine is stuck; None for `TIMEOUT`. Single questions are
    bounded by ``[probe] timeout``. root: the folder that is the host's ``/``, for a host that is not this
    machine. Never raises: what could not be learnt is a problem of the runtime or of the host.
    """
    if timeout is None:
        timeout = max(TIMEOUT, settings.probe.timeout + 2 * _START)
    request = {
        "root": root,
        "timeout": settings.probe.timeout,
        "total": max(timeout / 2, timeout - _START),
        "runtimes": {
            key: {"ignore": table.ignore, "endpoint": table.endpoint, "config": table.config}
            for key, table in settings.runtimes.items()
        },
    }
    try:
        answer = children.output(
            [sys.executable, *_COMMAND],
            "the probing process",
            timeout,
            code="HST108",
            environment={**os.environ, **_ENVIRONMENT},
            stdin=json.dumps(request).encode(),
            own_group=True,
        )
        return _read(answer)
    except HostError as error:
        return Host(problems=(str(error),))


def _read(answer: bytes) -> Host:
    try:
        return from_json(json.loads(answer))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        shown = quoted(answer.decode(errors="replace"), _SHOWN)
        raise HostError(
            "HST108", f"the probing process answered with garbage: {shown}", "report it"
        ) from None
