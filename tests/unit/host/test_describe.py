"""The child that describes the host: what it answers, and what becomes of one that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest
from cdi_courier.errors import HostError
from cdi_courier.host import describe as module
from cdi_courier.host.answers import Findings, late, together
from cdi_courier.host.describe import describe
from cdi_courier.host.model import FACTS, Fact, Host, Runtime, from_json, to_json
from cdi_courier.settings import ProbeSettings, RuntimeSettings, Settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support import fake_crio
from support.host import lives
from support.waiting import wait_for


def test_the_child_describes_the_host(root: Path, data: Path) -> None:
    """Every fact, source and problem comes through; the settings go to it."""
    settings = Settings(runtimes={"docker": RuntimeSettings(ignore=True)})
    (root / "run/docker.sock").touch()
    with fake_crio.crio(root / "run/crio/crio.sock", data):
        host = describe(settings, 20, root=str(root))

    (runtime,) = host.runtimes
    assert host.problems == ()
    assert (runtime.key, runtime.version) == ("cri-o", "1.36.3")
    assert runtime.facts["nri"] == Fact("on", "CRI-O GET /config")
    assert runtime.problems[0].startswith("HST106")


def test_a_usual_host_is_described_within_a_second(root: Path, data: Path) -> None:
    """Two runtimes and Podman, child included; the best of three, on a machine that does other things."""
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/podman").write_text(f"#!/bin/sh\ncat {data}/podman-4.3.1-info.json\n")
    (root / "usr/bin/podman").chmod(0o755)
    durations = []
    with (
        fake_crio.crio(root / "run/crio/crio.sock", data, variant="nri-off"),
        fake_crio.containerd(root / "run/containerd/containerd.sock", data, "2.1.9", "nri-off"),
    ):
        for _ in range(3):
            start = time.monotonic()
            host = describe(Settings(), root=str(root))
            durations.append(time.monotonic() - start)

    assert {runtime.kind for runtime in host.runtimes} == {"cri-o", "containerd", "podman"}
    assert min(durations) < 1


def test_grpcio_does_not_load_where_the_host_is_described_from() -> None:
    """25 MB that must not stay in the daemon."""
    script = (
        "import sys\nfrom cdi_courier.host.describe import describe\n"
        "from cdi_courier.settings import Settings\ndescribe(Settings(), root='/nowhere')\n"
        "print('grpc' in sys.modules, 'google.protobuf' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == "False False\n"


def test_grpcio_does_not_load_where_no_socket_asks_for_it() -> None:
    """On a host with Podman alone the child does without."""
    script = (
        "import sys; from cdi_courier.host.probe import *; host(Request(files.Root('/nowhere'), 1, 1)); "
        "print('grpc' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import time; time.sleep(60)", "HST103: the probing process did not answer within 0.5 s"),
        (
            "import os; os.close(1); os.close(2); import time; time.sleep(60)",
            "HST103: the probing process did",
        ),
        ("print('garbage')", 'HST108: the probing process answered with garbage: "garbage\\n"'),
        ("print('[]')", "HST108: the probing process answered with garbage"),
        (
            'print(\'{"runtimes": [{}], "problems": []}\')',
            "HST108: the probing process answered with garbage",
        ),
        ("print('[' * 100000)", "HST108: the probing process answered with garbage"),
        ("raise SystemExit('bad')", 'HST108: the probing process ended with status 1: "bad"'),
        ("import os; os.kill(os.getpid(), 11)", "HST108: the probing process ended with status -11"),
        ("while True: print('x' * 100000)", "HST108: the probing process printed more than"),
    ],
    ids=["hangs", "hangs-mute", "garbage", "list", "shape", "depth", "fails", "crashes", "floods"],
)
def test_a_child_that_fails_is_a_problem_in_words(
    monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    """Never an exception, never a wait without end."""
    monkeypatch.setattr(module, "_COMMAND", ("-c", script))
    timeout = 0.5 if "hangs" in said or "sleep" in script else 20
    start = time.monotonic()

    host = describe(Settings(), timeout)

    assert time.monotonic() - start < timeout + 5
    assert host.runtimes == ()
    assert [problem.startswith(said) for problem in host.problems] == [True]


@pytest.mark.parametrize(("probe", "total"), [(2.0, 9.0), (30.0, 31.0)], ids=["default", "slow host"])
def test_the_whole_has_time_for_one_probe(
    monkeypatch: pytest.MonkeyPatch, probe: float, total: float
) -> None:
    """``[probe] timeout`` is not cut short by the limit of the whole description."""
    script = "import json, sys; r = json.load(sys.stdin); print(r['timeout'], r['total'])"
    monkeypatch.setattr(module, "_COMMAND", ("-c", script))

    (problem,) = describe(attrs.evolve(Settings(), probe=ProbeSettings(timeout=probe))).problems

    assert f"{probe} {total}" in problem


def test_an_interpreter_that_is_gone_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package may be upgraded under a running daemon."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")

    (problem,) = describe(Settings()).problems

    assert problem.startswith("HST108: the probing process cannot be started")


def test_what_a_hanging_child_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Podman, for example."""
    note = tmp_path / "pid"
    script = f"import subprocess; subprocess.run(['sh', '-c', 'echo $$ > {note}; exec sleep 60'])"
    monkeypatch.setattr(module, "_COMMAND", ("-c", script))

    describe(Settings(), 1.0)

    pid = int(note.read_text())
    wait_for(lambda: not lives(pid), 5, "the grandchild to end")


