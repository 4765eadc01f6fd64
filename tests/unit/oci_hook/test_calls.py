"""Which calls are about us: the gate, its Python side and models of runc and crun agree on any of them."""

from __future__ import annotations

import getopt
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cdi_courier_oci_hook import calls
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.gate import Gated

KEY = "nvidia.cdi.k8s.io"
VALUES = ["root", "log", "log-format", "criu", "rootless"]
FLAGS = ["debug", "systemd-cgroup", "help", "h", "version", "v"]
CREATE_VALUES = ["bundle", "console-socket", "pidfd-socket", "pid-file", "preserve-fds", "b"]
CREATE_FLAGS = ["no-pivot", "no-new-keyring", "detach", "d", "keep", "no-subreaper", "help", "h"]
LONG = ["bundle=", "config=", "console-socket=", "pid-file=", "preserve-fds=", "detach", "keep"]
LONG += ["no-new-keyring", "no-pivot", "no-subreaper", "help", "usage"]

# What words are made of: bundles that ask and that do not, verbs where they are none, every spelling.
_WORDS = """ create run create state exec delete x asks plain - -- -b --bundle --root -root --log --log=l
-log=l --log-format=json --root=create --criu --debug --systemd-cgroup --debug=false --rootless=auto --new
--new=create -n --help --bundle=asks --bundle=plain -b=asks -b=plain -basks -bplain -bundle=asks -bundle --bun
--bundl=asks -d -dbasks -db --pid-file --pid-file=p --pid --no-pivot --preserve-fds --console-socket=s --keep
--no-pivot=true --config -f --config=config.json
"""
words = st.sampled_from(["", *_WORDS.split()])
command_lines = st.one_of(
    st.lists(words, max_size=7),
    st.tuples(
        st.lists(words, max_size=3), st.sampled_from(["create", "run"]), st.lists(words, max_size=4)
    ).map(lambda parts: [*parts[0], parts[1], *parts[2]]),
)


