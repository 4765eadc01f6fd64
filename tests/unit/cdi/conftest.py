"""Lets the registry's tests run without root: the files they make are then the caller's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from cdi_courier.cdi import trust


@pytest.fixture(scope="session", autouse=True)
def _caller_is_an_owner() -> Iterator[None]:
    """Root is the only owner where root runs the tests; elsewhere the caller is one as well."""
    with pytest.MonkeyPatch.context() as patch:
        if os.geteuid() != 0:
            patch.setattr(trust, "acceptable_owners", lambda: frozenset({0, os.geteuid()}))
        yield
