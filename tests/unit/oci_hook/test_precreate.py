"""The precreate hook as Podman runs it: a bare interpreter, an empty environment, bytes in and bytes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cdi_courier
import cdi_courier_oci_hook
import pytest
from cdi_courier import compiling
from cdi_courier.errors import CourierError
from cdi_courier_oci_hook import precreate
from cdi_courier_oci_hook.precreate import Installed
from hypothesis import given, settings
from hypothesis import strategies as st

KEY = "nvidia.cdi.k8s.io"
PATH = [str(Path(str(module.__file__)).parents[1]) for module in (cdi_courier, cdi_courier_oci_hook)]
BARE = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
ALLOWED = "json, os, stat, errno, ctypes, fcntl, _socket, fnmatch, __future__"
LIGHT = {
    "cdi_courier",
    "cdi_courier_oci_hook",
    *(f"cdi_courier.{n}" for n in ("annotations", "editing", "errors", "names", "oci", "policy", "request")),
    *(f"cdi_courier.{n}" for n in ("fastjson", "signature", "table")),
    *(f"cdi_courier_oci_hook.{n}" for n in ("entry", "log", "precreate")),
}


def installed(files: Any, interpreter: str = sys.executable) -> Installed:
    return Installed(
        interpreter=interpreter, settings=str(files.settings), state_dir=str(files.state), log=str(files.log)
    )


def bare(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [BARE, *arguments],
        input=stdin,
        capture_output=True,
        env={"LC_ALL": "C.UTF-8"},
        timeout=60,
        check=False,
    )


def hook(files: Any, stdin: bytes, **options: str) -> subprocess.CompletedProcess[bytes]:
    """Run the hook as the installer has it run."""
    return bare("-I", "-S", "-c", precreate.command(installed(files, **options), PATH), stdin=stdin)


def compile_(files: Any) -> None:
    compiling.write(compiling.compile_settled(str(files.settings)), str(files.table))


def config(value: str | None, key: str = KEY, **more: Any) -> bytes:
    annotations = {"io.container.manager": "libpod"} | ({} if value is None else {key: value})
    return json.dumps({"ociVersion": "1.0.2", "annotations": annotations, **more}, indent=1).encode()


NOWHERE = "/nonexistent/python3"


def test_an_annotated_container_is_edited_from_the_table(files: Any) -> None:
    """With a table, the interpreter that has everything is not needed; fields that CDI does not know stay."""
    compile_(files)

    done = hook(files, config("v.com/c=a", process={"env": ["P=1"], "x": None}), interpreter=NOWHERE)

    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout) == {
        "ociVersion": "1.0.2",
        "annotations": {
            "io.container.manager": "libpod",
            KEY: "v.com/c=a",
            "cdi-courier.io/status": "injected:v.com/c=a",
        },
        "process": {"env": ["P=1", "ALL=1", "A=1"], "x": None},
    }


def test_without_a_table_the_answer_is_the_same_and_the_table_is_made(files: Any) -> None:
    """The first container goes the slow way; when the files have rested, the next does not."""
    compile_(files)  # waits until the files have rested
    files.table.unlink()
    asked = config("v.com/c=b,v.com/c=a")

    slow = hook(files, asked)
    fast = hook(files, asked, interpreter=NOWHERE)

    assert (slow.returncode, slow.stderr) == (fast.returncode, fast.stderr) == (0, b"")
    assert slow.stdout == fast.stdout
    assert json.loads(fast.stdout)["process"]["env"] == ["ALL=1", "B=1", "A=1"]


def test_a_stale_table_gives_the_right_answer(files: Any) -> None:
    """What a changed spec file says counts at once."""
    compile_(files)
    files.spec("v.json", {"a": {"env": ["A=2"]}})

    done = hook(files, config("v.com/c=a"))

    assert json.loads(done.stdout)["process"]["env"] == ["A=2"]


@pytest.mark.parametrize(
    "damage", ["{", '{"format": 1}', "[]", "\0"], ids=["cut", "little", "list", "binary"]
)
def test_a_damaged_table_gives_the_right_answer(files: Any, damage: str) -> None:
    """It is made anew."""
    compile_(files)
    files.table.write_text(damage)

    done = hook(files, config("v.com/c=a"))

    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["process"]["env"] == ["ALL=1", "A=1"]
    assert "devices" in json.loads(files.table.read_text())


def test_a_table_that_lies_about_its_devices_is_not_the_last_word(files: Any) -> None:
    """One that is trusted but not what it says is made anew as well."""
    compile_(files)
    document = json.loads(files.table.read_text())
    document["devices"]["v.com/c=a"] = 7
    files.table.write_text(json.dumps(document))

    done = hook(files, config("v.com/c=a"))

    assert json.loads(done.stdout)["process"]["env"] == ["ALL=1", "A=1"]


@pytest.mark.parametrize("with_table", [True, False], ids=["light", "slow"])
@pytest.mark.parametrize(
    "data",
    [
        config(None),
        config("  "),
        b' {"a" : 1.0, "b": 1e400, "annotations": null }\n\n',
        '{"ü": "\\u00fc", "annotations": {}}'.encode(),
        b"{}",
    ],
    ids=["other-annotations", "blank", "odd-json", "escapes", "empty"],
)
def test_who_asks_for_nothing_gets_the_same_bytes(files: Any, data: bytes, with_table: bool) -> None:
    """White space, escapes, numbers that no parser keeps: all as it came."""
    if with_table:
        compile_(files)

    done = hook(files, data)

    assert (done.returncode, done.stdout, done.stderr) == (0, data, b"")


@pytest.mark.parametrize("with_table", [True, False], ids=["light", "slow"])
@pytest.mark.parametrize(
    ("policy", "value", "code"),
    [
        ("policy.local = 'deny'\n", "v.com/c=a", "POL001"),
        ("", "v.com/c=z", "CDI012"),
        ("", "v.com/c=a,,v.com/c=b", "ANN002"),
        ("", "nonsense", "ANN001"),
    ],
    ids=["denied", "unknown", "empty-item", "no-name"],
)
def test_a_refusal_is_said_on_stderr_and_in_the_log(
    files: Any, policy: str, value: str, code: str, with_table: bool
) -> None:
    """Exit status 1, nothing on stdout, and the cause where it can be found: Podman drops stderr."""
    files.configure(policy)
    if with_table:
        compile_(files)

    done = hook(files, config(value))

    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(f"cdi-courier: {code}: ".encode())
    assert f" {code}: " in files.log.read_text()


@pytest.mark.parametrize("with_table", [True, False], ids=["light", "slow"])
@pytest.mark.parametrize(
    ("delivery", "value", "code"),
    [
        ("policy.local = 'deny'\ndelivery.on_denied = 'skip'\n", "v.com/c=a", "POL001"),
        ("delivery.on_unresolvable = 'skip'\n", "v.com/c=z", "CDI012"),
    ],
    ids=["denied", "unknown"],
)
def test_what_is_skipped_starts_without_devices_and_is_logged(
    files: Any, delivery: str, value: str, code: str, with_table: bool
) -> None:
    """Only the marker is added, and the log has the cause."""
    files.configure(delivery)
    if with_table:
        compile_(files)
    asked = config(value)

    done = hook(files, asked)

    expected = json.loads(asked)
    expected["annotations"]["cdi-courier.io/status"] = f"skipped:{code}"
    assert done.returncode == 0
    assert json.loads(done.stdout) == expected
    assert code in files.log.read_text()


def test_another_dialect_is_answered_the_slow_way(files: Any) -> None:
    """A YAML list is read by who has a YAML parser."""
    files.configure("annotations.dialects = ['device-injector']\n")
    compile_(files)

    done = hook(files, config("- v.com/c=a\n", "cdi-devices.noderesource.dev/pod"))

    assert json.loads(done.stdout)["process"]["env"] == ["ALL=1", "A=1"]


@pytest.mark.parametrize("with_table", [True, False], ids=["light", "slow"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        b"NaN",
        b"null",
        b"[1]",
        b'{"annotations": [1]}',
        b'{"annotations": {"a": {}}}',
        b"1" * 5000,
        config("v.com/c=a", process=[1]),
        config("v.com/c=a", process={"env": {"a": 1}}),
        config("v.com/c=a").replace(b'"1.0.2"', b"1e999"),
    ],
    ids=[
        "empty",
        "zero",
        "no-utf8",
        "cut",
        "nested",
        "nan",
        "null",
        "list",
        "annotations-list",
        "annotation-object",
        "number",
        "process-list",
        "env-object",
        "infinite",
    ],
)
def test_what_is_no_config_is_refused_in_words(files: Any, data: bytes, with_table: bool) -> None:
    """Never a traceback, never a byte on stdout, and the exit status that fails the container."""
    if with_table:
        compile_(files)

    done = hook(files, data)

    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"cdi-courier: ")
    assert b"Traceback" not in done.stderr
    assert b"HOK004" not in done.stderr


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A hook with a table, for a device ``v.com/c=a``; there is no slow way."""
    root = tmp_path_factory.mktemp("hook")
    (root / "cdi").mkdir()
    spec = {"cdiVersion": "0.7.0", "kind": "v.com/c", "devices": [{"name": "a", "containerEdits": ALL_EDITS}]}
    (root / "cdi/v.json").write_text(json.dumps(spec))
    place = root / "config.toml"
    place.write_text(f"cdi.dirs = ['{root}/cdi']\ncdi.trust = 'any'\nservice.state_dir = '{root}'\n")
    compiling.write(compiling.compile_settled(str(place)), str(root / "table.json"))
    return Installed(interpreter=NOWHERE, settings=str(place), state_dir=str(root), log=str(root / "log"))


