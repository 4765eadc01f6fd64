"""The product as a system's own software: its distributions in a root, as a Debian package would lay them.

They are built from this checkout as wheels and unpacked beside Debian's libraries, so a box or a virtual
machine runs the code that is tested with the libraries that its suite ships. It must not know what the root
is of: a folder, a box's or a disk's to be.
"""

from __future__ import annotations

import configparser
import functools
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]
_DISTRIBUTIONS = ("core", "backends/nri", "backends/oci_hook", "backends/cri_o_drop_in")
_PACKAGES = "usr/lib/python3/dist-packages"
_PROGRAMS = "usr/bin"
_BUILD = 120.0
_COMPILE = 120.0

# Isolated like a distribution's own programs: nothing of the caller's folder or environment is imported.
_PROGRAM = """\
#!/usr/bin/python3 -I
import sys

from {module} import {function}

sys.exit({function}())
"""


def install_product(root: Path) -> None:
    """Put ``cdi-courier`` and all its backends into a root that has `rootfs.LIBRARIES`; again is no error.

    root: a folder, also the live one of a box. Raises CalledProcessError.
    """
    packages = root / _PACKAGES
    packages.mkdir(parents=True, exist_ok=True)
    for wheel in _wheels():
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            archive.extractall(packages)
            metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        _write_programs(root, packages / Path(metadata).parent / "entry_points.txt")
    # A first start would compile it all; under an emulator that takes longer than the tests.
    argv = ["chroot", str(root), "/usr/bin/python3", "-m", "compileall", "-q", f"/{_PACKAGES}"]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, timeout=_COMPILE)


def _write_programs(root: Path, entry_points: Path) -> None:
    parser = configparser.ConfigParser()
    parser.read(entry_points)
    if not parser.has_section("console_scripts"):
        return
    for name, target in parser["console_scripts"].items():
        module, _, function = target.partition(":")
        program = root / _PROGRAMS / name
        program.write_text(_PROGRAM.format(module=module, function=function))
        program.chmod(0o755)


@functools.cache
def _wheels() -> tuple[bytes, ...]:
    """The wheels of this checkout as it is now, built once a process."""
    with tempfile.TemporaryDirectory(prefix="cdi-wheels-") as folder:
        for distribution in _DISTRIBUTIONS:
            subprocess.run(
                [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
                cwd=_REPOSITORY / distribution,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_BUILD,
            )
        return tuple(path.read_bytes() for path in sorted(Path(folder).glob("*.whl")))
