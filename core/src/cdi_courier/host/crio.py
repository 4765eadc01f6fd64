"""What a CRI-O tells: over CRI, and in plain HTTP on the same socket. Its command line tools are not used.

They read /etc/crio first and fail for any malformed file there, whatever the daemon runs with
(docs/facts.md#cri-o-over-http). The live configuration is the authority for NRI, which no reload changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cdi_courier.errors import HostError
from cdi_courier.host import cri, processes, sockets, unix_http
from cdi_courier.host.answers import (
    Findings,
    flag,
    from_json,
    from_toml,
    handlers,
    strings,
    table,
    text,
    texts,
)
from cdi_courier.host.model import FIRST_WITH_NRI, Runtime

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cdi_courier.host.files import Root

DEFAULT_CONFIG: Final = "/etc/crio/crio.conf"
CONFIG: Final = "CRI-O GET /config"
INFO: Final = "CRI-O GET /info"

_FIRST_WITH_CDI_FIELD: Final = (1, 28, 0)
_CGROUP_DRIVERS: Final = ("systemd", "cgroupfs")
_ENABLE: Final = "nri_enable_default_validator"
_REQUIRED: Final = "nri_validator_required_plugins"


def get_config(root: Root, path: str, timeout: float) -> dict[str, Any]:
    """The live configuration. Raises `HostError`."""
    return from_toml(unix_http.get(root, path, "/config", timeout), f"{CONFIG} at {path}")


def get_info(root: Root, path: str, timeout: float) -> Mapping[str, Any]:
    """Storage and cgroup driver. Raises `HostError`."""
    return from_json(unix_http.get(root, path, "/info", timeout), f"{INFO} at {path}")


def learn_from_config(document: Mapping[str, Any], findings: Findings, source: str = CONFIG) -> None:
    """Note what the live configuration says. source: where it comes from, if not from the daemon."""
    runtime, nri = table(document, "crio", "runtime"), table(document, "crio", "nri")
    enabled = flag(nri.get("enable_nri"))
    findings.learn("nri", None if enabled is None else "on" if enabled else "off", source)
    findings.learn("nri_socket", text(nri.get("nri_listen")) or None, source)
    closed = flag(nri.get("nri_disable_connections"))
    findings.learn("nri_connections", None if closed is None else not closed, source)
    if nri:
        # CRI-O leaves empty lists out; before 1.34 it has no validator.
        rules = table(nri, "default_validator")
        rules = rules if rules.get(_ENABLE) is True else {}
        findings.learn("nri_validator", {key: True for key, on in rules.items() if on is True}, source)
        findings.learn("required_plugins", texts(rules.get(_REQUIRED)), source)
    _learn_runtime(
        findings,
        source,
        entries=handlers(table(runtime, "runtimes"), lambda e: _handler(e, "runtime_type", "runtime_path")),
        default=runtime.get("default_runtime"),
        hooks=runtime.get("hooks_dir", ()),
        specs=runtime.get("cdi_spec_dirs", ()),
        cgroups=runtime.get("cgroup_manager"),
    )


def learn_from_info(document: Mapping[str, Any], findings: Findings) -> None:
    """Note what /info says."""
    driver = document.get("cgroup_driver")
    findings.learn("cgroup_driver", driver if driver in _CGROUP_DRIVERS else None, INFO)


def learn_from_cri(answer: cri.Answer, findings: Findings) -> None:
    """Note what the CRI told. Its configuration has Go's field names, and is there from 1.33 on."""
    findings.add(answer.findings)
    runtime = table(answer.config, "crio")
    _learn_runtime(
        findings,
        cri.STATUS,
        entries=handlers(table(runtime, "Runtimes"), lambda e: _handler(e, "RuntimeType", "RuntimePath")),
        default=runtime.get("DefaultRuntime"),
        hooks=runtime.get("HooksDir", ()),
        specs=runtime.get("CDISpecDirs", ()),
        cgroups=runtime.get("CgroupManagerName"),
    )


def learn_from_version(findings: Findings) -> None:
    """Note what follows from the version alone, and only from it."""
    numbers = Runtime("cri-o", "cri-o", findings.version).version_tuple
    if numbers is None:
        return
    source = f"CRI-O {findings.version}"
    if numbers < FIRST_WITH_NRI["cri-o"]:
        findings.learn("nri", "absent", f"{source} is older than its NRI")
    findings.learn(
        "cdi_enabled", numbers >= _FIRST_WITH_CDI_FIELD, f"{source}; CDI names over CRI came with 1.28"
    )


def learn_from_files(root: Root, configured: str, pid: int | None, findings: Findings) -> None:
    """Note where its main file is. configured: by ``[runtimes]``, or ``""``."""
    path, source = DEFAULT_CONFIG, "where it lies by default"
    flag_ = processes.option(processes.command_line(root, pid), "-c", "--config", "-config")
    variable = processes.environment(root, pid).get("CONTAINER_CONFIG") if pid is not None else None
    if flag_:
        path, source = processes.absolute(root, pid, flag_), f"command line of process {pid}"
    elif variable:
        path, source = processes.absolute(root, pid, variable), f"CONTAINER_CONFIG of process {pid}"
    if configured:
        path, source = configured, "[runtimes] config"
    findings.learn("config", path, source)
    findings.learn("config_exists", root.exists(path), path)


def check_nri_socket(root: Root, findings: Findings, pid: int | None, timeout: float) -> None:
    """Whether what the live configuration says of NRI is so at the socket; if not, that is a problem."""
    path = findings.value("nri_socket")
    if findings.value("nri") != "on" or findings.value("nri_connections") is False or path is None:
        return
    try:
        listener = sockets.listener(root, path, pid, timeout)
    except HostError as error:
        if error.code == "HST101":
            error = HostError("HST106", f"CRI-O has NRI on, but {error.message}", error.hint)
        findings.trouble(error)
        return
    if pid is not None and listener.pid not in (None, pid):
        text_ = f"CRI-O has NRI on, but process {listener.pid}, which is not CRI-O, listens at {path}"
        findings.trouble(HostError("HST106", text_, "give one of the two runtimes another NRI socket"))


def _learn_runtime(
    findings: Findings,
    source: str,
    *,
    entries: dict[str, dict[str, str]] | None,
    default: Any,
    hooks: Any,
    specs: Any,
    cgroups: Any,
) -> None:
    findings.learn("handlers", entries, source)
    findings.learn("default_handler", text(default) or None, source)
    # An absent list is passed as a tuple, which is no list: it is not known. Null is an empty one.
    findings.learn("hooks_dirs", texts(hooks), source)
    findings.learn("cdi_spec_dirs", texts(specs), source)
    findings.learn("cgroup_driver", cgroups if cgroups in _CGROUP_DRIVERS else None, source)


def _handler(entry: Mapping[str, Any], type_: str, path: str) -> tuple[str, str]:
    # Empty means "oci": the only other type is "vm".
    kind, binary = strings((entry.get(type_), entry.get(path)))
    return kind or "oci", binary
