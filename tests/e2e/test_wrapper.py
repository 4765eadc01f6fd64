"""The runtime wrapper by hand: runc and crun of two generations each behind a gate, on cgroup v1 and v2."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from cdi_courier import compiling
from cdi_courier.settings import load
from cdi_courier_oci_hook import gate
from support.bundles import RUNTIMES, BundleHost, find, process_file
from support.packages import Packages
from support.scenario import OPEN_KMSG

pytestmark = pytest.mark.runtime

KEY = "nvidia.cdi.k8s.io"
DEVICE = "demo.example.com/gpu=all"
LOOK = (
    "env; ls -l /dev/demo0 2>&1; cat /opt/demo/hello 2>&1; (exec 3<>/dev/demo0) 2>&1 && echo opened; "
    f"({OPEN_KMSG}) 2>&1 || echo refused"
)
# On v2 crun 1.8 sets a limit that takes CAP_SYS_RESOURCE, which a test machine need not have.
ALL = [(name, layout) for name in RUNTIMES for layout in ("v1", "v2") if (name, layout) != ("crun-1.8", "v2")]
SOME = [("runc-1.3", "v1"), ("crun-1.28", "v2")]


class Wrapped:
    """A gate in front of one runtime of a host, and a CDI device with every edit that can be seen."""

    def __init__(self, host: BundleHost, real: Path) -> None:
        self.host = host
        self.name = real.name
        self.root = Path(os.path.join(host.root, real.parents[2].name))
        for folder in ("cdi", "shared", "settings", "gates"):
            (self.root / folder).mkdir(parents=True)
        (self.root / "shared/hello").write_text("hello from the host\n")
        self.settings = self.root / "settings/config.toml"
        self.settings.write_text(
            f"cdi.dirs = ['{self.root}/cdi']\nservice.state_dir = '{self.root}/state'\n"
            f"oci_hook.log = '{self.root}/log'\noci_hook.gate_dir = '{self.root}/gates'\n"
        )
        self.spec = self.root / "cdi/demo.json"
        touch = {
            "hookName": "createRuntime",
            "path": "/bin/sh",
            "args": ["sh", "-c", f"cat >{self.root}/hooked"],
            "env": ["PATH=/bin"],
        }
        edits = {
            "env": ["A=1"],
            # Opening it takes the cgroup's permission: no container may use it unasked.
            "deviceNodes": [{"path": "/dev/demo0", "hostPath": "/dev/fuse"}],
            "mounts": [
                {"hostPath": f"{self.root}/shared", "containerPath": "/opt/demo", "options": ["bind", "ro"]}
            ],
            "hooks": [touch],
        }
        devices = [{"name": "all", "containerEdits": edits}]
        self.spec.write_text(
            json.dumps({"cdiVersion": "0.5.0", "kind": DEVICE.partition("=")[0], "devices": devices})
        )
        self.made = gate.make(load([self.settings]), str(real), "")
        self.table = self.root / "state/table.json"
        self.gate = self.install()

    def install(self, name: str = "gate", **changes: Any) -> Path:
        """Write the gate as `gate.files` would, but for some changes."""
        path = self.root / "gates" / name
        path.write_bytes(gate.render(attrs.evolve(self.made, **changes)))
        path.chmod(0o755)
        return path

    def compile(self) -> None:
        """As ``cdi-courier compile``."""
        compiled = compiling.compile_settled(str(self.settings))
        compiling.write(compiled, str(self.table))
        compiling.write_patterns(compiled)

    def call(self, *argv: str | Path, program: Path | None = None, cwd: Path | None = None) -> Any:
        return self.host.run(program or self.gate, "--root", self.root / "containers", *argv, cwd=cwd)


@pytest.fixture(scope="module")
def hosts(packages: Packages) -> Iterator[dict[str, BundleHost]]:
    """One host a cgroup layout, shared by the tests."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(BundleHost(packages, name)) for name in ("v1", "v2")}


@pytest.fixture(scope="module")
def installed() -> dict[tuple[str, str], Wrapped]:
    """What has been set up so far."""
    return {}


@pytest.fixture
def wrapped(
    request: pytest.FixtureRequest,
    packages: Packages,
    hosts: dict[str, BundleHost],
    installed: dict[tuple[str, str], Wrapped],
) -> Iterator[Wrapped]:
    """A gate in front of the runtime, with a compiled table; what tests leave is gone."""
    name, layout = request.param
    if request.param not in installed:
        installed[request.param] = Wrapped(hosts[layout], find(packages, name))
    one = installed[request.param]
    one.compile()
    yield one
    for file in ("log", "hooked"):
        (one.root / file).unlink(missing_ok=True)
    one.spec.chmod(0o644)
    os.chown(one.spec, 0, 0)


