"""What is known of a host and its container runtimes; every fact with its source. Plain in JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import field, frozen

Kind = Literal["containerd", "cri-o", "docker", "podman"]
KINDS: Final = ("containerd", "cri-o", "docker", "podman")

NriState = Literal["on", "off", "absent", "unknown"]
"""on: a socket that the runtime itself listens at accepts connections, or its live configuration says so.
off: the runtime has NRI and its configuration disables it. absent: it has none of this protocol. unknown:
nothing that was asked can tell."""

FIRST_WITH_NRI: Final[Mapping[str, tuple[int, int, int]]] = {"containerd": (1, 7, 0), "cri-o": (1, 26, 0)}
"""Kind → the first version that speaks NRI's present protocol; other kinds have none that carries devices."""

FACTS: Final[Mapping[str, str]] = {
    # name → type and meaning. A fact that could not be learnt is missing, never a default.
    "nri": "on | off | absent: see NriState",
    "nri_socket": "path: where the runtime listens for NRI plugins, or would",
    "nri_connections": "bool: false where only plugins launched by the runtime are let in",
    "nri_validator": "object: the built-in validator's switches that are on, as the configuration names them",
    "required_plugins": "list of names that the validator requires",
    "config": "path: the runtime's main configuration file, whether or not it exists",
    "config_exists": "bool",
    "config_version": "int: the version that containerd's main file declares; 1 if it declares none",
    "imports": "list of patterns that containerd's main file imports, as written",
    "config_template": "path: of a distribution that generates the main file at start (k3s, rke2)",
    "distribution": "k3s | rke2 | k0s | microk8s: who brings the runtime and owns its configuration",
    "handlers": "object: handler → {type, path}; the low-level runtime, looked up if it is no absolute path",
    "default_handler": "handler of a pod without RuntimeClass",
    "pod_annotations": "list of patterns of pod annotations that the default handler passes on (containerd)",
    "hooks_dirs": "list of directories watched for OCI hook JSON (CRI-O, Podman)",
    "cdi_enabled": "bool: whether the runtime resolves CDI names asked for over CRI",
    "cdi_spec_dirs": "list of directories, ascending priority",
    "cgroup_version": "1 | 2",
    "cgroup_driver": "systemd | cgroupfs",
    "rootless": "bool",
    "kubelet": "bool: the kubelet of this host uses this runtime",
    "pid": "int: the process that listens at the endpoint",
}
"""Every fact there is."""


@frozen
class Fact:
    """Something known. value: as `FACTS` says. source: for a person, such as ``CRI Status``."""

    value: Any
    source: str


@frozen
class Runtime:
    """One container runtime.

    key: what ``[runtimes]`` calls it: its kind, or its endpoint where there are several of a kind.
    version: as it tells, e.g. ``1.7.24~ds1``; ``""`` if it does not.
    endpoint: the socket of its API; ``""`` for one that has none (Podman without its service).
    problems: what could not be asked and why, one sentence each.
    """

    key: str
    kind: Kind
    version: str = ""
    endpoint: str = ""
    facts: Mapping[str, Fact] = field(factory=dict)
    problems: tuple[str, ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """A fact's value, or `default` if it is not known. Raises `KeyError` for a name not in `FACTS`."""
        if name not in FACTS:
            raise KeyError(name)
        fact = self.facts.get(name)
        return default if fact is None else fact.value

    @property
    def version_tuple(self) -> tuple[int, int, int] | None:
        """The first three numbers of the version, a missing third one 0; None if it has no such shape."""
        match = re.match(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", self.version, re.ASCII)
        return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))


@frozen
class Host:
    """What was found at one moment. problems: what concerns no single runtime, one sentence each."""

    runtimes: tuple[Runtime, ...] = ()
    problems: tuple[str, ...] = ()


def to_json(host: Host) -> dict[str, Any]:
    """The host as a JSON object; `from_json` reads it back."""
    return {
        "runtimes": [
            {
                "key": runtime.key,
                "kind": runtime.kind,
                "version": runtime.version,
                "endpoint": runtime.endpoint,
                "facts": {
                    name: {"value": fact.value, "source": fact.source} for name, fact in runtime.facts.items()
                },
                "problems": list(runtime.problems),
            }
            for runtime in host.runtimes
        ],
        "problems": list(host.problems),
    }


def from_json(data: Mapping[str, Any]) -> Host:
    """The host that `to_json` has written."""
    return Host(
        tuple(
            Runtime(
                key=runtime["key"],
                kind=runtime["kind"],
                version=runtime["version"],
                endpoint=runtime["endpoint"],
                facts={name: Fact(fact["value"], fact["source"]) for name, fact in runtime["facts"].items()},
                problems=tuple(runtime["problems"]),
            )
            for runtime in data["runtimes"]
        ),
        tuple(data["problems"]),
    )
