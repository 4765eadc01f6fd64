"""The server of all NRI sockets: what is done first at a start."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from cdi_courier import locks
from cdi_courier.cdi.registry import Registry
from cdi_courier.dialects import cdi_courier_dialects
from cdi_courier.hookspecs import ServeContext
from cdi_courier.injector import Injector
from cdi_courier.settings import load
from cdi_courier_nri import server
from support.nri_runtime import NriRuntime
from support.waiting import wait_for


def test_spec_files_are_read_beside_a_session_and_not_before_it(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To be registered comes first; then the first container need not wait for the files."""
    monkeypatch.setattr(locks, "socket_locks", lambda: str(tmp_path / "locks"))
    monkeypatch.setattr(server, "_ALONE", 3600.0)
    (tmp_path / "config.toml").write_text(f'cdi.dirs = ["{tmp_path}/cdi"]\nnri.sockets = ["{path}"]\n')
    settings = load([tmp_path / "config.toml"])
    registry = Registry(settings.cdi.dirs)
    serving = server.Server(ServeContext(settings, Injector(settings, registry, cdi_courier_dialects())))
    thread = threading.Thread(target=serving.run)
    thread.start()
    try:
        wait_for(lambda: serving.status()[path]["cause"], 10, "the session to look for its socket")
        assert registry.current() is None
        with NriRuntime(path) as runtime:
            runtime.plugin()
            wait_for(lambda: registry.current() is not None, 10, "the files to be read")
    finally:
        serving.stop()
        thread.join()
