"""What the installers of the runtime wrapper share: whom it stands in front of, and who is running it.

A gate is the file that a runtime calls in place of the low-level runtime; `gate` writes it. Source:
docs/facts.md#containerd-handlers, #wrapper-calls. It must not know any runtime's configuration files. Only
used by commands and for offers, never per container; what only commands need is imported when they plan.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Literal

from cdi_courier.errors import CourierError, HostError, quoted
from cdi_courier.hookspecs import Offer
from cdi_courier.host import processes
from cdi_courier.host.files import Root

from . import NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdi_courier.changes import FileChange
    from cdi_courier.host.model import Runtime
    from cdi_courier.settings import Settings

RUNC_LIKE: Final = ("io.containerd.runc.v2", "io.containerd.runc.v1")
"""Types whose shim calls a program with runc's command line, which their options name."""

_OCI = "oci"  # what a description calls a handler that is a low-level runtime's path
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def name_of(runtime: Runtime) -> str:
    """The name of the runtime's gate; where there are several of a kind, each has its own."""
    if runtime.key == runtime.kind:
        return f"cdi-courier-{runtime.kind}"
    import hashlib  # brings OpenSSL, 3 MB of the daemon's memory

    return f"cdi-courier-{runtime.kind}-{hashlib.sha256(runtime.key.encode()).hexdigest()[:8]}"


def path_of(runtime: Runtime, settings: Settings) -> str:
    """Where the runtime's gate lies."""
    return f"{settings.oci_hook.gate_dir.rstrip('/')}/{name_of(runtime)}"


def offer(runtime: Runtime, settings: Settings) -> Offer:
    """Ready where the running daemon calls the gate and that is there; else a restart away, or impossible."""
    reason = "a wrapper in front of the low-level runtime edits the config"
    if runtime.get("rootless"):
        return Offer(NAME, "full", "impossible", f"{reason}; it is not installed for a rootless daemon")
    wanted = handler(runtime, settings)
    if wanted is not None and _runs_gate(runtime, settings, wanted):
        return Offer(NAME, "full", "nothing", f"handler {wanted} runs the wrapper")
    default = runtime.get("default_handler")
    known = runtime.get("handlers", {}).get(default)
    if known is not None and known["type"] not in (*RUNC_LIKE, _OCI):
        return Offer(
            NAME,
            "full",
            "impossible",
            f"the default handler {default} is of type {known['type']}, which calls no runc that a wrapper "
            "could stand in front of",
        )
    if runtime.get("distribution") or runtime.get("config_template"):
        reason += "; it is not installed where a distribution generates the configuration at each start"
        return Offer(NAME, "full", "impossible", reason)
    return Offer(NAME, "full", "restart", reason)


def handler(runtime: Runtime, settings: Settings) -> str | None:
    """The handler that has to run the gate; None if the runtime did not tell its default."""
    if settings.oci_hook.handler_mode == "named":
        return settings.oci_hook.handler
    default = runtime.get("default_handler")
    return None if default is None else str(default)


def _runs_gate(runtime: Runtime, settings: Settings, name: str) -> bool:
    called = str(runtime.get("handlers", {}).get(name, {}).get("path", ""))
    return called == path_of(runtime, settings) and _is_gate(called)


def _is_gate(path: str) -> bool:
    # Nobody else writes there; what it says is not read, since the daemon asks this again and again.
    return os.path.isfile(path) and os.access(path, os.X_OK)


def is_in_force(runtime: Runtime, settings: Settings, files: Sequence[FileChange]) -> bool:
    """Whether nothing is left to do: every file is as planned, and the daemon runs on what they say."""
    if offer(runtime, settings).needs != "nothing":
        return False
    if settings.oci_hook.handler_mode == "default" and runtime.kind == "containerd":
        passed = runtime.get("pod_annotations", ())
        if not set(annotation_patterns(settings)) <= set(passed):
            return False
    return all(map(is_written, files))


