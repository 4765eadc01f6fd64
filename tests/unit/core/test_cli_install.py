"""`cdi-courier install` and `uninstall`: what is shown, written, run, and which exit code tells it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from cdi_courier import changes
from cdi_courier.changes import ChangeSet, FileChange
from cdi_courier.cli import command, held
from cdi_courier.cli import install as install_command
from cdi_courier.errors import HostError, PluginError
from cdi_courier.hookspecs import API_VERSION, Needs, Offer
from cdi_courier.host import gate_users
from cdi_courier.host.model import Fact, Host, Runtime
from cdi_courier.plugins import Plugins
from click.testing import CliRunner, Result

OLD = b"version = 2\n"
NEW = b"version = 2\nimports = []\n"


@attrs.define
class FakeBackend:
    """A backend that plans what it is given, for every runtime.

    ready: whether it can serve by now. possible: whether it ever could; unfit: runtimes that it never could.
    """

    plans: Callable[[Runtime], ChangeSet]
    ready: Callable[[Runtime], bool]
    name: str = "fake"
    api_version: int = API_VERSION
    possible: bool = True
    unfit: tuple[str, ...] = ()

    def offer(self, runtime: Runtime, _: Any) -> Offer:
        needs: Needs = "restart" if self.possible and runtime.key not in self.unfit else "impossible"
        return Offer(self.name, "full", "nothing" if self.ready(runtime) else needs, "it is not restarted")

    def plan(self, runtime: Runtime, _: Any) -> ChangeSet:
        return self.plans(runtime)


class Bench:
    """A host of fakes: runtimes, a backend, files, and a restart command that notes its runs."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.main = root / "etc/main.toml"
        self.drop_in = root / "etc/conf.d/50.toml"
        self.ran = root / "ran"
        self.main.parent.mkdir()
        self.main.write_bytes(OLD)
        self.keys = ["containerd"]
        self.plans: Callable[[Runtime], ChangeSet] = self.plan
        self.backend = FakeBackend(lambda runtime: self.plans(runtime), lambda _: self.ran.exists())
        self.plugins = Plugins({"fake": self.backend})  # type: ignore[dict-item]
        self.settings = ""
        self.problems: tuple[str, ...] = ()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(root))  # else a user without a session is warned
        monkeypatch.setattr(changes, "FOLDER", str(root / "changes"))
        monkeypatch.setattr(install_command, "_READY_TIMEOUT", 0.0)
        monkeypatch.setattr(held, "_READY_TIMEOUT", 0.0)
        monkeypatch.setattr(install_command, "_describe", lambda _: self.describe())
        monkeypatch.setattr(install_command, "discover", lambda _: self.plugins)

    def describe(self) -> Host:
        return Host(
            tuple(
                Runtime(key, "containerd", "1.7.24", f"/run/{key}.sock", {"nri": Fact("off", "a test")})
                for key in self.keys
            ),
            self.problems,
        )

    def restart(self, script: str = "", status: int = 0) -> str:
        """A command that notes that it has run, does the Python in `script`, and ends with the status."""
        path = self.root / "restart.py"
        path.write_text(
            f"import os, sys\nopen({str(self.ran)!r}, 'a').write('ran\\n')\n{script}\nsys.exit({status})\n"
        )
        return f"{sys.executable} '{path}'"

    def plan(self, runtime: Runtime) -> ChangeSet:
        files = (
            FileChange(str(self.drop_in), b"x = 1\n", "turns it on"),
            FileChange(str(self.main), NEW, "has an import"),
        )
        return ChangeSet("fake", runtime.key, files, self.restart(), ("a note",))

    def planned(self, **changed: Any) -> None:
        """Change what is planned."""
        self.plans = lambda runtime: attrs.evolve(self.plan(runtime), **changed)

    def invoke(self, *arguments: str, code: int = 0) -> Result:
        config = self.root / "settings.toml"
        config.write_text(self.settings)
        result = CliRunner().invoke(command, ["--config", str(config), *arguments])
        if isinstance(result.exception, HostError | PluginError):
            assert code == 1, result.exception  # as `main` has it
        else:
            assert result.exit_code == code, (result.output, result.exception)
        return result

    @property
    def runs(self) -> int:
        return len(self.ran.read_text().splitlines()) if self.ran.exists() else 0

    @property
    def installed(self) -> bool:
        """Whether all is written; it must not be half of it."""
        states = {
            self.main.read_bytes() == NEW,
            self.drop_in.exists(),
            bool(changes.installed(changes.FOLDER)),
        }
        assert len(states) == 1
        return states.pop()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """One runtime, one backend, nothing installed."""
    return Bench(tmp_path, monkeypatch)


