"""What happens to annotated containers while the plugin and the runtime are killed, stopped and hung."""

from __future__ import annotations

import itertools
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import chaos
from support.chaos import Creation, Storm, Window
from support.cri import UNKNOWN, CriError, Pod
from support.lab import Lab
from support.scenario import (
    ALL,
    HOSTS,
    STATUS,
    annotated,
    hook,
    on_host,
    run,
    serving,
    shell,
    spec,
)
from support.waiting import wait_for

pytestmark = pytest.mark.runtime

PODS, EVERY, PLAIN_EVERY, AWAY = 200, 12, 8, 3

SAMPLES = 5  # containers of a kind that are started
CLIENTS, GENERATIONS = 3, 4
HASTY = 0.1  # of the 2 s of the runtime: the least that can be set

# Containers that are created while a plugin is on its way in are seen by it or wait for it from here on
# (docs/facts.md#nri-handshake).
SYNC_BLOCKS = {1: (1, 7, 26), 2: (2, 0, 3)}

WHOLE = frozenset({"/dev/courier0", "/dev/courier1", "env", "mount", "hook", "marker"})
NOTHING: frozenset[str] = frozenset()


@pytest.fixture(params=HOSTS)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Every host in turn, clean."""
    yield from on_host(request, request.param)


@dataclass(frozen=True)
class Device:
    """The device of many parts: its spec file, and what shows in a container that it is there."""

    file: Path
    record: Path

    @classmethod
    def of(cls, lab: Lab) -> Device:
        device = cls(lab.root / "mounted", lab.root / "hook-of-all")
        device.file.write_text("mounted\n")
        device.record.unlink(missing_ok=True)
        nodes = [
            {"path": "/dev/courier0", "hostPath": "/dev/null", "permissions": "rw"},
            {"path": "/dev/courier1", "hostPath": "/dev/kmsg", "permissions": "rw"},
        ]
        mount = {"hostPath": str(device.file), "containerPath": "/run/courier", "options": ["ro", "bind"]}
        edits = {"deviceNodes": nodes, "mounts": [mount], **hook(device.record)}
        lab.write_spec("all.json", spec(all=edits))
        return device

    def parts(self, config: dict[str, Any]) -> frozenset[str]:
        """Which parts the OCI runtime's configuration has; `WHOLE` is all of them."""
        found = {node["path"] for node in config["linux"].get("devices") or []} & WHOLE
        hooks = (config.get("hooks") or {}).get("createContainer") or []
        shown = {
            "env": "COURIER_ALL=yes" in config["process"]["env"],
            "mount": any(mount["source"] == str(self.file) for mount in config["mounts"]),
            "hook": any(str(self.record) in argument for one in hooks for argument in one["args"]),
            "marker": (config.get("annotations") or {}).get(STATUS) == f"injected:{ALL}",
        }
        return frozenset(found | {name for name, there in shown.items() if there})

    def seen(self, lab: Lab, container: str) -> list[bool]:
        """What a started container sees: both nodes opened, the variable, the mounted file."""
        scripts = (
            # Where there is no node, root would make a file.
            "test -c /dev/courier0 && test -c /dev/courier1 && exec 3> /dev/courier0 4> /dev/courier1",
            'test "$COURIER_ALL" = yes',
            "grep -q mounted /run/courier",
        )
        return [shell(lab, container, script)[0] == 0 for script in scripts]

    def hooks_run(self) -> int:
        return self.record.read_text().count("ran\n") if self.record.exists() else 0


@dataclass(frozen=True)
class Found:
    """A container that exists after the storm, and the attempt that made it."""

    id: str
    creation: Creation
    state: int
    parts: frozenset[str]


def found_after(lab: Lab, storm: Storm, device: Device) -> list[Found]:
    """Every container of the storm, also those whose creation the client took for failed."""
    attempts = {creation.pod: creation for creation in storm.creations}
    names = {pod.id: pod.metadata.name for pod in lab.cri.list_pods()}
    return [
        Found(
            container.id,
            attempts[names[container.pod_sandbox_id]],
            container.state,
            device.parts(lab.cri.runtime_spec(container.id)),
        )
        for container in lab.cri.list_containers()
        if names[container.pod_sandbox_id] in attempts
    ]


def large_spec(generation: int, suffix: str) -> str:
    """A spec file of more than 1 MiB whose device `ALL` says which one it is, by its last bytes."""
    edits = {"env": [f"GENERATION={generation}"]}
    document = spec(**{f"d{number}": {"env": ["FILLER=" + "x" * 16]} for number in range(15_000)}, all=edits)
    if suffix == "json":
        return json.dumps(document)
    lines = [json.dumps(device) for device in document.pop("devices")]
    head = "".join(f"{key}: {value}\n" for key, value in document.items())
    return head + "devices:\n" + "".join(f"- {line}\n" for line in lines)


