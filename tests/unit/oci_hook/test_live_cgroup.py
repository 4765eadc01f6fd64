"""A live container's device cgroup: where it is, what is changed in it, and that failing changes nothing."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cdi_courier
import cdi_courier_oci_hook
import pytest
from cdi_courier.errors import DeliveryError
from cdi_courier_oci_hook.live import bpf, cgroup, device_filter, device_list, systemd
from cdi_courier_oci_hook.live.device_filter import CHAR, READ, WRITE
from hypothesis import given
from hypothesis import strategies as st
from support.bpf_code import NO, YES, code

PID = 4711
SCOPE = "/kubepods/pod1/c1"
GRANT = (CHAR, 1, 11, READ | WRITE)
RULES = [("c", 1, 11, "rw")]
DENYING = device_filter.prologue([(CHAR, 1, 3, READ)]) + NO
MAPPED = code((0x18, 2, 1, 0, 5), (0, 0, 0, 0, 0)) + NO


# Where it is


def test_the_cgroups_of_a_process_are_those_of_the_devices_controller_and_of_version_2() -> None:
    """Other hierarchies do not count, and a path may hold what separates fields."""
    text = "9:name=systemd:/a\n5:net_cls,devices:/p:q/devices\n4:memory:/m\n0::/u:v\n"

    assert cgroup.cgroups_of(text) == {1: "/p:q/devices", 2: "/u:v"}


@pytest.mark.parametrize(
    "text", ["", "\n", "nonsense\n", "5:devices\n", "4:xdevices:/a\n", "1:memory:/devices\n"]
)
def test_what_is_no_line_of_a_device_cgroup_is_none(text: str) -> None:
    """A controller counts only by its whole name in its field."""
    assert cgroup.cgroups_of(text) == {}


def test_mounts_are_those_of_the_devices_controller_and_of_version_2_the_last_first() -> None:
    """Of all that is mounted only what can hold device cgroups is there."""
    text = (
        b"31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
        b"36 31 0:33 /a /sys/fs/cgroup/devices rw,relatime shared:9 master:1 - cgroup cgroup rw,devices\n"
        b"37 31 0:34 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n"
        b"38 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        b"40 31 0:33 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,net_cls,devices\n"
        b"not a mount\n"
    )
    found = {
        version: [(mount.root, mount.point) for mount in mounts]
        for version, mounts in cgroup.mounts_of(text).items()
    }

    assert found == {
        1: [("/", "/sys/fs/cgroup/devices"), ("/a", "/sys/fs/cgroup/devices")],
        2: [("/", "/sys/fs/cgroup/unified")],
    }


@given(st.text())
def test_no_text_upsets_the_reader(text: str) -> None:
    """Whatever stands in that file, reading ends with what is understood of it."""
    assert set(cgroup.cgroups_of(text)) <= {1, 2}


@pytest.mark.parametrize(
    ("path", "own", "cgroups_path", "expected"),
    [
        pytest.param("/kubepods/pod1/c1", "/", "/kubepods/pod1/c1", "/kubepods/pod1/c1", id="cgroupfs"),
        pytest.param("/k/c1/sub/x", "/", "/k/c1", "/k/c1", id="the process is further down"),
        pytest.param("/docker/outer/k/c1", "/docker/outer", "/k/c1", "/docker/outer/k/c1", id="nested"),
        pytest.param("/a/c1/a/c1/x", "/", "/a/c1", "/a/c1/a/c1", id="the deepest of two"),
        pytest.param("/me/c1", "/me", "c1", "/me/c1", id="relative"),
        pytest.param(
            "/kube.slice/pod.slice/cri-c1.scope",
            "/",
            "pod.slice:cri:c1",
            "/kube.slice/pod.slice/cri-c1.scope",
            id="systemd",
        ),
        pytest.param(
            "/s.slice/c1.scope", "/", "s.slice::c1", "/s.slice/c1.scope", id="systemd without a prefix"
        ),
        pytest.param(
            "/s.slice/cri-c1.scope/container",
            "/",
            "s.slice:cri:c1",
            "/s.slice/cri-c1.scope",
            id="crun's sub-cgroup",
        ),
        pytest.param(
            "/s.slice/x-c1.scope/container", "/", "", "/s.slice/x-c1.scope", id="no cgroupsPath, crun"
        ),
        pytest.param(
            "/s.slice/session-3.scope/c1", "/", "", "/s.slice/session-3.scope/c1", id="below a login"
        ),
        pytest.param("/c1", "/", "", "/c1", id="no cgroupsPath"),
        pytest.param("/c1", "/", "/other", "/c1", id="another cgroupsPath"),
        pytest.param("/x/c1", "/", "../x", "/x/c1", id="a cgroupsPath that climbs"),
        pytest.param("/", "/", "/c1", None, id="the root"),
        pytest.param("/kube.slice/pod.slice", "/", "pod.slice:cri:c1", None, id="a slice"),
        pytest.param("/k/pod.slice", "/", "/k/pod.slice", None, id="a slice by name"),
        pytest.param(
            "/system.slice/docker.service", "/system.slice/docker.service", "/c1", None, id="the runtime's"
        ),
        pytest.param("/e", "/e/runtime", "/e", None, id="above the runtime"),
        pytest.param("/e", "/else", "/e", "/e", id="a longer name is not below"),
    ],
)
def test_the_scope_is_the_containers_own(
    path: str, own: str, cgroups_path: str, expected: str | None
) -> None:
    """It is never a slice, nothing that holds the runtime, and nothing above what cgroupsPath names."""
    assert cgroup.scope_of(path, own, cgroups_path) == expected


PATHS = st.lists(st.sampled_from(["a", "b", "c.scope", "d.slice", "container"]), max_size=5).map(
    lambda parts: "/" + "/".join(parts)
)


@given(PATHS, PATHS, PATHS | st.sampled_from(["d.slice:a:b", "::c", "a/b"]))
def test_a_scope_holds_the_process_and_nobody_else(path: str, own: str, cgroups_path: str) -> None:
    """Whatever the names: it is at or above the process, not above the runtime, and no slice."""
    scope = cgroup.scope_of(path, own, cgroups_path)

    assert scope is None or f"{path}/".startswith(f"{scope}/")
    assert scope is None or not f"{own}/".startswith(f"{scope}/")
    assert scope is None or not scope.endswith((".slice", "/"))


# What is asked for


def test_grants_are_one_a_device() -> None:
    """Two rules for a device add up, and one that grants nothing is none."""
    rules = [("c", 1, 11, "r"), ("c", 1, 11, "w"), ("b", 7, 0, "rwm"), ("c", 5, 1, "")]

    assert cgroup.grants_of(rules) == ((device_filter.BLOCK, 7, 0, 7), (CHAR, 1, 11, READ | WRITE))


@pytest.mark.parametrize(
    "rule",
    [
        ("u", 1, 3, "rw"),
        ("a", 1, 3, "rw"),
        ("c", -1, 3, "rw"),
        ("c", 4096, 3, "r"),
        ("c", 1, 1 << 20, "r"),
        ("c", 1, 3, "rx"),
    ],
    ids=["type", "all", "negative", "major", "minor", "access"],
)
def test_what_is_no_device_is_refused(rule: tuple[str, int, int, str]) -> None:
    """Nothing is granted for a rule that a cgroup cannot hold, in either mode."""
    for mode in ("enforce", "best-effort"):
        with pytest.raises(DeliveryError, match="HOK250"):
            cgroup.allow(PID, [rule], cgroups_path="", mode=mode)  # type: ignore[arg-type]


# A host with files for cgroups, and a kernel in Python


class Kernel:
    """bpf(2) as it answers: programs by id, attached to directories. refuse: called with every command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.programs: dict[int, bytes] = {}
        self.attached: dict[int, list[int]] = {}
        self.above: list[int] = []
        self.flags = bpf.ALLOW_MULTI
        self.replaces = True
        self.calls: list[str] = []
        self.refuse: Callable[[str], int] = lambda _: 0
        self._descriptors: dict[int, int] = {}
        for name in (
            "query",
            "program",
            "identifier",
            "instructions",
            "load",
            "attach",
            "detach",
            "pinned",
            "pin",
        ):
            monkeypatch.setattr(bpf, name, self._counted(name))

    def add(self, program: bytes, folder: Path | None = None) -> int:
        """Load a program and attach it to a cgroup, or above all of them."""
        identifier = len(self.programs) + 100
        self.programs[identifier] = program
        where = self.above if folder is None else self.attached.setdefault(folder.stat().st_ino, [])
        where.append(identifier)
        return identifier

    def at(self, folder: Path) -> list[bytes]:
        """The programs attached to a cgroup."""
        return [self.programs[identifier] for identifier in self.attached.get(folder.stat().st_ino, [])]

    def pin(self, program: int, path: Path) -> Path:
        """Have a program pinned: a file that holds its id."""
        path.write_text(str(program))
        return path

    def pinned_at(self, path: Path) -> bytes:
        """The program that is pinned there."""
        return self.programs[int(path.read_text())]

    def _counted(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            number = self.refuse(name)
            if number:
                raise OSError(number, os.strerror(number))
            return getattr(self, f"_{name}")(*arguments, **options)

        return call

    def _open(self, identifier: int) -> int:
        descriptor = os.open("/dev/null", os.O_RDONLY)
        self._descriptors[descriptor] = identifier
        return descriptor

    def _query(self, folder: int, *, effective: bool = False) -> tuple[list[int], int]:
        own = self.attached.get(os.fstat(folder).st_ino, [])
        everywhere = [identifier for ids in self.attached.values() for identifier in ids]
        return (self.above + everywhere, 0) if effective else (list(own), self.flags)

    def _program(self, identifier: int) -> int:
        return self._open(identifier)

    def _identifier(self, descriptor: int) -> int:
        return self._descriptors[descriptor]

    def _instructions(self, descriptor: int) -> bytes:
        return self.programs[self._descriptors[descriptor]]

    def _load(self, program: bytes) -> int:
        identifier = len(self.programs) + 100
        self.programs[identifier] = program
        return self._open(identifier)

    def _attach(self, folder: int, new: int, flags: int, replaced: int | None = None) -> None:
        ids = self.attached.setdefault(os.fstat(folder).st_ino, [])
        assert flags == self.flags
        if replaced is None:
            ids[:] = [*ids, self._descriptors[new]] if flags & bpf.ALLOW_MULTI else [self._descriptors[new]]
        elif not self.replaces:
            raise OSError(errno.EINVAL, "no BPF_F_REPLACE")
        elif self._descriptors[replaced] not in ids:
            raise OSError(errno.ENOENT, "not attached")
        else:
            ids[ids.index(self._descriptors[replaced])] = self._descriptors[new]

    def _detach(self, folder: int, old: int) -> None:
        self.attached[os.fstat(folder).st_ino].remove(self._descriptors[old])

    def _pinned(self, path: str) -> int:
        return self._open(int(Path(path).read_text()))

    def _pin(self, descriptor: int, path: str) -> None:
        with open(path, "x") as file:
            file.write(str(self._descriptors[descriptor]))


class Host:
    """Files where a host has them: /proc, the two hierarchies below ``v1`` and ``v2``, a log."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "log"
        (root / "proc/self").mkdir(parents=True)
        (root / f"proc/{PID}").mkdir()
        self.v1, self.v2 = root / "v1", root / "v2"
        device = root.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        (root / "proc/self/mountinfo").write_text(
            f"1 0 {number} / {self.v1} rw - cgroup cgroup rw,devices\n"
            f"2 0 {number} / {self.v2} rw - cgroup2 none rw\n"
        )
        self.place("self", v1="/", v2="/")
        self.place(str(PID), v2=SCOPE)
        for folder in (self.v1, self.v2):
            (folder / SCOPE[1:]).mkdir(parents=True)

    def place(self, process: str, **paths: str) -> None:
        """Put a process into cgroups."""
        lines = {"v1": "5:devices:", "v2": "0::"}
        text = "".join(f"{lines[version]}{path}\n" for version, path in paths.items())
        (self.root / f"proc/{process}/cgroup").write_text(text)

    def list(self, cgroup_path: str, content: str) -> Path:
        """Write the devices.list of a cgroup of version 1, and return where it is allowed."""
        folder = self.v1 / cgroup_path[1:]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "devices.list").write_text(content)
        for name in ("devices.allow", "devices.deny"):
            (folder / name).touch()
        return folder / "devices.allow"

    def allow(self, mode: str = "enforce", rules: list[tuple[str, int, int, str]] = RULES) -> None:
        cgroup.allow(PID, rules, cgroups_path=SCOPE, mode=mode, log_to=str(self.log))  # type: ignore[arg-type]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A container in cgroup `SCOPE` of version 2 alone, without a systemd."""
    monkeypatch.setattr(cgroup, "ROOT", str(tmp_path))
    return Host(tmp_path)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """No programs; and no descriptor is open afterwards that was not before."""
    before = len(os.listdir("/proc/self/fd"))
    yield Kernel(monkeypatch)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def scope(host: Host) -> Path:
    """The directory of the container's cgroup, version 2."""
    return host.v2 / SCOPE[1:]


def failure_of(action: Callable[[], None]) -> str:
    """The code of the error that an action ends with, or nothing."""
    try:
        action()
    except DeliveryError as error:
        return error.code
    return ""


# Version 2


def test_every_program_of_the_container_is_extended(host: Host, kernel: Kernel, scope: Path) -> None:
    """All programs from the process's cgroup up to the scope say yes afterwards, and else what they said."""
    inner = scope / "container"
    inner.mkdir()
    host.place(str(PID), v2=f"{SCOPE}/container")
    originals = [kernel.programs[kernel.add(NO, folder)] for folder in (inner, scope, scope)]
    host.allow()

    assert [device_filter.split(program) for program in kernel.at(inner) + kernel.at(scope)] == [
        ((GRANT,), original) for original in originals
    ]


def test_allowing_again_changes_nothing(host: Host, kernel: Kernel, scope: Path) -> None:
    """A program that says yes already is not replaced; one that lacks a device gets that one added."""
    kernel.add(DENYING, scope)
    host.allow()
    once = dict(kernel.attached), len(kernel.programs)
    host.allow()

    assert (kernel.attached, len(kernel.programs)) == once
    host.allow(rules=[("c", 10, 229, "rw")])
    assert device_filter.split(kernel.at(scope)[0])[0] == ((CHAR, 1, 3, READ), GRANT, (CHAR, 10, 229, 6))


@pytest.mark.parametrize("programs", [[], [YES]], ids=["none", "one that allows everything"])
def test_where_nothing_denies_nothing_is_loaded(
    host: Host, kernel: Kernel, scope: Path, programs: list[bytes]
) -> None:
    """No filter, or one that says yes, is nothing to do."""
    for program in programs:
        kernel.add(program, scope)
    host.allow()

    assert "load" not in kernel.calls


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
def test_a_kernel_without_device_programs_filters_nothing(host: Host, kernel: Kernel, number: int) -> None:
    """Where the kernel does not know what is asked, there is nothing to do."""
    kernel.refuse = lambda name: number if name == "query" else 0
    host.allow()

    assert set(kernel.calls) == {"query"}


def test_each_program_is_read_once(host: Host, kernel: Kernel, scope: Path) -> None:
    """What was found out about a program holds: looking again after the exchange reads none anew."""
    for program in (DENYING, NO, YES):
        kernel.add(program, scope)
    kernel.add(YES)
    host.allow()

    assert kernel.calls.count("query") == 2 * 2
    assert kernel.calls.count("program") == kernel.calls.count("instructions") == 4


def test_before_linux_5_6_a_program_is_attached_before_the_old_one_goes(
    host: Host, kernel: Kernel, scope: Path
) -> None:
    """Without BPF_F_REPLACE the result is the same, and at no time is there no filter."""
    kernel.replaces = False
    kernel.add(DENYING, scope)
    host.allow()

    assert [device_filter.permits(program, GRANT) for program in kernel.at(scope)] == [True]
    assert [call for call in kernel.calls if call in ("attach", "detach")] == ["attach", "attach", "detach"]


@pytest.mark.parametrize("flags", [0, bpf.ALLOW_OVERRIDE], ids=["alone", "overridable"])
def test_a_program_that_is_attached_alone_stays_attached_so(
    host: Host, kernel: Kernel, scope: Path, flags: int
) -> None:
    """The kernel refuses other flags than the cgroup's, and without ALLOW_MULTI it replaces by itself."""
    kernel.flags = flags
    kernel.add(DENYING, scope)
    host.allow()

    assert [device_filter.permits(program, GRANT) for program in kernel.at(scope)] == [True]


@pytest.mark.parametrize("replaces", [True, False], ids=["5.6", "before"])
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOMEM], ids=["EPERM", "ENOMEM"])
def test_whatever_fails_leaves_the_programs_as_they_were(
    host: Host, kernel: Kernel, scope: Path, number: int, replaces: bool
) -> None:
    """Of all system calls let one after the other fail: what is attached is what was, or what was to be."""
    (scope / "container").mkdir()
    host.place(str(PID), v2=f"{SCOPE}/container")
    kernel.replaces = replaces
    for folder in (scope / "container", scope, scope):
        kernel.add(DENYING, folder)
    before = {folder: list(ids) for folder, ids in kernel.attached.items()}
    kernel.refuse = lambda _: number if len(kernel.calls) == failing else 0
    for failing in itertools.count(1):  # noqa: B007 - the lambda reads it
        kernel.calls.clear()
        failure = failure_of(host.allow)
        if failure == "":
            break
        attached = {folder: sorted(ids) for folder, ids in kernel.attached.items()}
        assert (failure in ("HOK253", "HOK258"), attached) == (True, before)

    assert failing > 15
    assert [device_filter.permits(program, GRANT) for program in kernel.at(scope)] == [True, True]


