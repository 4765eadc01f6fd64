"""The gate: what it passes on, for what it starts Python, and what it needs for that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from pathlib import Path
from typing import Any

import attrs
import pytest
from cdi_courier import patterns
from cdi_courier.errors import HostError
from cdi_courier.settings import Settings, load
from cdi_courier_oci_hook import gate
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gate import RESTED_NS, Gated, says

KEY = "nvidia.cdi.k8s.io"
RUNTIMES = Path(__file__).parents[2] / "data/runtimes"
SHELLS = [path for path in ("/bin/dash", "/bin/bash", "/bin/busybox") if os.path.exists(path)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Settings in a folder of their own."""
    (tmp_path / "settings").mkdir()
    path = tmp_path / "settings/config.toml"
    path.write_text(f"oci_hook.gate_dir = '{tmp_path}/gates'\nservice.state_dir = '{tmp_path}/state'\n")
    return path


@pytest.fixture
def gated(tmp_path: Path, place: Path) -> Gated:
    return Gated(tmp_path, place)


def bundle(root: Path, annotations: dict[str, str], name: str = "bundle", **dump: Any) -> Path:
    """A bundle whose config has these annotations, written as Go does unless told otherwise."""
    path = root / name
    path.mkdir(exist_ok=True)
    dump = dump or {"separators": (",", ":")}
    (path / "config.json").write_text(json.dumps({"ociVersion": "1.0.2", "annotations": annotations}, **dump))
    return path


@pytest.mark.parametrize(
    "call",
    [
        ["--version"],
        ["features"],
        ["--root", "/run/runc", "state", "create"],
        ["--root=/run/runc", "--log", "l", "start", "x"],
        ["kill", "--all", "x", "KILL"],
        ["update", "--resources", "-", "x"],
        ["exec", "--process", "p", "x"],
        ["delete", "--force", "x"],
        ["restore", "--bundle", "bundle", "x"],
        [],
    ],
    ids=lambda call: " ".join(call) or "nothing",
)
def test_what_creates_nothing_becomes_the_real_runtime(gated: Gated, call: list[str]) -> None:
    """Same process, same arguments, same stdin; nothing of the environment is needed."""
    bundle(gated.root, {KEY: "v.com/c=a"})

    reached = gated.call(*call, stdin=b"in\nput")

    assert (reached.who, reached.argv, reached.stdin) == ("real", tuple(call), b"in\nput")
    assert reached.pid == reached.gate_pid
    assert (reached.returncode, reached.stderr) == (0, "")


@pytest.mark.parametrize("verb", ["create", "run"])
@pytest.mark.parametrize(
    ("key", "who"),
    [
        (KEY, "python"),
        (f"{KEY}/pod", "python"),
        (f"{KEY}/container.c1", "python"),
        ("other", "real"),
        ("x.cdi.k8s.io", "real"),
    ],
)
def test_python_is_started_for_annotated_containers_only(gated: Gated, key: str, who: str, verb: str) -> None:
    """Every form of the key counts; the process and the arguments stay."""
    path = bundle(gated.root, {key: "v.com/c=a"})

    reached = gated.call("--root=/x", verb, "--bundle", str(path), "x", stdin=b"in")

    assert reached.who == who
    assert reached.argv[-5:] == ("--root=/x", verb, "--bundle", str(path), "x")
    assert (reached.pid, reached.stdin) == (reached.gate_pid, b"in")


