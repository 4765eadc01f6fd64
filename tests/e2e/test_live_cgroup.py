"""Real runtimes' containers get devices after they were created, and nothing but those."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bpf_code import EXIT, NO, YES, code
from support.oci import LAYOUTS, RUNTIMES, Container, OciHost
from support.packages import Packages

pytestmark = pytest.mark.runtime

GRANTED = "1:11"  # kmsg, which anybody may open to write
MORE = "10:237"  # loop-control
DENIED = "Operation not permitted"
CAP_SYS_RESOURCE = 24

ALLOW = """
from cdi_courier.errors import CourierError
from cdi_courier_oci_hook.live import bpf, cgroup
import os
{seam}
try:
    cgroup.allow({pid}, {rules}, cgroups_path={path!r}, mode={mode!r}, log_to={log!r})
except CourierError as error:
    print(error.code)
"""
QUERY = """
import json, os
from cdi_courier_oci_hook.live import bpf
folder = os.open({folder!r}, os.O_RDONLY)
print(json.dumps([[number, bpf.instructions(bpf.program(number)).hex()] for number in bpf.query(folder)[0]]))
"""
ATTACH = """
import os
from cdi_courier_oci_hook.live import bpf
os.makedirs({folder!r}, exist_ok=True)
bpf.attach(os.open({folder!r}, os.O_RDONLY), bpf.load(bytes.fromhex({program!r})), bpf.ALLOW_MULTI)
"""
NO_EXIT = "real = bpf._load; bpf._load = lambda code, log: real(code[:-8], log)"
# No to opening what has major number 10; nodes may be made, as runtimes let them.
NOT_MISC = (
    code((0x61, 2, 1, 0, 0), (0x74, 2, 0, 0, 16), (0x15, 2, 0, 4, 1), (0x61, 2, 1, 4, 0), (0x55, 2, 0, 2, 10))
    + NO
    + YES
)


COMBINATIONS = [
    pytest.param(runtime, layout, id=f"{runtime} {layout}".replace(" ", "-"))
    for runtime in RUNTIMES
    for layout in LAYOUTS
    # crun wants a host that has one of the two.
    if not (runtime.startswith("crun") and layout == "hybrid")
]


@pytest.fixture(scope="module")
def hosts(packages: Packages) -> Iterator[dict[str, OciHost]]:
    """A host of each layout."""
    with OciHost(packages, "v1") as v1, OciHost(packages, "v2") as v2, OciHost(packages, "hybrid") as hybrid:
        yield {"v1": v1, "v2": v2, "hybrid": hybrid}


@pytest.fixture
def unified(hosts: dict[str, OciHost]) -> OciHost:
    """A host with version 2 alone."""
    return hosts["v2"]


def allow(
    container: Container, *devices: str, access: str = "rw", mode: str = "enforce", seam: str = ""
) -> str:
    """Allow character devices to a container as the hook does; returns the error's code. seam: Python."""
    rules = [("c", *map(int, device.split(":")), access) for device in devices]
    script = ALLOW.format(
        pid=container.pid,
        rules=rules,
        path=container.cgroups_path,
        mode=mode,
        seam=seam,
        log=str(container.host.root / "log"),
    )
    return container.host.python(script).stdout.strip()


def programs(host: OciHost, cgroup: str) -> list[list[object]]:
    """The ids and instructions of the programs attached to a cgroup."""
    answer: list[list[object]] = json.loads(host.python(QUERY.format(folder=str(host.folder(cgroup)))).stdout)
    return answer


def attach(host: OciHost, cgroup: str, program: bytes) -> None:
    """Attach a program to a cgroup, which is made if it is not there."""
    host.python(ATTACH.format(folder=str(host.folder(cgroup)), program=program.hex()))


def lacks(runtime: str, layout: str) -> str:
    """Why this runtime cannot create containers on this machine; empty if it can."""
    effective = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    if runtime == "crun 1.8" and layout == "v2" and not effective >> CAP_SYS_RESOURCE & 1:
        return "crun 1.8 raises RLIMIT_MEMLOCK for its own device program, which needs CAP_SYS_RESOURCE"
    return ""