def is_written(change: FileChange) -> bool:
    """Whether the file is as it is planned."""
    try:
        with open(change.path, "rb") as file:
            current: bytes | None = file.read()
    except OSError:
        current = None
    return current == change.content


def real_runtime(runtime: Runtime, noted: str) -> str:
    """The low-level runtime's absolute path, baked into the gate. noted: what the configuration says, or "".

    A name is looked up where the daemon, and so its shims, would. Raises `HostError` ``HOK114``.
    """
    from . import gate

    program = gate.real_of(noted) or noted or "runc"
    if "/" in program and not program.startswith("/"):
        raise _no_runtime(program, "is no absolute path")
    folders = [""] if "/" in program else _search_path(runtime)
    for folder in folders:
        path = os.path.join(folder, program) if folder else program
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise _no_runtime(program, "is not there" if folders == [""] else f"is not in {':'.join(folders)}")


def _no_runtime(program: str, how: str) -> CourierError:
    return HostError(
        "HOK114",
        f"the low-level runtime {quoted(program, None)} {how}, or cannot be executed",
        "install it, or correct the runtime's configuration",
    )


def _search_path(runtime: Runtime) -> list[str]:
    pid = runtime.get("pid")
    path = processes.environment(Root(), pid).get("PATH", "") if pid else ""
    return [folder for folder in (path or _PATH).split(":") if folder.startswith("/")]


def annotation_patterns(settings: Settings) -> list[str]:
    """What lets the annotations that ask through to the config, as Go's ``path.Match`` reads it.

    Its ``*`` does not cross a slash. Raises `SettingsError` ``SET005``.
    """
    from cdi_courier.compiling import injector_of

    found: dict[str, None] = {}
    for forms, _ in injector_of(settings).families:
        for key, scoped in forms:
            domain, slash, _ = key.partition("/")
            found[f"{_literal(domain)}/*" if slash else _literal(key) + ("*" if scoped else "")] = None
    return list(found)


def _literal(text: str) -> str:
    return "".join(f"\\{char}" if char in "*?[\\" else char for char in text)


def gate_files(runtime: Runtime, settings: Settings, real: str) -> tuple[FileChange, ...]:
    """The gate and what it reads, as `gate.files`."""
    from . import gate

    kind: Literal["containerd", "docker"] = "docker" if runtime.kind == "docker" else "containerd"
    return gate.files(settings, name_of(runtime), real, kind)


def notes(settings: Settings, called: str, real: str, patterns: Sequence[str]) -> Iterator[str]:
    """What a person should know. called: the handler that is copied."""
    yield f"handler {settings.oci_hook.handler} is a copy of {called}; its containers are made by {real}"
    yield f"annotations that it lets through: {', '.join(patterns)}"


def runtime_class(settings: Settings) -> str:
    """The manifest that pods name the handler by, as a note."""
    name = settings.oci_hook.handler
    return (
        "pods need runtimeClassName and this RuntimeClass:\n"
        f"apiVersion: node.k8s.io/v1\nkind: RuntimeClass\nmetadata:\n  name: {name}\nhandler: {name}"
    )


def not_runc_like(name: str, type_: str) -> CourierError:
    """The refusal of a handler that calls no low-level runtime with runc's command line."""
    return HostError(
        "HOK113",
        f"the default handler {quoted(name)} is of type {quoted(type_)}, which calls no runc that a wrapper "
        "could stand in front of",
        f"make a handler of type {RUNC_LIKE[0]} the default, or use another backend",
    )


def missing_default(name: str, path: str) -> CourierError:
    """The refusal of a configuration whose default handler is not in it."""
    return HostError(
        "HOK120",
        f"the default handler {quoted(name)} is not defined in {quoted(path, None)}",
        "define it, or correct the default's name",
        file=path,
    )


def taken(name: str, path: str) -> CourierError:
    """The refusal of a handler's name that somebody else uses."""
    return HostError(
        "HOK115",
        f"there is a handler {quoted(name)} already, which cdi-courier has not installed",
        "take it out, or choose another name in [oci_hook] handler",
        file=path,
    )
