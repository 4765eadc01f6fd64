"""Our Debian packages, and a host on which apt installs them from an archive that is a folder of the host.

There is no other archive and no network there, so what the packages need is what the host's suite ships. It
must not know what kind of host that is, a box or a virtual machine, nor what is tested on it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Protocol

from .units import HostFailure

CORE = "cdi-courier"
BACKENDS = ("cdi-courier-nri", "cdi-courier-oci-hook", "cdi-courier-cri-o")
UNIT = "cdi-courier.service"
STATE = "/var/lib/cdi-courier"

_REPOSITORY = Path(__file__).resolve().parents[2]
_ARCHIVE = "/srv/archive"
_BUILD = 600.0  # seconds, with build dependencies to be installed; else it takes ten
_INDEX = 60.0
_APT = 300.0
# What belongs to the package manager or is a cache of what can be had again, and the journal.
_NOT_OURS = ("/var/lib/dpkg", "/var/lib/apt", "/var/cache", "/var/log", _ARCHIVE)


class Host(Protocol):
    """Runs a program as root: a `Box` or a `VM`."""

    def run(
        self, argv: list[str | Path], *, check: bool = True, timeout: float = ...
    ) -> subprocess.CompletedProcess[str]: ...


def build(folder: Path, version: str | None = None) -> None:
    """Build the packages of this checkout into a folder. version: instead of its own. Raises HostFailure."""
    environment = {**os.environ, **({"DEB_VERSION": version} if version else {})}
    argv = ["sh", "packaging/deb/build.sh", str(folder)]
    done = subprocess.run(
        argv, cwd=_REPOSITORY, env=environment, capture_output=True, text=True, timeout=_BUILD
    )
    if done.returncode:
        raise HostFailure(f"the packages cannot be built:\n{done.stderr[-4000:]}")


def offer(root: Path, folder: Path) -> None:
    """Make a folder's packages all that a root's apt knows; ``apt-get update`` has to follow.

    root: also the live one of a box.
    """
    shutil.rmtree(root / "etc/apt/sources.list.d", ignore_errors=True)
    (root / "etc/apt/sources.list").write_text(f"deb [trusted=yes] file:{_ARCHIVE} ./\n")
    archive = root / _ARCHIVE.lstrip("/")
    shutil.rmtree(archive, ignore_errors=True)
    archive.mkdir(parents=True)
    for deb in folder.glob("*.deb"):
        shutil.copy(deb, archive)
    # Not in the archive, whose path means nothing in a box's mount namespace.
    argv = ["dpkg-scanpackages", "."]
    index = subprocess.run(argv, cwd=folder, check=True, capture_output=True, timeout=_INDEX)
    (archive / "Packages").write_bytes(index.stdout)


def apt(host: Host, *arguments: str) -> str:
    """Run apt-get, and return what it and the packages' scripts said. Raises HostFailure."""
    argv = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-y", "-oDpkg::Use-Pty=0", *arguments]
    done = host.run([*argv], timeout=_APT)
    return done.stdout + done.stderr


def files(host: Host, *besides: str) -> dict[str, str]:
    """Path → kind, mode and size of all files but those of the package manager, the journal and caches.

    besides: more folders that are left out.
    """
    prune = [word for path in (*_NOT_OURS, *besides) for word in ("-path", path, "-prune", "-o")]
    # A folder's size tells what it once held.
    argv = ["find", "/", "-xdev", *prune, "-type", "d", "-printf", "%p\t%y %m\n", "-o"]
    shown = host.run([*argv, "-printf", "%p\t%y %m %s\n"]).stdout
    return dict(line.split("\t", 1) for line in shown.splitlines())
