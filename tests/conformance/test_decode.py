"""A spec file decodes to what the reference decodes it to, or is refused as there."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from cdi_courier.cdi.edits import to_dict
from cdi_courier.cdi.validate import load_spec
from cdi_courier.errors import CdiError
from conformance.differences import DIFFERENCES, MAX_DIFFERENCES
from conformance.golden import cases, without_empty


@pytest.mark.parametrize("case", cases("decode"))
def test_a_spec_file_decodes_as_in_the_reference(case: dict[str, Any]) -> None:
    """Outcome and decoded spec are the reference's, except where we differ on purpose."""
    wanted: Any = None
    if case["head"]["outcome"] == "ok" and ("decode", case["id"]) not in DIFFERENCES:
        wanted = without_empty(case["head"]["spec"])
        wanted.pop("containerEdits") if not wanted["containerEdits"] else None
    try:
        decoded = without_empty(to_dict(load_spec(base64.b64decode(case["data_b64"]), "spec")))
    except CdiError:
        decoded = None

    assert decoded == wanted


def test_every_difference_is_one() -> None:
    """Each listed difference names a case that the reference accepts, and there are few of them."""
    accepted = {case.values[0]["id"] for case in cases("decode") if case.values[0]["head"]["outcome"] == "ok"}

    assert {id_ for file, id_ in DIFFERENCES if file == "decode"} <= accepted
    assert len(DIFFERENCES) <= MAX_DIFFERENCES