def on(hosts: Sequence[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("wrapped", hosts, indirect=True, ids=["-".join(host) for host in hosts])


def has_all(output: str) -> bool:
    """Does a container that ran `LOOK` have everything, and nothing more?"""
    lines = output.splitlines()
    node = [line for line in lines if line.startswith("crw") and "10, 229" in line and "/dev/demo0" in line]
    return bool(node) and {"A=1", "hello from the host", "opened", "refused"} <= set(lines)


@on(ALL)
def test_an_annotated_container_has_everything(wrapped: Wrapped) -> None:
    """Environment, node with its cgroup's permission and no other's, mount and hook; with a table or not."""
    for annotation, container in ((KEY, "create"), (f"{KEY}/pod", "second")):
        bundle = wrapped.host.bundle(LOOK, {annotation: DEVICE})

        done = wrapped.call("run", "--bundle", bundle, container)

        assert (done.returncode, done.stderr) == (0, "")
        assert has_all(done.stdout), done.stdout
        hooked = json.loads((wrapped.root / "hooked").read_text())
        assert hooked["annotations"]["cdi-courier.io/status"] == f"injected:{DEVICE}"
        wrapped.table.unlink()


@on(ALL)
def test_a_container_that_does_not_ask_is_as_without_the_wrapper(wrapped: Wrapped) -> None:
    """The config has the same bytes, and what is seen inside is the same."""
    bundle = wrapped.host.bundle(f"ls /dev; {LOOK}", {"other": DEVICE})
    before = (bundle / "config.json").read_bytes()

    bare = wrapped.call("run", "--bundle", bundle, "bare", program=Path(wrapped.made.real))
    done = wrapped.call("run", "--bundle", bundle, "x")

    assert (done.returncode, done.stdout, done.stderr) == (bare.returncode, bare.stdout, bare.stderr)
    assert "/dev/demo0: No such file" in done.stdout
    assert (bundle / "config.json").read_bytes() == before


@on(ALL)
def test_a_life_from_create_to_delete(wrapped: Wrapped) -> None:
    """Every call of it passes; the process of an exec, as an engine makes it, sees the variables."""
    bundle = wrapped.host.bundle("exec sleep 1000", {KEY: DEVICE})
    record = wrapped.root / "state/exec/life"
    for call in (["--version"], ["create", "--bundle", bundle, "life"], ["start", "life"]):
        # Not piped: the container would hold the pipes open.
        done = wrapped.host.run(
            "sh", "-c", '"$@" >out 2>&1', "-", wrapped.gate, "--root", wrapped.root / "c", *call
        )
        assert done.returncode == 0, (wrapped.host.root / "out").read_text()

    def call(*argv: str | Path) -> Any:
        return wrapped.host.run(wrapped.gate, "--root", wrapped.root / "c", *argv)

    state = json.loads(call("state", "life").stdout)
    recorded = json.loads(record.read_text())
    by_engine = call("exec", "--process", process_file(wrapped.root, "sh", "-c", LOOK), "life")
    by_hand = call("exec", "life", "env")
    failed = call("delete", "life")
    kept = record.exists()
    killed = call("kill", "life", "KILL")
    gone = call("delete", "--force", "life")

    assert (state["status"], recorded) == ("running", ["A=1"])
    assert has_all(by_engine.stdout), by_engine
    assert "A=1" in by_hand.stdout.splitlines()
    assert (failed.returncode != 0, kept) == (True, True)
    assert (killed.returncode, gone.returncode, gone.stderr) == (0, 0, "")
    assert not record.exists()
    if wrapped.name == "runc":
        assert "ociVersionMax" in call("features").stdout


SPELLINGS = [
    ["run", "--bundle", "B", "x"],
    ["run", "--bundle=B", "x"],
    ["run", "-b", "B", "x"],
    ["run", "-b=B", "x"],
    ["run", "-bB", "x"],
    ["run", "-bundle=B", "x"],
    ["run", "--bun", "B", "x"],
    ["run", "x", "--bundle", "B"],
    ["run", "--no-pivot", "--bundle", "B", "create"],
    ["--debug", "--log", "LOG", "run", "--bundle", "B", "--", "x"],
    ["--log-format=json", "--", "run", "--bundle", "B", "x"],
    ["--new", "run", "--bundle", "B", "x"],
    ["run", "--config=B/config.json", "--bundle", "B", "x"],
    ["run", "-fB/config.json", "--bundle", "B", "x"],
]


@on([(name, "v1") for name in RUNTIMES])
def test_however_it_is_called_nothing_runs_without_its_devices(wrapped: Wrapped) -> None:
    """Each spelling either starts the container with all that it asks for, or the runtime refuses it."""
    started = []
    for spelling in SPELLINGS:
        bundle = wrapped.host.bundle(LOOK, {KEY: DEVICE})
        argv = [
            word.replace("B", str(bundle)).replace("LOG", f"{wrapped.root}/runtime.log") for word in spelling
        ]

        done = wrapped.call(*argv)

        assert has_all(done.stdout) or (done.returncode and "PATH=" not in done.stdout), (spelling, done)
        if done.returncode == 0:
            started.append(spelling)
    bundle = wrapped.host.bundle(LOOK, {KEY: DEVICE})
    here = wrapped.call("run", "x", cwd=bundle)

    assert has_all(here.stdout)
    assert SPELLINGS[0] in started
    assert len(started) >= 8


def untrusted(wrapped: Wrapped) -> None:
    os.chown(wrapped.spec, 4242, 4242)


def broken(wrapped: Wrapped) -> None:
    wrapped.spec.rename(wrapped.root / "aside")
    wrapped.spec.write_text("{")


@on(SOME)
@pytest.mark.parametrize(
    ("spoil", "device", "code"),
    [
        (untrusted, DEVICE, "CDI007"),
        (broken, DEVICE, "CDI0"),
        (lambda _: None, "demo.example.com/gpu=no", "CDI012"),
    ],
    ids=["untrusted", "broken", "unknown"],
)
def test_what_cannot_be_resolved_is_refused_with_the_cause(
    wrapped: Wrapped, spoil: Any, device: str, code: str
) -> None:
    """Where the caller's runtime would have logged it, and the config keeps its bytes."""
    bundle = wrapped.host.bundle(LOOK, {KEY: device})
    before = (bundle / "config.json").read_bytes()
    spoil(wrapped)
    log = bundle / "log.json"

    done = wrapped.call("--log", log, "--log-format", "json", "run", "--bundle", bundle, "x")
    if (wrapped.root / "aside").exists():
        (wrapped.root / "aside").rename(wrapped.spec)

    assert (done.returncode, done.stdout) == (1, "")
    assert f"cdi-courier: {code}" in done.stderr
    assert f"cdi-courier: {code}" in json.loads(log.read_text().splitlines()[-1])["msg"]
    assert (bundle / "config.json").read_bytes() == before


@on(SOME)
@pytest.mark.parametrize("damage", ["{", '{"format": 999}'], ids=["corrupt", "another-version"])
def test_a_table_that_cannot_be_used_costs_nothing_but_time(wrapped: Wrapped, damage: str) -> None:
    """The container has everything."""
    wrapped.table.write_text(damage)

    assert has_all(wrapped.call("run", "--bundle", wrapped.host.bundle(LOOK, {KEY: DEVICE}), "x").stdout)


@on(SOME)
def test_a_full_disk_refuses_and_leaves_the_bundle_as_it_was(wrapped: Wrapped) -> None:
    """Once there is room, the same call works."""
    host = wrapped.host
    small = host.mount_small(64)
    bundle = host.bundle(LOOK, {KEY: DEVICE, "large": "x" * 40_000}, host.path(small))
    before = (bundle / "config.json").read_bytes()

    full = wrapped.call("run", "--bundle", small, "x")
    after = (bundle / "config.json").read_bytes()
    left = os.listdir(bundle)
    grown = host.run("mount", "-o", "remount,size=1m", small)
    done = wrapped.call("run", "--bundle", small, "x")

    assert (full.returncode, full.stdout, after, left) == (1, "", before, ["config.json"])
    assert "HOK006" in full.stderr
    assert "No space left on device" in full.stderr
    assert grown.returncode == 0, grown.stderr
    assert has_all(done.stdout), done


@on(SOME)
def test_annotations_as_large_as_kubernetes_allows_are_no_obstacle(wrapped: Wrapped) -> None:
    """256 KiB of others beside ours; as much in ours is refused."""
    others = {f"a{number}": "x" * 1024 for number in range(255)}
    value = ",".join([DEVICE] * 10_000)

    done = wrapped.call("run", "--bundle", wrapped.host.bundle(LOOK, {KEY: DEVICE, **others}), "x")
    refused = wrapped.call("run", "--bundle", wrapped.host.bundle(LOOK, {KEY: value}), "y")

    assert has_all(done.stdout), done
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "ANN003" in refused.stderr


@on(SOME)
def test_without_the_product_only_annotated_containers_fail(wrapped: Wrapped) -> None:
    """With words; what does not ask runs as ever."""
    program = wrapped.install("orphan", package_path=("/nonexistent", "/nonexistent"))

    asks = wrapped.call("run", "--bundle", wrapped.host.bundle(LOOK, {KEY: DEVICE}), "x", program=program)
    plain = wrapped.call("run", "--bundle", wrapped.host.bundle("echo ran", {"a": "b"}), "y", program=program)

    assert (asks.returncode, asks.stdout) == (1, "")
    assert "cdi-courier: HOK011: " in asks.stderr
    assert (plain.returncode, plain.stdout) == (0, "ran\n")


@on(SOME)
def test_a_gate_before_itself_ends_at_once(wrapped: Wrapped) -> None:
    """By Python's way as by the gate's own."""
    program = wrapped.install("loop", real=str(wrapped.root / "gates/loop"))

    for asked in ({KEY: DEVICE}, {"a": "b"}):
        done = wrapped.call("run", "--bundle", wrapped.host.bundle(LOOK, asked), "x", program=program)

        assert (done.returncode, done.stdout) == (1, "")
        assert "HOK010" in done.stderr
