"""The systemd unit: well-formed, tight, and each of its lines has its reason."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[3] / "packaging/systemd/cdi-courier.service"

_needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine"
)


def lines() -> dict[str, str]:
    """Directive → its last value."""
    pairs = [line.partition("=") for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#"]
    return {name: value for name, _, value in pairs}


@_needs_systemd
def test_the_unit_is_well_formed(tmp_path: Path) -> None:
    """systemd has nothing to remark on it, once its program is there."""
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/usr/bin/cdi-courier", "/bin/true"))
    argv = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)

    assert [line for line in done.stderr.splitlines() if UNIT.name in line] == []


@_needs_systemd
def test_the_unit_may_do_little_beyond_its_work() -> None:
    """systemd's own measure of exposure, from 0 to 10, is 3.0 at most."""
    argv = ["systemd-analyze", "security", "--offline=true", "--threshold=30", "--no-pager", str(UNIT)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Overall exposure level" in done.stdout


@pytest.mark.parametrize(
    ("directive", "value"),
    [
        ("Type", "notify"),
        ("Restart", "always"),
        ("StartLimitIntervalSec", "0"),
        ("RuntimeDirectory", "cdi-courier"),
        ("RuntimeDirectoryPreserve", "yes"),
        ("ProtectSystem", "strict"),
    ],
)
def test_what_the_product_relies_on_is_set(directive: str, value: str) -> None:
    """Code and documents count on these lines."""
    assert lines()[directive] == value


@pytest.mark.parametrize("directive", ["PrivateDevices", "PrivateNetwork", "PrivateUsers", "ProtectProc"])
def test_what_would_break_it_is_not_set(directive: str) -> None:
    """Each of these hides from it what it has to look at: device nodes, listeners, owners, processes."""
    assert directive not in lines()


def test_the_watchdog_waits_longer_than_it_takes_to_tell_stuck_from_busy() -> None:
    """A session may be busy for 10 s and is asked every third of the watchdog's time."""
    import cdi_courier_nri.backend as backend

    assert int(lines()["WatchdogSec"]) * 2 / 3 > backend._STUCK
