"""JSON without the standard module's start: the same values, the same text, the same refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import cdi_courier
import pytest
from cdi_courier import fastjson
from hypothesis import given
from hypothesis import strategies as st

leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@given(values, st.sampled_from([None, 1]), st.booleans())
def test_what_json_writes_is_read_alike_and_written_alike(
    value: Any, indent: int | None, ascii_: bool
) -> None:
    """Any value, with blanks or without, escaped or not."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_).encode("utf-8", "surrogatepass")

    assert fastjson.loads(b" \n" + text + b"\t\r\n") == json.loads(text)
    assert fastjson.dumps(value) == json.dumps(value, separators=(",", ":")).encode()


@given(st.text('{}[]",:1.e-tfn \\u\n\x00é', max_size=12))
def test_what_json_refuses_is_refused_alike(text: str) -> None:
    """Any text: the same value, or the same words."""

    def read(loads: Any, data: Any) -> Any:
        try:
            return repr(loads(data))
        except ValueError as error:
            return str(error)

    expected = read(lambda data: json.loads(data, parse_constant=fastjson._no_constant), text)

    assert read(fastjson.loads, text.encode()) == expected


CUT = (
    b"",
    b"{",
    b"[",
    b'"a',
    b'{"a"',
    b'{"a":',
    b"nul",
    b"1 2",
    b"NaN",
    b"-Infinity",
    b"\xff",
    b'"\\x"',
    b"\x00",
)


@pytest.mark.parametrize("data", CUT, ids=repr)
def test_a_bare_interpreter_refuses_what_is_no_json(data: bytes) -> None:
    """Where the standard module is not loaded, what is cut off or wrong is a ValueError too."""
    script = (
        f"import sys; sys.path.append({str(Path(cdi_courier.__file__).parents[1])!r})\n"
        "from cdi_courier import fastjson\n"
        "assert 'json' not in sys.modules\n"
        f"try: fastjson.loads({data!r})\n"
        "except ValueError: print('refused')\n"
    )
    base = getattr(sys, "_base_executable", sys.executable)

    done = subprocess.run(
        [base, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=20, check=False
    )

    assert (done.stdout, done.stderr) == ("refused\n", "")


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {"a": -float("inf")}, [{1, 2}], b"x"], ids=repr
)
def test_what_json_cannot_hold_is_not_written(value: Any) -> None:
    """Numbers that are none, and what is no JSON type."""
    with pytest.raises(ValueError, match="JSON"):
        fastjson.dumps(value)


@pytest.mark.parametrize("accelerator", ["None", "type(sys)('_json')"], ids=["none", "another"])
def test_without_the_accelerator_results_are_the_same(accelerator: str) -> None:
    """An interpreter that has none, or one that offers something else, has the standard module do it."""
    script = (
        f"import sys; sys.path.append({str(Path(cdi_courier.__file__).parents[1])!r})\n"
        f"sys.modules['_json'] = {accelerator}\n"
        "from cdi_courier import fastjson\n"
        'print(fastjson.dumps(fastjson.loads(b\' {"a": [1.5, null, "\\\\u00fc"]} \')))\n'
        "for wrong in (b'{', b'NaN', b'1 2'):\n"
        "    try: fastjson.loads(wrong)\n"
        "    except ValueError: print('refused')\n"
    )
    base = getattr(sys, "_base_executable", sys.executable)

    done = subprocess.run(
        [base, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=20, check=False
    )

    assert (done.stdout, done.stderr) == ('b\'{"a":[1.5,null,"\\\\u00fc"]}\'\n' + "refused\n" * 3, "")
