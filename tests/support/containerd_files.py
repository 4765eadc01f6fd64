"""Configurations of containerd with NRI off, as hosts have them: what an installation starts from.

It must not know what is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

_DATA = Path(__file__).parents[1] / "data/runtimes"

NRI = '[plugins."io.containerd.nri.v1.nri"]'
CRI = 'plugins."io.containerd.grpc.v1.cri"'


@dataclass(frozen=True)
class Files:
    """One host's files. main: None if there is none. others: path below its folder → text.

    ``{etc}`` in a text is that folder. version: of containerd. kept: keys of the NRI table that must be as
    they are. imported: whether the drop-in is read without a change of the main file.
    """

    main: str | None
    version: str = "1.7.24~ds1"
    others: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, object] = field(default_factory=dict)
    imported: bool = False

    def write(self, etc: Path) -> Path:
        """Put them into the folder, which is made, and return the main file's path."""
        etc.mkdir(parents=True, exist_ok=True)
        for name, text in {"config.toml": self.main, **self.others}.items():
            if text is not None:
                path = etc / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text.replace("{etc}", str(etc)).encode())
        return etc / "config.toml"


def _data(name: str) -> str:
    return (_DATA / name).read_text()


_V2 = f"""\
version = 2

[{CRI}]
  sandbox_image = "registry.example/pause:1"
  [{CRI}.containerd]
    default_runtime_name = "crun"
"""

_V3 = f"""\
version = 3

[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = 'registry.example/pause:1'

{NRI}
  disable = true
  socket_path = "/run/other/nri.sock"
"""

OFF: dict[str, Files] = {
    "none": Files(None),
    "empty": Files(""),
    "only-comments": Files("# nothing yet\n\n  # really"),
    "version-2": Files(_V2),
    "defaults-written-out": Files(_data("containerd-1.7.24-config-default.toml")),
    "other-imports": Files(
        _V2.replace("\n", "\nimports = [\"{etc}/extra/*.toml\", '{etc}/x*']  # theirs\n", 1)
    ),
    "imports-a-line-each": Files(
        _V2.replace(
            "\n", '\nimports = [\n    "{etc}/extra/*.toml", # one\n    "{etc}/x*", # two\n  # end\n]\n', 1
        )
    ),
    "covering-imports": Files("imports = ['{etc}/conf.d/*.toml']\n" + _V2, imported=True),
    "covering-imports-with-files": Files(
        'imports = ["{etc}/conf.d/*.toml"]\n' + _V2,
        others={
            "conf.d/10-nri.toml": f"version = 2\n{NRI}\nplugin_request_timeout = '3s'\n",
            "conf.d/90-grpc.toml": "version = 2\n[grpc]\nuid = 0\n",
        },
        kept={"plugin_request_timeout": "3s"},
        imported=True,
    ),
    "relative-imports": Files('imports = ["conf.d/*.toml"]\n' + _V2),
    "inline-tables": Files(
        "version = 2\n"
        'plugins = {"io.containerd.grpc.v1.cri" = {sandbox_image = "registry.example/pause:1"}}\n'
    ),
    "crlf": Files(_V2.replace("\n", "\r\n")),
    "no-final-newline": Files("# there it is:\nversion = 2"),
    "comments-everywhere": Files(
        f"# imports = [\n\t# version = 1\nversion = 2 # imports = []\n#[plugins]\n\n[{CRI}] # cri\n# end\n"
    ),
    "nri-table": Files(
        f"{_V2}\n{NRI} # off\n  disable = true\n  disable_connections = false\n"
        '  socket_path = "/run/x.sock"\n  plugin_registration_timeout = "7s"\n',
        kept={"socket_path": "/run/x.sock", "plugin_registration_timeout": "7s"},
    ),
    "1.7-as-packaged": Files(
        _data("containerd-1.7.24-config-file-nri-off.toml").replace("/etc/containerd", "{etc}"), imported=True
    ),
    "2.1-as-packaged": Files(
        _data("containerd-2.1.9-config-file-nri-off.toml").replace("/etc/containerd", "{etc}"),
        version="2.1.9+unknown",
        imported=True,
    ),
    "version-3": Files(_V3, version="2.1.9+unknown", kept={"socket_path": "/run/other/nri.sock"}),
    "version-2-on-2.1": Files(
        f"{_V2}\n{NRI}\n  disable = true\n  plugin_path = '/x'\n",
        version="2.1.9+unknown",
        kept={"plugin_path": "/x"},
    ),
}
"""Where NRI can be enabled by files alone."""

VERSION_1 = f"""\
# As Docker's package brought it.
[plugins.cri]
  sandbox_image = "registry.example/pause:1"
{NRI}
  disable = false
"""


def _with_handlers(files: Files) -> Files:
    """The same with the handler defined that is its default, without which it would run no pods."""
    text = files.main or ""
    if 'default_runtime_name = "crun"' not in text:
        return files
    newline = "\r\n" if "\r\n" in text else "\n"
    lines = ["", f"[{CRI}.containerd.runtimes.crun]", 'runtime_type = "io.containerd.runc.v2"', ""]
    return replace(files, main=text.rstrip("\r\n") + newline + newline.join(lines))


HANDLED = {name: _with_handlers(files) for name, files in OFF.items() if name != "inline-tables"}
"""`OFF`, where a handler can be added by files alone: not to tables that are written inline."""
