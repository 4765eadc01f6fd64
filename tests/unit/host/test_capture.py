"""What is captured from a runtime is what tests answer with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cdi_courier.host import containerd
from cdi_courier.host.files import Root
from support import fake_crio
from support.capture import capture


def test_answers_of_containerd_are_captured_as_they_were(root: Path, tmp_path: Path, data: Path) -> None:
    """A capture of a runtime that answers from a capture answers the same once more."""
    path = root / "run/c.sock"
    with fake_crio.containerd(path, data, "2.1.9", "nri-on"):
        written = capture(str(path), "nri-on", tmp_path)
        first = containerd.introspect(Root("/"), str(path), 5.0)
    with fake_crio.containerd(path, tmp_path, "2.1.9", "nri-on"):
        second = containerd.introspect(Root("/"), str(path), 5.0)

    assert [file.name for file in written] == [
        "containerd-2.1.9-version.json",
        "containerd-2.1.9-status-verbose-nri-on.json",
        "containerd-2.1.9-introspection-nri-on.json",
    ]
    assert second == first
    told, kept = (json.loads((f / written[1].name).read_text())["info"] for f in (tmp_path, data))
    assert told == kept


@pytest.mark.parametrize("variant", ["nri-on", "nri-off"])
def test_answers_of_cri_o_are_captured_as_they_were(
    root: Path, tmp_path: Path, data: Path, variant: str
) -> None:
    """With the configuration in force, which tells of NRI and which no message of CRI has."""
    path = root / "run/crio.sock"
    with fake_crio.crio(path, data, variant=variant):
        written = capture(str(path), variant, tmp_path)

    assert [file.name.removeprefix("crio-1.36.3-") for file in written] == [
        "version.json",
        f"status-verbose-{variant}.json",
        f"http-config-{variant}.toml",
        "http-info.json",
    ]
    assert (tmp_path / written[2].name).read_text() == (data / written[2].name).read_text()
