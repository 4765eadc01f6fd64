"""Checks that what a package's build has put together is whole.

usage: check.py FOLDER…

FOLDERs are the packages' ``site-packages``. Every module can be imported, every backend is found by its entry
point, and the command answers. It knows nothing of a packaging format.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

_BACKENDS = {"nri", "oci_hook", "cri_o_drop_in"}


def main() -> None:
    """Check the folders of the command line; the first fault ends it with a message."""
    sys.path[:0] = sys.argv[1:]
    for folder in map(Path, sys.argv[1:]):
        for package in sorted(folder.glob("cdi_courier*/__init__.py")):
            _import_all(package.parent.name)
    plugins = importlib.import_module("cdi_courier.plugins").discover(())
    if plugins.problems or not set(plugins.backends) >= _BACKENDS:
        sys.exit(f"backends found: {sorted(plugins.backends)}; problems: {plugins.problems}")
    code = f"import sys; sys.path[:0] = {sys.argv[1:]!r}; from cdi_courier.__main__ import main; main()"
    subprocess.run([sys.executable, "-c", code, "--config", os.devnull, "config", "check"], check=True)  # noqa: S603 - as set up above


def _import_all(name: str) -> None:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)


if __name__ == "__main__":
    main()
