"""Answers one connection's CreateContainer out of the injector. It parses no annotation and no CDI file."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, frozen
from cdi_courier import logs
from cdi_courier.errors import CdiError, CourierError, DeliveryError, quoted
from cdi_courier.injector import Grant, Injection, Injector, Skipped
from cdi_courier.logs import Decision
from cdi_courier.request import ContainerRequest

from . import NAME, adjustment, modes, runtimes
from .edits import PreparedEdits, Undeliverable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from cdi_courier.cdi.model import ContainerEdits
    from cdi_courier.cdi.registry import Registry
    from cdi_courier.cdi.snapshot import Snapshot
    from cdi_courier.hookspecs import Choice, ServeContext
    from cdi_courier.settings import Settings

    from .connection import Answer
    from .modes import Mode
    from .session import Configured, CreateContainer

logger = logging.getLogger("cdi_courier.nri")

_MAX_PREPARED = 256
_MAX_LISTED = 8
_MAX_MISSED = 100
_MAX_DECISIONS = 100
_MAX_KINDS = 100
_OTHER_KINDS = "other"
_STOPPED = 4  # ContainerState CONTAINER_STOPPED


@frozen
class Missed:
    """A container that asks for devices and was created without this plugin, found at Synchronize."""

    request: ContainerRequest
    names: tuple[str, ...]
    cure: str


@frozen(eq=False, repr=False)
class _Terms:
    """What a request is answered by, from its beginning to its end; replaced as a whole."""

    settings: Settings
    injector: Injector
    registry: Registry
    mode: Mode

    @property
    def tolerant(self) -> bool:
        return self.settings.delivery.undeliverable == "warn"


@define(eq=False, repr=False)  # frozen costs more, and nobody changes it
class _Outcome:
    """What was decided, perhaps not on its way yet. began: a `time.monotonic`. lost: edits are missing."""

    event: CreateContainer
    request: ContainerRequest
    verdict: str
    names: tuple[str, ...]
    rule: str
    began: float
    lost: bool = False
    error: CourierError | None = None

    def decision(self, runtime: str, now: float) -> Decision:
        """In the words of the log. now: a `time.monotonic`."""
        error = self.error
        found = (
            Decision(self.verdict, self.request, self.names, self.rule, runtime)
            if error is None
            else Decision(
                self.verdict,
                self.request,
                self.names,
                self.rule,
                runtime,
                code=error.code,
                cause=_short(error),
                what=_in_one_line(error),
            )
        )
        found.duration = now - self.began
        return found


@define(eq=False, repr=False)
class _Ready:
    """What a grant comes to with one snapshot. by_names: the answer by names where none is there already."""

    grant: Grant
    injection: Injection
    by_names: bytes


class Handler:
    """One connection's answers.

    path: the socket, by which ``[runtimes]`` may know the runtime. reader: reads changed spec files.

    missed: what the last Synchronize found. counts: containers asked about, what became of them, and how
    many could not be resolved or delivered, whatever became of those. refusals, skips: error code →
    containers. kinds: CDI kind → devices injected.
    """

    def __init__(self, context: ServeContext, path: str, reader: ThreadPoolExecutor) -> None:
        settings = context.settings
        self.missed: tuple[Missed, ...] = ()
        self.counts = dict.fromkeys(
            ("requests", "injected", "skipped", "refused", "unresolved", "undeliverable"), 0
        )
        self.refusals: dict[str, int] = {}
        self.skips: dict[str, int] = {}
        self.kinds: dict[str, int] = {}
        self._context = context
        self._reader = reader
        self._path = path
        self._info: Configured | None = None
        self._runtime = ""
        self._state: tuple[str, float, str] = ("waiting", time.time(), "")
        self._changing = threading.Lock()
        mode = modes.before_introduction(settings)
        self._terms = _Terms(settings, context.injector, context.injector.registry, mode)
        self._prepared: dict[int, tuple[ContainerEdits, PreparedEdits]] = {}
        self._told_unowned = False
        # Outcomes whose answers may not be on their way yet.
        self._unsaid: list[_Outcome] = []
        self._decisions: deque[Decision] = deque(maxlen=_MAX_DECISIONS)
        # By identity of the grant, which the injector keeps; all of one snapshot.
        self._ready: dict[int, _Ready] = {}
        self._snapshot: Snapshot | None = None
        # Token of a request that waits for spec files → when it began, what was asked for, by which rule.
        self._waiting: dict[int, tuple[float, tuple[str, ...], str]] = {}

    def configured(self, info: Configured) -> None:
        """Decide what this runtime is sent."""
        self._info = info
        self._told_unowned = False
        self._runtime = f"{quoted(info.runtime_name)[1:-1]} {quoted(info.runtime_version)[1:-1]}"
        for outcome in self._unsaid:
            logger.warning(
                "not %s %s: the connection ended before the answer was sent",
                outcome.verdict,
                outcome.request,
            )
        self._unsaid.clear()
        self._waiting.clear()
        with self._changing:
            mode = self._decide(info, self._terms.settings)
            self._terms = evolve(self._terms, mode=mode)
        mode.tell()
        found = self._context.chosen(runtimes.kind(info.runtime_name), self._path)
        if found is None or not found.is_served_by(NAME) or not _is_version(info.runtime_version, found):
            # A runtime that has just come or become another one is not what was described.
            self._context.look()
        if info.config:
            logger.warning(
                "the runtime's configuration file for this plugin is not read; "
                "settings are those of cdi-courier"
            )

    def reconsider(self) -> None:
        """Decide anew, because the host's description has changed. Any thread."""
        with self._changing:
            self._change(self._terms.settings, self._terms.injector)

    def reload(self, settings: Settings, injector: Injector) -> None:
        """Answer with these from the next request on (`hookspecs.Reloadable`)."""
        with self._changing:
            self._change(settings, injector)

    def _change(self, settings: Settings, injector: Injector) -> None:
        info, before = self._info, self._terms.mode
        mode = modes.before_introduction(settings) if info is None else self._decide(info, settings)
        self._terms = _Terms(settings, injector, injector.registry, mode)
        if info is not None and mode != before:
            mode.tell()

    def _decide(self, info: Configured, settings: Settings) -> Mode:
        found = self._context.chosen(runtimes.kind(info.runtime_name), self._path)
        return modes.decide(info, self._path, settings, found)

    def observe(self, state: str, since: float, cause: str) -> None:
        """Take note of the connection's state (`NriConnection`'s observer)."""
        self._state = state, since, cause

    def status(self) -> dict[str, Any]:
        """The session as JSON. Any thread."""
        state, since, cause = self._state
        info, mode = self._info, self._terms.mode
        return {
            "state": "idle" if state == "active" and mode.idle else state,
            "since": since,
            "cause": cause or mode.idle,
            "kind": runtimes.kind(info.runtime_name) if info else "",
            "version": info.runtime_version if info else "",
            "delivery": mode.delivery,
            "why": mode.why,
            "counts": {**self.counts, "missed": len(self.missed)},
            "refusals": dict(self.refusals),
            "skips": dict(self.skips),
            "kinds": dict(self.kinds),
            "missed": [
                {"container": str(missed.request), "devices": list(missed.names), "cure": missed.cure}
                for missed in self.missed[:_MAX_MISSED]
            ],
        }

    def decisions(self) -> list[dict[str, Any]]:
        """The latest answers to containers that asked, as JSON. Any thread."""
        return [
            {
                "time": decision.time,
                "verdict": decision.verdict,
                "container": decision.who,
                "devices": list(decision.devices),
                "cause": decision.cause,
                "code": decision.code,
                "rule": decision.rule,
                "runtime": decision.runtime,
                "duration": decision.duration,
            }
            for decision in list(self._decisions)
        ]

    def synchronized(self, pods: list[Any], containers: list[Any]) -> None:
        """Report containers that exist without the devices they ask for; nothing can give them any now."""
        logger.info("synchronized: %d pods, %d containers exist already", len(pods), len(containers))
        terms = self._terms
        if terms.mode.idle:
            return
        by_id = {pod.id: pod for pod in pods}
        self.missed = tuple(
            missed
            for container in containers
            if container.state != _STOPPED
            and adjustment.STATUS_ANNOTATION not in container.annotations
            and (missed := _audit(terms.injector, by_id.get(container.pod_sandbox_id), container))
        )
        for missed in self.missed:
            what = f"it runs without {','.join(missed.names) or 'what it asks for'}; {missed.cure}"
            decision = Decision("missed", missed.request, missed.names, "", self._runtime, what=what)
            logs.tell(logger, logging.WARNING, decision)

    def ignores(self, request: bytes) -> bool:
        """Whether a container, of which only the bytes are known, can ask for nothing; counts it if so.

        Protobuf writes a string as it is, so an annotation that is there shows in the bytes.
        """
        for needle in self._terms.injector.needles:
            if needle in request:
                return False
        self.counts["requests"] += 1
        return True

    def create_container(self, event: CreateContainer, _: float) -> Answer:
        """The reply for one container; raises `CourierError` for a refusal. `answered` logs either.

        Spec files that have changed are read by another thread; then the reply is a Future of the function
        that gives it.
        """
        self.counts["requests"] += 1
        began = time.monotonic()
        terms = self._terms
        request = _request(event.pod, event.container)
        try:
            grant = None if terms.mode.idle else terms.injector.grant(request)
        except CourierError as error:
            fields = error.fields
            names = tuple(filter(None, fields.get("devices", "").split(",")))
            self._conclude(event, request, "refused", began, names, error=error, rule=fields.get("rule", ""))
            raise
        if grant is None:
            return b""
        if isinstance(grant, Skipped):
            return self._skip(event, request, grant, began, grant.error.fields.get("rule", ""))
        snapshot = terms.registry.current()
        if snapshot is None:
            self._waiting[event.token] = began, tuple(grant.requested), grant.rule
            answer = functools.partial(self._answer, terms, event, request, grant, began)
            return self._reader.submit(_read, terms.registry, answer)
        return self._answer(terms, event, request, grant, began, snapshot)

    def answered(self) -> None:
        """Count and log what has been decided since the last call."""
        now = time.monotonic()
        for outcome in self._unsaid:
            if self._waiting:
                self._waiting.pop(outcome.event.token, None)
            self._tell(outcome, now)
        self._unsaid.clear()

    def failed(self, event: CreateContainer, error: CourierError) -> None:
        """Take note of a refusal that is the connection's, whatever was decided."""
        decided = [outcome for outcome in self._unsaid if outcome.event is event]
        self._unsaid = [outcome for outcome in self._unsaid if outcome.event is not event]
        began, names, rule = self._waiting.pop(event.token, (time.monotonic(), (), ""))
        for outcome in decided:
            began, names, rule = outcome.began, outcome.names, outcome.rule
        request = _request(event.pod, event.container)
        self._conclude(event, request, "refused", began, names, error=error, rule=rule)

    def _answer(
        self,
        terms: _Terms,
        event: CreateContainer,
        request: ContainerRequest,
        grant: Grant,
        began: float,
        snapshot: Snapshot,
    ) -> bytes:
        lost = False
        try:
            if snapshot is not self._snapshot:
                self._ready.clear()
                self._snapshot = snapshot
            ready = self._ready.get(id(grant))
            if ready is None or ready.grant is not grant:
                injection = terms.injector.resolve(grant, snapshot)
                if isinstance(injection, Skipped):
                    return self._skip(event, request, injection, began, grant.rule)
                ready = self._keep(grant, injection)
            if terms.mode.delivery != "names":
                data, lost = self._by_edits(terms, event, request, ready.injection)
            elif present := event.container.CDI_devices:
                data = adjustment.by_names(ready.injection.names, {device.name for device in present})
            else:
                data = ready.by_names
        except CourierError as error:
            names = tuple(grant.requested)
            self._conclude(event, request, "refused", began, names, error=error, rule=grant.rule)
            raise
        names = ready.injection.names
        self._unsaid.append(_Outcome(event, request, "injected", names, grant.rule, began, lost))
        return data

    def _keep(self, grant: Grant, injection: Injection) -> _Ready:
        if len(self._ready) >= _MAX_PREPARED:
            self._ready.clear()
        ready = self._ready[id(grant)] = _Ready(grant, injection, adjustment.by_names(injection.names))
        return ready

    def _by_edits(
        self, terms: _Terms, event: CreateContainer, request: ContainerRequest, injection: Injection
    ) -> tuple[bytes, bool]:
        """The reply, and whether edits are missing from it.

        Raises `DeliveryError` ``DLV001`` where edits are lost and that is not tolerated.
        """
        prepared = self._prepare(injection.edits, terms.mode.nri)
        found = event.details()
        data, (lost, unowned) = adjustment.by_edits(injection.names, prepared, found, event.data)
        if lost:
            error = _undeliverable(injection, lost)
            if not terms.tolerant:
                raise error
            logger.warning("%s misses edits: %s", request, error)
        if unowned and not self._told_unowned:
            # Once a session: it is the runtime that does not tell.
            self._told_unowned = True
            logger.warning(
                "device nodes such as %s belong to root, because this runtime does not tell the container's "
                "user; containers of other users open them only as their mode allows",
                quoted(unowned[0]),
            )
        return data, bool(lost)

    def _prepare(self, edits: ContainerEdits, nri: tuple[int, int]) -> PreparedEdits:
        # By identity, which is what a snapshot keeps; the reference to the edits keeps the number theirs.
        kept = self._prepared.get(id(edits))
        if kept is None or kept[1].nri != nri:
            if len(self._prepared) >= _MAX_PREPARED:
                self._prepared.clear()
            kept = self._prepared[id(edits)] = edits, PreparedEdits(edits, nri)
        return kept[1]

    def _skip(
        self, event: CreateContainer, request: ContainerRequest, skipped: Skipped, began: float, rule: str
    ) -> bytes:
        self._conclude(event, request, "skipped", began, skipped.names, error=skipped.error, rule=rule)
        return adjustment.skipped(skipped.error.code)

    def _conclude(
        self,
        event: CreateContainer,
        request: ContainerRequest,
        verdict: str,
        began: float,
        names: tuple[str, ...] = (),
        *,
        error: CourierError,
        rule: str = "",
    ) -> None:
        """Note why a container gets nothing, to be counted and logged once the answer is on its way."""
        self._unsaid.append(_Outcome(event, request, verdict, names, rule, began, error=error))

    def _tell(self, outcome: _Outcome, now: float) -> None:
        error = outcome.error
        decision = outcome.decision(self._runtime, now)
        counts = self.counts
        counts[outcome.verdict] += 1
        level = logging.INFO
        if error is None:
            for name in outcome.names:
                self._count_kind(name.partition("=")[0])
            counts["undeliverable"] += outcome.lost
        else:
            level = logging.WARNING
            by_code = self.refusals if outcome.verdict == "refused" else self.skips
            by_code[error.code] = by_code.get(error.code, 0) + 1
            counts["unresolved"] += isinstance(error, CdiError)
            counts["undeliverable"] += isinstance(error, DeliveryError)
        self._decisions.append(decision)
        logs.tell(logger, level, decision)

    def _count_kind(self, kind: str) -> None:
        # Only names that spec files define are injected, so there are few; yet a scrape must stay small.
        if kind not in self.kinds and len(self.kinds) >= _MAX_KINDS:
            kind = _OTHER_KINDS
        self.kinds[kind] = self.kinds.get(kind, 0) + 1


