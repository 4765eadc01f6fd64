"""The description of the host on real runtimes: what is said is what they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cdi_courier.host.describe import describe
from cdi_courier.host.model import Runtime, from_json
from cdi_courier.settings import RuntimeSettings, Settings
from support import containerd as containerd_module
from support import host
from support.containerd import SUITES_1_7, SUITES_2, Containerd
from support.lab import NEWER, Lab
from support.packages import Packages
from support.scenario import ALL, annotated, run, serving, shell, spec

pytestmark = pytest.mark.runtime

SUITE_1_6 = "bookworm"  # and Podman's
SOMEBODY = 54321  # a user that no machine has


def described(*labs: Lab) -> list[Runtime]:
    """What is said of each lab's containerd; the machine's own runtimes are left out."""
    sockets = [str(lab.containerd.socket) for lab in labs]
    if len(labs) == 1:
        settings = Settings(runtimes={"containerd": RuntimeSettings(endpoint=sockets[0])})
    else:
        settings = Settings(runtimes={socket: RuntimeSettings() for socket in sockets})
    by_endpoint = {runtime.endpoint: runtime for runtime in describe(settings).runtimes}
    return [by_endpoint[socket] for socket in sockets]


def pid_of(daemon: Containerd) -> int:
    assert daemon.process is not None
    return daemon.process.pid


@pytest.mark.parametrize(("which", "version"), [("lab", (2, 1)), ("lab17", (1, 7))], ids=["2.1", "1.7"])
def test_a_containerd_is_described_in_full(
    which: str, version: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    """Every fact is the daemon's own, and there is nothing to complain of."""
    lab: Lab = request.getfixturevalue(which)

    (runtime,) = described(lab)

    assert runtime.problems == ()
    assert (runtime.key, runtime.kind) == ("containerd", "containerd")
    assert runtime.version == lab.cri.version().runtime_version
    assert runtime.version_tuple is not None
    assert runtime.version_tuple[:2] >= version
    assert runtime.get("nri") == "on"
    assert runtime.facts["nri"].source == f"process {pid_of(lab.containerd)} listens at {lab.nri_socket}"
    assert runtime.get("nri_socket") == str(lab.nri_socket)
    assert runtime.get("nri_connections") is True
    assert runtime.get("config") == str(lab.containerd.config_file)
    assert runtime.facts["config"].source == f"command line of process {pid_of(lab.containerd)}"
    assert runtime.get("config_version") == (3 if version == (2, 1) else 2)
    assert runtime.get("default_handler") == "runc"
    assert set(runtime.get("handlers")) == {"runc", NEWER}
    assert runtime.get("handlers")["runc"]["path"] == str(lab.containerd.binaries.runc)
    assert runtime.get("cdi_enabled") is True
    assert runtime.get("cdi_spec_dirs") == [str(path) for path in lab.cdi_dirs]
    assert runtime.get("cgroup_driver") == "cgroupfs"
    assert runtime.get("cgroup_version") == (2 if Path("/sys/fs/cgroup/cgroup.procs").exists() else 1)
    assert runtime.get("rootless") is False
    assert runtime.get("pid") == pid_of(lab.containerd)


def test_it_takes_less_than_a_second(lab: Lab, lab17: Lab) -> None:
    """Two containerds, the child's start included; the best of three, as other tests may run beside."""
    durations = []
    for _ in range(3):
        start = time.monotonic()
        described(lab, lab17)
        durations.append(time.monotonic() - start)

    assert min(durations) < 1


@pytest.mark.parametrize("suite", [SUITES_1_7, SUITES_2], ids=["1.7", "2.1"])
def test_nri_that_is_off_is_off(packages: Packages, suite: tuple[str, ...]) -> None:
    """By the file that the daemon was started with, and the socket that is not there."""
    with Lab(suite, packages=packages, nri=False) as lab:
        (runtime,) = described(lab)

    assert runtime.problems == ()
    assert runtime.get("nri") == "off"
    assert runtime.facts["nri"].source == (f"{lab.containerd.config_file}; {lab.nri_socket} does not exist")


