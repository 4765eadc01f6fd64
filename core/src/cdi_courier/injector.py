"""The pipeline: who asks → may they → what is it → an Injection. The one object a backend is handed.

It must not know how anything is delivered. Every arrow is a function of its own that can be called and
tested alone: `annotations.requested_devices`, `policy.require`, `Snapshot.resolve`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from cdi_courier.annotations import Dialect, asked, compile_keys, devices_asked, needles
from cdi_courier.errors import CdiError, CourierError, PolicyDenied
from cdi_courier.policy import require

if TYPE_CHECKING:
    from cdi_courier.annotations import Asked
    from cdi_courier.cdi.model import ContainerEdits
    from cdi_courier.cdi.registry import Registry
    from cdi_courier.cdi.snapshot import Snapshot
    from cdi_courier.request import ContainerRequest
    from cdi_courier.settings import Settings


_KEPT_GRANTS: Final = 64  # with annotations of at most [annotations] max_length each


@frozen
class Injection:
    """What a container gets.

    names: qualified device names in the order asked for, without duplicates.
    edits: the container edits of those names, merged as CDI prescribes.
    annotations: name → the annotation key that asked for it.
    files: name → the spec file that defines it.
    """

    names: tuple[str, ...]
    edits: ContainerEdits
    annotations: Mapping[str, str] = field(factory=dict)
    files: Mapping[str, str] = field(factory=dict)


@frozen
class Skipped:
    """A request left unanswered because the settings say so; the container starts without devices."""

    names: tuple[str, ...]
    error: CourierError


@frozen
class Grant:
    """What a container asks for and may have, before it is known what that is.

    requested: qualified name → the annotation key that asked for it, in the order asked for.
    rule: which rules allow it, for a person.
    """

    requested: Mapping[str, str]
    rule: str = ""


class Injector:
    """Answers requests from one set of settings and one registry. Stateless apart from the registry.

    families: the compiled annotation keys that it answers. needles: see `annotations.needles`.
    """

    def __init__(self, settings: Settings, registry: Registry, dialects: Iterable[Dialect]) -> None:
        wanted = {dialect.name: dialect for dialect in dialects}
        self.families = compile_keys(
            [wanted[name] for name in settings.annotations.dialects], settings.annotations.domains
        )
        self.needles = needles(self.families)
        # Most pods of a node ask in the same few words, from the same few namespaces: what they asked and all
        # of them that can make a difference to the policy → the grant. Nothing in it is about files, and
        # refusals are not kept: they are worded anew, for whoever asks.
        self._grants: dict[tuple[object, ...], Grant] = {}
        self._max_names = settings.annotations.max_names
        self._max_length = settings.annotations.max_length
        self._policy = settings.policy.compiled()
        self._looks_at_names = self._policy.looks_at_names
        self._skip_denied = settings.delivery.on_denied == "skip"
        self._skip_unresolvable = settings.delivery.on_unresolvable == "skip"
        self.registry = registry

    def requested(self, request: ContainerRequest) -> dict[str, str]:
        """Name → annotation key; empty if the container asks for nothing. Raises `AnnotationError`."""
        return self._devices(asked(request.annotations, request.container, self.families))

    def inject(self, request: ContainerRequest) -> Injection | Skipped | None:
        """What the container gets; None if it asks for nothing, in which case nothing else is looked at.

        Raises `AnnotationError`, `PolicyDenied` and `CdiError` (a name that cannot be resolved), the last
        two only where the settings do not say ``skip``. It is always the whole request that fails or is
        skipped: a container with half of its devices would be harder to understand than one without. Reads
        spec files if they have changed; who must not wait for that calls the two halves of this.
        """
        grant = self.grant(request)
        return self.resolve(grant, self.registry.snapshot()) if isinstance(grant, Grant) else grant

    def grant(self, request: ContainerRequest) -> Grant | Skipped | None:
        """The first half of `inject`: who asks for what, and may they? Touches no file.

        Who may have the same for the same reason gets the same object again, so that what is made of it can
        be kept.
        """
        found = asked(request.annotations, request.container, self.families)
        if not found:
            return None
        who: tuple[object, ...] = request.origin, request.namespace
        if self._looks_at_names:
            who += request.pod, request.container
        grant = self._grants.get((found, who))
        if grant is not None:
            return grant
        judged = self._judge(request, self._devices(found))
        if isinstance(judged, Grant):
            if len(self._grants) >= _KEPT_GRANTS:
                self._grants.clear()
            self._grants[found, who] = judged
        return judged

    def _judge(self, request: ContainerRequest, requested: dict[str, str]) -> Grant | Skipped | None:
        if not requested:
            return None
        try:
            return Grant(requested, require(self._policy, request, requested))
        except PolicyDenied as error:
            if self._skip_denied:
                return Skipped(tuple(requested), error)
            raise

    def _devices(self, found: Asked) -> dict[str, str]:
        return devices_asked(found, self._max_names, self._max_length)

    def resolve(self, grant: Grant, snapshot: Snapshot) -> Injection | Skipped:
        """The second half of `inject`: what is it?"""
        names = tuple(grant.requested)
        try:
            resolution = snapshot.resolve(names)
        except CdiError as error:
            if self._skip_unresolvable:
                return Skipped(names, error)
            raise
        return Injection(names, resolution.edits, grant.requested, resolution.files)