# Installing


def test_bare_install_writes_and_prints_the_restart_command(bench: Bench):
    """The difference, the files, the notes and the command are told; nothing is restarted."""
    output = bench.invoke("install").output

    assert bench.installed
    assert bench.runs == 0
    assert f"+++ {bench.main}\n" in output
    assert "+imports = []\n" in output
    assert f"containerd: wrote {bench.main}: has an import\n" in output
    assert "containerd: a note\n" in output
    assert output.endswith(f"containerd: to make it effective: {bench.restart()}\n")


def test_a_dry_run_only_shows(bench: Bench):
    """The difference is there, the files are as before, and no manifest is made."""
    output = bench.invoke("install", "--dry-run").output

    assert not bench.installed
    assert "+imports = []\n" in output
    assert "a note" in output
    assert bench.runs == 0


def test_apply_restarts_and_looks_again(bench: Bench):
    """The command is run once, and the backend is asked whether it can serve now."""
    output = bench.invoke("install", "--apply").output

    assert bench.installed
    assert bench.runs == 1
    assert output.endswith("containerd: fake can serve it\n")


def test_apply_looks_until_the_runtime_is_there(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    """A runtime that takes a moment after its restart is given it."""
    monkeypatch.setattr(install_command, "_READY_TIMEOUT", 30.0)
    monkeypatch.setattr(install_command, "_READY_PAUSE", 0.0)
    looks: list[int] = []
    bench.backend.ready = lambda _: looks.append(1) is None and len(looks) > 3
    bench.invoke("install", "--apply")

    assert len(looks) == 4


def test_what_is_restarted_in_vain_is_told(bench: Bench):
    """If the backend still cannot serve, that is a failure with the reason, and the files stay."""
    bench.backend.ready = lambda _: False
    output = bench.invoke("install", "--apply", code=1).output

    assert "CHG008" in output
    assert "it is not restarted" in output
    assert bench.installed


def test_a_runtime_that_is_gone_after_its_restart_is_told(bench: Bench):
    """Not finding it again is a failure too, and what kept the host from being described is its reason."""
    real = bench.describe
    gone = Host(problems=("HST108: the probing process said nothing for 10 s",))
    bench.describe = lambda: real() if not bench.runs else gone  # type: ignore[method-assign]
    output = bench.invoke("install", "--apply", code=1).output

    assert "not found any more; HST108: the probing process said nothing for 10 s" in output


@pytest.mark.parametrize(
    ("restart", "says"),
    [
        pytest.param("false", "status 1", id="fails"),
        pytest.param("/nonexistent/restart", "cannot be run: No such file", id="absent"),
        pytest.param("restart 'it", "cannot be run: No closing quotation", id="odd-quotes"),
        pytest.param(" ", "cannot be run", id="blank"),
        pytest.param("sh -c 'echo the cause >&2; exit 3'", 'status 3, and said "the cause"', id="says-why"),
    ],
)
def test_a_failed_restart_takes_everything_back(bench: Bench, restart: str, says: str):
    """The files are as before, and the failure is told with what the command said."""
    bench.planned(restart=restart)
    output = bench.invoke("install", "--apply", code=1).output

    assert not bench.installed
    assert "CHG007" in output
    assert says in output
    assert "taken back" in output
    assert "fails without it too" in output


def test_a_restart_that_only_our_files_make_fail_is_repeated_without_them(bench: Bench):
    """The runtime runs again, as it was, after what it did not start with is taken back."""
    script = f"if os.path.exists({str(bench.drop_in)!r}): sys.exit(1)"
    bench.plans = lambda runtime: attrs.evolve(bench.plan(runtime), restart=bench.restart(script))
    output = bench.invoke("install", "--apply", code=1).output

    assert not bench.installed
    assert bench.runs == 2
    assert "restarted without it" in output


def test_a_daemon_that_keeps_the_restart_command_s_output_is_not_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    """An init script may leave the daemon its own output; what that writes later is nobody's trouble."""
    monkeypatch.setattr("cdi_courier.cli.installing._RESTART_TIMEOUT", 30.0)
    late, go = bench.root / "late", bench.root / "go"
    os.mkfifo(go)
    os.mkfifo(late)
    # Once told to, it writes where the command wrote, and then says whether it still lives.
    daemon = f"(read line < {go}; echo later; echo alive > {late}) &"
    script = bench.root / "init.sh"
    script.write_text(f"#!/bin/sh\n{daemon}\necho started\ntouch {bench.ran}\n")
    script.chmod(0o755)
    bench.planned(restart=str(script))
    output = bench.invoke("install", "--apply").output
    go.write_text("now\n")

    assert output.endswith("fake can serve it\n")
    assert late.read_text() == "alive\n"


def test_the_restart_command_meets_no_shell(bench: Bench):
    """Its words are split, and nothing in them is expanded or chained."""
    bench.planned(restart=f"echo $HOME; touch {bench.root}/chained")
    bench.backend.ready = lambda _: True
    bench.invoke("install", "--apply")

    assert not (bench.root / "chained").exists()


def test_installing_twice_says_so(bench: Bench):
    """The second time nothing is written, and the restart is still named, since it may be missing."""
    bench.invoke("install")
    output = bench.invoke("install").output

    assert bench.installed
    assert "fake is installed already" in output
    assert "wrote" not in output


def test_a_failed_restart_of_what_was_there_already_takes_nothing_back(bench: Bench):
    """What an earlier install wrote is no news to the runtime, so it is not undone for that."""
    bench.invoke("install")
    bench.planned(restart="false")
    output = bench.invoke("install", "--apply", code=1).output

    assert bench.installed
    assert "CHG007" in output


def test_where_nothing_is_to_be_done_only_the_note_is_printed(bench: Bench):
    """No file, no restart, no manifest."""
    bench.planned(files=(), restart="")

    assert bench.invoke("install", "--apply").output == "containerd: a note\n"
    assert changes.installed(changes.FOLDER) == ()


def test_where_only_the_restart_is_missing_apply_restarts(bench: Bench):
    """A plan without files may have a command; it is run and looked at all the same."""
    bench.planned(files=())
    bench.invoke("install", "--apply")

    assert bench.runs == 1


def test_a_file_that_was_changed_since_needs_force(bench: Bench):
    """Somebody's edit is not written over without --force."""
    bench.invoke("install")
    bench.drop_in.write_bytes(b"theirs")

    assert "CHG003" in bench.invoke("install", code=1).output
    assert bench.drop_in.read_bytes() == b"theirs"
    bench.invoke("install", "--force")
    assert bench.installed


# Which backend, which runtime


def test_one_runtimes_trouble_is_not_the_others(bench: Bench):
    """What can be installed is, and the exit code tells that not all could be."""
    bench.keys = ["one", "two"]

    def plans(runtime: Runtime) -> ChangeSet:
        if runtime.key == "one":
            raise HostError("NRI101", "it has none", "use another")
        return bench.plan(runtime)

    bench.plans = plans
    output = bench.invoke("install", code=1).output

    assert "one: NRI101: it has none (use another)" in output
    assert bench.installed


@pytest.mark.parametrize("asked", [[], ["--runtime", "one"]], ids=["all", "that-one"])
@pytest.mark.parametrize("others", [[], ["two"]], ids=["alone", "beside-another"])
def test_a_runtime_that_a_backend_is_not_for_is_left_alone_beside_another(
    bench: Bench, asked: list[str], others: list[str]
):
    """To name a backend fails only if it serves none, or not the runtime that was named too."""
    bench.keys = ["one", *others]

    def plans(runtime: Runtime) -> ChangeSet:
        if runtime.key == "one":
            raise HostError("NRI101", "it has none", "use another")
        return bench.plan(runtime)

    bench.plans = plans
    bench.backend.unfit = ("one",)
    fine = bool(others) and not asked
    output = bench.invoke("install", "--backend", "fake", *asked, code=0 if fine else 1).output

    assert f"one: {'left alone: ' if fine else ''}NRI101: it has none" in output
    assert bool(changes.installed(changes.FOLDER)) is fine


def test_what_a_backend_plans_and_cannot_do_is_a_failure_whatever_it_offers(bench: Bench):
    """A restart that fails is told as such, also where the backend's offer has been that it is impossible."""
    bench.keys = ["one", "two"]
    bench.backend.possible = False
    bench.plans = lambda runtime: attrs.evolve(
        bench.plan(runtime), restart=bench.restart(status=1) if runtime.key == "one" else ""
    )
    output = bench.invoke("install", "--backend", "fake", "--apply", code=1).output

    assert "one: CHG007" in output
    assert "left alone" not in output


@pytest.mark.parametrize("name", ["two", "/run/two.sock"], ids=["key", "endpoint"])
def test_one_runtime_can_be_named(bench: Bench, name: str):
    """By its key or its endpoint; the others are left alone."""
    bench.keys = ["one", "two"]
    bench.invoke("install", "--runtime", name)

    assert [manifest.runtime for manifest in changes.installed(changes.FOLDER)] == ["two"]


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        pytest.param('[runtimes]\n"containerd" = {ignore = true}\n', False, id="ignored"),
        pytest.param('[runtimes]\ncontainerd = {backend = "fake"}\n', True, id="a-backend-of-its-own"),
    ],
)
@pytest.mark.parametrize("keys", [["containerd"], ["/run/one.sock", "/run/two.sock"]], ids=["one", "two"])
def test_the_settings_of_a_runtime_count(bench: Bench, settings: str, written: bool, keys: list[str]):
    """[runtimes] may leave runtimes alone or give them a backend, by their kind also where there are two."""
    bench.backend.possible = False
    bench.keys = keys
    bench.settings = settings
    bench.invoke("install")

    assert bench.installed is written