@pytest.mark.parametrize(
    "dump",
    [{"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False}],
    ids=["indented", "compact", "plain"],
)
@pytest.mark.parametrize("slash", ["/", "\\/"], ids=["go", "json-c"])
def test_an_annotation_is_seen_as_any_encoder_writes_it(
    gated: Gated, dump: dict[str, Any], slash: str
) -> None:
    """With blanks or without, and with a slash that is escaped."""
    path = bundle(gated.root, {f"{KEY}/pod": "v.com/c=a"}, **dump)
    config = path / "config.json"
    config.write_text(config.read_text().replace("/", slash))

    assert gated.call("create", "-b", str(path), "x").who == "python"


@pytest.mark.parametrize("shell", SHELLS, ids=os.path.basename)
def test_any_shell_of_a_system_will_do(gated: Gated, shell: str) -> None:
    """The gate is POSIX sh: the same decisions in dash, bash and busybox."""
    run = [shell, "sh"] if shell.endswith("busybox") else [shell]
    asks = bundle(gated.root, {KEY: "v.com/c=a"}, "asks")
    plain = bundle(gated.root, {"other": "x"}, "plain")

    assert gated.call("create", "--bundle", str(asks), "x", shell=run).who == "python"
    assert gated.call("create", "--bundle", str(plain), "x", shell=run).who == "real"
    assert gated.call("--log", "l", "state", "x", shell=run).who == "real"


# --- patterns ------------------------------------------------------------------------------------------


def spoil_newer(gated: Gated) -> None:
    later = time.time_ns() + 2 * RESTED_NS
    os.utime(gated.settings, ns=(later, later))


def spoil_renamed(gated: Gated) -> None:
    """An older file takes the place of the settings: only their folder tells."""
    later = time.time_ns() + 2 * RESTED_NS
    os.utime(gated.settings.parent, ns=(later, later))


SPOILT = {
    "missing": lambda gated: (gated.folder / "patterns").unlink(),
    "empty": lambda gated: (gated.folder / "patterns").write_bytes(b""),
    "cut": lambda gated: (gated.folder / "patterns").write_bytes(b"cdi-cou"),
    "of-other-settings": lambda gated: (gated.folder / "patterns").write_bytes(
        patterns.render("/etc/cdi-courier/", [])
    ),
    "older-than-settings": spoil_newer,
    "older-than-their-folder": spoil_renamed,
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_patterns_that_may_be_wrong_are_not_relied_on(gated: Gated, spoil: Any) -> None:
    """Then Python looks at a container that asks for nothing as well."""
    path = bundle(gated.root, {"other": "x"})
    spoil(gated)

    reached = gated.call("create", "--bundle", str(path), "x")

    assert (reached.who, reached.argv[:6]) == ("python", (*reached.argv[:4], "stale", "create"))
    assert reached.argv[:3] == ("-I", "-S", "-c")


def test_a_folder_of_settings_is_watched_file_by_file(tmp_path: Path) -> None:
    """A drop-in that was changed counts as much as the main file; a file of another kind does not."""
    folder = tmp_path / "etc/cdi-courier"
    (folder / "conf.d").mkdir(parents=True)
    for name in ("config.toml", "conf.d/a.toml", "conf.d/a.txt"):
        (folder / name).write_text("")
    config = tmp_path / "config.toml"
    config.write_text(f"oci_hook.gate_dir = '{tmp_path}/gates'\nservice.state_dir = '{tmp_path}/state'\n")
    gated = Gated(tmp_path, config, settings=f"{folder}/")
    gated.rest()
    path = bundle(tmp_path, {"other": "x"})
    later = time.time_ns() + 2 * RESTED_NS

    os.utime(folder / "conf.d/a.txt", ns=(later, later))
    other = gated.call("create", "--bundle", str(path), "x")
    os.utime(folder / "conf.d/a.toml", ns=(later, later))
    changed = gated.call("create", "--bundle", str(path), "x")

    assert (other.who, changed.who) == ("real", "python")


def test_no_annotation_at_all_is_no_pattern_that_matches_everything(tmp_path: Path, place: Path) -> None:
    """With no dialect the file is not empty, and no container is Python's."""
    place.write_text(place.read_text() + "annotations.dialects = []\n")
    gated = Gated(tmp_path, place)
    path = bundle(tmp_path, {KEY: "v.com/c=a"})

    assert gated.call("create", "--bundle", str(path), "x").who == "real"


def test_a_domain_is_cut_where_encoders_begin_to_differ() -> None:
    """What comes after the first character that some encoder escapes is not looked for."""
    families = [(((f"{KEY}/container.", True), (f"{KEY}/pod", False), (KEY, False)), lambda _: [])]

    assert patterns.texts(families) == [f'"{KEY}']  # type: ignore[arg-type]
    assert patterns.texts([((("ü.x", False), ("a&b", False)), lambda _: [])]) == ['"', '"a']  # type: ignore[list-item]


def test_patterns_of_other_settings_are_left_alone(tmp_path: Path) -> None:
    """Compiling a file of one's own does not change what the installed gate looks for."""
    assert patterns.write(str(tmp_path), "/a", [], 0)

    assert not patterns.write(str(tmp_path), "/b", [], 0)
    assert (tmp_path / "patterns").read_bytes() == patterns.render("/a", [])
    assert not patterns.write(str(tmp_path / "none"), "/a", [], 0)
    assert [path.name for path in tmp_path.iterdir()] == ["patterns"]


def test_patterns_look_older_than_what_was_read_for_them(tmp_path: Path) -> None:
    """What changes while or after settings are read is newer, also to a shell that compares whole seconds."""
    began = time.time_ns()
    patterns.write(str(tmp_path), "/a", [], began)

    assert os.stat(tmp_path / "patterns").st_mtime_ns // 10**9 < began // 10**9


# --- sandboxes -----------------------------------------------------------------------------------------


def captured(root: Path, name: str, annotations: dict[str, str]) -> Path:
    """A bundle as a real runtime made it, with annotations of the pod."""
    document = json.loads((RUNTIMES / f"{name}.json").read_bytes())
    document["annotations"] = {**annotations, **document["annotations"]}
    path = root / "captured"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(document, separators=(",", ":")))
    return path


FORGED = {"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri-o.ContainerType": "sandbox"}
LITERAL = {"x": '"io.kubernetes.cri.container-type":"sandbox","io.kubernetes.cri-o.ContainerType":"sandbox"'}


@pytest.mark.parametrize(
    ("kind", "name", "more", "who"),
    [
        ("containerd", "containerd-1.6.20-ociconfig-sandbox", {}, "real"),
        ("containerd", "containerd-1.7.24-ociconfig-sandbox", {}, "real"),
        ("containerd", "containerd-2.1.9-ociconfig-sandbox", {}, "real"),
        ("cri-o", "crio-1.36.3-ociconfig-sandbox", {}, "real"),
        ("containerd", "containerd-2.1.9-ociconfig-container", {}, "python"),
        ("cri-o", "crio-1.36.3-ociconfig-container", {}, "python"),
        ("containerd", "containerd-2.1.9-ociconfig-container", FORGED, "python"),
        ("cri-o", "crio-1.36.3-ociconfig-container", FORGED, "python"),
        ("containerd", "containerd-2.1.9-ociconfig-container", LITERAL, "python"),
        ("cri-o", "crio-1.36.3-ociconfig-container", LITERAL, "python"),
        ("docker", "podman-4.3.1-ociconfig-container", FORGED, "python"),
        ("", "podman-4.3.1-ociconfig-container", FORGED, "python"),
    ],
)
def test_pause_containers_are_left_alone_and_cannot_be_feigned(
    tmp_path: Path, place: Path, kind: str, name: str, more: dict[str, str], who: str
) -> None:
    """Only what the runtime itself wrote last says that a container is a pod's sandbox."""
    gated = Gated(tmp_path, place, kind)
    path = captured(tmp_path, name, {KEY: "v.com/c=a", **more})

    assert gated.call("create", "--bundle", str(path), "x").who == who


# --- records -------------------------------------------------------------------------------------------


def test_an_exec_is_python_s_only_in_a_container_with_a_record(gated: Gated) -> None:
    """Whatever the words of the command are; options do not hide the id."""
    gated.records.mkdir(parents=True)
    (gated.records / "known").write_text('["A=1"]')

    known = gated.call("--root", "/r", "exec", "--process", "/p", "--detach", "known")
    other = gated.call("exec", "--process", "/p", "other", "../known", "sh")

    assert (known.who, known.argv[4]) == ("python", "noted")
    assert other.who == "real"


def test_deleting_removes_the_record_only_if_the_container_went(gated: Gated) -> None:
    """A container that cannot be deleted keeps its variables; the exit status is the real runtime's."""
    gated.records.mkdir(parents=True)
    record = gated.records / "known"
    record.write_text("[]")
    works = gated.real.read_text()

    gated.real.write_text("#!/bin/sh\nexit 7\n")
    failed = gated.call("delete", "known")
    kept = record.exists()
    gated.real.write_text(works)
    done = gated.call("--root", "/r", "delete", "--force", "known", stdin=b"in")

    assert (failed.returncode, kept) == (7, True)
    assert (done.who, done.argv, done.stdin) == (
        "real",
        ("--root", "/r", "delete", "--force", "known"),
        b"in",
    )
    assert (done.returncode, record.exists()) == (0, False)


def test_a_record_of_an_earlier_container_of_that_id_is_python_s(gated: Gated) -> None:
    """Which takes it away when the new one asks for nothing."""
    gated.records.mkdir(parents=True)
    (gated.records / "x").write_text('["A=1"]')
    path = bundle(gated.root, {"other": "x"})

    assert gated.call("create", "--bundle", str(path), "x").who == "python"
    assert gated.call("create", "--bundle", str(path), "y").who == "real"


# --- what is gone, and loops ---------------------------------------------------------------------------


@pytest.mark.parametrize("gone", ["interpreter", "packages"])
@pytest.mark.parametrize("with_patterns", [True, False], ids=["patterns", "no-patterns"])
def test_without_the_product_only_asking_containers_fail(
    tmp_path: Path, place: Path, gone: str, with_patterns: bool
) -> None:
    """With words on stderr and in the runtime's log; all else goes on, an exec and a delete as well."""
    changes = (
        {"bare": "/nonexistent/python3"} if gone == "interpreter" else {"package_path": ("/none", "/none")}
    )
    gated = Gated(tmp_path, place, "containerd", **changes)
    gated.records.mkdir(parents=True)
    (gated.records / "known").write_text('["A=1"]')
    if not with_patterns:
        (gated.folder / "patterns").unlink()
    asks = bundle(tmp_path, {KEY: "v.com/c=a"}, "asks")
    plain = bundle(tmp_path, {"other": "x"}, "plain")
    log = tmp_path / "log.json"
    log.write_text('{"level":"error","msg":"an earlier one"}\n')

    refused = gated.call("--log", str(log), "--log-format=json", "create", "--bundle", str(asks), "x")
    sandbox = captured(tmp_path, "containerd-2.1.9-ociconfig-sandbox", {KEY: "v.com/c=a"})

    assert (refused.who, refused.returncode) == ("", 1)
    assert refused.stderr.startswith("cdi-courier: HOK011: ")
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["level"], last["msg"][:8]) == ("error", "HOK011: ")
    for call in (
        ["create", "--bundle", str(plain), "x"],
        ["create", "--bundle", str(sandbox), "x"],
        ["create", f"-b={plain}", "x"],
        ["exec", "--process", "p", "known"],
        ["state", "x"],
        ["delete", "known"],
    ):
        assert gated.call(*call).who == "real"
    assert gated.call("create", f"-b{asks}", "x").who == ""


def test_a_gate_that_is_called_by_itself_says_so(gated: Gated, tmp_path: Path) -> None:
    """A real runtime that runs the gate again would go on for ever; one that forks does not at a delete."""
    gated.records.mkdir(parents=True)
    (gated.records / "known").write_text("[]")
    gated.real.write_text(f'#!/bin/sh\nexec {gated.path} "$@"\n')

    for call in (["--log", f"{tmp_path}/l", "state", "x"], ["delete", "known"]):
        reached = gated.call(*call)

        assert (reached.who, reached.returncode) == ("", 1)
        assert "HOK010" in reached.stderr
    assert "HOK010" in (tmp_path / "l").read_text()


def test_another_process_may_call_the_gate_with_our_mark(gated: Gated) -> None:
    """A hook inherits it from the runtime; its own process has another number."""
    assert gated.call("state", "x", env={"CDI_COURIER_GATE_PID": str(os.getpid())}).who == "real"


def test_the_environment_decides_nothing(gated: Gated, tmp_path: Path) -> None:
    """Neither its variables that are called as ours, nor PATH, nor what other shells read at their start."""
    evil = says(tmp_path / "evil", "evil", gated.said)
    path = bundle(gated.root, {KEY: "v.com/c=a"})
    names = "real python grep rm command patterns header records way unsure verb lost sandbox asked noted id"
    env = {name: str(evil) for name in names.split()}
    (tmp_path / "bin").mkdir()
    for name in ("grep", "rm", "printf", "sh", "["):
        shutil.copy(evil, tmp_path / "bin" / name)
    env |= {
        "PATH": f"{tmp_path}/bin",
        "ENV": str(evil),
        "BASH_ENV": str(evil),
        "IFS": "a/",
        "GREP_OPTIONS": "-v",
    }

    assert gated.call("create", "--bundle", str(path), "x", env=env).who == "python"
    assert gated.call("state", "x", env=env).who == "real"


# --- the file ------------------------------------------------------------------------------------------

hostile = st.text(
    st.characters(blacklist_characters="/\n\0", blacklist_categories=["Cs"]), min_size=1, max_size=20
).filter(lambda name: name not in (".", ".."))


@settings(max_examples=60, deadline=None)
@given(hostile, hostile, hostile)
def test_any_path_can_be_baked_in(first: str, second: str, third: str) -> None:
    """Quotes, blanks, dollar signs, backslashes and our own marks: every path is the one that was meant."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / f"r{first}"
        folder = root / f"s{second}"
        folder.mkdir(parents=True)
        place = folder / "config.toml"
        place.write_text(f"service.state_dir = '{name}/state'\noci_hook.gate_dir = '{name}/gates'\n")
        gated = Gated(Path(name), place)
        real = says(root / f"x{third}", "real", gated.said)
        gates = root / f"g{third}"
        gates.mkdir()
        gated.made = attrs.evolve(gated.made, real=str(real), gate_dir=str(gates))
        gated.folder = gates
        gated.path = gates / f"{second}@real@"
        gated.write()
        gated.rest()
        plain = bundle(root, {"other": "x"}, f"b{first}")

        assert gate.real_of(str(gated.path)) == str(real)
        assert gated.call("state", third).argv == ("state", third)
        reached = gated.call("create", "--bundle", str(plain), "x")
        assert (reached.who, reached.argv[2]) == ("real", str(plain))


def test_a_gate_can_be_printed(gated: Gated, place: Path, tmp_path: Path) -> None:
    """By the backend's own command, to be put in its place by hand; a gate in front of a gate is refused."""
    argv = [sys.executable, "-m", "cdi_courier_oci_hook", "--config", str(place)]

    done = subprocess.run([*argv, str(gated.real)], capture_output=True, timeout=60, check=False)
    refused = subprocess.run(
        [*argv, str(gated.path)], capture_output=True, text=True, timeout=60, check=False
    )

    (tmp_path / "printed").write_bytes(done.stdout)
    (tmp_path / "printed").chmod(0o755)
    assert gate.real_of(str(tmp_path / "printed")) == str(gated.real)
    gated.path = tmp_path / "printed"
    assert gated.call("state", "x").who == "real"
    assert (refused.returncode, refused.stdout, refused.stderr[:8]) == (1, "", "HOK013: ")


def test_a_wheel_carries_the_script(tmp_path: Path) -> None:
    """What is installed from one is read as a file of the package."""
    folder = Path(__file__).parents[3] / "backends/oci_hook"
    source = tmp_path / "source"
    shutil.copytree(folder, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    script = f"import hatchling.build; hatchling.build.build_wheel({str(tmp_path)!r})"

    subprocess.run([sys.executable, "-c", script], cwd=source, capture_output=True, timeout=60, check=True)
    (wheel,) = tmp_path.glob("*.whl")

    assert (
        zipfile.ZipFile(wheel).read("cdi_courier_oci_hook/gate.sh")
        == (folder / "src/cdi_courier_oci_hook/gate.sh").read_bytes()
    )


@pytest.mark.parametrize("name", ["real", "settings", "state_dir", "gate_dir"])
def test_a_path_with_a_line_feed_is_refused(gated: Gated, name: str) -> None:
    """The gate is read line by line."""
    with pytest.raises(HostError, match="HOK013"):
        gate.render(attrs.evolve(gated.made, **{name: "/a\nb"}))


def test_a_gate_is_never_put_before_a_gate(gated: Gated, place: Path) -> None:
    """Nor before itself, nor before what is looked up in a PATH."""
    made = load([place])
    with pytest.raises(HostError, match=r"HOK013.*gate itself"):
        gate.files(made, "other", str(gated.path), "docker")
    with pytest.raises(HostError, match=r"HOK013.*call itself"):
        gate.files(made, "real", f"{gated.folder}/real", "docker")
    with pytest.raises(HostError, match=r"HOK013.*absolute"):
        gate.files(made, "other", "runc", "docker")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"#!/bin/sh\n",
        b"#!/bin/sh\n# cdi-courier gate: x\nreal='",
        b"\x7fELF\n# cdi-courier gate:\n",
        None,
    ],
    ids=["empty", "other", "cut", "binary", "missing"],
)
def test_what_is_no_gate_has_no_real_runtime(tmp_path: Path, content: bytes | None) -> None:
    """Also not what was cut off before the place where it says so."""
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)

    assert gate.real_of(str(path)) is None


