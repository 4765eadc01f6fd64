"""The precreate hook on Debian's Podmans, as `cdi-courier install` sets it up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.packages import Packages
from support.podman import SUITES, USER, PodmanHost
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

KEY = "nvidia.cdi.k8s.io"
DEVICE = "demo.example.com/gpu=all"
HOOKS = "/etc/cdi-courier/podman-hooks.d"
INSTALL = ("install", "--backend", "oci_hook", "--runtime", "podman")
# Opening it takes the cgroup's permission: it is not among the devices that every container may use.
FUSE = Path("/dev/fuse")
LOOK = (
    "env; ls -l /dev/demo0 2>&1; cat /opt/demo/hello 2>&1; "
    "mount | cut -d' ' -f1-5; exec 3<>/dev/demo0 && echo opened"
)


@pytest.fixture(scope="module", params=SUITES)
def machine(packages: Packages, request: pytest.FixtureRequest) -> Iterator[PodmanHost]:
    """A host with Podman, a CDI device and settings, shared by the tests; `host` gives it out clean."""
    with PodmanHost(packages, SUITES[request.param]) as made:
        (made.root / "shared").mkdir()
        (made.root / "shared/hello").write_text("hello from the host\n")
        (made.root / "cdi").mkdir()
        yield made


@pytest.fixture
def host(machine: PodmanHost) -> Iterator[PodmanHost]:
    """Nothing is installed; the log, the table and what a hook of the device leaves are gone."""
    configure(machine)
    write_spec(machine, {"A": "1"})
    yield machine
    assert machine.courier("uninstall").returncode == 0
    for name in ("log", "hooked", "state/table.json"):
        (machine.root / name).unlink(missing_ok=True)


def configure(host: PodmanHost, more: str = "") -> None:
    folder = host.path("/etc/cdi-courier")
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(
        f"cdi.dirs = ['{host.root}/cdi']\nservice.state_dir = '{host.root}/state'\n"
        f"oci_hook.log = '{host.root}/log'\n{more}"
    )


def write_spec(host: PodmanHost, env: dict[str, str], *, hook: bool = True, node: str = str(FUSE)) -> None:
    """A device with everything that Podman can show: env, node, mount and, if wanted, a hook of the host."""
    touch = {
        "hookName": "createRuntime",
        "path": "/bin/sh",
        "args": ["sh", "-c", f"cat > {host.root}/hooked"],
        "env": ["PATH=/bin"],
    }
    edits = {
        "env": [f"{name}={value}" for name, value in env.items()],
        "deviceNodes": [{"path": "/dev/demo0", "hostPath": node}],
        "mounts": [
            {"hostPath": f"{host.root}/shared", "containerPath": "/opt/demo", "options": ["bind", "ro"]}
        ],
        "hooks": [touch] if hook else [],
    }
    devices = [{"name": "all", "containerEdits": edits}]
    document = {"cdiVersion": "0.5.0", "kind": DEVICE.partition("=")[0], "devices": devices}
    path = host.root / "cdi/demo.json"
    path.unlink(missing_ok=True)  # a test may have given it away
    path.write_text(json.dumps(document))


def install(host: PodmanHost) -> None:
    done = host.courier(*INSTALL)
    assert done.returncode == 0, done.stderr


def output(host: PodmanHost, container: str, last: str) -> list[str]:
    """The lines of a running container, once it has said the last one."""

    def lines() -> list[str]:
        said = host.run("podman", "logs", container).stdout.splitlines()
        return said if last in said else []

    return wait_for(lines, 10.0, f"{last} of {container}")


def test_an_annotated_container_has_everything(host: PodmanHost) -> None:
    """Environment, node with its cgroup's permission, mount and hook are there, from the first one on."""
    install(host)

    first = host.container(LOOK, {KEY: DEVICE})
    second = host.container(LOOK, {f"{KEY}/pod": DEVICE})

    assert (first.returncode, first.stderr) == (0, "")
    for done in (first, second):
        lines = done.stdout.splitlines()
        assert "A=1" in lines
        assert "hello from the host" in lines
        assert "opened" in lines
        assert any(line.startswith("crw") and "10, 229" in line and "/dev/demo0" in line for line in lines)
    hooked = json.loads((host.root / "hooked").read_text())
    assert hooked["annotations"]["cdi-courier.io/status"] == f"injected:{DEVICE}"


