"""``validate`` and ``apply``: what they print, and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SPEC = {
    "cdiVersion": "0.5.0",
    "kind": "vendor.com/gpu",
    "devices": [
        {"name": "one", "containerEdits": {"env": ["A=1"]}},
        {
            "name": "gone",
            "containerEdits": {"deviceNodes": [{"path": "/dev/x", "hostPath": "/dev/is-not-there"}]},
        },
    ],
}


def courier(*arguments: str | Path, stdin: str = "", code: int) -> subprocess.CompletedProcess[str]:
    """Run the command; check its exit code and that no traceback is shown."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CDI_COURIER_")}
    done = subprocess.run(
        [sys.executable, "-m", "cdi_courier", *map(str, arguments)],
        input=stdin,
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
def config(tmp_path: Path) -> Path:
    """A configuration that trusts the files of whoever runs the test."""
    path = tmp_path / "config.toml"
    path.write_text('[cdi]\ntrust = "any"\n')
    return path


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    """A folder with one spec file."""
    folder = tmp_path / "cdi"
    folder.mkdir()
    (folder / "v.json").write_text(json.dumps(SPEC))
    return folder


def test_valid_files_are_said_to_be_valid(config: Path, specs: Path) -> None:
    """All valid is exit code 0 and null for each file in the JSON form."""
    file = specs / "v.json"
    done = courier("--config", config, "validate", "--json", file, code=0)

    assert json.loads(done.stdout) == {str(file): None}


def test_an_invalid_file_does_not_hide_a_valid_one(config: Path, specs: Path) -> None:
    """One invalid file is exit code 1, its message has code, file, line and place; the others are judged."""
    bad = specs / "bad.yaml"
    bad.write_text(
        "cdiVersion: 0.5.0\nkind: v.com/c\ndevices:\n- name: x\n  containerEdits:\n    env: [1, {}]\n"
    )
    done = courier("--config", config, "validate", "--json", bad, specs / "v.json", code=1)
    result = json.loads(done.stdout)

    assert result[str(specs / "v.json")] is None
    assert result[str(bad)].startswith("CDI004")
    assert f"{bad}:6" in result[str(bad)]
    assert "env[1]" in result[str(bad)]


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_what_cannot_be_read_is_an_answer(config: Path, specs: Path, name: str) -> None:
    """A missing file or a folder is exit code 1 with CDI002."""
    done = courier("--config", config, "validate", specs / name, code=1)

    assert "CDI002" in done.stderr


def test_lint_gives_advice_and_changes_no_verdict(config: Path, specs: Path) -> None:
    """Advice goes to stderr, and a valid file stays valid."""
    file = specs / "odd.json"
    hook = {"hookName": "prestart", "path": "relative", "timeout": 0}
    device = {"name": "one", "containerEdits": {"hooks": [hook]}}
    file.write_text(json.dumps({"cdiVersion": "1.1.0", "kind": "v/c", "devices": [device]}))
    done = courier("--config", config, "validate", "--lint", file, code=0)

    for word in ("one letter", "0.3.0", "not absolute", "timeout", "prestart"):
        assert word in done.stderr


def test_lint_is_silent_about_a_good_file(config: Path, tmp_path: Path) -> None:
    """A file that says what it needs, in the way the specification wants it, gets no advice."""
    file = tmp_path / "good.json"
    device = {"name": "one", "containerEdits": {"env": ["A=1"]}}
    file.write_text(json.dumps({"cdiVersion": "0.3.0", "kind": "v.com/gpu", "devices": [device]}))
    done = courier("--config", config, "validate", "--lint", file, code=0)

    assert done.stderr == ""


@pytest.mark.parametrize("by_file", [True, False])
def test_apply_prints_the_edited_config(config: Path, specs: Path, tmp_path: Path, by_file: bool) -> None:
    """The edited config is on stdout, from a file or stdin, unknown fields kept and the file untouched."""
    text = json.dumps({"ociVersion": "1.0.2", "x": [1], "process": {"env": ["A=0", "B=2"]}})
    source = tmp_path / "config.json"
    source.write_text(text)
    command = ["--config", config, "apply", "--spec-dir", specs, "--device", "vendor.com/gpu=one"]
    done = courier(*command, *([source] if by_file else []), stdin="" if by_file else text, code=0)

    assert json.loads(done.stdout) == {
        "ociVersion": "1.0.2",
        "x": [1],
        "process": {"env": ["A=1", "B=2"]},
    }
    assert source.read_text() == text


def test_apply_names_each_unresolved_device(config: Path, specs: Path) -> None:
    """An unresolvable name is exit code 3, one line a name on stderr, nothing on stdout."""
    names = ["vendor.com/gpu=one", "vendor.com/gpu=nine", "no name\n"]
    options = [word for name in names for word in ("--device", name)]
    done = courier("--config", config, "apply", "--spec-dir", specs, *options, stdin="{}", code=3)

    assert done.stdout == ""
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["CDI012", "CDI001"]


@pytest.mark.parametrize(
    ("device", "stdin"),
    [("one", "no json"), ("one", "[]"), ("one", '{"process": 5}'), ("gone", "{}")],
    ids=["not-json", "not-an-object", "wrong-shape", "node-missing"],
)
def test_any_other_failure_of_apply_is_exit_code_1(
    config: Path, specs: Path, device: str, stdin: str
) -> None:
    """What is no OCI config, or a device node that the host lacks, leaves stdout empty."""
    name = f"vendor.com/gpu={device}"
    done = courier("--config", config, "apply", "--spec-dir", specs, "--device", name, stdin=stdin, code=1)

    assert done.stdout == ""
    assert done.stderr


@pytest.mark.parametrize(
    ("source", "stdin", "words"),
    [
        ("none.json", "", "none.json"),
        (".", "", "Is a directory"),
        ("-", "no json", "standard input is not JSON"),
        ("-", "[" * 100_000, "standard input is not JSON"),
        ("-", "[]", "not an object"),
    ],
    ids=["missing", "folder", "not-json", "deep", "not-an-object"],
)
def test_a_config_that_cannot_be_used_is_cdi018(
    config: Path, specs: Path, tmp_path: Path, source: str, stdin: str, words: str
) -> None:
    """One line says which config and why, wherever it comes from."""
    name = source if source == "-" else tmp_path / source
    options = ("apply", "--spec-dir", specs, "--device", "vendor.com/gpu=one", name)
    done = courier("--config", config, *options, stdin=stdin, code=1)

    assert done.stderr.startswith("cdi-courier: CDI018: the OCI config is not usable: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
