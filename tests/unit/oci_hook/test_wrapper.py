"""The wrapper's Python side, started by its gate: the bundle edited or as it was, then the real runtime."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import cdi_courier
import cdi_courier_oci_hook
import pytest
from cdi_courier import compiling, editing
from cdi_courier_oci_hook import wrapper
from cdi_courier_oci_hook.wrapper import Wrapped
from hypothesis import given
from hypothesis import strategies as st
from support import host
from support.gate import RESTED_NS, Gated, modes

KEY = "nvidia.cdi.k8s.io"
NOWHERE = "/nonexistent/python3"
RUNTIMES = Path(__file__).parents[2] / "data/runtimes"
PATH = [str(Path(str(module.__file__)).parents[1]) for module in (cdi_courier, cdi_courier_oci_hook)]
BARE = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
DEVICE = {
    "env": ["A=1", "B=2"],
    "deviceNodes": [{"path": "/dev/demo0", "hostPath": "/dev/null"}],
    "mounts": [{"hostPath": "/usr", "containerPath": "/m"}],
    "hooks": [{"hookName": "poststop", "path": "/h"}],
    "additionalGids": [5],
}


def gated_by(files: Any, kind: str = "", more: str = "", *, table: bool = True, **changes: Any) -> Gated:
    """A gate with the real Python behind it. table: compiled, so that the full pipeline is not needed."""
    files.configure(f"oci_hook.gate_dir = '{files.root}/gates'\n{more}")
    files.spec("v.json", {"a": DEVICE, "b": {"mounts": DEVICE["mounts"]}})
    compiled = compiling.compile_settled(str(files.settings))
    if table:
        compiling.write(compiled, str(files.table))
    return Gated(files.root, files.settings, kind, python=True, **changes)


def bundle(files: Any, annotations: dict[str, str], **more: Any) -> Path:
    """A bundle with a config of these annotations."""
    path: Path = files.root / "bundle"
    path.mkdir(exist_ok=True)
    config = {"ociVersion": "1.0.2", "annotations": annotations, "process": {"env": ["P=1", "A=0"]}, **more}
    (path / "config.json").write_text(json.dumps(config))
    return path


def config(path: Path) -> Any:
    return json.loads((path / "config.json").read_bytes())


@pytest.mark.parametrize("verb", ["create", "run"])
@pytest.mark.parametrize("table", [True, False], ids=["light", "slow"])
def test_an_asking_container_gets_its_devices(files: Any, verb: str, table: bool) -> None:
    """The config is edited, mode and owner stay, and the real runtime goes on in the same process.

    With a table the interpreter that has everything is not needed; without one the table is made.
    """
    gated = gated_by(files, table=table, **({"interpreter": NOWHERE} if table else {}))
    path = bundle(files, {KEY: "v.com/c=a"})
    os.chmod(path / "config.json", 0o640)
    owner = (12, 34) if os.geteuid() == 0 else (os.getuid(), os.getgid())
    os.chown(path / "config.json", *owner)

    reached = gated.call("--root", "/r", verb, "--bundle", str(path), "x", stdin=b"in")

    edited = config(path)
    assert (reached.who, reached.argv) == ("real", ("--root", "/r", verb, "--bundle", str(path), "x"))
    assert (reached.pid, reached.stdin, reached.stderr) == (reached.gate_pid, b"in", "")
    assert edited["process"]["env"] == ["P=1", "A=1", "B=2"]
    assert [device["path"] for device in edited["linux"]["devices"]] == ["/dev/demo0"]
    assert edited["annotations"]["cdi-courier.io/status"] == "injected:v.com/c=a"
    found = (path / "config.json").stat()
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (0o640, *owner)
    assert modes(path).keys() == {"config.json"}
    assert modes(gated.records) == {"x": (0o600, b'["A=1","B=2"]')}
    assert (gated.records.stat().st_mode & 0o777, files.table.exists()) == (0o700, True)


@pytest.mark.parametrize(
    ("caller", "more"), [("", set()), ("trap '' USR1; ", {signal.SIGUSR1})], ids=["none", "the caller's"]
)
@pytest.mark.parametrize("table", [True, False], ids=["light", "slow"])
def test_the_real_runtime_ignores_the_signals_that_the_caller_ignores(
    files: Any, table: bool, caller: str, more: set[int]
) -> None:
    """None of those that Python ignores for itself, which would reach the container's own process."""
    gated = gated_by(files, table=table)
    said = files.root / "ignored"
    gated.real.write_text(f"#!/bin/sh\nexec grep SigIgn /proc/self/status > {said}\n")
    calling = ["/bin/sh", "-c", f'{caller}exec "$0" "$@"']
    gated.call("create", "--bundle", str(bundle(files, {KEY: "v.com/c=a"})), "x", shell=calling)

    assert host.ignored(str(said)) == host.ignored() | more