def test_a_container_that_does_not_ask_is_as_without_the_hook(host: PodmanHost) -> None:
    """Environment, devices, mounts and cgroup rules are the same, and nothing of ours is started."""
    look = f"ls /dev; {LOOK}"
    before = host.container(look, {"other": DEVICE}, "--hostname=same")
    install(host)

    after = host.container(look, {"other": DEVICE}, "--hostname=same")

    # Podman itself shuffles some mounts.
    assert sorted(after.stdout.splitlines()) == sorted(before.stdout.splitlines())
    assert (after.returncode, after.stderr) == (before.returncode, before.stderr)
    assert "/dev/demo0: No such file" in before.stdout
    assert not (host.root / "state/table.json").exists()
    assert not (host.root / "log").exists()


def test_a_container_that_starts_again_gets_its_devices_again(host: PodmanHost) -> None:
    """The hook runs at each start, with what the spec file says then."""
    install(host)
    limits = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024", "--network=host")
    command = host.command("env")
    made = host.run("podman", "create", "--name=again", *limits, f"--annotation={KEY}={DEVICE}", *command)
    assert made.returncode == 0, made.stderr
    try:
        first = host.run("podman", "start", "--attach", "again")
        write_spec(host, {"A": "2"})
        second = host.run("podman", "start", "--attach", "again")
    finally:
        host.run("podman", "rm", "--force", "again")

    assert "A=1" in first.stdout.splitlines()
    assert "A=2" in second.stdout.splitlines()


POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: demo
  annotations:
    {key}: {device}
spec:
  hostNetwork: true
  restartPolicy: Never
  containers:
  - name: one
    image: {image}
    command: ["sh", "-c", "{look}; sleep 1000"]
  - name: two
    image: {image}
    command: ["sh", "-c", "{look}; sleep 1000"]