def test_a_backend_that_settings_demand_and_that_is_not_there_is_said(bench: Bench):
    """It is that runtime's trouble, and no wrong usage: the others are set up."""
    bench.keys = ["one", "two"]
    bench.settings = '[runtimes]\n"/run/one.sock" = {backend = "absent"}\n'
    output = bench.invoke("install", code=1).output

    assert 'one: PLG003: there is no backend "absent"; installed: fake' in output
    assert [manifest.runtime for manifest in changes.installed(changes.FOLDER)] == ["two"]


def test_without_a_recommendation_that_is_said(bench: Bench):
    """No backend that could serve is a failure with what each of them said; naming one is the way out."""
    bench.backend.possible = False
    output = bench.invoke("install", code=1).output

    assert "PLG004" in output
    assert "fake: it is not restarted" in output
    bench.invoke("install", "--backend", "fake")
    assert bench.installed


def test_a_host_without_runtimes_is_a_failure(bench: Bench):
    """There is nothing to set up, and that is said."""
    bench.keys = []
    result = bench.invoke("install", code=1)

    assert isinstance(result.exception, HostError)
    assert result.exception.code == "CHG010"


def test_what_hinders_the_description_is_told(bench: Bench):
    """A host's problems are warnings; what was found is installed."""
    bench.problems = ("no permission to look into /run/x",)

    assert "warning: no permission to look into /run/x" in bench.invoke("install").output
    assert bench.installed