def _read(registry: Registry, then: Callable[[Snapshot], bytes]) -> Callable[[], bytes]:
    # The answer is given in the connection's thread, and only if it is still waited for.
    return functools.partial(then, registry.snapshot())


def _audit(injector: Injector, pod: Any, container: Any) -> Missed | None:
    if pod is None:
        return None
    request = _request(pod, container)
    names: tuple[str, ...] = ()
    try:
        names = tuple(injector.requested(request))
        grant = injector.grant(request)
    except CourierError as error:
        return Missed(request, names, f"a new one would be refused: {_short(error)}")
    if not grant:
        return None
    cure = "delete the pod, so that it is made anew"
    if isinstance(grant, Skipped):
        cure = f"a new one would not get them either: {_short(grant.error)}"
    return Missed(request, names, cure)


def _is_version(told: str, found: Choice) -> bool:
    """Whether a runtime tells the version that it was described with; CRI and NRI write a v differently."""
    return told.removeprefix("v") == found.runtime.version.removeprefix("v")


def _short(error: CourierError) -> str:
    # Without the hint, which may hold lines to paste: it comes with the refusal itself.
    return f"{error.code}: {error.message}"


def _in_one_line(error: CourierError) -> str:
    if "\n" in error.hint:
        return f"{_short(error)} (`cdi-courier policy check` prints what would allow it)"
    return str(error)


def _request(pod: Any, container: Any) -> ContainerRequest:
    return ContainerRequest(pod.annotations, namespace=pod.namespace, pod=pod.name, container=container.name)


def _undeliverable(injection: Injection, lost: Sequence[Undeliverable]) -> DeliveryError:
    listed = "; ".join(f"{edit}: {reason}" for edit, reason in lost[:_MAX_LISTED])
    more = f"; and {len(lost) - _MAX_LISTED} more" if len(lost) > _MAX_LISTED else ""
    files = dict.fromkeys(injection.files.values())
    return DeliveryError(
        "DLV001",
        f"not all edits of {quoted(','.join(injection.names))} can be delivered: {listed}{more}",
        '[delivery] undeliverable = "warn" starts containers without them; a runtime that resolves CDI names '
        "itself delivers all",
        devices=",".join(injection.names),
        files=",".join(files),
    )
