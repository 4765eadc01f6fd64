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
    """Outcome and decoded spec are the reference's; where we differ on purpose, one of us refuses it."""
    wanted: Any = None
    if case["head"]["outcome"] == "ok":
        wanted = without_empty(case["head"]["spec"])
        wanted.pop("containerEdits") if not wanted["containerEdits"] else None
    try:
        decoded = without_empty(to_dict(load_spec(base64.b64decode(case["data_b64"]), "spec")))
    except CdiError:
        decoded = None

    if ("decode", case["id"]) in DIFFERENCES:
        assert (decoded is None) is not (wanted is None)
    else:
        assert decoded == wanted


def test_every_difference_is_one() -> None:
    """Each listed difference names a case, and there are few of them."""
    every = {case.values[0]["id"] for case in cases("decode")}

    assert {id_ for file, id_ in DIFFERENCES if file == "decode"} <= every
    assert len(DIFFERENCES) <= MAX_DIFFERENCES