def test_a_backend_that_fails_to_plan_is_named(bench: Bench):
    """Foreign code may raise anything: it is a message, and no traceback."""

    def plans(_: Runtime) -> ChangeSet:
        raise KeyError("x")

    bench.plans = plans

    assert "PLG002" in bench.invoke("install", code=1).output


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["install", "--dry-run", "--apply"], id="show-and-restart"),
        pytest.param(["install", "--apply", "--no-restart"], id="restart-and-not"),
        pytest.param(["uninstall", "--apply", "--no-restart"], id="uninstall-restart-and-not"),
        pytest.param(["install", "--backend", "absent"], id="no-such-backend"),
        pytest.param(["install", "--runtime", "podman"], id="no-such-runtime"),
        pytest.param(["install", "--bogus"], id="no-such-option"),
    ],
)
def test_wrong_usage_has_its_own_exit_code(bench: Bench, arguments: list[str]):
    """Contradictions and names that do not exist are 2, and nothing is written."""
    bench.invoke(*arguments, code=2)

    assert not bench.installed


@pytest.mark.parametrize("state", ["disabled", "broken"])
def test_a_backend_that_cannot_be_used_is_said(bench: Bench, state: str):
    """A disabled or broken one that is asked for by name is an error with its cause."""
    bench.plugins = (
        Plugins(disabled=("fake",))
        if state == "disabled"
        else Plugins(problems={"fake": PluginError("PLG001", "it is broken")})
    )
    result = bench.invoke("install", "--backend", "fake", code=1)

    assert isinstance(result.exception, PluginError)
    assert result.exception.code == "PLG003"


