"""What NRI tests on real containerds are told in: hosts, spec files, pods that ask, what containers have.

It must not know what is right: it does and reports, tests judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from .courier import Courier
from .cri import CriError, Pod
from .lab import Lab
from .waiting import wait_for

HOSTS = {
    "2.1-names": ("containerd21", "names"),
    "2.1-edits": ("containerd21", "edits"),
    "1.7-edits": ("containerd17", "auto"),
}
"""Ways in which a real host is served: the fixture of its lab, and ``[nri] delivery``.

In a lab, whose CDI directories are its own, ``auto`` means edits on any containerd."""

KIND = "management.nvidia.com/gpu"
ALL = f"{KIND}=all"
DOMAIN = "nvidia.cdi.k8s.io"
STATUS = "cdi-courier.io/status"
GRANTED_NAMESPACE = "gpu-operator"  # one of the built-in rule's

# The runtime reads a changed directory a moment after we do; until then it says this.
RUNTIME_LAGS = "unresolvable CDI devices"
SETTLED = 5.0  # seconds it may lag


def on_host(request: pytest.FixtureRequest, name: str) -> Iterator[Lab]:
    """For a fixture: the lab of one of `HOSTS`, clean before and after, its logs free of tracebacks."""
    fixture, delivery = HOSTS[name]
    lab: Lab = request.getfixturevalue(fixture)
    lab.delivery = delivery
    for path in lab.root.glob("*.log"):
        path.unlink()
    yield lab
    lab.reset()
    # Whatever a test does to the daemon.
    for path in lab.root.glob("*.log"):
        assert "Traceback" not in path.read_text(errors="replace")


def open_node(major: int, minor: int) -> str:
    """Shell: open a node of one's own making for writing, which the device cgroup allows only if granted."""
    return f"rm -f /tmp/node; mknod /tmp/node c {major} {minor} && exec 3>/tmp/node"


OPEN_KMSG = open_node(1, 11)
OPEN_FUSE = open_node(10, 229)


def spec(kind: str = KIND, /, **devices: Mapping[str, Any]) -> dict[str, Any]:
    """A spec file; every device sets ``COURIER_<NAME>=yes`` beside the edits given for it."""
    return {
        "cdiVersion": "0.6.0",
        "kind": kind,
        "devices": [
            {"name": name, "containerEdits": {"env": [f"COURIER_{name.upper()}=yes"], **edits}}
            for name, edits in devices.items()
        ],
    }


def hook(record: Path) -> dict[str, Any]:
    """Edits with a hook that adds a line to a file of the host."""
    args = ["sh", "-c", f"echo ran >> {record}"]
    return {"hooks": [{"hookName": "createContainer", "path": "/bin/sh", "args": args}]}


def serving(
    lab: Lab, tables: Mapping[str, Mapping[str, Any]] | None = None, *, name: str = "courier"
) -> Courier:
    """A daemon that containerd has introduced itself to."""
    courier = lab.courier(tables, name=name)
    courier.start()
    courier.wait_for_log("synchronized:")
    return courier


def annotated(lab: Lab, name: str = "asks", namespace: str = GRANTED_NAMESPACE, **keys: str) -> Pod:
    """A pod that asks; keys: ``container_c1`` is ``DOMAIN/container.c1``, ``bare`` is ``DOMAIN``."""
    annotations = {
        DOMAIN if key == "bare" else f"{DOMAIN}/{key.replace('_', '.')}": value for key, value in keys.items()
    }
    return lab.cri.run_pod(name, namespace, annotations=annotations)


def run(lab: Lab, pod: Pod, name: str = "c1", **options: Any) -> str:
    """Create and start a container.

    Where the runtime resolves names, by our way or the kubelet's, it is given time to see a spec file that
    we see already; nowhere else.
    """
    resolves = lab.delivery == "names" or "cdi_devices" in options

    def create() -> str:
        try:
            return lab.cri.create_container(pod, name, **options)
        except CriError as error:
            if resolves and RUNTIME_LAGS in error.message:
                return ""
            raise

    container = wait_for(create, SETTLED, "the runtime to see the spec files")
    lab.cri.start(container)
    return container


def refusal(lab: Lab, pod: Pod, name: str = "c1") -> str:
    """What the runtime says against the container."""
    with pytest.raises(CriError) as caught:
        lab.cri.create_container(pod, name)
    assert caught.value.method == "CreateContainer"
    return caught.value.message


def shell(lab: Lab, container: str, script: str) -> tuple[int, str]:
    rc, out, err = lab.cri.exec_sync(container, ["sh", "-c", script])
    return rc, out + err


def devices_of(lab: Lab, container: str) -> set[str]:
    """The devices of `spec` that the container sees in its environment, in upper case."""
    return set(re.findall(r"(?m)^COURIER_(\w+)=yes$", shell(lab, container, "env")[1]))


def marker(lab: Lab, container: str) -> str | None:
    """The status annotation of what the OCI runtime was given."""
    status: str | None = (lab.cri.runtime_spec(container).get("annotations") or {}).get(STATUS)
    return status
