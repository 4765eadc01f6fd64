"""Live injection on Debian's runc and crun, two generations of each: by the hook, and directly."""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cdi_courier
import cdi_courier_oci_hook
import pytest
from cdi_courier import compiling
from cdi_courier.errors import DeliveryError
from cdi_courier_oci_hook import hook, hooksd
from cdi_courier_oci_hook.live import inject as live
from cdi_courier_oci_hook.live import mounts, namespaces, syscalls
from support import bundles, fake_crio, live_bundle
from support.host import unmount_below
from support.live_bundle import Bundle
from support.packages import Packages
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

KEY = "nvidia.cdi.k8s.io"
PATH = [str(Path(str(module.__file__)).parents[1]) for module in (cdi_courier, cdi_courier_oci_hook)]
BARE = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
DENY_ALL = [{"allow": False, "access": "rwm"}]
INNER, OUTER = 0, 100000


class Host:
    """A folder with CDI specs, settings, what is mounted, and what must not be touched."""

    def __init__(self, root: Path, packages: Packages) -> None:
        self.root = root
        self.packages = packages
        self.source = root / "source"
        self.outside = root / "outside"
        for folder in (self.source, self.outside, root / "cdi", self.outside / "sub"):
            folder.mkdir()
        (self.source / "hello").write_text("hello from the host\n")
        (self.outside / "file").write_text("the host's\n")
        self.bundle = root / "bundle"
        self.rootfs = live_bundle.make_rootfs(self.bundle / "rootfs", packages)
        for folder in (root, self.bundle):
            folder.chmod(0o755)

    def device(self, edits: dict[str, Any], settings: str = "") -> None:
        """Define ``v.com/c=a``, and have the table made."""
        spec = {
            "cdiVersion": "1.0.0",
            "kind": "v.com/c",
            "devices": [{"name": "a", "containerEdits": edits}],
        }
        (self.root / "cdi/v.json").write_text(json.dumps(spec))
        place = self.root / "config.toml"
        place.write_text(
            f"cdi.dirs = ['{self.root}/cdi']\ncdi.trust = 'any'\nservice.state_dir = '{self.root}/state'\n"
            f"oci_hook.log = '{self.root}/log'\n{settings}"
        )
        compiling.write(compiling.compile_settled(str(place)), str(self.root / "state/table.json"))

    def hook(self, before: str = "") -> dict[str, Any]:
        """Our hook, as installed. before: Python that is run first."""
        installed = hook.Installed(
            kind="local",
            interpreter=sys.executable,
            settings=str(self.root / "config.toml"),
            state_dir=str(self.root / "state"),
            log=str(self.root / "log"),
        )
        script = before + hook.command(installed, PATH)
        return {
            "path": BARE,
            "args": [BARE, "-I", "-S", "-c", script],
            "env": ["LC_ALL=C.UTF-8"],
            "timeout": 20,
        }

    def container(
        self, name: str, script: str, *, stages: tuple[str, ...] = ("createRuntime",), **options: Any
    ) -> Bundle:
        """A container of runtime `name` that asks for the device."""
        hooks: dict[str, list[Any]] = {}
        before = options.pop("before", "")
        for stage in stages:
            hooks.setdefault(stage, []).append(self.hook(before))
        command = ["sh", "-c", script]
        config = live_bundle.config(command, annotations={KEY: "v.com/c=a"}, hooks=hooks, **options)
        return Bundle(live_bundle.runtime(self.packages, name), self.bundle, config)

    def log(self) -> str:
        path = self.root / "log"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def host(packages: Packages) -> Iterator[Host]:
    # Not pytest's own folder: root of a user namespace has to get there.
    with tempfile.TemporaryDirectory(prefix="cdi-live-") as name:
        root = Path(name)
        root.chmod(0o755)
        yield Host(root, packages)
        unmount_below(root)


RUNTIMES = pytest.mark.parametrize("name", bundles.RUNTIMES)
NEW = pytest.mark.parametrize("name", ["runc-1.3", "crun-1.28"])


def digest(*folders: Path) -> list[Any]:
    """Everything in folders: path, kind, mode, owner, device numbers and what files hold."""
    found = []
    for folder in folders:
        for path in (folder, *sorted(folder.rglob("*"))):
            s = path.lstat()
            held = path.read_bytes() if stat.S_ISREG(s.st_mode) and s.st_size < 4096 else b""
            found.append((str(path), s.st_mode, s.st_uid, s.st_gid, s.st_rdev, held))
    return found


