"""The probe: one registration, and what the runtime says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from cdi_courier.errors import CourierError
from cdi_courier_nri.probe import probe
from support.nri_runtime import (
    GARBAGE,
    VERSIONS,
    Fault,
    Habits,
    NriRuntime,
    closes,
    falls_silent,
    refuses,
    sends,
)


@pytest.mark.parametrize("habits", VERSIONS, ids=str)
def test_every_runtime_introduces_itself(path: str, habits: Habits) -> None:
    """Name and version are told; the probe is gone before it is asked about any container."""
    with NriRuntime(path, habits) as runtime:
        words = probe(path, 10)

        assert words.startswith(f"{habits.runtime_name} {habits.runtime_version} speaks ")
        assert runtime.active() == []


def test_a_socket_that_is_not_there_is_told(tmp_path: Path) -> None:
    """Nobody to ask is an error in words."""
    with pytest.raises(CourierError) as caught:
        probe(str(tmp_path / "none"), 1)

    assert caught.value.code == "NRI005"
    assert "No such file" in caught.value.message


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("accepted", falls_silent), "NRI009"),
        (Fault("registered", falls_silent), "NRI009"),
        (Fault("accepted", sends(GARBAGE)), "NRI006"),
        (Fault("registering", refuses), "NRI008"),
        (Fault("accepted", closes), "NRI010"),
        (Fault("registering", closes), "NRI010"),
    ],
    ids=["silent", "silent later", "garbage", "refused", "closed", "closed later"],
)
def test_a_runtime_that_does_not_introduce_itself_is_told(path: str, fault: Fault, code: str) -> None:
    """Silence, garbage, a refusal and an end are each an error in words, in time."""
    with NriRuntime(path, faults=[fault]), pytest.raises(CourierError) as caught:
        probe(path, 0.3)

    assert caught.value.code == code
