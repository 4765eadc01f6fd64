"""Spec directories and an OCI config in, the reference's registry and config out."""

from __future__ import annotations

import copy
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from cdi_courier.cdi.edits import edits_to_dict
from cdi_courier.cdi.registry import Registry
from cdi_courier.cdi.snapshot import Snapshot
from cdi_courier.errors import CdiError
from cdi_courier.names import split_kind
from cdi_courier.oci import apply_edits
from conformance.golden import cases, without_empty


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder @NODES@ of data/README.md."""
    folder = tmp_path_factory.mktemp("nodes")
    try:
        _make_node(folder / "blk", stat.S_IFBLK | 0o1600, os.makedev(7, 99))
        _make_node(folder / "chr", stat.S_IFCHR | 0o660, os.makedev(1, 3))
        _make_node(folder / "chr0", stat.S_IFCHR | 0o644, os.makedev(0, 5))
        os.chown(folder / "chr", 123, 456)
    except PermissionError:
        if os.environ.get("CI"):
            raise
        pytest.skip("making device nodes needs root and CAP_MKNOD")
    _make_node(folder / "fifo", stat.S_IFIFO | 0o640, 0)
    (folder / "lnk").symlink_to("chr")
    (folder / "dangling").symlink_to("missing")
    (folder / "reg").touch()
    return folder


def _make_node(path: Path, mode: int, device: int) -> None:
    os.mknod(path, mode, device)
    path.chmod(stat.S_IMODE(mode))  # whatever the umask is


@pytest.mark.parametrize("case", cases("inject"))
def test_injection_does_what_the_reference_does(case: dict[str, Any], nodes: Path, tmp_path: Path) -> None:
    """Registry, unresolved names and edited config are the reference's; after an error nothing is edited."""
    places = {"@NODES@": nodes, "@DIR0@": tmp_path / "dir0", "@DIR1@": tmp_path / "dir1"}
    case = json.loads(_replaced(json.dumps(case), places))
    for directory in case["dirs"]:
        Path(directory).mkdir()
    for path, text in case["files"].items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text(text, "utf-8")
    registry = Registry(case["dirs"])

    results = [_inject(registry.snapshot(), case["devices"], case["oci"]) for _ in range(case["repeat"])]

    wanted = case["head"]
    assert results == [
        {
            "failed": result["err"] is not None,
            "unresolved": result["unresolved"],
            "oci": without_empty(case["oci"] if result["err"] else result["oci"]),
        }
        for result in wanted["results"]
    ]
    assert _described(registry.snapshot()) == {
        "errors": {path: len(errors) for path, errors in wanted["errors"].items()},
        "devices": wanted["devices"] or [],
        "vendors": wanted["vendors"] or [],
        "classes": wanted["classes"] or [],
        "devicePaths": wanted["devicePaths"],
        "vendorSpecs": wanted["vendorSpecs"],
    }


def _replaced(text: str, places: dict[str, Path]) -> str:
    for name, path in places.items():
        text = text.replace(name, str(path))
    return text


def _inject(snapshot: Snapshot, names: list[str], config: dict[str, Any]) -> dict[str, Any]:
    unresolved = [name for name in names if name not in snapshot.devices]
    before = copy.deepcopy(config)
    edited = config
    failed = False
    try:
        edited = apply_edits(config, edits_to_dict(snapshot.resolve(names).edits))
    except CdiError:
        failed = True
    assert config == before
    return {"failed": failed, "unresolved": unresolved or None, "oci": without_empty(edited)}


def _described(snapshot: Snapshot) -> dict[str, Any]:
    kinds = [(split_kind(file.spec.kind), file.path) for file in snapshot.specs]
    vendors = sorted({vendor for (vendor, _), _ in kinds})
    return {
        "errors": {path: len(errors) for path, errors in snapshot.errors.items()},
        "devices": sorted(snapshot.devices),
        "vendors": vendors,
        "classes": sorted({class_ for (_, class_), _ in kinds}),
        "devicePaths": {name: entry.path for name, entry in snapshot.devices.items()},
        "vendorSpecs": {
            vendor: [path for (owner, _), path in kinds if owner == vendor] for vendor in vendors
        },
    }
