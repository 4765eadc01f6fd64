"""What the pages say of `--json` is what the commands print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cdi_courier import doctor, explain, manifests
from cdi_courier.cdi.registry import Registry
from cdi_courier.choice import choose_all
from cdi_courier.host.model import Fact, Runtime
from cdi_courier.plugins import discover
from cdi_courier.service import make_injector
from cdi_courier.settings import CdiSettings, Settings
from support.courier import Courier
from support.nri_runtime import NriRuntime, container, pod
from support.pages import REPOSITORY, blocks

KEY = "nvidia.cdi.k8s.io"
SPEC = {
    "cdiVersion": "0.7.0",
    "kind": "v.com/c",
    "devices": [
        {"name": "good", "containerEdits": {"env": ["A=b"]}},
        {"name": "lossy", "containerEdits": {"additionalGids": [44]}},
    ],
}
RUNTIME = Runtime("containerd", "containerd", "2.1.9", "/run/c.sock", {"nri": Fact("on", "a test")})


def shape_of(page: str, first: str) -> Any:
    """The shape on a page: ``name``, ``{name: shape}``, ``[shape]``; a name in capitals is any key.

    first: the name that it begins with.
    """
    (found,) = [block for block in blocks(REPOSITORY / page) if block.text.startswith(f"{{{first},")]
    return parse(re.findall(r"\w+|[][{}:]", found.text))


def parse(tokens: list[str]) -> Any:
    """Take one shape from the beginning of the tokens. What has no shape of its own is None."""
    first = tokens.pop(0)
    if first == "[":
        item = parse(tokens)
        assert tokens.pop(0) == "]"
        return [item]
    if first != "{":
        return None
    fields = {}
    while (name := tokens.pop(0)) != "}":
        fields[name] = parse(tokens) if tokens[0] == ":" and tokens.pop(0) else None
    return fields


def differences(actual: Any, shape: Any, where: str = "") -> Iterator[str]:
    """Keys that one has and the other has not; what is null has none to compare."""
    if isinstance(shape, list):
        for item in actual:
            yield from differences(item, shape[0], f"{where}[]")
    elif isinstance(shape, dict) and actual is not None:
        name = next(iter(shape))
        if name.isupper():
            for key, item in actual.items():
                yield from differences(item, shape[name], f"{where}.{key}")
            return
        yield from (f"{where}.{key}" for key in sorted(shape.keys() ^ actual.keys()))
        for key in shape.keys() & actual.keys():
            yield from differences(actual[key], shape[key], f"{where}.{key}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a spec file, a broken one, and settings that lead there."""
    cdi = tmp_path / "cdi"
    cdi.mkdir()
    (cdi / "v.json").write_text(json.dumps(SPEC))
    (cdi / "broken.json").write_text("{")
    return tmp_path


@pytest.fixture
def nri_socket(tmp_path: Path) -> Iterator[str]:
    """A short path; pytest's own may be longer than an address holds."""
    opened = os.open(tmp_path, os.O_PATH)
    yield f"/proc/{os.getpid()}/fd/{opened}/nri.sock"
    os.close(opened)


def test_status_prints_what_operations_tells(folder: Path, nri_socket: str) -> None:
    """A daemon that has injected into one container and missed another has every key, and no other."""
    config = folder / "config.toml"
    config.write_text(
        f'[cdi]\ndirs = ["{folder}/cdi"]\ntrust = "any"\n[service]\nstate_dir = "{folder}/s"\n'
        f'[nri]\nsockets = ["{nri_socket}"]\ndelivery = "edits"\n'
    )
    missed, asks = (pod(name, "gpu-operator", **{KEY: "v.com/c=good"}) for name in ("missed", "asks"))
    listed = [([missed], [container(of="missed")])]
    with NriRuntime(nri_socket, listed=listed) as runtime, Courier(config, folder / "log") as courier:
        runtime.plugin()
        courier.wait_for_log("missed gpu-operator/missed/c0")
        runtime.create_container(asks, container(of="asks"))
        courier.wait_for_log("injected gpu-operator/asks/c0")
        argv = [sys.executable, "-m", "cdi_courier", "--config", str(config), "status", "--json"]
        printed = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout
    report = json.loads(printed)
    # What only the description of the host tells is not there for a runtime that it has not found.
    (session,) = [entry for entry in report["runtimes"].values() if entry.get("socket") == nri_socket]
    session |= {"recommended": None, "reason": ""}
    report["runtimes"] = {"session": session}

    assert (len(session["missed"]), len(report["decisions"])) == (1, 1)
    assert list(differences(report, shape_of("docs/operations.md", "version"))) == []


