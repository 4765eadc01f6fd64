"""Delivery by edits on real containerds: every kind of edit, as the container sees it, and what is refused.

That pods get by edits what they get by names is in `test_nri`.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import host
from support.containerd import SUITES_1_7
from support.cri import USERNS_ROOT, CriError
from support.lab import NEWER, Lab
from support.packages import Packages
from support.scenario import (
    ALL,
    DOMAIN,
    GRANTED_NAMESPACE,
    HOSTS,
    KIND,
    OPEN_KMSG,
    annotated,
    devices_of,
    marker,
    on_host,
    refusal,
    run,
    serving,
    shell,
    spec,
)
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

KMSG, FUSE = os.makedev(1, 11), os.makedev(10, 229)  # no container may open them unless granted
IN_KMSG, IN_FUSE = "1:b", "a:e5"  # the same as `stat -c %t:%T` writes them

NODE = "/dev/courier0"


@pytest.fixture(params=[name for name in HOSTS if name.endswith("-edits")])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Every host that is sent edits in turn, clean."""
    yield from on_host(request, request.param)


@pytest.fixture
def folder(lab: Lab) -> Iterator[Path]:
    """A folder of the host for one test, what is mounted in it included."""
    path = lab.root / "folder"
    path.mkdir()
    yield path
    host.unmount_below(path)
    subprocess.run(["rm", "-rf", path], check=True)


def one(edits: Mapping[str, Any], version: str = "0.6.0") -> dict[str, Any]:
    """A spec file whose one device `ALL` has these edits, and ``COURIER_ALL=yes`` unless they set env."""
    return {**spec(all=edits), "cdiVersion": version}


def given(lab: Lab, edits: Mapping[str, Any], version: str = "0.6.0", **options: Any) -> str:
    """A container that has been given the edits. options: as in `run`."""
    lab.write_spec("all.json", one(edits, version))
    serving(lab)
    return run(lab, annotated(lab, pod=ALL), **options)


def make_node(path: Path, device: int, mode: int = 0o600) -> Path:
    os.mknod(path, stat.S_IFCHR | mode, device)
    path.chmod(mode)  # whatever the umask is
    return path


def numbers(lab: Lab, container: str, path: str = NODE) -> str:
    return shell(lab, container, f"stat -c %t:%T {path}")[1].strip()


def read(lab: Lab, container: str, path: str) -> str:
    """A file's text in the container; the error in words if it cannot be read."""
    return shell(lab, container, f"cat {path}")[1]


# Spec files: with edits nobody else reads them, so there is nothing to wait for


def seen(what: str) -> str:
    return json.dumps(one({"env": [f"SEEN={what}"]}))


def rewritten(lab: Lab, path: Path) -> None:
    path.write_text(seen("after"))


def rewritten_to_the_same_length(lab: Lab, path: Path) -> None:
    path.write_text(path.read_text().replace("before", "after "))


def renamed_over(lab: Lab, path: Path) -> None:
    new = path.with_name("new.tmp")
    new.write_text(seen("after"))
    new.rename(path)


def moved_in(lab: Lab, path: Path) -> None:
    new = lab.root / "new"
    new.write_text(seen("after"))
    new.rename(lab.cdi_dirs[1] / "moved.json")


def symlinked(lab: Lab, path: Path) -> None:
    target = lab.root / "target"
    target.write_text(seen("after"))
    (lab.cdi_dirs[1] / "link.json").symlink_to(target)


def link_renamed_over(lab: Lab, path: Path) -> None:
    target = lab.root / "target"
    target.write_text(seen("after"))
    link = path.with_name("link.tmp")
    link.symlink_to(target)
    link.rename(path)


@pytest.mark.parametrize(
    "change",
    [
        rewritten,
        rewritten_to_the_same_length,
        renamed_over,
        moved_in,
        symlinked,
        link_renamed_over,
    ],
    ids=lambda change: change.__name__,
)
def test_the_very_next_container_sees_a_change_of_spec_files(
    lab: Lab, change: Callable[[Lab, Path], None]
) -> None:
    """However a file gets its new content, the container created next has it, without any waiting."""
    path = lab.write_spec("all.json", seen("before"))
    serving(lab)
    pod = annotated(lab, pod=ALL)

    before = run(lab, pod, "before")
    change(lab, path)
    after = run(lab, pod, "after")

    assert shell(lab, before, "echo $SEEN") == (0, "before\n")
    assert shell(lab, after, "echo $SEEN") == (0, "after\n")


