"""Which pods of CRI-O keep a gate and its handler from being removed, by what lies on disk alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from cdi_courier import changes
from cdi_courier.changes import Manifest
from cdi_courier.cli import held
from cdi_courier.errors import CourierError
from cdi_courier.host import gate_users
from cdi_courier.settings import RuntimeSettings

from .conftest import Site

DATA = Path(__file__).parents[2] / "data/runtimes"


class Store:
    """CRI-O's storage folder, with pods as CRI-O notes them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, identity: str, **annotations: str) -> Path:
        """A sandbox, unless the annotations say otherwise; keys without their prefix."""
        told = {"ContainerType": "sandbox", "Namespace": "ml", "KubeName": identity, "RuntimeHandler": ""}
        path = self.root / f"overlay-containers/{identity}/userdata/config.json"
        path.parent.mkdir(parents=True)
        document = {"annotations": {f"io.kubernetes.cri-o.{k}": v for k, v in (told | annotations).items()}}
        path.write_text(json.dumps(document))
        return path


@pytest.fixture
def store(site: Site, monkeypatch: pytest.MonkeyPatch) -> Store:
    """No pods, and none of this machine's own."""
    made = Store(site.root / "storage")
    monkeypatch.setattr(gate_users, "_CRIO_STORES", (str(made.root),))
    monkeypatch.setattr(gate_users, "SOURCES", (gate_users.cri_o,))
    monkeypatch.setattr(held, "called", lambda *_: ())
    return made


@pytest.fixture
def gate(site: Site) -> str:
    """The path of the gate that is installed as a handler by name."""
    site.told(cri_o_drop_in={"mode": "handler"}, oci_hook={"handler_mode": "named"})
    site.apply(site.plan())
    return str(site.root / "bin/cdi-courier-cri-o")


def users(site: Site, gate: str) -> tuple[str, ...]:
    return gate_users.users(gate, [str(site.drop_in)])


def manifest() -> Manifest:
    (found,) = changes.installed(changes.FOLDER)
    return found


def test_pods_that_name_the_handler_use_its_gate(site: Site, store: Store, gate: str) -> None:
    """Others do not: of another handler, of the default one, or another gate's."""
    store.add("ours", RuntimeHandler="cdi-courier")
    store.add("unnamed")
    store.add("theirs", RuntimeHandler="kata")

    assert users(site, gate) == ("ml/ours",)
    assert users(site, "/usr/bin/runc") == ()


def test_what_a_pods_author_writes_is_not_believed(site: Site, store: Store, gate: str) -> None:
    """The annotation of the handler can be forged in a container, which is no sandbox."""
    store.add("forged", RuntimeHandler="cdi-courier", ContainerType="container")

    assert users(site, gate) == ()


def test_a_pod_of_a_store_that_the_configuration_names_is_found(
    site: Site, store: Store, gate: str, tmp_path: Path
) -> None:
    """Another storage folder than the usual one is CRI-O's to choose."""
    Store(tmp_path / "elsewhere").add("far", RuntimeHandler="cdi-courier")
    more = site.folder / "10-storage.conf"
    more.write_text(f"[crio]\nrunroot = '{tmp_path}/elsewhere'\n")

    assert gate_users.users(gate, [str(site.drop_in), str(more)]) == ("ml/far",)


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"annotations": []}', '{"annotations": {"io.kubernetes.cri-o.ContainerType": 1}}', "{" * 99],
    ids=["empty", "list", "no annotations", "no text", "broken"],
)
def test_what_is_no_config_is_no_pod(site: Site, store: Store, gate: str, content: str) -> None:
    """Half-written or foreign files in the store are passed over."""
    store.add("x").write_text(content)

    assert users(site, gate) == ()


def test_a_sandbox_as_cri_o_writes_it_is_read(site: Site, store: Store, gate: str) -> None:
    """The captured one notes an empty handler; with ours it would be a user."""
    path = store.add("x")
    document: dict[str, Any] = json.loads((DATA / "crio-1.36.3-ociconfig-sandbox.json").read_text())
    path.write_text(json.dumps(document))
    before = users(site, gate)
    document["annotations"]["io.kubernetes.cri-o.RuntimeHandler"] = "cdi-courier"
    path.write_text(json.dumps(document))

    assert (before, users(site, gate)) == ((), ("default/demo",))


def test_nothing_is_taken_back_while_a_pod_names_the_handler(site: Site, store: Store, gate: str) -> None:
    """After CRI-O's restart such a pod could not be stopped; when it is gone, everything goes."""
    store.add("busy", RuntimeHandler="cdi-courier")
    with pytest.raises(CourierError) as caught:
        held.must_be_unused(manifest(), site.settings)

    assert caught.value.code == "CHG011"
    assert "ml/busy" in caught.value.message
    assert Path(gate).exists()
    (store.root / "overlay-containers/busy/userdata/config.json").unlink()
    held.must_be_unused(manifest(), site.settings)


def test_the_storage_of_a_cri_o_with_a_configuration_of_its_own_is_looked_into(
    site: Site, store: Store, gate: str, tmp_path: Path
) -> None:
    """What ``[runtimes]`` names as its main file may name the folder, and is left as it is."""
    Store(tmp_path / "elsewhere").add("far", RuntimeHandler="cdi-courier")
    main = tmp_path / "own.conf"
    main.write_text(f"[crio]\nrunroot = '{tmp_path}/elsewhere'\n")
    settings = attrs.evolve(site.settings, runtimes={"cri-o": RuntimeSettings(config=str(main))})

    with pytest.raises(CourierError, match="ml/far"):
        held.must_be_unused(manifest(), settings)


def test_pods_that_got_the_gate_as_the_default_do_not_keep_it(site: Site, store: Store) -> None:
    """They note no handler, and take the one that is the default after the restart."""
    site.told(cri_o_drop_in={"mode": "handler"})
    site.apply(site.plan())
    store.add("default")
    held.must_be_unused(manifest(), site.settings)

    assert users(site, str(site.root / "bin/cdi-courier-cri-o")) == ()