def own_mounts(host: Host) -> list[str]:
    """The machine's mounts that concern the test's folder: others come and go meanwhile."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(host.root) in line]


NODE = {"path": "/dev/demo/fuse", "hostPath": "/dev/fuse", "fileMode": 0o640, "uid": 5, "gid": 6}


@RUNTIMES
def test_a_container_gets_what_its_annotation_names(host: Host, name: str) -> None:
    """Node with numbers, mode and owner; mounts with their options; and only that device may be used."""
    host.device(
        {
            "deviceNodes": [NODE, {"path": "/dev/plain", "hostPath": "/dev/zero"}],
            "mounts": [
                {"hostPath": str(host.source), "containerPath": "/opt/new/dir", "options": ["rbind", "ro"]},
                {"hostPath": f"{host.source}/hello", "containerPath": "/etc/hello", "options": ["bind"]},
                {
                    "hostPath": str(host.source),
                    "containerPath": "/opt/strict",
                    "options": ["bind", "nosuid", "nodev", "noexec", "noatime"],
                },
            ],
        }
    )
    script = (
        "stat -c '%F %a %u:%g %t:%T' /dev/demo/fuse /dev/plain; cat /opt/new/dir/hello /etc/hello; "
        "(: > /opt/new/dir/x) 2>&1; (: > /opt/strict/x) && echo written; "
        "grep /opt/strict /proc/self/mountinfo; (exec 3<>/dev/demo/fuse) && echo opened; "
        "mknod /dev/kmsg2 c 1 11; (exec 3</dev/kmsg2) 2>&1"
    )
    with host.container(name, script, user={"uid": 0, "gid": 9}) as container:
        container.config["linux"]["resources"]["devices"] = DENY_ALL
        container.write()
        done = container.run()

    lines = done.stdout.splitlines()
    mode = stat.S_IMODE(os.stat("/dev/zero").st_mode)
    assert "character special file 640 5:6 a:e5" in lines, done.stdout + host.log()
    assert f"character special file {mode:o} 0:9 1:5" in lines
    assert lines.count("hello from the host") == 2
    assert any("Read-only file system" in line for line in lines)
    assert {"written", "opened"} <= {*lines}
    assert any("nosuid,nodev,noexec,noatime" in line for line in lines)
    assert any("not permitted" in line for line in lines)


@RUNTIMES
def test_a_specs_hooks_are_run_in_the_runtimes_place(host: Host, name: str) -> None:
    """Stages up to createContainer, in order, each in its namespaces, with the state and an environment."""
    said = host.root / "said"

    def told(stage: str, *more: str) -> dict[str, Any]:
        script = f"echo {stage} $PWD $X $(readlink /proc/self/ns/mnt) $(cat) >> {said}"
        return {"hookName": stage, "path": "/bin/sh", "args": ["sh", "-c", script], "env": [*more]}

    host.device(
        {
            "hooks": [
                told("createContainer", "X=in"),
                told("createRuntime", "X=out", "PWD=/"),
                told("prestart"),
            ]
        }
    )
    with host.container(name, "readlink /proc/self/ns/mnt", env=["PATH=/bin", "X=container"]) as container:
        done = container.run()

    inner = done.stdout.strip()
    outer = os.readlink("/proc/self/ns/mnt")
    first, second, third = (line.split() for line in said.read_text().splitlines())
    assert done.returncode == 0, done.stdout + host.log()
    assert [line[0] for line in (first, second, third)] == ["prestart", "createRuntime", "createContainer"]
    assert (second[2], third[1], third[2], third[3]) == ("out", str(host.rootfs), "in", inner)
    assert inner not in (first[2], second[3])
    assert live_bundle.runtime(host.packages, name).layout or outer == second[3]
    assert json.loads(third[4])["pid"] == 1


@RUNTIMES
@pytest.mark.parametrize("stage", ["createRuntime", "prestart"])
def test_both_stages_serve_and_a_second_run_changes_nothing(host: Host, name: str, stage: str) -> None:
    """Old runtimes may run a hook twice; in a read-only root as well everything is there once."""
    host.device(
        {
            "deviceNodes": [NODE],
            "mounts": [
                {"hostPath": str(host.source), "containerPath": "/opt/a/b", "options": ["bind", "ro"]}
            ],
        }
    )
    script = "ls /dev/demo; cat /opt/a/b/hello; grep -c /opt/a/b /proc/self/mountinfo; (: > /x) 2>&1"
    with host.container(name, script, stages=(stage, stage), read_only=True) as container:
        done = container.run()

    lines = done.stdout.splitlines()
    assert {"fuse", "hello from the host", "1"} <= {*lines}, done.stdout + host.log()
    assert any("Read-only file system" in line for line in lines)


def chown_tree(root: Path, owner: int) -> None:
    for path in (root, *root.rglob("*")):
        os.chown(path, owner, owner, follow_symlinks=False)


MAPPING = [{"containerID": INNER, "hostID": OUTER, "size": 65536}]


@RUNTIMES
def test_a_user_namespace_gets_the_hosts_node_and_mapped_owners(host: Host, name: str) -> None:
    """A node is bind-mounted from another path; files of a mount are owned as if it were the container's."""
    host.device(
        {
            "deviceNodes": [{"path": "/dev/demo0", "hostPath": "/dev/null"}],
            "mounts": [
                {"hostPath": str(host.source), "containerPath": "/opt/src", "options": ["bind", "ro"]},
            ],
        },
        "oci_hook.device_cgroup = 'best-effort'\n",
    )
    chown_tree(host.rootfs, OUTER)
    script = (
        "stat -c '%F %t:%T' /dev/demo0; echo x > /dev/demo0 && echo opened; stat -c %u /opt/src/hello; "
        "stat -c %u /opt/src/.. ; cat /opt/src/hello"
    )
    namespaces = (*live_bundle.NAMESPACES, "user")
    with host.container(name, script, namespaces=namespaces) as container:
        container.config["linux"] |= {"uidMappings": MAPPING, "gidMappings": MAPPING}
        container.write()
        done = container.run()

    lines = done.stdout.splitlines()
    assert lines[-5:] == [
        "character special file 1:3",
        "opened",
        "0",
        "0",
        "hello from the host",
    ], done.stdout + host.log()


HOSTS_DEV = [
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {"destination": "/dev", "type": "bind", "source": "/dev", "options": ["rbind", "rprivate"]},
]


@NEW
def test_the_hosts_dev_is_never_changed(host: Host, name: str) -> None:
    """A node that is there is used as it is, whatever mode the spec wants."""
    host.device({"deviceNodes": [{"path": "/dev/fuse", "fileMode": 0o600, "uid": 5, "gid": 6}]})
    before = os.stat("/dev/fuse"), sorted(os.listdir("/dev"))
    with host.container(name, "stat -c %t:%T /dev/fuse", mounts=HOSTS_DEV) as container:
        done = container.run()

    assert done.stdout.splitlines()[-1:] == ["a:e5"], done.stdout + host.log()
    assert (os.stat("/dev/fuse"), sorted(os.listdir("/dev"))) == before


@NEW
@pytest.mark.parametrize(
    ("edits", "code"),
    [
        ({"deviceNodes": [{"path": "/dev/cdi-courier-test0", "hostPath": "/dev/null"}]}, "HOK212"),
        ({"deviceNodes": [{"path": "/dev/null", "hostPath": "/dev/zero"}]}, "HOK212"),
        ({"deviceNodes": [{"path": "/dev/cdi-courier/x", "hostPath": "/dev/null"}]}, "HOK211"),
        ({"mounts": [{"hostPath": "/etc", "containerPath": "/dev/cdi-courier/x"}]}, "HOK211"),
    ],
    ids=["missing", "another", "folder", "mount"],
)
def test_what_would_change_the_hosts_dev_is_refused(host: Host, name: str, edits: Any, code: str) -> None:
    """The container is not created, and the host's folder is as it was."""
    host.device(edits)
    before = sorted(os.listdir("/dev"))
    with host.container(name, "echo started", mounts=HOSTS_DEV) as container:
        done = container.run()

    assert done.returncode != 0
    assert "started" not in done.stdout.splitlines()
    assert code in host.log()
    assert sorted(os.listdir("/dev")) == before