def test_the_very_next_container_sees_what_a_symbolic_link_s_target_has_become(lab: Lab) -> None:
    """A link in the directory stays the same while the file that it names is written anew."""
    target = lab.root / "target"
    target.write_text(seen("before"))
    (lab.cdi_dirs[0] / "all.json").symlink_to(target)
    serving(lab)
    pod = annotated(lab, pod=ALL)

    before = run(lab, pod, "before")
    target.write_text(seen("after"))
    after = run(lab, pod, "after")

    assert shell(lab, before, "echo $SEEN") == (0, "before\n")
    assert shell(lab, after, "echo $SEEN") == (0, "after\n")


def test_an_added_file_is_seen_and_a_deleted_one_is_forgotten_at_once(lab: Lab) -> None:
    """A device exists exactly as long as the file that defines it."""
    serving(lab)
    pod = annotated(lab, pod=ALL)

    too_early = refusal(lab, pod)
    path = lab.write_spec("all.json", seen("added"))
    container = run(lab, pod)
    path.unlink()
    too_late = refusal(lab, pod, "c2")

    assert shell(lab, container, "echo $SEEN") == (0, "added\n")
    assert "CDI014: " in too_early
    assert "CDI014: " in too_late


def test_the_very_next_container_sees_a_directory_put_in_the_place_of_another(lab: Lab, folder: Path) -> None:
    """It is the directory's path that counts, also where it leads by a symbolic link."""
    current = folder / "current"
    for name in ("before", "after"):
        (folder / name).mkdir()
        (folder / name / "all.json").write_text(seen(name))
    current.symlink_to("before")
    serving(lab, {"cdi": {"dirs": [str(current)]}})
    pod = annotated(lab, pod=ALL)

    before = run(lab, pod, "before")
    (folder / "link").symlink_to("after")
    (folder / "link").rename(current)
    after = run(lab, pod, "after")

    assert shell(lab, before, "echo $SEEN") == (0, "before\n")
    assert shell(lab, after, "echo $SEEN") == (0, "after\n")


def test_a_file_that_takes_too_long_to_read_refuses_who_asks_and_nobody_else(lab: Lab) -> None:
    """While it is being read no container starts without its device, and afterwards the next one has it."""
    path = lab.write_spec("all.json", seen("before"))
    # A tenth of the runtime's patience is 0.2 s, which so much YAML takes several times.
    courier = serving(lab, {"nri": {"deadline": 0.1}})
    pod = annotated(lab, container_c1=ALL)
    others = "".join(f"- {{name: d{number}, containerEdits: {{env: [A=1]}}}}\n" for number in range(20_000))
    ours = "- {name: all, containerEdits: {env: [SEEN=after]}}\n"
    path.unlink()
    lab.write_spec("all.yaml", f"cdiVersion: 0.6.0\nkind: {KIND}\ndevices:\n{others}{ours}")

    late = refusal(lab, pod)
    plain = run(lab, pod, "does-not-ask")
    refusals = []

    def create() -> str:
        try:
            return lab.cri.create_container(pod, "c1")
        except CriError as error:
            refusals.append(error.message)
            return ""

    container = wait_for(create, 60, "the spec file to be read")
    lab.cri.start(container)

    assert "NRI015: " in late
    assert [text for text in refusals if "NRI015: " not in text] == []
    assert shell(lab, plain, "echo $SEEN") == (0, "\n")
    assert shell(lab, container, "echo $SEEN") == (0, "after\n")
    assert courier.running


def test_a_runtime_whose_own_cdi_is_off_serves_edits_as_well(packages: Packages) -> None:
    """As with containerd 1.7 unless it is configured: nothing of what is sent is CDI to the runtime."""
    with Lab(SUITES_1_7, packages=packages, cdi=False) as lab:
        lab.delivery = "auto"
        container = given(lab, {"deviceNodes": [{"path": NODE, "hostPath": "/dev/fuse"}]})

        assert numbers(lab, container) == IN_FUSE
        assert shell(lab, container, f"exec 3> {NODE}") == (0, "")
        assert marker(lab, container) == f"injected:{ALL}"


