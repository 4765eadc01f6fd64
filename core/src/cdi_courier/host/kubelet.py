"""Which runtime the kubelet of this host uses, by what it was started with and what it is configured to.

Only reads processes and files. Precedence as the kubelet's: command line over configuration file.
"""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING, Final

from attrs import frozen

from cdi_courier.errors import HostError, quoted
from cdi_courier.host import processes
from cdi_courier.host.answers import text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdi_courier.host.files import Root

_FLAG: Final = "--container-runtime-endpoint"
_CONFIG: Final = "/var/lib/kubelet/config.yaml"
_INSTANCE: Final = "/var/lib/kubelet/instance-config.yaml"
_FLAGS_FILE: Final = "/var/lib/kubelet/kubeadm-flags.env"
_FLAGS: Final = "KUBELET_KUBEADM_ARGS"
_K3S: Final = "/run/k3s/containerd/containerd.sock"
_K3S_SETTINGS: Final = {"k3s": "/etc/rancher/k3s/config.yaml", "rke2": "/etc/rancher/rke2/config.yaml"}
_FILE_LIMIT: Final = 1 << 18  # a kubelet's file has a hundred lines; YAML is slow to read


@frozen
class Endpoint:
    """path: of the socket, without ``unix://``. source: for a person."""

    path: str
    source: str


def endpoint(root: Root) -> Endpoint | None:
    """The kubelet's runtime socket; None if there is no kubelet, or none that says which.

    Raises `HostError` ``HST105`` for a file that would decide and cannot be read.
    """
    for pid, words in processes.named(root, ("kubelet", "hyperkube", "kubelite")):
        # One that does not say uses a default that depends on its version, whatever files lie around.
        return _of_kubelet(root, words, f"command line of process {pid}")
    for pid, words in processes.named(root, ("k3s", "rke2", "k3s-server", "k3s-agent")):
        found = _of_k3s(root, pid, words)
        if found is not None:
            return found
    return _of_files(root, [_CONFIG, _INSTANCE])


def _of_kubelet(root: Root, words: Sequence[str], source: str) -> Endpoint | None:
    given = processes.option(words, _FLAG)
    if given:
        return _endpoint(given, source)
    config, folder = processes.option(words, "--config"), processes.option(words, "--config-dir")
    drop_ins = root.matches(f"{folder}/*.conf") if folder else []
    return _of_config(root, [*([config] if config else []), *drop_ins])


def _of_files(root: Root, configs: Sequence[str]) -> Endpoint | None:
    """What a kubelet that does not run now would be started with, by kubeadm's files."""
    with contextlib.suppress(FileNotFoundError):
        for line in root.read(_FLAGS_FILE, _FILE_LIMIT).decode(errors="replace").splitlines():
            name, _, value = line.partition("=")
            if name.strip() == _FLAGS:
                given = processes.option(_words(value, 2), _FLAG)
                if given:
                    return _endpoint(given, _FLAGS_FILE)
    return _of_config(root, configs)


def _words(value: str, depth: int) -> list[str]:
    """The words of a shell-quoted string of shell-quoted words."""
    try:
        words = shlex.split(value)
    except ValueError:
        return []
    return [word for each in words for word in _words(each, depth - 1)] if depth > 1 else words


def _of_config(root: Root, paths: Sequence[str]) -> Endpoint | None:
    found = None
    for path in paths:
        value = _yaml_key(root, path, "containerRuntimeEndpoint")
        if value:
            found = _endpoint(value, path)
    return found


def _of_k3s(root: Root, pid: int, title: Sequence[str]) -> Endpoint | None:
    # It overwrites its arguments with one "/usr/local/bin/k3s server"; other subcommands are clients.
    words = " ".join(title).split()
    name = next((name for name in _K3S_SETTINGS if name in words[0]), "k3s")
    if not {"server", "agent"} & {*words[1:2], words[0].rpartition("-")[2]}:
        return None
    given = processes.option(words, _FLAG)
    if given:
        return _endpoint(given, f"command line of process {pid}")
    settings = _K3S_SETTINGS[name]
    value = _yaml_key(root, settings, "container-runtime-endpoint")
    if value:
        return _endpoint(value, settings)
    # With another runtime it does not start its own containerd.
    return Endpoint(_K3S, f"{name}, process {pid}, brings its own") if root.exists(_K3S) else None


def _yaml_key(root: Root, path: str, key: str) -> str:
    """The string at the key of a YAML file's mapping; empty if there is none. Raises `HostError`."""
    try:
        data = root.read(path, _FILE_LIMIT)
    except FileNotFoundError:
        return ""
    if key.encode() not in data:
        return ""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        document = yaml.load(data, Loader=loader)  # noqa: S506 - both are safe
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise HostError("HST105", f"{path} is not YAML: {quoted(str(error), 100)}") from None
    return text(document.get(key)) or "" if isinstance(document, dict) else ""


def _endpoint(value: str, source: str) -> Endpoint | None:
    path = value.removeprefix("unix://")
    # "npipe://", "tcp://": none of these runtimes listens there.
    return Endpoint(path, source) if path.startswith("/") else None