def test_a_changed_file_counts_from_the_restart(lab17: Lab) -> None:
    """Until then the daemon runs on as it was started, and that the two differ is said."""
    config = lab17.containerd.config_file
    before = config.read_text()
    config.write_text(before.replace("disable = false", "disable = true"))

    (on,) = described(lab17)
    config.write_text(before.replace(str(lab17.nri_socket), f"{lab17.nri_socket}2"))
    (elsewhere,) = described(lab17)
    config.write_text(before)

    assert on.get("nri") == "on"
    assert "a restart of containerd would turn it off" in on.problems[0]
    assert elsewhere.get("nri") is None
    assert "containerd was not restarted since" in elsewhere.problems[0]


def test_a_stopped_containerd_is_no_runtime(lab17: Lab) -> None:
    """Its sockets stay, and nobody listens."""
    lab17.containerd.kill()
    settings = Settings(runtimes={"containerd": RuntimeSettings(endpoint=str(lab17.containerd.socket))})

    found = describe(settings)

    assert [runtime for runtime in found.runtimes if runtime.kind == "containerd"] == []
    assert found.problems[0].startswith(f"HST101: nobody listens at {lab17.containerd.socket}")


def test_two_at_once_are_told_apart(lab: Lab, lab17: Lab) -> None:
    """Each has its own version, configuration and NRI socket, and the socket as key."""
    two, one = described(lab, lab17)

    assert [runtime.key for runtime in (two, one)] == [str(each.containerd.socket) for each in (lab, lab17)]
    assert [runtime.version_tuple[0] for runtime in (two, one)] == [2, 1]
    assert [runtime.get("nri_socket") for runtime in (two, one)] == [
        str(lab.nri_socket),
        str(lab17.nri_socket),
    ]
    assert [runtime.get("nri") for runtime in (two, one)] == ["on", "on"]


def test_another_s_nri_socket_is_not_taken_for_one_s_own(lab: Lab, packages: Packages) -> None:
    """A containerd that is configured to a socket at which another listens has NRI of unknown state."""
    with Lab(SUITES_1_7, packages=packages, nri=False) as other:
        config = other.containerd.config_file
        text = config.read_text().replace("disable = true", "disable = false")
        config.write_text(text.replace(str(other.nri_socket), str(lab.nri_socket)))
        (runtime,) = described(other)

    assert runtime.get("nri") is None
    assert f"process {pid_of(lab.containerd)}, which is not this containerd" in runtime.problems[0]


def test_containerd_1_6_has_no_nri_and_no_cdi(packages: Packages) -> None:
    """It is old, and known to be."""
    with Lab(SUITE_1_6, packages=packages) as lab:
        (runtime,) = described(lab)

    assert runtime.problems == ()
    assert runtime.version_tuple is not None
    assert runtime.version_tuple[:2] == (1, 6)
    assert runtime.get("nri") == "absent"
    assert runtime.get("cdi_enabled") is False
    assert runtime.get("cdi_spec_dirs") is None
    assert runtime.get("cgroup_driver") == "cgroupfs"
    assert runtime.get("config_version") == 2