# Mounts


def mount_of(lab: Lab, container: str, path: str) -> tuple[set[str], set[str]]:
    """Options and kinds of propagation (``shared``, ``master``; none is private) of a container's mount."""
    lines = [line.split() for line in read(lab, container, "/proc/self/mountinfo").splitlines()]
    words = next(words for words in lines if words[4] == path)
    return set(words[5].split(",")), {word.partition(":")[0] for word in words[6 : words.index("-")]}


def test_a_read_only_mount_can_be_read_only(lab: Lab, folder: Path) -> None:
    """The options arrive: of two mounts of one source the one with ``ro`` refuses to be written."""
    (folder / "file").write_text("of the host\n")
    mounts = [
        {"hostPath": str(folder), "containerPath": "/run/ro", "options": ["ro", "bind", "nosuid", "noexec"]},
        {"hostPath": str(folder), "containerPath": "/run/rw", "options": ["rw", "bind"]},
    ]

    container = given(lab, {"mounts": mounts})

    assert shell(lab, container, "cat /run/ro/file") == (0, "of the host\n")
    rc, text = shell(lab, container, "echo x > /run/ro/file")
    assert rc != 0
    assert "Read-only file system" in text
    assert {"ro", "nosuid", "noexec"} <= mount_of(lab, container, "/run/ro")[0]
    assert shell(lab, container, "echo of the container > /run/rw/file") == (0, "")
    assert (folder / "file").read_text() == "of the container\n"


def test_rbind_brings_what_is_mounted_below(lab: Lab, folder: Path) -> None:
    """A mount below the source is seen through ``rbind`` and not through ``bind``."""
    inner = folder / "inner"
    inner.mkdir()
    host.mount_tmpfs(inner)
    (inner / "file").write_text("below\n")
    mounts = [
        {"hostPath": str(folder), "containerPath": f"/run/{option}", "options": ["ro", option]}
        for option in ("bind", "rbind")
    ]

    container = given(lab, {"mounts": mounts})

    assert shell(lab, container, "cat /run/rbind/inner/file") == (0, "below\n")
    assert shell(lab, container, "ls /run/bind/inner") == (0, "")


@pytest.mark.parametrize(
    ("option", "propagation", "visible"),
    [
        ("rslave", {"master"}, True),
        ("rshared", {"shared"}, True),
        ("rprivate", set(), False),
        # By names it is the same: the OCI runtime makes a slave of what it is told nothing about.
        (None, {"master"}, True),
    ],
    ids=["rslave", "rshared", "rprivate", "none"],
)
def test_what_is_mounted_later_propagates_as_the_options_say(
    lab: Lab, folder: Path, option: str | None, propagation: set[str], visible: bool
) -> None:
    """A running container sees the host's new mounts unless the device's mount is ``rprivate``."""
    host.mount_tmpfs(folder)
    subprocess.run(["mount", "--make-shared", folder], check=True)
    later = folder / "later"
    later.mkdir()
    options = ["rbind", *([option] if option else [])]
    mounts = [{"hostPath": str(folder), "containerPath": "/run/shared", "options": options}]

    container = given(lab, {"mounts": mounts})
    host.mount_tmpfs(later)
    (later / "file").touch()

    assert mount_of(lab, container, "/run/shared")[1] == propagation
    assert shell(lab, container, "ls /run/shared/later") == (0, "file\n" if visible else "")


def test_a_mount_of_a_private_source_works_beside_one_that_is_shared(lab: Lab, folder: Path) -> None:
    """The runtime refuses no mount for what another one asks for, wherever it stands in the list."""
    host.mount_tmpfs(folder)
    subprocess.run(["mount", "--make-shared", folder], check=True)
    plain = lab.root / "plain-file"
    plain.touch()
    mounts = [
        {"hostPath": str(plain), "containerPath": "/run/before", "options": ["bind"]},
        {"hostPath": str(folder), "containerPath": "/run/shared", "options": ["rbind", "rslave"]},
        {"hostPath": str(plain), "containerPath": "/run/after", "options": ["bind"]},
    ]

    container = given(lab, {"mounts": mounts})

    kinds = {name: mount_of(lab, container, f"/run/{name}")[1] for name in ("before", "shared", "after")}
    assert kinds == {"before": set(), "shared": {"master"}, "after": set()}