@RUNTIMES
def test_a_container_in_the_hosts_mount_namespace_is_refused(host: Host, name: str) -> None:
    """What would be injected would be on the host."""
    host.device({"mounts": [{"hostPath": str(host.source), "containerPath": "/opt/x"}]})
    namespaces = tuple(kind for kind in live_bundle.NAMESPACES if kind != "mount")
    with host.container(name, "echo started", namespaces=namespaces, mounts=[]) as container:
        done = container.run()

    assert done.returncode != 0
    assert "started" not in done.stdout.splitlines()
    assert "HOK207" in host.log() or "mount namespace" in done.stdout
    assert not any(str(host.source) in line for line in own_mounts(host))


@NEW
@pytest.mark.parametrize("undeliverable", ["fail", "warn"])
def test_what_cannot_be_injected_is_told_before_anything_is_touched(
    host: Host, name: str, undeliverable: str
) -> None:
    """With "fail" there is no container; with "warn" it gets the rest."""
    host.device(
        {"env": ["A=1"], "mounts": [{"hostPath": str(host.source), "containerPath": "/opt/new"}]},
        f"delivery.undeliverable = '{undeliverable}'\n",
    )
    before = digest(host.rootfs)
    with host.container(name, "cat /opt/new/hello") as container:
        done = container.run()

    assert (done.returncode == 0) == (undeliverable == "warn")
    assert ("hello from the host" in done.stdout) == (undeliverable == "warn")
    assert "HOK204" in host.log()
    assert "env A" in host.log()
    assert undeliverable == "warn" or digest(host.rootfs) == before


@RUNTIMES
def test_what_was_injected_survives_an_update(host: Host, name: str) -> None:
    """Node and mount are still there, and the device may still be used."""
    host.device(
        {"deviceNodes": [NODE], "mounts": [{"hostPath": str(host.source), "containerPath": "/opt/new"}]}
    )
    with host.container(name, "sleep 600") as container:
        container.config["linux"]["resources"]["devices"] = DENY_ALL
        container.write()
        created = container.call("create", "--bundle", str(container.folder), container.id)
        assert created.returncode == 0, created.stdout + host.log()
        assert container.call("start", container.id).returncode == 0
        container.call("update", "--pids-limit", "100", container.id)
        done = container.call(
            "exec", container.id, "sh", "-c", "(exec 3<>/dev/demo/fuse) && echo opened; cat /opt/new/hello"
        )

    assert done.stdout.splitlines()[-2:] == ["opened", "hello from the host"]


@NEW
def test_the_containers_environment_does_not_reach_the_hooks(host: Host, name: str) -> None:
    """Neither ours nor those of the spec: what a container preloads would run as the host's root."""
    evil = host.root / "evil"
    (host.rootfs / "evil").mkdir()
    for folder in (host.rootfs / "evil", host.root):
        (folder / "json.py").write_text(f"open({str(evil)!r}, 'w')")
    environment = [
        "PATH=/bin",
        "LD_PRELOAD=/evil/evil.so",
        "PYTHONPATH=/evil",
        "PYTHONSTARTUP=/evil/json.py",
        "BASH_ENV=/evil/json.py",
        "PYTHONHOME=/evil",
    ]
    script = f"env > {host.root}/environment"
    host.device(
        {
            "deviceNodes": [NODE],
            "hooks": [{"hookName": "createContainer", "path": "/bin/sh", "args": ["sh", "-c", script]}],
        }
    )
    with host.container(name, "ls /dev/demo", env=environment) as container:
        done = container.run()

    seen = {line.partition("=")[0] for line in (host.root / "environment").read_text().splitlines()}
    assert "fuse" in done.stdout, done.stdout + host.log()
    assert seen <= {"PATH", "PWD", "SHLVL", "_", "OLDPWD"}
    assert not evil.exists()


@NEW
@pytest.mark.parametrize(
    ("script", "timeout", "code"),
    [("echo why it failed >&2; exit 3", None, "HOK218"), ("sleep 600 & sleep 600", 1, "HOK219")],
    ids=["fails", "hangs"],
)
def test_a_specs_hook_that_fails_or_hangs_fails_the_container(
    host: Host, name: str, script: str, timeout: int | None, code: str
) -> None:
    """Soon, with its last words, and with what had been injected taken away."""
    more = {} if timeout is None else {"timeout": timeout}
    host.device(
        {
            "mounts": [{"hostPath": str(host.source), "containerPath": "/opt/new"}],
            "hooks": [
                {"hookName": "createContainer", "path": "/bin/sh", "args": ["sh", "-c", script], **more}
            ],
        }
    )
    before = digest(host.rootfs)
    begin = time.monotonic()
    with host.container(name, "echo started") as container:
        done = container.run()

    assert done.returncode != 0
    assert code in host.log()
    assert timeout or "why it failed" in host.log()
    assert time.monotonic() - begin < 15
    assert digest(host.rootfs) == before


@NEW
def test_a_hook_that_the_runtime_kills_holds_nobody_up(host: Host, name: str) -> None:
    """The runtime returns at once; nothing of the spec's hook and of what was injected is left."""
    said = host.root / "said"
    script = f"echo > {said}; sleep 600 & sleep 600"
    host.device(
        {
            "mounts": [{"hostPath": str(host.source), "containerPath": "/opt/new/x"}],
            "hooks": [{"hookName": "createContainer", "path": "/bin/sh", "args": ["sh", "-c", script]}],
        }
    )
    before = digest(host.rootfs)
    begin = time.monotonic()
    with host.container(name, "echo started") as container:
        container.config["hooks"]["createRuntime"][0]["timeout"] = 3
        container.write()
        done = container.run()
        took = time.monotonic() - begin

    assert done.returncode != 0
    assert said.exists()
    assert took < 15
    wait_for(lambda: not (host.rootfs / "opt/new").exists(), 20, "what was made to be gone")
    assert digest(host.rootfs) == before


HOSTILE = {
    "dev is a link out": {"dev": "@"},
    "etc is a link out": {"etc": "@"},
    "relative": {"etc": "../../../../../../../../../..@"},
    "chained": {"etc": "e1", "e1": "/e2", "e2": "@"},
    "proc root": {"etc": "/proc/self/root@"},
    "proc cwd": {"etc": "/proc/self/cwd/.."},
    "target is a link out": {"etc/target": "@/file"},
    "node is a link out": {"opt/node": "@/file"},
    "parent is a link out": {"opt/a": "@/sub"},
    "over what confines": {"etc/target": "/proc/thread-self/attr/exec"},
    "to the root": {"opt/a": "/"},
    "loop": {"etc": "etc"},
}


