"""The command ``generate``: files, exit codes, and generators of plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cdi_courier.cdi.model import ContainerEdits, Device, Spec
from cdi_courier.cli import generate as command
from cdi_courier.errors import HostError, PluginError
from cdi_courier.generate import write
from cdi_courier.hookspecs import Generated, Generator
from cdi_courier.plugins import Plugins
from cdi_courier.settings import Settings
from click.testing import CliRunner
from support.fake_host import FakeHost, needs_nodes
from support.needs import need

NAME = "management.nvidia.com/gpu=all"


def courier(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command; check its exit code and that no traceback is shown."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CDI_COURIER_")}
    done = subprocess.run(
        [sys.executable, "-m", "cdi_courier", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        env=clean,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    made = FakeHost(tmp_path / "root")
    made.gpu()
    made.driver("550.54.15")
    return made


@needs_nodes
def test_the_file_is_valid_and_can_be_injected(host: FakeHost, tmp_path: Path) -> None:
    """What is written passes validate --lint without advice, and apply puts it into a container."""
    file = tmp_path / "cdi" / "x.yaml"
    done = courier("generate", "nvidia", "--root", host.root, "--output", file)
    lint = courier("validate", "--lint", file)
    config = tmp_path / "config.json"
    config.write_text('{"ociVersion": "1.0.2"}')
    settings = tmp_path / "config.toml"
    settings.write_text('[cdi]\ntrust = "any"\n')
    applied = courier("--config", settings, "apply", "--spec-dir", file.parent, "--device", NAME, config)

    assert f"{file}: written" in done.stdout
    assert NAME in done.stdout
    assert "loader cache" in done.stderr
    assert lint.stderr == ""
    for path in ("/dev/nvidia0", "/dev/nvidiactl", "libcuda.so.550.54.15", "NVIDIA_VISIBLE_DEVICES=void"):
        assert path in applied.stdout


@needs_nodes
def test_a_second_run_writes_nothing(host: FakeHost, tmp_path: Path) -> None:
    """An unchanged host leaves the file as it is; a changed one gives a new file."""
    file = tmp_path / "x.yaml"
    options = ("generate", "nvidia", "--root", host.root, "--output", file)
    courier(*options)
    first = file.stat().st_ino
    second = courier(*options)

    assert "unchanged" in second.stdout
    assert file.stat().st_ino == first

    host.node("/dev/nvidia1", 195, 1)
    courier(*options)

    assert "/dev/nvidia1" in file.read_text()


@needs_nodes
def test_a_dry_run_prints_the_file_and_writes_none(host: FakeHost, tmp_path: Path) -> None:
    """Only the document is on stdout, so that it can be piped."""
    file = tmp_path / "x.yaml"
    options = ("generate", "nvidia", "--root", host.root, "--output", file)
    printed = courier(*options, "--dry-run").stdout

    assert not file.exists()
    courier(*options)
    assert printed == file.read_text()
    assert yaml.safe_load(printed)["kind"] == "management.nvidia.com/gpu"


@pytest.mark.parametrize("what", ["nodes", "driver", "root"])
def test_a_host_without_it_leaves_the_old_file(tmp_path: Path, what: str) -> None:
    """What cannot be generated is exit code 1 with its code, and an existing file stays as it is."""
    host = FakeHost(tmp_path / "root")
    if what == "driver":
        need("" if os.geteuid() == 0 else "only root makes device nodes")
        host.gpu()
    file = tmp_path / "x.yaml"
    file.write_text("old")
    root = tmp_path / "none" if what == "root" else host.root
    done = courier("generate", "nvidia", "--root", root, "--output", file, code=1)

    assert {"nodes": "GEN002", "driver": "GEN003", "root": "GEN001"}[what] in done.stderr
    assert file.read_text() == "old"


def test_an_alias_of_a_harmless_device_is_written(tmp_path: Path) -> None:
    """Options may be repeated, and a file that no runtime reads is warned of."""
    file = tmp_path / "x.yml"
    nodes = ("--node", "/dev/null", "--node", "/dev/zero", "--env", "A=1", "--mount", "/etc:/etc2:ro")
    done = courier("generate", "alias", "v.com/demo=one", *nodes, "--output", file)
    (device,) = yaml.safe_load(file.read_text())["devices"]

    assert "v.com/demo=one" in done.stdout
    assert ".yaml" in done.stderr
    assert [node["path"] for node in device["containerEdits"]["deviceNodes"]] == ["/dev/null", "/dev/zero"]


@pytest.mark.parametrize(
    "arguments",
    [("alias", "v.com/demo=one"), ("nothing",), ("nvidia", "--mode", "other")],
    ids=["no-node", "no-generator", "no-mode"],
)
def test_a_wrong_command_line_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    """A missing node, an unknown generator or mode is a usage error."""
    courier("generate", *arguments, code=2)


def test_the_default_file_is_named_after_the_kind() -> None:
    """One file a kind, and for an alias one a device, in the folder that a boot empties."""
    assert write.default_path("management.nvidia.com/gpu") == "/var/run/cdi/management.nvidia.com-gpu.yaml"
    assert write.default_path("v.com/serial", "gps") == "/var/run/cdi/v.com-serial_gps.yaml"


def plugins(generate: Any) -> Plugins:
    broken = PluginError("PLG001", "plugin bad is broken")
    return Plugins(
        generators={"mine": Generator("mine", "mine", generate, ("a", "b"))}, problems={"bad": broken}
    )


def invoke(monkeypatch: pytest.MonkeyPatch, generate: Any, *arguments: str) -> Any:
    monkeypatch.setattr(command, "discover", lambda _: plugins(generate))
    monkeypatch.setattr(command, "settings_of", lambda _: Settings())
    return CliRunner().invoke(command.generate, ["mine", "--dry-run", *arguments])


def test_a_plugins_generator_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for the mode that was chosen, and its spec is printed; another plugin's fault is shown."""
    device = Device("x", container_edits=ContainerEdits(env=("A=1",)))

    def generate(_: Any, mode: str) -> Generated:
        return Generated(Spec(kind=f"v.com/{mode}b", devices=(device,)), "a place", ("take care",))

    done = invoke(monkeypatch, generate, "--mode", "b")

    assert done.exit_code == 0, done.output
    assert 'kind: "v.com/bb"' in done.output
    assert "from a place" in done.output
    assert "warning: take care" in done.output
    assert "PLG001" in done.output


