"""The daemon as a service of a real systemd: it starts, reloads, is watched and is confined, by its own unit.

The host is a box; the runtime, where one is needed, is the one in Python, which listens in it from outside.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from support.box import Box
from support.nri_runtime import NriRuntime, container, pod
from support.product import install_product
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

UNIT = "cdi-courier.service"
FILE = Path(__file__).resolve().parents[2] / "packaging/systemd" / UNIT
KEY = "nvidia.cdi.k8s.io"
SPEC = {
    "cdiVersion": "0.6.0",
    "kind": "vendor.com/gpu",
    "devices": [{"name": "a", "containerEdits": {"deviceNodes": [{"path": "/dev/null"}]}}],
}


def installed(root: Path) -> None:
    """The product, its unit and a spec file, as a package would put them there."""
    install_product(root)
    (root / "usr/lib/systemd/system" / UNIT).write_text(FILE.read_text())
    (root / "etc/cdi").mkdir()
    (root / "etc/cdi/v.json").write_text(json.dumps(SPEC))
    (root / "etc/cdi-courier").mkdir()


class Service:
    """The unit in its box."""

    def __init__(self, box: Box) -> None:
        self.box = box

    def configure(self, text: str) -> None:
        (self.box.root / "etc/cdi-courier/config.toml").write_text(text)

    def drop_in(self, text: str) -> None:
        folder = self.box.root / f"etc/systemd/system/{UNIT}.d"
        folder.mkdir(exist_ok=True)
        (folder / "test.conf").write_text(text)
        self.box.run(["systemctl", "daemon-reload"])

    def start(self) -> None:
        self.box.run(["systemctl", "start", UNIT])

    def show(self, name: str) -> str:
        return self.box.run(["systemctl", "show", f"--property={name}", "--value", UNIT]).stdout.strip()

    def pid(self) -> int:
        return int(self.show("MainPID"))

    def signal(self, name: str) -> None:
        self.box.run(["systemctl", "kill", f"--signal={name}", "--kill-whom=main", UNIT])

    def journal(self, **fields: str) -> list[dict[str, Any]]:
        """Entries of this boot of the daemon's, newest last."""
        self.box.run(["journalctl", "--sync"])
        wanted = [f"{name}={value}" for name, value in fields.items()]
        argv = ["journalctl", "--output=json", "--boot", f"--unit={UNIT}", *wanted]
        return [json.loads(line) for line in self.box.run(argv).stdout.splitlines()]

    def wait_for_log(self, words: str, count: int = 1) -> None:
        def there() -> bool:
            return sum(words in str(entry.get("MESSAGE")) for entry in self.journal()) >= count

        wait_for(there, 20, lambda: f"{words!r} in the journal:\n{self.box.journal(UNIT)}", pause=0.1)

    def command(self, *argv: str) -> tuple[int, str]:
        done = self.box.run(["cdi-courier", *argv], check=False)
        return done.returncode, done.stdout + done.stderr

    @contextlib.contextmanager
    def runtime(self) -> Iterator[NriRuntime]:
        """An NRI runtime at the usual place in the box."""
        (self.box.root / "run/nri").mkdir(exist_ok=True)
        with NriRuntime(f"/proc/{self.box.pid}/root/run/nri/nri.sock") as runtime:
            yield runtime


@pytest.fixture(scope="module")
def shared(bookworm: Path) -> Iterator[Box]:
    """A box with the product and its unit, for this file."""
    with Box(bookworm, prepare=installed) as box:
        yield box


@pytest.fixture
def service(shared: Box) -> Iterator[Service]:
    """The unit, stopped, without settings or drop-ins, and with an empty journal."""
    made = Service(shared)
    yield made
    shared.run(["systemctl", "kill", "--signal=KILL", UNIT], check=False)
    shared.run(["sh", "-c", f"systemctl stop {UNIT}; systemctl reset-failed {UNIT}"], check=False)
    shared.run(["sh", "-c", f"rm -rf /etc/systemd/system/{UNIT}.d /etc/cdi-courier/* /run/cdi-courier"])
    shared.run(["systemctl", "daemon-reload"])
    shared.run(["sh", "-c", "journalctl --rotate --quiet; journalctl --vacuum-time=1us --quiet"])


