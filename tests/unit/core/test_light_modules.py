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


DAEMON = """
import sys
from cdi_courier import choice
from cdi_courier.host.model import Fact, Runtime
from cdi_courier.plugins import discover
from cdi_courier.settings import Settings
handlers = Fact({"runc": {"type": "io.containerd.runc.v2", "path": "/usr/sbin/runc"}}, "a test")
runtime = Runtime("containerd", "containerd", "1.7.24", "/run/c.sock", {"handlers": handlers})
choice.choose(discover(()), runtime, Settings())
print(*(name for name in ("ssl", "hashlib", "http.client", "difflib", "ctypes") if name in sys.modules))
"""


def test_what_a_daemon_asks_of_backends_loads_nothing_large() -> None:
    """Offers for a containerd bring neither OpenSSL nor what only commands need: it stays for ever."""
    done = subprocess.run([sys.executable, "-c", DAEMON], capture_output=True, text=True, check=True)

    assert done.stdout.split() == []


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
