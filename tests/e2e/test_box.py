"""The box is a real systemd host that leaves the machine as it was, and the product works in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import host, rootfs
from support.box import Box, BoxFailure
from support.packages import PackageError, Packages
from support.product import install_product
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

BACKENDS = ("cri_o_drop_in", "nri", "oci_hook")


@pytest.fixture(params=["bookworm", "trixie"])
def any_box(request: pytest.FixtureRequest) -> Iterator[Box]:
    """A box of each suite, with the product."""
    with Box(request.getfixturevalue(request.param), prepare=install_product) as box:
        yield box


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file below with what a write would change."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[str(path)] = (status.st_size, status.st_mtime_ns, status.st_mode)
    return found


def test_everything_that_a_box_starts_comes_up(any_box: Box) -> None:
    """systemd is pid 1, and of its units none has failed."""
    if any_box.state != "running":
        # What Debian 13 starts for its container runtime may find no controllers here.
        failed = any_box.run(["systemctl", "--failed", "--plain", "--no-legend"]).stdout
        assert [line.split()[0] for line in failed.splitlines()] == ["containerd.service"]

    assert any_box.run(["readlink", "/proc/1/exe"]).stdout.strip() == "/usr/lib/systemd/systemd"


def test_a_box_has_a_pure_cgroup_v2_tree_whatever_the_machine_has(box: Box) -> None:
    """What runs in it sees cgroup v2 at the usual place, with the box's own cgroups at the top."""
    tops = box.run(["ls", "/sys/fs/cgroup"]).stdout.split()

    assert box.run(["stat", "-f", "-c", "%T", "/sys/fs/cgroup"]).stdout.strip() == "cgroup2fs"
    assert {"init.scope", "system.slice"} <= set(tops)
    assert box.cgroup.strip("/") not in tops


def test_a_service_logs_to_the_journal(box: Box) -> None:
    """What a unit prints stands in the journal under its name."""
    (box.root / "etc/systemd/system/says.service").write_text(
        "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/echo a word\n"
    )
    box.run(["systemctl", "daemon-reload"])
    box.run(["systemctl", "start", "--no-block", "says"])

    box.wait("says.service", "active")

    wait_for(lambda: "a word" in box.journal("says"), 10, "the journal to have it")


def test_a_unit_that_does_not_come_up_is_reported_with_its_journal(box: Box) -> None:
    """A wait that is in vain says what the unit said last."""
    unit = "[Service]\nExecStart=/bin/sh -c 'echo out of order; exit 3'\n"
    (box.root / "etc/systemd/system/broken.service").write_text(unit)
    box.run(["systemctl", "daemon-reload"])
    box.run(["systemctl", "start", "broken"])
    box.wait("broken.service", "failed")

    with pytest.raises(Exception, match=r"(?s)broken\.service to be active.*out of order"):
        box.wait("broken.service", timeout=0.2)


def test_a_scope_is_a_cgroup_that_outlives_a_reload(box: Box) -> None:
    """What stands in a transient scope's cgroup is still there after ``systemctl daemon-reload``."""
    script = "cat /proc/self/cgroup; systemctl daemon-reload; cat /proc/self/cgroup"
    done = box.run(["systemd-run", "--quiet", "--scope", "--unit=held", "sh", "-c", script])

    lines = [line for line in done.stdout.splitlines() if line.startswith("0::")]
    assert lines == ["0::/system.slice/held.scope"] * 2


def test_the_product_finds_its_backends_among_debians_libraries(any_box: Box) -> None:
    """The command that was installed works with what the suite ships, and knows every backend."""
    checked = any_box.run(["cdi-courier", "config", "check"])
    listed = any_box.run(["cdi-courier", "doctor", "--json"], check=False)

    assert "Traceback" not in checked.stderr + listed.stderr
    for name in BACKENDS:
        any_box.run(["python3", "-c", f"import cdi_courier_{name.removesuffix('_drop_in')}.backend"])
    assert '"runtimes"' in listed.stdout


def test_the_daemon_runs_as_a_service(box: Box) -> None:
    """A unit that starts ``cdi-courier run`` is active, and the command sees its daemon."""
    box.run(["systemd-run", "--quiet", "--unit=courier", "cdi-courier", "run"])
    box.wait("courier.service")

    def seen() -> bool:
        return "daemon: pid " in box.run(["cdi-courier", "doctor"], check=False).stdout

    wait_for(seen, 20, lambda: f"doctor to see the daemon\n{box.journal('courier')}")


