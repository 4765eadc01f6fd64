"""A client of the runtimes' own API, in the kubelet's place: pods and containers without Kubernetes.

Messages come from the product's descriptor table; field numbers are those of the public ``runtime.v1`` API
and only the fields used here are listed. It must not know which runtime answers: containerd and CRI-O are the
same to it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from cdi_courier.descriptors import message_classes

from .image import FOREVER, NAME

_POD, _CONTAINER, _NODE = 0, 1, 2  # NamespaceMode
USERNS_ROOT = 1 << 20  # root's number on the host, for pods in a user namespace
CREATED, RUNNING, EXITED, UNKNOWN = range(4)  # ContainerState

_TIMEOUT = 60.0  # seconds a call may take; a pod takes under one
_EXEC = 30  # seconds a command in a container may take

MESSAGES = message_classes(
    "runtime.v1",
    {
        "VersionRequest": "1 version string",
        "VersionResponse": "1 version string, 2 runtime_name string, 3 runtime_version string, "
        "4 runtime_api_version string",
        "StatusRequest": "1 verbose bool",
        "StatusResponse": "1 status RuntimeStatus, 2 info map<string,string>",
        "RuntimeStatus": "1 conditions RuntimeCondition*",
        "RuntimeCondition": "1 type string, 2 status bool, 3 reason string, 4 message string",
        # Pods
        "PodSandboxMetadata": "1 name string, 2 uid string, 3 namespace string, 4 attempt uint32",
        "PodSandboxConfig": "1 metadata PodSandboxMetadata, 2 hostname string, 3 log_directory string, "
        "6 labels map<string,string>, 7 annotations map<string,string>, 8 linux LinuxPodSandboxConfig",
        "LinuxPodSandboxConfig": "1 cgroup_parent string, 2 security_context LinuxSandboxSecurityContext",
        "LinuxSandboxSecurityContext": "1 namespace_options NamespaceOption, 6 privileged bool",
        "NamespaceOption": "1 network int32, 2 pid int32, 3 ipc int32, 4 target_id string, "
        "5 userns_options UserNamespace",
        "UserNamespace": "1 mode int32, 2 uids IDMapping*, 3 gids IDMapping*",
        "IDMapping": "1 host_id uint32, 2 container_id uint32, 3 length uint32",
        "RunPodSandboxRequest": "1 config PodSandboxConfig, 2 runtime_handler string",
        "RunPodSandboxResponse": "1 pod_sandbox_id string",
        "StopPodSandboxRequest": "1 pod_sandbox_id string",
        "StopPodSandboxResponse": "",
        "RemovePodSandboxRequest": "1 pod_sandbox_id string",
        "RemovePodSandboxResponse": "",
        "PodSandboxStatusRequest": "1 pod_sandbox_id string, 2 verbose bool",
        "PodSandboxStatusResponse": "1 status PodSandboxStatus, 2 info map<string,string>",
        "PodSandboxStatus": "1 id string, 2 metadata PodSandboxMetadata, 3 state int32, 4 created_at int64, "
        "5 network PodSandboxNetworkStatus, 7 labels map<string,string>, 8 annotations map<string,string>, "
        "9 runtime_handler string",
        "PodSandboxNetworkStatus": "1 ip string",
        "ListPodSandboxRequest": "",
        "ListPodSandboxResponse": "1 items PodSandbox*",
        "PodSandbox": "1 id string, 2 metadata PodSandboxMetadata, 3 state int32, 4 created_at int64, "
        "5 labels map<string,string>, 6 annotations map<string,string>, 7 runtime_handler string",
        # Containers
        "ContainerMetadata": "1 name string, 2 attempt uint32",
        "ContainerConfig": "1 metadata ContainerMetadata, 2 image ImageSpec, 3 command string*, "
        "4 args string*, 5 working_dir string, 6 envs KeyValue*, 7 mounts Mount*, 8 devices Device*, "
        "9 labels map<string,string>, 10 annotations map<string,string>, 11 log_path string, "
        "15 linux LinuxContainerConfig, 17 CDI_devices CDIDevice*",
        "KeyValue": "1 key string, 2 value string",
        "Mount": "1 container_path string, 2 host_path string, 3 readonly bool, 5 propagation int32",
        "Device": "1 container_path string, 2 host_path string, 3 permissions string",
        "CDIDevice": "1 name string",
        "LinuxContainerConfig": "2 security_context LinuxContainerSecurityContext",
        "LinuxContainerSecurityContext": "2 privileged bool, 3 namespace_options NamespaceOption, "
        "5 run_as_user Int64Value, 12 run_as_group Int64Value",
        "Int64Value": "1 value int64",
        "CreateContainerRequest": "1 pod_sandbox_id string, 2 config ContainerConfig, "
        "3 sandbox_config PodSandboxConfig",
        "CreateContainerResponse": "1 container_id string",
        "StartContainerRequest": "1 container_id string",
        "StartContainerResponse": "",
        "StopContainerRequest": "1 container_id string, 2 timeout int64",
        "StopContainerResponse": "",
        "RemoveContainerRequest": "1 container_id string",
        "RemoveContainerResponse": "",
        "ListContainersRequest": "1 filter ContainerFilter",
        "ContainerFilter": "1 id string, 3 pod_sandbox_id string",
        "ListContainersResponse": "1 containers Container*",
        "Container": "1 id string, 2 pod_sandbox_id string, 3 metadata ContainerMetadata, 4 image ImageSpec, "
        "5 image_ref string, 6 state int32, 7 created_at int64, 8 labels map<string,string>, "
        "9 annotations map<string,string>",
        "ContainerStatusRequest": "1 container_id string, 2 verbose bool",
        "ContainerStatusResponse": "1 status ContainerStatus, 2 info map<string,string>",
        "ContainerStatus": "1 id string, 2 metadata ContainerMetadata, 3 state int32, 4 created_at int64, "
        "5 started_at int64, 6 finished_at int64, 7 exit_code int32, 8 image ImageSpec, 9 image_ref string, "
        "10 reason string, 11 message string, 12 labels map<string,string>, "
        "13 annotations map<string,string>, "
        "14 mounts Mount*, 15 log_path string",
        "ExecSyncRequest": "1 container_id string, 2 cmd string*, 3 timeout int64",
        "ExecSyncResponse": "1 stdout bytes, 2 stderr bytes, 3 exit_code int32",
        # Images
        "ImageSpec": "1 image string, 18 user_specified_image string",
        "ImageStatusRequest": "1 image ImageSpec",
        "ImageStatusResponse": "1 image Image",
        "Image": "1 id string, 2 repo_tags string*, 3 repo_digests string*",
    },
)


class CriError(Exception):
    """The runtime refused or could not be reached.

    code: gRPC's name of the status, e.g. ``UNKNOWN``. message: the status' text, what ``kubectl describe
    pod`` shows.
    """

    def __init__(self, method: str, code: str, message: str) -> None:
        super().__init__(method, code, message)
        self.method = method
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.method}: {self.code}: {self.message}"


@dataclass(frozen=True)
class Pod:
    """A running pod: its ID, and the configuration that every container's request repeats."""

    id: str
    config: Any

    @property
    def name(self) -> str:
        return str(self.config.metadata.name)

    @property
    def namespace(self) -> str:
        return str(self.config.metadata.namespace)

    @property
    def uid(self) -> str:
        return str(self.config.metadata.uid)