@pytest.mark.parametrize(("runtime", "layout"), COMBINATIONS)
def test_a_granted_device_works_and_another_does_not(
    hosts: dict[str, OciHost], runtime: str, layout: str
) -> None:
    """Before, both are refused; after, the granted one opens."""
    if reason := lacks(runtime, layout):
        pytest.skip(reason)
    with hosts[layout].container(runtime) as container:
        container.start()
        before = [container.use(GRANTED, "w"), container.use(MORE)]
        failure = allow(container, GRANTED)
        after = [container.use(GRANTED, "w"), container.use(MORE)]

        assert (before, failure, after) == ([DENIED, DENIED], "", ["opened", DENIED])
        # That it was refused was the filter's doing: granted, it opens as well.
        assert (allow(container, MORE), container.use(MORE)) == ("", "opened")


@pytest.mark.parametrize("layout", ["v1", "v2"])
@pytest.mark.parametrize("runtime", ["runc 1.3", "crun 1.28"])
def test_starting_a_container_keeps_what_it_was_granted_before(
    hosts: dict[str, OciHost], runtime: str, layout: str
) -> None:
    """A runtime writes the filter when it creates the container, and not again when it starts it."""
    with hosts[layout].container(runtime) as container:
        allow(container, GRANTED)
        container.start()

        assert [container.use(GRANTED, "w"), container.use(MORE)] == ["opened", DENIED]


@pytest.mark.parametrize("layout", ["v1", "v2"])
def test_only_the_granted_access_is_allowed(hosts: dict[str, OciHost], layout: str) -> None:
    """A device that may be read cannot be written, until that is granted as well."""
    with hosts[layout].container("runc 1.3") as container:
        container.start()
        allow(container, MORE, access="r")
        reading = [container.use(MORE, access) for access in ("r", "w", "rw")]
        allow(container, MORE, access="w")

        assert reading == ["opened", DENIED, DENIED]
        assert [container.use(MORE, access) for access in ("r", "w", "rw")] == ["opened"] * 3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("runtime", ["runc 1.1", "runc 1.3"])
def test_an_update_of_the_container_keeps_the_device(
    hosts: dict[str, OciHost], runtime: str, layout: str
) -> None:
    """What kubelet's resizing does leaves the device filter alone."""
    with hosts[layout].container(runtime) as container:
        container.start()
        allow(container, GRANTED)
        # Where the machine's controllers are elsewhere the limit itself cannot be set.
        container.call("update", "--pids-limit", "50", container.name, check=layout != "v2")

        assert [container.use(GRANTED, "w"), container.use(MORE)] == ["opened", DENIED]


def test_what_the_runtime_allowed_stays_allowed(unified: OciHost) -> None:
    """The runtime's own devices, and those of the container's config, work as before."""
    rule = {"allow": True, "type": "c", "major": 10, "minor": 237, "access": "rw"}
    with unified.container("runc 1.3", devices=[rule]) as container:
        container.start()
        before = [container.use(device) for device in ("1:3", "1:9", MORE)]
        allow(container, GRANTED)

        assert before == [container.use(device) for device in ("1:3", "1:9", MORE)] == ["opened"] * 3


@pytest.mark.parametrize("runtime", ["runc 1.1", "runc 1.3", "crun 1.28"])
def test_allowing_twice_loads_nothing_the_second_time(unified: OciHost, runtime: str) -> None:
    """The same program stays attached; with another device there is still one, with one prologue."""
    with unified.container(runtime) as container:
        (original,) = programs(unified, container.cgroups_path)
        allow(container, GRANTED)
        (once,) = programs(unified, container.cgroups_path)
        allow(container, GRANTED)
        (twice,) = programs(unified, container.cgroups_path)
        allow(container, MORE)
        (more,) = programs(unified, container.cgroups_path)

        assert once == twice
        assert str(once[1]).endswith(str(original[1]))
        assert len(str(more[1])) - len(str(once[1])) == 8 * 8 * 2  # a block, in hexadecimal digits


