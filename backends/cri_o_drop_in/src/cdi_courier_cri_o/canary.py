"""A pod that is created with the wrapper's handler and removed again: the only proof that it is in effect.

What CRI-O says of its configuration proves nothing, for a reload changes that and no more
(docs/facts.md#cri-o-reload). It imports grpcio, so only commands may import it.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Final

from cdi_courier.descriptors import message_classes
from cdi_courier.errors import HostError
from cdi_courier.host import cri
from cdi_courier.host.files import Root

if TYPE_CHECKING:
    from collections.abc import Callable

_MESSAGES: Final = message_classes(
    "runtime.v1",
    {
        "RunPodSandboxRequest": "1 config PodSandboxConfig, 2 runtime_handler string",
        "RunPodSandboxResponse": "1 pod_sandbox_id string",
        "PodSandboxConfig": "1 metadata PodSandboxMetadata, 6 labels map<string,string>, "
        "8 linux LinuxPodSandboxConfig",
        "PodSandboxMetadata": "1 name string, 2 uid string, 3 namespace string, 4 attempt uint32",
        "LinuxPodSandboxConfig": "1 cgroup_parent string, 2 security_context LinuxSandboxSecurityContext",
        "LinuxSandboxSecurityContext": "1 namespace_options NamespaceOption",
        "NamespaceOption": "1 network int32, 2 pid int32, 3 ipc int32",
        "StopPodSandboxRequest": "1 pod_sandbox_id string",
        "StopPodSandboxResponse": "",
        "RemovePodSandboxRequest": "1 pod_sandbox_id string",
        "RemovePodSandboxResponse": "",
    },
)
_POD, _NODE = 0, 2  # NamespaceMode
_TIMEOUT: Final = 120.0  # seconds of one call; the image may have to be fetched
_GRACE: Final = 10.0
"""Seconds for the pod to end by itself. Seen on CRI-O 1.36.3: SIGTERM comes before the first process of a pod
that has just started has a handler for it, and is lost; and CRI-O kills only when the caller's time is up."""
_LONGEST: Final = 1000  # characters of CRI-O's words: the cause is at their end
NAMESPACE, NAME = "cdi-courier", "canary"


def run(endpoint: str, handler: str) -> str:
    """Create a pod with this handler, and remove it; what was seen, for a person.

    The pod shares its process namespace, so that CRI-O runs a container for it with the handler's program,
    and is on the host's network, which needs no plugin. Raises `HostError` ``CRI113`` if it cannot be
    created, ``CRI114`` if it cannot be removed.
    """
    with cri.client(Root(), endpoint) as client:

        def call(method: str, timeout: float = _TIMEOUT, **fields: Any) -> Any:
            name = f"/runtime.v1.RuntimeService/{method}"
            request = _MESSAGES[f"{method}Request"](**fields)
            try:
                started = client.start(name, request, _MESSAGES[f"{method}Response"], timeout)
                return client.finish(started, name, timeout, _LONGEST)
            except cri.Unimplemented:
                raise HostError("HST104", f"{name} is not there", "is it CRI-O that listens there?") from None

        try:
            pod = call("RunPodSandbox", config=_config(), runtime_handler=handler).pod_sandbox_id
        except HostError as error:
            hint = "see CRI-O's log"
            if error.code == "HST103":
                # CRI-O may be done with it yet, and nobody knows the pod's ID.
                hint += (
                    f"; `crictl pods --namespace {NAMESPACE}` shows a pod that came too late: `crictl rmp -f`"
                )
            raise HostError(
                "CRI113", f"no pod can be created with handler {handler}: {error.message}", hint
            ) from None
        _remove(call, pod)
    return f"a pod was created with handler {handler} and removed again"


def _config() -> Any:
    return {
        "metadata": {"name": NAME, "uid": str(uuid.uuid4()), "namespace": NAMESPACE},
        "labels": {"app.kubernetes.io/managed-by": "cdi-courier"},
        "linux": {"security_context": {"namespace_options": {"network": _NODE, "pid": _POD, "ipc": _POD}}},
    }


def _remove(call: Callable[..., Any], pod: str) -> None:
    try:
        try:
            call("StopPodSandbox", _GRACE, pod_sandbox_id=pod)
        except HostError as error:
            if error.code != "HST103":
                raise
            call("StopPodSandbox", pod_sandbox_id=pod)
        call("RemovePodSandbox", pod_sandbox_id=pod)
    except HostError as error:
        raise HostError(
            "CRI114",
            f"the canary's pod {pod} could not be removed: {error.message}",
            f"remove it: `crictl rmp -f {pod}`; see CRI-O's log for why",
        ) from None
