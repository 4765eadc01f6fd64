"""A spec's hooks are run as a runtime runs them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from cdi_courier.errors import DeliveryError
from cdi_courier_oci_hook.live import proxy, syscalls
from cdi_courier_oci_hook.live.namespaces import Namespaces
from support import host

NONE = Namespaces(-1, {})


def run(*hooks: dict[str, Any]) -> None:
    proxy.run(hooks, {"pid": 1}, NONE, "/", time.monotonic() + 20)


def shell(script: str, **more: Any) -> dict[str, Any]:
    return {"hookName": "createRuntime", "path": "/bin/sh", "args": ["sh", "-c", script], **more}


def test_a_hook_ignores_no_signal_that_only_python_ignores(tmp_path: Path) -> None:
    """A pipeline in it ends with its reader, as when the runtime runs it."""
    said = tmp_path / "said"
    run(shell(f"grep SigIgn /proc/self/status > {said}"))

    assert host.ignored(str(said)) == host.ignored()


def test_a_hook_that_is_no_program_fails_in_words() -> None:
    """Its process says why, and does not go on as a copy of the caller's."""
    with pytest.raises(DeliveryError, match=r'HOK218: hook "/nonexistent" .*FileNotFoundError'):
        run({"hookName": "prestart", "path": "/nonexistent"})


@pytest.mark.parametrize("own", [{}, {"pid": -1}], ids=["our PID namespace", "its own"])
def test_a_hook_that_does_not_end_is_ended_in_time(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, int]
) -> None:
    """Whoever waits for it, and with what it has started."""
    monkeypatch.setattr(syscalls, "enter", lambda _: None)
    proc = os.open("/proc/self", os.O_PATH)
    hook = {
        "hookName": "createContainer",
        "path": "/bin/sh",
        "args": ["sh", "-c", "echo here; sleep 600 & wait"],
    }
    begin = time.monotonic()

    with pytest.raises(DeliveryError, match=r"HOK219: .*in time: \"here\""):
        proxy.run([hook], {"pid": 1}, Namespaces(proc, own), "/", begin + 1)
    assert time.monotonic() - begin < 20
    os.close(proc)


def test_who_watches_a_hook_is_not_killed_however_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The caller refuses in time, and the hook is buried by its watcher when that goes on."""
    caller = os.getpid()
    noted = tmp_path / "watcher"

    def stop(name: str) -> None:
        if name == "fork" and os.getpid() != caller:
            noted.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(syscalls, "before", stop)
    monkeypatch.setattr(syscalls, "enter", lambda _: None)
    proc = os.open("/proc/self", os.O_PATH)
    hook = {"hookName": "createContainer", "path": "/bin/sleep", "args": ["sleep", "600"]}

    with pytest.raises(DeliveryError, match="HOK219"):
        proxy.run([hook], {"pid": 1}, Namespaces(proc, {"pid": -1}), "/", time.monotonic() + 0.3)
    watcher = int(noted.read_text())
    os.kill(watcher, signal.SIGCONT)
    _, status = os.waitpid(watcher, 0)
    os.close(proc)

    assert os.waitstatus_to_exitcode(status) == 124
