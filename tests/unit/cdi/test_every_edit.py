"""No kind of edit that the model has is forgotten on its way from a spec file into a container."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from cdi_courier import explain, manifests, oci
from cdi_courier.cdi.edits import concatenate, edits_to_dict
from cdi_courier.cdi.model import ContainerEdits
from cdi_courier.cdi.validate import VERSIONS, load_spec
from cdi_courier.plugins import discover
from cdi_courier.service import make_injector
from cdi_courier.settings import CdiSettings, Settings
from cdi_courier_nri import messages
from cdi_courier_nri.edits import PreparedEdits
from cdi_courier_oci_hook import hook

# Field on the wire → a value of it that a host can deliver.
EDITS: dict[str, Any] = {
    "env": ["A=1"],
    "deviceNodes": [{"path": "/dev/x", "hostPath": "/dev/null"}],
    "netDevices": [{"hostInterfaceName": "eth1", "name": "net0"}],
    "hooks": [{"hookName": "createRuntime", "path": "/bin/hook"}],
    "mounts": [{"hostPath": "/a", "containerPath": "/b", "options": ["bind"]}],
    "intelRdt": {"closID": "a"},
    "additionalGids": [44],
}
KINDS = [field.metadata["wire"] for field in attrs.fields(ContainerEdits)]
NEWEST = list(VERSIONS)[-1]
CONFIG: dict[str, Any] = {"process": {"user": {"uid": 0, "gid": 0}}, "linux": {"resources": {}}}


def document(kind: str) -> bytes:
    """A spec file of one device with nothing but this edit."""
    device = {"name": "d", "containerEdits": {kind: EDITS[kind]}}
    return json.dumps({"cdiVersion": NEWEST, "kind": "v.com/c", "devices": [device]}).encode()


def edits(kind: str) -> ContainerEdits:
    return load_spec(document(kind)).devices[0].container_edits


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_may_have_this_edit_alone(kind: str) -> None:
    """A device that has nothing else is valid, and keeps it when edits are joined and written."""
    joined = concatenate([ContainerEdits(), edits(kind), ContainerEdits()])

    assert edits_to_dict(joined) == {kind: EDITS[kind]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_gets_it(kind: str) -> None:
    """What edits configs (Podman's hook, the wrapper) delivers every kind."""
    assert oci.apply_edits(CONFIG, edits_to_dict(edits(kind))) != CONFIG


@pytest.mark.parametrize("nri", [(0, 0), (0, 12)], ids=["oldest", "newest"])
@pytest.mark.parametrize("kind", KINDS)
def test_over_nri_it_is_delivered_or_named_as_lost(kind: str, nri: tuple[int, int]) -> None:
    """Nothing is dropped silently, whatever the runtime's NRI knows."""
    data, adjusted = PreparedEdits(edits(kind), nri).encode(messages.ContainerDetails())

    assert data or adjusted.lost


@pytest.mark.parametrize("kind", KINDS)
def test_live_injection_delivers_it_or_names_it_as_lost(kind: str) -> None:
    """Device nodes, bind mounts and hooks of early stages; all else is named."""
    lost = hook.undeliverable_edits({kind: EDITS[kind]})

    assert bool(lost) is (kind not in ("deviceNodes", "mounts", "hooks"))


@pytest.mark.parametrize("kind", KINDS)
def test_explain_has_words_for_it(kind: str, tmp_path: Path) -> None:
    """A person reads what it is, not its name on the wire alone."""
    (tmp_path / "v.json").write_bytes(document(kind))
    settings = Settings(cdi=CdiSettings(dirs=(str(tmp_path),), trust="any"))
    plugins = discover(found=[])
    metadata = {"name": "p", "namespace": "kube-system", "annotations": {"nvidia.cdi.k8s.io": "v.com/c=d"}}
    pod = {"kind": "Pod", "metadata": metadata, "spec": {"containers": [{"name": "c"}]}}
    templates = manifests.read(json.dumps(pod).encode())

    (found,) = explain.report(templates, make_injector(settings, plugins), settings, plugins, ())

    (edit,) = found["containers"][0]["edits"]
    assert edit["kind"] == kind
    assert len(edit["edit"].split()) > 1
