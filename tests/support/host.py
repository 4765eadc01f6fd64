"""What lies around on the host below a folder or a cgroup: processes, mounts, cgroups; and how it goes away.

Processes are ended one by one, by a file descriptor of the process that was looked at, never by name. It must
not know who started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from .waiting import WaitTimeoutError, wait_for

OWNER = "owner"  # the file in a folder that names its process
MARK = "CDI_LAB_ROOT"  # the environment variable that marks a lab's processes; children inherit it

_CGROUPS = Path("/sys/fs/cgroup")
_MNT_DETACH = 2
_GONE = 10.0  # seconds until what was killed must be gone

_libc = ctypes.CDLL(None, use_errno=True)


def ignored(status: str = "/proc/self/status") -> set[int]:
    """The signals that a process ignores, by its status or a copy of it; of this one, not those of Python.

    Whoever has started the tests may ignore some, as `nohup` does.
    """
    lines = Path(status).read_text().splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    found = {number for number in range(1, 65) if mask >> (number - 1) & 1}
    return found - {signal.SIGPIPE, signal.SIGXFSZ} if status == "/proc/self/status" else found


def processes_of(folder: Path) -> list[int]:
    """Processes that were started with `MARK` naming the folder or one in it, and what they started in turn.

    Not somebody's editor or pager on a file in it, and not this process.
    """
    mark, needle = f"{MARK}=".encode(), os.fsencode(folder)

    def marked(pid: int) -> bool:
        values = [word.removeprefix(mark) for word in _environment(pid) if word.startswith(mark)]
        return any(_lies_in(value, needle) for value in values)

    return [pid for pid in _pids() if pid != os.getpid() and marked(pid)]


def processes_in_cgroup(name: str) -> list[int]:
    """Processes in a cgroup or below it, in any hierarchy. name: as a pod's ``cgroup_parent``."""
    pids: set[int] = set()
    for folder in _cgroup_folders(name):
        for path in _with_all_below(folder):
            with contextlib.suppress(OSError):
                pids.update(map(int, (path / "cgroup.procs").read_text().split()))
    return sorted(pids - {0, os.getpid()})


def end_processes(find: Callable[[], Iterable[int]]) -> None:
    """Kill what is found and wait until nothing more is found; zombies do not count."""

    def none_left() -> bool:
        left = list(find())
        for pid in left:
            _kill(pid, find)
        return not left

    # Who still lives after that is reported by the caller's last look.
    with contextlib.suppress(WaitTimeoutError):
        wait_for(none_left, _GONE, "processes to end")


def mounts_below(folder: Path) -> list[Path]:
    """Mount points in the folder, the newest first."""
    needle = os.fsencode(folder)
    points = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        point = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), line.split()[4])
        if _lies_in(point, needle):
            points.append(Path(os.fsdecode(point)))
    return points[::-1]


def unmount_below(folder: Path) -> None:
    for point in mounts_below(folder):
        path = os.fsencode(point)
        if _libc.umount2(path, 0):
            _libc.umount2(path, _MNT_DETACH)


def cgroups(name: str) -> list[Path]:
    """The folders of a cgroup in every hierarchy."""
    return _cgroup_folders(name)


def remove_cgroup(name: str) -> None:
    """Remove a cgroup and all below it, in every hierarchy; nothing may run in it any more."""

    def removed() -> bool:
        for folder in _cgroup_folders(name):
            for path in reversed(_with_all_below(folder)):
                with contextlib.suppress(OSError):  # busy until the kernel has buried the last process
                    path.rmdir()
        return not _cgroup_folders(name)

    with contextlib.suppress(WaitTimeoutError):
        wait_for(removed, _GONE, "cgroups to empty")


def remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def file_system(path: Path) -> str:
    """The file system's type as ``stat -f`` names it, e.g. ``ext2/ext3``, ``tmpfs``, ``overlayfs``."""
    argv = ["stat", "-f", "-c", "%T", str(path)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def mount_tmpfs(folder: Path) -> None:
    argv = ["mount", "-t", "tmpfs", "-o", "mode=0711", "cdi-lab", str(folder)]
    subprocess.run(argv, capture_output=True, check=True)


def start_time(pid: int) -> str:
    """When the process began, in ticks: with the PID it names one process for ever. Empty when gone."""
    return "".join(_stat(pid)[19:20])


def owner(pid: int) -> str:
    """A text that names one process for ever, for a note on what is its."""
    return f"{pid} {start_time(pid)}"


def is_orphaned(note: str) -> bool:
    """Whether the process of an `owner` note is gone; not of a note that is only being written."""
    pid = note.partition(" ")[0]
    return pid.isdigit() and note != owner(int(pid))


def new_folder(prefix: str) -> Path:
    """A folder below the system's temporary one that names this process as its owner, for `orphans`."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    sign(folder)
    return folder


def sign(folder: Path) -> None:
    """Make this process the folder's owner."""
    (folder / OWNER).write_text(owner(os.getpid()))


def orphans(prefix: str) -> list[Path]:
    """Folders with that prefix whose owner was killed before it could remove them."""
    found = []
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.geteuid() and is_orphaned((folder / OWNER).read_text()):
                found.append(folder)
    return found


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet waited for does not."""
    return _runs(_stat(pid))


def lives_in_group(group: int) -> bool:
    """Whether a process of a process group runs, in the sense of `lives`."""
    return any(stat[2] == str(group) for stat in map(_stat, _pids()) if _runs(stat))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    """What stands in a process's stat file from the state on: state, parent, group…; empty when gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _runs(stat: list[str]) -> bool:
    return stat[:1] not in ([], ["Z"], ["X"])


def _cgroup_folders(name: str) -> list[Path]:
    relative = name.strip("/")
    if not relative or not _CGROUPS.is_dir():
        return []
    # Pure v2 is mounted at the top; v1's and the hybrid's hierarchies lie one below.
    candidates = [_CGROUPS / relative, *(path / relative for path in _CGROUPS.iterdir() if path.is_dir())]
    return [path for path in dict.fromkeys(path.resolve() for path in candidates) if path.is_dir()]


def _with_all_below(folder: Path) -> list[Path]:
    """Parents before children. Unlike `rglob`, not disturbed by what vanishes meanwhile."""
    return [Path(path) for path, _, _ in os.walk(folder)]


def _kill(pid: int, find: Callable[[], Iterable[int]]) -> None:
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # The number may have passed to somebody else between the look and the open.
        if pid in find():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _lies_in(path: bytes, folder: bytes) -> bool:
    return path == folder or path.startswith(folder + b"/")