ALL_EDITS = {
    "env": ["A=1"],
    "deviceNodes": [{"path": "/dev/x", "hostPath": "/dev/null"}],
    "mounts": [{"hostPath": "/usr", "containerPath": "/m"}],
    "hooks": [{"hookName": "poststop", "path": "/h"}],
    "additionalGids": [5],
    "netDevices": [],
}

_numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_leaves = st.none() | st.booleans() | _numbers | st.text(max_size=3)
_json = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
_fields = st.sampled_from(["env", "user", "devices", "resources", "namespaces", "poststop", "uid", "type"])
_parts = st.dictionaries(
    st.sampled_from(["process", "linux", "mounts", "hooks"]),
    st.one_of(_json, st.dictionaries(_fields, st.one_of(_json, st.lists(st.dictionaries(_fields, _json))))),
)


@settings(max_examples=400, deadline=None)
@given(parts=_parts, asks=st.booleans())
def test_a_config_of_any_shape_is_edited_or_refused_in_words(
    known: Installed, parts: dict[str, Any], asks: bool
) -> None:
    """Whatever stands where the specification says something else, it is an error of ours, or it stays."""
    data = json.dumps({"annotations": {KEY: "v.com/c=a"} if asks else {}, **parts}).encode()
    try:
        answer, code = precreate.answer(data, known), ""
    except CourierError as error:
        answer, code = b"", error.code

    assert code in ("", "CDI018", "HOK002")
    assert asks or answer == data
    if asks and not code:
        assert json.loads(answer)["annotations"]["cdi-courier.io/status"] == "injected:v.com/c=a"