@pytest.mark.parametrize("links", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_image_changes_nothing_outside_its_root(host: Host, links: dict[str, str]) -> None:
    """Whatever it has in the way, the container gets its devices inside, or is refused."""
    for link, target in links.items():
        path = host.rootfs / link
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.symlink_to(target.replace("@", str(host.outside)))
    host.device(
        {
            "deviceNodes": [{"path": "/opt/node", "hostPath": "/dev/null"}],
            "mounts": [
                {"hostPath": f"{host.source}/hello", "containerPath": "/etc/target", "options": ["ro"]},
                {"hostPath": str(host.source), "containerPath": "/opt/a/b", "options": ["ro"]},
            ],
        }
    )
    before = digest(host.outside, host.source), own_mounts(host)
    script = "cat /etc/target /opt/a/b/hello; stat -c %t:%T /opt/node"
    with host.container("runc-1.3", script) as container:
        done = container.run()

    assert (digest(host.outside, host.source), own_mounts(host)) == before
    if done.returncode == 0:
        assert done.stdout.splitlines()[-3:] == ["hello from the host"] * 2 + ["1:3"]
    else:
        assert "HOK2" in host.log() or "runc create failed" in done.stdout


NAMES = {
    "io.container.manager": "cri-o",
    "io.kubernetes.container.name": "c0",
    "io.kubernetes.cri-o.ContainerType": "container",
    "io.kubernetes.cri-o.SandboxID": "5a",
    "io.kubernetes.pod.name": "pod",
}


@pytest.mark.parametrize("name", ["runc-1.1", "crun-1.28"])
@pytest.mark.parametrize("in_state", [True, False], ids=["1.24 and newer", "before 1.24"])
@pytest.mark.parametrize("namespace", ["gpu-operator", "default"])
def test_the_hook_as_crio_runs_it_obeys_the_rules_for_kubernetes(
    host: Host, name: str, namespace: str, in_state: bool
) -> None:
    """As installed for CRI-O, with its folders and annotations: the pod's namespace decides."""
    host.device({"deviceNodes": [NODE]})
    settings = compiling.load_settings(str(host.root / "config.toml"))
    (change,) = hooksd.files(settings, "/nowhere", "cri-o")
    written = json.loads(change.content or b"")
    pod = {f"{KEY}/container.c0": "v.com/c=a", f"{KEY}/container.c1": "v.com/c=missing"}
    annotations = {**NAMES, "io.kubernetes.pod.namespace": namespace, **(pod if in_state else {})}
    containers = host.root / "overlay-containers"
    for folder in ("5a/userdata", "c0/userdata"):
        (containers / folder).mkdir(parents=True)
    sandbox = {"annotations": {"io.kubernetes.cri-o.Annotations": json.dumps(pod)}}
    (containers / "5a/userdata/config.json").write_text(json.dumps(sandbox))
    config = live_bundle.config(
        ["ls", "/dev/demo"],
        annotations=annotations,
        hooks={stage: [written["hook"]] for stage in written["stages"]},
    )
    config["root"]["path"] = str(host.rootfs)
    runtime = live_bundle.runtime(host.packages, name)
    with Bundle(runtime, containers / "c0/userdata", config) as container:
        done = container.run()

    if namespace == "default":
        assert done.returncode != 0
        assert "POL001" in host.log()
    else:
        assert done.stdout == "fuse\n", done.stdout + host.log()


def test_without_a_table_the_full_pipeline_injects_and_makes_one(host: Host) -> None:
    """The first container takes longer and gets the same."""
    host.device({"deviceNodes": [NODE]})
    table = host.root / "state/table.json"
    table.unlink()
    with host.container("runc-1.3", "ls /dev/demo") as container:
        done = container.run()

    assert done.stdout == "fuse\n", done.stdout + host.log()
    assert table.exists()


def test_what_the_runtime_injects_itself_is_not_doubled(host: Host) -> None:
    """The config has the device, the mount and the hook already."""
    said = host.root / "said"
    command = {"path": "/bin/sh", "args": ["sh", "-c", f"echo run >> {said}"]}
    mount = {"hostPath": str(host.source), "containerPath": "/opt/x", "options": ["bind", "ro"]}
    node = {"path": "/dev/fuse", "fileMode": 0o640}
    host.device(
        {"hooks": [{"hookName": "createContainer", **command}], "mounts": [mount], "deviceNodes": [node]}
    )
    with host.container("runc-1.3", "grep -c /opt/x /proc/self/mountinfo; stat -c %a /dev/fuse") as container:
        container.config["hooks"]["createContainer"] = [command]
        container.config["mounts"].append(
            {"destination": "/opt/x", "source": str(host.source), "options": ["bind", "ro"]}
        )
        container.config["linux"]["devices"] = [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}]
        container.write()
        done = container.run()

    assert done.stdout.split() == ["1", "640"], done.stdout + host.log()
    assert said.read_text() == "run\n"


INSTALL = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /var/lib
courier() { "$1" -m cdi_courier --config "$2" "$3" --backend oci_hook --runtime cri-o; }
courier "$1" "$2" install
cp "$3/cdi-courier.json" "$4"
"$1" -m cdi_courier --config "$2" doctor --json > "$4.doctor" || true
"$1" -m cdi_courier --config "$2" uninstall --backend oci_hook --runtime cri-o
"""
DATA = Path(__file__).resolve().parents[1] / "data/runtimes"


def test_what_is_installed_for_crio_is_run_and_undone(host: Host) -> None:
    """By the real command, for a CRI-O 1.24 that answers as one does; uninstalling leaves nothing."""
    hooks = host.root / "hooks.d"
    hooks.mkdir()
    socket = host.root / "crio.sock"
    host.device({"deviceNodes": [NODE]}, f"runtimes.cri-o.endpoint = '{socket}'\nprobe.timeout = 20.0\n")
    with fake_crio.crio(socket, DATA, "1.24.6") as crio:
        told = crio.http_answers["/config"].replace(b"/usr/share/containers/oci/hooks.d", bytes(hooks))
        crio.http_answers["/config"] = told
        written = host.root / "written.json"
        arguments = [sys.executable, host.root / "config.toml", hooks, written]
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", INSTALL, "sh", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "without a restart" in done.stdout
    assert list(hooks.iterdir()) == []
    found = json.loads(written.read_text())
    assert (found["version"], found["stages"]) == ("1.0.0", ["createRuntime"])
    doctor = json.loads((host.root / "written.json.doctor").read_text())
    offers = {offer["backend"]: offer for offer in doctor["runtimes"][0]["offers"]}
    assert (offers["oci_hook"]["needs"], offers["oci_hook"]["fidelity"]) == ("nothing", "partial")


class Paused(live_bundle.Paused):
    """As a runtime leaves it, and injected into directly."""

    def inject(self, edits: dict[str, Any], seconds: float = 20) -> None:
        state = {"id": "x", "pid": self.process.pid, "status": "creating", "bundle": "/"}
        spaces = namespaces.of(self.process.pid)
        try:
            live.inject(
                live.Container(state, str(self.rootfs)),
                spaces,
                edits,
                allow=lambda _: None,
                deadline=time.monotonic() + seconds,
            )
        finally:
            for descriptor in (spaces.proc, *spaces.own.values()):
                os.close(descriptor)


@pytest.fixture
def paused(host: Host) -> Iterator[Paused]:
    made = Paused(host.rootfs)
    yield made
    made.end()


RACER = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
number = {"x86_64": 316, "aarch64": 276}[os.uname().machine]
os.chdir(sys.argv[1])
print("ready", flush=True)
while True:
    for name in sys.argv[2:]:
        for _ in range(2):
            libc.syscall(ctypes.c_long(number), -100, b"x", -100, name.encode(), 2)
            # Some µs without the kernel's lock on renames, or nobody else gets a path resolved.
            for _ in range(500): pass
"""