def test_devices_prints_what_operations_tells(folder: Path) -> None:
    """Files that are good, broken, in conflict and not trusted give every key, and no other."""
    for name, kind in (("w", "w.com/c"), ("x", "w.com/c"), ("u", "u.com/c")):
        (folder / f"cdi/{name}.json").write_text(json.dumps(SPEC | {"kind": kind}))
    (folder / "cdi/u.json").chmod(0o666)
    config = folder / "config.toml"
    config.write_text(f'[cdi]\ndirs = ["{folder}/cdi"]\n')
    argv = [sys.executable, "-m", "cdi_courier", "--config", str(config), "devices", "--json"]
    printed = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout
    report = json.loads(printed)

    assert all(report.values())
    assert list(differences(report, shape_of("docs/operations.md", "dirs"))) == []


def test_doctor_prints_what_choosing_tells(folder: Path) -> None:
    """A host with a runtime, offers, a daemon, rules and a broken file has every key, and no other."""
    settings = Settings(cdi=CdiSettings(dirs=(str(folder / "cdi"),), trust="any"))
    plugins = discover()
    snapshot = Registry(settings.cdi.dirs, trust="any").snapshot()
    choices = choose_all(plugins, [RUNTIME], settings)
    daemon = {"pid": 1, "version": "1", "problems": [], "runtimes": {}}
    report = doctor.report(settings, plugins, choices, snapshot, daemon=daemon)

    assert report["runtimes"][0]["offers"]
    assert report["cdi"]["errors"]
    assert report["policy"]["rules"]
    assert list(differences(report, shape_of("docs/choosing.md", "ready"))) == []


def test_explain_prints_what_its_page_tells(folder: Path) -> None:
    """The keys of the two tables are those of a pod and of a container, and what a cell names is there."""
    settings = Settings(cdi=CdiSettings(dirs=(str(folder / "cdi"),), trust="any"))
    plugins = discover()
    value = "v.com/c=good,v.com/c=lossy"
    metadata = {"name": "p", "namespace": "gpu-operator", "annotations": {KEY: value}}
    manifest = {"kind": "Pod", "metadata": metadata, "spec": {"containers": [{"name": "c"}]}}
    (report,) = explain.report(
        manifests.read(json.dumps(manifest).encode()),
        make_injector(settings, plugins),
        settings,
        plugins,
        choose_all(plugins, [RUNTIME], settings),
        diff=True,
    )
    page = (REPOSITORY / "docs/explain.md").read_text().partition("## JSON")[2]
    rows = [line.split(" | ", 1) for line in page.splitlines() if line.startswith("| `")]
    named = {
        name: set(re.findall(r"`(\w+)`", told))
        for keys, told in rows
        for name in re.findall(r"`(\w+)`", keys)
    }
    (found,) = report["containers"]

    assert named.keys() == report.keys() | found.keys()
    assert report["document"].keys() == named["document"]
    for several in ("devices", "edits", "undeliverable"):
        assert {key for item in found[several] for key in item} <= named[several], several
        assert found[several], several


def test_a_key_too_much_or_too_little_would_be_found() -> None:
    """In objects, in lists of them, and under any key."""
    shape = parse(re.findall(r"\w+|[][{}:]", "{a, b: [{c}], d: {KEY: {e}}, f: {PATH: ERRORS}, g: {h}}"))
    same = {"a": 1, "b": [{"c": 1}], "d": {"x": {"e": 1}}, "f": {"y": []}, "g": None}
    other = {"b": [{"c": 1, "i": 1}], "d": {"x": {}}, "f": {}, "g": {"h": 1}, "j": 1}

    assert list(differences(same, shape)) == []
    assert sorted(differences(other, shape)) == [".a", ".b[].i", ".d.x.e", ".j"]