def asks(namespace: str = "gpu-operator") -> Any:
    return pod("p", namespace, **{KEY: "vendor.com/gpu=a"})


def test_systemd_has_nothing_to_remark_on_the_unit(service: Service) -> None:
    """It is well-formed, and all that it names is there."""
    done = service.box.run(["systemd-analyze", "verify", "--man=no", UNIT], check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_may_do_little_beyond_its_work(service: Service) -> None:
    """systemd's own measure of exposure, from 0 to 10, is 3.0 at most."""
    path = f"/usr/lib/systemd/system/{UNIT}"
    done = service.box.run(["systemd-analyze", "security", "--offline=true", "--threshold=30", path])

    assert "Overall exposure level" in done.stdout


def test_the_service_is_active_as_soon_as_it_waits(service: Service) -> None:
    """Without a runtime it is active, says what it waits for, and status and doctor answer in words."""
    service.drop_in("[Service]\nWatchdogSec=3\n")
    service.start()

    state = service.show("ActiveState"), service.show("SubState")
    wait_for(lambda: "waiting: NRI001" in service.show("StatusText"), 15, "the status line", pause=0.2)
    code, text = service.command("status")
    doctor = service.command("doctor")
    assert state == ("active", "running")
    assert code == 1
    assert "NRI001: the NRI socket" in text
    assert doctor[0] == 1
    assert f"daemon: pid {service.pid()}" in doctor[1]


def test_a_runtime_that_comes_later_is_served_from_within_the_sandbox(service: Service) -> None:
    """The socket's folder did not exist at the start; edits, which look at the host's nodes, are answered."""
    service.drop_in("[Service]\nWatchdogSec=3\n")
    service.configure('[nri]\ndelivery = "edits"\n')
    service.start()

    with service.runtime() as runtime:
        runtime.plugin()
        creation = runtime.create_container(asks(), container())
        wait_for(lambda: "1 injected" in service.show("StatusText"), 15, "the status line", pause=0.2)
        code, text = service.command("status")

    assert creation.error == ""
    (adjust,) = creation.adjustments
    assert [(d.path, d.major, d.minor) for d in adjust.linux.devices] == [("/dev/null", 1, 3)]
    assert code == 0
    assert "gpu-operator/p/c0" in text


def test_the_journal_has_a_decision_s_parts_as_fields(service: Service) -> None:
    """`journalctl CDI_COURIER_POD=…` finds what became of a pod, without any setting."""
    service.start()

    with service.runtime() as runtime:
        runtime.plugin()
        runtime.create_container(asks("default"), container())
        service.wait_for_log("refused default/p/c0: POL001")

    (entry,) = service.journal(CDI_COURIER_POD="p", CDI_COURIER_NAMESPACE="default")
    assert (entry["CDI_COURIER_VERDICT"], entry["CDI_COURIER_CODE"]) == ("refused", "POL001")
    assert (entry["PRIORITY"], entry["SYSLOG_IDENTIFIER"]) == ("4", "cdi-courier")


@contextlib.contextmanager
def journal_stopped(service: Service) -> Iterator[None]:
    """journald reads nothing."""

    def signal(name: str) -> None:
        service.box.run(["systemctl", "kill", f"--signal={name}", "systemd-journald.service"])

    signal("STOP")
    try:
        yield
    finally:
        signal("CONT")


def test_a_journal_that_stands_still_holds_up_neither_containers_nor_the_watchdog_nor_the_end(
    service: Service,
) -> None:
    """Every container is answered, the daemon is the same, logs again when it can, and stops well."""
    count = 1000
    service.drop_in("[Service]\nWatchdogSec=3\n")
    service.start()
    pid = service.pid()

    with service.runtime() as runtime:
        runtime.plugin()
        with journal_stopped(service):
            errors = {
                runtime.create_container(asks(f"ns-{number}"), container()).error.partition(":")[0]
                for number in range(count)
            }
            wait_for(lambda: f"{count} refused" in service.show("StatusText"), 15, "the status", pause=0.2)
        runtime.create_container(asks("afterwards"), container())
        service.wait_for_log("refused afterwards/p/c0: POL001")
        same = service.pid()
        with journal_stopped(service):
            for number in range(count):
                runtime.create_container(asks(f"last-{number}"), container())
            service.box.run(["systemctl", "stop", UNIT])

    assert errors == {"POL001"}
    assert same == pid
    assert (service.show("NRestarts"), service.show("Result")) == ("0", "success")


def test_a_reload_changes_the_answers_and_keeps_the_session(service: Service) -> None:
    """`systemctl reload` with good settings counts from then on; with bad ones nothing changes."""
    service.start()
    pid = service.pid()

    with service.runtime() as runtime:
        peer = runtime.plugin()
        before = runtime.create_container(asks("team"), container()).error.partition(":")[0]
        service.configure('[policy]\ndefault = "allow"\n')
        service.box.run(["systemctl", "reload", UNIT])
        service.wait_for_log("changed: policy.default")
        allowed = runtime.create_container(asks("team"), container()).error
        service.configure('[policy]\ndefault = "perhaps"\n')
        service.box.run(["systemctl", "reload", UNIT])
        service.wait_for_log(
            "SET030: the settings stay as they were: SET004: /etc/cdi-courier/config.toml, line 2"
        )
        still = runtime.create_container(asks("team"), container()).error

        assert runtime.active() == [peer]
    assert (before, allowed, still) == ("POL001", "", "")
    assert (service.pid(), service.show("ActiveState")) == (pid, "active")


def test_a_daemon_that_stands_still_is_restarted_by_the_watchdog(service: Service) -> None:
    """systemd misses its word, aborts it, and a new one serves the runtime."""
    service.drop_in("[Service]\nWatchdogSec=3\n")
    service.start()
    first = service.pid()

    with service.runtime() as runtime:
        runtime.plugin()
        service.signal("STOP")
        stuck = service.command("status")
        wait_for(lambda: service.pid() not in (0, first), 30, "another daemon", pause=0.2)
        runtime.plugin(2)
        creation = runtime.create_container(asks(), container())

    assert stuck[0] == 1
    assert f"STA002: the daemon (pid {first}) does not answer" in stuck[1]
    assert creation.error == ""
    assert int(service.show("NRestarts")) == 1
    assert "Watchdog timeout" in service.box.journal(UNIT)
    assert "Fatal Python error: Aborted" in service.box.journal(UNIT)


STUCK = """
import threading
from cdi_courier.hookspecs import API_VERSION, Offer, hookimpl

class Server:
    def __init__(self): self.ended = threading.Event()
    def run(self): self.ended.wait()
    def stop(self): self.ended.set()
    def reconsider(self): pass
    def status(self): return {}
    def decisions(self): return []
    def alive(self): return False

class Stuck:
    name, api_version = "stuck", API_VERSION
    def offer(self, runtime, settings): return Offer("stuck", "partial", "impossible", "it is stuck")
    def serve(self, context): return Server()

@hookimpl
def cdi_courier_backend(): return Stuck()
"""


def test_a_serving_loop_that_is_stuck_is_restarted_while_all_else_of_the_daemon_goes_on(
    service: Service,
) -> None:
    """One server that says it is not alive is enough, also a third party's; status answers meanwhile."""
    packages = service.box.root / "usr/lib/python3/dist-packages"
    info = packages / "stuck-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stuck\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[cdi_courier]\nstuck = stuck\n")
    (packages / "stuck.py").write_text(STUCK)
    service.drop_in("[Service]\nWatchdogSec=3\n")
    service.configure('[backends]\nchoose = "stuck"\n')
    try:
        service.start()
        first = service.pid()
        answered = service.command("status")[1]
        wait_for(lambda: service.pid() not in (0, first), 30, "another daemon", pause=0.2)
    finally:
        shutil.rmtree(info)
        (packages / "stuck.py").unlink()

    assert f", pid {first}, up for " in answered.splitlines()[0]
    assert "Watchdog timeout" in service.box.journal(UNIT)


