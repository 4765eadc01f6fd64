"""What installing changes on a host with CRI-O, what it leaves alone, and where it refuses to."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest
from cdi_courier import changes
from cdi_courier.errors import CourierError
from cdi_courier.hookspecs import Installer
from cdi_courier.host import crio, processes
from cdi_courier.host.answers import Findings
from cdi_courier.host.files import Root
from cdi_courier.host.model import Fact, Kind, Runtime
from cdi_courier.settings import RuntimeSettings
from cdi_courier_cri_o import install, ways
from cdi_courier_cri_o.backend import CriODropInBackend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import GATE, PLAIN, Site, tree

MODES = ["nri", "handler"]
each_mode = pytest.mark.parametrize("mode", MODES)
FOREIGN = st.dictionaries(
    st.text("abcXYZ019.-_~", min_size=1, max_size=12).filter(
        lambda name: name.strip(".") and name != "90-cdi-courier.conf"
    ),
    st.tuples(
        st.sampled_from(["", "# nothing\n", "[crio]\n", "[crio.image]\npause_command = '/p'\n"]),
        st.sampled_from([0o600, 0o644, 0o755]),
    ),
    max_size=5,
)


# What is written


@each_mode
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(foreign=FOREIGN)
def test_install_and_uninstall_leave_every_byte_as_it_was(
    site: Site, mode: str, foreign: dict[str, tuple[str, int]]
) -> None:
    """Whatever else lies in the folder is touched neither meanwhile nor afterwards."""
    site.told(cri_o_drop_in={"mode": mode})
    for name, (text, permissions) in foreign.items():
        (site.folder / name).write_text(text)
        (site.folder / name).chmod(permissions)
    before = tree(site.root)
    site.apply(site.plan())
    meanwhile = tree(site.etc)

    assert meanwhile.pop("crio.conf.d/90-cdi-courier.conf")[0] == stat.S_IFREG | 0o644
    theirs = {path[len("etc/crio/") :]: known for path, known in before.items() if path[:9] == "etc/crio/"}
    assert meanwhile == theirs
    site.undo()
    (site.root / "state").rmdir()
    assert tree(site.root) == before
    for name in foreign:
        (site.folder / name).unlink()


@each_mode
def test_a_folder_that_is_missing_is_made_and_removed_again(site: Site, mode: str) -> None:
    """CRI-O reads it at its next start; without our file it is not needed."""
    site.told(cri_o_drop_in={"mode": mode})
    site.folder.rmdir()
    site.apply(site.plan())

    assert site.drop_in.exists()
    site.undo()
    assert not site.folder.exists()


def test_the_gate_is_there_before_what_refers_to_it(site: Site) -> None:
    """A crash between the two must not leave a default handler without its program."""
    site.told(cri_o_drop_in={"mode": "handler"})

    files = site.plan().files

    assert files[-1].path == str(site.drop_in)
    assert files[-2].path == str(site.root / "bin/cdi-courier-cri-o")
    assert all(change.held for change in files[:-1])
    assert not files[-1].held


def test_a_handler_by_name_prints_its_runtime_class(site: Site) -> None:
    """Pods need it; it is printed and never applied."""
    site.told(cri_o_drop_in={"mode": "handler"}, oci_hook={"handler_mode": "named", "handler": "gpu"})
    plan = site.plan()
    document = tomllib.loads((plan.files[-1].content or b"").decode())["crio"]["runtime"]

    assert list(document) == ["runtimes"]
    assert list(document["runtimes"]) == ["gpu"]
    assert any("kind: RuntimeClass\nmetadata:\n  name: gpu\nhandler: gpu" in note for note in plan.notes)


@each_mode
def test_a_restart_is_needed_and_settings_name_another_command(site: Site, mode: str) -> None:
    """No reload makes NRI or a handler effective."""
    site.told(cri_o_drop_in={"mode": mode})

    assert site.plan().restart == "systemctl restart crio"
    own = {"cri-o": RuntimeSettings(restart="service crio restart")}
    site.settings = attrs.evolve(site.settings, runtimes=own)
    assert site.plan().restart == "service crio restart"


def test_installing_again_clones_the_original_and_not_the_clone(site: Site) -> None:
    """Once our handler is the default, the one to copy is still the one that the files name."""
    site.told(cri_o_drop_in={"mode": "handler"})
    first = site.plan().files[-1].content
    assert first is not None
    site.live = (
        PLAIN.replace('default_runtime = "runc"', 'default_runtime = "cdi-courier"')
        + first.decode().partition('"cdi-courier"\n')[2]
    )
    site.main.write_text('[crio.runtime]\ndefault_runtime = "runc"\n')

    assert site.plan().files[-1].content == first


def test_the_gates_own_table_stands_for_an_original_that_is_gone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the program behind the gate is the one that the gate knows."""
    site.told(cri_o_drop_in={"mode": "handler"}, oci_hook={"gate_dir": os.path.dirname(GATE)})
    site.live = (
        f'[crio.runtime]\ndefault_runtime = "cdi-courier"\n[crio.runtime.runtimes.cdi-courier]\n'
        f'runtime_path = "{GATE}"\nruntime_root = "/run/x"\n'
    )
    site.main.write_text('[crio.runtime]\ndefault_runtime = "gone"\n')
    monkeypatch.setattr(ways, "real_of", lambda path: "/usr/sbin/runc" if path == GATE else "")
    plan = site.plan()
    table = tomllib.loads((plan.files[-1].content or b"").decode())["crio"]["runtime"]["runtimes"]

    assert b"\nreal=/usr/sbin/runc\n" in (plan.files[-2].content or b"")
    assert table["cdi-courier"] == {"runtime_path": GATE, "runtime_root": "/run/x"}


