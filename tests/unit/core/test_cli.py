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
from cdi_courier.cli import command, tables
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


def test_devices_in_files_with_wide_letters_are_uncut(config: Path) -> None:
    """A letter that takes two columns does not cost a file's name its end."""
    path = config.parent / "cdi" / f"{'漢' * 60}.json"
    path.write_text(json.dumps({**SPEC, "kind": "wide.com/gpu"}))

    assert str(path) in courier("--config", config, "devices").stdout


def test_a_conflict_between_files_is_told_once(config: Path) -> None:
    """It is an error of both, and one line a device."""
    (config.parent / "cdi" / "w.json").write_text(json.dumps(SPEC))

    lines = courier("--config", config, "devices").stdout.splitlines()
    told = [line for line in lines if "CDI008" in line]

    assert len(told) == len(set(told)) == 2


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

    assert done.stdout == 'allowed: "v/c=a" (the built-in rule)\n'


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


def _into(stdout: int, *arguments: str | Path) -> tuple[int, str]:
    """The command's exit code and stderr, with its output going to a descriptor."""
    done = subprocess.run(
        [sys.executable, "-m", "cdi_courier", *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=20,
        check=False,
    )
    return done.returncode, done.stderr


_TALKATIVE = [["--help"], ["devices"], ["devices", "--json"], ["config", "check"], ["compile", "--print"]]


@pytest.mark.parametrize("arguments", _TALKATIVE, ids=" ".join)
def test_output_that_nobody_reads_is_no_trouble(config: Path, arguments: list[str]) -> None:
    """With a reader that has gone, as after `| head -1`, nothing is said on stderr."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        code, errors = _into(writing, "--config", config, *arguments)
    finally:
        os.close(writing)

    assert (code, errors) == (1, "")


@pytest.mark.parametrize("arguments", _TALKATIVE, ids=" ".join)
def test_output_that_cannot_be_written_is_one_message(config: Path, arguments: list[str]) -> None:
    """A full disk is HST006 in one line, and no success."""
    with open("/dev/full", "wb") as full:
        code, errors = _into(full.fileno(), "--config", config, *arguments)

    assert code == 1
    assert errors.startswith("cdi-courier: HST006: ")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "iso8859-1"])
def test_what_the_terminal_cannot_show_is_escaped(config: Path, encoding: str) -> None:
    """Neither a file name that is no text nor one beyond the locale's letters ends a command."""
    folder = config.parent / "cdi"
    for number, name in enumerate((b"\xff\x1b[31m", "漢".encode())):
        path = os.path.join(os.fsencode(folder), name + b".json")
        Path(os.fsdecode(path)).write_text(json.dumps({**SPEC, "kind": f"v{number}.com/gpu"}))
    files = [folder / name for name in os.listdir(folder)]
    coding = {"PYTHONIOENCODING": f"{encoding}:strict"}

    assert courier("validate", *files, **coding).stdout.count(": valid\n") == len(files)
    assert "v0.com/gpu=one" in courier("--config", config, "devices", **coding).stdout


def test_validate_shows_a_hostile_file_name_harmlessly(config: Path) -> None:
    """A control sequence in a name does not reach the terminal, whether the file is valid or not."""
    folder = config.parent / "cdi"
    (folder / "a\x1b]0;x\x07.json").write_text(json.dumps(SPEC))
    (folder / "b\x1b]0;x\x07.json").write_text("{")

    done = courier("validate", "--lint", *folder.iterdir(), code=1)

    # click itself takes colours out for a pipe, so this is not one.
    assert "\x1b" not in done.stdout + done.stderr


def test_a_library_s_warning_is_one_line(tmp_path: Path) -> None:
    """It says what it says, harmlessly and without its source."""
    script = (
        "import warnings; from cdi_courier import cli; "
        "cli.command = lambda **_: warnings.warn('odd\\nthing \\x1b[31m'); cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True, cwd=tmp_path
    )

    assert done.stderr == "cdi-courier: warning: odd\\nthing \\u001b[31m\n"


@pytest.mark.parametrize(
    "group", [[], ["config"], ["policy"], ["generate"]], ids=["top", "config", "policy", "generate"]
)
def test_no_command_s_summary_is_cut(group: list[str]) -> None:
    """In a terminal of eighty columns a list of commands says in full what each does."""
    lines = courier(*group, "--help", COLUMNS="80").stdout.partition("Commands:\n")[2].splitlines()

    assert lines
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_a_table_is_as_wide_as_what_it_holds() -> None:
    """Nothing is cut, wide letters count twice, hostile cells stay one line, and no line ends in blanks."""
    long = "x" * 300
    found = tables.lines(("NAME", "FILE"), [("漢字漢字", "/a"), ("b", long), ("[red]c\x1b\n", "")])

    assert found == [
        "NAME            FILE",
        "漢字漢字        /a",
        f"b               {long}",
        "[red]c\\u001b\\n",
    ]


def test_a_table_may_have_no_rows() -> None:
    """Then only its titles are there."""
    assert tables.lines(("A", "B"), []) == ["A  B"]
