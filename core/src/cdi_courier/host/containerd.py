"""What a containerd tells, and what its configuration says. It imports grpcio; see `cri`.

The CRI tells about handlers and CDI, introspection which plugins there are, and neither whether NRI is on
(docs/facts.md#containerd-nri-state): that is seen at the NRI socket, or else read in the configuration, which
the running daemon took as it was when it started.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from cdi_courier.descriptors import message_classes
from cdi_courier.errors import HostError
from cdi_courier.host import cri, processes, sockets
from cdi_courier.host.answers import (
    Findings,
    flag,
    from_toml,
    handlers,
    merge_tables,
    strings,
    table,
    text,
    texts,
    version_of,
)
from cdi_courier.host.model import FIRST_WITH_NRI, Runtime

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from cdi_courier.host.files import Root

_Numbers = tuple[int, int, int]

DEFAULT_NRI_SOCKET: Final = "/var/run/nri/nri.sock"
_NRI: Final = ("io.containerd.nri.v1", "nri")
_NRI_TABLE: Final = ".".join(_NRI)
_RUNC_V2: Final = "io.containerd.runc.v2"
_FIRST_ENABLED: Final = (2, 0, 0)
_FIRST_VALIDATOR: Final = (2, 2, 0)
_MOST_IMPORTS: Final = 256
_DISABLED: Final = "disabled_plugins"

MESSAGES: Final = message_classes(
    "containerd.services",
    {
        "PluginsRequest": "1 filters string*",
        "PluginsResponse": "1 plugins Plugin*",
        "Plugin": "1 type string, 2 id string",
        "Empty": "",
        "VersionResponse": "1 version string, 2 revision string",
    },
)


# --- what it tells -------------------------------------------------------------------------------------


@frozen
class Introspection:
    """plugins: (type, id) of all that are built in and not disabled; None if it did not tell."""

    version: str = ""
    plugins: Collection[tuple[str, str]] | None = None


def introspect(root: Root, path: str, timeout: float) -> Introspection:
    """What containerd's own API tells. Raises `HostError` where it does not answer."""
    questions = {
        "/containerd.services.introspection.v1.Introspection/Plugins": ("PluginsRequest", "PluginsResponse"),
        "/containerd.services.version.v1.Version/Version": ("Empty", "VersionResponse"),
    }
    responses = []
    with cri.client(root, path) as connection:
        calls = [
            (method, connection.start(method, MESSAGES[request](), MESSAGES[response], timeout))
            for method, (request, response) in questions.items()
        ]
        for method, call in calls:
            try:
                responses.append(connection.finish(call, method, timeout))
            except cri.Unimplemented:
                text_ = f"{method} at {path} is unknown there"
                raise HostError("HST104", text_, "it is no containerd") from None
    plugins, version = responses
    return Introspection(
        version_of(text(version.version) or ""), {(plugin.type, plugin.id) for plugin in plugins.plugins}
    )


def learn_from_cri(answer: cri.Answer) -> Findings:
    """The facts in what the CRI of a containerd told."""
    findings = Findings()
    findings.add(answer.findings)
    numbers = _numbers(findings.version)
    config, source = answer.config, cri.STATUS
    entries = table(config, "containerd", "runtimes")
    default = text(table(config, "containerd").get("defaultRuntimeName"))
    findings.learn("handlers", handlers(entries, _handler), source)
    findings.learn("default_handler", default or None, source)
    entry = table(entries, default) if default else {}
    if "PodAnnotations" in entry:
        findings.learn("pod_annotations", texts(entry["PodAnnotations"]), source)
    if entry.get("runtimeType") == _RUNC_V2:
        systemd = flag(table(entry, "options").get("SystemdCgroup"))
        driver = None if systemd is None else "systemd" if systemd else "cgroupfs"
        findings.learn("cgroup_driver", driver, f"{source}: SystemdCgroup of handler {default}")
    findings.learn("cdi_enabled", flag(config.get("enableCDI")), source)
    if "cdiSpecDirs" in config:
        findings.learn("cdi_spec_dirs", texts(config["cdiSpecDirs"]), source)
    if numbers is not None and numbers < FIRST_WITH_NRI["containerd"]:
        findings.learn("cdi_enabled", False, f"containerd {findings.version} is older than its CDI")
    return findings


