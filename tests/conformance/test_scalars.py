"""A plain scalar means what it means to the reference, as a string, a key, an integer and a boolean."""

from __future__ import annotations

from typing import Any

import pytest
from cdi_courier.cdi.decode import decode_spec
from cdi_courier.errors import CdiError
from conformance.golden import cases


@pytest.mark.parametrize("case", cases("scalars", key="plain"))
def test_a_plain_scalar_reads_as_in_the_reference(case: dict[str, Any]) -> None:
    """All four readings are the reference's, and so are their refusals."""
    plain = case["plain"]
    read = {
        "plain": plain,
        "str": _decoded(f"kind: {plain}\n", lambda spec: spec.kind),
        "int": _decoded(
            f"containerEdits:\n  deviceNodes:\n  - major: {plain}\n",
            lambda spec: spec.container_edits.device_nodes[0].major,
        ),
        "key": _decoded(f"annotations:\n  {plain}: v\n", lambda spec: next(iter(spec.annotations))),
        "bool": _decoded(
            f"containerEdits:\n  intelRdt:\n    enableMonitoring: {plain}\n",
            lambda spec: spec.container_edits.intel_rdt.enable_monitoring,
        ),
    }
    wanted = {key: None if isinstance(value, dict) else value for key, value in case.items()}

    # True == 1 in Python, so the types are compared as well.
    assert {key: (type(value), value) for key, value in read.items()} == {
        key: (type(value), value) for key, value in wanted.items()
    }


def _decoded(document: str, read: Any) -> Any:
    try:
        return read(decode_spec(document.encode()))
    except CdiError:
        return None