def test_of_several_programs_each_says_yes(unified: OciHost) -> None:
    """systemd and a runtime may both have one, on the container's cgroup or on one within it."""
    with unified.container("runc 1.3") as container:
        attach(unified, container.cgroups_path, NOT_MISC)
        container.start()
        failure = allow(container, MORE)

        assert (failure, len(programs(unified, container.cgroups_path))) == ("", 2)
        assert [container.use(MORE), container.use("10:200"), container.use(GRANTED, "w")] == [
            "opened",
            DENIED,
            DENIED,
        ]


def test_a_denial_above_is_refused_and_nothing_changed(unified: OciHost) -> None:
    """What the pod's cgroup denies is not the container's to allow; under best-effort that is logged."""
    pod = f"{unified.cgroup}/pod"
    attach(unified, pod, NOT_MISC)
    with unified.container("runc 1.3", cgroups_path=f"{pod}/c") as container:
        container.start()
        before = [programs(unified, path) for path in (pod, container.cgroups_path)]
        refused = allow(container, MORE)
        after = [programs(unified, path) for path in (pod, container.cgroups_path)]

        assert (refused, after) == ("HOK254", before)
        assert (allow(container, GRANTED), container.use(GRANTED, "w")) == ("", "opened")
        assert (allow(container, MORE, mode="best-effort"), container.use(MORE)) == ("", DENIED)
    assert "HOK254: " in (unified.root / "log").read_text()


def test_a_denial_above_is_refused_by_version_1_itself(hosts: dict[str, OciHost]) -> None:
    """The kernel takes no device onto a list that the one above does not have."""
    host = hosts["v1"]
    pod = host.folder(f"{host.cgroup}/pod")
    with host.container("runc 1.3", cgroups_path=f"{host.cgroup}/pod/c") as container:
        container.start()
        host.run("sh", "-c", f"echo c 10:237 rw > {pod}/devices.deny")
        before = host.shell(f"cat {pod}/c/devices.list")

        assert allow(container, GRANTED, MORE) == "HOK253"
        assert host.shell(f"cat {pod}/c/devices.list") == before
        assert (allow(container, GRANTED, MORE, mode="best-effort"), container.use(MORE)) == ("", DENIED)


@pytest.mark.parametrize(
    ("seam", "expected"),
    [
        pytest.param(
            "real = bpf.attach\n"
            "def attach(cgroup, new, flags, replaced=None):\n"
            "    if replaced is not None: raise OSError(22, 'before Linux 5.6')\n"
            "    real(cgroup, new, flags)\n"
            "bpf.attach = attach",
            "",
            id="no BPF_F_REPLACE",
        ),
        pytest.param(NO_EXIT, "HOK257", id="refused by the verifier"),
        pytest.param(f"{NO_EXIT}; bpf.LOG_SIZE = 128", "HOK257", id="a log too small"),
        pytest.param(
            "import ctypes; ctypes.CDLL(None).prctl(24, 21, 0, 0, 0)\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)",
            "HOK253",
            id="not root",
        ),
        pytest.param("bpf._NUMBERS.clear()", "HOK259", id="an unknown machine"),
    ],
)
def test_a_failure_leaves_the_programs_and_the_fallback_replaces_them(
    unified: OciHost, seam: str, expected: str
) -> None:
    """The kernel's own refusals come as errors in words; where it only lacks a flag, it works without."""
    with unified.container("runc 1.3") as container:
        attach(unified, container.cgroups_path, NOT_MISC)
        container.start()
        before = programs(unified, container.cgroups_path)
        failure = allow(container, MORE, seam=seam)
        after = programs(unified, container.cgroups_path)

        assert failure == expected
        assert len(after) == len(before)
        assert (after == before, container.use(MORE)) == ((True, DENIED) if expected else (False, "opened"))


