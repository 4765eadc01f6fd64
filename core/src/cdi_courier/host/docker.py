"""What a Docker daemon tells in plain HTTP on its socket."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from cdi_courier.errors import HostError
from cdi_courier.host import unix_http
from cdi_courier.host.answers import (
    Findings,
    from_json,
    handlers,
    strings,
    table,
    text,
    texts,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdi_courier.host.files import Root

INFO: Final = "Docker GET /info"
DEFAULT_CONFIG: Final = "/etc/docker/daemon.json"

_FIRST_WITH_NRI: Final = (1, 53)  # of the API: https://docs.docker.com/reference/api/engine/version-history
_CGROUP_DRIVERS: Final = ("systemd", "cgroupfs")
_CGROUP_VERSIONS: Final = {"1": 1, "2": 2}


@frozen
class Version:
    """What ``GET /version`` says. api: the API's, None if it has no shape. podman: Podman imitates Docker."""

    version: str
    api: tuple[int, int] | None
    podman: bool


def get_version(root: Root, path: str, timeout: float) -> Version:
    """Who answers at the socket. Raises `HostError`."""
    what = f"Docker GET /version at {path}"
    return read_version(from_json(unix_http.get(root, path, "/version", timeout), what), what)


def read_version(document: Mapping[str, Any], what: str) -> Version:
    """The same from the answer's object. Raises `HostError` ``HST104`` if it is not Docker's."""
    components = document.get("Components")
    names = [table(entry).get("Name") for entry in components] if isinstance(components, list) else []
    version, api = strings((document.get("Version"), document.get("ApiVersion")))
    numbers = re.match(r"(\d{1,6})\.(\d{1,6})", api, re.ASCII)
    if not version and numbers is None:
        raise HostError("HST104", f"{what} is not Docker's")
    return Version(
        version_of(version), (int(numbers[1]), int(numbers[2])) if numbers else None, "Podman Engine" in names
    )


def get_info(root: Root, path: str, timeout: float) -> Mapping[str, Any]:
    """The daemon's description of itself. Raises `HostError`."""
    return from_json(unix_http.get(root, path, "/info", timeout), f"{INFO} at {path}")


def learn_from_info(document: Mapping[str, Any], version: Version | None, findings: Findings) -> None:
    """Note what /info says."""
    findings.version = findings.version or version_of(text(document.get("ServerVersion")) or "")
    driver = document.get("CgroupDriver")
    findings.learn("cgroup_driver", driver if driver in _CGROUP_DRIVERS else None, INFO)
    cgroups = text(document.get("CgroupVersion")) or ""
    findings.learn("cgroup_version", _CGROUP_VERSIONS.get(cgroups), INFO)
    findings.learn("handlers", handlers(table(document, "Runtimes"), _handler), INFO)
    findings.learn("default_handler", text(document.get("DefaultRuntime")) or None, INFO)
    if "CDISpecDirs" in document:
        findings.learn("cdi_spec_dirs", texts(document["CDISpecDirs"]), INFO)
    security = texts(document.get("SecurityOptions"))
    if "SecurityOptions" in document and security is not None:
        rootless = any("name=rootless" in option.split(",") for option in security)
        findings.learn("rootless", rootless, INFO)
    if table(document, "NRI"):
        findings.learn("nri", "on", INFO)
    elif version is not None and version.api is not None:
        api = ".".join(map(str, version.api))
        if version.api < _FIRST_WITH_NRI:
            findings.learn("nri", "absent", f"Docker with API {api} is older than its NRI")
        else:
            findings.learn("nri", "off", f"{INFO} has no NRI")


def _handler(entry: Mapping[str, Any]) -> tuple[str, str]:
    # Either a shim's type or a low-level runtime's path.
    type_, path = strings((entry.get("runtimeType"), entry.get("path")))
    return type_ or "oci", path