@pytest.mark.parametrize("known", ["running", "files"])
def test_a_handler_stays_when_another_way_takes_over(site: Site, known: str) -> None:
    """Its containers could not be stopped without it; it is no default any more, also where CRI-O is down."""
    site.told(cri_o_drop_in={"mode": "handler"})
    content = site.plan().files[-1].content or b""
    handler = tomllib.loads(content.decode())["crio"]["runtime"]["runtimes"]["cdi-courier"]
    if known == "running":
        site.live = (site.live or "") + content.decode().partition('"cdi-courier"\n')[2]
    else:
        site.drop_in.write_bytes(content)
        site.live = None
    site.told(cri_o_drop_in={"mode": "nri"})
    document = tomllib.loads((site.plan().files[-1].content or b"").decode())["crio"]

    assert document == {"nri": {"enable_nri": True}, "runtime": {"runtimes": {"cdi-courier": handler}}}


def test_a_handler_stays_when_ours_gets_another_name(site: Site) -> None:
    """Pods name handlers; both are there then, and the new one is the default."""
    site.told(cri_o_drop_in={"mode": "handler"})
    site.apply(site.plan())
    site.told(oci_hook={"handler": "gpu"})
    runtime = tomllib.loads((site.plan().files[-1].content or b"").decode())["crio"]["runtime"]

    assert runtime["default_runtime"] == "gpu"
    assert runtime["runtimes"]["gpu"] == runtime["runtimes"]["cdi-courier"]


def test_nri_that_only_lacks_the_restart_is_planned_again(site: Site) -> None:
    """What GET /config says is not taken for it; the plan has the restart that is missing."""
    site.apply(site.plan())
    site.live = (site.live or "").replace("enable_nri = false", "enable_nri = true")
    runtime = attrs.evolve(site.runtime(), problems=("HST106: CRI-O has NRI on, but nobody listens",))
    plan = install.plan(runtime, site.settings)

    assert plan.restart
    assert changes.preview(plan, folder=site.state) == ()


# Without a restart


@pytest.fixture
def hooks(tmp_path: Path) -> list[str]:
    """Two directories that CRI-O watches; the last is where the hook's package looks."""
    made = [tmp_path / "usr/hooks.d", tmp_path / "run/hooks.d"]
    for path in made:
        path.mkdir(parents=True)
    return [str(path) for path in made]