def _handler(entry: Mapping[str, Any]) -> tuple[str, str]:
    # runtimePath is the shim's; the low-level runtime's is an option of runc's shim.
    type_, path = strings((entry.get("runtimeType"), table(entry, "options").get("BinaryName")))
    return type_, path


# --- its configuration ---------------------------------------------------------------------------------


@frozen
class Layout:
    """Where a distribution keeps containerd's configuration. templates: by containerd's major version."""

    config: str
    templates: Mapping[int, str] = field(factory=dict)


_RANCHER: Final = "/var/lib/rancher/{}/agent/etc/containerd/"
_MICROK8S: Final = "/var/snap/microk8s/current/args/"
LAYOUTS: Final[Mapping[str, Layout]] = {
    "": Layout("/etc/containerd/config.toml"),
    **{
        name: Layout(
            _RANCHER.format(name) + "config.toml",
            {
                1: _RANCHER.format(name) + "config.toml.tmpl",
                2: _RANCHER.format(name) + "config-v3.toml.tmpl",
            },
        )
        for name in ("k3s", "rke2")
    },
    "k0s": Layout("/etc/k0s/containerd.toml"),
    "microk8s": Layout(
        _MICROK8S + "containerd.toml", dict.fromkeys((1, 2), _MICROK8S + "containerd-template.toml")
    ),
}


@frozen
class Nri:
    """What the configuration says of NRI. validator, required: as the facts ``nri_validator`` and so on."""

    enabled: bool
    socket: str
    connections: bool
    validator: Mapping[str, bool]
    required: Sequence[str]
    source: str


def learn_from_files(
    root: Root, candidate: sockets.Candidate, pid: int | None, findings: Findings
) -> Nri | None:
    """Note what the configuration files say; what they say of NRI is returned, None if that is not known.

    findings: must hold the version already, which decides how files are merged. Problems are noted there.
    """
    words = processes.command_line(root, pid)
    distribution = _distribution(root, candidate, words)
    layout = LAYOUTS[distribution]
    if distribution:
        findings.learn("distribution", distribution, f"{candidate.path} is where it listens")
    path, source = layout.config, "where it lies by default"
    usual = bool(words) or sockets.is_usual(candidate.path)
    if not usual or (candidate.distribution and not distribution):
        path = ""
    flag_ = processes.option(words, "-c", "--config", "-config")
    if flag_:
        path, source = processes.absolute(root, pid, flag_), f"command line of process {pid}"
    if candidate.config:
        path, source = candidate.config, "[runtimes] config"
    if not path:
        return None  # it may lie anywhere
    findings.learn("config", path, source)
    numbers = _numbers(findings.version)
    if numbers is not None:
        template = layout.templates.get(min(numbers[0], 2))
        findings.learn("config_template", template, f"{distribution}, containerd {numbers[0]}")
    try:
        main = _read(root, path)
    except FileNotFoundError:
        findings.learn("config_exists", False, path)
        # Without a file the daemon runs on what is built in, and imports nothing.
        main = _File(path, {}, "containerd's defaults")
    except HostError as error:
        findings.trouble(error)
        return None
    else:
        findings.learn("config_exists", True, path)
        try:
            findings.learn("config_version", main.version, path)
            findings.learn("imports", list(main.imports), path)
        except HostError as error:
            findings.trouble(error)
            return None
    if numbers is None:
        return None  # the defaults and the merging depend on it
    try:
        merged, files = load(root, main, numbers)
        return _nri(merged, main.version, numbers, ", ".join(files) if main.document else main.source)
    except HostError as error:
        findings.trouble(error)
        return None


