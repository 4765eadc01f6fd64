"""A daemon without anything to run is no failed service."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
from cdi_courier import service
from cdi_courier.errors import PluginError
from cdi_courier.host.model import Host
from cdi_courier.plugins import Plugins, discover
from cdi_courier.settings import Settings
from support.waiting import wait_for


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of a daemon that finds no backend and no runtime."""
    alone = Plugins({}, dialects=discover((), ()).dialects)
    monkeypatch.setattr(service, "discover", lambda _: alone)
    monkeypatch.setattr("cdi_courier.host.describe.describe", lambda _: Host(()))
    default = Settings()
    return attrs.evolve(default, service=attrs.evolve(default.service, state_dir=str(tmp_path / "state")))


def test_without_a_backend_the_daemon_waits_to_be_stopped(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """The package of a backend may be removed, or come later: it says so once and ends well when told to."""
    caplog.set_level(logging.WARNING)
    socket = Path(settings.service.state_dir) / "status.sock"

    def stop() -> None:
        try:
            wait_for(socket.exists, 10, "the daemon to answer")
        finally:
            # Only to the daemon's own handler: without it this would end the test run.
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        code = service.run(settings)
    finally:
        stopper.join()

    assert code == 0
    assert [r.message[:7] for r in caplog.records if r.levelno >= logging.WARNING] == ["PLG004:"]


def test_a_backend_that_was_asked_for_must_be_there(settings: Settings) -> None:
    """What is named and missing is an error, for waiting would hide it."""
    with pytest.raises(PluginError) as raised:
        service.run(settings, "nri")

    assert raised.value.code == "PLG003"


@pytest.mark.parametrize("alone", [3600.0, 0.0], ids=["before", "after"])
def test_the_host_is_described_when_the_sessions_had_their_moment(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, alone: float
) -> None:
    """Not before, whatever may be wrong with reports; and to end does not wait for it."""
    described = threading.Event()
    monkeypatch.setattr(service, "_ALONE", alone)

    def describe(_: Settings) -> Host:
        described.set()
        return Host(())

    def broken() -> None:
        raise ValueError

    monkeypatch.setattr("cdi_courier.host.describe.describe", describe)
    monkeypatch.setattr(service, "_prepare_reports", broken)
    attend = service._attend

    def attended(*arguments: Any) -> None:
        if not alone:
            assert described.wait(10)
        arguments[1].put("stop")
        attend(*arguments)

    monkeypatch.setattr(service, "_attend", attended)

    assert service.run(settings) == 0
    assert described.is_set() is (alone == 0.0)
