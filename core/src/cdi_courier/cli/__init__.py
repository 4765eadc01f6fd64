"""The command ``cdi-courier``: one module a subcommand, imported only when it is called.

Exit codes: 0 yes or done, 1 no or failed, 2 usage or unusable input, 3 unresolved (`apply`). Every option can
also be given in the environment, ``CDI_COURIER_`` and its name; flags override the environment, and the
environment overrides files.
"""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cdi_courier.errors import CourierError, HostError, SettingsError, printable
from cdi_courier.settings import Settings, load

if TYPE_CHECKING:
    from cdi_courier.cdi.registry import Registry

_COMMANDS = {
    # command → (module, attribute)
    "apply": ("apply", "apply"),
    "compile": ("compile", "compile_"),
    "config": ("config", "config"),
    "devices": ("devices", "devices"),
    "doctor": ("doctor", "doctor"),
    "install": ("install", "install"),
    "explain": ("explain", "explain"),
    "generate": ("generate", "generate"),
    "policy": ("policy", "policy"),
    "run": ("run", "run"),
    "status": ("status", "status"),
    "uninstall": ("uninstall", "uninstall"),
    "validate": ("validate", "validate"),
}

# Writing what the command says fails with these, where a disk is full or a terminal has gone.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _LazyGroup(click.Group):
    def list_commands(self, _: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[name]
        command = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - a mistake in _COMMANDS
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Read FILE instead of /etc/cdi-courier/config.toml and conf.d.",
)
@click.version_option(package_name="cdi-courier", prog_name="cdi-courier")
@click.pass_context
def command(context: click.Context, config: Path | None) -> None:
    """Deliver CDI devices to containers that ask for them by annotation."""
    context.obj = config


def settings_of(context: click.Context) -> Settings:
    """The settings that the command line chose. Raises `SettingsError`."""
    config: Path | None = context.find_root().obj
    return load(None if config is None else [config])


def registry_of(context: click.Context, spec_dirs: tuple[str, ...]) -> Registry:
    """The CDI registry of ``--spec-dir`` options, or else of the settings. Raises `SettingsError`."""
    from cdi_courier.cdi.registry import Registry

    cdi = settings_of(context).cdi
    dirs = tuple(map(os.path.abspath, spec_dirs)) or cdi.dirs
    return Registry(dirs, trust=cdi.trust, max_file_size=cdi.max_file_size)


def plain(text: str) -> str:
    """Hostile text, such as a file's name, as one harmless line."""
    return printable(text).replace("\n", "\\n")


def main() -> int:
    """Run the command of the command line; its exit code. An expected error is one message on stderr."""
    gc.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names may hold what is no text, and a terminal may know less than Unicode.
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = _warn  # type: ignore[assignment]
    try:
        code = command(standalone_mode=False, auto_envvar_prefix="CDI_COURIER")
    except click.exceptions.Abort:
        code = 130
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except CourierError as error:
        _say(error)
        code = 2 if isinstance(error, SettingsError) else 1
    except BrokenPipeError:
        code = 1  # whoever read our output has had enough
        _drop_output()
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        _drop_output()
        _say(HostError("HST006", f"the output cannot be written: {error.strerror}", "make room, or pipe it"))
        code = 1
    return code if isinstance(code, int) else 0


def _warn(message: Warning | str, *_: object) -> None:
    # What a library says of a user's session, say; where in its source is nobody's concern here.
    click.echo(f"cdi-courier: warning: {plain(str(message))}", err=True)


def _say(error: CourierError) -> None:
    click.echo(f"cdi-courier: {error}", err=True)


def _drop_output() -> None:
    """Forget what is not written yet: it would be tried again at the very end, with a traceback."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