@pytest.mark.parametrize(
    ("annotations", "more"),
    [({KEY: " "}, {}), ({"other": "x"}, {"hostname": f'"{KEY}'}), ({f"{KEY}.example": "v.com/c=a"}, {})],
    ids=["blank", "elsewhere", "another-key"],
)
@pytest.mark.parametrize("table", [True, False], ids=["light", "slow"])
def test_what_only_looks_like_asking_changes_nothing(
    files: Any, annotations: dict[str, str], more: dict[str, str], table: bool
) -> None:
    """The config keeps its bytes and is not even replaced."""
    gated = gated_by(files, table=table)
    path = bundle(files, annotations, **more)
    before = ((path / "config.json").read_bytes(), (path / "config.json").stat().st_ino)

    assert gated.call("create", "--bundle", str(path), "x").who == "real"
    assert ((path / "config.json").read_bytes(), (path / "config.json").stat().st_ino) == before
    assert not gated.records.exists()


def test_a_repeated_create_changes_nothing_more(files: Any) -> None:
    """Same bytes, same record: a runtime may try a bundle again."""
    gated = gated_by(files)
    path = bundle(files, {KEY: "v.com/c=a"})
    gated.call("create", "--bundle", str(path), "x")
    once = (modes(path), modes(gated.records), (path / "config.json").stat().st_ino)

    assert gated.call("create", "--bundle", str(path), "x").who == "real"
    assert (modes(path), modes(gated.records), (path / "config.json").stat().st_ino) == once


# --- who asks ------------------------------------------------------------------------------------------

ONE = """\
[[policy.rules]]
action = "allow"
namespaces = ["default"]
pods = ["demo"]
containers = ["c0"]
"""
CONTAINERD = ["containerd-1.6.20", "containerd-1.7.24", "containerd-2.1.9"]


def captured(files: Any, name: str, annotations: dict[str, str]) -> Path:
    """A bundle as a real runtime made it, with annotations of the pod, which the runtime's own follow."""
    document = json.loads((RUNTIMES / f"{name}.json").read_bytes())
    path = bundle(files, {})
    document["annotations"] = {**annotations, **document["annotations"]}
    (path / "config.json").write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("kind", "name"),
    [("containerd", f"{name}-ociconfig-container") for name in CONTAINERD]
    + [("cri-o", "crio-1.36.3-ociconfig-container")],
)
@pytest.mark.parametrize("table", [True, False], ids=["light", "slow"])
def test_rules_and_keys_see_the_names_that_the_runtime_wrote(
    files: Any, kind: str, name: str, table: bool
) -> None:
    """Namespace, pod and container of what real runtimes hand over; a key that names the container counts."""
    gated = gated_by(files, kind, ONE, table=table)
    path = captured(files, name, {f"{KEY}/container.c0": "v.com/c=b", KEY: "v.com/c=none"})

    reached = gated.call("create", "--bundle", str(path), "x")

    assert (reached.who, reached.stderr) == ("real", "")
    assert config(path)["annotations"]["cdi-courier.io/status"] == "injected:v.com/c=b"


FORGED = {
    "containerd": {
        "io.kubernetes.pod.namespace": "kube-system",
        "io.kubernetes.pod.name": "x",
        "io.kubernetes.container.name": "x",
        "io.kubernetes.cri-o.ContainerType": "sandbox",
    },
    "cri-o": {
        "io.kubernetes.cri.sandbox-namespace": "kube-system",
        "io.kubernetes.cri.sandbox-name": "x",
        "io.kubernetes.cri.container-name": "x",
        "io.kubernetes.cri.container-type": "sandbox",
    },
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("containerd", "containerd-2.1.9-ociconfig-container"),
        ("cri-o", "crio-1.36.3-ociconfig-container"),
    ],
)
def test_another_runtime_s_keys_say_nothing(files: Any, kind: str, name: str) -> None:
    """A pod's author may write those; the pod of ``default`` stays one, and is refused by name."""
    gated = gated_by(files, kind)
    path = captured(files, name, {KEY: "v.com/c=a", **FORGED[kind]})
    before = modes(path)

    reached = gated.call("create", "--bundle", str(path), "x")

    assert (reached.who, reached.returncode, modes(path)) == ("", 1, before)
    assert 'POL001: container "c0" of pod "default/demo" may not have' in reached.stderr


