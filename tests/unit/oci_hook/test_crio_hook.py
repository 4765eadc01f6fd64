"""What installing the hook for CRI-O writes, where, and what is said of it beforehand."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from cdi_courier.cdi.model import ContainerEdits, DeviceNode
from cdi_courier.changes import ChangeSet
from cdi_courier.errors import CourierError
from cdi_courier.host.model import Fact, Runtime
from cdi_courier.injector import Injection
from cdi_courier.settings import OciHookSettings, Settings
from cdi_courier_oci_hook import crio_hook, hooksd
from cdi_courier_oci_hook.backend import cdi_courier_backend
from hypothesis import given
from hypothesis import strategies as st

VENDOR = "/usr/share/containers/oci/hooks.d"
ADMIN = "/etc/containers/oci/hooks.d"
KEYS = ["nvidia.cdi.k8s.io", "nvidia.cdi.k8s.io/pod", "nvidia.cdi.k8s.io/container.dcgm"]


def crio(dirs: list[Any] | None, version: str = "1.25.3", **facts: Any) -> Runtime:
    found = {name: Fact(value, "GET /config") for name, value in facts.items()}
    if dirs is not None:
        found["hooks_dirs"] = Fact(dirs, "GET /config")
    return Runtime("cri-o", "cri-o", version, facts=found)


def plan(runtime: Runtime, settings: Settings | None = None) -> ChangeSet:
    return cdi_courier_backend().plan(runtime, settings or Settings())


def hook(planned: ChangeSet) -> dict[str, Any]:
    (change,) = planned.files
    assert change.content is not None
    return dict(json.loads(change.content))


def matches(planned: ChangeSet, key: str) -> bool:
    """Whether CRI-O would run the hook for a container of a pod with this annotation, as Go does."""
    ((pattern, value),) = hook(planned)["when"]["annotations"].items()
    return bool(re.search(pattern, key)) and bool(re.search(value, ""))


def test_the_hook_is_what_crio_takes() -> None:
    """Its schema, its stage, an environment of its own, absolute paths, and no restart."""
    settings = Settings(oci_hook=OciHookSettings(timeout=7))

    planned = plan(crio([VENDOR]), settings)
    written = hook(planned)

    assert (written["version"], written["stages"]) == ("1.0.0", ["createRuntime"])
    assert written["hook"]["timeout"] == 7
    assert written["hook"]["args"][:4] == [written["hook"]["path"], "-I", "-S", "-c"]
    assert os.path.isabs(written["hook"]["path"])
    assert written["hook"]["env"] == ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"]
    assert "kind='cri-o'" in written["hook"]["args"][4]
    assert "origin='kubernetes'" in written["hook"]["args"][4]
    assert planned.restart == ""


@pytest.mark.parametrize("key", KEYS)
def test_it_is_run_for_every_form_of_key(key: str) -> None:
    """A key that names a container too, for any container."""
    assert matches(plan(crio([VENDOR])), key)


@pytest.mark.parametrize(
    "key",
    ["x.nvidia.cdi.k8s.io", "nvidia.cdi.k8s.io/podx", "nvidiaxcdi.k8s.io", "nvidia.cdi.k8s.io/container."],
)
def test_it_is_run_for_no_other_key(key: str) -> None:
    """The expression is anchored, and a dot is a dot."""
    assert not matches(plan(crio([VENDOR])), key)


@given(
    st.lists(st.tuples(st.text("ab.-+*()[]{}|^$\\/", min_size=1), st.booleans()), min_size=1, max_size=4),
    st.text("ab.-+*()[]{}|^$\\/"),
)
def test_whatever_the_keys_are_the_expression_matches_just_them(
    keys: list[tuple[str, bool]], other: str
) -> None:
    """Each of them, what begins with one that is only a beginning, and nothing else."""
    expression = hooksd.pattern(keys)
    wanted = any(
        other.startswith(key) and len(other) > len(key) if begins else other == key for key, begins in keys
    )

    assert all(re.search(expression, key + "x" * begins) for key, begins in keys)
    assert bool(re.search(expression, other)) == wanted


@pytest.mark.parametrize(
    ("dirs", "folder"),
    [([VENDOR], VENDOR), ([VENDOR, ADMIN], ADMIN), ([ADMIN, VENDOR], ADMIN), (["rel", VENDOR, "/x"], "/x")],
    ids=["usual", "both", "reversed", "relative"],
)
@pytest.mark.parametrize("there", [True, False], ids=["there", "not there"])
def test_the_hook_goes_where_crio_looks_already(
    monkeypatch: pytest.MonkeyPatch, dirs: list[str], folder: str, there: bool
) -> None:
    """In /etc if that is watched, because Podman reads the usual folder too."""
    monkeypatch.setattr(os.path, "isdir", lambda _: there)
    (change,) = plan(crio(dirs)).files

    assert change.path == f"{folder}/cdi-courier.json"


def test_the_hook_goes_where_there_is_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """CRI-O watches what was there at its start: one that is made now would only look installed."""
    monkeypatch.setattr(os.path, "isdir", lambda path: path == VENDOR)

    assert [change.path for change in plan(crio([VENDOR, ADMIN])).files] == [f"{VENDOR}/cdi-courier.json"]


@pytest.mark.parametrize("dirs", [None, [], ["relative"]], ids=["unknown", "none", "relative"])
def test_without_a_known_folder_nothing_is_planned(dirs: list[str] | None) -> None:
    """A folder that CRI-O does not watch would only look installed."""
    with pytest.raises(CourierError, match="HOK230"):
        plan(crio(dirs))


def test_an_old_crio_gets_the_old_stage() -> None:
    """Before 1.19 it knows no createRuntime, and an unknown stage fails all hooks."""
    assert hook(plan(crio([VENDOR], "1.18.4")))["stages"] == ["prestart"]


def test_the_offer_says_what_is_there(tmp_path: Path) -> None:
    """Files are to be installed; with them in place nothing is, and part of the edits is all it delivers."""
    backend, runtime = cdi_courier_backend(), crio([str(tmp_path)])
    before = backend.offer(runtime, Settings())
    (change,) = plan(runtime).files
    Path(change.path).write_bytes(change.content or b"")
    after = backend.offer(runtime, Settings())

    assert (before.needs, before.fidelity) == ("install", "partial")
    assert (after.needs, after.fidelity) == ("nothing", "partial")


@pytest.mark.parametrize(
    ("type_", "path"),
    [
        ("vm", "/usr/bin/containerd-shim-kata-v2"),
        ("oci", "/usr/local/bin/runsc"),
        ("oci", "/usr/bin/kata-runtime"),
        ("oci", "/usr/bin/containerd-shim-kata-v2"),
    ],
)
def test_no_hook_is_offered_for_what_runs_no_container_of_this_kernel(type_: str, path: str) -> None:
    """Virtual machines and gVisor run hooks where nothing can be injected."""
    runtime = crio([VENDOR], default_handler="x", handlers={"x": {"type": type_, "path": path}})

    assert cdi_courier_backend().offer(runtime, Settings()).needs == "impossible"


def test_what_is_lost_is_known_before() -> None:
    """The environment is; a device node is not."""
    edits = ContainerEdits(env=("A=1",), device_nodes=(DeviceNode(path="/dev/null"),))
    injection = Injection(("v.com/c=a",), edits)
    lost = cdi_courier_backend().undeliverable(crio([VENDOR]), injection, Settings())

    assert [edit for edit, _ in lost] == ["env A"]
    assert not cdi_courier_backend().undeliverable(Runtime("podman", "podman"), injection, Settings())


def test_the_folder_of_a_runtime_is_found_without_its_being_described() -> None:
    """A runtime of which nothing is known has none."""
    assert crio_hook.directory(Runtime("cri-o", "cri-o")) is None