def test_folders_that_are_swapped_for_links_while_it_works_lead_nowhere(host: Host, paused: Paused) -> None:
    """500 injections while a process exchanges a folder on the way with links to the host."""
    swap = host.rootfs / "swap"
    (swap / "x/deep").mkdir(parents=True)
    links = {"a": str(host.outside), "b": "../../../outside", "c": "/proc/self/root", "d": "x/../../.."}
    for name, target in links.items():
        (swap / name).symlink_to(target)
    racer = subprocess.Popen([BARE, "-I", "-c", RACER, str(swap), *links], stdout=subprocess.PIPE)
    assert racer.stdout is not None
    racer.stdout.readline()
    before = digest(host.outside, host.source), own_mounts(host)
    mounted = 0
    codes: set[str] = set()
    try:
        for n in range(500):
            edits = {
                "deviceNodes": [{"path": f"/swap/x/n{n}", "type": "c", "major": 1, "minor": 3}],
                "mounts": [{"hostPath": str(host.source), "containerPath": f"/swap/x/deep/{n}/t"}],
            }
            try:
                paused.inject(edits)
                mounted += 1
            except DeliveryError as error:
                codes.add(error.code)
    finally:
        racer.kill()
        racer.wait()
        racer.stdout.close()
    points = [line.split()[4] for line in paused.mounts() if "/source " in line]

    assert (digest(host.outside, host.source), own_mounts(host)) == before
    assert len(points) == mounted > 0
    assert all(point.startswith(f"{host.rootfs}/") for point in points)
    assert codes <= {"HOK210", "HOK212", "HOK213", "HOK215"}


def counting(fail_at: int, number: int = errno.EIO) -> tuple[Callable[[str], None], mmap.mmap]:
    """What makes the call of this number fail, counted over this process and its children."""
    shared = mmap.mmap(-1, 8)

    def before(name: str) -> None:
        count = int.from_bytes(shared[:8], "little") + 1
        shared[:8] = count.to_bytes(8, "little")
        if count == fail_at:
            raise OSError(number, os.strerror(number))

    return before, shared


def everything(host: Host) -> dict[str, Any]:
    return {
        "deviceNodes": [
            {"path": "/dev/demo/x", "hostPath": "/dev/null", "fileMode": 0o600, "uid": 5, "gid": 6},
            {"path": "/opt/nodes/y", "hostPath": "/dev/zero", "uid": 7},
        ],
        "mounts": [
            {"hostPath": str(host.source), "containerPath": "/opt/dir/a", "options": ["rbind", "ro"]},
            {"hostPath": f"{host.source}/hello", "containerPath": "/etc/link/file", "options": ["rslave"]},
        ],
        "hooks": [{"hookName": stage, "path": "/bin/true"} for stage in ("createRuntime", "createContainer")],
    }


@pytest.fixture(params=[0, OUTER], ids=["same users", "own users"])
def any_paused(host: Host, request: pytest.FixtureRequest) -> Iterator[Paused]:
    """With a user namespace of its own, too."""
    (host.rootfs / "etc/link").symlink_to("/opt/through")
    chown_tree(host.rootfs, request.param)
    made = Paused(host.rootfs, request.param)
    yield made
    made.end()