def test_the_judge_of_programs_agrees_with_the_kernel(unified: OciHost, tmp_path: Path) -> None:
    """For arithmetic of all kinds, the kernel and the judge say the same to every use of every device."""
    cgroup = f"{unified.cgroup}/judge"
    folder = unified.folder(cgroup)
    seed = random.Random(20)
    written = [_arithmetic(seed).hex() for _ in range(60)]
    nodes = {f"{kind}{major}-{minor}": (kind, major, minor) for kind, major, minor in (
        ("c", 1, 3), ("c", 1, 11), ("c", 10, 237), ("b", 7, 0), ("b", 259, 1048575), ("c", 4095, 0)
    )}  # fmt: skip
    for name, (kind, major, minor) in nodes.items():
        mode = {"c": 0o020666, "b": 0o060666}[kind]
        os.mknod(tmp_path / name, mode, os.makedev(major, minor))
    script = f"""
import json, os, time
from cdi_courier_oci_hook.live import bpf, device_filter
os.makedirs({str(folder)!r}, exist_ok=True)
folder = os.open({str(folder)!r}, os.O_RDONLY)
home = os.open('/sys/fs/cgroup/cgroup.procs', os.O_WRONLY)
open({str(folder)!r} + '/cgroup.procs', 'w').write('0')
different = []
answers = [0, 0]
for text in {written!r}:
    loaded = bpf.load(bytes.fromhex(text))
    bpf.attach(folder, loaded, bpf.ALLOW_MULTI)
    shown = bpf.instructions(loaded)
    for name, (kind, major, minor) in {nodes!r}.items():
        for access, mode in ((2, os.R_OK), (4, os.W_OK), (6, os.R_OK | os.W_OK)):
            real = os.access({str(tmp_path)!r} + '/' + name, mode)
            answers[real] += 1
            judged = device_filter.verdict(shown, device_filter.TYPES[kind], major, minor, access)
            if judged != real:
                different.append([text, name, access, real, judged])
    bpf.detach(folder, loaded)
os.write(home, b'0')
print(json.dumps([different, min(answers)]))
"""
    different, rarer = json.loads(unified.python(script).stdout)

    assert different == []
    assert rarer > 50  # neither answer is the answer to nearly everything


def _arithmetic(seed: random.Random) -> bytes:
    """A random program that computes on its context as every verifier allows, and answers with a bit."""
    lines = [(0x61, 2, 1, 0, 0), (0x61, 3, 1, 4, 0), (0x61, 4, 1, 8, 0), (0xB7, 0, 0, 0, seed.randint(-9, 9))]
    registers = (0, 2, 3, 4)
    for _ in range(seed.randint(3, 15)):
        wide = seed.choice([0x07, 0x04])
        target, source = seed.choice(registers), seed.choice(registers)
        operation = seed.choice(
            [0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0]
        )
        if operation in (0x60, 0x70, 0xC0):
            lines.append((operation | wide, target, 0, 0, seed.randint(0, 31)))
        elif operation == 0x80:
            lines.append((operation | wide, target, 0, 0, 0))
        elif seed.random() < 0.5 and operation not in (0x30, 0x90):
            lines.append((operation | wide | 8, target, source, 0, 0))
        else:
            lines.append((operation | wide, target, 0, 0, seed.choice([1, 3, 11, 237, -1, -237, 1 << 20])))
        if seed.random() < 0.5:
            compare = seed.choice([0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0xA0, 0xB0, 0xC0, 0xD0])
            by = seed.choice([0x05, 0x06])
            # Over one instruction, which is arithmetic and a whole one.
            lines.append((compare | by, target, 0, 1, seed.choice([0, 1, 10, -1, 237])))
            lines.append((0x0F, 0, source, 0, 0))
    fold = [(0xBF, 5, 0, 0, 0), (0x77, 5, 0, 0, 7), (0xAF, 0, 5, 0, 0), (0x57, 0, 0, 0, 1)]
    return code(*lines, *fold, EXIT)


def test_a_process_that_has_ended_is_refused(unified: OciHost) -> None:
    """Between create and here a container may be killed; that is an error in words."""
    with unified.container("runc 1.3") as container:
        process = subprocess.Popen(["true"])
        process.wait()
        container.pid = process.pid

        assert allow(container, GRANTED) == "HOK251"
