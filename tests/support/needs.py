"""What a test needs of the machine."""

from __future__ import annotations

import os

import pytest


def need(reason: str) -> None:
    """Skip the test for this reason, if there is one; in CI fail it."""
    if reason and os.environ.get("CI"):
        pytest.fail(f"CI must run these tests: {reason}")
    if reason:
        pytest.skip(reason)
