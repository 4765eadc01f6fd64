"""What a service manager is told."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import AF_UNIX, SOCK_DGRAM, socket

import pytest
from cdi_courier import notify


@pytest.fixture(params=["a path", "an abstract name"])
def told(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[str]]]:
    """A service manager's socket; called, it gives the next message's lines."""
    name = f"{tmp_path}/notify" if request.param == "a path" else f"\0cdi-courier-test-{os.getpid()}"
    with socket(AF_UNIX, SOCK_DGRAM) as manager:
        manager.bind(name)
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
        yield lambda: manager.recv(4096).decode().split("\n")


def test_each_message_has_the_lines_that_systemd_knows(told: Callable[[], list[str]]) -> None:
    """Ready with its status, reloading with the time it began, alive with and without the watchdog's food."""
    before = time.monotonic_ns() // 1000
    notify.ready("one\nline")
    notify.reloading()
    notify.alive("well", fed=True)
    notify.alive("stuck", fed=False)
    notify.stopping()

    assert told() == ["READY=1", "STATUS=one line"]
    reloading, began = told()
    assert reloading == "RELOADING=1"
    assert before <= int(began.removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000
    assert told() == ["STATUS=well", "WATCHDOG=1"]
    assert told() == ["STATUS=stuck"]
    assert told() == ["STOPPING=1"]


def test_the_watchdog_is_fed_without_a_descriptor_left(
    told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has said that it is ready says that it is alive also when it can open nothing any more."""
    notify.ready("well")
    told()
    monkeypatch.setattr(notify.socket, "socket", _no_socket)

    notify.alive("well", fed=True)

    assert told() == ["STATUS=well", "WATCHDOG=1"]


def _no_socket(*_: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("path", ["", "relative", "/nowhere/notify"])
def test_where_nobody_listens_nothing_happens(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A daemon started by hand, or whose manager has gone, goes on."""
    monkeypatch.setenv("NOTIFY_SOCKET", path)

    notify.ready("well")
    notify.alive("well", fed=True)


@pytest.mark.parametrize(
    ("usec", "pid", "interval"),
    [
        ("30000000", None, 30.0),
        ("30000000", "own", 30.0),
        ("30000000", "1", None),
        ("0", None, None),
        ("", None, None),
        ("x", None, None),
    ],
    ids=["set", "for us", "for another", "zero", "unset", "garbage"],
)
def test_the_watchdog_s_interval_is_the_manager_s(
    monkeypatch: pytest.MonkeyPatch, usec: str, pid: str | None, interval: float | None
) -> None:
    """In seconds; none where there is no watchdog, or where it watches another process."""
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    if pid is not None:
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "own" else pid)

    assert notify.watchdog_interval() == interval
