"""Other plugins on this host that answer the same annotations: each pod that asks would fail."""

from __future__ import annotations

import os
import re
from typing import Final

from cdi_courier.errors import quoted

PLUGIN_DIR: Final = "/opt/nri/plugins"

# Names that are known to inject devices by annotation: NVIDIA's toolkit with its NRI plugin switched on, and
# NRI's own sample.
_KNOWN: Final = ("nvidia-nri-plugin", "nvidia-ctk-installer", "nvidia-toolkit", "device-injector")
_INTERPRETER: Final = re.compile(r"(?:python[0-9.]*|(?:ba|da|)sh)", re.ASCII)


def find(plugin_dir: str = PLUGIN_DIR, proc: str = "/proc") -> list[str]:
    """One sentence for each plugin that may conflict, from the launched plugins' folder and the processes."""
    found = []
    for name in _entries(plugin_dir):
        path = os.path.join(plugin_dir, name)
        if _known(name) and os.access(path, os.X_OK) and os.path.isfile(path):
            found.append(
                f"{quoted(path, None)[1:-1]} is launched by the runtime and may answer the same annotations"
            )
    found += [
        f"process {pid} ({program}) may answer the same annotations over NRI"
        for pid in _entries(proc)
        if pid.isdigit() and (program := next(filter(None, map(_named, _programs(proc, pid))), ""))
    ]
    return found


def _known(name: str) -> str:
    return next((known for known in _KNOWN if known in name), "")


def _named(program: str) -> str:
    # With or without the index that NRI has in front of a plugin's name.
    return next((known for known in _KNOWN if program == known or program.endswith(f"-{known}")), "")


def _programs(proc: str, pid: str) -> list[str]:
    """The file names of what a process runs: its program, and the script if that is an interpreter."""
    try:
        with open(os.path.join(proc, pid, "cmdline"), "rb") as file:
            words = file.read(4096).split(b"\0")[:2]
    except OSError:
        return []
    names = [os.path.basename(os.fsdecode(word)) for word in words]
    return names if _INTERPRETER.fullmatch(names[0]) else names[:1]


def _entries(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
