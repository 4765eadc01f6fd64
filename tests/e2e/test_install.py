"""`cdi-courier install` on real containerds: NRI is off, then on, then everything is as before."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

import pytest
from cdi_courier import changes
from cdi_courier.host.model import Fact, Runtime
from cdi_courier.settings import Settings
from cdi_courier_nri import install
from support import containerd as containerd_module
from support.containerd import SUITES_1_7, SUITES_2, Binaries
from support.containerd_files import OFF, VERSION_1, Files
from support.installing import Restarter, courier, files_of, keep_files
from support.lab import Lab
from support.packages import Packages
from support.scenario import ALL, GRANTED_NAMESPACE, annotated, run, serving, shell, spec

pytestmark = pytest.mark.runtime

PLUGIN = install.PLUGIN


@pytest.fixture(scope="session")
def binaries(packages: Packages) -> dict[str, Binaries]:
    """containerd 1.7 and 2.1."""
    return {
        "1.7": containerd_module.packaged(packages, SUITES_1_7),
        "2.1": containerd_module.packaged(packages, SUITES_2),
    }


def dump(binary: Binaries, main: Path) -> dict[str, Any]:
    """What containerd makes of its files, without what it says of the files themselves."""
    done = subprocess.run(
        [binary.containerd, "-c", main, "config", "dump"], capture_output=True, check=True, timeout=30
    )
    document = tomllib.loads(done.stdout.decode())
    document.pop("imports", None)
    return document


def off(version: str, main: Path) -> Runtime:
    facts = {"nri": "off", "config": str(main)}
    return Runtime(
        "containerd",
        "containerd",
        version,
        "",
        {name: Fact(value, "a test") for name, value in facts.items()},
    )


def readers(files: Files) -> list[str]:
    """The containerds that read this host's files: the one that they are for, and 2.1 after an upgrade."""
    return ["2.1"] if files.version.startswith("2") else ["1.7", "2.1"]


@pytest.mark.parametrize(
    ("files", "reader"),
    [
        pytest.param(files, reader, id=f"{name}-{reader}")
        for name, files in OFF.items()
        for reader in readers(files)
    ],
)
def test_containerd_makes_of_the_files_what_is_meant(
    tmp_path: Path, binaries: dict[str, Binaries], files: Files, reader: str
):
    """NRI is on with what others set for it, and nothing else of the whole configuration is different."""
    binary, main = binaries[reader], files.write(tmp_path / "etc")
    before = dump(binary, main) if main.exists() else None
    folder = str(tmp_path / "state")
    changes.apply(install.plan(off(files.version, main), Settings()), folder=folder)
    after = dump(binary, main)
    table = after["plugins"][PLUGIN]

    assert table["disable"] is False
    assert {key: table[key] for key in files.kept} == files.kept
    if before is None:
        main.write_text("version = 2\n")
        before = dump(binary, main)
    before["plugins"][PLUGIN]["disable"] = False
    assert after == before


@pytest.mark.parametrize("declared", ["", "version = 1\n"], ids=["undeclared", "declared"])
def test_containerd_17_ignores_the_table_below_a_main_file_of_version_1(
    tmp_path: Path, binaries: dict[str, Binaries], declared: str
):
    """This is why such a file is refused: the table in it does not enable NRI, however it is written."""
    main = Files(declared + VERSION_1).write(tmp_path)

    assert dump(binaries["1.7"], main)["plugins"][PLUGIN]["disable"] is True


# The command, on a runtime that pods run in


@pytest.fixture
def lab(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """containerd 1.7 with NRI off, which starts with whatever its file says by then."""
    with Lab(SUITES_1_7, packages=packages, nri=False) as lab:
        keep_files(lab, monkeypatch)
        yield lab


def listens(path: Path) -> bool:
    """Whether somebody accepts connections there; the file alone means nothing, since it may be stale."""
    with socket(AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def test_install_enables_nri_and_uninstall_disables_it_again(lab: Lab):
    """After --apply a pod gets its device over NRI; after uninstalling NRI is off and every byte is back."""
    before = files_of(lab)
    with Restarter(lab.root, lab.containerd.restart) as restarter:
        assert not listens(lab.nri_socket)
        result = courier(lab, restarter.command, "install", "--apply")

        assert result.exit_code == 0, result.output
        assert "nri can serve it" in result.output
        assert listens(lab.nri_socket)
        lab.write_spec(
            "v.json", spec(all={"deviceNodes": [{"path": "/dev/courier", "hostPath": "/dev/null"}]})
        )
        lab.delivery = "edits"
        serving(lab)
        container = run(lab, annotated(lab, container_c1=ALL))

        assert shell(lab, container, "echo $COURIER_ALL; test -c /dev/courier") == (0, "yes\n")
        again = courier(lab, restarter.command, "install")
        assert again.output == "containerd: containerd serves NRI already\n"
        result = courier(lab, restarter.command, "uninstall", "--apply")
        assert result.exit_code == 0, result.output
        assert restarter.times == 2
    assert files_of(lab) == before
    assert not listens(lab.nri_socket)
    assert not os.listdir(changes.FOLDER)


def test_what_containerd_does_not_start_with_is_taken_back(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    """A runtime that fails to restart is restarted without what was written, and goes on serving pods."""
    before = files_of(lab)
    real = install._drop_in
    monkeypatch.setattr(
        install, "_drop_in", lambda *given: real(*given) + '[grpc]\naddress = "/dev/null/x"\n'
    )
    with Restarter(lab.root, lab.containerd.restart) as restarter:
        result = courier(lab, restarter.command, "install", "--apply")

    assert result.exit_code == 1
    assert "CHG007" in result.output
    assert "restarted without it" in result.output
    assert files_of(lab) == before
    assert lab.cri.run_pod("after", GRANTED_NAMESPACE).id