# Uninstalling


def test_what_needed_no_restart_needs_none_to_go(bench: Bench):
    """Whatever the settings have as the command."""
    bench.planned(restart="")
    bench.settings = f"[runtimes]\ncontainerd = {{ restart = {json.dumps(bench.restart())} }}\n"
    bench.invoke("install")
    output = bench.invoke("uninstall", "--apply").output

    assert "to make it effective" not in output
    assert bench.runs == 0


def test_uninstall_puts_everything_back(bench: Bench):
    """The files are as before, the command is printed, and nothing is restarted."""
    bench.invoke("install")
    output = bench.invoke("uninstall").output

    assert not bench.installed
    assert bench.main.read_bytes() == OLD
    assert "-imports = []\n" in output
    assert f"containerd: put back {bench.main}\n" in output
    assert f"containerd: removed {bench.drop_in}\n" in output
    assert output.endswith(f"containerd: to make it effective: {bench.restart()}\n")
    assert bench.runs == 0


def test_uninstall_needs_neither_backend_nor_runtime(bench: Bench):
    """The manifest knows all, so a host whose packages and runtimes are gone is put back too."""
    bench.invoke("install")
    bench.keys, bench.plugins = [], Plugins()
    bench.invoke("uninstall")

    assert not bench.installed


def test_uninstall_restarts_by_the_settings_if_they_say_how(bench: Bench):
    """[runtimes] restart is newer than what the manifest remembers."""
    bench.planned(restart="false")
    bench.invoke("install")
    bench.settings = f"[runtimes]\ncontainerd = {{restart = {json.dumps(bench.restart())}}}\n"
    bench.invoke("uninstall", "--apply")

    assert bench.runs == 1


def test_a_failed_restart_after_uninstall_is_told(bench: Bench):
    """The files are back already; the exit code says that the runtime needs a look."""
    bench.planned(restart="false")
    bench.invoke("install")
    output = bench.invoke("uninstall", "--apply", code=1).output

    assert "CHG007" in output
    assert not bench.installed


def test_a_dry_run_of_uninstall_only_shows(bench: Bench):
    """The difference is there, and everything is still installed."""
    bench.invoke("install")

    assert "-imports = []\n" in bench.invoke("uninstall", "--dry-run").output
    assert bench.installed


def test_uninstall_of_nothing_is_done_already(bench: Bench):
    """There is no failure in having nothing to do."""
    assert bench.invoke("uninstall").output == "nothing is installed\n"


@pytest.mark.parametrize(
    "arguments", [["--backend", "other"], ["--runtime", "podman"]], ids=["backend", "runtime"]
)
def test_uninstall_leaves_what_is_not_named(bench: Bench, arguments: list[str]):
    """Only the manifests of the named backend and runtime are undone; if there is none, others are told."""
    bench.invoke("install")
    output = bench.invoke("uninstall", *arguments).output

    assert bench.installed
    assert output == "nothing of that is installed, only fake for containerd\n"


def test_uninstall_refuses_what_was_changed_since(bench: Bench):
    """Somebody's edit is kept and told; --force restores the original over it."""
    bench.invoke("install")
    bench.main.write_bytes(b"theirs")

    assert "CHG003" in bench.invoke("uninstall", code=1).output
    assert bench.main.read_bytes() == b"theirs"
    bench.invoke("uninstall", "--force")
    assert not bench.installed


# Files that containers depend on


