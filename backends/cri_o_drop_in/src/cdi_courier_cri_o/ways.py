"""What CRI-O can be made to run, as far as other packages bring it: their files, or whether they are here.

The wrapper and the hook come with the OCI hook backend's package, which this one requires; other backends are
met as plugins only.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.changes import FileChange
    from cdi_courier.hookspecs import Backend
    from cdi_courier.host.model import Runtime
    from cdi_courier.settings import Settings

_KIND: Final = "cri-o"
_GATE: Final = "cdi-courier-cri-o"


def has_nri() -> bool:
    """Whether the NRI backend is installed."""
    return importlib.util.find_spec("cdi_courier_nri") is not None


def backend(name: str, settings: Settings) -> Backend | None:
    """The backend that delivers, by its name; None if it cannot be had."""
    from cdi_courier.plugins import discover

    return discover(settings.backends.disabled).backends.get(name)


def gate_files(settings: Settings, real: str) -> tuple[FileChange, ...]:
    """The runtime wrapper in front of `real`, an absolute path; the last one is the program itself.

    Raises `CourierError` as `cdi_courier_oci_hook.gate.files`.
    """
    from cdi_courier_oci_hook import gate

    return gate.files(settings, _GATE, real, kind=_KIND)


def are_written(files: Sequence[FileChange]) -> bool:
    """Whether each file is as it is planned."""
    from cdi_courier_oci_hook import wrapping

    return all(map(wrapping.is_written, files))


def runtime_class(settings: Settings) -> str:
    """The manifest that pods name the wrapper's handler by, as a note."""
    from cdi_courier_oci_hook import wrapping

    return wrapping.runtime_class(settings)


def hook_files(settings: Settings, directory: str) -> tuple[FileChange, ...]:
    """The ``createRuntime`` hook, in a directory that CRI-O watches."""
    from cdi_courier_oci_hook import hooksd

    return tuple(hooksd.files(settings, directory, kind=_KIND))


def hook_in(directory: str) -> str:
    """The path of the hook in a directory."""
    from cdi_courier_oci_hook import hooksd

    return os.path.join(directory, hooksd.NAME)


def hook_directory(runtime: Runtime) -> str:
    """Where the hook's own package looks for it; ``""`` if it does not know of any directory."""
    from cdi_courier_oci_hook import crio_hook

    return crio_hook.directory(runtime) or ""


def real_of(path: str) -> str:
    """The runtime behind a gate of ours; ``""`` if it is none."""
    from cdi_courier_oci_hook import gate

    return gate.real_of(path) or ""


def is_gate(settings: Settings, path: str) -> bool:
    """Whether this is the path of a gate of ours, whether or not it is still there."""
    return os.path.dirname(os.path.normpath(path)) == os.path.normpath(settings.oci_hook.gate_dir)