class ExecResult(NamedTuple):
    """What a command in a container did. rc: its exit status."""

    rc: int
    stdout: str
    stderr: str


class CriClient:
    """One connection to a runtime. It survives the runtime's restart.

    socket: the runtime's; text is an address as gRPC has it, such as ``127.0.0.1:7000``. cgroup_parent: of
    every pod, so that cgroups can be found and removed. log_directory: below it lie the containers' outputs;
    None throws them away.
    """

    def __init__(
        self, socket: Path | str, *, cgroup_parent: str = "", log_directory: Path | None = None
    ) -> None:
        self.socket = socket
        self.cgroup_parent = cgroup_parent
        self.log_directory = log_directory
        # A restarted daemon is noticed at once: gRPC's own pause between tries grows to two minutes.
        self._channel = grpc.insecure_channel(
            f"unix:{socket}" if isinstance(socket, Path) else socket,
            options=[
                ("grpc.default_authority", "localhost"),
                ("grpc.enable_http_proxy", 0),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.min_reconnect_backoff_ms", 50),
                ("grpc.max_reconnect_backoff_ms", 100),
            ],
        )

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> CriClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(
        self, method: str, request: Any, *, service: str = "RuntimeService", timeout: float = _TIMEOUT
    ) -> Any:
        """Any method by name: waits for the socket to answer, at most timeout seconds. Raises CriError."""
        rpc = self._channel.unary_unary(
            f"/runtime.v1.{service}/{method}",
            request_serializer=MESSAGES[f"{method}Request"].SerializeToString,
            response_deserializer=MESSAGES[f"{method}Response"].FromString,
        )
        try:
            return rpc(request, timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            raise CriError(method, error.code().name, error.details() or "") from None

    # The runtime

    def version(self) -> Any:
        """VersionResponse: ``runtime_name``, ``runtime_version``, ``runtime_api_version``."""
        return self.call("Version", MESSAGES["VersionRequest"]())

    def status(self, *, verbose: bool = False, timeout: float = _TIMEOUT) -> Any:
        """StatusResponse: ``status.conditions`` and, when verbose, ``info`` (texts of JSON)."""
        return self.call("Status", MESSAGES["StatusRequest"](verbose=verbose), timeout=timeout)

    def has_image(self, name: str) -> bool:
        request = MESSAGES["ImageStatusRequest"](image={"image": name})
        return bool(self.call("ImageStatus", request, service="ImageService").HasField("image"))

    # Pods

    def run_pod(
        self,
        name: str,
        namespace: str = "default",
        *,
        annotations: Mapping[str, str] | None = None,
        handler: str = "",
        host_network: bool = True,
        host_users: bool = True,
        privileged: bool = False,
    ) -> Pod:
        """Start a pod.

        handler: the runtime handler's name, empty for the default. host_network: False needs a network
        plugin. host_users: False asks for a user namespace of its own, whose root is `USERNS_ROOT` outside,
        and implies a network of its own, as the host's belongs to the host's root. privileged: its containers
        may be so. Raises CriError.
        """
        uid = str(uuid.uuid4())
        host_network = host_network and host_users
        namespaces: dict[str, Any] = {"network": _NODE if host_network else _POD, "pid": _CONTAINER}
        if not host_users:
            mapping = [{"host_id": USERNS_ROOT, "container_id": 0, "length": 1 << 16}]
            namespaces["userns_options"] = {"mode": _POD, "uids": mapping, "gids": mapping}
        config = MESSAGES["PodSandboxConfig"](
            metadata={"name": name, "uid": uid, "namespace": namespace},
            hostname="" if host_network else name,
            log_directory=str(self.log_directory / f"{namespace}_{name}_{uid}") if self.log_directory else "",
            labels={
                "io.kubernetes.pod.name": name,
                "io.kubernetes.pod.namespace": namespace,
                "io.kubernetes.pod.uid": uid,
            },
            annotations=annotations or {},
            linux={
                "cgroup_parent": self.cgroup_parent,
                "security_context": {"namespace_options": namespaces, "privileged": privileged},
            },
        )
        request = MESSAGES["RunPodSandboxRequest"](config=config, runtime_handler=handler)
        return Pod(self.call("RunPodSandbox", request).pod_sandbox_id, config)

    def pod_status(self, pod: Pod | str) -> Any:
        """PodSandboxStatusResponse."""
        request = MESSAGES["PodSandboxStatusRequest"](pod_sandbox_id=_id(pod))
        return self.call("PodSandboxStatus", request)

    def stop_pod(self, pod: Pod | str, *, timeout: float = _TIMEOUT) -> None:
        self.call(
            "StopPodSandbox", MESSAGES["StopPodSandboxRequest"](pod_sandbox_id=_id(pod)), timeout=timeout
        )

    def remove_pod(self, pod: Pod | str, *, timeout: float = _TIMEOUT) -> None:
        """Stop and remove the pod and its containers; one that is gone already is no error."""
        self.stop_pod(pod, timeout=timeout)
        self.call(
            "RemovePodSandbox", MESSAGES["RemovePodSandboxRequest"](pod_sandbox_id=_id(pod)), timeout=timeout
        )

    def list_pods(self, *, timeout: float = _TIMEOUT) -> list[Any]:
        """PodSandbox messages."""
        return list(self.call("ListPodSandbox", MESSAGES["ListPodSandboxRequest"](), timeout=timeout).items)

    # Containers

    def create_container(
        self,
        pod: Pod,
        name: str,
        command: Sequence[str] = FOREVER,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        mounts: Iterable[tuple[str | Path, str, bool]] = (),
        devices: Iterable[tuple[str | Path, str, str]] = (),
        cdi_devices: Iterable[str] = (),
        user: int | None = None,
        privileged: bool = False,
        image: str = NAME,
    ) -> str:
        """Create a container and return its ID.

        mounts: (host path, container path, read only). devices: (host path, container path, permissions).
        cdi_devices: qualified names, as a device plugin hands them to the kubelet. Raises CriError, with a
        plugin's refusal in words.
        """
        security: dict[str, Any] = {
            "privileged": privileged,
            "namespace_options": pod.config.linux.security_context.namespace_options,
        }
        if user is not None:
            security |= {"run_as_user": {"value": user}, "run_as_group": {"value": user}}
        config = MESSAGES["ContainerConfig"](
            metadata={"name": name},
            image={"image": image, "user_specified_image": image},  # CRI-O needs both
            command=command,
            args=args,
            envs=[{"key": key, "value": value} for key, value in (env or {}).items()],
            mounts=[
                {"host_path": str(host), "container_path": path, "readonly": readonly}
                for host, path, readonly in mounts
            ],
            devices=[
                {"host_path": str(host), "container_path": path, "permissions": permissions}
                for host, path, permissions in devices
            ],
            labels={
                "io.kubernetes.container.name": name,
                "io.kubernetes.pod.name": pod.name,
                "io.kubernetes.pod.namespace": pod.namespace,
                "io.kubernetes.pod.uid": pod.uid,
                **(labels or {}),
            },
            annotations=annotations or {},
            log_path=f"{name}.log" if pod.config.log_directory else "",
            linux={"security_context": security},
            CDI_devices=[{"name": device} for device in cdi_devices],
        )
        request = MESSAGES["CreateContainerRequest"](
            pod_sandbox_id=pod.id, config=config, sandbox_config=pod.config
        )
        return str(self.call("CreateContainer", request).container_id)

    def start(self, container: str) -> None:
        self.call("StartContainer", MESSAGES["StartContainerRequest"](container_id=container))

    def run_container(self, pod: Pod, name: str, command: Sequence[str] = FOREVER, **options: Any) -> str:
        """`create_container` and `start`; returns the ID."""
        container = self.create_container(pod, name, command, **options)
        self.start(container)
        return container

    def exec_sync(self, container: str, argv: Sequence[str]) -> ExecResult:
        """Run a command in a container. A failing command is no error, an absent one is."""
        request = MESSAGES["ExecSyncRequest"](container_id=container, cmd=argv, timeout=_EXEC)
        response = self.call("ExecSync", request, timeout=_EXEC + 10)
        return ExecResult(
            response.exit_code,
            response.stdout.decode(errors="replace"),
            response.stderr.decode(errors="replace"),
        )

    def container_status(self, container: str, *, verbose: bool = False) -> Any:
        """ContainerStatusResponse; verbose: ``info["info"]`` is JSON with ``runtimeSpec`` and ``pid``."""
        request = MESSAGES["ContainerStatusRequest"](container_id=container, verbose=verbose)
        return self.call("ContainerStatus", request)

    def runtime_spec(self, container: str) -> dict[str, Any]:
        """The OCI runtime's configuration of the container, as JSON has it."""
        info = json.loads(self.container_status(container, verbose=True).info["info"])
        spec: dict[str, Any] = info["runtimeSpec"]
        return spec

    def list_containers(self, pod: Pod | str | None = None) -> list[Any]:
        """Container messages, of one pod or of all."""
        request = MESSAGES["ListContainersRequest"]()
        if pod is not None:
            request.filter.pod_sandbox_id = _id(pod)
        return list(self.call("ListContainers", request).containers)

    def stop_container(self, container: str) -> None:
        """Kill it at once: the image's ``sleep`` as first process ignores SIGTERM."""
        self.call("StopContainer", MESSAGES["StopContainerRequest"](container_id=container))

    def remove_container(self, container: str) -> None:
        """Stop and remove; one that is gone already is no error."""
        self.stop_container(container)
        self.call("RemoveContainer", MESSAGES["RemoveContainerRequest"](container_id=container))


def _id(pod: Pod | str) -> str:
    return pod if isinstance(pod, str) else pod.id
