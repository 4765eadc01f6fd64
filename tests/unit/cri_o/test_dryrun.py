"""CRI-O's own program as the judge of the drop-in: asked in a folder of its own, believed in little."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cdi_courier_cri_o import dryrun

from .conftest import Site

Program = Callable[[str], Path]

# What 1.36.3 says (docs/facts.md#cri-o-dry-run).
FATAL = (
    'time="2026-11-30T09:00:00Z" level=info msg="Updating config from path: DIR"\n'
    'time="2026-11-30T09:00:00Z" level=fatal msg="get and merge config from context: update config from '
    "path: walk path: unable to decode configuration DIR/90-cdi-courier.conf: toml: line 5 (last key "
    '\\"crio.nri.enable_nri\\"): incompatible types: TOML value has type string"\n'
)
ACCEPTS = 'while [ "$1" != --config-dir ]; do shift; done; cat "$2"/90-cdi-courier.conf 2>/dev/null; exit 0'


def test_what_cri_o_accepts_is_planned(site: Site, program: Program) -> None:
    """The stage holds every file of the folder and ours, and it is gone afterwards."""
    (site.folder / "deep").mkdir()
    (site.folder / "deep/10.conf").write_text("[crio]\n")
    site.main.write_text("[crio]\n")
    log = site.root / "log"
    program(f'echo "$@" >> {log}; (cd "$4"; find . -type f | sort) >> {log}; ' + ACCEPTS)
    site.plan()
    (arguments, *files) = log.read_text().splitlines()
    _, main, _, stage, _ = arguments.split()

    assert arguments.split()[0::2] == ["--config", "--config-dir", "config"]
    assert main == str(site.main)
    assert files == ["./90-cdi-courier.conf", "./deep/10.conf"]
    assert not stage.startswith(str(site.etc))
    assert not os.path.exists(stage)
    assert not site.drop_in.exists()


@pytest.mark.parametrize("path", [None, "", ":", ".", "relative"])
def test_a_program_of_the_working_directory_is_not_cri_o(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    """Whatever PATH is or lacks: whoever owns that folder would have root run it."""
    for name in ("crio", "relative/crio"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dryrun, "FOLDERS", ("/nonexistent",))
    if path is None:
        monkeypatch.delenv("PATH", raising=False)
    else:
        monkeypatch.setenv("PATH", path)

    assert dryrun.program(None) == ""


def test_without_a_main_file_cri_o_is_told_so(site: Site, program: Program) -> None:
    """Naming one that is not there would make it fail."""
    log = site.root / "log"
    program(f'echo "[$2]" > {log}; ' + ACCEPTS)
    site.plan()

    assert log.read_text() == "[]\n"


def test_what_cri_o_refuses_is_not_planned(site: Site, program: Program) -> None:
    """The last line of its log is the reason, and names the file where it will lie."""
    said = site.root / "said"
    said.write_text(FATAL)
    program(f'test -e "$4"/90-cdi-courier.conf || exit 0; sed "s|DIR|$4|" {said} >&2; exit 1')
    error = site.refused()

    assert error.code == "CRI104"
    assert f"unable to decode configuration {site.drop_in}: toml: line 5" in error.message
    assert "level=fatal" not in error.message
    assert not site.drop_in.exists()


def test_what_it_refuses_without_ours_is_told_apart(site: Site, program: Program) -> None:
    """The drop-in is not to blame for a configuration that is broken already."""
    program('echo \'level=fatal msg="not a valid logrus Level: \\"bogus\\""\' >&2; exit 1')
    error = site.refused()

    assert error.code == "CRI104"
    assert "even without cdi-courier's drop-in" in error.message
    assert "bogus" in error.message


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("exit 0", id="silent"),
        pytest.param("echo 'crio = {nri = {enable_nri = false}}'", id="another value"),
        pytest.param("echo '[crio.nri]'; echo '# enable_nri = false'", id="another default"),
        pytest.param("echo '[[['", id="no TOML"),
    ],
)
def test_a_key_that_does_not_come_out_is_told(site: Site, program: Program, script: str) -> None:
    """CRI-O ignores keys that it does not know and ends with status 0."""
    program(script)
    error = site.refused()

    assert error.code == "CRI105"
    assert "crio.nri.enable_nri = True" in error.message


def test_a_value_that_is_the_default_comes_out_as_a_comment(site: Site, program: Program) -> None:
    """This is how CRI-O 1.30 and later print NRI that is on."""
    program("echo '[crio.nri]'; echo '# enable_nri = true'")

    assert site.plan().files


@pytest.mark.parametrize("name", ["x.y", '"x.y"'], ids=["bare", "quoted"])
def test_a_handlers_name_with_a_dot_comes_out_with_quotes_or_without(
    site: Site, program: Program, name: str
) -> None:
    """CRI-O 1.37 reads the name as it is meant, and prints it as if it were two."""
    site.told(cri_o_drop_in={"mode": "handler"}, oci_hook={"handler": "x.y", "handler_mode": "named"})
    gate = f"{site.root}/bin/cdi-courier-cri-o"
    program(f"echo '[crio.runtime.runtimes.{name}]'; echo 'runtime_path = \"{gate}\"'")

    assert site.plan().files


@pytest.mark.parametrize("script", ["exec sleep 60", None], ids=["hangs", "cannot be run"])
def test_a_program_that_does_not_answer_is_told(
    site: Site, program: Program, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    """Nothing is planned without its answer."""
    monkeypatch.setattr(dryrun, "_TIMEOUT", 0.2)
    path = program(script or "")
    if script is None:
        path.unlink()

    assert site.refused().code == "CRI104"


def test_without_the_program_that_is_said(site: Site) -> None:
    """The plan is made by our own checks, and a note says what was not tried."""
    assert any("was not found" in note for note in site.plan().notes)


def test_the_version_is_the_programs_own_word(program: Program) -> None:
    """It is asked of a CRI-O that does not run."""
    crio = str(program("echo 'crio version 1.29.4'; echo 'GitCommit: x'"))

    assert dryrun.version(crio) == "1.29.4"
    assert dryrun.version(str(program("echo nothing"))) == ""
    assert dryrun.version(str(program("echo 'crio version 1.29.4'; exit 1"))) == ""
