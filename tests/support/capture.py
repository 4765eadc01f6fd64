"""Captures what a container runtime answers, as the files that `fake_crio` answers with.

usage: PYTHONPATH=tests python -m support.capture SOCKET WHAT [FOLDER]

SOCKET is the runtime's CRI socket. WHAT ends the names of files that tell configurations apart, such as
``nri-on``. FOLDER is tests/data/runtimes unless given. It asks and changes nothing. What else is wanted of a
new version (``containerd config dump``, ``crio config``, a container's config.json) has a command of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cdi_courier.host import cri, unix_http
from cdi_courier.host.answers import version_of
from cdi_courier.host.files import Root
from google.protobuf import json_format

from .fake_crio import CRI, MESSAGES

FOLDER = Path(__file__).parents[1] / "data/runtimes"
PLUGINS = "/containerd.services.introspection.v1.Introspection/Plugins"

_TIMEOUT = 10.0


def capture(path: str, what: str, folder: Path = FOLDER) -> list[Path]:
    """The files that were written. Raises HostError if the runtime does not answer."""
    root = Root("/")
    with cri.client(root, path) as client:
        version = _answer(client, f"{CRI}Version", "VersionResponse", version="v1")
        status = _answer(client, f"{CRI}Status", "StatusResponse", verbose=True)
        kind = version["runtime_name"].replace("cri-o", "crio")
        prefix = f"{kind}-{version_of(version['runtime_version']).removeprefix('v').partition('+')[0]}"
        files: dict[str, Any] = {"version.json": version, f"status-verbose-{what}.json": status}
        if kind == "containerd":
            plugins = _answer(client, PLUGINS, "PluginsResponse")
            files[f"introspection-{what}.json"] = plugins["plugins"]
    if kind == "crio":
        files[f"http-config-{what}.toml"] = unix_http.get(root, path, "/config", _TIMEOUT).decode()
        files["http-info.json"] = json.loads(unix_http.get(root, path, "/info", _TIMEOUT))
    written = []
    for name, content in files.items():
        place = folder / f"{prefix}-{name}"
        text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
        place.write_text(text)
        written.append(place)
    return written


def _answer(client: cri.Client, method: str, name: str, **values: Any) -> dict[str, Any]:
    request = cri.MESSAGES["StatusRequest" if "verbose" in values else "VersionRequest"](**values)
    call = client.start(method, request, MESSAGES[name], _TIMEOUT)
    answer = client.finish(call, method, _TIMEOUT)
    return json_format.MessageToDict(answer, preserving_proto_field_name=True)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    for file in capture(sys.argv[1], sys.argv[2], *map(Path, sys.argv[3:])):
        print(file)