@frozen
class _File:
    path: str
    document: Mapping[str, Any]
    source: str

    @property
    def version(self) -> int:
        value = self.document.get("version", 1)
        if type(value) is not int:
            raise self.wrong("version", "a whole number")
        return value

    @property
    def imports(self) -> tuple[str, ...]:
        value = texts(self.document.get("imports", []))
        if value is None:
            raise self.wrong("imports", "an array of strings")
        return tuple(value)

    def wrong(self, key: str, expected: str) -> HostError:
        return HostError(
            "HST105", f"{self.path}: {key} is not {expected}", "containerd does not start with it"
        )


def _read(root: Root, path: str) -> _File:
    return _File(path, from_toml(root.read(path), path, "HST105"), path)


def load(root: Root, main: _File, numbers: _Numbers) -> tuple[dict[str, Any], list[str]]:
    """(merged document, files in reading order), as a containerd of this version merges its imports.

    Up to 1.7 each plugin's table replaces the earlier one, from 2.0 on tables are merged key by key
    (docs/facts.md#containerd-configuration; the details are those of ``containerd config dump``). Raises
    `HostError` ``HST105`` for what containerd would not start with, and for more files than anybody has.
    """
    deep = numbers >= _FIRST_ENABLED
    merged: dict[str, Any] = {}
    read: dict[str, None] = {}
    waiting = deque([main])
    while waiting:
        file = waiting.popleft()
        if file.path in read:
            continue
        read[file.path] = None
        merged = _merge(merged, file.document, deep=deep)
        if file.version == 1 and not deep:
            continue  # no imports in this version
        for path in _resolve(root, file):
            if path in read:
                continue
            if len(read) + len(waiting) > _MOST_IMPORTS:
                raise HostError("HST105", f"{main.path} imports more than {_MOST_IMPORTS} files")
            try:
                waiting.append(_read(root, path))
            except FileNotFoundError:
                text_ = f"{path}, which {file.path} imports, does not exist"
                raise HostError("HST105", text_, "containerd does not start without it") from None
    return merged, list(read)


def _resolve(root: Root, file: _File) -> list[str]:
    found = []
    for pattern in file.imports:
        path = os.path.normpath(os.path.join(os.path.dirname(file.path), pattern))
        # Only a star makes it a pattern, as in containerd.
        found += root.matches(path) if "*" in path else [path]
    return found


def _merge(to: Mapping[str, Any], document: Mapping[str, Any], *, deep: bool) -> dict[str, Any]:
    old, new = table(to, "plugins"), table(document, "plugins")
    plugins = merge_tables(old, new) if deep else {**old, **new}
    # Lists of names are joined at the top, and replaced within plugins' tables.
    disabled = [*(texts(to.get(_DISABLED)) or []), *(texts(document.get(_DISABLED)) or [])]
    return {**to, **document, "plugins": plugins, _DISABLED: disabled}


def _nri(document: Mapping[str, Any], version: int, numbers: _Numbers, source: str) -> Nri:
    """What the merged document says. Raises `HostError` ``HST105`` for a value of the wrong type."""
    plugins = table(document, "plugins")
    # In version 1 plugins go by their bare name; containerd 2 takes that for another plugin's.
    old = version == 1 and numbers < _FIRST_ENABLED
    values = table(plugins, _NRI[1] if old else _NRI_TABLE)
    file = _File(source, {}, source)

    def boolean(key: str, default: bool) -> bool:
        value = values.get(key, default)
        if type(value) is not bool:
            raise file.wrong(f"{_NRI_TABLE}.{key}", "true or false")
        return value

    disabled = boolean("disable", numbers < _FIRST_ENABLED)
    if _NRI_TABLE in document[_DISABLED]:
        disabled = True
    path = text(values.get("socket_path", ""))
    if path is None:
        raise file.wrong(f"{_NRI_TABLE}.socket_path", "a string")
    rules = table(values, "default_validator") if numbers >= _FIRST_VALIDATOR else {}
    if rules.get("enable") is not True:
        rules = {}
    return Nri(
        enabled=not disabled,
        socket=path or DEFAULT_NRI_SOCKET,
        connections=not boolean("disable_connections", False),
        validator={key: True for key, value in rules.items() if value is True},
        required=texts(rules.get("required_plugins")) or [],
        source=source,
    )