class Gated(Bench):
    """As its base, but a wrapper is installed as well. calls: whether the running daemon calls it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(root, monkeypatch)
        self.gate = root / "bin/gate"
        self.calls = True
        self.tells = True
        self.problems: tuple[str, ...] = ()
        self.users: tuple[str, ...] = ()
        own = FileChange(str(self.gate), b"#!/bin/sh\n", "the gate", mode=0o755, held=True)
        self.planned(files=(own, *self.plan(Runtime("containerd", "containerd")).files))
        monkeypatch.setattr("cdi_courier.host.describe.describe", lambda _: self.live())
        monkeypatch.setattr(gate_users, "users", lambda path, _: self.users if path == str(self.gate) else ())

    def live(self) -> Host:
        """The description; after a restart, what the files say is in force."""
        if self.runs and not self.drop_in.exists():
            self.calls = False
        path = str(self.gate) if self.calls else "/usr/sbin/runc"
        facts = {"handlers": Fact({"h": {"type": "t", "path": path}}, "a test")} if self.tells else {}
        if self.problems:
            return Host(problems=self.problems)
        return Host(tuple(Runtime(key, "containerd", "1.7.24", "", facts) for key in self.keys))


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gated:
    """A wrapper is installed and called, and no container uses it."""
    gated = Gated(tmp_path, monkeypatch)
    gated.invoke("install")
    return gated


@pytest.mark.parametrize("option", ["--no-restart", "--force", "--apply", "--dry-run"])
def test_nothing_is_undone_while_a_container_uses_what_would_go(gated: Gated, option: str):
    """The containers are named; force does not help."""
    gated.users = tuple(f"ns/pod{number}/c" for number in range(25))
    output = gated.invoke("uninstall", option, code=1).output

    assert "CHG011: 25 containers use" in output
    assert "ns/pod0/c, " in output
    assert "and 5 more" in output
    assert gated.installed
    assert gated.gate.exists()


def test_what_cannot_be_told_counts_as_used(gated: Gated, monkeypatch: pytest.MonkeyPatch):
    """Without permission to look, nothing is undone."""

    def refuse(*_: object) -> tuple[str, ...]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(gate_users, "users", refuse)

    assert "CHG011: cannot tell" in gated.invoke("uninstall", code=1).output
    assert gated.installed


@pytest.mark.parametrize("tells", [True, False], ids=["it-says-so", "it-does-not-tell"])
def test_what_the_daemon_may_call_stays_until_its_restart(gated: Gated, tells: bool):
    """The configuration is put back at once; called again after the restart, the rest goes."""
    gated.tells = tells
    output = gated.invoke("uninstall").output

    assert not gated.drop_in.exists()
    assert gated.main.read_bytes() == OLD
    assert gated.gate.exists()
    assert f"then again: cdi-courier uninstall, which removes {gated.gate}" in output
    assert "is uninstalled" not in output
    gated.calls, gated.tells = False, True
    assert gated.invoke("uninstall").output.endswith(
        f"containerd: removed {gated.gate}\ncontainerd: fake is uninstalled\n"
    )
    assert not gated.installed
    assert not gated.gate.exists()


def test_what_could_not_be_looked_at_may_be_called(gated: Gated):
    """A description that failed is no sign that the runtime is not there."""
    gated.problems = ("HST108: the probing process said nothing",)
    gated.invoke("uninstall")

    assert gated.gate.exists()


def test_a_runtime_that_takes_a_moment_to_tell_is_given_it(gated: Gated, monkeypatch: pytest.MonkeyPatch):
    """After its restart it is looked at until it says what it calls."""
    monkeypatch.setattr(held, "_READY_TIMEOUT", 30.0)
    monkeypatch.setattr(held, "_READY_PAUSE", 0.0)
    answers = iter([(str(gated.gate),), (str(gated.gate),), (str(gated.gate),), ()])
    monkeypatch.setattr(held, "called", lambda *_: next(answers))
    gated.invoke("uninstall", "--apply")

    assert not gated.gate.exists()


def test_apply_restarts_between_the_two(gated: Gated):
    """One call puts the configuration back, restarts, and removes the gate."""
    output = gated.invoke("uninstall", "--apply").output

    assert gated.runs == 1
    assert output.endswith(f"containerd: removed {gated.gate}\ncontainerd: fake is uninstalled\n")
    assert not gated.gate.exists()
    assert not gated.installed


def test_a_container_of_the_last_moment_keeps_the_gate(gated: Gated, monkeypatch: pytest.MonkeyPatch):
    """One that is made before the restart is seen after it, and told."""
    answers = iter([(), ("ns/late/c",)])
    monkeypatch.setattr(gate_users, "users", lambda *_: next(answers))
    output = gated.invoke("uninstall", "--apply", code=1).output

    assert "CHG011: 1 container uses" in output
    assert "ns/late/c" in output
    assert gated.gate.exists()
    assert not gated.drop_in.exists()


def test_a_restart_that_did_not_help_keeps_the_gate(gated: Gated):
    """A command that restarts something else leaves a daemon that still calls it."""
    gated.settings = '[runtimes]\ncontainerd = {restart = "true"}\n'
    output = gated.invoke("uninstall", "--apply", code=1).output

    assert "CHG013" in output
    assert gated.gate.exists()


@pytest.mark.parametrize(
    "problems", [(), ("HST101: nobody listens at /run/x.sock (down)",)], ids=["no-socket", "its-socket-left"]
)
def test_a_runtime_that_does_not_run_calls_nothing(gated: Gated, problems: tuple[str, ...]):
    """All goes at once, also where one that went has left its socket."""
    gated.keys = []
    gated.problems = problems
    output = gated.invoke("uninstall").output

    assert "is uninstalled" in output
    assert not gated.gate.exists()


@pytest.mark.parametrize("users", [(), ("ns/p/c",)], ids=["unused", "used"])
def test_a_failed_installation_takes_back_only_a_gate_that_nobody_uses(gated: Gated, users: tuple[str, ...]):
    """Installed anew over one in use, it stays though the new configuration does not."""
    gated.users, gated.calls = users, False
    plan = gated.plans(Runtime("containerd", "containerd"))
    newer = attrs.evolve(plan.files[0], content=b"#!/bin/sh\n# newer\n")
    gated.planned(files=(newer, *plan.files[1:]), restart="false")
    output = gated.invoke("install", "--apply", code=1).output

    assert "CHG007" in output
    assert gated.main.read_bytes() == OLD
    assert gated.gate.exists() == bool(users)


# What a backend may have beside


class FakeInstaller(FakeBackend):
    """A backend with every method that one may leave out."""

    shown: Callable[[bool], str] = staticmethod(lambda canary: "a pod ran" if canary else "it says hello")

    def plan_without_restart(self, runtime: Runtime, _: Any) -> ChangeSet:
        return attrs.evolve(self.plans(runtime), restart="")

    def dormant(self, _: Any) -> list[Runtime]:
        return [Runtime("cri-o", "cri-o"), Runtime("containerd", "containerd")]

    def prove(self, _: Runtime, __: Any, *, canary: bool) -> str:
        return self.shown(canary)


@pytest.fixture
def more(bench: Bench) -> Bench:
    """A bench whose backend has all of it."""
    bench.backend = FakeInstaller(lambda runtime: bench.plans(runtime), lambda _: bench.ran.exists())
    bench.plugins = Plugins({"fake": bench.backend})  # type: ignore[dict-item]
    return bench


def test_without_a_restart_a_way_that_needs_none_is_set_up(more: Bench):
    """The option says what is allowed, and the backend has another plan for that."""
    output = more.invoke("install", "--no-restart").output

    assert more.installed
    assert "to make it effective" not in output


def test_a_backend_with_one_way_only_leaves_the_restart_to_the_administrator(bench: Bench):
    """Then the option is the default."""
    assert bench.invoke("install", "--no-restart").output == bench_output(bench)


def bench_output(bench: Bench) -> str:
    bench.invoke("uninstall")
    return bench.invoke("install").output


@pytest.mark.parametrize(
    ("options", "said"), [([], "it says hello"), (["--canary"], "a pod ran")], ids=["without", "with"]
)
def test_after_a_restart_the_backend_shows_that_it_works(more: Bench, options: list[str], said: str):
    """What it may do for that, the option says."""
    output = more.invoke("install", "--apply", *options).output

    assert f"containerd: {said}\n" in output
    assert output.endswith("fake can serve it\n")


def test_a_backend_without_a_canary_says_so(bench: Bench):
    """Nobody takes the option for a proof then."""
    assert "fake has no canary" in bench.invoke("install", "--apply", "--canary").output


def test_what_fails_with_a_canary_is_taken_back(more: Bench):
    """Pods could not be created any more, so the runtime is restarted without."""

    def fail(_: bool) -> str:
        raise HostError("CRI113", "no pod can be created")

    more.backend.shown = fail  # type: ignore[attr-defined]
    output = more.invoke("install", "--apply", "--canary", code=1).output

    assert not more.installed
    assert more.runs == 2
    assert "CRI113: no pod can be created; what had been written is taken back" in output


def test_what_fails_with_a_canary_is_taken_back_where_no_restart_was_needed(more: Bench):
    """As the option's help has it: what this call has written goes, whatever made it effective."""

    def fail(_: bool) -> str:
        raise HostError("CRI113", "no pod can be created")

    more.planned(restart="")
    more.backend.shown = fail  # type: ignore[attr-defined]
    output = more.invoke("install", "--apply", "--canary", code=1).output

    assert not more.installed
    assert output.endswith("CRI113: no pod can be created; what had been written is taken back\n")