def test_a_failure_to_undo_is_said(host: Host, kernel: Kernel, scope: Path) -> None:
    """Where not even the old programs can be put back, the message says so."""
    for _ in range(2):
        kernel.add(DENYING, scope)
    kernel.refuse = lambda name: errno.EBUSY if kernel.calls.count("attach") > 1 and name == "attach" else 0

    with pytest.raises(DeliveryError, match=r"HOK258: .*could not be changed back"):
        host.allow()


def test_a_program_above_the_container_is_asked_and_left(host: Host, kernel: Kernel, scope: Path) -> None:
    """One that says no refuses the container before anything is changed; others do not matter."""
    kernel.add(DENYING, scope)
    kernel.add(device_filter.prologue([GRANT, (CHAR, 10, 229, READ | WRITE)]) + NO)
    host.allow()
    above = kernel.add(NO)
    before = dict(kernel.programs)

    with pytest.raises(DeliveryError, match=f"HOK254: program {above}, .* denies c 10:229 rw"):
        host.allow(rules=[("c", 10, 229, "rw")])
    assert kernel.programs == before


def test_a_pod_slices_program_is_never_replaced(host: Host, kernel: Kernel, scope: Path) -> None:
    """Between the scope and the root everything is shared, so its programs are only asked."""
    pod = scope.parent
    kernel.add(NO, pod)

    with pytest.raises(DeliveryError, match="HOK254"):
        host.allow()
    assert kernel.at(pod) == [NO]