def test_an_interpreter_that_is_gone_is_a_refusal(files: Any) -> None:
    """Without a table and without the slow way nothing is known, so the container must not start."""
    done = hook(files, config("v.com/c=a"), interpreter=NOWHERE)

    assert (done.returncode, done.stdout) == (1, b"")
    assert b"HOK003" in done.stderr
    assert "HOK003" in files.log.read_text()


def test_an_interpreter_that_lacks_the_product_is_a_refusal_in_words(files: Any, tmp_path: Path) -> None:
    """As after an upgrade of the system's Python below a virtual environment; the log has the cause."""
    other = tmp_path / "python3"
    other.write_text(f'#!/bin/sh\nexec {BARE} -S "$@"\n')
    other.chmod(0o755)

    done = hook(files, config("v.com/c=a"), interpreter=str(other))

    assert (done.returncode, done.stdout) == (1, b"")
    assert b"Traceback" not in done.stderr
    assert "HOK003" in files.log.read_text()
    assert "ModuleNotFoundError" in files.log.read_text()


def test_settings_that_cannot_be_read_are_a_refusal(files: Any) -> None:
    """The log that was told at installation has the line at fault."""
    files.settings.write_text("[nonsense]\n")

    done = hook(files, config("v.com/c=a"))

    assert (done.returncode, done.stdout) == (1, b"")
    assert "SET003" in files.log.read_text()


def test_a_state_directory_that_cannot_be_made_only_costs_time(files: Any) -> None:
    """The answer does not depend on the table being kept."""
    files.state.touch()

    done = hook(files, config("v.com/c=a"))

    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["process"]["env"] == ["ALL=1", "A=1"]


def test_a_closed_stdout_is_no_traceback(files: Any) -> None:
    """Whoever reads may have gone: exit status 1 and words."""
    compile_(files)
    reader, writer = os.pipe()
    os.close(reader)
    script = precreate.command(installed(files), PATH)

    done = subprocess.run(
        [BARE, "-I", "-S", "-c", script],
        input=config(None),
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writer)

    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


def test_the_light_way_imports_only_what_is_allowed(files: Any) -> None:
    """A hook that edits a container loads the light modules and the closure of a handful, nothing else."""
    compile_(files)
    script = precreate.command(installed(files, NOWHERE), PATH)

    done = bare("-X", "importtime", "-I", "-S", "-c", script, stdin=config("v.com/c=a"))
    base = bare("-X", "importtime", "-I", "-S", "-c", f"import {ALLOWED}")

    assert done.returncode == 0
    more = _imported(done.stderr) - _imported(base.stderr)
    assert more == LIGHT


def _imported(importtime: bytes) -> set[str]:
    lines = [line for line in importtime.decode().splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}