def test_the_help_lists_every_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built-in ones, plugins' and alias are commands, and each has a line."""
    monkeypatch.setattr(command, "discover", lambda _: plugins(_fails))
    monkeypatch.setattr(command, "settings_of", lambda _: Settings())
    done = CliRunner().invoke(command.generate, ["--help"])

    assert done.exit_code == 0
    for line in ("alias", "nvidia", "mine"):
        assert f"\n  {line} " in done.output


def test_broken_settings_do_not_hide_what_is_built_in(tmp_path: Path) -> None:
    """The help, and the built-in generators, need no settings."""
    (tmp_path / "config.toml").write_text("broken")
    options = ("--config", tmp_path / "config.toml", "generate")
    host = FakeHost(tmp_path / "root")

    assert "nvidia" in courier(*options, "--help").stdout
    assert "GEN002" in courier(*options, "nvidia", "--root", host.root, code=1).stderr


def _fails(*_: Any) -> Generated:
    raise RuntimeError("their\x1b fault")


def _refuses(*_: Any) -> Generated:
    raise HostError("HST001", "nothing here")


@pytest.mark.parametrize(
    ("generate", "code"),
    [
        (_fails, "PLG005"),
        (lambda *_: None, "PLG005"),
        (lambda *_: Generated(Spec(kind="v.com/x", devices=(5,))), "PLG005"),  # type: ignore[arg-type]
        (lambda *_: Generated(Spec(kind="v.com/x")), "GEN006"),
        (_refuses, "HST001"),
    ],
    ids=["raises", "none", "nonsense", "invalid", "refuses"],
)
def test_a_plugins_fault_has_a_code(monkeypatch: pytest.MonkeyPatch, generate: Any, code: str) -> None:
    """Whatever a plugin's generator does ends in an error with a code, its own if it has one."""
    done = invoke(monkeypatch, generate)

    assert getattr(done.exception, "code", None) == code
    assert "\x1b" not in str(done.exception)