def test_a_daemon_that_dies_is_restarted_whatever_ends_it(service: Service) -> None:
    """Also one that is killed comes back within seconds, and its locks and socket are in nobody's way."""
    service.start()
    first = service.pid()

    service.signal("KILL")

    wait_for(lambda: service.pid() not in (0, first), 20, "another daemon", pause=0.1)
    service.box.wait(UNIT)
    assert service.command("status")[1].startswith("cdi-courier ")


def test_stopping_leaves_what_hooks_and_commands_use(service: Service) -> None:
    """The state directory stays, nothing of the daemon's is left in it, and status says that none runs."""
    service.start()
    (service.box.root / "run/cdi-courier/table.json").write_text("{}")
    service.box.run(["systemctl", "stop", UNIT])

    left = service.box.run(["ls", "/run/cdi-courier"]).stdout.split()
    code, text = service.command("status")

    assert left == ["table.json"]
    assert service.show("Result") == "success"
    assert code == 1
    assert text.startswith("cdi-courier: STA001: no daemon runs")


@pytest.mark.parametrize(
    ("drop_in", "settings", "words"),
    [
        (
            "",
            '[service]\nstate_dir = "/usr/share/x"\n',
            "HST003: cannot make the lock file /usr/share/x/lock",
        ),
        ("[Service]\nReadOnlyPaths=/run\nRuntimeDirectory=\n", "", "HST003: cannot make the lock file"),
        ("", "[service]\nlog_level = 1\n", "SET004: /etc/cdi-courier/config.toml, line 2"),
    ],
    ids=["a folder outside", "a read-only /run", "wrong settings"],
)
def test_a_start_that_fails_says_why_in_the_journal(
    service: Service, drop_in: str, settings: str, words: str
) -> None:
    """The cause is one message with its code, without a traceback, and it is tried again."""
    service.drop_in(drop_in)
    service.configure(settings)
    service.box.run(["systemctl", "start", UNIT], check=False)

    service.wait_for_log(words, count=2)
    assert "Traceback" not in service.box.journal(UNIT)


