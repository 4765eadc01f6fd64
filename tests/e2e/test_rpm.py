"""The rpm packages, built here by the spec that Fedora and EPEL build, with Debian's rpm.

There is no Fedora in these tests: what is asked of the packages is what their headers say, and what their
scripts do in a host that rpm installs them into.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.box import Box
from support.needs import PATH, need_program
from support.packages import Packages

pytestmark = pytest.mark.runtime

REPOSITORY = Path(__file__).parents[2]
CORE = "cdi-courier"
PACKAGES = {CORE, f"{CORE}-nri", f"{CORE}-oci-hook", f"{CORE}-cri-o"}
UNITS = "/usr/lib/systemd/system"
STATE = "var/lib/cdi-courier"


def run(*argv: str | Path, home: Path | None = None, check: bool = True) -> str:
    environment = {"PATH": PATH, "LC_ALL": "C.UTF-8", "HOME": str(home or os.environ.get("HOME", "/"))}
    done = subprocess.run(
        list(map(str, argv)), capture_output=True, text=True, timeout=300, env=environment, cwd=REPOSITORY
    )
    if check and done.returncode:
        pytest.fail(f"{argv[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def rpms(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name → file of each package."""
    folder = tmp_path_factory.mktemp("rpm")
    run("sh", "packaging/rpm/build.sh", folder)
    return {run("rpm", "-qp", "--qf", "%{NAME}", path).strip(): path for path in folder.glob("*.noarch.rpm")}


def test_the_packages_are_those_of_debian(rpms: dict[str, Path]) -> None:
    """The same four packages, and each backend needs the core of its own build."""
    version = run("rpm", "-qp", "--qf", "%{VERSION}-%{RELEASE}", rpms[CORE]).strip()
    needed = {name: run("rpm", "-qp", "--requires", path) for name, path in rpms.items() if name != CORE}

    assert set(rpms) == PACKAGES
    assert [name for name, text in needed.items() if f"{CORE} = {version}\n" not in text] == []
    assert f"{CORE}-oci-hook = {version}\n" in needed[f"{CORE}-cri-o"]


def test_every_file_is_in_one_package(rpms: dict[str, Path]) -> None:
    """Units, preset, pages, completions and each backend's modules are where Fedora has them, once."""
    files = {name: set(run("rpm", "-qlp", path).splitlines()) for name, path in rpms.items()}
    everything = [path for each in files.values() for path in each]
    core = files[CORE]

    assert len(everything) == len(set(everything))
    assert {f"{UNITS}/cdi-courier.service", f"{UNITS}-preset/80-cdi-courier.preset"} <= core
    assert "/etc/cdi-courier/config.toml" in core
    # Fedora's rpm compresses pages, Debian's does not.
    assert {"/usr/bin/cdi-courier", "/usr/share/man/man1/cdi-courier-run.1"} <= {
        p.removesuffix(".gz") for p in core
    }
    assert "/usr/bin/cdi-courier-nri" in files[f"{CORE}-nri"]
    for name in PACKAGES - {CORE}:
        folder = name.replace("-", "_")
        assert any(path.endswith(f"/site-packages/{folder}/backend.py") for path in files[name])
        assert any(re.search(rf"/{folder}-[0-9.]+\.dist-info/entry_points\.txt$", p) for p in files[name])


def test_the_scripts_are_those_of_a_service(rpms: dict[str, Path]) -> None:
    """Presets decide what is enabled, an upgrade restarts, a backend that comes or goes does too."""
    scripts = run("rpm", "-qp", "--scripts", "--filetriggers", rpms[CORE])
    flags = run("rpm", "-qp", "--configfiles", "--qf", "[%{FILENAMES} %{FILEFLAGS:fflags}\n]", rpms[CORE])

    assert "install-system-units cdi-courier.service" in scripts
    assert "remove-system-units cdi-courier.service" in scripts
    assert "mark-restart-system-units cdi-courier.service" in scripts
    assert "/site-packages/cdi_courier_" in scripts
    assert re.search(r"^/etc/cdi-courier/config\.toml .*n", flags, re.MULTILINE)


def test_what_a_script_is_made_of_is_not_a_macro() -> None:
    """rpm would take a percent sign in the shared script for a macro's, and say nothing."""
    assert "%" not in (REPOSITORY / "packaging/kept.sh").read_text()


def test_rpmlint_finds_nothing(rpms: dict[str, Path], tmp_path: Path) -> None:
    """What it would find and is meant so is listed with its reason."""
    need_program("rpmlint")
    # The spec uses macros that are Fedora's; rpmlint asks rpm, and rpm reads this file.
    shutil.copy(REPOSITORY / "packaging/rpm/macros.debian", tmp_path / ".rpmmacros")
    spec, reasons = (f"packaging/rpm/{name}" for name in ("cdi-courier.spec", "rpmlintrc"))
    said = run("rpmlint", "--rpmlintrc", reasons, *rpms.values(), spec, home=tmp_path, check=False)

    assert "0 errors, 0 warnings" in said, said


@pytest.fixture
def host(bookworm: Path) -> Iterator[Box]:
    """A host into which rpm can install."""
    with Box(bookworm) as box:
        yield box


def test_removing_keeps_what_is_needed_and_nothing_else(rpms: dict[str, Path], host: Box) -> None:
    """As Debian's: while something is installed into a runtime, wrapper and manifest stay, and it says so."""
    rpm = ("rpm", "--root", host.root, "--dbpath", "/var/lib/rpm", "--nodeps")
    state = host.root / STATE
    run(*rpm, "-i", *rpms.values())
    (state / "changes").mkdir(parents=True)
    (state / "bin").mkdir()
    (state / "bin/cdi-courier-runc").touch()
    manifest = state / "changes/oci_hook--containerd.json"
    manifest.touch()
    edited = host.root / "etc/cdi-courier/config.toml"
    edited.write_text("# edited\n")
    said = run(*rpm, "-e", *rpms)
    kept = manifest.exists() and (state / "bin/cdi-courier-runc").exists()
    manifest.unlink()
    run(*rpm, "-i", *rpms.values())
    run(*rpm, "-e", *rpms)
    left = host.run(["find", "/usr", "/etc", "/var/lib", "-xdev", "-name", "*cdi[-_]courier*"]).stdout.split()

    assert kept
    assert "installed into containerd (by backend oci_hook)" in said
    assert left == ["/etc/cdi-courier"]
    assert [p.name for p in edited.parent.iterdir()] == ["config.toml.rpmsave"]
