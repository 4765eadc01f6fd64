"""Which way CRI-O can be made to deliver, and whether it does so already. It reads, and changes nothing.

Source: docs/facts.md#cri-o-versions, #cri-o-hooks; what follows is in docs/cri-o.md#which-way.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Final

from cdi_courier import changes
from cdi_courier.errors import CourierError
from cdi_courier.hookspecs import Offer
from cdi_courier.host import listeners
from cdi_courier.host.answers import table
from cdi_courier.host.files import Root
from cdi_courier.host.low_level import is_sandboxed
from cdi_courier.host.model import FIRST_WITH_NRI

from . import NAME, configuration, ways

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cdi_courier.host.model import Runtime
    from cdi_courier.settings import Settings

    from .configuration import Configuration

MODES: Final = ("nri", "handler", "hook")
"""What CRI-O can be made to run, best first."""

VIA: Final[Mapping[str, str]] = {"nri": "nri", "handler": "oci_hook", "hook": "oci_hook"}
"""The backend that really delivers."""

DEFAULT_SOCKET: Final = "/var/run/nri/nri.sock"

_HOOKS_DIRS: Final = ("/usr/share/containers/oci/hooks.d",)
_PRECEDING: Final = (1, 20, 0)
_FIRST_WITH_POD_ANNOTATIONS: Final = (1, 24, 0)

WHAT: Final[Mapping[str, str]] = {
    "nri": "a drop-in turns NRI on",
    "handler": "a drop-in registers the runtime wrapper as a handler",
    "hook": "a hook injects into the created container",
}


def offer(runtime: Runtime, settings: Settings) -> Offer:
    """The best way that this CRI-O has, or the one that ``[cri_o_drop_in] mode`` demands."""
    mode, reasons = choose(runtime, settings)
    if mode == "":
        return _impossible("; ".join(dict.fromkeys(reasons.values())))
    if mode == "nri" and runtime.get("nri") == "on":
        if not os.path.lexists(drop_in_of(settings)) and not _is_installed(runtime):
            return _impossible("NRI is on already; there is nothing to arrange")
        return _ready("nri", "NRI is on", runtime, settings)
    if mode == "handler":
        missing = missing_of_handler(runtime, settings)
        if not missing:
            return _ready(mode, f"handler {settings.oci_hook.handler} is in effect", runtime, settings)
        why = reasons.get("nri", "") if settings.cri_o_drop_in.mode == "auto" else ""
        return Offer(NAME, "full", "restart", _because(missing, why), VIA[mode])
    if mode == "hook":
        if hooks_of(runtime):
            return Offer(NAME, "partial", "nothing", "its createRuntime hook is installed", VIA[mode])
        return Offer(NAME, "partial", "install", WHAT[mode], VIA[mode])
    return Offer(NAME, "full", "restart", WHAT[mode], VIA[mode])


def choose(runtime: Runtime, settings: Settings, *, restart: bool = True) -> tuple[str, Mapping[str, str]]:
    """The mode to use, ``""`` if none can be; and for those that cannot, why.

    restart: whether the way may need one.
    """
    wanted = settings.cri_o_drop_in.mode
    reasons: dict[str, str] = {}
    if wanted == "auto" and runtime.get("nri") != "on" and not missing_of_handler(runtime, settings):
        return "handler", reasons  # it delivers everything, too
    for mode in MODES if wanted == "auto" else (wanted,):
        why = _obstacle(mode, runtime, settings, restart=restart)
        if not why:
            return mode, reasons
        reasons[mode] = f'[cri_o_drop_in] mode = "{wanted}", but {why}' if wanted != "auto" else why
    return "", reasons


def missing_of_handler(runtime: Runtime, settings: Settings) -> str:
    """What keeps the wrapper's handler from being in effect; ``""`` if nothing does."""
    name = settings.oci_hook.handler
    path = runtime.get("handlers", {}).get(name, {}).get("path", "")
    default = settings.oci_hook.handler_mode == "default"
    if not ways.is_gate(settings, path):
        return WHAT["handler"]
    if not os.access(path, os.X_OK):
        return f"the wrapper {path}, which CRI-O is to run, is missing"
    if default and runtime.get("default_handler") != name:
        return f"handler {name} is registered, but {runtime.get('default_handler')} is the default"
    pid = runtime.get("pid")
    if pid is not None and is_older(pid, drop_in_of(settings)):
        # A reload shows handlers everywhere and makes none effective.
        return f"CRI-O (process {pid}) has not been restarted since the drop-in was written"
    return ""


def is_older(pid: int, path: str) -> bool:
    """Whether the process has started before the file last changed; False where that cannot be told."""
    try:
        changed = os.stat(path).st_mtime
        with open(f"/proc/{pid}/stat", "rb") as file:
            # Behind the name, which may hold anything but ends with the last parenthesis: proc(5).
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return False
    # The kernel rounds down, so that what has started since may look a tick older.
    started = (ticks + 1) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started > time.time() - changed