def test_the_working_directory_brings_no_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    """A json.py that lies there is not imported."""
    (tmp_path / "json.py").write_text("raise SystemExit('foreign')")
    monkeypatch.chdir(tmp_path)

    assert describe(Settings(), root=str(root)) == Host()


# Asking several at once


def test_answers_come_by_name_and_errors_with_them() -> None:
    """One question's failure is no other's."""

    def fail() -> int:
        raise HostError("HST101", "nobody")

    def break_() -> int:
        raise ZeroDivisionError("oops\x1b")

    answers = together({"a": lambda: 1, "b": fail, "c": break_}, 10)

    assert answers["a"] == 1
    assert str(answers["b"]) == "HST101: nobody"
    assert str(answers["c"]) == 'HST109: c: an internal error: "ZeroDivisionError: oops\\u001b" (report it)'


def test_a_late_answer_is_none() -> None:
    """Who is asked for longer than the time is left behind, and the others' answers count."""
    import threading

    ended = threading.Event()

    answers = together({"slow": ended.wait, "quick": lambda: True}, 0.1)
    ended.set()

    assert answers["quick"] is True
    assert str(answers["slow"]) == str(late("slow", 0.1))


def test_no_fact_is_noted_under_an_unknown_name() -> None:
    """Names are those of `FACTS`."""
    with pytest.raises(KeyError):
        Findings().learn("nril", "on", "")


# What is passed on

_JSON = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
_FACTS = st.dictionaries(st.sampled_from(sorted(FACTS)), st.builds(Fact, _JSON, st.text(max_size=9)))
_TEXT = st.text(max_size=9)
_RUNTIMES = st.builds(
    Runtime,
    _TEXT,
    st.sampled_from(["containerd", "podman"]),
    _TEXT,
    _TEXT,
    _FACTS,
    st.lists(_TEXT).map(tuple),
)


@hypothesis_settings(max_examples=50, deadline=None)
@given(st.builds(Host, st.lists(_RUNTIMES, max_size=3).map(tuple), st.lists(_TEXT).map(tuple)))
def test_a_host_survives_its_json(host: Host) -> None:
    """What the child writes is what the caller reads."""
    assert from_json(json.loads(json.dumps(to_json(host)))) == host


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.7.24~ds1", (1, 7, 24)),
        ("v2.1.5-k3s1", (2, 1, 5)),
        ("2.2.1-0ubuntu1~24.04.2", (2, 2, 1)),
        ("1.36.3", (1, 36, 3)),
        ("1.7", (1, 7, 0)),
        ("", None),
        ("unknown", None),
        ("1", None),
    ],
)
def test_versions_are_read_leniently(version: str, expected: tuple[int, int, int] | None) -> None:
    """An optional v, the first numbers, and whatever a distribution appends."""
    assert Runtime("k", "containerd", version).version_tuple == expected


def test_the_messages_of_the_child_s_libraries_do_not_spoil_its_answer(root: Path, tmp_path: Path) -> None:
    """Whatever is printed while it asks goes to stderr."""
    (tmp_path / "sitecustomize.py").write_text("import atexit, os; os.write(2, b'noise')\n")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cdi_courier.host"],
        input=json.dumps({"root": str(root), "timeout": 1, "total": 1, "runtimes": {}}),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )

    assert json.loads(done.stdout) == {"runtimes": [], "problems": []}
    assert "noise" in done.stderr
