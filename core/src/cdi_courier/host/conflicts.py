"""Other plugins on this host that answer the same annotations: each pod that asks would fail."""

from __future__ import annotations

import os
from typing import Final

from cdi_courier.errors import quoted

PLUGIN_DIR: Final = "/opt/nri/plugins"

# Names that are known to inject devices by annotation: NVIDIA's toolkit with its NRI plugin switched on, and
# NRI's own sample.
_KNOWN: Final = ("nvidia-nri-plugin", "nvidia-ctk-installer", "nvidia-toolkit", "device-injector")
_NAME_LENGTH: Final = 100


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
        if pid.isdigit() and (program := _known(_program(proc, pid)))
    ]
    return found


def _known(name: str) -> str:
    return next((known for known in _KNOWN if known in name), "")


def _program(proc: str, pid: str) -> str:
    """The file name of what a process runs, interpreters' scripts included."""
    try:
        with open(os.path.join(proc, pid, "cmdline"), "rb") as file:
            words = file.read(4096).split(b"\0")[:2]
    except OSError:
        return ""
    return " ".join(os.path.basename(os.fsdecode(word))[:_NAME_LENGTH] for word in words)


def _entries(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
