"""What `install` and `uninstall` have in common: modes, what they show, and the commands that they run."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess

import click

from cdi_courier import changes
from cdi_courier.errors import HostError, quoted

_SEE_RUNTIME = "see the runtime's log; [runtimes] restart names another command"
_SHOWN = 500  # bytes of what a restart command says
_RESTART_TIMEOUT = 120.0  # seconds; systemd itself gives a unit 90 to start


def modes(*, dry_run: bool, apply: bool, no_restart: bool) -> None:
    """Raises `click.UsageError` for options that contradict each other."""
    if dry_run and apply:
        raise click.UsageError("--dry-run and --apply contradict each other")
    if apply and no_restart:
        raise click.UsageError("--apply restarts, which --no-restart forbids; leave both out to only write")


def show(steps: tuple[changes.Step, ...]) -> None:
    """Print what is to be written."""
    click.echo(changes.show(steps), nl=False)


def run_command(command: str, hint: str = _SEE_RUNTIME) -> None:
    """Run a command that restarts something, without a shell. hint: what to do if it fails.

    Raises `HostError` ``CHG007`` with the end of its output.
    """
    # Not a pipe: a daemon that an init script starts may keep it open, so that its end would be waited for,
    # and may die of writing to one that nobody reads any more.
    output = os.memfd_create("output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        argv = shlex.split(command)
        done = subprocess.run(  # noqa: S603 - the administrator's own command
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_RESTART_TIMEOUT,
            check=False,
        )
        fcntl.fcntl(output, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)  # nor may it fill the memory
        said = os.pread(output, _SHOWN, max(0, os.fstat(output).st_size - _SHOWN))
    except (OSError, ValueError, IndexError) as error:
        # ValueError: quotes that do not close, or a zero byte.
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise _failed(command, hint, f"cannot be run: {words}") from None
    except subprocess.TimeoutExpired:
        raise _failed(command, hint, f"did not end within {_RESTART_TIMEOUT:g} s") from None
    finally:
        os.close(output)
    if done.returncode:
        words = said.decode(errors="replace").strip()
        told = f", and said {quoted(words, None)}" if words else ""
        raise _failed(command, hint, f"ended with status {done.returncode}{told}")


def _failed(command: str, hint: str, how: str) -> HostError:
    return HostError("CHG007", f"the command {quoted(command)} {how}", hint, command=command)
