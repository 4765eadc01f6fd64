"""The drop-ins for CRI-Os as they are found, each beside what it was made for; for trying on a real crio too.

``golden/CASE`` holds ``/etc/crio`` (crio.conf, crio.conf.d), what ``GET /config`` says then (live.toml) and
the drop-in (expected.conf). To write the last anew: CDI_COURIER_TEST_GOLDEN=write.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from cdi_courier_cri_o import configuration

from .conftest import GATE, Site

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())

each_case = pytest.mark.parametrize("case", CASES)


def load(site: Site, case: str) -> dict[str, Any]:
    """Make the site what the case says, and return that."""
    folder = GOLDEN / case
    told = tomllib.loads((folder / "case.toml").read_text())
    site.version = told["version"]
    site.live = (folder / "live.toml").read_text()
    if (folder / "crio.conf").exists():
        shutil.copyfile(folder / "crio.conf", site.main)
    if (folder / "crio.conf.d").exists():
        shutil.copytree(folder / "crio.conf.d", site.folder, dirs_exist_ok=True)
    site.told(
        cri_o_drop_in={"mode": told["mode"]},
        oci_hook={
            "handler_mode": told.get("handler_mode", "default"),
            "gate_dir": os.path.dirname(GATE),
        },
    )
    return told


@each_case
def test_the_drop_in_is_the_golden_one(site: Site, case: str) -> None:
    """To the last byte; a change shows in the review of the file."""
    load(site, case)
    content = site.plan().files[-1].content
    assert content is not None
    expected = GOLDEN / case / "expected.conf"
    if os.environ.get("CDI_COURIER_TEST_GOLDEN") == "write":
        expected.write_bytes(content)

    assert content.decode() == expected.read_text()


@each_case
def test_nothing_but_what_is_meant_changes(site: Site, case: str) -> None:
    """CRI-O's merge of its files with the drop-in differs from that without in our keys alone."""
    load(site, case)
    found = configuration.from_files(site.runtime(), site.settings)
    drop_in = tomllib.loads((GOLDEN / case / "expected.conf").read_text())
    files = {file.path: file.document for file in found.files} | {found.drop_in: drop_in}
    order = [path for path in files if path == found.main] + sorted(
        path for path in files if path != found.main
    )
    after, before = configuration.merged(files[path] for path in order), found.stored

    ours = after["crio"].get("runtime", {}).get("runtimes", {}).pop("cdi-courier", None)
    runtime = after["crio"].get("runtime", {})
    if ours is None:
        assert after["crio"]["nri"].pop("enable_nri") is True
        before["crio"].get("nri", {}).pop("enable_nri", None)
        before["crio"].setdefault("nri", {})
    else:
        if runtime["default_runtime"] == "cdi-courier":
            del runtime["default_runtime"]
            before["crio"].setdefault("runtime", {}).pop("default_runtime", None)
        before["crio"].setdefault("runtime", {}).setdefault("runtimes", {})
    assert after == before


@each_case
def test_a_handler_is_the_default_one_but_for_its_program(site: Site, case: str) -> None:
    """Everything that the live default handler has is there, with the gate in front of its program."""
    load(site, case)
    live = tomllib.loads(site.live or "")["crio"]["runtime"]
    ours = (
        tomllib.loads((GOLDEN / case / "expected.conf").read_text())["crio"]
        .get("runtime", {})
        .get("runtimes", {})
        .get("cdi-courier")
    )
    if ours is None:
        return
    base = live["runtimes"][live["default_runtime"]]

    assert ours.pop("runtime_path") == GATE
    assert ours == {
        key: value for key, value in base.items() if key not in ("runtime_path", "inherit_default_runtime")
    }
    assert ours["runtime_root"] == base["runtime_root"]
