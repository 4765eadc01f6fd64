"""What the createRuntime hook makes of a container's state, and what it cannot deliver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cdi_courier
import cdi_courier_oci_hook
import pytest
from cdi_courier import compiling, editing, table
from cdi_courier.errors import CourierError, DeliveryError, PolicyDenied
from cdi_courier_oci_hook import hook
from cdi_courier_oci_hook.live import namespaces, syscalls
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import wait_for

KEY = "nvidia.cdi.k8s.io"
KEYS = ((KEY, False), (f"{KEY}/container.", True))
PATH = [str(Path(str(module.__file__)).parents[1]) for module in (cdi_courier, cdi_courier_oci_hook)]
BARE = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
NAMES = {
    "io.kubernetes.pod.namespace": "ns",
    "io.kubernetes.pod.name": "pod",
    "io.kubernetes.container.name": "c0",
}
CRIO = {**NAMES, "io.container.manager": "cri-o", "io.kubernetes.cri-o.SandboxID": "5a"}


def installed(kind: Any = "local", **more: Any) -> hook.Installed:
    options: dict[str, Any] = {"interpreter": "/nowhere", "settings": "/nowhere", "state_dir": "/nowhere"}
    return hook.Installed(kind=kind, keys=KEYS, **{**options, **more})


def state(bundle: Path, annotations: Any = None, **more: Any) -> bytes:
    """As runc writes it."""
    return json.dumps(
        {"ociVersion": "1.0.2", "id": "c", "status": "creating", "pid": 4711, "bundle": str(bundle)}
        | ({} if annotations is None else {"annotations": annotations})
        | more
    ).encode()


def write_config(bundle: Path, **config: Any) -> None:
    bundle.mkdir(parents=True, exist_ok=True)
    (bundle / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}, **config}))


def asked(data: bytes, kind: Any = "local") -> hook.Asked:
    found = hook.ask(data, installed(kind))
    assert found is not None
    return found


def test_a_relative_root_is_the_bundles(tmp_path: Path) -> None:
    """The config says where it is, from the bundle."""
    write_config(tmp_path)

    assert asked(state(tmp_path, {KEY: "v.com/c=a"})).root == f"{tmp_path}/rootfs"


def test_an_absolute_root_is_taken_as_it_is(tmp_path: Path) -> None:
    """As CRI-O writes it."""
    write_config(tmp_path, root={"path": "/r/merged"})

    assert asked(state(tmp_path, {KEY: "v.com/c=a"})).root == "/r/merged"


def test_without_a_usable_bundle_crun_still_names_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """crun before 1.27 may say that the bundle is the root folder; its state has the root."""
    monkeypatch.chdir(tmp_path)

    assert asked(state(Path("/"), {KEY: "v.com/c=a"}, root="/r")).root == "/r"
    assert asked(state(Path("/"), {KEY: "v.com/c=a"}, root="rootfs")).root == f"{tmp_path}/rootfs"


def test_without_a_usable_bundle_the_hooks_folder_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runtimes run hooks in the bundle, so its config is found there, with who the process is."""
    write_config(tmp_path, process={"user": {"uid": 7}})
    monkeypatch.chdir(tmp_path)

    found = asked(state(Path("/"), {KEY: "v.com/c=a"}))

    assert (found.root, found.config["process"]["user"]["uid"]) == (f"{tmp_path}/rootfs", 7)


