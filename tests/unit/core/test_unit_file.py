"""The systemd unit has what the product relies on; what systemd says of it is seen on a real one (e2e)."""

from __future__ import annotations

from pathlib import Path

import pytest

UNIT = Path(__file__).parents[3] / "packaging/systemd/cdi-courier.service"


def lines() -> dict[str, str]:
    """Directive → its last value."""
    pairs = [line.partition("=") for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#"]
    return {name: value for name, _, value in pairs}


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
    from cdi_courier_nri.server import STUCK

    assert int(lines()["WatchdogSec"]) * 2 / 3 > STUCK