def _distribution(root: Root, candidate: sockets.Candidate, words: Sequence[str]) -> str:
    """Which of the distributions that use this socket it is: by the command line, else by the one folder."""
    names = candidate.distribution
    if len(names) < 2:
        return names[0] if names else ""
    folders = {name: os.path.dirname(LAYOUTS[name].config) for name in names}
    for name, folder in folders.items():
        if any(folder in word for word in words):
            return name
    there = [name for name, folder in folders.items() if root.exists(folder)]
    return there[0] if len(there) == 1 else ""


# --- NRI -----------------------------------------------------------------------------------------------


def learn_nri(
    root: Root,
    findings: Findings,
    pid: int | None,
    plugins: Collection[tuple[str, str]] | None,
    configured: Nri | None,
    timeout: float,
) -> None:
    """Note whether NRI is on. No plugin is registered: at most the socket is connected to and closed.

    plugins: of `introspect`; configured: of `learn_from_files`; each None if not known.
    """
    numbers = _numbers(findings.version)
    if numbers is not None and numbers < FIRST_WITH_NRI["containerd"]:
        findings.learn("nri", "absent", f"containerd {findings.version} has no NRI of this protocol")
        return
    if plugins is not None and _NRI not in plugins:
        if numbers is not None:
            source = "introspection: the NRI plugin is not there, so it is in disabled_plugins"
            findings.learn("nri", "off", source)
        return
    if configured is not None:
        findings.learn("nri_socket", configured.socket, configured.source)
        findings.learn("nri_validator", dict(configured.validator), configured.source)
        findings.learn("required_plugins", list(configured.required), configured.source)
    path = configured.socket if configured else DEFAULT_NRI_SOCKET
    listener: sockets.Peer | HostError
    try:
        listener = sockets.listener(root, path, pid, timeout)
    except HostError as error:
        listener = error
    if isinstance(listener, sockets.Peer) and pid is not None and listener.pid == pid:
        source = f"process {pid} listens at {path}"
        findings.learn("nri", "on", source)
        findings.learn("nri_socket", path, source)
        findings.learn("nri_connections", True, source)
        if configured is not None and not configured.enabled:
            text_ = f"NRI is on, but {configured.source} disables it"
            findings.trouble(HostError("HST106", text_, "a restart of containerd would turn it off"))
    elif configured is not None:
        _learn_configured(findings, configured, pid, listener)


def _learn_configured(
    findings: Findings, configured: Nri, pid: int | None, listener: sockets.Peer | HostError
) -> None:
    """The socket has not shown that NRI is on: what the configuration says, if the two agree."""
    until = f"{configured.source}, for the daemon started with it"
    nobody = listener.message if isinstance(listener, HostError) and listener.code == "HST101" else ""
    if not configured.enabled:
        findings.learn("nri", "off", f"{configured.source}; {nobody}" if nobody else until)
        findings.learn("nri_connections", configured.connections, configured.source)
        return
    if not configured.connections:
        findings.learn("nri", "on", until)
        findings.learn("nri_connections", False, until)
        return
    if isinstance(listener, HostError):
        if not nobody:
            findings.trouble(listener)  # it may well be on
            return
        why = nobody
    elif listener.pid is None or pid is None:
        source = f"{configured.source}; {configured.socket} accepts connections"
        findings.learn("nri", "on", source)
        findings.learn("nri_connections", True, source)
        return
    else:
        why = f"process {listener.pid}, which is not this containerd, listens at {configured.socket}"
    hint = "containerd was not restarted since, or another program took its socket"
    findings.trouble(HostError("HST106", f"{configured.source} enables NRI, but {why}", hint))


def _numbers(version: str) -> _Numbers | None:
    return Runtime("containerd", "containerd", version).version_tuple
