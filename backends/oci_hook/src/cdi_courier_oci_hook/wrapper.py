"""The runtime wrapper: edits a bundle's config before the real runtime creates the container from it.

Light module. `gate.sh` stands where containerd, CRI-O or Docker look for their runtime, and starts this for
the few calls that may be about us, as ``python3 -I -S -c COMMAND REASON ARGV…``; what cannot be answered from
the compiled table is handed to `slow`. In the end the real runtime takes the process over: pid, stdin and
arguments are those of the call. Source: docs/facts.md#wrapper-calls, #cri-o-calls.

A config is replaced as a whole by one that is complete, or stays; what was put into the environment is noted,
because CRI-O and containerd make the process of an ``exec`` from a config of their own.
"""

from __future__ import annotations

import os
import stat
import time

from cdi_courier import editing, fastjson, patterns, table
from cdi_courier.errors import DeliveryError, quoted
from cdi_courier.oci import apply_edits

from . import calls, entry, program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal, NoReturn

    from cdi_courier.editing import Edited
    from cdi_courier.request import ContainerRequest, Origin

    from .entry import Decide, Json

    Kind = Literal["containerd", "cri-o", "docker", ""]

# The annotations in which a runtime says who a container is: written after a pod's own, so that no author of
# a pod can set them (docs/facts.md#cri-o-annotations, #containerd-annotations). Those of another kind
# of runtime anybody can.
_NAMES = {
    "containerd": (
        "io.kubernetes.cri.sandbox-namespace",
        "io.kubernetes.cri.sandbox-name",
        "io.kubernetes.cri.container-name",
    ),
    "cri-o": ("io.kubernetes.pod.namespace", "io.kubernetes.pod.name", "io.kubernetes.container.name"),
}
SANDBOX = {
    "containerd": "io.kubernetes.cri.container-type",
    "cri-o": "io.kubernetes.cri-o.ContainerType",
}
"""Kind of runtime → the annotation that is ``sandbox`` on a pod's pause container."""

_CONFIG = "config.json"
RECORDS = "exec"
"""The folder beside the table with the variables of containers, a file each."""
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Wrapped(entry.Installed):
    """What the installer has told the wrapper.

    real: the real runtime, absolute. kind: of the runtime that calls; ``""`` for one set up by hand.
    gate_dir: where patterns for the gate are.
    """

    __slots__ = ("gate_dir", "kind", "real")

    def __init__(
        self,
        *,
        interpreter: str,
        settings: str,
        state_dir: str,
        real: str,
        kind: Kind,
        gate_dir: str,
        log: str = "journal",
        origin: Origin = "local",
    ) -> None:
        super().__init__(
            interpreter=interpreter, settings=settings, state_dir=state_dir, log=log, origin=origin
        )
        self.real = real
        self.kind: Kind = kind
        self.gate_dir = gate_dir


def command(installed: Wrapped, path: list[str]) -> str:
    """The Python command of the wrapper. path: what is put on ``sys.path``."""
    return (
        f"import sys; sys.path += {path!r}; "
        "from cdi_courier_oci_hook.wrapper import Wrapped, main; "
        f"main({installed!r}, sys.argv[1], sys.argv[2:])"
    )


def main(installed: Wrapped, reason: str, argv: Sequence[str]) -> NoReturn:
    """Do what the runtime was called for, or refuse, and end the process.

    reason: why the gate could not tell by itself; ``stale`` if its patterns may be those of other settings.
    """

    def decide(config: Json, request: ContainerRequest, _: entry.Installed) -> Edited | None:
        try:
            return entry.decide(config, request, installed)
        except editing.SlowPath:
            pass
        try:
            return entry.go_slow(installed, "wrapper_main", argv, lacking=__name__)
        except DeliveryError:
            if may_ask(request, installed):
                raise
            return None

    if reason == "stale":
        _refresh(installed)
    os._exit(answer(installed, argv, decide))


def answer(installed: Wrapped, argv: Sequence[str], decide: Decide) -> int:
    """Hand over to the real runtime when all is done; return 1 if that cannot be, after saying why."""
    call = calls.parse(argv)
    return entry.guarded(
        lambda: _handle(installed, call, argv, decide), installed, lambda text: _tell_caller(call, text)
    )


def _handle(installed: Wrapped, call: calls.Call, argv: Sequence[str], decide: Decide) -> None:
    if call.verb in calls.CREATES:
        _create(installed, call.readings, decide)
    elif call.verb == "exec":
        _exec(installed, call.readings)
    try:
        program.become(installed.real, [installed.real, *argv])
    except OSError as error:
        raise DeliveryError(
            "HOK009",
            f"the real runtime {quoted(installed.real, None)} cannot be run: {error.strerror}",
            "was it removed or moved? `cdi-courier install` once more",
        ) from None


def lacking(installed: Wrapped, argv: Sequence[str], why: str) -> NoReturn:
    """As `entry.lacking`, but for a container that does not ask the real runtime goes on."""

    def refuse(_: Json, request: ContainerRequest, __: entry.Installed) -> None:
        if may_ask(request, installed):
            raise entry.lacks(installed, why)

    os._exit(answer(installed, argv, refuse))


