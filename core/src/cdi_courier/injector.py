"""The pipeline: who asks → may they → what is it → an Injection. The one object a backend is handed.

It must not know how anything is delivered. Every arrow is a function of its own that can be called and
tested alone: `annotations.requested_devices`, `policy.require`, `Snapshot.resolve`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen

from cdi_courier.annotations import Dialect, compile_keys, requested_devices
from cdi_courier.errors import CdiError, CourierError, PolicyDenied
from cdi_courier.policy import require

if TYPE_CHECKING:
    from cdi_courier.cdi.model import ContainerEdits
    from cdi_courier.cdi.registry import Registry
    from cdi_courier.cdi.snapshot import Snapshot
    from cdi_courier.request import ContainerRequest
    from cdi_courier.settings import Settings


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


class Injector:
    """Answers requests from one set of settings and one registry. Stateless apart from the registry."""

    def __init__(self, settings: Settings, registry: Registry, dialects: Iterable[Dialect]) -> None:
        wanted = {dialect.name: dialect for dialect in dialects}
        self._families = compile_keys(
            [wanted[name] for name in settings.annotations.dialects], settings.annotations.domains
        )
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
            self._families,
            max_names=self._max_names,
            max_length=self._max_length,
        )

    def inject(self, request: ContainerRequest) -> Injection | Skipped | None:
        """What the container gets; None if it asks for nothing, in which case nothing else is looked at.

        Raises `AnnotationError`, `PolicyDenied` and `CdiError` (a name that cannot be resolved), the last
        two only where the settings do not say ``skip``. It is always the whole request that fails or is
        skipped: a container with half of its devices would be harder to understand than one without.
        """
        requested = self.requested(request)
        if not requested:
            return None
        names = tuple(requested)
        try:
            require(self._policy, request, names)
        except PolicyDenied as error:
            if self._skip_denied:
                return Skipped(names, error)
            raise
        try:
            return self._resolve(self.registry.snapshot(), names, requested)
        except CdiError as error:
            if self._skip_unresolvable:
                return Skipped(names, error)
            raise

    def _resolve(self, snapshot: Snapshot, names: tuple[str, ...], requested: Mapping[str, str]) -> Injection:
        resolution = snapshot.resolve(names)
        return Injection(names, resolution.edits, requested, resolution.files)