def test_a_mount_of_the_kubelet_s_at_the_same_place_is_replaced(lab: Lab, folder: Path) -> None:
    """As by names, the device's mount is the one that the container sees."""
    for name in ("kubelet", "device"):
        (folder / name).write_text(f"{name}\n")
    mounts = [{"hostPath": str(folder / "device"), "containerPath": "/run/file", "options": ["ro", "bind"]}]

    container = given(lab, {"mounts": mounts}, mounts=[(folder / "kubelet", "/run/file", True)])

    assert shell(lab, container, "cat /run/file") == (0, "device\n")


# Hooks


def test_hooks_of_every_stage_run_in_order(lab: Lab, folder: Path) -> None:
    """Each runs once, with its arguments and environment; those of one stage in the order of the file."""
    outside, inside = folder / "record", "/tmp/record"
    stages = ["prestart", "createRuntime", "createRuntime", "createContainer", "startContainer"]
    stages += ["poststart", "poststop"]
    hooks = [
        {
            "hookName": stage,
            "path": "/bin/sh",
            # startContainer is the one that runs in the container.
            "args": ["sh", "-c", f"echo $WORDS >> {inside if stage == 'startContainer' else outside}"],
            "env": [f"WORDS={stage} {number}"],
        }
        for number, stage in enumerate(stages)
    ]

    container = given(lab, {"hooks": hooks})
    started, in_container = outside.read_text().splitlines(), read(lab, container, inside)
    lab.cri.remove_container(container)

    assert started == [
        "prestart 0",
        "createRuntime 1",
        "createRuntime 2",
        "createContainer 3",
        "poststart 5",
    ]
    assert in_container == "startContainer 4\n"
    wait_for(lambda: outside.read_text().splitlines()[5:] == ["poststop 6"], 5, "the poststop hook")


def test_a_hook_arrives_whole(lab: Lab) -> None:
    """Path, arguments, environment and timeout are those of the spec file."""
    hook = {"path": "/bin/true", "args": ["true", "", "a b"], "env": ["A=", "B=c=d"], "timeout": 7}

    container = given(lab, {"hooks": [{"hookName": "createRuntime", **hook}]})

    assert lab.cri.runtime_spec(container)["hooks"]["createRuntime"] == [hook]


def test_a_hook_that_fails_fails_the_container(lab: Lab) -> None:
    """What a hook says against the container keeps it from starting."""
    args = ["sh", "-c", "echo no such device >&2; exit 3"]
    hook = {"hookName": "createRuntime", "path": "/bin/sh", "args": args}
    lab.write_spec("all.json", one({"hooks": [hook]}))
    serving(lab)
    container = lab.cri.create_container(annotated(lab, pod=ALL), "c1")

    with pytest.raises(CriError, match="no such device") as caught:
        lab.cri.start(container)

    assert caught.value.method == "StartContainer"


# Environment


def test_a_variable_overrides_the_image_s_and_the_kubelet_s(lab: Lab) -> None:
    """It is set once, to the device's value, also to an empty one; the others stay."""
    image, kubelet = "/bin", {"GREETING": "kubelet", "EMPTIED": "kubelet", "KEPT": "kubelet"}
    edits = {"env": [f"PATH={image}:/device", "GREETING=a=b c", "EMPTIED=", "ADDED=yes"]}

    container = given(lab, edits, env=kubelet)

    lines = shell(lab, container, "env")[1].splitlines()
    wanted = {f"PATH={image}:/device", "GREETING=a=b c", "EMPTIED=", "KEPT=kubelet", "ADDED=yes"}
    names = {line.partition("=")[0] for line in wanted}
    assert sorted(line for line in lines if line.partition("=")[0] in names) == sorted(wanted)


# Device nodes