def hooks_of(runtime: Runtime) -> Sequence[str]:
    """Where our createRuntime hook lies, of the directories that CRI-O watches."""
    paths = map(ways.hook_in, hooks_dirs(runtime))
    return [path for path in dict.fromkeys(paths) if os.path.isfile(path)]


def drop_in_of(settings: Settings) -> str:
    """Where our drop-in lies, or would."""
    return os.path.join(settings.cri_o_drop_in.config_dir, configuration.DROP_IN)


def hooks_dirs(runtime: Runtime) -> Sequence[str]:
    """The directories that this CRI-O watches, as far as is known."""
    found: Sequence[str] = runtime.get("hooks_dirs", _HOOKS_DIRS)
    return found


def nri_socket(runtime: Runtime) -> str:
    """Where this CRI-O listens for plugins, or will."""
    path: str = runtime.get("nri_socket", DEFAULT_SOCKET)
    return path


def _obstacle(mode: str, runtime: Runtime, settings: Settings, *, restart: bool) -> str:
    version = runtime.version_tuple
    named = f"CRI-O {runtime.version}" if runtime.version else "CRI-O of unknown version"
    if version is not None and version < _PRECEDING:
        return f"{named} is not supported"
    if version is None and settings.cri_o_drop_in.mode == "auto":
        return f"{named} could be of any age; [cri_o_drop_in] mode says what to set up in spite of that"
    if mode != "hook" and not restart:
        return "it needs a restart, which is not allowed"
    if mode == "nri":
        return _obstacle_to_nri(runtime, settings, named, version)
    if mode == "handler":
        if version is not None and version < _FIRST_WITH_POD_ANNOTATIONS:
            return f"{named} does not hand pod annotations to a runtime"
        default = runtime.get("handlers", {}).get(runtime.get("default_handler", ""), {})
        if default.get("type", "oci") not in ("", "oci"):
            return f"the default handler is of type {default['type']}, which a wrapper cannot serve"
        if is_sandboxed(default.get("path", "")):
            return f"the default handler runs {default['path']}, which does not work as runc does"
        return ""
    if not hooks_dirs(runtime):
        return "CRI-O watches no directory for hooks"
    return ""


def _obstacle_to_nri(
    runtime: Runtime, settings: Settings, named: str, version: tuple[int, int, int] | None
) -> str:
    if runtime.get("nri") == "absent" or (version is not None and version < FIRST_WITH_NRI["cri-o"]):
        return f"{named} has no NRI"
    if "nri" in settings.backends.disabled:
        return "backend nri is disabled"
    if not ways.has_nri():
        return "backend nri is not installed"
    if runtime.get("nri_connections") is False:
        return "NRI lets in only plugins that CRI-O launches (nri_disable_connections)"
    if runtime.get("nri") != "on" and listeners.anybody_listens(Root(), nri_socket(runtime)):
        # NRI removes the file that is there and listens itself: the other's plugins would be cut off.
        return f"another runtime listens at {nri_socket(runtime)}; give CRI-O another nri_listen"
    return ""


def _ready(mode: str, what: str, runtime: Runtime, settings: Settings) -> Offer:
    stale = [problem for problem in runtime.problems if problem.startswith("HST106")]
    if mode == "nri" and stale:
        return Offer(NAME, "full", "restart", stale[0], VIA[mode])
    return Offer(NAME, "full", "nothing", what, VIA[mode], _warning(mode, runtime, settings))


def _warning(mode: str, runtime: Runtime, settings: Settings) -> str:
    """What will end it at CRI-O's next restart."""
    drop_in, end = drop_in_of(settings), "so that it ends when CRI-O is restarted"
    if not os.path.lexists(drop_in):
        return f"{drop_in} is gone, {end}; cdi-courier install --backend {NAME} writes it again"
    try:
        for path, what in overriding(configuration.from_files(runtime, settings), mode, settings):
            return f"{path} sets {what}, and CRI-O reads it after {drop_in}, {end}"
    except CourierError as error:
        return error.message
    return ""


def overriding(found: Configuration, mode: str, settings: Settings) -> Iterator[tuple[str, str]]:
    """What CRI-O reads after our drop-in and would take instead: (file, the key)."""
    name, default = settings.oci_hook.handler, settings.oci_hook.handler_mode == "default"
    for file in found.later:
        runtime, nri = table(file.document, "crio", "runtime"), table(file.document, "crio", "nri")
        if mode == "nri" and nri.get("enable_nri", True) is not True:
            yield file.path, "[crio.nri] enable_nri"
        if mode == "handler" and default and runtime.get("default_runtime", name) != name:
            yield file.path, "[crio.runtime] default_runtime"
        if mode == "handler" and name in configuration.handlers_of(file.document):
            yield file.path, f"[crio.runtime.runtimes.{name}]"


def _is_installed(runtime: Runtime) -> bool:
    with contextlib.suppress(CourierError):
        return any((m.backend, m.runtime) == (NAME, runtime.key) for m in changes.installed(changes.FOLDER))
    return False


def _because(what: str, why: str) -> str:
    return f"{what} ({why})" if why else what


def _impossible(reason: str) -> Offer:
    return Offer(NAME, "partial", "impossible", reason)