def test_a_containerd_that_hangs_is_told_of_in_time(lab: Lab) -> None:
    """Stopped by a signal it accepts connections and answers none; what files tell is told, no more."""
    pid = pid_of(lab.containerd)
    os.kill(pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        (runtime,) = described(lab)
        duration = time.monotonic() - start
    finally:
        os.kill(pid, signal.SIGCONT)

    assert duration < 5
    assert runtime.version == ""
    assert runtime.get("config") == str(lab.containerd.config_file)
    assert runtime.get("pid") == pid
    assert runtime.get("nri") is None
    assert runtime.get("handlers") is None
    assert [problem[:6] for problem in runtime.problems] == ["HST103", "HST103"]


def test_describing_disturbs_no_plugin(lab: Lab) -> None:
    """Nothing arrives at the NRI socket: a plugin serves on, and containerd logs nothing of any."""
    lab.write_spec("all.json", spec(all={"env": ["DESCRIBED=yes"]}))
    courier = serving(lab)
    mark, before = courier.mark(), len(lab.containerd.log())

    states = [described(lab)[0].get("nri") for _ in range(5)]
    container = run(lab, annotated(lab, container_c1=ALL))

    said = lab.containerd.log()[before:]
    assert states == ["on"] * 5
    assert shell(lab, container, "echo $DESCRIBED") == (0, "yes\n")
    assert "synchronized" not in courier.log(mark)
    assert "NRI0" not in courier.log(mark)
    assert "plugin" not in said


def test_a_plugin_gets_in_beside_a_description(lab: Lab) -> None:
    """The runtime lets plugins in one by one; a connection that is closed at once holds nobody up."""
    described(lab)
    courier = lab.courier()
    courier.start()

    for _ in range(3):
        described(lab)

    assert courier.wait_for_log("synchronized:", timeout=3)


_NRI = '[plugins."io.containerd.nri.v1.nri"]\n'
_MERGES = {
    "main": (_NRI + "disable = true\nsocket_path = '/a'\n", []),
    "replaced": (_NRI + "disable = false\nsocket_path = '/a'\n", [_NRI + "disable_connections = true\n"]),
    "overridden": (_NRI + "disable = true\n", [_NRI + "disable = false\n", _NRI + "socket_path = '/b'\n"]),
    "emptied": (_NRI + "socket_path = '/a'\n", [_NRI + "socket_path = ''\n"]),
    "disabled": (_NRI + "disable = false\n", ["disabled_plugins = ['io.containerd.snapshotter.v1.zfs']\n"]),
    "other-table": (_NRI + "socket_path = '/a'\n", ["[grpc]\n"]),
    "unversioned": ("version-less", [_NRI + "disable = false\nsocket_path = '/b'\n"]),
}


@pytest.mark.parametrize("case", _MERGES)
@pytest.mark.parametrize("suite", [SUITES_1_7, SUITES_2], ids=["1.7", "2.1"])
def test_files_are_merged_as_containerd_merges_them(
    packages: Packages, tmp_path: Path, suite: tuple[str, ...], case: str
) -> None:
    """What ``containerd config dump`` prints of NRI is what is read."""
    from cdi_courier.host import containerd
    from cdi_courier.host.answers import Findings
    from cdi_courier.host.files import Root
    from cdi_courier.host.sockets import Candidate

    binaries = containerd_module.packaged(packages, suite)
    text, imported = _MERGES[case]
    head = "imports = ['conf.d/*.toml']\n"
    main = tmp_path / "config.toml"
    main.write_text(head + text if text != "version-less" else "[plugins.nri]\nsocket_path = '/a'\n")
    if text != "version-less":
        main.write_text("version = 2\n" + main.read_text())
    (tmp_path / "conf.d").mkdir()
    for number, part in enumerate(imported):
        # The first one is hidden, which does not hide it.
        (tmp_path / f"conf.d/{'.' if not number else ''}{number}.toml").write_text("version = 2\n" + part)
    dump = subprocess.run(
        [binaries.containerd, "--config", main, "config", "dump"], capture_output=True, text=True, check=True
    )
    findings = Findings()
    findings.version = ".".join(map(str, binaries.version))

    read = containerd.learn_from_files(
        Root(), Candidate("/run/x.sock", "containerd", config=str(main)), None, findings
    )

    plugins = tomllib.loads(dump.stdout)["plugins"]
    table = plugins.get("io.containerd.nri.v1.nri") or plugins["nri"]
    assert findings.problems == []
    assert read is not None
    assert (read.enabled, read.connections) == (not table["disable"], not table["disable_connections"])
    assert read.socket == (table["socket_path"] or containerd.DEFAULT_NRI_SOCKET)


@pytest.mark.parametrize(
    ("suite", "schema", "plugin"),
    [(SUITES_1_7, 2, "io.containerd.grpc.v1.cri"), (SUITES_2, 3, "io.containerd.cri.v1.runtime")],
    ids=["1.7", "2.1"],
)
def test_installers_merge_lists_and_empty_strings_as_containerd_does(
    packages: Packages, tmp_path: Path, suite: tuple[str, ...], schema: int, plugin: str
) -> None:
    """What a later file says replaces an earlier one's list, and is no less said for being empty."""
    from cdi_courier.host import containerd_files

    def file(path: Path, folders: str, handler: str) -> None:
        head = f"version = {schema}\n" + "imports = ['conf.d/*.toml']\n" * (path.name == "config.toml")
        table = f'[plugins."{plugin}"]\ncdi_spec_dirs = {folders}\n'
        path.write_text(
            f"{head}{table}[plugins.\"{plugin}\".containerd]\ndefault_runtime_name = '{handler}'\n"
        )

    main = tmp_path / "config.toml"
    (tmp_path / "conf.d").mkdir()
    file(main, "['/a', '/b']", "x")
    file(tmp_path / "conf.d/1.toml", "['/b', '/c']", "")
    binaries = containerd_module.packaged(packages, suite)
    dump = subprocess.run(
        [binaries.containerd, "--config", main, "config", "dump"], capture_output=True, text=True, check=True
    )
    read = containerd_files.parsed(str(main), main.read_bytes(), binaries.version, "NRI105")
    documents = containerd_files.load(read, "NRI105")
    merged = containerd_files.merged(documents, plugin, replaces=read.replaces)

    table = tomllib.loads(dump.stdout)["plugins"][plugin]
    assert merged["cdi_spec_dirs"] == table["cdi_spec_dirs"] == ["/b", "/c"]
    assert merged["containerd"]["default_runtime_name"] == table["containerd"]["default_runtime_name"] == ""


@pytest.fixture(scope="module")
def podman(packages: Packages) -> Iterator[Path]:
    """The root of a host that has only Debian's Podman 4.3; for everybody to read."""
    with tempfile.TemporaryDirectory(prefix="cdi-podman-", dir="/tmp") as name:
        root = Path(name)
        root.chmod(0o755)
        program = packages.runnable("podman", SUITE_1_6) / "usr/bin/podman"
        conmon = packages.runnable("conmon", SUITE_1_6) / "usr/bin/conmon"
        crun = containerd_module.crun_of(packages, SUITE_1_6)
        (root / "usr/bin").mkdir(parents=True)
        (root / "proc").symlink_to("/proc")
        for inner in ("home", "run", "root"):
            (root / inner).mkdir(mode=0o700)
        for inner in ("home", "run"):
            os.chown(root / inner, SOMEBODY, SOMEBODY)
        script = root / "usr/bin/podman"
        script.write_text(
            "#!/bin/sh\n"
            # Root's store is a folder of its own; somebody else's lies in their home.
            f"store={root}/root\n"
            '[ "$(id -u)" = 0 ] && set -- --root $store/s --runroot $store/r --tmpdir $store/t "$@"\n'
            f"exec {program} --conmon {conmon} --runtime {crun} --cgroup-manager cgroupfs "
            '--storage-driver vfs "$@"\n'
        )
        script.chmod(0o755)
        yield root
        host.unmount_below(root)


def check_podman(runtime: Runtime) -> None:
    """What is the same for everybody."""
    assert runtime.problems == ()
    assert (runtime.key, runtime.kind, runtime.version[:4]) == ("podman", "podman", "4.3.")
    assert runtime.endpoint == ""
    assert runtime.get("nri") == "absent"
    assert runtime.get("cgroup_driver") == "cgroupfs"
    assert runtime.get("cgroup_version") == (2 if Path("/sys/fs/cgroup/cgroup.procs").exists() else 1)
    assert [Path(handler["path"]).name for handler in runtime.get("handlers").values()] == ["crun"]
    assert runtime.get("hooks_dirs") == ["/usr/share/containers/oci/hooks.d"]


def test_a_podman_is_described(podman: Path) -> None:
    """As root, by its own program."""
    (runtime,) = describe(Settings(), root=str(podman)).runtimes

    check_podman(runtime)
    assert runtime.get("rootless") is False


def test_a_rootless_podman_is_described(podman: Path) -> None:
    """To somebody else it is theirs, and says so; nobody's rights are taken or dropped."""
    repository = Path(__file__).parents[2]
    identity: dict[str, Any] = {"user": SOMEBODY, "group": SOMEBODY, "extra_groups": []}
    if subprocess.run(["test", "-x", repository / "core/src"], check=False, **identity).returncode:
        pytest.skip(f"{repository} cannot be entered by other users")
    script = (
        "import json, sys; from cdi_courier.host.describe import describe\n"
        "from cdi_courier.host.model import to_json; from cdi_courier.settings import Settings\n"
        "print(json.dumps(to_json(describe(Settings(), root=sys.argv[1]))))"
    )
    environment = {
        "HOME": str(podman / "home"),
        "XDG_RUNTIME_DIR": str(podman / "run"),
        "PATH": os.environ["PATH"],
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, podman],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=environment,
            cwd="/",
            **identity,
        )
    finally:
        # Whatever a rootless Podman is asked, it leaves a process that holds the user namespace.
        for note in podman.glob("run/**/pause.pid"):
            os.kill(int(note.read_text()), signal.SIGKILL)

    (runtime,) = from_json(json.loads(done.stdout)).runtimes
    check_podman(runtime)
    assert runtime.get("rootless") is True
