"""The demo: it shows what it promises, and nothing stays behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import host
from support.packages import Packages
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

REPOSITORY = Path(__file__).resolve().parents[2]
LOCKS = Path("/run/cdi-courier")
TIMEOUT = 360.0  # seconds; with an empty cache it downloads the runtime


class Demo:
    """The demo as a child process, as if no terminal were there; its output lies in a file."""

    def __init__(self, output: Path) -> None:
        self.output = output
        inherited = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "demo"],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=inherited,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text()

    def wait_for_line(self, wanted: str) -> None:
        def shown() -> bool:
            ended = self.process.poll() is not None
            if wanted in self.text():
                return True
            assert not ended, self.text()
            return False

        wait_for(shown, TIMEOUT, lambda: f"{wanted!r} in\n{self.text()}")

    def end(self) -> None:
        """Let it tidy up even when the test failed."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(TIMEOUT)


@pytest.fixture
def demo(packages: Packages, tmp_path: Path) -> Iterator[Demo]:
    """The demo, just started; it takes its packages from the same cache as the tests."""
    running = Demo(tmp_path / "output")
    yield running
    running.end()


def left_of(root: Path) -> list[str]:
    """What is on the host of a demo whose lab was in this folder, in words."""
    left = [f"process {pid}" for pid in host.processes_of(root)]
    left += [line for line in Path("/proc/mounts").read_text().splitlines() if str(root) in line]
    left += [f"cgroup {path}" for path in host.cgroups(f"/{root.name}")]
    left += [f"folder {path}" for path in (root,) if path.exists()]
    return left


def locks_of(text: str) -> list[str]:
    """What lies in the daemons' folder and names the demo's daemon; the folder itself if nothing is in it."""
    line = next(line for line in text.splitlines() if "is connected to the runtime" in line)
    files = [path for path in LOCKS.rglob("*") if path.is_file()]
    pid = line.rpartition(" ")[2]
    if LOCKS.exists() and not files:
        return [str(LOCKS)]
    return [str(path) for path in files if path.read_text().strip() == pid]


def root_of(text: str) -> Path:
    """The lab's folder, which the demo names."""
    line = next(line for line in text.splitlines() if "everything lies in " in line)
    return Path(line.rpartition(" ")[2])


def test_the_demo_shows_device_env_mount_and_refusal(demo: Demo) -> None:
    """It succeeds, three pods stand side by side, and afterwards nothing is left."""
    rc = demo.process.wait(TIMEOUT)
    text = demo.text()
    rows = {line[:22].strip(): line[22:].split("  ") for line in text.splitlines()}
    cells = {name: [cell.strip() for cell in row if cell.strip()] for name, row in rows.items()}

    assert rc == 0, text
    assert cells["container"] == ["running", "running", "refused"]
    assert cells["/dev/nvidia-demo"] == ["char 1:3", "none", "-"]
    assert cells["a write to it"] == ["works", "none", "-"]
    assert cells["env NVIDIA_DEMO"] == ["granted", "none", "-"]
    assert cells["file /etc/nvidia-demo"] == ["from the host", "none", "-"]
    assert "POL001" in text
    assert '[[policy.rules]]\naction = "allow"\nnamespaces = ["default"]\n' in text
    assert left_of(root_of(text)) == []
    assert locks_of(text) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("line", ["* starting cdi-courier run", "* creating the plain pod"])
def test_an_interrupted_demo_leaves_nothing(demo: Demo, number: signal.Signals, line: str) -> None:
    """A signal in the middle ends it with 130, and no process, mount, cgroup or file of it is there."""
    demo.wait_for_line(line)
    demo.process.send_signal(number)
    rc = demo.process.wait(TIMEOUT)
    text = demo.text()

    assert rc == 130, text
    assert "interrupted" in text
    assert "Traceback" not in text
    assert left_of(root_of(text)) == []
    assert locks_of(text) == []
