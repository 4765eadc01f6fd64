"""The pipeline: who asks → may they → what is it → an Injection. The one object a backend is handed.

It must not know how anything is delivered. Every arrow is a function of its own that can be called and
tested alone: `annotations.requested_devices`, `policy.require`, `Snapshot.resolve`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from attrs import field, frozen

from cdi_courier.annotations import Dialect, compile_keys, names_in_value, requested_devices
from cdi_courier.errors import CdiError, CourierError, PolicyDenied
from cdi_courier.policy import require

if TYPE_CHECKING:
    from cdi_courier.cdi.model import ContainerEdits
    from cdi_courier.cdi.registry import Registry
    from cdi_courier.cdi.snapshot import Snapshot
    from cdi_courier.request import ContainerRequest
    from cdi_courier.settings import Settings


_KEPT_VALUES: Final = 64  # of at most [annotations] max_length each


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

    families: the compiled annotation keys that it answers.
    """

    def __init__(self, settings: Settings, registry: Registry, dialects: Iterable[Dialect]) -> None:
        wanted = {dialect.name: dialect for dialect in dialects}
        self.families = compile_keys(
            [wanted[name] for name in settings.annotations.dialects], settings.annotations.domains
        )
        # Most pods of a node ask in the same few words. Refusals are not kept: they are worded anew.
        self._names_of = functools.lru_cache(_KEPT_VALUES)(names_in_value)
        self._max_names = settings.annotations.max_names
        self._max_length = settings.annotations.max_length
        self._policy = settings.policy.compiled()
        self._skip_denied = settings.delivery.on_denied == "skip"
        self._skip_unresolvable = settings.delivery.on_unresolvable == "skip"
        self.registry = registry

    def requested(self, request: ContainerRequest) -> dict[str, str]:
        """Name → annotation key; empty if the container asks for nothing. Raises `AnnotationError`."""
        return requested_devices(
            request.annotations,
            request.container,
            self.families,
            max_names=self._max_names,
            max_length=self._max_length,
            names_of=self._names_of,
        )

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
        """The first half of `inject`: who asks for what, and may they? Touches no file."""
        requested = self.requested(request)
        if not requested:
            return None
        try:
            rule = require(self._policy, request, requested)
        except PolicyDenied as error:
            if self._skip_denied:
                return Skipped(tuple(requested), error)
            raise
        return Grant(requested, rule)

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