def go_flags(
    arguments: Sequence[str], values: Sequence[str], flags: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Go's flag package: (options, rest). Raises LookupError for what it refuses."""
    found = {}
    rest = list(arguments)
    while rest:
        word = rest[0]
        if len(word) < 2 or word[0] != "-":
            break
        rest.pop(0)
        if word == "--":
            break
        name, equals, value = word[2 if word[1] == "-" else 1 :].partition("=")
        if name in flags:
            continue
        if name not in values or (not equals and not rest):
            raise LookupError(word)
        found[name] = value if equals else rest.pop(0)
    return found, rest


def runc(argv: Sequence[str]) -> str | None:
    """The bundle that runc would create from, as urfave/cli v1 reads it; None if it would not."""
    try:
        found, rest = go_flags(argv, VALUES, FLAGS)
        if not rest or rest[0] not in ("create", "run") or "help" in found:
            return None
        ordered, others, may_follow = [], [], False
        for position, word in enumerate(rest[1:], 1):
            option = word[:1] == "-" and len(word) > 1
            if may_follow and not option:
                may_follow = False
                ordered.append(word)
            elif word == "--":
                others += rest[position:]
                break
            elif option:
                ordered.append(word)
                may_follow = "=" not in word
            else:
                others.append(word)
        found, rest = go_flags([*ordered, *others], CREATE_VALUES, CREATE_FLAGS)
    except LookupError:
        return None
    bundles = [value for name, value in found.items() if name in ("bundle", "b")]
    if len(bundles) > 1:  # "Cannot use two forms of the same flag"
        return None
    return (bundles[-1] or ".") if len(rest) == 1 and bundles else "." if len(rest) == 1 else None


def crun(argv: Sequence[str]) -> str | None:
    """The bundle that crun would create from, by the C library's rules; None if it would not."""
    try:
        _, rest = getopt.getopt(
            list(argv),
            "vVh",
            [
                "cgroup-manager=",
                "debug",
                "log=",
                "log-format=",
                "root=",
                "rootless=",
                "systemd-cgroup",
                "log-level=",
            ],
        )
        if not rest or rest[0] not in ("create", "run"):
            return None
        found, others = getopt.getopt(rest[1:], "b:f:d", LONG)
    except getopt.GetoptError:
        return None
    names = {name.lstrip("-") for name, _ in found}
    bundles = [value for name, value in found if name.lstrip("-") in ("bundle", "b")]
    if len(others) != 1 or names & {"help", "usage", "config", "f"} or "" in bundles:
        return None
    return bundles[-1] if bundles else "."


@pytest.fixture(scope="module")
def gated() -> Iterator[Gated]:
    """A gate, and a working directory with a bundle that asks and one that does not, itself one that asks."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "settings").mkdir()
        place = root / "settings/config.toml"
        place.write_text(f"oci_hook.gate_dir = '{root}/gates'\nservice.state_dir = '{root}/state'\n")
        for bundle, key in (("asks", KEY), ("plain", "other"), (".", KEY)):
            (root / bundle).mkdir(exist_ok=True)
            config = {"annotations": {key: "v.com/c=a"}}
            (root / bundle / "config.json").write_text(json.dumps(config))
        yield Gated(root, place)


@settings(max_examples=400, deadline=None)
@given(command_lines)
@example(["--root", "create", "state", "create"])
@example(["--new", "create", "--bundle=asks", "x"])
@example(["create", "-b=asks", "x"])
@example(["create", "-dbasks", "x"])
@example(["create", "--bundle", "plain", "create"])
@example(["create", "x", "--bundle", "asks"])
@example(["--", "create", "x"])
@example(["create", "--pid", "--bundle=asks", "x"])
@example(["create", "-b=asks", "-bundle=asks", "", "-b=plain"])
def test_no_command_line_creates_an_asking_container_behind_our_back(gated: Gated, argv: list[str]) -> None:
    """Where runc or crun would create from a bundle that asks, Python is started and sees that bundle.

    And whoever is reached gets the arguments as they were.
    """
    reached = gated.call(*argv)
    call = calls.parse(argv)
    seen = [reading.bundle or "." for reading in call.readings]

    assert reached.argv[-len(argv) :] == tuple(argv) or not argv
    for bundle in (runc(argv), crun(argv)):
        if bundle in ("asks", "."):
            assert reached.who == "python"
            assert call.verb in ("create", "run")
            assert bundle in seen
    if reached.who == "real":
        assert reached.argv == tuple(argv)
    if call.verb not in calls.CREATES:
        assert reached.who == "real"


@pytest.mark.parametrize(
    ("argv", "bundle"),
    [
        (["--root", "r", "create", "--bundle", "b", "x"], "b"),
        (["--root=r", "create", "--bundle=b", "x"], "b"),
        (["-root", "r", "create", "-b", "b", "x"], "b"),
        (["--root", "create", "create", "-b=b", "x"], "b"),
        (["create", "-bb", "x"], "b"),
        (["run", "-dbb", "x"], "b"),
        (["create", "--bun", "b", "x"], "b"),
        (["create", "--bundle", "a", "--bundle", "b", "x"], "b"),
        (["create", "--pid-file", "--bundle", "create"], ""),
        (["create", "x", "--bundle", "b"], "b"),
        (["create", "--", "x"], ""),
        (["--systemd-cgroup", "--log-format", "json", "run", "x"], ""),
    ],
)
def test_the_bundle_is_found_in_every_spelling(argv: list[str], bundle: str) -> None:
    """Long, short, attached, clustered, abbreviated, repeated, after the id, and not in another's value."""
    call = calls.parse(argv)

    assert call.verb in ("create", "run")
    assert bundle in [reading.bundle for reading in call.readings]
    assert {reading.container for reading in call.readings} <= {"x", "create"}


@pytest.mark.parametrize(
    "argv",
    [
        ["exec", "-p", "f", "x"],
        ["exec", "--process=f", "x"],
        ["exec", "--detach", "--process", "f", "--pid-file", "p", "x"],
        ["exec", "-p=f", "x", "-p", "no"],
        ["exec", "-dpf", "x"],
        ["--root", "exec", "exec", "-process", "f", "x"],
    ],
    ids=" ".join,
)
def test_the_process_and_the_container_of_an_exec_are_found(argv: list[str]) -> None:
    """In every spelling; what follows the id is the container's own."""
    call = calls.parse(argv)

    assert call.verb == "exec"
    assert ("f", "x") in [(reading.process, reading.container) for reading in call.readings]


@given(st.lists(words, max_size=8))
def test_where_the_runtime_logs_is_said_before_the_verb(argv: list[str]) -> None:
    """Whatever follows ``--log l --log-format json state`` changes nothing about it."""
    call = calls.parse(["--log", "l", "--log-format", "json", "state", *argv])

    assert (call.verb, call.log, call.log_format) == ("", "l", "json")
