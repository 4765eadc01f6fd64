"""A spec's hooks are run as a runtime runs them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from cdi_courier.errors import DeliveryError
from cdi_courier_oci_hook.live import proxy
from cdi_courier_oci_hook.live.namespaces import Namespaces

NONE = Namespaces(-1, {})


def run(*hooks: dict[str, Any]) -> None:
    proxy.run(hooks, {"pid": 1}, NONE, "/", time.monotonic() + 20)


def shell(script: str, **more: Any) -> dict[str, Any]:
    return {"hookName": "createRuntime", "path": "/bin/sh", "args": ["sh", "-c", script], **more}


def test_a_hook_ignores_no_signal_that_only_python_ignores(tmp_path: Path) -> None:
    """A pipeline in it ends with its reader, as when the runtime runs it."""
    said = tmp_path / "said"
    run(shell(f"grep SigIgn /proc/self/status > {said}"))

    assert said.read_text().split() == ["SigIgn:", "0" * 16]


def test_a_hook_that_is_no_program_fails_in_words() -> None:
    """Its process says why, and does not go on as a copy of the caller's."""
    with pytest.raises(DeliveryError, match=r'HOK218: hook "/nonexistent" .*FileNotFoundError'):
        run({"hookName": "prestart", "path": "/nonexistent"})
