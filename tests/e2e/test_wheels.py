"""What `pip install 'cdi-courier[all]'` gives, in a virtual environment of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.box import Box
from support.needs import need

pytestmark = pytest.mark.runtime

REPOSITORY = Path(__file__).parents[2]
NAMES = {"cdi_courier", "cdi_courier_nri", "cdi_courier_oci_hook", "cdi_courier_cri_o"}
BACKENDS = {"nri", "oci_hook", "cri_o_drop_in"}
HOME = "/opt/cdi-courier"
UNIT = "cdi-courier.service"


def run(*argv: str | Path, **options: object) -> str:
    done = subprocess.run(
        list(map(str, argv)),
        capture_output=True,
        text=True,
        timeout=300,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return str(done.stdout)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdists, and the wheels that were built from them."""
    folder = tmp_path_factory.mktemp("pypi")
    run("sh", "packaging/wheels.sh", folder, cwd=REPOSITORY, env={**os.environ, "PYTHON": sys.executable})
    return folder


@pytest.fixture(scope="module")
def venv(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with all of it, as a user would install it."""
    folder = tmp_path_factory.mktemp("venv") / "venv"
    base = Path(getattr(sys, "_base_executable", sys.executable))
    run(base, "-m", "venv", folder)
    pip = (folder / "bin/python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    run(*pip, "--find-links", made, "cdi-courier[all]")
    return folder


def test_each_distribution_has_a_wheel_and_an_sdist(made: Path) -> None:
    """All four are of one version, and each wheel was built from its sdist and nothing else."""
    names = {path.name.split("-")[0] for path in made.glob("*.whl")}
    versions = {path.name.split("-")[1] for path in made.glob("*.whl")}

    assert names == {path.name.split("-")[0] for path in made.glob("*.tar.gz")} == NAMES
    assert len(versions) == 1


def test_an_sdist_has_what_its_source_has(made: Path) -> None:
    """Licence, readme and every data file are in it, and no link that leads out of it."""
    for name, source in (
        ("cdi_courier", "core"),
        ("cdi_courier_nri", "backends/nri"),
        ("cdi_courier_oci_hook", "backends/oci_hook"),
        ("cdi_courier_cri_o", "backends/cri_o_drop_in"),
    ):
        tracked = run("git", "ls-files", "-co", "--exclude-standard", source, cwd=REPOSITORY).split()
        wanted = {path.removeprefix(f"{source}/") for path in tracked}
        with tarfile.open(next(made.glob(f"{name}-*.tar.gz"))) as sdist:
            has = {m.name.partition("/")[2] for m in sdist.getmembers() if m.isreg()}

        assert wanted - has == set()


def test_all_of_it_works_in_a_fresh_environment(venv: Path, tmp_path: Path) -> None:
    """Every backend is found, and the commands are there."""
    code = "from cdi_courier.plugins import discover; p = discover(); print(*p.backends, *p.problems)"
    found = run(venv / "bin/python", "-I", "-c", code, cwd=tmp_path).split()
    (tmp_path / "config.toml").write_text("")
    checked = run(venv / "bin/cdi-courier", "--config", tmp_path / "config.toml", "config", "check")

    assert set(found) == BACKENDS
    assert "the configuration is right" in checked
    assert (venv / "bin/cdi-courier-nri").exists()


@pytest.fixture
def box(bookworm: Path, venv: Path) -> Iterator[Box]:
    """A Debian host with that environment in /opt, which sees no library of Debian's."""
    config = dict(
        line.split(" = ", 1) for line in (venv / "pyvenv.cfg").read_text().splitlines() if " = " in line
    )
    if config["home"] != "/usr/bin" or sys.version_info[:2] != (3, 11):
        need("the environment is not of Debian 12's own Python, which is what the box has")

    def prepare(folder: Path) -> None:
        shutil.copytree(venv, folder / HOME.lstrip("/"), symlinks=True)

    with Box(bookworm, prepare=prepare) as made:
        yield made


def test_the_unit_of_an_installation_without_a_package_starts_it(box: Box) -> None:
    """`install --systemd --apply` makes it a service of systemd's, and `uninstall` leaves nothing of it."""
    courier = (f"{HOME}/bin/python", "-m", "cdi_courier")
    box.run([*courier, "install", "--systemd", "--apply"])
    box.wait(UNIT)
    started = box.run(["systemctl", "show", "--property=ExecStart,UnitFileState", UNIT]).stdout
    box.run([*courier, "uninstall", "--systemd", "--apply"])
    links = box.run(["find", "/etc/systemd", "-name", "cdi-courier*"]).stdout

    assert f"{HOME}/bin/python -P -m cdi_courier run" in started
    assert "UnitFileState=enabled" in started
    assert box.run(["systemctl", "is-active", UNIT], check=False).stdout.strip() == "inactive"
    assert links == ""