@pytest.mark.parametrize(
    ("program", "above", "code_of"),
    [
        pytest.param(MAPPED, False, "HOK256", id="a map in the container's"),
        pytest.param(b"", False, "HOK256", id="the container's is not shown"),
        pytest.param(MAPPED, True, "HOK255", id="a map above"),
    ],
)
def test_a_program_that_cannot_be_understood_is_no_guess(
    host: Host, kernel: Kernel, scope: Path, program: bytes, above: bool, code_of: str
) -> None:
    """What uses maps can neither be loaded again nor judged; the container is refused with the reason."""
    kernel.add(program, None if above else scope)

    with pytest.raises(DeliveryError, match=code_of):
        host.allow()


def test_a_program_too_long_with_the_devices_is_refused(
    host: Host, kernel: Kernel, scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no kernel would take is not tried."""
    monkeypatch.setattr(device_filter, "MAX_INSTRUCTIONS", len(DENYING) // 8)
    kernel.add(DENYING, scope)

    with pytest.raises(DeliveryError, match=r"HOK256: .* more than \d+ instructions"):
        host.allow()
    assert "load" not in kernel.calls


def test_what_the_verifier_says_is_passed_on(
    host: Host, kernel: Kernel, scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused program comes with the verifier's last words, made harmless."""

    def load(_: bytes) -> int:
        raise bpf.Refused(errno.EACCES, "R2 !read_ok\x1b")

    monkeypatch.setattr(bpf, "load", load)
    kernel.add(DENYING, scope)

    with pytest.raises(DeliveryError, match=r"HOK257: .*R2 !read_ok\\u001b"):
        host.allow()


def test_programs_that_come_back_again_and_again_end_in_words(
    host: Host, kernel: Kernel, scope: Path
) -> None:
    """Where something attaches a denying program after each look, the fight is given up."""
    kernel.add(DENYING, scope)

    def refuse(name: str) -> int:
        if name == "attach":
            kernel.add(DENYING, scope)
        return 0

    kernel.refuse = refuse

    with pytest.raises(DeliveryError, match="HOK264"):
        host.allow()


def test_a_program_that_is_gone_meanwhile_is_no_failure(host: Host, kernel: Kernel, scope: Path) -> None:
    """systemd may write its program anew at any moment: then the new one is looked at."""
    kernel.add(DENYING, scope)

    def refuse(name: str) -> int:
        if name == "attach" and kernel.calls.count("attach") == 1:
            kernel.attached[scope.stat().st_ino].clear()
            kernel.add(NO, scope)
        return 0

    kernel.refuse = refuse
    host.allow()

    assert [device_filter.split(program) for program in kernel.at(scope)] == [((GRANT,), NO)]


def test_an_unknown_machine_is_refused(host: Host, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the number of the system call nothing is tried."""
    monkeypatch.setattr(bpf, "supported", lambda: False)

    with pytest.raises(DeliveryError, match="HOK259"):
        host.allow()
    assert kernel.calls == []


@pytest.mark.parametrize("name", ["query", "program", "load", "attach"])
def test_best_effort_goes_on_without_permission_and_says_so(
    host: Host, kernel: Kernel, scope: Path, name: str
) -> None:
    """As in LXC and rootless: EPERM is logged, not raised; any other failure is raised all the same."""
    kernel.add(DENYING, scope)
    kernel.refuse = lambda called: errno.EPERM if called == name else 0
    host.allow("best-effort")

    assert host.log.read_text().count("HOK253") == 1
    kernel.refuse = lambda called: errno.ENOMEM if called == name else 0
    with pytest.raises(DeliveryError, match="HOK258"):
        host.allow("best-effort")


def test_best_effort_extends_the_containers_filter_whatever_those_above_say(
    host: Host, kernel: Kernel, scope: Path
) -> None:
    """What cannot be told of a filter above is logged once, and the container's own is extended."""
    kernel.add(DENYING, scope)
    kernel.add(MAPPED)
    host.allow("best-effort")

    assert host.log.read_text().count("HOK255") == 1
    assert device_filter.permits(kernel.at(scope)[0], GRANT)


# systemd


def test_systemd_is_told_before_the_programs_are_looked_at(
    host: Host, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scope of systemd's is declared to it first, by its path, with the time that is left; no other is."""
    told: list[tuple[str, int, float]] = []

    def declare(path: str, grants: Any, root: str, deadline: float) -> tuple[str, ...]:
        told.append((path, len(kernel.calls), deadline))
        return ()

    monkeypatch.setattr(systemd, "declare", declare)
    host.allow()
    (host.v2 / "s.slice/cri-c1.scope/container").mkdir(parents=True)
    host.place(str(PID), v2="/s.slice/cri-c1.scope/container")
    kernel.calls.clear()
    cgroup.allow(PID, RULES, cgroups_path="s.slice:cri:c1", mode="enforce", deadline=7.0)

    assert told == [("/s.slice/cri-c1.scope", 0, 7.0)]


def test_what_systemd_refuses_is_refused_or_under_best_effort_only_logged(
    host: Host, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container's filter is extended under best-effort only: it would be lost with a daemon-reload."""

    def declare(*_: Any) -> tuple[str, ...]:
        raise DeliveryError("HOK260", "no answer")

    monkeypatch.setattr(systemd, "declare", declare)
    folder = host.v2 / "s.slice/cri-c1.scope"
    folder.mkdir(parents=True)
    host.place(str(PID), v2="/s.slice/cri-c1.scope")
    kernel.add(DENYING, folder)

    with pytest.raises(DeliveryError, match="HOK260"):
        cgroup.allow(PID, RULES, cgroups_path="s.slice:cri:c1", mode="enforce")
    assert kernel.at(folder) == [DENYING]
    cgroup.allow(PID, RULES, cgroups_path="s.slice:cri:c1", mode="best-effort", log_to=str(host.log))
    assert device_filter.permits(kernel.at(folder)[0], GRANT)
    assert "HOK260" in host.log.read_text()


class Unit:
    """A scope with a program of its own, which is pinned, and beside it another that is."""

    path = "/s.slice/cri-c1.scope"

    def __init__(self, host: Host, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel = kernel
        self.log = host.log
        self.folder = host.v2 / self.path[1:]
        self.folder.mkdir(parents=True)
        host.place(str(PID), v2=self.path)
        self.bpffs = host.root / "bpffs"
        self.bpffs.mkdir()
        attached = kernel.add(DENYING, self.folder)
        other = kernel.add(NO)
        kernel.above.clear()
        self.pins = [kernel.pin(attached, self.bpffs / "c1_scope"), kernel.pin(other, self.bpffs / "more")]
        monkeypatch.setattr(systemd, "declare", lambda *_: tuple(map(str, self.pins)))

    def allow(self, mode: Any = "enforce", rules: Any = RULES) -> None:
        cgroup.allow(PID, rules, cgroups_path="s.slice:cri:c1", mode=mode, log_to=str(self.log))

    def state(self) -> Any:
        """The programs that are attached, and those that are pinned, by name."""
        pinned = {path.name: self.kernel.pinned_at(path) for path in self.bpffs.iterdir()}
        return self.kernel.at(self.folder), pinned


@pytest.fixture
def unit(host: Host, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Unit:
    """A container in a scope of systemd's, which takes the filters from two places."""
    return Unit(host, kernel, monkeypatch)


def test_the_program_that_systemd_reads_from_a_bpffs_is_replaced_there(unit: Unit) -> None:
    """crun pins the unit's filter; what systemd attaches from there next time says yes too."""
    for mode in ("enforce", "best-effort"):
        unit.allow(mode)

    (attached,), pinned = unit.state()
    assert pinned.keys() == {"c1_scope", "more"}
    assert pinned["c1_scope"] == attached
    assert [device_filter.split(program) for program in pinned.values()] == [
        (((CHAR, 1, 3, READ), GRANT), NO) if program == attached else ((GRANT,), NO)
        for program in pinned.values()
    ]
    assert unit.kernel.calls.count("load") == 2


def test_a_pin_that_a_killed_process_left_is_in_nobodys_way(unit: Unit) -> None:
    """The name under which a program waits for its place is free again."""
    unit.kernel.pin(100, unit.bpffs / "c1_scope_cdi_courier")
    unit.allow()

    assert unit.state()[1].keys() == {"c1_scope", "more"}


def test_whatever_fails_leaves_the_pinned_programs_as_they_were(
    unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all calls let one after the other fail: attached and pinned is what was, or all that was to be."""
    kernel = unit.kernel
    for name in ("rename", "unlink"):
        real = getattr(os, name)

        def call(*arguments: Any, real: Any = real, name: str = name) -> Any:
            kernel.calls.append(name)
            if number := kernel.refuse(name):
                raise OSError(number, os.strerror(number))
            return real(*arguments)

        monkeypatch.setattr(os, name, call)
    before = unit.state()
    kernel.refuse = lambda _: errno.ENOMEM if len(kernel.calls) == failing else 0
    for failing in itertools.count(1):  # noqa: B007 - the lambda reads it
        kernel.calls.clear()
        failure = failure_of(unit.allow)
        if failure == "":
            break
        assert (failure in ("HOK258", "HOK263"), unit.state()) == (True, before)

    assert failing > 20
    assert [device_filter.permits(program, GRANT) for program in unit.state()[1].values()] == [True, True]


def test_a_pinned_program_that_cannot_be_read_is_refused_in_either_mode(unit: Unit) -> None:
    """What systemd will attach next cannot be left to chance."""
    before = unit.state()
    unit.kernel.refuse = lambda called: errno.EPERM if called == "pinned" else 0

    with pytest.raises(DeliveryError, match="HOK263"):
        unit.allow("best-effort", [("c", 9, 9, "r")])
    assert unit.state() == before


# Version 1 and where both are


def test_the_list_of_version_1_gets_the_device(host: Host, kernel: Kernel) -> None:
    """One line in devices.allow of every cgroup of the container, from above; programs are looked at too."""
    allow = host.list(SCOPE, "c 1:3 rwm\n")
    inner = host.list(f"{SCOPE}/x", "c 1:3 rwm\n")
    host.place(str(PID), v1=f"{SCOPE}/x", v2="/")
    host.allow()

    assert allow.read_text() == inner.read_text() == "c 1:11 rw"
    assert set(kernel.calls) == {"query"}


@pytest.mark.parametrize("mode", ["enforce", "best-effort"])
def test_a_refusal_by_version_1_stops_version_2_only_under_enforce(
    host: Host, kernel: Kernel, scope: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Each version is tolerated by itself: the programs are extended whether or not the list could be."""
    host.list(SCOPE, "c 1:3 rwm\n").unlink()
    host.place(str(PID), v1=SCOPE, v2=SCOPE)
    kernel.add(DENYING, scope)

    def write(folder: str, name: str, grant: Any) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(device_list, "_write", write)

    assert failure_of(lambda: host.allow(mode)) == ("HOK253" if mode == "enforce" else "")
    assert device_filter.permits(kernel.at(scope)[0], GRANT) == (mode == "best-effort")
    assert mode == "enforce" or host.log.read_text().count("HOK253") == 1


def test_a_version_that_is_refused_and_tolerated_is_left_as_it_was(
    host: Host, kernel: Kernel, scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was changed in it before the refusal is changed back, and what was changed in the other stays."""
    allow = host.list(SCOPE, "c 1:3 rwm\n")
    host.place(str(PID), v1=SCOPE, v2=SCOPE)
    for _ in range(2):
        kernel.add(DENYING, scope)
    before = kernel.at(scope)
    kernel.refuse = lambda name: errno.EPERM if name == "attach" and kernel.calls.count(name) == 2 else 0
    host.allow("best-effort")

    assert kernel.at(scope) == before
    assert (allow.read_text(), allow.with_name("devices.deny").read_text()) == ("c 1:11 rw", "")
    assert host.log.read_text().count("HOK253") == 1


def test_where_both_versions_filter_both_are_changed_or_none(host: Host, kernel: Kernel, scope: Path) -> None:
    """A failure in the programs takes the device off the list again, but only what was put there."""
    allow = host.list(SCOPE, "c 1:11 r\n")
    host.place(str(PID), v1=SCOPE, v2=SCOPE)
    kernel.add(MAPPED, scope)

    with pytest.raises(DeliveryError, match="HOK256"):
        host.allow()
    assert (allow.read_text(), allow.with_name("devices.deny").read_text()) == ("c 1:11 rw", "c 1:11 w")


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        ("c 1:3 rwm\n", True),
        ("a *:* rwm\n", False),
        ("c 1:* rw\nb 1:11 m\n", False),
        ("c *:11 r\nc 1:11 w\n", False),
    ],
    ids=["not allowed", "everything", "every minor", "in two lines"],
)
def test_a_shared_list_is_read_and_not_written(
    host: Host, kernel: Kernel, content: str, refused: bool
) -> None:
    """A container in its runtime's cgroup gets what that has; the cgroup of others is not opened for it."""
    allow = host.list("/engine", content)
    for process in ("self", str(PID)):
        host.place(process, v1="/engine", v2="/")

    if refused:
        with pytest.raises(DeliveryError, match="HOK252"):
            host.allow()
        host.allow("best-effort")
        assert "HOK252" in host.log.read_text()
    else:
        host.allow()
    assert allow.read_text() == ""


@pytest.mark.parametrize("number", [errno.EPERM, errno.EROFS, errno.EACCES], ids=["EPERM", "EROFS", "EACCES"])
def test_a_list_that_may_not_be_written_is_refused_or_logged(
    host: Host, kernel: Kernel, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """EPERM is also the answer where the cgroup above does not have the device."""
    host.list(SCOPE, "c 1:3 rwm\n")
    host.place(str(PID), v1=SCOPE, v2="/")

    def write(folder: str, name: str, grant: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(device_list, "_write", write)

    with pytest.raises(DeliveryError, match="HOK253: this process may not allow c 1:11 rw"):
        host.allow()
    host.allow("best-effort")
    assert "HOK253" in host.log.read_text()


def test_a_list_that_may_not_be_written_does_not_matter_where_the_device_is_on_it(
    host: Host, kernel: Kernel
) -> None:
    """A read-only hierarchy that allows the device already is no failure."""
    host.list(SCOPE, "c 1:11 rwm\n").unlink()
    host.place(str(PID), v1=SCOPE, v2="/")
    host.allow()

    assert not (host.v1 / SCOPE[1:] / "devices.allow").exists()


def test_a_device_that_a_list_does_not_take_is_an_error(host: Host, kernel: Kernel) -> None:
    """What is neither permission nor success is raised in either mode."""
    host.list(SCOPE, "c 1:3 rwm\n").unlink()
    host.place(str(PID), v1=SCOPE, v2="/")

    with pytest.raises(DeliveryError, match="HOK257"):
        host.allow("best-effort")


# What is not there


def test_a_process_that_is_gone_is_said(host: Host, kernel: Kernel) -> None:
    """Without /proc/PID there is nothing to change."""
    (host.root / f"proc/{PID}/cgroup").unlink()

    with pytest.raises(DeliveryError, match="HOK251"):
        host.allow()


@pytest.mark.parametrize("path", ["/../other/c1", "/kubepods/gone"], ids=["beyond the namespace", "removed"])
def test_a_cgroup_that_cannot_be_seen_is_said(host: Host, kernel: Kernel, path: str) -> None:
    """The runtime must run where the container's cgroup is visible."""
    host.place(str(PID), v2=path)

    with pytest.raises(DeliveryError, match="HOK251"):
        host.allow()


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_mount_that_another_one_hides_does_not_count(host: Host, kernel: Kernel, version: str) -> None:
    """The mount point must be of that file system; what the runtime has there itself is of no interest."""
    path = host.root / "proc/self/mountinfo"
    lines = path.read_text().splitlines()
    hidden = [line.replace(line.split()[2], "0:1") if f"/{version} " in line else line for line in lines]
    path.write_text("\n".join(hidden))
    host.list(SCOPE, "c 1:11 rwm\n")
    host.place(str(PID), **{"v1": SCOPE, "v2": SCOPE, version: "/"})
    host.allow()

    host.place(str(PID), **{version: SCOPE})
    with pytest.raises(DeliveryError, match="HOK251: no mounted hierarchy"):
        host.allow()


def test_a_mount_that_begins_below_the_root_is_taken_off(host: Host, kernel: Kernel) -> None:
    """In a container that has its own cgroup mounted as the root, paths begin with that cgroup's."""
    path = host.root / "proc/self/mountinfo"
    path.write_text(path.read_text().replace(f" / {host.v2} ", f" /docker/outer {host.v2} "))
    host.place(str(PID), v2=f"/docker/outer{SCOPE}")
    folder = host.v2 / SCOPE[1:]
    kernel.add(DENYING, folder)
    host.allow()

    assert device_filter.permits(kernel.at(folder)[0], GRANT)


def test_it_loads_only_light_modules() -> None:
    """A bare interpreter loads the closure of the allowed modules, and of the product what is light."""
    allowed = "json, os, stat, errno, ctypes, fcntl, _socket, fnmatch, time, __future__"
    product = {str(Path(str(module.__file__)).parents[1]) for module in (cdi_courier, cdi_courier_oci_hook)}
    loaded = [
        subprocess.run(
            [
                os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
                *("-I", "-S", "-c"),
                f"import sys; sys.path += {sorted(product)!r}; import {what}; print(*sys.modules)",
            ],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.split()
        for what in ("cdi_courier_oci_hook.live.cgroup", allowed)
    ]

    own = (
        "bpf",
        "cgroup",
        "dbus",
        "device_filter",
        "device_list",
        "device_programs",
        "mountinfo",
        "refusals",
        "systemd",
    )
    assert set(loaded[0]) - set(loaded[1]) == {
        *("cdi_courier", "cdi_courier.errors"),
        *("cdi_courier_oci_hook", "cdi_courier_oci_hook.live", "cdi_courier_oci_hook.log"),
        *(f"cdi_courier_oci_hook.live.{name}" for name in own),
    }


def test_no_rules_are_nothing_to_do() -> None:
    """Without devices nothing is looked at, not even the process."""
    cgroup.allow(-1, [], cgroups_path="", mode="enforce")