def test_a_box_changes_nothing_of_its_root_and_leaves_nothing(bookworm: Path) -> None:
    """Files that are written in a box are the box's own; afterwards no mount, process or cgroup is left."""
    before = snapshot(bookworm)
    with Box(bookworm, prepare=lambda root: (root / "etc/put").write_text("x")) as box:
        pid, cgroup = box.pid, box.cgroup
        box.run(["sh", "-c", "echo y >> /etc/put; rm /etc/fstab; chmod 0700 /usr/bin/env"])
        written = (box.root / "etc/put").read_text()
        mounts = host.mounts_below(Path(tempfile.gettempdir(), cgroup.strip("/")))

    assert written == "xy\n"
    assert snapshot(bookworm) == before
    assert mounts == []  # not even while it runs
    assert not host.lives(pid)
    assert host.cgroups(cgroup) == []


def test_two_boxes_know_nothing_of_each_other(bookworm: Path) -> None:
    """Each has the units, files, sockets and processes that it was given, and the other none of them."""
    with Box(bookworm) as one, Box(bookworm) as other:
        one.run(["systemd-run", "--quiet", "--unit=mine", "sleep", "1000"])
        one.wait("mine.service")

        seen = other.run(["systemctl", "show", "--property=LoadState", "--value", "mine"]).stdout.strip()

        assert seen == "not-found"
        assert "sleep" in one.run(["sh", "-c", "cat /proc/[0-9]*/comm"]).stdout
        assert "sleep" not in other.run(["sh", "-c", "cat /proc/[0-9]*/comm"]).stdout


def test_a_box_whose_pid_1_dies_is_gone_and_says_so(bookworm: Path) -> None:
    """Killing that one process ends everything in it, and the next command is an error."""
    with Box(bookworm) as box:
        box.run(["systemd-run", "--quiet", "--unit=mine", "sleep", "1000"])
        os.kill(box.pid, signal.SIGKILL)
        wait_for(lambda: not box.running, 10, "the box to end")

        assert host.processes_in_cgroup(box.cgroup) == []
        with pytest.raises(BoxFailure):
            box.run(["true"])


def test_a_command_that_hangs_is_given_up_in_time(box: Box) -> None:
    """A deadline that has passed is an error that names the command."""
    with pytest.raises(BoxFailure, match="sleep 1000 took over"):
        box.run(["sleep", "1000"], timeout=0.3)


_HOLDER = """
import sys
from pathlib import Path
from support.box import Box
with Box(Path(sys.argv[1])) as box:
    print(box.pid, box.cgroup, flush=True)
    sys.stdin.read()
"""


def test_a_box_ends_with_its_process_however_that_ends(bookworm: Path) -> None:
    """Of a killed test run no process stays, and the next box removes the empty folder and cgroup."""
    argv = [sys.executable, "-c", _HOLDER, bookworm]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as holder:
        assert holder.stdout is not None
        pid, cgroup = holder.stdout.readline().split()
        holder.kill()
    wait_for(lambda: not host.lives(int(pid)), 10, "the box's pid 1 to end")
    folder = Path(tempfile.gettempdir(), cgroup.strip("/"))
    left = folder.exists()

    with Box(bookworm):
        assert left
        assert not folder.exists()
        assert not folder.with_name(f"{folder.name}.log").exists()
        assert host.cgroups(cgroup) == []


@pytest.mark.parametrize("name", ["", "-o", "a b", "x;y", "../x"])
def test_a_root_is_made_of_names_only(packages: Packages, name: str) -> None:
    """What is no package's name reaches no command line."""
    with pytest.raises(PackageError, match="not a suite's or a package's name"):
        rootfs.root(packages, "bookworm", (name,))


def test_a_root_is_made_once(packages: Packages, bookworm: Path) -> None:
    """The same list in another order is the same root, from the cache."""
    lines: list[str] = []
    again = Packages(packages.cache, progress=lines.append, refresh=False)

    assert rootfs.root(again, "bookworm", (*rootfs.LIBRARIES, *rootfs.SYSTEM)) == bookworm
    assert lines == []


def test_a_folder_with_a_tmpfs_of_its_own_can_hold_overlays(bookworm: Path) -> None:
    """What a container runtime does with its layers works there, which it does not on the box's root."""
    script = (
        "mkdir -p $0 && cd $0 && mkdir l u w m && mount -t overlay -o lowerdir=l,upperdir=u,workdir=w x m"
    )
    with Box(bookworm, tmpfs=["/var/lib/layers"]) as box:
        on_tmpfs = box.run(["sh", "-c", script, "/var/lib/layers"], check=False)
        on_root = box.run(["sh", "-c", script, "/var/lib/others"], check=False)

    assert on_tmpfs.returncode == 0, on_tmpfs.stderr
    assert on_root.returncode != 0