def may_ask(request: ContainerRequest, installed: Wrapped) -> bool:
    """Whether the container asks, by the gate's patterns, for when nothing better can be had.

    They were made when the settings last could be used. True where that cannot be told. Hooks are called for
    annotated containers alone, the wrapper for whatever is created while settings are newer than the
    patterns: a typo in a file, or a Python that was upgraded, must not stop every container of a node.
    """
    try:
        with open(f"{installed.gate_dir}/{patterns.NAME}", encoding="utf-8") as file:
            header, *texts = file.read().split("\n")[:-1]
    except (OSError, ValueError):
        return True
    beginnings = tuple(text[1:] for text in texts)  # without the quote
    ours = header == patterns.header(installed.settings)
    return not ours or any(key.startswith(beginnings) for key in request.annotations)


# --- create and run ------------------------------------------------------------------------------------


def _create(installed: Wrapped, readings: Sequence[calls.Reading], decide: Decide) -> None:
    found = [(reading, path) for reading in readings if os.path.lexists(path := _config_path(reading))]
    if len({os.path.realpath(path) for _, path in found}) > 1:
        raise DeliveryError(
            "HOK012",
            "the command line names two bundles, depending on which runtime reads it: "
            + " and ".join(quoted(path) for _, path in found),
            "write --bundle=DIRECTORY",
        )
    if not found:
        return  # the runtime says best what is wrong
    reading, path = found[0]
    what = f"the OCI config {quoted(path)}"
    folder, name = os.path.split(path)
    with _Folder(folder or ".", what) as place:
        data, found_stat = place.read(name)
        config = entry.parse(data, what)
        request = _request_of(config, installed)
        edited = None
        if not _is_sandbox(request, installed.kind):
            edited = decide(config, request, installed)
        record = _record_path(installed, reading.container)
        if edited is None or not edited.env:
            _forget(record)
        else:
            _note(record, reading.container, edited.env)
        if edited is not None and edited.config != config:
            place.replace(name, entry.render(edited, installed, what), found_stat)


def _config_path(reading: calls.Reading) -> str:
    """As crun has it: a ``--config`` is not looked for in the bundle, unless it is called as usual."""
    if reading.config in ("", _CONFIG):
        return os.path.join(reading.bundle or ".", _CONFIG)
    return reading.config


def _request_of(config: Json, installed: Wrapped) -> ContainerRequest:
    request = editing.request_of(config, installed.origin)
    keys = _NAMES.get(installed.kind)
    if keys is not None:
        request.namespace, request.pod, request.container = (request.annotations.get(key, "") for key in keys)
    return request


def _is_sandbox(request: ContainerRequest, kind: str) -> bool:
    return kind in SANDBOX and request.annotations.get(SANDBOX[kind]) == "sandbox"


def _refresh(installed: Wrapped) -> None:
    """Tell the gate what to look for, if the table holds; if not, the full pipeline will.

    Where it cannot be told, the next container takes this way too, which is only slower.
    """
    now = time.time_ns()
    known = table.read(table.place(installed.state_dir), installed.settings)
    if known is not None:
        try:
            patterns.write(installed.gate_dir, installed.settings, known.families + known.foreign, now)
        except (OSError, TypeError, ValueError):
            return  # also a table that is not what it says: `entry.decide` finds that


# --- exec ----------------------------------------------------------------------------------------------


def _exec(installed: Wrapped, readings: Sequence[calls.Reading]) -> None:
    """Put the container's variables into the process that is to be executed in it.

    As CDI puts them into a container: a variable that is there is replaced. The caller has made the process
    from the container's config as it was before it was edited, so what is there came from the same place.
    A process that the runtime makes itself, of the config that was edited, has them.
    """
    for reading in readings:
        if not reading.process or not reading.container or not os.path.lexists(reading.process):
            continue
        env = _noted(_record_path(installed, reading.container))
        if not env:
            continue
        what = f"the process {quoted(reading.process)}"
        folder, name = os.path.split(reading.process)
        with _Folder(folder or ".", what) as place:
            data, found = place.read(name)
            process = entry.parse(data, what)
            edited = apply_edits({"process": process}, {"env": env})["process"]
            if edited != process:
                place.replace(name, fastjson.dumps(edited), found)
        return


def _records(installed: Wrapped) -> str:
    return os.path.join(os.path.dirname(table.place(installed.state_dir)), RECORDS)


def _record_path(installed: Wrapped, container: str) -> str:
    """Where a container's variables are noted; ``""`` for what is no id: it must not lead anywhere else."""
    if container in ("", ".", "..") or "/" in container or "\0" in container:
        return ""
    return os.path.join(_records(installed), container)


