"""The gate's file: a self-contained POSIX shell script with everything baked in that it must know.

Used by commands that install the wrapper. It must not know which runtime is configured how; what the script
does is written in `gate.sh`, what it starts in `wrapper`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
from importlib import resources
from typing import TYPE_CHECKING, Final

from attrs import frozen
from cdi_courier import patterns, table
from cdi_courier.changes import FileChange
from cdi_courier.compiling import injector_of
from cdi_courier.errors import HostError, quoted

from . import installation, wrapper
from .wrapper import Wrapped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.request import Origin
    from cdi_courier.settings import Settings

    from .wrapper import Kind

_FIRST: Final = "# cdi-courier gate:"
_REAL: Final = "real="
_LONGEST: Final = 1 << 20
_KUBERNETES: Final = ("containerd", "cri-o")
_MARK: Final = re.compile("(@[a-z]+@)")
_SYSTEM_PATH: Final = "/usr/bin:/bin:/usr/sbin:/sbin"


@frozen
class Gate:
    """All that a gate knows. Paths are absolute.

    real: the real runtime. kind: of the runtime that calls, ``""`` for one set up by hand; says under which
    annotations names are found. origin: of its containers, as in `ContainerRequest`. bare: a Python that
    starts fast. interpreter: one that has what the product needs. package_path: for ``sys.path``. settings:
    as `table.settings_sources` takes it. log: ``[oci_hook] log``. state_dir, gate_dir: as in the settings.
    texts: what is looked for in a config when the product is gone. grep, rm: the programs.
    """

    real: str
    kind: Kind
    origin: Origin
    bare: str
    interpreter: str
    package_path: tuple[str, ...]
    settings: str
    log: str
    state_dir: str
    gate_dir: str
    texts: tuple[str, ...]
    grep: str = "/usr/bin/grep"
    rm: str = "/usr/bin/rm"


def make(settings: Settings, real: str, kind: Kind) -> Gate:
    """The gate of this installation in front of the runtime `real`.

    Raises `CourierError`: ``HOK013`` it cannot stand there, ``SET005``.
    """
    if not os.path.isabs(real) or real_of(real) is not None:
        why = "is a gate itself" if os.path.isabs(real) else "is not an absolute path"
        raise HostError(
            "HOK013",
            f"{quoted(real, None)} cannot be wrapped: it {why}",
            "name the runtime that creates containers, such as /usr/sbin/runc",
        )
    return Gate(
        real=real,
        kind=kind,
        origin="kubernetes" if kind in _KUBERNETES else "local",
        bare=installation.bare_interpreter(),
        interpreter=installation.interpreter(),
        package_path=tuple(installation.package_path()),
        settings=installation.settings_place(settings),
        log=settings.oci_hook.log,
        state_dir=settings.service.state_dir,
        gate_dir=settings.oci_hook.gate_dir,
        texts=tuple(patterns.texts(injector_of(settings).families)),
        grep=_program("grep"),
        rm=_program("rm"),
    )


def files(settings: Settings, name: str, real: str, kind: Kind) -> tuple[FileChange, ...]:
    """What installing a gate writes: the patterns, and as ``[oci_hook] gate_dir``/`name` the gate itself.

    The patterns are first, since a gate without them starts Python for every container; they are written anew
    whenever ``[annotations]`` changes. Containers depend on both as long as they exist. Raises as `make` and
    `render`; ``HOK013`` also if the folder is not fit for a program that root runs.
    """
    made = make(settings, real, kind)
    path = os.path.join(made.gate_dir, name)
    if os.path.realpath(path) == os.path.realpath(real):
        raise HostError(
            "HOK013",
            f"{quoted(real, None)} cannot be wrapped: the gate would call itself",
            "name the runtime that creates containers, or another [oci_hook] gate_dir",
        )
    _must_be_fit(made.gate_dir)
    return (
        FileChange(
            os.path.join(made.gate_dir, patterns.NAME),
            patterns.render(made.settings, injector_of(settings).families),
            "what the gate looks for in a container's config",
            held=True,
            rewritten=True,
        ),
        FileChange(path, render(made), f"the gate in front of {real}", mode=0o755, held=True, rewritten=True),
    )


def _must_be_fit(folder: str) -> None:
    """Raises `HostError` ``HOK013`` where a gate could not be run, or be exchanged by who is not root."""
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    hint = "name another folder: [oci_hook] gate_dir"
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise HostError("HOK013", f"{quoted(folder, None)} is mounted noexec: no gate can be run there", hint)
    while True:
        found = os.stat(folder)
        writable = found.st_mode & (0o022 if found.st_gid else 0o002)
        if (writable and not found.st_mode & stat.S_ISVTX) or found.st_uid not in (0, os.geteuid()):
            raise HostError(
                "HOK013",
                f"{quoted(folder, None)} may be written by others, who could exchange a gate in it",
                f"make it root's alone, or {hint}",
            )
        if folder == (parent := os.path.dirname(folder)):
            return
        folder = parent


def render(gate: Gate) -> bytes:
    """The script. Raises `HostError` ``HOK013`` for a path that it cannot hold."""
    for value in (gate.real, gate.settings, gate.state_dir, gate.gate_dir, *gate.package_path):
        if "\n" in value or "\0" in value:
            raise HostError("HOK013", f"{quoted(value)} cannot be written into a gate", "rename it")
    installed = Wrapped(
        interpreter=gate.interpreter,
        settings=gate.settings,
        state_dir=gate.state_dir,
        log=gate.log,
        origin=gate.origin,
        real=gate.real,
        kind=gate.kind,
        gate_dir=gate.gate_dir,
    )
    program = gate.bare
    missing = (
        f"HOK011: this container asks for devices, and cdi-courier is not there any more: {program} or its "
        f"packages in {' and '.join(gate.package_path)} are gone (install it again, or create the container "
        "without the annotation)"
    )
    recursion = (
        f"HOK010: the gate was called by itself: {gate.real}, in front of which it stands, leads back to it "
        "(have that run the real runtime, then `cdi-courier install` once more)"
    )
    baked = {
        "grep": gate.grep,
        "rm": gate.rm,
        "python": program,
        "interpreter": gate.interpreter,
        "command": wrapper.command(installed, list(gate.package_path)),
        "patterns": os.path.join(gate.gate_dir, patterns.NAME),
        "header": patterns.header(gate.settings),
        "records": os.path.join(gate.state_dir, wrapper.RECORDS),
        "asked": "\n".join(gate.texts),
        "sandbox": "\n".join(_sandbox_texts(gate.kind)),
        "missing": missing,
        "missing_json": json.dumps(missing),
        "recursion": recursion,
        "recursion_json": json.dumps(recursion),
    }
    needed = [
        shlex.quote(os.path.join(folder, module))
        for folder, module in zip(
            (gate.package_path[0], gate.package_path[-1]),
            ("cdi_courier/editing.py", "cdi_courier_oci_hook/wrapper.py"),
            strict=True,
        )
    ]
    script = resources.files(__package__).joinpath("gate.sh").read_text("utf-8")
    replacements = {
        "@real@": f"{_REAL}{shlex.quote(gate.real)}\n",
        "@baked@": "".join(f"{name}={shlex.quote(value)}\n" for name, value in baked.items()),
        "@watched@": " ".join(_watched(gate.settings)),
        "@needed@": " ".join(needed),
    }
    # Split first: what is put in must not be looked at again.
    parts = _MARK.split(script)
    parts[1::2] = [replacements[mark] for mark in parts[1::2]]
    script = "".join(parts)
    return script.encode(errors="surrogateescape")


def real_of(path: str) -> str | None:
    """The real runtime of the gate at `path`; None if there is no gate, or nothing that can be read.

    A relative path is none: whoever chose the working directory would choose what runs as root.
    """
    if not os.path.isabs(path):
        return None
    try:
        with open(path, "rb") as file:
            head = file.read(_LONGEST)
    except (OSError, ValueError):
        return None
    lines = head.decode(errors="surrogateescape").split("\n")
    if len(lines) < 2 or not lines[1].startswith(_FIRST):
        return None
    for line in lines:
        if line.startswith(_REAL):
            try:
                words = shlex.split(line.removeprefix(_REAL))
            except ValueError:
                return None
            return words[0] if words else None
    return None


def _watched(settings: str) -> list[str]:
    """As shell words: what is newer than the patterns once settings have changed, also by renaming."""
    words = []
    for path, ends in table.settings_sources(settings):
        words += [shlex.quote(path)]
        if ends is not None:
            words += [f"{shlex.quote(path)}/*{shlex.quote(end)}" for end in ends]
    folder = os.path.dirname(settings)
    parents = [os.path.dirname(folder), folder] if settings.endswith("/") else [folder]
    return [*(shlex.quote(parent) for parent in parents), *words]


def _sandbox_texts(kind: str) -> Sequence[str]:
    """How a pause container's config says that it is one. Encoders may put a blank after the colon.

    In a string of a config, where a pod's author could write them, the quotes would be escaped.
    """
    if kind not in wrapper.SANDBOX:
        return ()
    key = json.dumps(wrapper.SANDBOX[kind])
    return f'{key}:"sandbox"', f'{key}: "sandbox"'


def _program(name: str) -> str:
    """Where the system has it; never where the caller's PATH might."""
    found = shutil.which(name, path=_SYSTEM_PATH)
    if found is None:
        raise HostError(
            "HOK013", f"there is no {name} in {_SYSTEM_PATH}, which a gate needs", f"install {name}"
        )
    return found
