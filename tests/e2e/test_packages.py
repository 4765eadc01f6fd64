"""The Debian packages on Debian hosts: boxes with a real systemd and nothing but Debian's own libraries.

The packages come by apt from an archive that is a folder of the box, which has no network. They are built
once, on the machine's suite, for both. What needs a container runtime is in `test_vm`.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from support import debs
from support.box import Box
from support.debs import BACKENDS, CORE, STATE, UNIT
from support.fake_host import FakeHost
from support.needs import PATH, need_program
from support.packages import Packages
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

REPOSITORY = Path(__file__).parents[2]

NEXT = "99+test"


@pytest.fixture(scope="module")
def next_packages(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as `debian_packages` with a higher version."""
    folder = tmp_path_factory.mktemp("next")
    debs.build(folder, NEXT)
    return folder


@dataclass
class Debian:
    """A Debian host whose only archive holds our packages."""

    box: Box

    def offer(self, folder: Path) -> None:
        """Make a folder's packages what the archive holds."""
        debs.offer(self.box.root, folder)
        self.apt("update")

    def apt(self, *arguments: str) -> str:
        return debs.apt(self.box, *arguments)

    def install(self, *names: str) -> str:
        return self.apt("install", *(names or (CORE,)))

    def purge(self) -> str:
        return self.apt("purge", CORE, *BACKENDS)

    def main_pid(self) -> int:
        shown = self.box.run(["systemctl", "show", "--property=MainPID", "--value", UNIT]).stdout
        return int(shown)

    def failed(self) -> list[str]:
        """The units that systemd has seen fail."""
        return self.box.run(["systemctl", "--failed", "--plain", "--no-legend"]).stdout.splitlines()

    def files(self) -> dict[str, str]:
        return debs.files(self.box)


def without_runtimes(root: Path) -> None:
    """A box has no controllers for what Debian 13's root has for virtual machines."""
    (root / "etc/systemd/system/containerd.service").symlink_to("/dev/null")


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def host(request: pytest.FixtureRequest, debian_packages: Path) -> Iterator[Debian]:
    """One box of each suite for all, in which the packages are offered."""
    with Box(request.getfixturevalue(request.param), prepare=without_runtimes) as box:
        debian = Debian(box)
        debian.offer(debian_packages)
        yield debian


@pytest.fixture
def bare(host: Debian) -> Iterator[Debian]:
    """The host without our packages, and afterwards again."""
    yield host
    host.box.run(["rm", "-rf", f"{STATE}/changes", f"{STATE}/bin"])
    host.purge()


@pytest.fixture
def debian(bare: Debian) -> Debian:
    """The host with what `apt install cdi-courier` puts there."""
    bare.install()
    bare.box.wait(UNIT)
    return bare


def test_installing_starts_the_daemon_and_changes_no_runtime(bare: Debian) -> None:
    """All four packages come by one name; the daemon serves, and nobody else's configuration was written."""
    before, failed = bare.files(), bare.failed()
    bare.install()
    bare.box.wait(UNIT)
    new = {path for path, what in bare.files().items() if before.get(path) != what}
    ours = re.compile(
        r"/etc/cdi-courier(/.*)?|/usr/bin/cdi-courier(-nri)?|/usr/lib/python3/dist-packages/cdi_courier.*"
        r"|/usr/lib/systemd/system/cdi-courier.*|/usr/lib/udev/rules\.d/.*cdi-courier.*"
        r"|/usr/share/(doc|man|zsh|fish|bash-completion|lintian).*|/etc/systemd/system/.*cdi-courier.*"
        r"|/(var/lib/systemd|etc/systemd)/.*|/var/lib/cdi-courier(/.*)?|/var/tmp/systemd-private-.*cdi-courier.*"
    )

    assert bare.box.run(["systemctl", "is-enabled", UNIT]).stdout.strip() == "enabled"
    assert not [path for path in new if not ours.fullmatch(path)]
    assert "serving with backend nri" in bare.box.journal(UNIT)
    assert bare.failed() == failed