def test_crios_mount_point_is_believed_only_of_crio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever annotates a local container must not choose what the hook takes for its root."""
    monkeypatch.chdir(tmp_path)
    annotations = {**CRIO, KEY: "v.com/c=a", "io.kubernetes.cri-o.MountPoint": "/merged"}

    assert asked(state(Path("/"), annotations), "cri-o").root == "/merged"
    with pytest.raises(DeliveryError, match="HOK202"):
        asked(state(Path("/"), annotations))


def test_names_are_those_that_crio_writes(tmp_path: Path) -> None:
    """Namespace, pod and container are known, and the rules for Kubernetes apply."""
    write_config(tmp_path)

    request = asked(state(tmp_path, {**CRIO, KEY: "v.com/c=a"}), "cri-o").request

    assert (request.namespace, request.pod, request.container) == ("ns", "pod", "c0")
    assert request.origin == "kubernetes"


def test_a_local_container_has_no_names_whatever_it_says(tmp_path: Path) -> None:
    """Anybody can write these annotations there."""
    write_config(tmp_path)

    request = asked(state(tmp_path, {**CRIO, KEY: "v.com/c=a"})).request

    assert (request.namespace, request.pod, request.container) == ("", "", "")
    assert request.origin == "local"


def test_without_annotations_in_the_state_the_configs_count(tmp_path: Path) -> None:
    """They are the same where both are there."""
    write_config(tmp_path, annotations={KEY: "v.com/c=a"})

    assert asked(state(tmp_path)).request.annotations == {KEY: "v.com/c=a"}


@pytest.mark.parametrize(
    "annotations",
    [{"io.container.manager": "libpod"}, {**CRIO, "io.kubernetes.cri-o.ContainerType": "sandbox"}],
    ids=["podman", "sandbox"],
)
def test_containers_of_others_are_left_alone(tmp_path: Path, annotations: dict[str, str]) -> None:
    """Podman may read the same folder and has its own hook; a pause container needs no devices."""
    write_config(tmp_path)

    assert hook.ask(state(tmp_path, {**annotations, KEY: "v.com/c=a"}), installed("cri-o")) is None


def test_an_old_crio_keeps_the_pods_annotations_with_the_sandbox(tmp_path: Path) -> None:
    """Before 1.24 they are not in the container's state; its names stay its own."""
    bundle = tmp_path / "c/userdata"
    write_config(bundle)
    pod = {KEY: "v.com/c=a", "io.kubernetes.pod.namespace": "kube-system"}
    write_config(tmp_path / "5a/userdata", annotations={"io.kubernetes.cri-o.Annotations": json.dumps(pod)})

    request = asked(state(bundle, CRIO), "cri-o").request

    assert request.annotations[KEY] == "v.com/c=a"
    assert request.namespace == "ns"


@pytest.mark.parametrize(
    "sandbox",
    [None, {}, {"io.kubernetes.cri-o.Annotations": "{"}, {"io.kubernetes.cri-o.Annotations": "[]"}],
    ids=["missing", "without", "broken", "list"],
)
def test_a_container_whose_annotation_cannot_be_found_is_refused(
    tmp_path: Path, sandbox: dict[str, str] | None
) -> None:
    """The hook is only run for it, so there is one; the container must not start as if there were none."""
    bundle = tmp_path / "c/userdata"
    write_config(bundle)
    if sandbox is not None:
        write_config(tmp_path / "5a/userdata", annotations=sandbox)

    with pytest.raises(DeliveryError, match="HOK203"):
        asked(state(bundle, CRIO), "cri-o")


@pytest.mark.parametrize("sandbox", ["../../etc", "a/b", "", "."], ids=repr)
def test_a_sandbox_is_a_name_and_no_path(tmp_path: Path, sandbox: str) -> None:
    """What would lead elsewhere is not followed."""
    write_config(tmp_path / "c/userdata")

    with pytest.raises(DeliveryError, match="HOK203"):
        asked(state(tmp_path / "c/userdata", {**CRIO, "io.kubernetes.cri-o.SandboxID": sandbox}), "cri-o")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"pid": 0}',
        b'{"pid": -1}',
        b'{"pid": true}',
        b'{"pid": 1.5}',
        b'{"pid": "1"}',
        b'{"pid": 4294967296}',
        b'{"pid": 1, "bundle": 3}',
        b'{"pid": 1, "root": []}',
        b'{"pid": 1, "annotations": [1]}',
        b"[" * 10000,
    ],
)
def test_an_unusable_state_is_refused_in_words(data: bytes) -> None:
    """Whatever it is, there is no traceback."""
    with pytest.raises(CourierError, match=r"HOK20[12]"):
        hook.ask(data, installed())


