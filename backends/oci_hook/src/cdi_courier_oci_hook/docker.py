"""What has Docker call the gate: a runtime in daemon.json, and that as the default.

Source: https://docs.docker.com/reference/cli/dockerd (runtimes, default-runtime). Annotations come with
``docker run --annotation``, since API 1.43. It reads Docker's files and writes none. Only used by commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve
from cdi_courier import changes, jsonedit
from cdi_courier.changes import ChangeSet, FileChange
from cdi_courier.errors import CourierError, HostError, quoted
from cdi_courier.host import configured, processes
from cdi_courier.host.docker import DEFAULT_CONFIG
from cdi_courier.host.files import Root, read_file

from . import NAME, wrapping

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cdi_courier.host.model import Runtime
    from cdi_courier.settings import Settings

_RESTART = "systemctl restart docker"
_UNREADABLE = "HOK117"
_BUILT_IN = ("runc", "io.containerd.runc.v2")  # runtimes that need no entry


def plan(runtime: Runtime, settings: Settings) -> ChangeSet:
    """What has this Docker call the gate; without a restart command if it does already.

    Raises `CourierError`: ``HOK113`` the default runtime is no low-level one, ``HOK114`` it is not there,
    ``HOK115`` the name is taken, ``HOK117`` daemon.json cannot be used, ``HOK118`` the daemon's options
    contradict it, ``HOK119`` the daemon is rootless, ``HOK120`` the default runtime is not defined,
    ``SET005``.
    """
    if runtime.get("rootless"):
        raise HostError(
            "HOK119",
            "this Docker is a user's own, whose files are not root's to edit",
            "write `runtimes` and `default-runtime` into that user's daemon.json",
        )
    words = processes.command_line(Root(), runtime.get("pid"))
    path = _config(runtime, settings, words)
    _must_not_contradict(settings, words)
    before = changes.without_ours(NAME, runtime.key, folder=changes.FOLDER)
    data = before[path] if path in before else read_file(path, _UNREADABLE)
    document = _parse(path, data)
    name = settings.oci_hook.handler
    runtimes = document.get("runtimes", {})
    if not isinstance(runtimes, dict):
        raise _unusable(path, "runtimes is no object")
    if name in runtimes:
        raise wrapping.taken(name, path)
    default = document.get("default-runtime") or _BUILT_IN[0]

    entry = _entry(default, runtimes, path)
    gate = wrapping.path_of(runtime, settings)
    real = wrapping.real_runtime(runtime, entry.pop("path"))
    values: dict[jsonedit.Key, Any] = {("runtimes", name): {"path": gate, **entry}}
    if settings.oci_hook.handler_mode == "default":
        values[("default-runtime",)] = name
    edited = jsonedit.put(data if data and data.strip() else b"{}", values)
    everything = (
        *wrapping.gate_files(runtime, settings, real),
        FileChange(path, edited, f"adds runtime {name}", keys=tuple(values)),
    )
    planned = ChangeSet(
        NAME,
        runtime.key,
        everything,
        configured.restart_command(runtime, settings, _RESTART),
        tuple(_notes(settings, str(default), real)),
    )
    return evolve(planned, restart="") if wrapping.is_in_force(runtime, settings, everything) else planned


def _notes(settings: Settings, default: str, real: str) -> Iterator[str]:
    name = settings.oci_hook.handler
    yield f"runtime {name} is a copy of {default}; its containers are made by {real}"
    yield "annotate with `docker run --annotation`, which Docker has since 24 (API 1.43)"
    if settings.oci_hook.handler_mode == "named":
        yield f"containers need `docker run --runtime {name}`"
    yield 'a restart of Docker ends its containers unless "live-restore" is set'


def _config(runtime: Runtime, settings: Settings, words: list[str]) -> str:
    own = configured.table(runtime, settings)
    if own is not None and own.config:
        return own.config
    told = processes.option(words, "--config-file")
    if told:
        return processes.absolute(Root(), runtime.get("pid"), told)
    return str(runtime.get("config", DEFAULT_CONFIG))


def _must_not_contradict(settings: Settings, words: list[str]) -> None:
    """Docker does not start where an option and daemon.json say the same thing, even if they agree."""
    options = ["--add-runtime"]
    if settings.oci_hook.handler_mode == "default":
        options.append("--default-runtime")
    for option in options:
        if processes.option(words, option) is not None:
            raise HostError(
                "HOK118",
                f"dockerd is started with {option}, and does not start if daemon.json sets the same",
                f"take {option} out of its unit and write it into daemon.json",
            )


def _entry(name: object, runtimes: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The default runtime as ``path`` and what else has to be copied. Raises `HostError`."""
    if not isinstance(name, str):
        raise _unusable(path, "default-runtime is no string")
    entry = runtimes.get(name)
    if entry is None:
        if name in _BUILT_IN:
            return {"path": ""}
        if name.startswith("io.containerd."):
            raise wrapping.not_runc_like(name, name)
        raise wrapping.missing_default(name, path)
    if not isinstance(entry, dict):
        raise _unusable(path, f"runtime {quoted(name)} is no object")
    type_, options = entry.get("runtimeType"), entry.get("options") or {}
    if not type_:
        return {**entry, "path": str(entry.get("path") or "")}
    if type_ not in wrapping.RUNC_LIKE:
        raise wrapping.not_runc_like(name, str(type_))
    if not isinstance(options, dict) or set(options) - {"BinaryName"}:
        # What the daemon tells of such a runtime does not show whether the gate is called.
        raise _unusable(path, f"runtime {quoted(name)} has options that a path cannot carry")
    return {"path": str(options.get("BinaryName", ""))}


def _parse(path: str, data: bytes | None) -> dict[str, Any]:
    if data is None or not data.strip():
        return {}
    try:
        return jsonedit.parse(data)
    except CourierError as error:
        raise _unusable(path, error.message) from None


def _unusable(path: str, why: str) -> CourierError:
    return HostError(_UNREADABLE, f"{quoted(path, None)}: {why}", "correct it first", file=path)