def test_systemd_finds_no_fault_in_the_units(debian: Debian) -> None:
    """Every unit is one that this systemd understands to the last line."""
    names = [f"cdi-courier-refresh.{kind}" for kind in ("service", "path", "timer")]
    said = debian.box.run(["systemd-analyze", "verify", "--man=no", UNIT, *names], check=False)

    assert (said.returncode, said.stderr) == (0, "")


COMMANDS = (
    "--version",
    "config check",
    "devices",
    "doctor",
    "install --help",
    "uninstall --dry-run",
    "policy check --namespace kube-system --device a.b/c=d",
    "generate alias a.b/null=x --node /dev/null --dry-run",
    "generate nvidia --help",
    "compile",
    "run --help",
    "explain --help",
    "apply --help",
    "validate --help",
)


def test_every_command_runs_on_debian_s_libraries(debian: Debian) -> None:
    """No command needs anything that the package does not depend on."""
    said = {c: debian.box.run([CORE, *c.split()], check=False) for c in COMMANDS}
    broken = {
        c: s.stdout + s.stderr
        for c, s in said.items()
        if s.returncode not in (0, 1) or "Traceback" in s.stderr
    }

    assert broken == {}
    assert "conf" in said["config check"].stdout


def test_removing_a_backend_removes_it_and_the_daemon_carries_on(debian: Debian) -> None:
    """The daemon is started anew without it and waits; put back, it serves again."""
    first = debian.main_pid()
    debian.apt("remove", "cdi-courier-nri")
    wait_for(lambda: debian.main_pid() not in (0, first), 20, "the daemon to be started anew")
    debian.box.wait(UNIT)
    second = debian.main_pid()
    removed = debian.box.run([CORE, "doctor", "--json"], check=False).stdout
    debian.install("cdi-courier-nri")
    wait_for(lambda: debian.main_pid() not in (0, second), 20, "the daemon to be started anew")
    debian.box.wait(UNIT)
    back = debian.box.run([CORE, "doctor", "--json"], check=False).stdout

    assert "nri" not in backends(removed)
    assert "nri" in backends(back)


def backends(report: str) -> set[str]:
    found = json.loads(report)["backends"]
    return {entry["name"] for entry in found} if isinstance(found, list) else set(found)


def test_purging_leaves_the_host_as_it_was(bare: Debian) -> None:
    """Remove, install again, purge: no file is left, none is missing, none is different."""
    before = bare.files()
    bare.install()
    bare.box.wait(UNIT)
    bare.box.run([CORE, "compile"])
    bare.apt("remove", CORE, *BACKENDS)
    bare.install()
    bare.box.wait(UNIT)
    bare.purge()
    after = bare.files()

    assert after == before
    assert not (bare.box.root / "run/cdi-courier").exists()
    assert bare.box.run(["systemctl", "list-units", "--all", "--no-legend", "cdi-courier*"]).stdout == ""


def test_what_is_installed_into_a_runtime_outlives_the_package(debian: Debian) -> None:
    """Manifest and wrapper are kept as long as one of them is needed, and it is said why."""
    changes, gate = (debian.box.root / STATE.lstrip("/") / name for name in ("changes", "bin"))
    changes.mkdir(parents=True, exist_ok=True)
    gate.mkdir(exist_ok=True)
    manifest = changes / "oci_hook--containerd.json"
    manifest.write_text("{}")
    (gate / "cdi-courier-runc").write_text("#!/bin/sh\nread -r _\n")
    (gate / "cdi-courier-runc").chmod(0o755)
    said = debian.purge()
    kept = sorted(path.name for path in (*changes.iterdir(), *gate.iterdir()))

    assert kept == ["cdi-courier-runc", "oci_hook--containerd.json"]
    assert "installed into containerd (by backend oci_hook)" in said

    manifest.unlink()
    debian.install()
    debian.purge()

    assert not gate.parent.exists()