def test_without_a_restart_a_hook_is_installed_where_cri_o_watches(site: Site, hooks: list[str]) -> None:
    """Only files are written, no drop-in, and undoing leaves nothing."""
    before = tree(site.root)
    backend: Installer = CriODropInBackend()
    plan = backend.plan_without_restart(site.runtime(hooks_dirs=hooks), site.settings)
    site.apply(plan)

    assert plan.restart == ""
    assert [change.path for change in plan.files] == [f"{hooks[1]}/cdi-courier.json"]
    assert any("needs a restart, which is not allowed" in note for note in plan.notes)
    assert site.plan(restart=False, hooks_dirs=hooks).files == ()
    site.undo()
    (site.root / "state").rmdir()
    assert tree(site.root) == before


def test_the_hook_is_of_a_stage_that_cri_o_knows(site: Site, hooks: list[str]) -> None:
    """One of an unknown stage, such as precreate, keeps CRI-O from starting."""
    (change,) = site.plan(restart=False, hooks_dirs=hooks).files

    assert json.loads(change.content or b"")["stages"] == ["createRuntime"]


@pytest.mark.parametrize("made", [False, True], ids=["missing", "a file"])
def test_directories_that_cannot_be_written_are_told(site: Site, tmp_path: Path, made: bool) -> None:
    """CRI-O watches what it has found at its start, so making another one would not help."""
    path = tmp_path / "hooks.d"
    if made:
        path.write_text("")
    error = site.refused(restart=False, hooks_dirs=[str(path)])

    assert (error.code, str(path) in error.message) == ("CRI110", True)


def test_the_hook_goes_when_a_better_way_comes(site: Site, hooks: list[str]) -> None:
    """Both at once would deliver twice; undoing leaves neither."""
    before = tree(site.root)
    site.apply(site.plan(restart=False, hooks_dirs=hooks))
    site.apply(site.plan(hooks_dirs=hooks))

    assert not os.path.exists(f"{hooks[1]}/cdi-courier.json")
    assert site.drop_in.exists()
    site.undo()
    (site.root / "state").rmdir()
    assert tree(site.root) == before


def test_every_hook_goes_wherever_it_lies(site: Site, hooks: list[str]) -> None:
    """An older one may be in another directory that CRI-O watches, put there when the better one was not."""
    (change,) = site.plan(restart=False, hooks_dirs=hooks).files
    for directory in hooks:
        Path(directory, "cdi-courier.json").write_bytes(change.content or b"")
    site.apply(site.plan(hooks_dirs=[*hooks, hooks[0]]))

    assert [os.listdir(directory) for directory in hooks] == [[], []]


# Where it refuses


