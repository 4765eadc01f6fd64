"""Makes this process another program, as if it had never been Python. Light module; it must not know which.

The interpreter ignores two signals, and what is ignored stays ignored in the next program: a hook's pipeline
would not end with its reader, and a file size limit would be an error instead of an end.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal  # what the built-in module is the core of; that has no stubs
    from collections.abc import Mapping
    from typing import NoReturn
else:
    import _signal

# What CPython ignores when it starts. Others that are ignored were so before, for which the caller has its
# reasons, as nohup has.
_IGNORED_BY_PYTHON = (_signal.SIGPIPE, _signal.SIGXFSZ)


def become(path: str, argv: list[str], environment: Mapping[str, str] | None = None) -> NoReturn:
    """``execve(2)``. environment: that of this process, byte by byte, where none is given.

    Raises `OSError`; then the signals are as they were.
    """
    for number in _IGNORED_BY_PYTHON:
        _signal.signal(number, _signal.SIG_DFL)
    try:
        if environment is None:
            os.execv(path, argv)  # noqa: S606 - no shell is the point
        os.execve(path, argv, environment)  # noqa: S606 - no shell is the point
    finally:
        for number in _IGNORED_BY_PYTHON:
            _signal.signal(number, _signal.SIG_IGN)