def test_a_failed_canary_leaves_what_was_installed_before(more: Bench):
    """A second call has written nothing, so it takes nothing back."""

    def fail(_: bool) -> str:
        raise HostError("CRI113", "no pod can be created")

    more.planned(restart="")
    more.invoke("install")
    more.backend.shown = fail  # type: ignore[attr-defined]
    more.invoke("install", "--apply", "--canary", code=1)

    assert more.installed


def test_what_cannot_be_taken_back_is_told_with_what_failed_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    """The second failure does not hide the first, which is what has to be mended."""

    def undo(*_: Any, **__: Any) -> None:
        raise HostError("CHG001", "cannot write x", "make room")

    monkeypatch.setattr(changes, "undo", undo)
    bench.planned(restart="false")
    output = bench.invoke("install", "--apply", code=1).output

    assert "CHG007" in output
    assert (
        "ended with status 1; what had been written cannot be taken back: cannot write x (make room)"
        in output
    )


def test_a_backend_that_breaks_after_the_restart_is_told(bench: Bench):
    """Foreign code may raise anything when it is asked again, too."""

    def ready(_: Runtime) -> bool:
        if bench.ran.exists():
            raise RuntimeError("oops")
        return False

    bench.backend.ready = ready

    assert (
        "PLG002: backend fake failed to say what it can do"
        in bench.invoke("install", "--apply", code=1).output
    )