@pytest.mark.parametrize("path", ["runc", "./runc", "sub/runc"])
def test_a_gate_is_not_looked_for_where_the_caller_happens_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A configuration may name a program alone; a file of that name in some folder is nobody's word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / path).write_text("#!/bin/sh\n# cdi-courier gate: x\nreal=/tmp/evil\n")

    assert gate.real_of(path) is None


@pytest.mark.parametrize("made", [True, False], ids=["there", "to be made"])
def test_a_gate_is_not_put_where_nothing_can_be_run(
    gated: Gated, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    """With it as the default handler no container of the node could be created."""
    folder = gated.folder if made else gated.folder / "sub/folder"
    told = attrs.evolve(Settings(), oci_hook=attrs.evolve(Settings().oci_hook, gate_dir=str(folder)))
    flags = os.statvfs(gated.folder).f_flag

    def statvfs(path: str) -> Any:
        return types.SimpleNamespace(f_flag=flags | os.ST_NOEXEC * (Path(path) == gated.folder))

    monkeypatch.setattr(gate.os, "statvfs", statvfs)
    with pytest.raises(HostError) as caught:
        gate.files(told, "x", str(gated.real), "")

    assert (caught.value.code, "noexec" in caught.value.message) == ("HOK013", True)
    assert "[oci_hook] gate_dir" in caught.value.hint


@pytest.mark.parametrize(
    ("mode", "refused"),
    [(0o755, False), (0o700, False), (0o1777, False), (0o777, True), (0o775, None), (0o757, True)],
    ids=lambda value: f"{value:o}" if type(value) is int else "",
)
def test_a_gate_is_not_put_where_others_could_exchange_it(
    gated: Gated, mode: int, refused: bool | None
) -> None:
    """Runtimes run it as root; in a sticky folder, and in root's group, what is root's stays so."""
    folder = gated.root / "others"
    folder.mkdir()
    folder.chmod(mode)
    if refused is None:
        refused = folder.stat().st_gid != 0
    told = attrs.evolve(Settings(), oci_hook=attrs.evolve(Settings().oci_hook, gate_dir=f"{folder}/bin"))
    try:
        said = gate.files(told, "x", str(gated.real), "")[-1].path
    except HostError as error:
        said = f"{error.code} {error.message}"

    assert (f"{folder}/bin/x" == said) == (not refused)
    assert said.startswith(f'HOK013 "{folder}" may be written by others') == refused


@pytest.mark.parametrize(
    ("kind", "origin"),
    [("containerd", "kubernetes"), ("cri-o", "kubernetes"), ("docker", "local"), ("", "local")],
)
def test_what_is_installed_is_the_patterns_and_the_gate(kind: Any, origin: str) -> None:
    """In gate_dir, the gate executable; whose rules apply is said at installation."""
    first, second = gate.files(Settings(), "containerd-runc", "/usr/sbin/runc", kind)

    assert (first.path, first.mode) == ("/var/lib/cdi-courier/bin/patterns", 0o644)
    assert first.content == f'cdi-courier patterns for /etc/cdi-courier/\n"{KEY}\n'.encode()
    assert (second.path, second.mode) == ("/var/lib/cdi-courier/bin/containerd-runc", 0o755)
    assert second.content is not None
    assert f"origin='{origin}'" in second.content.decode().replace("'\"'\"'", "'")
    for shell in SHELLS:
        run = [shell, "sh", "-n"] if shell.endswith("busybox") else [shell, "-n"]
        assert subprocess.run(run, input=second.content, capture_output=True, check=False).stderr == b""