def options(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(processes, "command_line", lambda *_: ["/usr/bin/crio", *words])


@pytest.mark.parametrize(
    ("mode", "words", "says"),
    [
        pytest.param("nri", ["--config-dir", "/x"], 'config_dir = "/x"', id="another folder"),
        pytest.param("nri", ["-d", "/x"], 'config_dir = "/x"', id="another folder, short"),
        pytest.param("nri", ["--enable-nri=false"], "--enable-nri", id="nri off"),
        pytest.param("handler", ["--default-runtime", "crun"], "--default-runtime", id="default"),
    ],
)
def test_options_that_beat_every_file_are_told(
    site: Site, monkeypatch: pytest.MonkeyPatch, mode: str, words: list[str], says: str
) -> None:
    """The drop-in would be read and mean nothing, or not even be read."""
    site.told(cri_o_drop_in={"mode": mode})
    options(monkeypatch, *words)
    error = site.refused()

    assert error.code == "CRI107"
    assert says in str(error)


@pytest.mark.parametrize(
    "words",
    [["--enable-nri"], ["--enable-nri=true"], ["--log-level", "debug"], ["--default-runtime=crun"]],
    ids=str,
)
def test_other_options_do_not_matter(site: Site, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """What says the same, or is about something else, is no obstacle to NRI."""
    options(monkeypatch, *words)

    assert site.plan().files


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ([], {"CONTAINER_CONFIG": "/opt/crio.conf"}, "/opt/crio.conf"),
        (["--config", "/etc/own.conf"], {"CONTAINER_CONFIG": "/opt/crio.conf"}, "/etc/own.conf"),
    ],
    ids=["variable", "option first"],
)
def test_the_main_file_is_the_one_that_cri_o_was_told(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], expected: str
) -> None:
    """By an option, else by a variable, which does not show among its arguments."""
    findings = Findings()
    script = tmp_path / "crio.py"
    script.write_text("import sys; print(flush=True); sys.stdin.read()")
    with subprocess.Popen(
        [sys.executable, script, *arguments],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        crio.learn_from_files(Root(), "", child.pid, findings)
        child.communicate()

    assert findings.value("config") == expected


def test_a_variable_beats_files_too(site: Site) -> None:
    """CRI-O takes its options from the environment as well, and there they do not show in its arguments."""
    site.told(cri_o_drop_in={"mode": "handler"})
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
        env={"CONTAINER_DEFAULT_RUNTIME": "crun"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        error = site.refused(pid=child.pid)
        child.communicate()

    assert (error.code, "crun" in error.message) == ("CRI107", True)


@pytest.mark.parametrize(
    ("mode", "text", "code"),
    [
        pytest.param("nri", "[crio.nri]\nenable_nri = false", "CRI106", id="nri off later"),
        pytest.param("handler", "[crio.runtime]\ndefault_runtime = 'nvidia'", "CRI106", id="default later"),
        pytest.param("handler", "[crio.runtime.runtimes.cdi-courier]", "CRI109", id="name taken"),
    ],
)
def test_a_later_file_that_would_win_is_named(site: Site, mode: str, text: str, code: str) -> None:
    """The drop-in would mean nothing; the message says whose file it is."""
    site.told(cri_o_drop_in={"mode": mode})
    path = site.folder / "99-theirs.toml"
    path.write_text(text)
    error = site.refused()

    assert (error.code, str(path) in error.message) == (code, True)
    assert error.hint


@pytest.mark.parametrize(
    ("live", "says"),
    [
        pytest.param(PLAIN.replace("/usr/sbin/runc", "bin/runc"), "bin/runc", id="relative"),
        pytest.param(PLAIN.replace("/usr/bin/conmon", "conmon/x"), "monitor_path", id="monitor"),
    ],
)
def test_programs_that_are_not_there_are_told(site: Site, live: str, says: str) -> None:
    """CRI-O's own check sees nothing of it, and would not start."""
    site.told(cri_o_drop_in={"mode": "handler"})
    site.live = live
    error = site.refused()

    assert (error.code, says in error.message) == ("CRI108", True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("asked", ["running", "files"])
@pytest.mark.parametrize(
    "text",
    [
        "crio = 1",
        "crio = []",
        "[crio]\nruntime = 1\nnri = 1",
        "[crio.runtime]\ndefault_runtime = 1",
        "[crio.runtime]\ndefault_runtime = ['x']",
        "[crio.runtime]\nruntimes = 1",
        "[crio.runtime.runtimes]\nrunc = 1",
        "[crio.runtime.runtimes.runc]\nruntime_path = []\nmonitor_path = {}",
        "[crio.nri]\nenable_nri = []",
    ],
)
def test_what_has_a_wrong_type_ends_in_a_plan_or_in_words(
    site: Site, mode: str, asked: str, text: str
) -> None:
    """Files are root's but may be wrong, and CRI-O's own check of them may not be at hand."""
    site.told(cri_o_drop_in={"mode": mode})
    if asked == "running":
        site.live = text
    else:
        site.live = None
        site.main.write_text(text)
    try:
        said = site.plan().files[-1].path
    except CourierError as error:
        said = error.hint

    assert said


@pytest.mark.parametrize(
    ("version", "stored", "base"),
    [
        pytest.param("1.30.1", "", "runc", id="runc by default"),
        pytest.param("1.31.0", "", "crun", id="crun by default"),
        pytest.param("1.30.0", "crio.runtime.default_runtime = 'runc'", "runc", id="runc by file"),
    ],
)
def test_of_a_cri_o_that_cannot_be_asked_files_and_defaults_tell_the_handler(
    site: Site, version: str, stored: str, base: str
) -> None:
    """Its state folder is the one that CRI-O itself would use."""
    site.told(cri_o_drop_in={"mode": "handler"})
    site.live, site.version = None, version
    site.main.write_text(stored)
    plan = site.plan()
    table = tomllib.loads((plan.files[-1].content or b"").decode())["crio"]["runtime"]["runtimes"]

    assert table["cdi-courier"]["runtime_root"] == f"/run/{base}"
    assert any("not verified" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("version", "stored"),
    [
        pytest.param("", "", id="unknown version"),
        pytest.param("1.30.0", "crio.runtime.default_runtime = 'gone'", id="no such handler"),
        pytest.param("1.36.3", "crio.runtime.default_runtime = 'runc'", id="built in no more"),
    ],
)
def test_a_default_handler_that_is_not_known_is_told(site: Site, version: str, stored: str) -> None:
    """Nothing is guessed, for pods would not start with a wrong one."""
    site.told(cri_o_drop_in={"mode": "handler"})
    site.live, site.version = None, version
    site.main.write_text(stored)

    assert site.refused().code == "CRI102"


def test_a_folder_that_cannot_be_written_is_told_and_nothing_stays(site: Site) -> None:
    """A file in the place of the folder is one way for that; the gate is taken back with it."""
    site.folder.rmdir()
    plan = site.plan()
    site.folder.write_text("")
    before = tree(site.etc)
    with pytest.raises(CourierError) as caught:
        site.apply(plan)

    assert caught.value.code == "CHG001"
    assert tree(site.etc) == before
    assert changes.installed(site.state) == ()


def test_both_ways_at_once_are_warned_of(site: Site) -> None:
    """A handler by force where NRI is on delivers twice, unless the settings give CRI-O to this backend."""
    site.live = PLAIN + "[crio.nri]\nenable_nri = true\n"
    site.told(cri_o_drop_in={"mode": "handler"})

    assert any("both would deliver" in note for note in site.plan().notes)


def test_platforms_that_bypass_the_wrapper_are_told(site: Site) -> None:
    """CRI-O runs another program for them, as its table says."""
    site.live = PLAIN + "[crio.runtime.runtimes.runc.platform_runtime_paths]\n'wasi/wasm' = '/x'\n"
    site.told(cri_o_drop_in={"mode": "handler"})

    assert any("bypass the wrapper" in note for note in site.plan().notes)


def test_a_socket_that_the_settings_do_not_name_is_told(site: Site) -> None:
    """The daemon would not connect to it."""
    assert any("name it in [nri] sockets" in note for note in site.plan().notes)


def test_what_is_a_program_must_be_absolute_and_executable(tmp_path: Path) -> None:
    """Everything else CRI-O ignores with a warning, or does not start with."""
    path = tmp_path / "runc"
    path.write_text("")

    assert not install._is_program(str(path))
    path.chmod(0o755)
    assert install._is_program(str(path))
    assert not install._is_program(str(tmp_path))
    assert not install._is_program("runc")


def test_a_gate_is_known_by_its_folder(site: Site) -> None:
    """Whether or not it is still there."""
    gate: Any = site.root / "bin/anything"

    assert ways.is_gate(site.settings, str(gate))
    assert not ways.is_gate(site.settings, "/usr/bin/runc")
    assert not ways.is_gate(site.settings, "")


@pytest.mark.parametrize(
    ("kind", "version", "nri"),
    [
        ("containerd", "1.7.24", "off"),
        ("containerd", "2.1.9", "off"),
        ("containerd", "2.1.9", "on"),
        ("podman", "5.4.2", "absent"),
        ("docker", "28.0.1", "absent"),
    ],
)
@each_mode
def test_nothing_is_planned_for_another_runtime(
    site: Site, mode: str, kind: Kind, version: str, nri: str
) -> None:
    """Its version would count as CRI-O's, and CRI-O's files are nothing to it."""
    site.told(cri_o_drop_in={"mode": mode})
    facts = {"nri": Fact(nri, "a test"), "default_handler": Fact("runc", "a test")}
    with pytest.raises(CourierError, match=r"CRI101.*is not CRI-O"):
        CriODropInBackend().plan(Runtime(kind, kind, version, "/run/x.sock", facts), site.settings)
