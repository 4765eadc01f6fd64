"""JSON for processes that start once a container. Light module.

The standard ``json`` loads ``re`` and ``enum``, which takes as long as starting the interpreter; its C
accelerator needs neither. What this interpreter's accelerator does not offer is left to ``json``, so results
are the same, only later. It must not know what it reads.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_BLANKS = " \t\n\r"


def loads(data: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises `ValueError`, also for NaN and infinities."""
    text = data.decode("utf-8", "surrogatepass")
    begin = len(text) - len(text.lstrip(_BLANKS))
    try:
        value, end = _scan(text, begin)
        if not text[end:].strip(_BLANKS):
            return value
    except (StopIteration, SystemError):
        # As the accelerator fails when `json.decoder`, which has its error, is not loaded.
        pass
    import json

    return json.loads(text, parse_constant=_no_constant)  # says what is wrong


def dumps(value: Any) -> bytes:
    """The shortest JSON text of a value, in ASCII. Raises `ValueError` for what JSON cannot hold."""
    return "".join(_encode(value, 0)).encode("ascii")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class _Plain:
    """What the accelerator's scanner asks for: values as they are."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    array_hook = None
    parse_float = float
    parse_int = int
    parse_constant = staticmethod(_no_constant)


def _made_scanner() -> Callable[[str, int], tuple[Any, int]]:
    try:
        from _json import make_scanner

        scan: Callable[[str, int], tuple[Any, int]] = make_scanner(_Plain)  # type: ignore[arg-type]
        if scan('{"a":[1.5]}', 0) == ({"a": [1.5]}, 11):
            return scan
    except (ImportError, AttributeError, TypeError, ValueError):
        pass
    import json

    return json.JSONDecoder(parse_constant=_no_constant).raw_decode


def _made_encoder() -> Callable[[Any, int], Any]:
    try:
        from _json import encode_basestring_ascii, make_encoder

        # markers, default, encoder, indent, two separators, sort_keys, skipkeys, allow_nan. It is private,
        # so it is tried out.
        encode: Callable[[Any, int], Any] = make_encoder(
            None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, False
        )
        if "".join(encode({"a": [1.5, None]}, 0)) == '{"a":[1.5,null]}':
            return encode
    except (ImportError, AttributeError, TypeError, ValueError):
        pass
    import json

    encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False)
    return lambda value, _: encoder.iterencode(value)


def _refuse(value: Any) -> None:
    raise ValueError(f"{type(value).__name__} is no JSON")


_scan = _made_scanner()
_encode = _made_encoder()
