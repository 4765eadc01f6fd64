"""Where this installation of the product lies, for what installers bake in.

Not for processes of a container.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import cdi_courier
from cdi_courier.settings import default_dir, default_files

from . import entry

if TYPE_CHECKING:
    from cdi_courier.settings import Settings


def settings_place(settings: Settings) -> str:
    """Where the settings came from, as `cdi_courier.compiling.settings_place` has it."""
    # Only the usual folder has several files, or none.
    if len(settings.files) == 1 and settings.files != tuple(default_files()):
        return os.path.abspath(settings.files[0])
    return f"{default_dir()}/"


def package_path() -> list[str]:
    """The folders of the core's package and of this one: two where they are installed editable."""
    files = [os.path.abspath(str(module.__file__)) for module in (cdi_courier, entry)]
    return list(dict.fromkeys(os.path.dirname(os.path.dirname(path)) for path in files))


def interpreter() -> str:
    """The Python that has all that the product needs."""
    return sys.executable


def bare_interpreter() -> str:
    """The program itself: a virtual environment's link or a version manager's shim costs more.

    By the name that it keeps when the system gets another Python, if it has one: engines pass over a hook
    whose program is not there, without a word (docs/facts.md#hook-files).
    """
    program = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    lasting = os.path.join(os.path.dirname(program), "python3")
    return lasting if os.path.realpath(lasting) == program else program
