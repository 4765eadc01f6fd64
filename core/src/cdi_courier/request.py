"""Who asks: the container a request is about. Light module; it knows nothing of how a backend learnt it."""

from __future__ import annotations

from cdi_courier.errors import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    Origin = Literal["kubernetes", "local"]


class ContainerRequest:
    """One container about to be created, as a backend saw it. All strings are hostile.

    namespace, pod, container: names, ``""`` where the runtime did not say.
    annotations: the pod's annotations (a local container's own, where there is no pod).
    origin: ``kubernetes`` for everything over NRI or CRI, ``local`` for Podman, Docker and bare runtimes.
        Fixed by the backend and its installation, never inferred from annotations: whoever writes the
        annotations must not choose which rules apply to them.
    """

    __slots__ = ("annotations", "container", "namespace", "origin", "pod")

    def __init__(
        self,
        annotations: Mapping[str, str],
        *,
        namespace: str = "",
        pod: str = "",
        container: str = "",
        origin: Origin = "kubernetes",
    ) -> None:
        self.annotations = annotations
        self.namespace = namespace
        self.pod = pod
        self.container = container
        self.origin = origin

    def __str__(self) -> str:
        """``namespace/pod/container`` for a log: one harmless line, or a name could forge a second record."""
        return quoted(f"{self.namespace}/{self.pod}/{self.container}", None)[1:-1]

    def __repr__(self) -> str:
        return f"ContainerRequest({self.origin} {self.namespace}/{self.pod}/{self.container})"