@given(st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["pid", "bundle", "root", "annotations", "x"]), inner, max_size=4),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_no_state_makes_it_crash(data: bytes) -> None:
    """It is understood, or refused as expected errors are."""
    codes = {"HOK201", "HOK202", "CDI018"}
    try:
        hook.ask(data, installed())
        refused = None
    except CourierError as error:
        refused = error.code

    assert refused is None or refused in codes


LOST = {
    "env": ({"env": ["A=1=2", "B=2"]}, ["env A", "env B"]),
    "groups": ({"additionalGids": [7, 8]}, ["additional group 7", "additional group 8"]),
    "rdt": ({"intelRdt": {}}, ["intelRdt"]),
    "net": ({"netDevices": [{"hostInterfaceName": "eth1", "name": "x"}]}, ["network device eth1"]),
    "hooks": (
        {
            "hooks": [
                {"hookName": name, "path": "/h"}
                for name in ("prestart", "createRuntime", "createContainer", "startContainer", "poststart")
            ]
        },
        ["startContainer hook /h", "poststart hook /h"],
    ),
    "tmpfs": (
        {"mounts": [{"hostPath": "tmpfs", "containerPath": "/t", "type": "tmpfs"}]},
        ["mount /t"],
    ),
    "option": (
        {"mounts": [{"hostPath": "/h", "containerPath": "/c", "options": ["bind", "size=3"]}]},
        ["mount /c"],
    ),
    "idmap": (
        {"mounts": [{"hostPath": "/h", "containerPath": "/c", "options": ["bind", "idmap"]}]},
        ["mount /c"],
    ),
    "unknown": ({"newEdits": [1]}, ["newEdits"]),
    "nothing": (
        {
            "deviceNodes": [{"path": "/dev/x", "fileMode": 0o600, "uid": 3}],
            "mounts": [
                {"hostPath": "/h", "containerPath": "/c"},
                {"hostPath": "/h", "containerPath": "/d", "options": ["rbind", "ro", "rslave", "nosuid"]},
            ],
        },
        [],
    ),
}


@pytest.mark.parametrize(("edits", "lost"), LOST.values(), ids=LOST)
def test_what_cannot_be_delivered_is_named_with_a_reason(edits: Any, lost: list[str]) -> None:
    """Item by item, without the values of variables."""
    found = hook.undeliverable_edits(edits)

    assert [edit for edit, _ in found] == lost
    assert all(reason for _, reason in found)


def test_in_a_user_namespace_a_nodes_owner_and_mode_are_lost_but_mapped_mounts_are_not() -> None:
    """The node is the host's own there, and there is something to map owners by."""
    edits = {
        "deviceNodes": [{"path": "/dev/x", "fileMode": 0o600}, {"path": "/dev/y"}],
        "mounts": [{"hostPath": "/h", "containerPath": "/c", "options": ["bind", "idmap"]}],
    }
    found = hook.undeliverable_edits(edits, user_namespace=True)

    assert [edit for edit, _ in found] == ["fileMode of device node /dev/x"]