def test_a_read_only_run_is_no_end(service: Service) -> None:
    """systemd tries again and again, and the service is up by itself once /run can be written."""
    service.drop_in("[Service]\nReadOnlyPaths=/run\nRuntimeDirectory=\n")
    service.box.run(["systemctl", "start", UNIT], check=False)
    service.wait_for_log("HST003: cannot make the lock file")
    service.drop_in("")

    service.box.wait(UNIT)
    told = service.command("status")[1]

    assert told.startswith("cdi-courier ")
    assert "Traceback" not in service.box.journal(UNIT)


def scraped(service: Service, listen: str) -> str:
    """What a process of root's in the box gets at the address."""
    script = (
        "import http.client, socket, sys\n"
        "listen = sys.argv[1]\n"
        "connection = http.client.HTTPConnection('localhost')\n"
        "if listen.startswith('unix:'):\n"
        "    connection.sock = socket.socket(socket.AF_UNIX)\n"
        "    connection.sock.connect(listen.removeprefix('unix:'))\n"
        "else:\n"
        "    connection = http.client.HTTPConnection(listen)\n"
        "connection.request('GET', '/metrics')\n"
        "print(connection.getresponse().read().decode())\n"
    )
    return service.box.run(["python3", "-c", script, listen]).stdout


@pytest.mark.parametrize("listen", ["unix:/run/cdi-courier/metrics.sock", "127.0.0.1:9465"])
def test_metrics_are_served_from_within_the_sandbox(service: Service, listen: str) -> None:
    """A socket in the state directory and a loopback port work with the unit's few rights."""
    packages = service.box.root / "usr/lib/python3/dist-packages/prometheus_client"
    shutil.copytree(Path(prometheus_client.__file__).parent, packages)
    service.configure(f'[metrics]\nlisten = "{listen}"\n')
    try:
        service.start()
        service.wait_for_log(f"metrics at {listen}")
        service.box.run(["sh", "-c", "ip link set lo up 2>/dev/null || true"])
        text = scraped(service, listen)
    finally:
        shutil.rmtree(packages)

    assert 'cdi_courier_session_state{socket="/var/run/nri/nri.sock",state="waiting"} 1.0' in text
    assert "process_resident_memory_bytes" in text