def test_what_cannot_be_shown_without_a_canary_stays(more: Bench):
    """A probe that fails is told, and may be mended by something else."""

    def fail(_: bool) -> str:
        raise HostError("NRI009", "nothing came")

    more.backend.shown = fail  # type: ignore[attr-defined]
    output = more.invoke("install", "--apply", code=1).output

    assert more.installed
    assert "NRI009" in output


def test_a_backend_that_breaks_while_showing_is_told(more: Bench):
    """Its exception is no traceback."""

    def fail(_: bool) -> str:
        raise RuntimeError("oops")

    more.backend.shown = fail  # type: ignore[attr-defined]
    output = more.invoke("install", "--apply", code=1).output

    assert "PLG002" in output
    assert "failed to show that it works" in output


def test_a_canary_without_a_restart_is_refused(more: Bench):
    """There would be nothing in effect to try."""
    assert "--canary needs --apply" in more.invoke("install", "--canary", code=2).output


def test_a_canary_is_tried_also_where_nothing_had_to_be_changed(more: Bench):
    """An installation from before can be put to the proof."""
    more.planned(files=(), restart="")
    output = more.invoke("install", "--apply", "--canary").output

    assert "a pod ran" in output
    assert more.runs == 0


def test_a_runtime_that_does_not_run_is_set_up_where_its_backend_is_named(more: Bench):
    """Of a kind that runs, only the running one counts; nothing is added unasked."""
    named = more.invoke("install", "--backend", "fake", "--dry-run").output
    more.invoke("install", "--dry-run", "--runtime", "cri-o", code=2)
    alone = more.invoke("install", "--backend", "fake", "--runtime", "cri-o", "--dry-run").output

    assert "containerd: a note" in named
    assert "cri-o: a note" in named
    assert named.count("containerd: a note") == 1
    assert "containerd: a note" not in alone
