"""``cdi-courier compile``: what it writes, prints and says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cdi_courier import table

SPEC = """\
cdiVersion: 0.5.0
kind: v.com/c
devices: [{name: a, containerEdits: {env: [A=1]}}]
"""


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """Settings with one device, whose table would lie in ``tmp_path/state``."""
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi/v.yaml").write_text(SPEC)
    path = tmp_path / "config.toml"
    path.write_text(
        f"cdi.dirs = ['{tmp_path}/cdi']\ncdi.trust = 'any'\nservice.state_dir = '{tmp_path}/state'\n"
    )
    return path


def courier(settings: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "cdi_courier", "--config", str(settings), "compile", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.skipif(table.outer_uid() is not None, reason="in a user namespace the table lies elsewhere")
def test_the_table_is_written_and_trusted(settings: Path) -> None:
    """Readers get it from where they look; the message says where that is."""
    done = courier(settings)

    path = settings.parent / "state/table.json"
    known = table.read(str(path), str(settings))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"wrote {path}: 1 devices\n"
    assert known is not None
    assert known.resolve(["v.com/c=a"]) == {"env": ["A=1"]}


def test_print_writes_nothing(settings: Path) -> None:
    """The table on stdout is what would be written."""
    done = courier(settings, "--print")

    assert done.returncode == 0
    assert json.loads(done.stdout)["format"] == table.FORMAT
    assert list(json.loads(done.stdout)["devices"]) == ["v.com/c=a"]
    assert not (settings.parent / "state").exists()


def test_a_place_that_cannot_be_written_is_named(settings: Path) -> None:
    """With the code, exit status 1, and no traceback."""
    (settings.parent / "state").touch()

    done = courier(settings)

    assert done.returncode == 1
    assert done.stderr.startswith(f'cdi-courier: HOK001: the table, "{settings.parent}/state/table.json", ')


def test_patterns_that_cannot_be_written_are_named(settings: Path) -> None:
    """Not the table, which has been written by then."""
    gates = settings.parent / "gates"
    (gates / "patterns").mkdir(parents=True)
    settings.write_text(f"{settings.read_text()}oci_hook.gate_dir = '{gates}'\n")

    done = courier(settings)

    assert done.returncode == 1
    assert done.stdout == f"wrote {settings.parent}/state/table.json: 1 devices\n"
    assert f'"{gates}/patterns", cannot be written: Is a directory' in done.stderr
    assert "gate_dir" in done.stderr


def test_wrong_settings_make_no_table(settings: Path) -> None:
    """What is wrong is said as by every command, with exit status 2."""
    settings.write_text("[nonsense]\n")

    done = courier(settings)

    assert done.returncode == 2
    assert "SET003" in done.stderr
