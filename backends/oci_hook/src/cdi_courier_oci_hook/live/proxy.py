"""Runs the hooks of a CDI spec in the runtime's place, which has read its own list already. Light module.

A hook of stage prestart or createRuntime runs in the host's namespaces, one of stage createContainer in the
container's, before the root is changed: it sees the host's paths. Each gets the state on stdin, and the
environment that its spec names and nothing else. Its output goes to a file in memory, not to our stdout or
stderr: runtimes wait until whoever inherited those has closed them.
Source: docs/facts.md#hook-stages, #proxied-hooks.
"""

from __future__ import annotations

import os
import time

from cdi_courier import fastjson
from cdi_courier.errors import DeliveryError, quoted

from cdi_courier_oci_hook import program

from . import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

    from .namespaces import Namespaces

    Json = dict[str, Any]

STAGES = ("prestart", "createRuntime", "createContainer")
"""The stages that can be run by proxy, in the order in which a runtime runs them."""

_INSIDE = ("cgroup", "ipc", "uts", "net", "pid", "mnt")
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
_SIGKILL = 9
_TOLD = 2000  # bytes of a hook's last words that go into the error
_CANNOT_RUN = 127
_TOO_LATE = 124
_GRACE = 0.5  # seconds for who watches a hook to kill and bury it; the caller has not many more


def run(hooks: Sequence[Json], state: Json, spaces: Namespaces, root: str, deadline: float) -> None:
    """Run those of `STAGES`, one after the other.

    hooks: CDI hooks. state: the OCI state of the container. root: path of the container's root in its
    mount namespace. deadline: a `time.monotonic` by which all must have ended.
    Raises `DeliveryError`: ``HOK218`` one failed, ``HOK219`` one did not end in time.
    """
    for stage in STAGES:
        for hook in hooks:
            if hook["hookName"] == stage:
                _run(hook, state, spaces if stage == "createContainer" else None, root, deadline)


def _run(hook: Json, state: Json, spaces: Namespaces | None, root: str, deadline: float) -> None:
    # In its own PID namespace the process has another number.
    seen = state if spaces is None else {**state, "pid": spaces.inner_pid()}
    timeout = hook.get("timeout")
    if timeout is not None:
        deadline = min(deadline, time.monotonic() + timeout)
    opened: list[int] = []
    try:
        opened.append(_file("state", fastjson.dumps(seen)))
        opened.append(_file("output", b""))
        opened += syscalls.pipe()
        stdin, output, gone, _ = opened
        child = syscalls.fork()
        if child == 0:
            os.close(opened[3])
            _be(hook, spaces, root, stdin, output, gone, deadline)
        if spaces is not None and "pid" in spaces.own:
            # It watches the hook, by the same deadline, and must not be killed: see `_watch`.
            status = syscalls.wait(child, deadline + _GRACE - time.monotonic())
        else:
            status = _wait(child, deadline)
        words = _words(output)
    except OSError as error:
        raise _failed(hook, f"cannot be run: {error.strerror}") from None
    finally:
        for descriptor in opened:
            os.close(descriptor)
    if status is None or (status == _TOO_LATE and time.monotonic() >= deadline):
        raise DeliveryError(
            "HOK219",
            f"hook {quoted(hook['path'])} of the CDI spec did not end in time{words}",
            "what does it wait for? [oci_hook] timeout is the time for all hooks of a container",
        )
    if status:
        how = f"was ended by signal {-status}" if status < 0 else f"exited with {status}"
        raise _failed(hook, f"{how}{words}")


def _wait(child: int, deadline: float, until: int = -1) -> int | None:
    """A child's exit status; None if it, and all of its process group, had to be killed. until: as `wait`."""
    try:
        status = syscalls.wait(child, deadline - time.monotonic(), until)
    except OSError:
        status = None
    if status is None:
        _kill(child)
        os.waitpid(child, 0)
    return status


def _kill(child: int) -> None:
    for kill, who in ((os.killpg, child), (os.kill, child)):
        try:
            kill(who, _SIGKILL)
        except OSError:
            continue  # it has ended, or has no group of its own yet


def _be(
    hook: Json, spaces: Namespaces | None, root: str, stdin: int, output: int, gone: int, deadline: float
) -> NoReturn:
    """Become the hook, or who watches it. gone: a pipe's end that tells when the caller has been killed."""
    status = _CANNOT_RUN
    try:
        for descriptor, number in ((stdin, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, number)
        if spaces is None:
            _become(hook)
        spaces.enter(_INSIDE)
        # Before the user namespace, whose root may not look into the folders that it lies in.
        syscalls.go_to(root)
        if spaces.user is not None:
            spaces.enter(("user",))
            syscalls.become_root()
        if "pid" not in spaces.own:
            _become(hook)
        status = _watch(hook, gone, deadline)
    except BaseException as error:  # noqa: BLE001 - this process is a copy of the caller's and must end here
        os.write(2, f"{type(error).__name__}: {error}".encode(errors="backslashreplace"))
    finally:
        os._exit(status)


def _watch(hook: Json, gone: int, deadline: float) -> int:
    """Run the hook in the PID namespace, in which only a child is, and return its exit status.

    This process has to bury the hook whatever happens, or the PID namespace could not end: runc, who would
    inherit the dead hook, waits for that end first. So it must not be killed, not even with the caller.
    """
    child = syscalls.fork()
    if child == 0:
        _become(hook)
    ended = _wait(child, deadline, gone)
    if ended is None:
        return _TOO_LATE
    return ended if ended >= 0 else 128 - ended


def _become(hook: Json) -> NoReturn:
    try:
        os.setsid()
        # Should the caller be killed, for it took too long, nobody is left behind.
        syscalls.die_with_parent()
        env = hook.get("env") or []
        environment = dict(item.split("=", 1) for item in env if "=" in item) if env else _ENVIRONMENT
        argv = hook.get("args") or [hook["path"]]
        program.become(hook["path"], argv, environment)
    except BaseException as error:  # noqa: BLE001 - as in `_be`
        os.write(2, f"{type(error).__name__}: {error}".encode(errors="backslashreplace"))
    finally:
        os._exit(_CANNOT_RUN)


def _file(name: str, data: bytes) -> int:
    descriptor = syscalls.memory_file(name)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _words(output: int) -> str:
    """The last words of a hook, for an error message."""
    size = os.fstat(output).st_size
    text = os.pread(output, _TOLD, max(0, size - _TOLD)).decode(errors="replace").strip()
    return f": {quoted(text, _TOLD)}" if text else ""


def _failed(hook: Json, why: str) -> DeliveryError:
    return DeliveryError(
        "HOK218",
        f"hook {quoted(hook['path'])} of the CDI spec {why}",
        "run it by hand with the container's state on its standard input",
    )