def test_without_prometheus_client_the_service_serves_and_says_what_to_install(service: Service) -> None:
    """What is optional and missing costs nothing but itself."""
    service.configure('[metrics]\nlisten = "127.0.0.1:9465"\n')
    service.start()

    service.wait_for_log("SET032: [metrics] listen is set, but prometheus_client cannot be imported")
    assert service.show("ActiveState") == "active"
    assert "SET032" in service.command("status")[1]


NRI_ON = 'version = 2\n[plugins."io.containerd.nri.v1.nri"]\ndisable = false\n'


@pytest.fixture
def beside_containerd(trixie: Path) -> Iterator[Service]:
    """The unit in a Debian 13 of its own, with that suite's containerd, whose NRI is on."""

    def prepare(root: Path) -> None:
        installed(root)
        (root / "etc/containerd").mkdir(exist_ok=True)
        (root / "etc/containerd/config.toml").write_text(NRI_ON)

    with Box(trixie, prepare=prepare, tmpfs=["/var/lib/containerd"]) as box:
        yield Service(box)


def test_a_real_containerd_is_described_and_served_from_within_the_sandbox(
    beside_containerd: Service,
) -> None:
    """What its API, its configuration and the kernel tell is learnt with the unit's few rights."""
    service = beside_containerd
    service.start()

    def described() -> bool:
        return service.command("status")[0] == 0 and "delivering by edits" in service.command("status")[1]

    wait_for(described, 30, lambda: f"a session\n{service.box.journal(UNIT)}", pause=0.2)
    service.wait_for_log("served by nri: NRI is on")
    runtime = json.loads(service.command("status", "--json")[1])["runtimes"]["containerd"]

    assert (runtime["backend"], runtime["state"], runtime["sessions"]) == ("nri", "active", 1)
    assert runtime["version"].startswith("1.7.")
    assert "HST" not in service.box.journal(UNIT)


def test_under_systemd_the_two_meet_whatever_is_started_or_restarted_first(
    beside_containerd: Service,
) -> None:
    """In every order of both units' starts and restarts the end is one active session, and no unit failed."""
    service = beside_containerd
    units = {"daemon": UNIT, "runtime": "containerd.service"}
    steps = ("start daemon", "start runtime", "restart daemon", "restart runtime")
    orders = [
        order
        for order in itertools.permutations(steps)
        if all(order.index(f"start {name}") < order.index(f"restart {name}") for name in units)
    ]

    def state() -> str:
        with contextlib.suppress(ValueError, StopIteration):
            runtimes = json.loads(service.command("status", "--json")[1])["runtimes"].values()
            return str(next(found["state"] for found in runtimes if "socket" in found))
        return "no daemon"

    results = {}
    for order in orders:
        service.box.run(["systemctl", "stop", *units.values()])
        # Debian's containerd may be started five times in ten seconds.
        service.box.run(["systemctl", "reset-failed", units["runtime"]])
        for step in order:
            act, _, name = step.partition(" ")
            service.box.run(["systemctl", act, units[name]])
        wait_for(
            lambda: state() == "active", 20, lambda: f"a session\n{service.box.journal(UNIT)}", pause=0.2
        )
        results[order] = [service.box.run(["systemctl", "is-active", unit]).stdout for unit in units.values()]

    assert set(map(tuple, results.values())) == {("active\n", "active\n")}
    assert len(results) == 6
    assert "Traceback" not in service.box.journal(UNIT)