@pytest.mark.parametrize("kind", ["containerd", "cri-o"])
def test_a_kubernetes_container_without_a_namespace_is_refused(files: Any, kind: str) -> None:
    """Where the runtime wrote none, no rule can be applied."""
    gated = gated_by(files, kind, "policy.default = 'allow'\n")
    path = bundle(files, {KEY: "v.com/c=a"})

    assert "told no namespace" in gated.call("create", "--bundle", str(path), "x").stderr


@pytest.mark.parametrize("kind", ["docker", ""])
def test_elsewhere_a_container_is_local_and_has_no_name(files: Any, kind: str) -> None:
    """Whatever its annotations say of pods: [policy] local decides, and no key names the container."""
    gated = gated_by(files, kind)
    forged = {**FORGED["containerd"], **FORGED["cri-o"]}
    path = bundle(files, {**forged, f"{KEY}/container.x": "v.com/c=none", KEY: "v.com/c=b"})

    assert gated.call("create", "--bundle", str(path), "x").who == "real"
    assert config(path)["annotations"]["cdi-courier.io/status"] == "injected:v.com/c=b"


@pytest.mark.parametrize("table", [True, False], ids=["light", "slow"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("containerd", "containerd-1.6.20-ociconfig-sandbox-podann"),
        ("cri-o", "crio-1.36.3-ociconfig-sandbox"),
    ],
)
def test_python_leaves_pause_containers_alone_by_itself(
    files: Any, kind: str, name: str, table: bool
) -> None:
    """Also where the gate could not tell, because the config is written in another way."""
    gated = gated_by(files, kind, table=table)
    path = captured(files, name, {KEY: "v.com/c=a"})
    text = (path / "config.json").read_text().replace('": "sandbox"', '"\n:\n"sandbox"')
    (path / "config.json").write_text(text)

    assert gated.call("create", "--bundle", str(path), "x").who == "real"
    assert (path / "config.json").read_text() == text


# --- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [True, False], ids=["light", "slow"])
@pytest.mark.parametrize(
    ("more", "value", "code"),
    [
        ("policy.local = 'deny'\n", "v.com/c=a", "POL001"),
        ("", "v.com/c=z", "CDI012"),
        ("", "nonsense", "ANN001"),
        ("", "v.com/c=a," * 20_000, "ANN003"),
    ],
    ids=["denied", "unknown", "no-name", "huge"],
)
def test_a_refusal_is_told_to_everyone_who_reads_it(
    files: Any, more: str, value: str, code: str, table: bool
) -> None:
    """On stderr for CRI-O, in the runtime's log for containerd's shim, in ours for whoever looks there."""
    gated = gated_by(files, "", more, table=table)
    path = bundle(files, {KEY: value})
    before = modes(path)
    log = files.root / "log.json"
    log.write_text('{"level":"error","msg":"an earlier one","time":"2026-11-30T11:20:42Z"}\n')

    reached = gated.call("--log", str(log), "--log-format", "json", "create", "--bundle", str(path), "x")

    assert (reached.who, reached.returncode, modes(path)) == ("", 1, before)
    assert reached.stderr.startswith(f"cdi-courier: {code}: ")
    last = json.loads(log.read_text().splitlines()[-1])
    assert last["level"] == "error"
    assert last["msg"] == reached.stderr.removesuffix("\n")
    assert last["time"][10] + last["time"][-1] == "TZ"
    assert f" {code}: " in files.log.read_text()
    assert not gated.records.exists()


@pytest.mark.parametrize(
    ("options", "file"),
    [(["--log", "LOG"], True), (["--log=file:LOG"], True), (["--log=journald:x"], False), ([], False)],
    ids=["runc", "crun", "journal", "none"],
)
def test_a_log_of_text_gets_the_runtime_s_line(files: Any, options: list[str], file: bool) -> None:
    """One line, whatever the message holds; crun's other places are no files."""
    gated = gated_by(files, "", "policy.local = 'deny'\n")
    path = bundle(files, {KEY: "v.com/c=a"})
    log = files.root / "runtime.log"

    gated.call(*(word.replace("LOG", str(log)) for word in options), "create", "--bundle", str(path), "x")

    assert log.exists() == file
    if file:
        (line,) = log.read_text().splitlines()
        assert 'level=error msg="cdi-courier: POL001: ' in line


def spoil_link(path: Path) -> None:
    (path / "config.json").rename(path / "other.json")
    (path / "config.json").symlink_to("other.json")


