"""Running a program for what it prints, bounded in time and size. It must not know which program."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from typing import IO, TYPE_CHECKING, Final, cast

from cdi_courier.errors import HostError, quoted
from cdi_courier.host.answers import late

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIMIT: Final = 8 << 20
"""Bytes of an answer; a host with ten runtimes has 50 kB."""

_SHOWN: Final = 300
_DYING: Final = 1.0  # seconds that what was killed may take to be gone


def output(
    argv: Sequence[str],
    what: str,
    timeout: float,
    *,
    code: str,
    environment: Mapping[str, str],
    stdin: bytes = b"",
    own_group: bool = False,
) -> bytes:
    """What the program prints to stdout.

    what: its name in messages. timeout: seconds until it has ended. code: of the `HostError` where it cannot
    be started, fails, or prints more than `LIMIT`; too late is ``HST103``. own_group: also end what it has
    started itself. It never outlives the call.
    """
    deadline = time.monotonic() + timeout
    # A file in memory: writing to a process that does not read would wait.
    with open(os.memfd_create("stdin"), "w+b") as file:
        file.write(stdin)
        file.seek(0)
        try:
            process = subprocess.Popen(  # noqa: S603 - the callers' programs are fixed
                argv,
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environment),
                cwd="/",
                start_new_session=own_group,
            )
        except (OSError, ValueError) as error:
            raise HostError(code, f"{what} cannot be started: {error}") from None
    try:
        printed, errors = _collect(process, deadline)
        status = process.wait(max(0.01, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise late(what, timeout) from None
    except OverflowError:
        raise HostError(code, f"{what} printed more than {LIMIT} bytes") from None
    finally:
        _end(process, own_group=own_group)
    if status:
        told = quoted(errors.decode(errors="replace").strip()[-_SHOWN:], _SHOWN)
        raise HostError(code, f"{what} ended with status {status}: {told}")
    return printed


def _end(process: subprocess.Popen[bytes], *, own_group: bool) -> None:
    """Kill it if it still runs, and give its pipes back."""
    # Only as long as it is not waited for: afterwards the number may be another's.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if own_group else os.kill)(process.pid, signal.SIGKILL)
        # What hangs in the kernel, on a dead network file system, dies later; subprocess reaps it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_DYING)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _collect(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes]:
    """What it writes to stdout and stderr until both are closed. Raises `TimeoutExpired`, `OverflowError`."""
    found = [bytearray(), bytearray()]
    with selectors.DefaultSelector() as selector:
        for number, stream in enumerate((process.stdout, process.stderr)):
            selector.register(cast("IO[bytes]", stream), selectors.EVENT_READ, number)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(process.args, 0)
            for key, _ in selector.select(left):
                part = os.read(key.fd, 1 << 16)
                if not part:
                    selector.unregister(key.fileobj)
                found[key.data] += part
                if len(found[key.data]) > LIMIT:
                    raise OverflowError
    return bytes(found[0]), bytes(found[1])
