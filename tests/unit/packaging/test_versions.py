"""All that is packaged is of one version, and for the same Pythons."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROJECTS = ("core", "backends/nri", "backends/oci_hook", "backends/cri_o_drop_in")


def project(folder: str) -> dict[str, object]:
    found = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    assert isinstance(found, dict)
    return found


def test_every_packaging_has_the_distributions_version() -> None:
    """The rpm spec, each distribution, and what one of them asks of another name the same version."""
    (spec,) = re.findall(
        r"^Version: *(\S+)$", (ROOT / "packaging/rpm/cdi-courier.spec").read_text(), re.MULTILINE
    )
    versions = {str(project(folder)["version"]) for folder in PROJECTS}
    pinned = {
        version
        for folder in PROJECTS
        for version in re.findall(
            r'"cdi-courier[a-z-]*==([^"]+)"', (ROOT / folder / "pyproject.toml").read_text()
        )
    }

    assert versions == pinned == {spec}


def test_debian_asks_for_the_distributions_python() -> None:
    """The Debian packages need the same lowest Python as each distribution."""
    control = (ROOT / "packaging/deb/debian/control").read_text()
    asked = re.findall(r"^X-Python3-Version: (.+)$", control, re.MULTILINE)

    assert {str(project(folder)["requires-python"]) for folder in PROJECTS} == {
        each.replace(" ", "") for each in asked
    }


def test_all_names_every_extra() -> None:
    """`cdi-courier[all]` leaves no extra out."""
    extras = project("core")["optional-dependencies"]
    assert isinstance(extras, dict)
    everything = {item for name, items in extras.items() if name != "all" for item in items}

    assert set(extras["all"]) == everything