GATE = f"{STATE}/bin/cdi-courier-runc"
TASKS = "io.containerd.runtime.v2.task"
SHIM = f"""
bundle=/run/k3s/containerd/{TASKS}/k8s.io/abc
mkdir -p $bundle
echo '{{"binary_name":"{GATE}"}}' >$bundle/options.json
"""
SHIM_ELSEWHERE = f"""
bundle=/srv/c/{TASKS}/default/own
mkdir -p $bundle/rootfs
mount -t tmpfs tmpfs $bundle/rootfs
echo {GATE} >$bundle/runtime
"""
DOCKER = f"""
mkdir -p /etc/docker
echo '{{"runtimes": {{"x": {{"path": "{GATE}"}}}}}}' >/etc/docker/daemon.json
"""
FOREIGN = SHIM.replace(GATE, "/usr/bin/runc")
MANIFEST = f"mkdir -p {STATE}/changes; touch {STATE}/changes/oci_hook--cri-o.json"
# With Type=exec the command line that is looked for is the process's own by then.
CONMON = f"systemd-run --unit=monitor --property=Type=exec sh -c 'sleep 600; :' {GATE}"
AFTER = "systemctl stop monitor; umount /srv/c/*/*/*/rootfs; rm -rf /srv/c /run/k3s /etc/docker"
NEEDS = {
    # what makes the wrapper needed → the script that does, what is said of it
    "a manifest": (MANIFEST, "installed into cri-o (by backend oci_hook)"),
    "conmon": (CONMON, "used by process"),
    "a shim": (SHIM, "used by container abc"),
    "a shim elsewhere": (SHIM_ELSEWHERE, "used by container own"),
    "Docker": (DOCKER, "named in /etc/docker/daemon.json"),
    "nothing": ("true", ""),
    "a container without it": (FOREIGN, ""),
}


@pytest.mark.parametrize("need", NEEDS)
def test_a_wrapper_stays_for_whoever_needs_it(bare: Debian, need: str) -> None:
    """Whatever still leads to the wrapper keeps it, and is named; when nothing does, nothing is left."""
    arrange, words = NEEDS[need]
    bare.box.run(["sh", "-euc", f"mkdir -p {STATE}/bin; touch {GATE}; {arrange}"])
    script = (REPOSITORY / "packaging/kept.sh").read_text() + f"\nremove_unless_kept {STATE}"
    said = bare.box.run(["sh", "-euc", script]).stdout
    kept = (bare.box.root / GATE.lstrip("/")).exists()
    bare.box.run(["sh", "-c", AFTER], check=False)

    assert kept == bool(words)
    assert words in said
    assert bool(said) == bool(words)


def test_an_upgrade_keeps_what_was_edited_and_starts_the_new_daemon(
    debian: Debian, debian_packages: Path, next_packages: Path
) -> None:
    """What was edited and the state stay as they are; the daemon is away once, for less than two seconds."""
    config = debian.box.root / "etc/cdi-courier/config.toml"
    edited = config.read_text() + '\n[[policy.rules]]\naction = "deny"\nnamespaces = ["edited"]\n'
    config.write_text(edited)
    (conf_d := config.with_name("conf.d") / "50-own.toml").write_text("[probe]\ntimeout = 3.0\n")
    manifest = debian.box.root / STATE.lstrip("/") / "changes/oci_hook--containerd.json"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text("{}")
    debian.offer(next_packages)
    first = debian.main_pid()
    before = len(starts_and_ends(debian.box))
    debian.apt("install", "--only-upgrade", CORE, *BACKENDS)
    debian.box.wait(UNIT)
    versions = debian.box.run(["dpkg-query", "-W", "-f=${Version} ", CORE, *BACKENDS]).stdout.split()
    kept = (config.read_text(), conf_d.read_text(), manifest.read_text())
    conf_d.unlink()
    debian.offer(debian_packages)

    assert kept == (edited, "[probe]\ntimeout = 3.0\n", "{}")
    assert set(versions) == {NEXT}
    assert debian.main_pid() not in (0, first)

    events = starts_and_ends(debian.box)[before:]
    gaps = [end - begin for (begin, word), (end, _) in pairwise(events) if word == "Stopping"]

    assert len(gaps) == 1
    assert gaps[0] < 2.0