def _note(path: str, container: str, env: Sequence[str]) -> None:
    """Raises `DeliveryError` ``HOK007``."""
    if not path:
        raise DeliveryError(
            "HOK007",
            f"{quoted(container)} is no container's id, so its variables cannot be noted for later execs",
            "does the runtime call its wrapper in a new way? Report its version",
        )
    folder = os.path.dirname(path)
    temporary = os.path.join(os.path.dirname(folder), f".{RECORDS}.{os.getpid()}")
    try:
        for private in (os.path.dirname(folder), folder):
            os.makedirs(private, mode=0o700, exist_ok=True)
        _unlink(temporary)  # of a killed process that had our number
        _write_new(temporary, fastjson.dumps(list(env)), None)
        os.rename(temporary, path)
    except OSError as error:
        _unlink(temporary)
        raise DeliveryError(
            "HOK007",
            f"the container's variables cannot be noted in {quoted(path)} for later execs: {error.strerror}",
            "is there room in [service] state_dir, and may this user write there?",
        ) from None


def _noted(path: str) -> list[str]:
    """What was noted; nothing if nothing was, or if it is not what we write."""
    if not path:
        return []
    try:
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError):
        return []
    try:
        if os.fstat(descriptor).st_uid not in (0, os.geteuid()):
            return []
        env = fastjson.loads(entry.read(descriptor, "the note"))
    except (OSError, ValueError, DeliveryError):
        return []
    finally:
        os.close(descriptor)
    return env if isinstance(env, list) and all(isinstance(item, str) for item in env) else []


def _forget(path: str) -> None:
    """A container of the same id that was never deleted must leave nothing to the next one."""
    if path:
        _unlink(path)


# --- files ---------------------------------------------------------------------------------------------


class _Folder:
    """A folder that is held while a file in it is read and replaced, whatever becomes of its path.

    what: says of the file what it is. Raises `DeliveryError` ``HOK005``.
    """

    def __init__(self, path: str, what: str) -> None:
        self._what = what
        try:
            self._number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise self._unreadable(getattr(error, "strerror", None) or str(error)) from None

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._number)

    def read(self, name: str) -> tuple[bytes, os.stat_result]:
        """A file's content and what it is. Raises `DeliveryError` ``HOK005``, ``HOK002``."""
        try:
            descriptor = os.open(name, _FLAGS, dir_fd=self._number)
        except OSError as error:
            raise self._unreadable(str(error.strerror)) from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise self._unreadable("it is not a regular file")
            return entry.read(descriptor, self._what), found
        finally:
            os.close(descriptor)

    def replace(self, name: str, data: bytes, like: os.stat_result) -> None:
        """Put a new file in the place of one, with its mode and owner. Raises `DeliveryError` ``HOK006``.

        Whatever happens the file is the old or the new one. What a killed process leaves behind has a name
        that nobody reads and that the next one removes.
        """
        temporary = f".{name}.cdi-courier"
        if os.fstat(self._number).st_mode & 0o022:
            # Others write there too, as in /tmp, where containerd puts the process of an exec.
            temporary += f".{os.urandom(8).hex()}"
        try:
            _unlink(temporary, self._number)
            _write_new(temporary, data, like, self._number)
            os.rename(temporary, name, src_dir_fd=self._number, dst_dir_fd=self._number)
        except OSError as error:
            _unlink(temporary, self._number)
            raise DeliveryError(
                "HOK006",
                f"{self._what} cannot be replaced: {error.strerror}",
                "is there room where it lies, and is that writable?",
            ) from None

    def _unreadable(self, why: str) -> DeliveryError:
        return DeliveryError(
            "HOK005", f"{self._what} cannot be read: {why}", "a runtime's bundle holds a plain file"
        )


def _write_new(path: str, data: bytes, like: os.stat_result | None, folder: int | None = None) -> None:
    """Write a file that is not there yet, of mode 0600 unless it is to be `like` another.

    Raises `OSError`.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        if like is not None:
            own = os.fstat(descriptor)
            if (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid):
                os.fchown(descriptor, like.st_uid, like.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(like.st_mode))
        entry.write(descriptor, data)
    finally:
        os.close(descriptor)


def _unlink(path: str, folder: int | None = None) -> None:
    try:
        os.unlink(path, dir_fd=folder)
    except OSError:
        return


# --- saying why ----------------------------------------------------------------------------------------


def _tell_caller(call: calls.Call, text: str) -> None:
    """Write a refusal where the runtime would log it: containerd's shim reads the cause from there."""
    path = call.log
    if path.startswith("file:"):  # crun's spelling
        path = path[5:]
    if not path or path.startswith(("/dev/", "journald:", "syslog:")):
        return  # stderr has it already
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if call.log_format == "json":
        line = fastjson.dumps({"level": "error", "msg": f"cdi-courier: {text}", "time": now})
    else:
        message = fastjson.dumps(f"cdi-courier: {text}").decode()
        line = f"time={fastjson.dumps(now).decode()} level=error msg={message}".encode()
    flags = (
        os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    )
    try:
        descriptor = os.open(path, flags, 0o600)
    except (OSError, ValueError):
        return
    try:
        entry.write(descriptor, line + b"\n")
    except OSError:
        pass
    finally:
        os.close(descriptor)