def test_owner_and_mode_of_a_node_are_those_of_the_spec_file(lab: Lab) -> None:
    """Where it says them; else the node is root's with the mode that it has on the host."""
    nodes = [
        {"path": NODE, "hostPath": "/dev/kmsg", "uid": 1234, "gid": 5678, "fileMode": 0o640},
        {"path": "/dev/courier1", "hostPath": "/dev/kmsg"},
    ]
    mode = stat.S_IMODE(os.stat("/dev/kmsg").st_mode)

    container = given(lab, {"deviceNodes": nodes})

    assert shell(lab, container, f"stat -c '%u:%g %a' {NODE} /dev/courier1") == (
        0,
        f"1234:5678 640\n0:0 {mode:o}\n",
    )


def test_an_owner_lets_a_container_that_is_not_root_open_the_node(lab: Lab) -> None:
    """A process of the node's owner opens it; the node of nobody in particular it does not."""
    nodes = [
        {"path": NODE, "hostPath": "/dev/fuse", "uid": 1234, "gid": 0, "fileMode": 0o600},
        {"path": "/dev/courier1", "hostPath": "/dev/fuse", "fileMode": 0o600},
    ]

    container = given(lab, {"deviceNodes": nodes}, user=1234)

    assert shell(lab, container, f"exec 3> {NODE}") == (0, "")
    rc, text = shell(lab, container, "exec 3> /dev/courier1")
    assert rc != 0
    assert "Permission denied" in text


def test_that_nodes_belong_to_root_is_said_once(lab: Lab) -> None:
    """These runtimes do not tell whose container it is, so nodes without an owner are not the user's."""
    lab.write_spec("all.json", one({"deviceNodes": [{"path": NODE, "hostPath": "/dev/kmsg"}]}))
    courier = serving(lab)
    pod = annotated(lab, pod=ALL)

    containers = [run(lab, pod, name, user=1234) for name in ("c1", "c2")]

    assert [shell(lab, each, f"stat -c %u {NODE}") for each in containers] == [(0, "0\n")] * 2
    lines = [line for line in courier.log().splitlines() if "WARN" in line and NODE in line]
    assert len(lines) == 1
    assert "root" in lines[0]


def test_a_node_with_numbers_need_not_be_on_the_host(lab: Lab) -> None:
    """Type and numbers of the spec file are enough, and the device cgroup lets it be opened."""
    nodes = [{"path": "/dev/courier/absent", "type": "c", "major": 10, "minor": 229}]

    container = given(lab, {"deviceNodes": nodes})

    assert not Path("/dev/courier/absent").exists()
    assert numbers(lab, container, "/dev/courier/absent") == IN_FUSE
    assert shell(lab, container, "exec 3> /dev/courier/absent") == (0, "")
    assert "Operation not permitted" in shell(lab, container, OPEN_KMSG)[1]


def test_a_node_is_looked_at_anew_for_every_container(lab: Lab, folder: Path) -> None:
    """After a driver was loaded again numbers are others, though no spec file has changed."""
    node = make_node(folder / "node", KMSG)
    lab.write_spec("all.json", one({"deviceNodes": [{"path": NODE, "hostPath": str(node)}]}))
    serving(lab)
    pod = annotated(lab, pod=ALL)

    first = run(lab, pod, "c1")
    node.unlink()
    make_node(node, FUSE)
    second = run(lab, pod, "c2")
    node.unlink()
    gone = refusal(lab, pod, "c3")

    assert (numbers(lab, first), numbers(lab, second)) == (IN_KMSG, IN_FUSE)
    assert shell(lab, second, f"exec 3> {NODE}") == (0, "")
    assert "Operation not permitted" in shell(lab, second, OPEN_KMSG)[1]
    assert "CDI017: " in gone
    assert str(node) in gone


@pytest.mark.parametrize("permissions", ["r", "rwm"])
def test_a_node_that_the_kubelet_gave_can_be_written_afterwards(lab: Lab, permissions: str) -> None:
    """What the device's node allows counts, however little the kubelet's of the same path allowed."""
    nodes = [{"path": NODE, "hostPath": "/dev/kmsg"}]
    kubelet = [("/dev/kmsg", NODE, permissions)]

    container = given(lab, {"deviceNodes": nodes}, devices=kubelet)

    assert numbers(lab, container) == IN_KMSG
    assert shell(lab, container, f"exec 3> {NODE}") == (0, "")


