"""The daemon's start: what a node's containers wait for after a boot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

UNTIL_IT_SERVES = """
import sys
from cdi_courier import __main__, service
def supervise(*_):
    print(*sys.modules)
    return 0
service._supervise = supervise
__main__.main()
"""

LIBRARIES = "import sys, attrs, pluggy, google.protobuf.message_factory; print(*sys.modules)"
"""Those that a start cannot do without. Some releases of them load what is avoided here."""

LATER = {
    "click",
    "google.protobuf.descriptor_pb2",
    "importlib.metadata",
    "json",
    "pathlib",
    "yaml",
    "subprocess",
    "cdi_courier.cdi.model",
    "cdi_courier.choice",
    "cdi_courier.host.describe",
}
"""What only commands need, what is imported once the sessions have begun, and what is slow to load."""


def settings_in(folder: Path, text: str = "") -> Path:
    path = folder / "config.toml"
    path.write_text(f'nri.sockets = ["{folder}/nri.sock"]\nservice.state_dir = "{folder}/state"\n{text}')
    return path


def run(
    arguments: list[str], command: tuple[str, ...] = ("-m", "cdi_courier"), **more: str
) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("CDI_COURIER_")}
    return subprocess.run(
        [sys.executable, *command, *arguments],
        env=own | more,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_start_loads_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    """Before a session begins, neither the command line nor spec files nor the host's description count."""
    done = run(["--config", str(settings_in(tmp_path)), "run"], ("-c", UNTIL_IT_SERVES))

    assert done.returncode == 0, done.stderr
    assert "cdi_courier_nri.session" in done.stdout.split()
    theirs = run([], ("-c", LIBRARIES)).stdout.split()
    assert LATER.difference(theirs).isdisjoint(done.stdout.split())
    assert LATER.difference(theirs)


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        ([], {}),
        (["--nri-index", "10"], {}),
        ([], {"CDI_COURIER_RUN_NRI_INDEX": "10"}),
    ],
    ids=["as the unit does", "with an option", "with the environment"],
)
def test_every_way_to_start_says_the_same_of_settings(
    tmp_path: Path, arguments: list[str], environment: dict[str, str]
) -> None:
    """Unusable settings are the same message and exit code 2, whether or not there was something to parse."""
    path = settings_in(tmp_path, "nri.plugin_index = 10\n")
    done = run(["--config", str(path), "run", *arguments], **environment)

    assert done.returncode == 2
    assert done.stderr.startswith("cdi-courier: SET")
    assert "plugin_index" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_environment_counts_at_a_start(tmp_path: Path) -> None:
    """A variable of the command is heeded although the arguments are those of a plain start."""
    done = run(["--config", str(settings_in(tmp_path)), "run"], CDI_COURIER_RUN_BACKEND="nonesuch")

    assert done.returncode == 1
    assert "PLG003" in done.stderr


def test_wrong_words_are_usage_errors() -> None:
    """What is no plain start is parsed as a command line."""
    done = run(["--confg", "x", "run"])

    assert done.returncode == 2
    assert "No such option" in done.stderr
