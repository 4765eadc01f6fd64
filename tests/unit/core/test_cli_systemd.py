"""The unit that an installation without a package writes."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from cdi_courier import changes
from cdi_courier.cli import command, systemd
from cdi_courier.errors import HostError
from click.testing import CliRunner, Result

PYTHON = "/opt/cdi-courier/bin/python3"
PACKAGED = Path(__file__).parents[3] / "packaging/systemd/cdi-courier.service"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host on which systemd runs; nothing is installed, and no command is really run."""
    for name, folder in {"UNITS": "etc", "RUNNING": "run", "MANIFESTS": "state/unit"}.items():
        monkeypatch.setattr(systemd, name, str(tmp_path / folder))
    (tmp_path / "etc").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(systemd, "PACKAGED", (str(tmp_path / "lib"),))
    ran: list[str] = []
    monkeypatch.setattr(systemd, "run_command", lambda command, _: ran.append(command))
    monkeypatch.setattr(systemd.sys, "executable", PYTHON)
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, standalone_mode=False)


def test_the_unit_is_the_packages_with_this_interpreter() -> None:
    """Nothing but the program differs from what packages install."""
    ours, theirs = systemd.unit(PYTHON).splitlines(), PACKAGED.read_text().splitlines()
    different = [line for line, other in zip(ours, theirs, strict=True) if line != other]

    assert different == [f"ExecStart={PYTHON} -P -m cdi_courier run"]


@pytest.mark.parametrize("path", ["/opt/a b/py", "/opt/a'b", '/x"', "python3", "/opt/$HOME/py", "/a\nb"])
def test_a_path_that_a_unit_cannot_hold_is_refused(path: str) -> None:
    """What systemd would split, expand or not find is an error before anything is written."""
    with pytest.raises(HostError) as raised:
        systemd.unit(path)

    assert raised.value.code == "CHG022"


def test_a_percent_sign_stays_one() -> None:
    """A specifier of systemd's is not seen in a path."""
    assert "ExecStart=/opt/100%%/python -P" in systemd.unit("/opt/100%/python")


def test_installing_writes_the_unit_and_uninstalling_removes_it(host: Path) -> None:
    """Without --apply nothing is run; the command that would is printed."""
    said = invoke("install", "--systemd").output
    unit = host / "etc/cdi-courier.service"
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(unit)
    gone = invoke("uninstall", "--systemd")

    assert "to start it: systemctl daemon-reload && systemctl enable" in said
    assert parser["Install"]["WantedBy"] == "multi-user.target"
    assert not unit.exists()
    assert "removed" in gone.output
    assert changes.installed(systemd.MANIFESTS) == ()


def test_applying_also_starts_and_stops(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon is enabled and started with the new unit, and stopped before the unit goes."""
    ran: list[tuple[str, bool]] = []
    unit = host / "etc/cdi-courier.service"
    monkeypatch.setattr(systemd, "run_command", lambda c, _: ran.append((c.split()[1], unit.exists())))
    invoke("install", "--systemd", "--apply")
    invoke("uninstall", "--systemd", "--apply")

    assert ran == [
        ("daemon-reload", True),
        ("enable", True),
        ("restart", True),
        ("disable", True),
        ("daemon-reload", False),
    ]


def test_a_dry_run_writes_nothing(host: Path) -> None:
    """It shows the unit."""
    said = invoke("install", "--systemd", "--dry-run").output

    assert f"+ExecStart={PYTHON}" in said
    assert not list((host / "etc").iterdir())


def test_undoing_the_backends_leaves_the_unit(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`uninstall` without the option is for runtimes."""
    monkeypatch.setattr(changes, "FOLDER", str(host / "state/changes"))
    invoke("install", "--systemd")
    invoke("uninstall")

    assert (host / "etc/cdi-courier.service").exists()


def _no_systemd(host: Path) -> None:
    (host / "run").rmdir()


def _packaged(host: Path) -> None:
    (host / "lib/cdi-courier.service").touch()


def _changed(host: Path) -> None:
    invoke("install", "--systemd")
    (host / "etc/cdi-courier.service").write_text("# mine\n")


@pytest.mark.parametrize(
    ("arrange", "code"),
    [(_no_systemd, "CHG021"), (_packaged, "CHG024"), (_changed, "CHG003")],
    ids=["no systemd", "a package's unit", "changed since"],
)
def test_what_is_in_the_way_is_said(host: Path, arrange: object, code: str) -> None:
    """Nothing is written over, and the message has its own code."""
    assert callable(arrange)
    arrange(host)
    before = {path: path.read_bytes() for path in (host / "etc").iterdir()}
    result = invoke("install", "--systemd")

    assert isinstance(result.exception, HostError)
    assert result.exception.code == code
    assert {path: path.read_bytes() for path in (host / "etc").iterdir()} == before


@pytest.mark.parametrize("folder", ["/home/me", "/root", "/run/user/1000", "/tmp", "/var/tmp"])
def test_a_folder_that_the_unit_hides_is_refused(folder: str) -> None:
    """The service could not start what lies in homes or among temporary files."""
    with pytest.raises(HostError) as raised:
        systemd.unit(f"{folder}/venv/bin/python")

    assert raised.value.code == "CHG023"


def test_an_interpreter_that_a_link_leads_to_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment in /opt may be of a Python in a home."""
    monkeypatch.setattr(systemd.os.path, "realpath", lambda _: "/root/.local/share/python/bin/python3.12")
    with pytest.raises(HostError) as raised:
        systemd.unit("/opt/cdi-courier/bin/python")

    assert raised.value.code == "CHG023"


def test_the_program_of_the_unit_is_the_packages() -> None:
    """The line that is replaced is there."""
    assert re.search(r"^ExecStart=/usr/bin/cdi-courier run", PACKAGED.read_text(), re.MULTILINE)