def starts_and_ends(box: Box) -> list[tuple[float, str]]:
    """When, in seconds, systemd began to stop the daemon and had it started: what and when."""
    argv = ["journalctl", "--no-pager", "--output=json", "--boot", "_PID=1", f"UNIT={UNIT}"]
    records = [json.loads(line) for line in box.run(argv).stdout.splitlines()]
    told = [(float(r["__MONOTONIC_TIMESTAMP"]) / 1e6, r["MESSAGE"].split()[0]) for r in records]
    return [(when, word) for when, word in told if word in ("Stopping", "Started")]


@pytest.fixture
def driver(debian: Debian) -> Iterator[FakeHost]:
    """The host with NVIDIA's module loaded, before anybody has used it."""
    box = debian.box
    box.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", "/sys/module"])
    box.run(["mkdir", "/sys/module/nvidia"])
    before = debian.files()
    yield FakeHost(box.root)
    box.run(["umount", "/sys/module"])
    box.run(["sh", "-c", "rm -rf /dev/nvidia* /run/cdi"])
    new = [path for path in debian.files() if path not in before]
    box.run(["rm", "-rf", *new])


def test_the_gpus_spec_follows_the_driver(debian: Debian, driver: FakeHost) -> None:
    """It is waited for, written when the driver's nodes are there, and anew when its files change."""
    refresh, spec = "cdi-courier-refresh.service", debian.box.root / "run/cdi/management.nvidia.com-gpu.yaml"
    debian.box.run(["systemctl", "start", "--no-block", refresh])
    debian.box.wait(refresh, "activating")
    early = spec.exists()
    driver.driver("550.54.15")
    driver.node("/dev/nvidia0", 195, 0)
    driver.node("/dev/nvidia-uvm", 508, 0)
    driver.node("/dev/nvidiactl", 195, 255)
    wait_for(spec.exists, 30, "the spec file")
    debian.box.wait(refresh, "inactive")
    first = spec.read_text()
    driver.node("/dev/nvidia1", 195, 1)
    debian.box.run(["ldconfig"])
    wait_for(lambda: spec.read_text() != first, 30, "the spec file to change")

    assert not early
    assert "/dev/nvidia0" in first
    assert "/dev/nvidia1" in spec.read_text()

    debian.purge()

    assert not spec.exists()


def test_no_number_of_changes_stops_the_refreshing(debian: Debian) -> None:
    """Without a GPU nothing fails, and systemd never takes it for a service that cannot be started."""
    refresh = "cdi-courier-refresh.service"
    for _ in range(12):
        debian.box.run(["systemctl", "start", refresh])
    shown = debian.box.run(["systemctl", "show", "--property=Result", "--value", refresh]).stdout.strip()

    assert shown == "exec-condition"
    assert debian.box.run(["systemctl", "is-active", "cdi-courier-refresh.path"]).stdout.strip() == "active"


def test_lintian_finds_nothing(packages: Packages, debian_packages: Path, tmp_path: Path) -> None:
    """Debian's own checker has neither an error nor a warning for any of the packages."""
    changes = next(debian_packages.glob("*.changes"))
    need_program("lintian")
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on=error,warning", changes],
        capture_output=True,
        text=True,
        timeout=120,
        # It leaves its index of programs behind.
        env={"PATH": PATH, "LC_ALL": "C.UTF-8", "TMPDIR": str(tmp_path)},
    )

    assert (done.returncode, done.stdout) == (0, "")


def test_packages_of_the_same_source_are_the_same_bytes(debian_packages: Path, tmp_path: Path) -> None:
    """What is in a package depends on nothing but the commit that it is made of."""
    debs.build(tmp_path)

    assert {p.name: p.read_bytes() for p in debian_packages.glob("*.deb")} == {
        p.name: p.read_bytes() for p in tmp_path.glob("*.deb")
    }