def spoil_pipe(path: Path) -> None:
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")


def spoil_folder(path: Path) -> None:
    (path / "config.json").unlink()
    (path / "config.json").mkdir()


def spoil_size(path: Path) -> None:
    os.truncate(path / "config.json", (64 << 20) + 1)


@pytest.mark.parametrize(
    ("spoil", "code"),
    [(spoil_link, "HOK005"), (spoil_pipe, "HOK005"), (spoil_folder, "HOK005"), (spoil_size, "HOK002")],
    ids=["link", "pipe", "folder", "size"],
)
def test_a_config_that_is_no_plain_file_is_refused_in_words(files: Any, spoil: Any, code: str) -> None:
    """Nothing is followed, waited for or read without end."""
    gated = gated_by(files)
    path = bundle(files, {KEY: "v.com/c=a"})
    spoil(path)

    # As an unusual spelling: a pipe would hold up the gate's own look, as it would the real runtime.
    reached = gated.call("create", f"-b={path}", "x")

    assert (reached.who, reached.returncode) == ("", 1)
    assert f"cdi-courier: {code}: " in reached.stderr


def test_a_bundle_that_is_not_there_is_the_real_runtime_s_business(files: Any) -> None:
    """It says best what is missing."""
    gated = gated_by(files)

    for call in (["create", "--bundle", "/nonexistent", "x"], ["create", "-b/nonexistent", "x"]):
        assert gated.call(*call).who == "real"


def test_two_bundles_in_one_command_line_are_refused(files: Any) -> None:
    """``-b=DIR`` is another folder to crun than to runc: if both hold a config, nobody knows which."""
    gated = gated_by(files)
    path = bundle(files, {KEY: "v.com/c=a"})
    (files.root / "=bundle").mkdir()
    (files.root / "=bundle/config.json").write_text("{}")
    before = modes(path)

    reached = gated.call("create", "-b=bundle", "x", cwd=files.root)

    assert (reached.who, modes(path)) == ("", before)
    assert "HOK012" in reached.stderr


def test_crun_s_config_of_another_name_is_edited(files: Any) -> None:
    """It is looked for where crun does, from the working directory; the bundle's own stays."""
    gated = gated_by(files)
    path = bundle(files, {KEY: "v.com/c=a"})
    (files.root / "other.json").write_bytes((path / "config.json").read_bytes())
    before = modes(path)

    assert (
        gated.call("create", "--config=other.json", "--bundle", str(path), "x", cwd=files.root).who == "real"
    )
    assert "A=1" in json.loads((files.root / "other.json").read_bytes())["process"]["env"]
    assert modes(path) == before


def test_a_real_runtime_that_is_gone_is_said(files: Any) -> None:
    """The message names it, in the runtime's log as well."""
    gated = gated_by(files)
    path = bundle(files, {KEY: "v.com/c=a"})
    gated.real.unlink()

    reached = gated.call("create", "--bundle", str(path), "x")

    assert reached.returncode == 1
    assert f'HOK009: the real runtime "{gated.real}" cannot be run' in reached.stderr


@pytest.mark.parametrize("key", [1, None], ids=str)
def test_patterns_that_cannot_be_made_of_the_table_keep_no_container_away(files: Any, key: object) -> None:
    """The gate goes on asking Python, which is only slower, and nobody sees a traceback."""
    gated = gated_by(files)
    path = bundle(files, {KEY: "v.com/c=a"})
    document = json.loads(files.table.read_bytes())
    document["keys"].append([[key, True]])
    files.table.write_text(json.dumps(document))
    (files.root / "gates/patterns").unlink()

    reached = gated.call("create", "--bundle", str(path), "x")

    assert (reached.who, reached.stderr) == ("real", "")
    assert config(path)["annotations"]["cdi-courier.io/status"] == "injected:v.com/c=a"


# --- exec ----------------------------------------------------------------------------------------------


def executed(files: Any, gated: Gated, *argv: str, env: list[str] | None = None) -> Any:
    """The process after an exec of it in the container x, which has a record."""
    process = files.root / "process.json"
    process.write_text(json.dumps({"args": ["sh"]} | ({} if env is None else {"env": env})))
    os.chmod(process, 0o600)
    reached = gated.call(*(word.replace("FILE", str(process)) for word in argv), stdin=b"in", cwd=files.root)
    assert (reached.who, reached.stdin) == ("real", b"in"), reached.stderr
    assert process.stat().st_mode & 0o777 == 0o600
    return json.loads(process.read_bytes()).get("env")


