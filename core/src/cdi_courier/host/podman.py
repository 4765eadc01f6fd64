"""What Podman tells: ``podman info`` as whoever runs this, and containers.conf.

Podman has no daemon to ask. Its service is not asked either: systemd would start it for the question.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from cdi_courier.errors import HostError
from cdi_courier.host import children
from cdi_courier.host.answers import (
    Findings,
    flag,
    from_json,
    from_toml,
    strings,
    table,
    text,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdi_courier.host.files import Root

INFO: Final = "podman info"
DEFAULT_CONFIG: Final = "/etc/containers/containers.conf"
DEFAULT_HOOKS_DIRS: Final = ("/usr/share/containers/oci/hooks.d",)

_PASSED: Final = ("HOME", "USER", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR")
_OVERRIDE_HOOKS_DIR: Final = "/etc/containers/oci/hooks.d"
_FOLDERS: Final = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_CGROUP_VERSIONS: Final = {"v1": 1, "v2": 2}
_CGROUP_DRIVERS: Final = ("systemd", "cgroupfs")


def find(root: Root) -> str:
    """The program, or ``""``. Not by PATH: this may run as root."""
    for folder in _FOLDERS:
        path = root.real(f"{folder}/podman")
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return ""


def info(program: str, timeout: float) -> Mapping[str, Any]:
    """What ``podman info`` prints. Raises `HostError`: ``HST103`` too late, ``HST107`` failed, ``HST104``."""
    # CONTAINER_HOST and the like would make it describe another host.
    environment = {name: value for name, value in os.environ.items() if name in _PASSED}
    environment |= {"PATH": ":".join(_FOLDERS), "LC_ALL": "C"}
    argv = [program, "info", "--format", "json"]
    data = children.output(argv, INFO, timeout, code="HST107", environment=environment)
    return from_json(data, f"the output of {INFO}")


def read_info(document: Mapping[str, Any]) -> Findings:
    """The facts in what ``podman info`` printed. Raises `HostError` ``HST104`` if it is of another host."""
    host = table(document, "host")
    if host.get("serviceIsRemote") is True:
        raise HostError("HST104", f"{INFO} describes another host", "remove the remote client's default")
    findings = Findings()
    findings.version = version_of(text(table(document, "version").get("Version")) or "")
    findings.learn("cgroup_version", _CGROUP_VERSIONS.get(text(host.get("cgroupVersion")) or ""), INFO)
    driver = host.get("cgroupManager")
    findings.learn("cgroup_driver", driver if driver in _CGROUP_DRIVERS else None, INFO)
    findings.learn("rootless", flag(table(host, "security").get("rootless")), INFO)
    name, path = strings((table(host, "ociRuntime").get("name"), table(host, "ociRuntime").get("path")))
    if name:
        findings.learn("handlers", {name: {"type": "oci", "path": path}}, INFO)
        findings.learn("default_handler", name, INFO)
    findings.learn("nri", "absent", "Podman has no NRI")
    return findings


def learn_from_files(
    root: Root, configured: str, folder: str, findings: Findings, *, without: str = ""
) -> None:
    """Note what containers.conf says.

    configured: the main file by ``[runtimes]``, or ``""``. folder: of a rootless caller's files; else ``""``.
    without: a file that is passed over.
    """
    main = configured or DEFAULT_CONFIG
    source = "[runtimes] config" if configured else "where it lies by default"
    findings.learn("config", main, source)
    findings.learn("config_exists", root.exists(main), main)
    try:
        files = ["/usr/share/containers/containers.conf", main, *root.matches(f"{DEFAULT_CONFIG}.d/*.conf")]
        if folder:
            own = f"{folder}/containers/containers.conf"
            files += [own, *root.matches(f"{own}.d/*.conf")]
        hooks, specs = _Value(list(DEFAULT_HOOKS_DIRS), "Podman's default"), _Value(None, "")
        for path in files:
            if path == without:
                continue
            try:
                engine = table(from_toml(root.read(path), path, "HST105"), "engine")
            except FileNotFoundError:
                continue
            hooks.change(engine.get("hooks_dir"), path)
            specs.change(engine.get("cdi_spec_dirs"), path)
    except HostError as error:
        findings.trouble(error)  # Podman fails likewise, so nothing is known
        return
    # An empty list, which nobody writes, means both standard folders to root, and none to others.
    value = [*DEFAULT_HOOKS_DIRS, _OVERRIDE_HOOKS_DIR] if hooks.value == [] and not folder else hooks.value
    findings.learn("hooks_dirs", value, hooks.source)
    findings.learn("cdi_spec_dirs", specs.value, specs.source)


class _Value:
    """An array over several files: a later one replaces it, or is appended after ``{append=true}``."""

    def __init__(self, value: list[str] | None, source: str) -> None:
        self.value = value
        self.source = source
        self._append = False

    def change(self, value: Any, path: str) -> None:
        if not isinstance(value, list):
            return
        items = [item for item in value if text(item) is not None]
        for item in value:
            if isinstance(item, dict) and flag(item.get("append")) is not None:
                self._append = item["append"]
        self.value = [*(self.value or []), *items] if self._append else items
        self.source = f"{self.source}, {path}" if self._append and self.source else path
