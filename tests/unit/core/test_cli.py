"""The command as a person meets it: exit codes, what stands where, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from cdi_courier.cli import command
from cdi_courier.settings import load

SPEC = {
    "cdiVersion": "0.6.0",
    "kind": "vendor.com/gpu",
    "devices": [{"name": name, "containerEdits": {"env": [f"GPU={name}"]}} for name in ("one", "two")],
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration file whose paths all lie where a test may write."""
    path = tmp_path / "config.toml"
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi" / "v.json").write_text(json.dumps(SPEC))
    path.write_text(
        f'[cdi]\ndirs = ["{tmp_path}/cdi"]\ntrust = "any"\n'
        f'[service]\nstate_dir = "{tmp_path}/state"\n[nri]\nsockets = ["{tmp_path}/nri.sock"]\n'
    )
    return path


def courier(*arguments: str | Path, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command; check its exit code and that no traceback is shown."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CDI_COURIER_")}
    done = subprocess.run(
        [sys.executable, "-m", "cdi_courier", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        env={**clean, "COLUMNS": "40", **environment},
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == code, done.stderr
    return done


def test_version_is_the_distributions() -> None:
    """--version says the command's name and the version that is installed."""
    done = courier("--version")

    assert done.stdout.startswith("cdi-courier")
    assert version("cdi-courier") in done.stdout


def test_help_lists_the_commands() -> None:
    """--help names every command."""
    names = command.list_commands(click.Context(command))
    shown = {line.split()[0] for line in courier("--help").stdout.splitlines() if line.startswith("  ")}

    assert {"install", "run", "status"} <= set(names)
    assert set(names) <= shown


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], ["policy", "check"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    """An unknown command or option, or a missing one, is a usage error on stderr."""
    done = courier(*arguments, code=2)

    assert "Usage" in done.stderr


def test_devices_lists_names_and_files_uncut(config: Path) -> None:
    """Each device stands in one line with its file, however narrow the terminal is."""
    done = courier("--config", config, "devices")

    for name in ("one", "two"):
        (line,) = [line for line in done.stdout.splitlines() if f"vendor.com/gpu={name}" in line]
        assert str(config.parent / "cdi" / "v.json") in line


def test_devices_as_json_is_one_object(config: Path) -> None:
    """--json tells devices with files, directories and errors by path."""
    (config.parent / "cdi" / "bad.json").write_text("{")

    report = json.loads(courier("--config", config, "devices", "--json").stdout)

    assert set(report) == {"dirs", "devices", "conflicts", "blocked", "errors"}
    assert report["devices"]["vendor.com/gpu=one"]["file"] == str(config.parent / "cdi" / "v.json")
    assert list(report["errors"]) == [str(config.parent / "cdi" / "bad.json")]
    assert report["dirs"] == [str(config.parent / "cdi")]


def test_spec_dir_replaces_the_configured_directories(config: Path, tmp_path: Path) -> None:
    """--spec-dir looks nowhere else; where nothing is found, the exit code is still 0."""
    done = courier("--config", config, "devices", "--spec-dir", tmp_path / "none")

    assert "no devices" in done.stdout
    assert "vendor.com" not in done.stdout


def test_a_hostile_file_name_does_not_reach_the_terminal(config: Path) -> None:
    """A control sequence in a spec file's name is shown harmlessly."""
    (config.parent / "cdi" / "a\x1b[31m.json").write_text("{")
    (config.parent / "cdi" / "b\x1b[31m.json").write_text(json.dumps({**SPEC, "kind": "other.com/gpu"}))

    done = courier("--config", config, "devices")
    said = done.stdout + done.stderr

    assert "\x1b" not in said
    assert ("a\\u001b[31m" in said, "b\\u001b[31m" in said) == (True, True)


def test_policy_check_says_yes_with_exit_code_0(config: Path) -> None:
    """An allowed request is told with the rule that allows it."""
    done = courier("--config", config, "policy", "check", "--namespace", "gpu-operator", "--device", "v/c=a")

    assert done.stdout == 'allowed: "v/c=a", by the built-in rule\n'


def test_policy_check_says_no_with_toml_that_would_allow_it(config: Path, tmp_path: Path) -> None:
    """A denied request is exit code 1, and the TOML printed for it makes the answer yes."""
    question = ("policy", "check", "--namespace", "ns", "--pod", "p", "--container", "c", "--device", "v/c=a")
    done = courier("--config", config, *question, code=1)
    pasted = tmp_path / "pasted.toml"
    pasted.write_text("[[policy" + done.stdout.partition("[[policy")[2])

    assert "denied" in done.stdout
    assert tomllib.loads(pasted.read_text())["policy"]["rules"][0]["namespaces"] == ["ns"]
    assert load([pasted]).policy.rules
    assert courier("--config", pasted, *question).stdout.startswith("allowed")


def test_policy_check_prints_the_whole_rule_however_long(config: Path, tmp_path: Path) -> None:
    """What is too long for a refusal's message is here in full, and makes the answer yes."""
    names = [f"v/c={'x' * 150}{i}" for i in range(64)]
    question = ["policy", "check", "--namespace", "ns", *(w for n in names for w in ("--device", n))]
    done = courier("--config", config, *question, code=1)
    pasted = tmp_path / "pasted.toml"
    pasted.write_text("[[policy" + done.stdout.partition("[[policy")[2])

    assert courier("--config", pasted, *question).stdout.count("allowed") == len(names)


def test_policy_check_wants_a_namespace(config: Path) -> None:
    """An empty namespace is no question: exit code 2."""
    courier("--config", config, "policy", "check", "--namespace", "", "--device", "v/c=a", code=2)


def test_policy_check_refuses_what_is_no_name(config: Path) -> None:
    """A device that is no qualified name is CDI001 and no answer."""
    done = courier("--config", config, "policy", "check", "--namespace", "ns", "--device", "gpu", code=2)

    assert "CDI001" in done.stderr
    assert done.stdout == ""


def test_config_check_says_that_all_is_right(config: Path) -> None:
    """A right file is named and exit code 0."""
    done = courier("--config", config, "config", "check")

    assert f"read {config}" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("text", "words", "asked"),
    [
        ("[nri]\ndeadline = 7\n", ["SET004", "line 2", "nri.deadline"], ["config", "check"]),
        ("\n[nope]\n", ["SET003", "line 2", "nope"], ["devices"]),
        ("[", ["SET002", "not TOML"], ["run"]),
    ],
)
def test_a_wrong_file_is_exit_code_2(config: Path, text: str, words: list[str], asked: list[str]) -> None:
    """Every command refuses wrong settings with code, file and line on stderr."""
    config.write_text(text)

    done = courier("--config", config, *asked, code=2)

    assert all(word in done.stderr for word in [*words, str(config)])
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_file_is_exit_code_2(tmp_path: Path) -> None:
    """A configuration file that was named and is not there is SET001."""
    done = courier("--config", tmp_path / "none", "config", "check", code=2)

    assert "SET001" in done.stderr


def test_the_environment_names_the_file_and_the_flag_overrides_it(config: Path, tmp_path: Path) -> None:
    """CDI_COURIER_CONFIG stands for --config, and --config wins over it."""
    other = tmp_path / "other.toml"
    other.write_text("")

    assert f"read {config}" in courier("config", "check", CDI_COURIER_CONFIG=str(config)).stdout
    assert courier("--config", other, "config", "check", CDI_COURIER_CONFIG=str(config)).stdout.startswith(
        f"read {other}\n"
    )


@pytest.mark.parametrize(("name", "words"), [("cri_o_drop_in", "nothing to run"), ("x", "no backend")])
def test_a_forced_backend_that_cannot_serve_is_refused(config: Path, name: str, words: str) -> None:
    """run with such a backend is exit code 1, PLG003 and the reason, and leaves nothing behind."""
    done = courier("--config", config, "run", "--backend", name, code=1)

    assert "PLG003" in done.stderr
    assert words in done.stderr
    assert not (config.parent / "state").exists()


def test_an_options_variable_counts_for_a_subcommand(config: Path) -> None:
    """CDI_COURIER_RUN_BACKEND stands for run's --backend."""
    done = courier("--config", config, "run", code=1, CDI_COURIER_RUN_BACKEND="oci_hook")

    assert "PLG003" in done.stderr


@pytest.mark.parametrize("asked", [["run"], ["config", "check"]])
def test_an_unknown_dialect_is_refused(config: Path, asked: list[str]) -> None:
    """A dialect that no plugin offers is SET005 and the known ones."""
    config.write_text(config.read_text() + '[annotations]\ndialects = ["klingon"]\n')

    done = courier("--config", config, *asked, code=2)

    assert "SET005" in done.stderr
    assert "klingon" in done.stderr
    assert "device-injector" in done.stderr
    assert not (config.parent / "state").exists()


@pytest.mark.parametrize(("option", "value"), [("--nri-index", "abc"), ("--nri-socket", "x")])
def test_a_wrong_nri_option_is_exit_code_2(config: Path, option: str, value: str) -> None:
    """A wrong option is SET004 and names the option."""
    done = courier("--config", config, "run", option, value, code=2)

    assert "SET004" in done.stderr
    assert option in done.stderr