SPELLINGS = ["--process FILE", "--process=FILE", "-p FILE", "-p=FILE", "-pFILE", "-d --process FILE"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_exec_sees_what_was_put_into_the_environment(files: Any, spelling: str) -> None:
    """As CDI puts it in: what is there is replaced where it stands, what is new follows."""
    gated = gated_by(files, interpreter=NOWHERE)
    gated.call("create", "--bundle", str(bundle(files, {KEY: "v.com/c=a"})), "x")

    env = executed(files, gated, "--root=/r", "exec", *spelling.split(), "x", env=["P=1", "A=0", "C=1"])
    none = executed(files, gated, "exec", *spelling.split(), "x")
    other = executed(files, gated, "exec", *spelling.split(), "y", env=["P=1"])

    assert env == ["P=1", "A=1", "C=1", "B=2"]
    assert none == ["A=1", "B=2"]
    assert other == ["P=1"]


def test_an_exec_without_a_process_file_is_left_alone(files: Any) -> None:
    """The runtime makes that process of the config, which has the variables."""
    gated = gated_by(files)
    gated.call("create", "--bundle", str(bundle(files, {KEY: "v.com/c=a"})), "x")

    assert gated.call("exec", "x", "env").argv == ("exec", "x", "env")


@pytest.mark.parametrize(
    ("content", "code"),
    [("{", "HOK002"), ('{"env": 1}', "CDI018"), (None, "HOK005")],
    ids=["cut", "env", "link"],
)
def test_a_process_that_cannot_be_edited_is_refused_in_words(
    files: Any, content: str | None, code: str
) -> None:
    """Never run with less than was granted."""
    gated = gated_by(files)
    gated.call("create", "--bundle", str(bundle(files, {KEY: "v.com/c=a"})), "x")
    process = files.root / "process.json"
    if content is None:
        process.symlink_to("elsewhere")
    else:
        process.write_text(content)

    reached = gated.call("exec", "--process", str(process), "x")

    assert (reached.who, reached.returncode) == ("", 1)
    assert f"cdi-courier: {code}: " in reached.stderr


def test_a_container_of_the_same_id_inherits_nothing(files: Any) -> None:
    """One that was never deleted leaves its record; the next one's create takes it away."""
    gated = gated_by(files)
    gated.call("create", "--bundle", str(bundle(files, {KEY: "v.com/c=a"})), "x")

    gated.call("create", "--bundle", str(bundle(files, {"other": "x"})), "x")

    assert modes(gated.records) == {}


@given(st.text(max_size=8) | st.sampled_from(["..", ".", "", "../x", "/etc/x", "a/b", "..."]))
def test_an_id_leads_nowhere_else(container: str) -> None:
    """A record lies in its folder or nowhere."""
    installed = Wrapped(interpreter="", settings="", state_dir="/s", real="", kind="", gate_dir="")

    path = wrapper._record_path(installed, container)

    assert path == "" or (os.path.dirname(path), os.path.normpath(path)) == ("/s/exec", path)


def test_an_id_that_cannot_be_noted_is_refused(files: Any) -> None:
    """Without a record an exec would have less than the container."""
    gated = gated_by(files)
    path = bundle(files, {KEY: "v.com/c=a"})
    before = modes(path)

    reached = gated.call("create", "--bundle", str(path), "a/b")

    assert (reached.who, modes(path)) == ("", before)
    assert "HOK007" in reached.stderr


# --- faults --------------------------------------------------------------------------------------------

KILLER = """\
import os, signal, sys
sys.path += {path!r}
import cdi_courier_oci_hook.wrapper as wrapper
from cdi_courier_oci_hook.wrapper import Wrapped
left = {at}
def counted(call):
    def run(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return run
for name in ("open", "write", "read", "fstat", "fchown", "fchmod", "rename", "close", "unlink", "mkdir",
"execv"):
    setattr(os, name, counted(getattr(os, name)))
wrapper.main({installed!r}, "asks", sys.argv[1:])
"""


def test_whenever_it_is_killed_the_config_is_whole(files: Any) -> None:
    """Before any of its system calls: the config is the old or the new one, and the next create completes."""
    gated = gated_by(files)
    original = bundle(files, {KEY: "v.com/c=a"}).joinpath("config.json").read_bytes()
    path = files.root / "bundle"
    installed = Wrapped(
        interpreter=NOWHERE,
        settings=str(files.settings),
        state_dir=str(files.state),
        real="/bin/true",
        kind="",
        gate_dir=gated.made.gate_dir,
    )
    states = []
    at = 0
    killed = True
    while killed:
        at += 1
        for folder in (path, gated.records):
            for file in folder.glob("*"):
                file.unlink()
        (path / "config.json").write_bytes(original)
        script = KILLER.format(path=PATH, at=at, installed=installed)
        argv = [BARE, "-I", "-S", "-c", script, "create", "--bundle", str(path), "x"]
        killed = subprocess.run(argv, timeout=60, check=False).returncode == -9
        states.append((path / "config.json").read_bytes())

        assert gated.call("create", "--bundle", str(path), "x").who == "real"
        assert (modes(path).keys(), modes(gated.records)) == (
            {"config.json"},
            {"x": (0o600, b'["A=1","B=2"]')},
        )
        assert (path / "config.json").read_bytes() == states[-1] or states[-1] == original

    assert at > 15
    assert len(set(states)) == 2
    assert (states[0], json.loads(states[-1])["process"]["env"]) == (original, ["P=1", "A=1", "B=2"])


@pytest.mark.parametrize("what", ["config", "process"])
def test_a_file_that_cannot_be_written_whole_stays_as_it_was(files: Any, what: str) -> None:
    """As on a full disk: refused with the cause, and nothing is left behind."""
    gated = gated_by(files)
    path = bundle(files, {KEY: "v.com/c=a", "other": "x" * 4096})
    call = ["create", "--bundle", str(path), "y"]
    if what == "process":
        gated.call("create", "--bundle", str(bundle(files, {KEY: "v.com/c=a"})), "x")
        (path / "config.json").write_text(json.dumps({"env": ["X=" + "x" * 4096]}))
        call = ["exec", "--process", str(path / "config.json"), "x"]
    before = modes(path)

    limited = ["/bin/sh", "-c", 'ulimit -f 4; exec "$0" "$@"']
    reached = gated.call(*call, shell=limited)

    assert (reached.who, reached.returncode, modes(path)) == ("", 1, before)
    assert "HOK006" in reached.stderr
    assert "File too large" in reached.stderr


def test_without_room_for_the_record_nothing_is_edited(files: Any) -> None:
    """The container is refused before its config is touched."""
    gated = gated_by(files)
    path = bundle(files, {KEY: "v.com/c=a"})
    gated.records.touch()  # a file where the folder should be
    before = modes(path)

    reached = gated.call("create", "--bundle", str(path), "x")

    assert (reached.who, modes(path)) == ("", before)
    assert "HOK007" in reached.stderr


@pytest.mark.parametrize(
    "damage",
    [b"{", b'{"format": 999}', b"[]", b"\0\xff", b""],
    ids=["cut", "version", "list", "binary", "empty"],
)
def test_a_table_that_cannot_be_used_only_costs_time(files: Any, damage: bytes) -> None:
    """The full pipeline answers, and makes another."""
    gated = gated_by(files)
    files.table.write_bytes(damage)
    path = bundle(files, {KEY: "v.com/c=a"})

    assert gated.call("create", "--bundle", str(path), "x").who == "real"
    assert "A=1" in config(path)["process"]["env"]
    assert "devices" in json.loads(files.table.read_bytes())


def test_patterns_that_are_gone_are_made_anew(files: Any) -> None:
    """From the table where it holds, by the next container, whatever it asks for."""
    gated = gated_by(files, interpreter="/bin/false")
    (gated.folder / "patterns").unlink()
    path = bundle(files, {"other": "x"})

    assert gated.call("create", "--bundle", str(path), "x").who == "real"
    made = (gated.folder / "patterns").read_text()
    assert made.splitlines()[1:] == [f'"{KEY}']


def test_without_its_interpreter_nothing_changes_for_who_does_not_ask(files: Any) -> None:
    """Patterns and table are old and nobody can make them anew: only a container that asks is refused."""
    gated = gated_by(files, interpreter=NOWHERE, table=False)
    (gated.folder / "patterns").unlink()

    plain = gated.call("create", "--bundle", str(bundle(files, {"other": "x"})), "x")
    asks = gated.call("create", "--bundle", str(bundle(files, {KEY: "v.com/c=a"})), "x")

    assert (plain.who, plain.stderr) == ("real", "")
    assert (asks.who, asks.returncode) == ("", 1)
    assert "HOK003" in asks.stderr


def lacking(files: Any) -> str:
    """An interpreter without the product, as a virtual environment's after an upgrade of the system's."""
    path = files.root / "lacking"
    path.write_text(f'#!/bin/sh\nexec {BARE} -S "$@"\n')
    path.chmod(0o755)
    return str(path)


def no_program(files: Any) -> str:
    """A file in the interpreter's place that cannot be run."""
    path = files.root / "no-program"
    path.touch()
    return str(path)


@pytest.mark.parametrize("interpreter", [lacking, no_program], ids=["lacking", "no-program"])
@pytest.mark.parametrize("way", ["stale", "as it was"])
def test_an_interpreter_that_is_of_no_use_keeps_only_those_away_that_ask(
    files: Any, interpreter: Any, way: str
) -> None:
    """Whatever the gate could not tell by itself: no traceback, and who does not ask is created."""
    gated = gated_by(files, table=False, interpreter=interpreter(files))
    if way == "stale":
        os.utime(files.settings, ns=(0, os.stat(files.settings).st_mtime_ns + 2 * RESTED_NS))
    path = bundle(files, {"other": "x"})
    before = modes(path)
    plain = gated.call("create", "--bundle", str(path), "x")
    unchanged = modes(path) == before
    asks = gated.call("create", "--bundle", str(bundle(files, {KEY: "v.com/c=a"})), "x")

    assert (plain.who, plain.stderr, unchanged) == ("real", "", True)
    assert (asks.who, asks.returncode) == ("", 1)
    assert asks.stderr.startswith("cdi-courier: HOK003: ")
    assert asks.stderr.count("\n") == 1


BROKEN = {
    "not-toml": "x = [",
    "unknown-key": "no.such = 1",
    "wrong-type": "policy.default = 1",
    "unknown-dialect": "annotations.dialects = ['gone']",
}


def break_settings(files: Any, text: str) -> None:
    """Add to the settings, which are newer than the gate's patterns from then on."""
    files.settings.write_text(f"{files.settings.read_text()}\n{text}\n")
    os.utime(files.settings, ns=(0, os.stat(files.settings).st_mtime_ns + 2 * RESTED_NS))


@pytest.mark.parametrize("broken", BROKEN.values(), ids=list(BROKEN))
def test_settings_that_cannot_be_used_keep_only_those_away_that_ask(files: Any, broken: str) -> None:
    """A typo must not stop every container of the node; who asks is told by what was last in force."""
    gated = gated_by(files)
    break_settings(files, broken)
    asked = {f"{KEY}/pod": "v.com/c=a"}

    for others in ({}, {"other": "x"}):
        path = bundle(files, others, hostname=f'"{KEY}')
        before = modes(path)
        reached = gated.call("create", "--bundle", str(path), "x")
        assert (reached.who, reached.stderr, modes(path)) == ("real", "", before)
    reached = gated.call("create", "--bundle", str(bundle(files, asked)), "x")
    assert (reached.who, reached.returncode) == ("", 1)
    assert reached.stderr.startswith("cdi-courier: SET0")


@pytest.mark.parametrize("damage", [None, "", "cdi-courier patterns for /elsewhere\n"], ids=str)
def test_without_patterns_of_these_settings_everybody_may_ask(files: Any, damage: str | None) -> None:
    """Nothing tells then who does not, so that nobody loses devices silently."""
    gated = gated_by(files)
    (gated.folder / "patterns").unlink()
    if damage is not None:
        (gated.folder / "patterns").write_text(damage)
    break_settings(files, "x = [")

    assert "SET002" in gated.call("create", "--bundle", str(bundle(files, {"other": "x"})), "x").stderr


def test_in_a_folder_of_everybody_no_name_is_foreseen(files: Any) -> None:
    """What somebody else puts there under the name of a bundle's temporary file is in nobody's way."""
    gated = gated_by(files)
    gated.call("create", "--bundle", str(bundle(files, {KEY: "v.com/c=a"})), "x")
    folder = files.root / "tmp"
    folder.mkdir()
    os.chmod(folder, 0o1777)
    (folder / ".p.json.cdi-courier/in").mkdir(parents=True)
    (folder / "p.json").write_text("{}")

    assert gated.call("exec", "--process", str(folder / "p.json"), "x").who == "real"
    assert json.loads((folder / "p.json").read_text()) == {"env": ["A=1", "B=2"]}
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("table", [True, False], ids=["light", "slow"])
def test_a_changed_domain_counts_at_once(files: Any, table: bool) -> None:
    """The gate sees that the settings are newer, and from then on looks for the new domain."""
    gated = gated_by(files)
    old = bundle(files, {KEY: "v.com/c=a"})
    files.configure(f"oci_hook.gate_dir = '{gated.folder}'\nannotations.domains = ['new.example']\n")
    os.utime(files.settings, ns=(0, os.stat(files.settings).st_mtime_ns + 2 * RESTED_NS))
    if table:
        compiling.write(compiling.compile_table(str(files.settings)), str(files.table))

    passed = gated.call("create", "--bundle", str(old), "x")
    untouched = config(old)
    new = bundle(files, {"new.example/pod": "v.com/c=a"})
    asked = gated.call("create", "--bundle", str(new), "x")

    assert (passed.who, asked.who) == ("real", "real")
    assert "cdi-courier.io/status" not in untouched["annotations"]
    assert config(new)["annotations"]["cdi-courier.io/status"] == "injected:v.com/c=a"
    assert '"new.example\n' in (gated.folder / "patterns").read_text()


def test_large_annotations_are_no_obstacle(files: Any) -> None:
    """As many bytes as Kubernetes lets a pod have, beside ours."""
    gated = gated_by(files)
    path = bundle(files, {KEY: "v.com/c=a", **{f"a{n}": "é" * 1000 for n in range(128)}})

    assert gated.call("create", "--bundle", str(path), "x").who == "real"
    assert config(path)["annotations"]["a7"] == "é" * 1000
    assert "A=1" in config(path)["process"]["env"]


ALLOWED = "_json, os, stat, errno, time, _socket, __future__"
LIGHT = {
    "cdi_courier",
    "cdi_courier_oci_hook",
    *(
        f"cdi_courier.{n}"
        for n in ("annotations", "editing", "errors", "fastjson", "names", "oci", "patterns")
    ),
    *(f"cdi_courier.{n}" for n in ("policy", "request", "signature", "table")),
    *(f"cdi_courier_oci_hook.{n}" for n in ("calls", "entry", "log", "program", "wrapper")),
}


def test_the_light_way_does_without_what_takes_long(files: Any) -> None:
    """Beside the light modules only what the interpreter has built in, or nearly; no json, no re, no enum."""
    gated = gated_by(files, interpreter=NOWHERE)
    path = bundle(files, {KEY: "v.com/c=a"})
    installed = Wrapped(
        interpreter=NOWHERE,
        settings=str(files.settings),
        state_dir=str(files.state),
        real="/bin/true",
        kind="",
        gate_dir=gated.made.gate_dir,
    )

    def loaded(script: str, *arguments: str) -> set[str]:
        argv = [BARE, "-X", "importtime", "-I", "-S", "-c", script, *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
        return {line.rpartition("|")[2].strip() for line in lines}

    more = loaded(wrapper.command(installed, PATH), "asks", "create", "--bundle", str(path), "x")

    assert more - loaded(f"import {ALLOWED}") == LIGHT
    assert "A=1" in config(path)["process"]["env"]


_values = st.sampled_from(["v.com/c=a", "v.com/c=b", "v.com/c=a,v.com/c=b"])
_rules = st.lists(
    st.fixed_dictionaries({"allow": st.booleans(), "minor": st.sampled_from([3, 5])}), max_size=3
)


@given(_values, _rules, st.lists(st.sampled_from(["A=0", "P=1", "B=2"]), unique=True))
def test_editing_twice_is_editing_once(value: str, rules: list[Any], env: list[str]) -> None:
    """For any rules and variables that a config has, with every kind of edit."""
    edits: dict[str, Any] = {"v.com/c=a": DEVICE, "v.com/c=b": {"deviceNodes": DEVICE["deviceNodes"] * 2}}
    merged: dict[str, Any] = {}
    for name in value.split(","):
        for key, items in edits[name].items():
            merged[key] = merged.get(key, []) + items
    bare = {"process": {"env": env}, "linux": {"resources": {"devices": rules}}}

    once = editing.put_in(bare, value.split(","), merged)
    twice = editing.put_in(once.config, value.split(","), merged)

    assert twice.config == once.config
    assert twice.env == once.env
    assert once.config["linux"]["resources"]["devices"][: len(rules)] == rules


def test_compiling_tells_the_gate_what_to_look_for(files: Any) -> None:
    """``cdi-courier compile`` writes the patterns where a gate is, and only there."""
    files.configure(f"oci_hook.gate_dir = '{files.root}/gates'\n")
    argv = [sys.executable, "-m", "cdi_courier", "--config", str(files.settings), "compile"]
    without = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    (files.root / "gates").mkdir()

    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)

    assert "patterns" not in without.stdout
    assert f"wrote {files.root}/gates/patterns" in done.stdout
    assert f'"{KEY}\n' in (files.root / "gates/patterns").read_text()
