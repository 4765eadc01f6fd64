"""The light modules are loaded once per container: what they import is bounded."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import cdi_courier
import pytest

SOURCE = Path(cdi_courier.__file__).parents[1]
LIGHT = (
    "errors",
    "names",
    "fastjson",
    "patterns",
    "request",
    "annotations",
    "policy",
    "oci",
    "signature",
    "table",
    "editing",
)
ALLOWED = "json, os, stat, errno, ctypes, fcntl, _socket, fnmatch, __future__"
NEVER = {"typing", "dataclasses", "logging", "attr", "attrs", "yaml", "cattrs", "pluggy", "click", "inspect"}


@cache
def imported(statement: str) -> frozenset[str]:
    """The modules that a bare interpreter has loaded after the statement."""
    done = subprocess.run(
        [
            # The interpreter itself: a virtual environment's brings its own start-up imports.
            getattr(sys, "_base_executable", sys.executable),
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.append({str(SOURCE)!r}); {statement}; print(*sorted(sys.modules))",
        ],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return frozenset(done.stdout.split())


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_imports_little(module: str) -> None:
    """Beyond the allowed modules and what those load, a light module loads only light modules."""
    more = imported(f"import cdi_courier.{module}") - imported(f"import {ALLOWED}")

    assert more <= {"cdi_courier", *(f"cdi_courier.{name}" for name in LIGHT)}


def test_no_light_module_imports_a_heavy_one() -> None:
    """All light modules together load none of the modules that take long to start."""
    loaded = imported("import " + ", ".join(f"cdi_courier.{name}" for name in LIGHT))

    assert not {name.partition(".")[0] for name in loaded} & NEVER
    assert {f"cdi_courier.{name}" for name in LIGHT} <= loaded
