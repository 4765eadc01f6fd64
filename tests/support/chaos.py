"""Pods created by several clients at once while the plugin and the runtime are killed under them.

It must not know what is right: it does, and records what was done, what exists afterwards and what both logs
say; tests judge.
"""

from __future__ import annotations

import itertools
import math
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from .courier import Courier
from .cri import CriError
from .lab import Lab
from .scenario import DOMAIN, GRANTED_NAMESPACE
from .waiting import wait_for

CONTAINER = "c1"  # the one container of every pod

_CLIENTS = 4
_ATTEMPTS = 10  # a pod that needs more is not merely unlucky
_PATIENCE = 60.0  # seconds for a step that takes one or two
_READY = 30.0

Victim = Literal["plugin", "runtime"]


@dataclass(frozen=True)
class Kill:
    """One SIGKILL. at, gone: just before it was sent and when the victim had ended, as `time.time` counts.

    created: pods that were done by then.
    """

    victim: Victim
    at: float
    gone: float
    created: int


@dataclass(frozen=True)
class Creation:
    """One attempt at a pod and its container, under a name that no other attempt has.

    asks: whether it has the annotation. began, ended: of the CreateContainer call, as `time.time` counts; of
    the pod's where it failed before. error: why the client took it for failed; the container may exist
    nevertheless.
    """

    pod: str
    asks: bool
    began: float
    ended: float
    error: CriError | None

    @property
    def name(self) -> str:
        """As the plugin's log names the container."""
        return f"{GRANTED_NAMESPACE}/{self.pod}/{CONTAINER}"


@dataclass
class Storm:
    """What was done: by attempts, in the order in which they ended, and by kills."""

    creations: list[Creation] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)

    def next_kill(self, since: float) -> float:
        """When the kill was sent that ended whatever lived at this instant; infinity if none was.

        A victim lives on for a moment after that, so this may lie before `since`.
        """
        return min((kill.at for kill in self.kills if kill.gone > since), default=math.inf)


@dataclass(frozen=True)
class Listing:
    """A Synchronize, as the plugin's log has it.

    at: its instant, rounded down to milliseconds. missed: the containers named because of it. whole: whether
    the log goes on after the last of them, which it does not where the plugin was killed in between.
    """

    at: float
    missed: frozenset[str]
    whole: bool


@dataclass(frozen=True)
class Window:
    """A plugin's way into the runtime, as the runtime's log has it.

    began: before the list of what exists was made. listed: when it was sent. active: from when on requests
    reach the plugin; infinity if that never came.
    """

    began: float
    listed: float
    active: float


def storm(
    lab: Lab, courier: Courier, *, pods: int, value: str, every: int, plain_every: int, away: int
) -> Storm:
    """Create pods as fast as it goes, and kill plugin and runtime in turn, each time after so many more.

    value: of the annotation, which all pods have but each plain_every-th. every: how many pods lie between
    kills. away: the plugin is started again at once, but every second time, beginning with the first, only
    after so many more pods. Returns when all pods are there; both daemons have been started again by then.
    """
    done = Storm()
    lock = threading.Lock()
    created = itertools.count(1)
    so_far = 0
    numbers = iter(range(pods))

    def client() -> None:
        nonlocal so_far
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            asks = number % plain_every != plain_every - 1
            for attempt in range(_ATTEMPTS):
                creation = _create(lab, f"pod-{number}-{attempt}", value if asks else None)
                with lock:
                    done.creations.append(creation)
                    if creation.error is None:
                        so_far = next(created)
                if creation.error is None:
                    break
                wait_for(lambda: _answers(lab), _READY, "the runtime to answer again")
            else:
                raise creation.error

    with ThreadPoolExecutor(_CLIENTS, "client") as executor:
        clients = [executor.submit(client) for _ in range(_CLIENTS)]

        def reached(count: int) -> bool:
            return so_far >= count or _over(clients)

        for turn in range(pods // every - 1):
            wait_for(lambda goal=(turn + 1) * every: reached(goal), _PATIENCE, "pods to be created")
            victim: Victim = "runtime" if turn % 2 else "plugin"
            at, by_then = time.time(), so_far
            (lab.containerd if victim == "runtime" else courier).kill()
            done.kills.append(Kill(victim, at, time.time(), by_then))
            if victim == "runtime":
                lab.containerd.start()
                continue
            if turn % 4 == 0:
                # Counted from when it was gone: what was being created may have been answered before.
                wait_for(lambda goal=so_far + away: reached(goal), _PATIENCE, "pods to miss the plugin")
            courier.start()
        for future in clients:
            future.result()
    return done


def listings(log: str) -> list[Listing]:
    """Every Synchronize in the log of ``cdi-courier run``, which may be that of several processes."""
    found: list[Listing] = []
    lines = log.splitlines()
    starts = [number for number, line in enumerate(lines) if ": synchronized: " in line]
    for start, end in itertools.pairwise([*starts, len(lines)]):
        missed, whole = set(), False
        for line in lines[start + 1 : end]:
            if ": serving with backend " in line:
                break  # another process
            named = re.search(r": missed (\S+): ", line)
            if named:
                missed.add(named[1])
            else:
                whole = True
        found.append(Listing(datetime.fromisoformat(lines[start][:23]).timestamp(), frozenset(missed), whole))
    return found


def windows(log: str) -> list[Window]:
    """Every plugin's way into the runtime in containerd's log."""
    found: list[Window] = []
    began = listed = 0.0
    for line in log.splitlines():
        stamp = re.match(r'time="([^"]+)"', line)
        if stamp is None:
            continue
        at = datetime.fromisoformat(stamp[1]).timestamp()
        if "Synchronizing NRI (plugin)" in line:
            began = at
        elif 'msg="synchronizing plugin ' in line:
            listed = at
            found.append(Window(began, listed, math.inf))
        elif re.search(r'msg="plugin .* connected', line) and found and listed:
            found[-1] = Window(began, listed, at)
            listed = 0.0
    return found


def _create(lab: Lab, name: str, value: str | None) -> Creation:
    annotations = {} if value is None else {f"{DOMAIN}/pod": value}
    began, error = time.time(), None
    try:
        pod = lab.cri.run_pod(name, GRANTED_NAMESPACE, annotations=annotations)
        began = time.time()
        lab.cri.create_container(pod, CONTAINER)
    except CriError as caught:
        error = caught
    return Creation(name, value is not None, began, time.time(), error)


def _answers(lab: Lab) -> bool:
    try:
        lab.cri.status(timeout=1)
    except CriError:
        return False
    return True


def _over(futures: Sequence[Future[Any]]) -> bool:
    # One that has failed ends the waiting too; its error is raised at the end.
    return any(future.done() and future.exception() for future in futures) or all(
        future.done() for future in futures
    )