"""


def test_a_pod_s_annotation_reaches_all_its_containers(host: PodmanHost) -> None:
    """With ``podman kube play``, which copies them, except to the infra container."""
    install(host)
    manifest = host.root / "pod.yaml"
    look = "env; exec 3<>/dev/demo0 && echo opened"
    manifest.write_text(POD.format(key=KEY, device=DEVICE, image=host.load_image(), look=look))
    played = host.run("podman", "kube", "play", "--log-driver=k8s-file", str(manifest))
    try:
        seen = [output(host, name, "opened") for name in ("demo-one", "demo-two")]
        pod = host.run("podman", "pod", "inspect", "--format={{.InfraContainerID}}", "demo").stdout.strip()
        infra = host.run("podman", "inspect", "--format={{.Config.Annotations}}", pod)
    finally:
        host.run("podman", "pod", "rm", "--force", "--time=0", "demo")
        for name in ("containers.conf", "policy.json"):
            host.path(f"/etc/containers/{name}").unlink()

    assert played.returncode == 0, played.stderr
    assert ["A=1" in lines for lines in seen] == [True, True]
    assert infra.returncode == 0, infra.stderr
    assert "cdi-courier.io/status" not in infra.stdout


@pytest.mark.parametrize(
    ("policy", "device", "code"),
    [
        ("policy.local = 'deny'\n", DEVICE, "POL001"),
        ("", "demo.example.com/gpu=none", "CDI012"),
        ("", "gpu", "ANN001"),
    ],
    ids=["denied", "unknown", "malformed"],
)
def test_a_refused_container_does_not_start_and_the_log_says_why(
    host: PodmanHost, policy: str, device: str, code: str
) -> None:
    """Podman says that a hook failed and where to look; the cause is there."""
    configure(host, policy)
    install(host)

    done = host.container("echo started", {KEY: device})

    assert done.returncode == 126
    assert "started" not in done.stdout
    assert f"the cause is in: {host.root}/log]: exit status 1" in done.stderr
    assert f" {code}: " in (host.root / "log").read_text()


def test_a_spec_file_of_somebody_else_is_not_believed(host: PodmanHost) -> None:
    """Trust is judged when the table is made, and the refusal names the file."""
    install(host)
    os.chown(host.root / "cdi/demo.json", USER, USER)

    done = host.container("echo started", {KEY: DEVICE})

    assert done.returncode == 126
    assert "CDI007" in (host.root / "log").read_text()


def test_a_device_that_podman_injects_itself_is_not_doubled(host: PodmanHost) -> None:
    """``--device`` and the annotation for one device: one node, one mount, and its hook runs once."""
    install(host)
    count = {
        "hookName": "createRuntime",
        "path": "/bin/sh",
        "args": ["sh", "-c", f"echo x >> {host.root}/hooked"],
        "env": ["PATH=/bin"],
    }
    edits = {"env": ["A=1"], "hooks": [count]}
    document = {
        "cdiVersion": "0.5.0",
        "kind": "demo.example.com/gpu",
        "devices": [{"name": "all", "containerEdits": edits}],
    }
    host.path("/etc/cdi").mkdir(exist_ok=True)
    for folder in (host.root / "cdi", host.path("/etc/cdi")):
        (folder / "demo.json").write_text(json.dumps(document))

    done = host.container("env", {KEY: DEVICE}, f"--device={DEVICE}")
    host.path("/etc/cdi/demo.json").unlink()

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines().count("A=1") == 1
    assert (host.root / "hooked").read_text() == "x\n"


def tree(host: PodmanHost) -> dict[str, tuple[int, bytes]]:
    """Every file and folder that an installation could touch: mode and content."""
    found = {}
    for top in ("/etc/containers", "/etc/cdi-courier", "/usr/local/sbin"):
        for path in sorted(host.path(top).rglob("*")):
            content = path.read_bytes() if path.is_file() else b""
            found[str(path).partition("/root")[2]] = (path.lstat().st_mode, content)
    return found


def test_uninstall_puts_every_byte_back(host: PodmanHost) -> None:
    """A host with a containers.conf of its own is as before, and annotations are nobody's again."""
    conf = host.path("/etc/containers/containers.conf")
    conf.parent.mkdir(exist_ok=True)
    conf.write_text(f'# mine\n[engine]\nhooks_dir = ["{host.root}/hooks.d"]\n')
    before = tree(host)

    install(host)
    installed = host.courier("doctor", "--json")
    drop_in = host.path("/etc/containers/containers.conf.d/90-cdi-courier.conf").read_text()
    during = host.container(LOOK, {KEY: DEVICE})
    done = host.courier("uninstall", "--backend", "oci_hook", "--runtime", "podman")
    after = host.container(LOOK, {KEY: DEVICE})
    left = tree(host)

    conf.unlink()
    assert left == before
    assert done.returncode == 0, done.stderr
    (runtime,) = json.loads(installed.stdout)["runtimes"]
    assert (runtime["key"], runtime["active"], runtime["recommended"]) == ("podman", "oci_hook", "oci_hook")
    assert f'hooks_dir = ["{host.root}/hooks.d", "{HOOKS}"]' in drop_in
    assert "A=1" in during.stdout
    assert "A=1" not in after.stdout


def test_a_rootless_user_is_served_by_root_s_installation(host: PodmanHost) -> None:
    """In a user namespace: root's spec files count, and the table is the user's own."""
    write_spec(host, {"A": "1"}, hook=False, node="/dev/null")  # which everybody may open
    install(host)

    first = host.container(LOOK, {KEY: DEVICE}, user=USER)
    second = host.container(LOOK, {KEY: DEVICE}, user=USER)

    for done in (first, second):
        assert done.returncode == 0, done.stderr
        assert "A=1" in done.stdout.splitlines()
        assert "hello from the host" in done.stdout.splitlines()
        assert "opened" in done.stdout.splitlines()
    table = host.path(f"/run/user/{USER}/cdi-courier/table.json")
    assert table.stat().st_uid == USER
    assert not (host.root / "state/table.json").exists()