def generation_of(lab: Lab, container: str) -> int | None:
    """Which `large_spec` the container has been made from; None if from none."""
    env = lab.cri.runtime_spec(container)["process"]["env"]
    values = [entry.removeprefix("GENERATION=") for entry in env if entry.startswith("GENERATION=")]
    return int(values[0]) if values else None


def overlooked(
    storm: Storm, missed: list[Creation], log: str, ways_in: list[Window]
) -> list[tuple[str, Window]]:
    """Containers without devices that were there before a session's end and that it has not named.

    missed: all that have none. log: the plugin's. Each comes with that session's way in. A later session may
    have named them. One whose log was cut off by a kill says nothing about whom it would have named.
    """
    found = []
    for listing in chaos.listings(log):
        if not listing.whole:
            continue
        # The runtime sends the list before the plugin logs it, in whole milliseconds.
        way_in = [way_in for way_in in ways_in if way_in.listed < listing.at + 0.001][-1]
        end = storm.next_kill(way_in.listed)
        found += [
            (creation.name, way_in)
            for creation in missed
            if creation.ended <= end and creation.name not in listing.missed
        ]
    return found


def sync_blocks(lab: Lab) -> bool:
    """Whether the runtime creates no container while a plugin is on its way in."""
    version = tuple(int(part) for part in re.findall(r"\d+", lab.cri.version().runtime_version)[:3])
    return version >= SYNC_BLOCKS[version[0]]


