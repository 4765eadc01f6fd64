"""What the daemon does when the host fails it: a fault is said in words, and when it ends all is as before.

The runtime is the one in Python. Root is needed for file systems that are full or read-only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cdi_courier import status
from support import host
from support.courier import Courier
from support.daemon import Daemon
from support.nri_runtime import Creation, NriRuntime, container, pod
from support.nri_soak import NUMBER, SoakRuntime, template
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

KEY = "nvidia.cdi.k8s.io"
GPU = "vendor.com/gpu"
LINES = 12_000  # more than may wait to be logged
FLOODED = 300  # containers
CLIENTS = 20  # more than may wait to be accepted


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """The daemon with one device, not yet started; it has logged no traceback."""
    made = Daemon(tmp_path, str(tmp_path / "nri.sock"))
    made.write_spec(GPU, {"a": {"env": ["A=1"]}})
    yield made
    made.courier.stop()
    if made.courier.log_file.is_file():
        assert "Traceback" not in made.courier.log()


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[NriRuntime]:
    with NriRuntime(str(tmp_path / "nri.sock")) as made:
        yield made


@pytest.fixture
def small(daemon: Daemon) -> Iterator[Path]:
    """The state directory as a file system of its own, of one block."""
    daemon.state_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0700,size=4k", "tmpfs", daemon.state_dir], check=True)
    yield daemon.state_dir
    daemon.courier.stop()
    host.unmount_below(daemon.state_dir)  # whatever a test has mounted over it, too


def remount(folder: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", folder], check=True)


def ask(runtime: NriRuntime, value: str = f"{GPU}=a") -> Creation:
    return runtime.create_container(pod("p", "gpu-operator", **{KEY: value}), container())


def given(creation: Creation) -> list[str]:
    """The variables that the container was given; none where it failed."""
    return [f"{pair.key}={pair.value}" for adjust in creation.adjustments for pair in adjust.env]


def answers(daemon: Daemon) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(status.ask(str(daemon.state_dir), timeout=0.5))
    return False


# The log


def test_a_log_that_nobody_reads_holds_up_no_container_and_no_end(daemon: Daemon) -> None:
    """All are answered while the pipe is full, what was dropped is counted, and the daemon ends in time."""
    os.mkfifo(daemon.courier.log_file)
    reader = os.open(daemon.courier.log_file, os.O_RDONLY | os.O_NONBLOCK)
    kinds = {"refused": template({KEY: f"{GPU}=a"}, f"ns-{NUMBER}"), "plain": template({})}
    read = bytearray()

    def drained(words: bytes) -> bool:
        with contextlib.suppress(BlockingIOError):
            while part := os.read(reader, 1 << 16):
                read.extend(part)
        return words in read

    try:
        with SoakRuntime(str(daemon.folder / "nri.sock"), kinds) as runtime:
            daemon.courier.start()
            runtime.connect()
            found = runtime.ask(["refused"] * LINES + ["plain"] * 100)
            counted = daemon.session()["counts"]
            wait_for(lambda: drained(b"log lines were dropped here"), 20, "the dropped to be counted")
            runtime.ask(["refused"])
            wait_for(lambda: drained(b"ns-%08x/" % (runtime.asked - 1)), 20, "new lines to come")
            runtime.ask(["refused"] * 3000)
            code = daemon.courier.stop()
    finally:
        os.close(reader)

    assert found == {("refused", "POL001"): LINES, ("plain", ""): 100}
    assert counted["requests"] == LINES + 100
    assert code == 0


# The state directory


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("ro", "Read-only file system (have that file system mounted writable"),
        ("nr_inodes=1", "No space left on device (make room there"),
    ],
    ids=["read-only", "without inodes"],
)
def test_a_state_directory_that_takes_nothing_is_a_start_that_says_so(
    daemon: Daemon, runtime: NriRuntime, small: Path, option: str, words: str
) -> None:
    """The daemon ends with one message, leaves nothing, and starts when there is room."""
    remount(small, option)
    daemon.courier.start()
    code = daemon.courier.wait()
    said = daemon.courier.log()
    left = list(small.iterdir())

    remount(small, "rw,nr_inodes=100")
    daemon.courier.start()
    runtime.plugin()

    assert code == 1
    assert f"HST003: cannot make the lock file {small}/lock: {words}" in said
    assert left == []
    assert given(ask(runtime)) == ["A=1"]


def test_a_full_state_directory_is_enough_to_serve(daemon: Daemon, runtime: NriRuntime, small: Path) -> None:
    """Where nothing can be written the lock still excludes others, and status answers."""
    (small / "filler").write_bytes(b"x" * 4096)
    with daemon.courier as courier:
        runtime.plugin()
        creation = ask(runtime)
        second = Courier(daemon.settings, daemon.folder / "second")
        second.start()
        code = second.wait()
        reported = daemon.report()["pid"]

    assert given(creation) == ["A=1"]
    assert reported == courier.process.pid  # type: ignore[union-attr]
    assert code == 1
    assert "HST002: another cdi-courier already serves" in second.log()
    assert [path.name for path in small.iterdir()] == ["filler"]


def test_a_status_socket_that_cannot_be_made_is_made_when_it_can(
    daemon: Daemon, runtime: NriRuntime, small: Path
) -> None:
    """Containers are served meanwhile, the log has one line with the cause, and nobody need restart."""
    remount(small, "nr_inodes=2")  # the folder's own, and the lock's
    with daemon.courier as courier:
        runtime.plugin()
        creation = ask(runtime)
        courier.wait_for_log(f"STA005: {small}/status.sock cannot be made, so there is no status: No space")
        before = answers(daemon)
        remount(small, "nr_inodes=100")
        wait_for(lambda: answers(daemon), 20, "the status socket")
        courier.wait_for_log("status.sock is there now")

    assert given(creation) == ["A=1"]
    assert not before
    assert courier.log().count("STA005") == 1
    assert list(small.iterdir()) == []


def test_a_state_directory_that_becomes_read_only_hurts_nobody_and_no_end(
    daemon: Daemon, runtime: NriRuntime, small: Path
) -> None:
    """Answers and reloads go on; the end is a good one, and what it could not remove is no hindrance."""
    with daemon.courier as courier:
        runtime.plugin()
        courier.wait_for_log("no container runtime is here")
        # In the place of what it had: a file system with an open file cannot be made read-only.
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", small], check=True)
        creation = ask(runtime)
        daemon.configure('[policy]\ndefault = "allow"')
        daemon.hang_up()
        courier.wait_for_log("changed: policy.default")
        code = courier.stop()
        subprocess.run(["umount", small], check=True)
        left = sorted(path.name for path in small.iterdir())
        courier.start()
        runtime.plugin(2)
        again = ask(runtime)

    assert given(creation) == given(again) == ["A=1"]
    assert code == 0
    assert left == ["lock", "status.sock"]
    assert list(small.iterdir()) == []


# Descriptors


@contextlib.contextmanager
def without_descriptors(daemon: Daemon) -> Iterator[None]:
    """The daemon can open nothing more."""
    used = set(daemon.descriptors())
    free = next(number for number in range(1 << 16) if number not in used)
    before = _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def flood(path: Path) -> Iterator[None]:
    """Clients that connect, as many at a time as may wait, and do not read."""
    ended = threading.Event()

    def connect() -> None:
        while not ended.is_set():
            with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
                client.settimeout(0.2)
                client.connect(str(path))
                ended.wait(0.1)

    threads = [threading.Thread(target=connect) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_without_descriptors_the_daemon_answers_says_what_it_lacks_and_recovers(
    daemon: Daemon, runtime: NriRuntime
) -> None:
    """What is known is served; what must be opened is refused in words; with descriptors all is as before."""
    daemon.configure(f'[metrics]\nlisten = "unix:{daemon.folder}/m"')
    with daemon.courier as courier:
        peer = runtime.plugin()
        courier.wait_for_log("no container runtime is here")
        wait_for(lambda: given(ask(runtime)) == ["A=1"], 10, "the first answer")
        daemon.report()
        with without_descriptors(daemon), flood(daemon.state_dir / "status.sock"), flood(daemon.folder / "m"):
            courier.wait_for_log("STA006: who asks for the status waits")
            courier.wait_for_log("STA006: who scrapes waits")
            known = [given(ask(runtime)) for _ in range(20)]
            daemon.write_spec(GPU, {"a": {"env": ["A=2"]}})
            unread = ask(runtime).error
            daemon.hang_up()
            courier.wait_for_log("SET030: the settings stay as they were: SET001")
        recovered = given(ask(runtime))
        wait_for(lambda: answers(daemon), 10, "the status")
        courier.wait_for_log("the status is told again")
        daemon.hang_up()
        courier.wait_for_log("settings read again")
        active = runtime.active()

    assert known == [["A=1"]] * 20
    assert "Too many open files" in unread
    assert unread.startswith("CDI")
    assert recovered == ["A=2"]
    assert active == [peer]


def test_who_floods_the_status_socket_holds_up_no_container(daemon: Daemon, runtime: NriRuntime) -> None:
    """Every container is answered at once while more connect than may wait, and then status answers."""
    with daemon.courier:
        runtime.plugin()
        ask(runtime)
        with flood(daemon.state_dir / "status.sock"):
            found = [given(ask(runtime)) for _ in range(FLOODED)]
        wait_for(lambda: answers(daemon), 20, "the status")
        latency = daemon.session()["latency"]

    assert found == [["A=1"]] * FLOODED
    assert latency["p99"] < 0.5


def limited(daemon: Daemon, soft: int, hard: int) -> None:
    """Have the daemon, when it is started, begin with these limits of open files."""
    shell = daemon.folder / "limited"
    shell.write_text(f'#!/bin/sh\nulimit -Sn {soft}; ulimit -Hn {hard}; exec {sys.executable} "$@"\n')
    shell.chmod(0o700)
    daemon.courier.python = shell


def test_a_limit_of_open_files_that_is_too_low_is_raised(daemon: Daemon, runtime: NriRuntime) -> None:
    """Where only the soft limit is low the daemon raises it as far as it needs, and serves."""
    limited(daemon, 8, 200)
    with daemon.courier:
        runtime.plugin()
        creation = ask(runtime)
        limit = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)

    assert given(creation) == ["A=1"]
    assert limit == (64, 200)


def test_a_limit_of_open_files_that_cannot_be_raised_is_a_start_that_says_so(daemon: Daemon) -> None:
    """The daemon ends with one message, which says what to raise."""
    limited(daemon, 8, 8)
    daemon.courier.start()
    code = daemon.courier.wait()

    assert code == 2
    assert "SET041: this process may open 8 files at a time, and needs up to 64" in daemon.courier.log()
