"""Waiting for a condition with a deadline: the only way in which tests and the demo spend time.

It must not know what is waited for. A caller that would sleep a guessed time waits here for the thing itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_PAUSE = 0.02  # short beside everything waited for here, long enough not to starve what is waited for


class WaitTimeoutError(Exception):
    """The condition did not become true in time; the text says which one."""


def wait_for(
    condition: Callable[[], T],
    timeout: float,
    message: str | Callable[[], str],
    *,
    pause: float = _PAUSE,
) -> T:
    """Poll until the condition is truthy and return what it returned.

    timeout, pause: seconds. message: what was waited for, as in "waited 5 s for MESSAGE"; a callable is asked
    only when the deadline has passed, so it may look at logs. An exception of the condition passes through.
    Raises WaitTimeoutError.
    """
    deadline = time.monotonic() + timeout
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() >= deadline:
            text = message if isinstance(message, str) else message()
            raise WaitTimeoutError(f"waited {timeout:g} s for {text}")
        time.sleep(pause)