def test_every_call_may_fail_and_nothing_is_left(
    host: Host, any_paused: Paused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each system call fails once, in whichever process: there is an error, and everything is as before."""
    paused = any_paused
    edits = everything(host)
    before = digest(host.rootfs, host.outside, host.source), own_mounts(host), paused.mounts()
    dev = list(paused.inner("/dev").iterdir())
    opened = len(os.listdir("/proc/self/fd"))
    failed = 0
    for k in range(1, 1000):
        call, shared = counting(k)
        monkeypatch.setattr(syscalls, "before", call)
        try:
            paused.inject(edits)
        except (DeliveryError, OSError):
            failed += 1
        else:
            break
        finally:
            count = int.from_bytes(shared[:8], "little")
            monkeypatch.setattr(syscalls, "before", None)
        left = digest(host.rootfs, host.outside, host.source), own_mounts(host), paused.mounts()
        assert left == before, f"after the failure of call {k}"
        assert len(os.listdir("/proc/self/fd")) == opened, f"after the failure of call {k}"
        assert list(paused.inner("/dev").iterdir()) == dev, f"after the failure of call {k}"

    assert failed == count > 100
    assert stat.S_ISCHR(paused.inner("/dev/demo/x").stat().st_mode)
    assert paused.inner("/opt/dir/a/hello").read_text() == "hello from the host\n"


def test_before_linux_5_12_mounts_get_their_attributes_late(
    host: Host, paused: Paused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without mount_setattr the older call does it, for folders and files."""

    def lacking(name: str) -> None:
        if name == "mount_setattr":
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(syscalls, "before", lacking)
    paused.inject(
        {
            "mounts": [
                {"hostPath": str(host.source), "containerPath": "/opt/d", "options": ["ro", "nosuid"]},
                {"hostPath": f"{host.source}/hello", "containerPath": "/opt/f", "options": ["ro", "noexec"]},
            ]
        }
    )
    found = {line.split()[4]: line.split()[5].split(",") for line in paused.mounts()}

    assert {"ro", "nosuid"} <= {*found[f"{host.rootfs}/opt/d"]}
    assert {"ro", "noexec"} <= {*found[f"{host.rootfs}/opt/f"]}


COPIES = """
import json, os, sys
sys.path += {path!r}
from cdi_courier_oci_hook.live import mounts, rootfs, syscalls
from cdi_courier.errors import DeliveryError
source, root = sys.argv[1:]
target = root + "/x"
seen = {{}}
def lacking(name):
    if name == "mount_setattr":
        raise OSError(38, "not there yet")
if {late}:
    syscalls.before = lacking
for options in json.load(sys.stdin):
    try:
        copy = mounts.prepare({{"hostPath": source, "containerPath": "/x", "options": options}})
        container = rootfs.Rootfs(os.open(root, os.O_PATH), os.open("/proc/self", os.O_PATH), ())
        mounts.attach(container, copy)
    except DeliveryError as error:
        seen[" ".join(options)] = str(error)
        continue
    lines = open("/proc/self/mountinfo").read().splitlines()
    found = {{line.split()[4]: line.split()[5].split(",") for line in lines}}
    seen[" ".join(options)] = [sorted(set(found.get(target + below, ())) - {{"rw"}}) for below in ("", "/b")]
    syscalls.detach(target)
print(json.dumps(seen))
"""
BELOW = {"nodev", "nosuid", "noexec", "ro", "noatime"}
SOURCE = BELOW | {"nodiratime", "nosymfollow"}
# Options, and what the mount and the one below it then have of what they have on the host, and beside it.
OPTIONS: dict[str, tuple[set[str], set[str]]] = {
    "": (SOURCE, set()),
    "rbind": (SOURCE, BELOW),
    "rw": (SOURCE - {"ro"}, set()),
    "exec": (SOURCE - {"noexec"}, set()),
    "suid": (SOURCE - {"nosuid"}, set()),
    "dev": (SOURCE - {"nodev"}, set()),
    "diratime": (SOURCE - {"nodiratime"}, set()),
    "symfollow": (SOURCE - {"nosymfollow"}, set()),
    "atime": (SOURCE - {"noatime"} | {"relatime"}, set()),
    "relatime": (SOURCE - {"noatime"} | {"relatime"}, set()),
    "norelatime": (SOURCE, set()),
    "strictatime": (SOURCE - {"noatime"}, set()),
    "strictatime nostrictatime": (SOURCE - {"noatime"} | {"relatime"}, set()),
    "strictatime atime": (SOURCE - {"noatime"}, set()),
    "noatime nostrictatime": (SOURCE, set()),
    "rw exec suid dev": ({"nodiratime", "nosymfollow", "noatime"}, set()),
    "ro rw": (SOURCE - {"ro"}, set()),
    "rw ro": (SOURCE, set()),
    "rbind rw": (SOURCE - {"ro"}, BELOW),
    "rbind rrw": (SOURCE - {"ro"}, BELOW - {"ro"}),
    "rbind rexec rdev rsuid": (SOURCE - {"noexec", "nodev", "nosuid"}, {"ro", "noatime"}),
    "rbind rrelatime": (SOURCE - {"noatime"} | {"relatime"}, BELOW - {"noatime"} | {"relatime"}),
    "rbind rrw ro": (SOURCE - {"ro"}, BELOW - {"ro"}),
    "rbind rw rro": (SOURCE, BELOW),
    "rbind rrw rro": (SOURCE, BELOW),
}
SIMPLE = [option for option, found in mounts._ATTRIBUTES.items() if not found[3]]


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What copies of a mount with another below it have, both of which forbid all on the host, by options."""
    root = tmp_path_factory.mktemp("copies")
    for name in ("source", "root", "root/x"):
        (root / name).mkdir()
    setup = (
        f"mount --make-rprivate / && cd {root} && mount -t tmpfs tmpfs source && mkdir source/b && "
        "mount -t tmpfs tmpfs source/b && "
        "mount -o remount,bind,ro,nosuid,nodev,noexec,noatime source/b && "
        "mount -o remount,bind,ro,nosuid,nodev,noexec,noatime,nodiratime,nosymfollow source && "
    )

    def made(options: list[str], become: str = "exec", *, late: bool = False) -> dict[str, Any]:
        script = f'{setup}{become} "$0" -I -c "$1" {root}/source {root}/root'
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, BARE, COPIES.format(path=PATH, late=late)],
            input=json.dumps([option.split() for option in options]),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return made


@pytest.fixture(scope="module")
def attributes(copies: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return copies([*OPTIONS])


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options or "none")
def test_options_set_and_take_away_what_the_source_has(attributes: dict[str, Any], options: str) -> None:
    """What no option is about is kept; one that allows takes away, and the last of a pair counts."""
    assert attributes[options] == [sorted(found) for found in OPTIONS[options]]


def test_before_linux_5_12_options_do_the_same_to_the_mount_alone(
    copies: Callable[..., dict[str, Any]], attributes: dict[str, Any]
) -> None:
    """By mount(2) what no option is about is kept, and one that allows takes away."""
    alone = [options for options in OPTIONS if not any(f"r{o}" in options.split() for o in SIMPLE)]
    found = copies(alone, late=True)

    assert found == {options: attributes[options] for options in alone}
    assert len(alone) > 15


def test_every_option_that_is_known_is_tried() -> None:
    """An option that is added to the table is missing above until it is tried there."""
    tried = {option for options in OPTIONS for option in options.split()}

    assert {option for option in SIMPLE if not mounts._ATTRIBUTES[option][2]} <= tried


def test_what_is_locked_in_a_user_namespace_is_refused_in_words(
    copies: Callable[..., dict[str, Any]],
) -> None:
    """There the kernel lifts nothing that the host forbids; a spec that asks for it by name is told so."""
    options = ["rbind", "rbind rw", "rbind rexec", "rbind ro"]
    found = copies(options, "exec unshare --user --map-root-user --mount")

    assert [found["rbind"], found["rbind ro"]] == [[sorted(SOURCE), sorted(BELOW)]] * 2
    for refused in ("rbind rw", "rbind rexec"):
        assert found[refused].startswith("HOK215: ")
        assert "in a user namespace no option takes away" in found[refused]


@pytest.mark.parametrize(
    ("options", "more", "less"),
    [
        (["rbind", "rro", "nosymfollow"], {"ro", "nosymfollow"}, set()),
        (["bind", "nosymfollow"], {"nosymfollow"}, set()),
        (["bind", "strictatime"], set(), {"relatime"}),
        (["bind", "noatime"], {"noatime"}, {"relatime"}),
        (["bind", "ro"], {"ro"}, set()),
        (["rbind", "rnosuid"], {"nosuid"}, set()),
    ],
    ids=" ".join,
)
def test_what_is_mounted_there_with_less_does_not_count(
    host: Host, paused: Paused, options: list[str], more: set[str], less: set[str]
) -> None:
    """The same source without what the spec wants is covered, so the container gets no more than that."""
    mount = {"hostPath": str(host.source), "containerPath": "/opt/x"}
    paused.inject({"mounts": [{**mount, "options": ["relatime"]}]})
    paused.inject({"mounts": [{**mount, "options": options}]})
    found = [line.split()[5].split(",") for line in paused.mounts() if line.split()[4].endswith("/opt/x")]

    assert len(found) == 2
    assert {*found[1]} - {"rw"} == ({*found[0]} | more) - less - {"rw"}


@pytest.mark.parametrize("options", [[], ["rw", "exec"], ["relatime"], ["norelatime"]], ids=" ".join)
def test_what_is_mounted_there_with_all_that_is_wanted_is_left(
    host: Host, paused: Paused, options: list[str]
) -> None:
    """A second run mounts nothing, whichever options there are."""
    mount = {"hostPath": str(host.source), "containerPath": "/opt/x", "options": options}
    paused.inject({"mounts": [mount]})
    before = paused.mounts()
    paused.inject({"mounts": [mount]})

    assert paused.mounts() == before


@pytest.mark.parametrize("missing", ["openat2", "open_tree", "move_mount"])
def test_on_a_kernel_without_the_calls_it_is_refused_in_words(
    host: Host, paused: Paused, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """The message names the call and the version that has it."""

    def lacking(name: str) -> None:
        if name == missing:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(syscalls, "before", lacking)
    with pytest.raises(DeliveryError, match=rf"HOK206.*{missing}.*Linux 5\.6"):
        paused.inject({"mounts": [{"hostPath": str(host.source), "containerPath": "/opt/d"}]})


@NEW
def test_a_failure_in_a_runtimes_hook_leaves_no_container(host: Host, name: str) -> None:
    """Every so many calls one fails: nothing is created, nothing is left, and the log says why."""
    host.device(everything(host))
    before = digest(host.rootfs, host.outside, host.source), own_mounts(host)
    fail = (
        f"import sys; sys.path += {PATH!r}\n"
        "from cdi_courier_oci_hook.live import syscalls\n"
        "calls = []\n"
        "def fail(name):\n"
        "    calls.append(name)\n"
        "    if len(calls) == %d: raise OSError(5, 'made to fail')\n"
        "syscalls.before = fail\n"
    )
    refused = 0
    for k in range(3, 400, 13):
        with host.container(name, "cat /opt/dir/a/hello", before=fail % k) as container:
            done = container.run()
            listed = container.call("list", "--quiet").stdout
        if done.returncode == 0:
            break
        refused += 1
        assert (digest(host.rootfs, host.outside, host.source), own_mounts(host)) == before
        assert "HOK" in host.log()
        assert container.id not in listed
        (host.root / "log").unlink()

    assert refused > 5
    assert done.stdout == "hello from the host\n"


def test_a_hook_that_is_killed_leaves_nothing(host: Host, paused: Paused) -> None:
    """What works in the container notices, and takes away what it made."""
    said = host.root / "said"
    before = digest(host.rootfs), paused.mounts()
    script = f"echo $$ > {said}; exec sleep 600"
    edits = {
        **everything(host),
        "hooks": [{"hookName": "createContainer", "path": "/bin/sh", "args": ["sh", "-c", script]}],
    }
    child = os.fork()
    if child == 0:
        try:
            paused.inject(edits)
        finally:
            os._exit(1)
    sleeper = int(wait_for(lambda: said.exists() and said.read_text().strip(), 20, "the hook"))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_for(lambda: paused.mounts() == before[1], 20, "what was mounted to be gone")
    wait_for(lambda: not (host.rootfs / "opt/dir").exists(), 20, "what was made to be gone")

    wait_for(lambda: not Path(f"/proc/{sleeper}").exists(), 20, "the spec's hook to end as well")

    assert digest(host.rootfs) == before[0]


def test_a_hook_that_is_killed_while_the_mounts_are_made_leaves_nothing(
    host: Host, paused: Paused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What works in the container has nobody to tell that it is done, and takes away what it made."""
    before = digest(host.rootfs), paused.mounts()
    done = host.root / "done"
    child = os.fork()
    if child == 0:
        caller = os.getpid()

        def kill(name: str) -> None:
            if os.getpid() != caller and name == "move_mount" and os.getppid() == caller:
                os.kill(caller, signal.SIGKILL)
                wait_for(lambda: os.getppid() != caller, 20, "the caller's end")
            if os.getpid() != caller and os.getppid() != caller and name == "umount2":
                done.touch()

        try:
            monkeypatch.setattr(syscalls, "before", kill)
            paused.inject(everything(host))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    wait_for(done.exists, 20, "what was mounted to be taken away")
    wait_for(lambda: not (host.rootfs / "opt/dir").exists(), 20, "what was made to be gone")

    assert os.WTERMSIG(status) == signal.SIGKILL
    assert (digest(host.rootfs), paused.mounts()) == before


def test_what_hangs_in_the_container_is_given_up_in_time(
    host: Host, paused: Paused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a volume whose server is gone: refused in words, and taken away should it ever go on."""
    before = digest(host.rootfs), paused.mounts()
    caller = os.getpid()
    go_on = host.root / "go-on"

    def hang(name: str) -> None:
        if os.getpid() != caller and name == "move_mount":
            wait_for(go_on.exists, 60, "the volume's server")

    monkeypatch.setattr(syscalls, "before", hang)
    begin = time.monotonic()

    with pytest.raises(DeliveryError, match=r"HOK220: .*it does not end in time"):
        paused.inject(everything(host), seconds=0.3)
    assert time.monotonic() - begin < 20
    go_on.touch()
    wait_for(lambda: not (host.rootfs / "opt/dir").exists(), 20, "what was made to be gone")
    wait_for(lambda: (digest(host.rootfs), paused.mounts()) == before, 20, "all to be as before")
    os.waitpid(-1, 0)


@pytest.mark.parametrize(
    ("there", "edits", "code"),
    [
        (lambda r: (r / "opt/x").write_text(""), {"path": "/opt/x"}, "HOK212"),
        (lambda r: (r / "opt/x").mkdir(), {"path": "/opt/x"}, "HOK212"),
        (lambda r: (r / "opt/x").symlink_to("/bin/sh"), {"path": "/opt/x"}, "HOK212"),
        (lambda r: os.mknod(r / "opt/x", stat.S_IFCHR, os.makedev(1, 5)), {"path": "/opt/x"}, "HOK212"),
        (lambda r: (r / "opt/x").write_text(""), {"path": "/opt/x/y"}, "HOK210"),
    ],
    ids=["file", "folder", "link", "another node", "file on the way"],
)  # fmt: skip
def test_a_node_replaces_nothing_of_the_image(
    host: Host, paused: Paused, there: Callable[[Path], None], edits: Any, code: str
) -> None:
    """What the image has in its place stays, and the container is refused."""
    there(host.rootfs)
    before = digest(host.rootfs)
    with pytest.raises(DeliveryError, match=code):
        paused.inject({"deviceNodes": [{**edits, "type": "c", "major": 1, "minor": 3}]})

    assert digest(host.rootfs) == before


@pytest.mark.parametrize("any_paused", [OUTER], indirect=True, ids=["own users"])
@pytest.mark.parametrize(
    ("kind", "node"),
    [
        (stat.S_IFBLK, {"type": "c", "major": 7, "minor": 0}),
        (stat.S_IFCHR, {"type": "c", "major": 7, "minor": 1}),
        (stat.S_IFREG, {"type": "p"}),
        (stat.S_IFLNK, {"type": "c", "major": 7, "minor": 0}),
    ],
    ids=["a block device", "another number", "a file", "a link"],
)
def test_what_is_another_node_on_the_host_is_not_bind_mounted(
    host: Host, any_paused: Paused, kind: int, node: Any
) -> None:
    """In a user namespace the spec's type and numbers must be those of what the host has there."""
    source = host.root / "node"
    if kind == stat.S_IFLNK:
        (host.root / "target").mkdir()
        os.mknod(host.root / "target/node", stat.S_IFCHR, os.makedev(7, 0))
        source.symlink_to("target/node")
    else:
        os.mknod(source, kind, os.makedev(7, 0) if kind != stat.S_IFREG else 0)

    with pytest.raises(DeliveryError, match=r"HOK214: .*it is another one"):
        any_paused.inject({"deviceNodes": [{"path": "/dev/x", "hostPath": str(source), **node}]})
    assert list(any_paused.inner("/dev").iterdir()) == []


def test_another_node_in_the_containers_own_dev_is_replaced(host: Host, paused: Paused) -> None:
    """As in a config, where the device of a path takes the place of another."""
    for minor in (5, 3, 3):
        paused.inject(
            {"deviceNodes": [{"path": "/dev/x", "type": "c", "major": 1, "minor": minor, "uid": 4}]}
        )

    found = paused.inner("/dev/x").stat()
    assert (os.minor(found.st_rdev), found.st_uid) == (3, 4)
    assert [path.name for path in paused.inner("/dev").iterdir()] == ["x"]


def test_a_fifo_is_made_too(host: Host, paused: Paused) -> None:
    """The third kind of node that CDI has."""
    paused.inject({"deviceNodes": [{"path": "/dev/p", "type": "p", "fileMode": 0o622}]})

    assert paused.inner("/dev/p").stat().st_mode == stat.S_IFIFO | 0o622


@pytest.mark.parametrize(
    ("target", "source", "code"),
    [
        ("/opt", "hello", "HOK217"),
        ("/bin/busybox", "", "HOK217"),
        ("/opt/a", "missing", "HOK214"),
    ],
    ids=["file on folder", "folder on file", "no source"],
)
def test_a_mount_that_does_not_fit_is_refused(
    host: Host, paused: Paused, target: str, source: str, code: str
) -> None:
    """The message has its own code, and nothing is mounted."""
    before = paused.mounts()
    with pytest.raises(DeliveryError, match=code):
        paused.inject({"mounts": [{"hostPath": f"{host.source}/{source}", "containerPath": target}]})

    assert paused.mounts() == before


def test_a_volume_whose_mounts_appear_on_the_host_is_refused(host: Host, paused: Paused) -> None:
    """Otherwise the mount would be there, and stay."""
    target = host.rootfs / "opt"
    enter = ["nsenter", "-t", str(paused.process.pid), "-m"]
    for command in (
        ["mount", "--bind", str(host.outside), str(target)],
        ["mount", "--make-shared", str(target)],
    ):
        subprocess.run([*enter, *command], check=True)
    with pytest.raises(DeliveryError, match="HOK216"):
        paused.inject({"mounts": [{"hostPath": str(host.source), "containerPath": "/opt/sub"}]})

    assert not (host.outside / "sub/hello").exists()


def test_what_the_host_mounts_below_is_not_shared_back(host: Host, paused: Paused) -> None:
    """A copy of a shared mount is private in the container."""
    enter = ["nsenter", "-t", str(paused.process.pid), "-m"]
    paused.inject(
        {
            "mounts": [
                {"hostPath": str(host.source), "containerPath": "/opt/s", "options": ["rbind", "rshared"]}
            ]
        }
    )
    subprocess.run([*enter, "mount", "-t", "tmpfs", "tmpfs", str(host.rootfs / "opt/s")], check=True)

    assert not any(str(host.source) in line for line in own_mounts(host))


def test_a_root_that_is_not_mounted_is_refused(host: Host) -> None:
    """Before the runtime has mounted it, it is the host's folder."""
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", "echo ready; exec sleep 600"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        with pytest.raises(DeliveryError, match="HOK209"):
            live.inject(
                live.Container({"pid": process.pid}, str(host.rootfs)),
                namespaces.of(process.pid),
                {"mounts": [{"hostPath": str(host.source), "containerPath": "/opt/s"}]},
                allow=lambda _: None,
                deadline=time.monotonic() + 5,
            )
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert list((host.rootfs / "opt").iterdir()) == []


def test_no_descriptor_is_left_open(host: Host, paused: Paused) -> None:
    """Neither after success nor after a refusal: a caller may inject more than once."""
    wrong = {"mounts": [{"hostPath": str(host.source), "containerPath": "/bin/busybox"}]}
    paused.inject(everything(host))
    with pytest.raises(DeliveryError):
        paused.inject(wrong)
    before = len(os.listdir("/proc/self/fd"))
    paused.inject(everything(host))
    with pytest.raises(DeliveryError):
        paused.inject(wrong)

    assert len(os.listdir("/proc/self/fd")) == before
