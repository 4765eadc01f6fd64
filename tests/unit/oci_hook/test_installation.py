"""What installers bake in of this installation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cdi_courier import settings as settings_module
from cdi_courier.compiling import load_settings
from cdi_courier.compiling import settings_place as compiled
from cdi_courier.settings import load
from cdi_courier_oci_hook.installation import bare_interpreter, settings_place


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the configuration files, which has two."""
    monkeypatch.setattr(settings_module, "default_dir", lambda: tmp_path)
    for module in ("cdi_courier.compiling", "cdi_courier_oci_hook.installation"):
        monkeypatch.setattr(f"{module}.default_dir", lambda: tmp_path)
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "config.toml").touch()
    (tmp_path / "conf.d/10.toml").touch()
    return tmp_path


@pytest.mark.parametrize("name", ["test.toml", "elsewhere/own.toml"], ids=["in the folder", "elsewhere"])
def test_a_file_that_was_named_is_the_place(folder: Path, name: str) -> None:
    """Also one in the folder of the usual files."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.touch()

    assert settings_place(load([path])) == compiled(path) == str(path)


@pytest.mark.parametrize("kept", [2, 1, 0], ids=["both", "one", "none"])
def test_the_usual_files_are_the_folder(folder: Path, kept: int) -> None:
    """Whichever of them are there, so that others count later."""
    for name in ("config.toml", "conf.d/10.toml")[kept:]:
        (folder / name).unlink()

    assert settings_place(load_settings(f"{folder}/")) == compiled(None) == f"{folder}/"


@pytest.mark.parametrize(
    ("links", "called", "expected"),
    [
        pytest.param({"bin/python3": "python3.11"}, "bin/python3.11", "bin/python3", id="a system's"),
        pytest.param({"bin/python3": "python3.13"}, "bin/python3.11", "bin/python3.11", id="not the default"),
        pytest.param({}, "bin/python3.11", "bin/python3.11", id="one name"),
        pytest.param(
            {"bin/python3": "python3.11", "venv/python": "../bin/python3"},
            "venv/python",
            "bin/python3",
            id="a virtual environment's",
        ),
    ],
)
def test_the_bare_interpreter_has_the_name_that_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: dict[str, str], called: str, expected: str
) -> None:
    """Beside the program, not in front of it; an upgrade of the system then changes nothing for hooks."""
    for name in ("bin/python3.11", "bin/python3.13"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name, target in links.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(target)
    monkeypatch.setattr(sys, "_base_executable", str(tmp_path / called))

    assert bare_interpreter() == str(tmp_path / expected)
