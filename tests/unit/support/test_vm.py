"""A machine of which the emulator fails the kernel is started a second time, and no third."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import vm


class Machine(vm.VM):
    """Panics so often at its start; makes no disk and runs nothing."""

    def __init__(self, folder: Path, panics: int) -> None:
        self._folder = folder
        self._channel = self._process = None
        self.panics = panics
        self.starts = 0

    def _make_disk(self) -> None:
        pass

    def _boot(self, _: float) -> None:
        self.starts += 1
        if self.starts <= self.panics:
            (self._folder / "console").write_text("Kernel panic - not syncing")
            raise vm.KernelPanicError("the machine's kernel gave up")


@pytest.fixture(autouse=True)
def _nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr(vm.rootfs, "root", nothing)
    monkeypatch.setattr(vm.host, "orphans", lambda _: ())
    monkeypatch.setattr(vm.host, "new_folder", lambda _: tmp_path)
    monkeypatch.setattr(vm.VM, "_packages", None, raising=False)


@pytest.mark.parametrize(("panics", "starts"), [(0, 1), (1, 2)], ids=["none", "one"])
def test_one_panic_at_the_start_is_forgiven(tmp_path: Path, panics: int, starts: int) -> None:
    """The second start begins with an empty console."""
    machine = Machine(tmp_path, panics)
    machine.start()

    assert machine.starts == starts
    assert not (tmp_path / "console").exists()


def test_a_second_panic_is_a_failure(tmp_path: Path) -> None:
    """It is told, and nothing is tried any more."""
    machine = Machine(tmp_path, 2)
    with pytest.raises(vm.KernelPanicError):
        machine.start()

    assert machine.starts == 2