@given(
    st.dictionaries(
        st.sampled_from(
            ["env", "additionalGids", "netDevices", "hooks", "mounts", "deviceNodes", "intelRdt"]
        ),
        st.integers(0, 3),
    )
)
def test_nothing_is_both_delivered_and_lost(counts: dict[str, int]) -> None:
    """Every item is counted once: lost, or of a kind that is delivered."""
    make: dict[str, Any] = {
        "env": lambda n: f"V{n}=1",
        "additionalGids": lambda n: n + 1,
        "netDevices": lambda n: {"hostInterfaceName": f"e{n}", "name": "x"},
        "hooks": lambda n: {"hookName": ("createRuntime", "poststop")[n % 2], "path": f"/h{n}"},
        "mounts": lambda n: {
            "hostPath": "/h",
            "containerPath": f"/c{n}",
            "type": ("bind", "tmpfs")[n % 2],
        },
        "deviceNodes": lambda n: {"path": f"/dev/d{n}"},
    }
    edits = {key: {} if key == "intelRdt" else [make[key](n) for n in range(c)] for key, c in counts.items()}
    lost = hook.undeliverable_edits(edits)
    whole = sum(len(edits.get(key, ())) for key in ("env", "additionalGids", "netDevices"))
    half = sum(len(edits.get(key, ())) // 2 for key in ("hooks", "mounts"))

    assert len(lost) == len(set(lost)) == whole + half + ("intelRdt" in edits)


def deliver(
    granted: Any, tmp_path: Path, undeliverable: Any = "fail", pid: int | None = None, **config: Any
) -> None:
    write_config(tmp_path, **config)
    data = state(tmp_path, {KEY: "v.com/c=a"}, pid=os.getpid() if pid is None else pid)
    hook.deliver(
        asked(data),
        granted,
        installed(log=str(tmp_path / "log")),
        undeliverable=undeliverable,
        device_cgroup="enforce",
    )


def test_a_skipped_request_is_only_logged(tmp_path: Path) -> None:
    """The container starts without its devices, because the settings say so."""
    deliver(PolicyDenied("POL001", "no"), tmp_path)

    assert "started without its devices: POL001: no" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("undeliverable", ["fail", "warn"])
def test_a_container_in_the_hosts_mount_namespace_is_refused(tmp_path: Path, undeliverable: str) -> None:
    """This process is in it, so the container of this pid would be."""
    with pytest.raises(DeliveryError, match="HOK207"):
        deliver(editing.Granted(["v.com/c=a"], {"env": ["A=1"]}), tmp_path, undeliverable)


def test_a_process_that_is_gone_is_refused(tmp_path: Path) -> None:
    """Its folder in /proc is not there."""
    gone = subprocess.run([BARE, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, check=True)

    with pytest.raises(DeliveryError, match="HOK208"):
        deliver(editing.Granted(["v.com/c=a"], {}), tmp_path, pid=int(gone.stdout))


@pytest.mark.parametrize("present", [True, False], ids=["in the config", "lacking"])
def test_a_hook_that_the_runtime_runs_itself_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: bool
) -> None:
    """One of a later stage is left to the runtime where the config has it to the letter, and only there."""
    plain = {"path": "/h", "args": ["h", "x"]}
    injected: list[Any] = []
    monkeypatch.setattr(hook.namespaces, "of", lambda _: namespaces.Namespaces(-1, {}))
    monkeypatch.setattr(hook.live, "inject", lambda _container, _spaces, edits, **_: injected.append(edits))
    granted = editing.Granted(["v.com/c=a"], {"hooks": [{"hookName": "poststop", **plain}]})
    config = {"hooks": {"poststop": [plain]}} if present else {}

    if present:
        deliver(granted, tmp_path, **config)
        assert [edits["hooks"] for edits in injected] == [[]]
    else:
        with pytest.raises(DeliveryError, match=r"HOK204: .*poststop hook /h"):
            deliver(granted, tmp_path)
        assert injected == []


def test_the_time_limit_counts_from_when_the_runtime_started_the_process() -> None:
    """What was before in the same process, such as a slower start, is not added to it."""
    code = (
        f"import sys; sys.path += {PATH!r}; from cdi_courier_oci_hook import hook; print(hook._deadline(10))"
    )
    before = time.monotonic()
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'read go; exec "$@"', "sh", BARE, "-I", "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    started = time.monotonic()
    wait_for(lambda: time.monotonic() > started + 0.1, 5, "some time to pass")
    answer, _ = process.communicate("go\n", timeout=60)
    tick = 1 / os.sysconf("SC_CLK_TCK")

    assert before - 2 * tick <= float(answer) - 9 <= started + 2 * tick


@pytest.mark.parametrize("timeout", [0, 1, 3600], ids=["none", "over", "much"])
def test_a_second_is_left_whatever_has_passed(timeout: int) -> None:
    """Who still runs has not been killed: the clocks may be wrong."""
    left = hook._deadline(timeout) - time.monotonic()

    assert 0.5 < left <= max(1, timeout - 1)


def bare(command: str, data: bytes, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run as a runtime does: a bare interpreter and an environment that tries to get in."""
    return subprocess.run(
        [BARE, "-I", "-S", "-c", command],
        input=data.decode(),
        text=True,
        capture_output=True,
        cwd=cwd,
        env={"LC_ALL": "C.UTF-8", "PYTHONPATH": str(cwd), "PYTHONSTARTUP": str(cwd / "json.py")},
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("with_table", [True, False], ids=["light", "slow"])
def test_the_hook_refuses_on_stderr_and_in_the_log(files: Any, tmp_path: Path, with_table: bool) -> None:
    """Exit status 1, and the cause twice: runc shows the one, the other is for runtimes that do not."""
    compiling.write(compiling.compile_settled(str(files.settings)), str(files.table))
    if not with_table:
        files.table.unlink()
    write_config(tmp_path / "bundle")
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the current folder')")
    told = installed(
        interpreter="/nonexistent" if with_table else sys.executable,
        settings=str(files.settings),
        state_dir=str(files.state),
        log=str(files.log),
    )
    data = state(tmp_path / "bundle", {KEY: "v.com/c=a"}, pid=os.getpid())

    done = bare(hook.command(told, PATH), data, tmp_path)

    assert (done.returncode, done.stdout) == (1, "")
    assert "HOK207" in done.stderr
    assert "HOK207" in files.log.read_text()


def test_the_hook_does_nothing_for_a_container_that_asks_for_nothing(files: Any, tmp_path: Path) -> None:
    """Not even its namespaces are looked at."""
    compiling.write(compiling.compile_settled(str(files.settings)), str(files.table))
    write_config(tmp_path / "bundle")
    told = installed(settings=str(files.settings), state_dir=str(files.state), log=str(files.log))

    done = bare(hook.command(told, PATH), state(tmp_path / "bundle", {"other": "x"}), tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_hook_imports_little() -> None:
    """A bare interpreter loads the light modules, and of the standard library what they are allowed."""
    allowed = "json, os, stat, errno, ctypes, fcntl, _socket, fnmatch, time, __future__"
    light = {"annotations", "editing", "errors", "fastjson", "names", "oci", "patterns", "policy", "request"}
    own = {"entry", "hook", "log", "live", "program"}

    def loaded(statement: str) -> set[str]:
        code = f"import sys; sys.path += {PATH!r}; {statement}; print(*sys.modules)"
        done = subprocess.run([BARE, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    more = loaded("import cdi_courier_oci_hook.hook") - loaded(f"import {allowed}")

    assert more <= {
        "cdi_courier",
        "cdi_courier_oci_hook",
        *(f"cdi_courier.{name}" for name in light | {"signature", "table"}),
        *(f"cdi_courier_oci_hook.{name}" for name in own),
        *(name for name in more if name.startswith("cdi_courier_oci_hook.live.")),
    }


@pytest.mark.parametrize("machine", ["riscv64", "armv7l", "i686", ""])
def test_another_architecture_is_refused_in_words(machine: str) -> None:
    """The numbers of its system calls are not known, and a wrong one could do anything."""
    with pytest.raises(DeliveryError, match=r"HOK205.*x86_64 and aarch64"):
        syscalls.must_be_supported(machine)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_architectures_that_are_known_are_not(machine: str) -> None:
    """Nothing is raised for them."""
    assert syscalls.must_be_supported(machine) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("more", "undeliverable", "device_cgroup"),
    [
        ("", "fail", "enforce"),
        ("delivery.undeliverable = 'warn'\noci_hook.device_cgroup = 'best-effort'\n", "warn", "best-effort"),
    ],
    ids=["default", "set"],
)
def test_the_table_knows_what_the_settings_say(
    files: Any, more: str, undeliverable: str, device_cgroup: str
) -> None:
    """The hook has no other way to learn them."""
    files.configure(more)
    compiling.write(compiling.compile_settled(str(files.settings)), str(files.table))
    known = table.read(str(files.table), str(files.settings))

    assert known is not None
    assert (known.undeliverable, known.device_cgroup) == (undeliverable, device_cgroup)