def test_a_node_takes_the_place_of_the_kubelet_s(lab: Lab) -> None:
    """Of two nodes of one path the device's is the one that the container sees."""
    nodes = [{"path": NODE, "hostPath": "/dev/fuse"}]

    container = given(lab, {"deviceNodes": nodes}, devices=[("/dev/kmsg", NODE, "rwm")])

    assert numbers(lab, container) == IN_FUSE
    assert shell(lab, container, f"exec 3> {NODE}") == (0, "")


def test_a_block_device_is_given_as_one(lab: Lab) -> None:
    """Its node is a block device's and may be opened."""
    loop = next(path for path in sorted(Path("/dev").glob("loop[0-9]*")) if path.is_block_device())
    device = loop.stat().st_rdev

    container = given(lab, {"deviceNodes": [{"path": NODE, "hostPath": str(loop)}]})

    wanted = f"block special file {os.major(device):x}:{os.minor(device):x}\n"
    assert shell(lab, container, f"stat -c '%F %t:%T' {NODE}") == (0, wanted)
    assert shell(lab, container, f"exec 3< {NODE}") == (0, "")


# What edits over NRI cannot carry

GIDS = {"additionalGids": [4711]}
NARROW = {"deviceNodes": [{"path": NODE, "hostPath": "/dev/kmsg", "permissions": "r"}]}
NET = {"netDevices": [{"hostInterfaceName": "courier-eth9", "name": "eth9"}]}
FIFO = {"deviceNodes": [{"path": NODE, "type": "p"}]}
UNBUFFERED = {"deviceNodes": [{"path": NODE, "type": "u", "major": 10, "minor": 229}]}
RDT = {"intelRdt": {"closID": "courier-class"}}

LOST = pytest.mark.parametrize(
    ("edits", "version", "words"),
    [
        (GIDS, "0.7.0", ["4711"]),
        (NARROW, "0.6.0", [NODE, '"r"']),
        (NET, "1.1.0", ["courier-eth9", "0.11"]),
        (RDT, "0.7.0", ["intelRdt", "0.11"]),
        (FIFO, "0.6.0", [NODE, "type p"]),
        (UNBUFFERED, "0.6.0", [NODE, "type u"]),
    ],
    ids=["additionalGids", "permissions", "netDevices", "intelRdt", "fifo", "unbuffered"],
)


@LOST
def test_what_edits_cannot_carry_fails_the_container_by_name(
    lab: Lab, edits: Mapping[str, Any], version: str, words: list[str]
) -> None:
    """The refusal names the device, the edit and the reason, and the way round it."""
    lab.write_spec("all.json", one(edits, version))
    courier = serving(lab)

    text = refusal(lab, annotated(lab, container_c1=ALL))

    assert "DLV001: " in text
    assert ALL in text
    assert [word for word in words if word not in text] == []
    assert "undeliverable" in text
    courier.wait_for_log(f"refused {GRANTED_NAMESPACE}/asks/c1: DLV001: ")


@LOST
def test_with_warn_the_container_runs_without_what_edits_cannot_carry(
    lab: Lab, edits: Mapping[str, Any], version: str, words: list[str]
) -> None:
    """It has the rest of its device, and the log says what is missing and why."""
    lab.write_spec("all.json", one(edits, version))
    courier = serving(lab, {"delivery": {"undeliverable": "warn"}})

    container = run(lab, annotated(lab, container_c1=ALL))

    assert devices_of(lab, container) == {"ALL"}
    assert marker(lab, container) == f"injected:{ALL}"
    line = courier.wait_for_log(lambda line: "DLV001" in line)
    assert "WARN" in line
    assert [word for word in [f"{GRANTED_NAMESPACE}/asks/c1", ALL, *words] if word not in line] == []


def test_a_node_that_may_only_be_read_is_never_widened(lab: Lab) -> None:
    """With warn it is not there at all, its device stays refused, and its neighbour is there."""
    neighbour = {"path": "/dev/courier1", "hostPath": "/dev/fuse", "permissions": "rw"}
    lab.write_spec("all.json", one({"deviceNodes": [*NARROW["deviceNodes"], neighbour]}))
    serving(lab, {"delivery": {"undeliverable": "warn"}})

    container = run(lab, annotated(lab, pod=ALL))

    assert shell(lab, container, f"ls {NODE}")[0] != 0
    assert "Operation not permitted" in shell(lab, container, OPEN_KMSG)[1]
    assert shell(lab, container, "exec 3> /dev/courier1") == (0, "")