def test_two_hundred_pods_under_kills_have_their_devices_or_are_reported(
    lab: Lab, record_property: Callable[[str, object], None]
) -> None:
    """Each annotated container has the whole device, or nothing of it and is named; all others neither."""
    device = Device.of(lab)
    courier = serving(lab)
    run(lab, annotated(lab, "first", pod=ALL))  # the runtime has read the spec file now
    device.record.unlink()
    began = time.time()

    storm = chaos.storm(lab, courier, pods=PODS, value=ALL, every=EVERY, plain_every=PLAIN_EVERY, away=AWAY)
    took = time.time() - began
    courier.stop()
    mark = courier.mark()
    courier.start()
    courier.wait_for_log("synchronized:", since=mark)
    courier.stop()  # the log is whole then
    found = found_after(lab, storm, device)
    # The runtime has lost track of one whose creation it died in: it never starts it and lists it to nobody.
    alive = [one for one in found if one.state != UNKNOWN]
    missed = [one for one in alive if one.creation.asks and one.parts == NOTHING]
    served = [one for one in alive if one.creation.asks and one.parts == WHOLE]
    ways_in = chaos.windows(lab.containerd.log())
    lost = overlooked(storm, [one.creation for one in missed], courier.log(), ways_in)
    figures = {
        "seconds": round(took, 1),
        "kills": len(storm.kills),
        "attempts": len(storm.creations),
        "containers": len(found),
        "served": len(served),
        "missed": len(missed),
        "unknown": len(found) - len(alive),
        "overlooked": len(lost),
    }
    print(figures)
    for name, value in figures.items():
        record_property(name, value)

    # The storm was one.
    assert sum(creation.error is None for creation in storm.creations) == PODS
    assert {kill.victim for kill in storm.kills} == {"plugin", "runtime"}
    assert len(missed) >= AWAY - 1  # of three pods at most one is plain
    assert len(served) >= EVERY / 2
    # Nothing is half there, whatever has become of the container.
    assert {one.parts for one in found} <= {WHOLE, NOTHING}
    assert [one for one in found if not one.creation.asks and one.parts] == []
    assert [one for one in found if one.state == UNKNOWN and one.creation.error is None] == []
    # No client was told of success for a container that is not there.
    assert {creation for creation in storm.creations if creation.error is None} <= {
        one.creation for one in alive
    }
    assert chaos.listings(courier.log(mark))[-1].missed == {one.creation.name for one in missed}
    # Each session has named at once what had no devices at its beginning, and nothing slipped past it.
    if sync_blocks(lab):
        assert lost == []
    for name, way_in in lost:
        creation = next(one.creation for one in missed if one.creation.name == name)
        assert creation.began <= way_in.active, name
        assert creation.ended >= way_in.began, name
    # The plugin was cut off by kills alone, and refused nothing but for want of time.
    ends = courier.log().count("NRI010: the runtime closed the connection")
    assert ends <= sum(kill.victim == "runtime" for kill in storm.kills)
    refusals = [str(creation.error) for creation in storm.creations if creation.error]
    assert [text for text in refusals if re.search(r"\b[A-Z]{3}(?!015)\d{3}: ", text)] == []
    # What the OCI runtime was told is what processes see.
    for sample, there in ((served[:: len(served) // SAMPLES], True), (missed[:SAMPLES], False)):
        for one in sample:
            lab.cri.start(one.id)
            assert device.seen(lab, one.id) == [there] * 3
    assert device.hooks_run() == len(served[:: len(served) // SAMPLES])


# Runtimes that come and go


def test_a_plugin_outlives_five_ends_of_its_runtime(lab: Lab) -> None:
    """It serves each runtime that comes, has nobody to report, and is the same process all the time."""
    device = Device.of(lab)
    courier = serving(lab)
    assert courier.process is not None
    pid = courier.process.pid
    served = []

    for turn in range(5):
        mark = courier.mark()
        (lab.containerd.kill if turn % 2 else lab.containerd.stop)()
        lab.containerd.start()
        courier.wait_for_log("synchronized:", since=mark)
        served.append(run(lab, annotated(lab, f"turn-{turn}", pod=ALL)))

    assert [device.parts(lab.cri.runtime_spec(container)) for container in served] == [WHOLE] * 5
    assert device.seen(lab, served[0]) == device.seen(lab, served[-1]) == [True] * 3
    assert [listing.missed for listing in chaos.listings(courier.log())] == [NOTHING] * 6
    assert (courier.running, courier.process.pid) == (True, pid)


# Plugins that hang


def test_a_plugin_that_hung_names_whom_it_has_missed(lab: Lab) -> None:
    """Stopped for longer than the runtime waits, it is back after SIGCONT by itself and serves the next."""
    device = Device.of(lab)
    courier = serving(lab)
    pod = annotated(lab, pod=ALL)
    before = run(lab, pod, "before")
    mark = courier.mark()
    assert courier.process is not None

    courier.process.send_signal(signal.SIGSTOP)
    try:
        waited_for = run(lab, pod, "waited-for")
        not_asked = run(lab, pod, "not-asked")
    finally:
        courier.process.send_signal(signal.SIGCONT)
    courier.wait_for_log("synchronized:", since=mark)
    after = run(lab, pod, "after")
    courier.wait_for_log("injected gpu-operator/asks/after: ", since=mark)

    containers = (before, waited_for, not_asked, after)
    assert [device.parts(lab.cri.runtime_spec(one)) for one in containers] == [WHOLE, NOTHING, NOTHING, WHOLE]
    assert device.hooks_run() == 2
    assert chaos.listings(courier.log(mark))[-1].missed == {
        "gpu-operator/asks/waited-for",
        "gpu-operator/asks/not-asked",
    }
    assert len(re.findall(r"NRI session 1 on .* closed after .* NRI010: ", courier.log(mark))) == 1


# Spec files that take long to read


@pytest.mark.parametrize("lab", [name for name in HOSTS if name.endswith("-edits")], indirect=True)
@pytest.mark.parametrize(
    ("suffix", "deadline"), [("json", 0.7), ("yaml", 0.7), ("yaml", HASTY)], ids=["json", "yaml", "hasty"]
)
def test_large_spec_files_replaced_under_load_are_never_stale(lab: Lab, suffix: str, deadline: float) -> None:
    """Each container has the file's content as of its creation, or is refused because reading takes long."""

    def replace(generation: int) -> None:
        path = lab.write_spec(f"all.{suffix}", large_spec(generation, suffix))
        assert 1 << 20 < path.stat().st_size < 2 << 20

    replace(0)
    courier = serving(lab, {"nri": {"deadline": deadline}})
    pods = [annotated(lab, f"asks-{number}", pod=ALL) for number in range(CLIENTS)]
    created: list[tuple[str, int, int]] = []
    refusals: list[str] = []
    begun = done = 0  # the generation that is being put in place, and the one that is
    over = threading.Event()

    def client(pod: Pod) -> None:
        for number in itertools.count():
            if over.is_set():
                return
            oldest = done
            try:
                container = lab.cri.create_container(pod, f"c{number}")
            except CriError as error:
                refusals.append(error.message)
            else:
                created.append((container, oldest, begun))

    with ThreadPoolExecutor(CLIENTS, "client") as executor:
        clients = [executor.submit(client, pod) for pod in pods]
        try:
            for generation in range(1, GENERATIONS + 1):
                begun = generation
                replace(generation)
                done = generation
                # At most half of these were asked for before the file was in place.
                goal = len(created) + 2 * CLIENTS
                wait_for(
                    lambda goal=goal: len(created) >= goal or any(future.done() for future in clients),
                    60,
                    "containers to be created with the new file",
                )
        finally:
            over.set()
        for future in clients:
            future.result()

    got = [generation_of(lab, container) for container, _, _ in created]
    wrong = [
        (generation, oldest, newest)
        for generation, (_, oldest, newest) in zip(got, created, strict=True)
        if generation is None or not oldest <= generation <= newest
    ]
    print(f"{len(created)} containers, {len(refusals)} refusals")
    assert wrong == []
    assert set(got) >= {GENERATIONS}
    assert refusals or deadline != HASTY
    assert [text for text in refusals if "NRI015: " not in text] == []
    assert courier.log().count("synchronized:") == 1
    assert "closed after" not in courier.log()