def test_additional_groups_are_missing_and_nothing_else(lab: Lab) -> None:
    """With warn the process has its own groups only."""
    lab.write_spec("all.json", one(GIDS, "0.7.0"))
    serving(lab, {"delivery": {"undeliverable": "warn"}})

    container = run(lab, annotated(lab, pod=ALL))

    assert "4711" not in shell(lab, container, "id -G")[1].split()
    assert devices_of(lab, container) == {"ALL"}


# User namespaces


def in_user_namespace(lab: Lab) -> Any:
    """A pod that asks, with ``hostUsers: false``."""
    return lab.cri.run_pod(
        "asks", GRANTED_NAMESPACE, annotations={f"{DOMAIN}/pod": ALL}, host_users=False, handler=NEWER
    )


@pytest.mark.parametrize("option", ["bind", "rbind"])
def test_in_a_user_namespace_a_mount_belongs_to_the_container_s_root(
    lab: Lab, folder: Path, option: str
) -> None:
    """What is root's on the host is root's inside, and what root writes inside is root's on the host."""
    inner = folder / "inner"
    inner.mkdir()
    if option == "rbind":  # the kernel lets nobody in a user namespace look below a mount by `bind`
        host.mount_tmpfs(inner)
    (inner / "below").touch()
    (folder / "file").touch()
    mounts = [{"hostPath": str(folder), "containerPath": "/run/folder", "options": ["rw", option]}]
    lab.write_spec("all.json", one({"mounts": mounts}))
    serving(lab)

    container = run(lab, in_user_namespace(lab))

    assert str(USERNS_ROOT) in read(lab, container, "/proc/self/uid_map").split()
    assert shell(lab, container, "stat -c %u:%g /run/folder/file") == (0, "0:0\n")
    assert shell(lab, container, "touch /run/folder/new") == (0, "")
    assert (folder / "new").stat().st_uid == 0
    assert shell(lab, container, "stat -c %u:%g /run/folder/inner/below") == (0, "0:0\n")


def test_in_a_user_namespace_a_node_is_the_host_s(lab: Lab, folder: Path) -> None:
    """Nobody can make a node there: the host's of the same path is used, and may be opened; no other may."""
    host.mount_tmpfs(folder)  # where it lies else may be mounted without devices
    granted = make_node(folder / "granted", FUSE, 0o666)
    other = make_node(folder / "other", KMSG, 0o666)
    lab.write_spec("all.json", one({"deviceNodes": [{"path": str(granted)}]}))
    serving(lab)

    container = run(lab, in_user_namespace(lab), mounts=[(other, "/run/other", False)])

    assert numbers(lab, container, str(granted)) == IN_FUSE
    assert shell(lab, container, f"exec 3> {granted}") == (0, "")
    rc, text = shell(lab, container, "exec 3> /run/other")
    assert rc != 0
    assert "Operation not permitted" in text


def test_in_a_user_namespace_a_node_of_another_path_is_refused(lab: Lab, folder: Path) -> None:
    """It would need a device cgroup rule of its own, which runtimes drop before NRI 0.10."""
    node = make_node(folder / "node", FUSE, 0o666)
    lab.write_spec("all.json", one({"deviceNodes": [{"path": NODE, "hostPath": str(node)}]}))
    serving(lab)

    text = refusal(lab, in_user_namespace(lab))

    assert "DLV001: " in text
    assert NODE in text
    assert str(node) in text
    assert "0.10" in text


def test_in_a_user_namespace_a_node_that_the_host_lacks_is_refused(lab: Lab, folder: Path) -> None:
    """With nothing of that kind at that path, or something else, there is nothing to use."""
    other = make_node(folder / "other", KMSG, 0o666)
    numbers = {"type": "c", "major": 10, "minor": 229}
    nodes = [{"path": path, **numbers} for path in ("/dev/courier/absent", str(other))]
    lab.write_spec("all.json", one({"deviceNodes": nodes}))
    serving(lab)

    text = refusal(lab, in_user_namespace(lab))

    assert "DLV001: " in text
    assert "/dev/courier/absent" in text
    assert str(other) in text


def test_in_a_user_namespace_a_refused_node_is_all_that_is_missing_with_warn(lab: Lab, folder: Path) -> None:
    """The container starts with the rest of its device."""
    node = make_node(folder / "node", FUSE, 0o666)
    lab.write_spec("all.json", one({"deviceNodes": [{"path": NODE, "hostPath": str(node)}]}))
    courier = serving(lab, {"delivery": {"undeliverable": "warn"}})

    container = run(lab, in_user_namespace(lab))

    assert devices_of(lab, container) == {"ALL"}
    assert shell(lab, container, f"ls {NODE}")[0] != 0
    assert NODE in courier.wait_for_log("DLV001")


# Two runtimes

# A mount namespace in which the default CDI directories are the lab's and the host's own stay as they are.
PRIVATE_DIRS = """\
#!/bin/sh
set -e
if [ -z "$INSIDE" ]; then INSIDE=1 exec unshare --mount --propagation private "$0" "$@"; fi
for name in etc run; do
    mkdir -p @UPPER@/$name/upper @UPPER@/$name/work
    mount -t overlay -o lowerdir=/$name,upperdir=@UPPER@/$name/upper,workdir=@UPPER@/$name/work overlay /$name
    mkdir -p /$name/cdi
    mount --bind @CDI@/$name /$name/cdi
done
exec @PYTHON@ "$@"
"""


@pytest.mark.parametrize("lab", ["2.1-edits"], indirect=True)
def test_one_daemon_serves_two_runtimes_each_in_its_own_way(lab: Lab, lab17: Lab) -> None:
    """The newer one is sent names, so that nothing is lost; with the older one's edits it is refused."""
    lab.write_spec("all.json", {**spec(all=GIDS, plain={}), "cdiVersion": "0.7.0"})
    script = lab.root / "python"
    text = PRIVATE_DIRS.replace("@UPPER@", str(lab.root / "upper")).replace("@PYTHON@", sys.executable)
    script.write_text(text.replace("@CDI@", str(lab.root / "cdi")))
    script.chmod(0o700)
    sockets = [str(each.nri_socket) for each in (lab, lab17)]
    dirs = {"dirs": ["/etc/cdi", "/var/run/cdi"]}
    courier = lab.courier({"nri": {"sockets": sockets, "delivery": "auto"}, "cdi": dirs})
    courier.python = script

    courier.start()
    wait_for(lambda: courier.log().count("synchronized:") == 2, 10, lambda: f"both in {courier.log()}")
    pods = {each: annotated(each, container_c1=ALL, container_c2=f"{KIND}=plain") for each in (lab, lab17)}
    lab.delivery = "names"  # what `run` has to expect of it
    lab17.delivery = "edits"
    by_names = run(lab, pods[lab], "c1")
    by_edits = run(lab17, pods[lab17], "c2")
    refused = refusal(lab17, pods[lab17], "c1")

    assert "4711" in shell(lab, by_names, "id -G")[1].split()
    assert devices_of(lab17, by_edits) == {"PLAIN"}
    assert "DLV001: " in refused
    assert "delivering by names: " in courier.log()
    assert "delivering by edits: " in courier.log()
    assert courier.stop() == 0


@pytest.mark.parametrize("lab", ["2.1-edits"], indirect=True)
def test_one_runtime_s_end_does_not_hurt_the_other(lab: Lab, lab17: Lab) -> None:
    """While one runtime is away the other's pods are served, and the first's again when it is back."""
    lab.write_spec("all.json", one({}))
    courier = lab.courier({"nri": {"sockets": [str(each.nri_socket) for each in (lab, lab17)]}})
    courier.start()
    wait_for(lambda: courier.log().count("synchronized:") == 2, 10, lambda: f"both in {courier.log()}")

    lab17.containerd.stop()
    meanwhile = run(lab, annotated(lab, pod=ALL))
    mark = courier.mark()
    lab17.containerd.start()
    courier.wait_for_log("synchronized:", since=mark)
    lab17.delivery = "edits"
    afterwards = run(lab17, annotated(lab17, pod=ALL))

    assert devices_of(lab, meanwhile) == devices_of(lab17, afterwards) == {"ALL"}
