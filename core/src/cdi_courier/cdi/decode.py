r"""Bytes of a spec file → `Spec`. Source: docs/facts.md#cdi-decoding, #cdi-field-names.

``.yaml`` and ``.json`` alike are YAML 1.1 as libyaml reads it. libyaml's parser gives the events; a plain
tree is built from them (`_Builder`), then read strictly into the model (`decode_spec`). Which values make
sense is `validate`'s business; files, directories and trust are `registry`'s.

Events instead of nodes, because PyYAML's composer recurses once per nesting level, resolves scalars by
rules that are not CDI's, and keeps the interpreter lock for a whole document.

Not cattrs: every rule here is about what it leaves to others (case-insensitive names, null as absence at
any level, text made of numbers, the place of a mistake), so each class would need a hook of its own and
nothing of cattrs would be left; its error types also changed between the versions we support.

Hostile input: nesting is bounded by `MAX_DEPTH`, aliases share the value they name and their expansion is
bounded by `_excessive_aliasing`; the caller bounds the size. A line number costs nothing until there is
an error: only then the bytes are read again, with positions.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import math
import re
import struct
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

import attrs
from yaml import YAMLError
from yaml.events import AliasEvent, MappingStartEvent, ScalarEvent, SequenceStartEvent, StreamEndEvent

from cdi_courier.cdi.model import ListOf, Object, Scalar, Spec, StringMap, Wire
from cdi_courier.errors import CdiError, quoted

CParser: Callable[[bytes], Any] | None
try:
    from yaml.cyaml import CParser  # type: ignore[attr-defined, no-redef, unused-ignore]
except ImportError:  # PyYAML was built without libyaml
    CParser = None

# The reference allows 10,000 levels; nothing that decodes is deeper than 8.
MAX_DEPTH: Final = 1000

# The reference's limits (go-yaml): the share of nodes visited through aliases may be 99 % up to the first
# number of visits and 10 % from the second on.
_ALIAS_LOW: Final = 400_000
_ALIAS_HIGH: Final = 4_000_000

Path = tuple[str | int, ...]


class Problem(Exception):  # noqa: N818 - becomes a CdiError as soon as file and line are known
    """What is wrong at which path of a document. Never leaves this package."""

    def __init__(self, code: str, reason: str, *, path: Path = (), line: int = 0, hint: str = "") -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason
        self.path = path
        self.line = line
        self.hint = hint

    def under(self, key: str | int) -> Problem:
        """Return the same problem, seen from one level further out."""
        self.path = (key, *self.path)
        return self


def decode_spec(data: bytes, file: str = "") -> Spec:
    """Return the spec in `data`, its values not validated. `file` is named in errors.

    Raises `CdiError`: ``CDI003`` not well-formed, ``CDI004`` not the structure of a spec.
    """
    tree: Any = None
    try:
        tree = _Builder(data).tree()
        spec: Spec = _read_object(Spec, tree)
    except Problem as problem:
        raise spec_error(problem, data, file, kind=_kind_of(tree)) from None
    return spec


def spec_error(problem: Problem, data: bytes, file: str, *, kind: str = "") -> CdiError:
    """Return `problem` as an error that says file, line and path inside the document."""
    line = problem.line or _line_of(data, problem.path)
    where = ":".join(str(part) for part in (file, line) if part)
    path = format_path(problem.path)
    text = ": ".join(part for part in (where, path, problem.reason) if part)
    fields = {"file": file, "line": str(line or ""), "path": path, "kind": kind}
    return CdiError(
        problem.code, text, problem.hint, **{key: value for key, value in fields.items() if value}
    )


def format_path(path: Path) -> str:
    """Write a path as a person does, ``devices[0].containerEdits.env[2]``. Keys may be hostile."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        elif re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", key):
            text += f".{key}" if text else key
        else:
            text += f"[{quoted(key, 64)}]"
    return text


# --- scalars -------------------------------------------------------------------------------------------

_WORDS: Final[dict[str, bool | float | None]] = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys((sign + word for sign in ("", "+") for word in (".inf", ".Inf", ".INF")), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}
_NUMBER_STARTS: Final = frozenset("0123456789+-.")
_DOT_FLOAT: Final = re.compile(r"\.[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+(?:_[0-9]+)*)?")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_DECIMAL: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,19})")
_BASED: Final = re.compile(r"([-+]?)(?:0[xX]([0-9a-fA-F]+)|0[oO]?([0-7]+)|0[bB]([01]+))")


def resolve_scalar(text: str) -> str | bool | int | float | None:
    """Return the value of a plain, untagged scalar. Source: docs/facts.md#cdi-scalars."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _NUMBER_STARTS:
        return text
    number: int | float | None = None
    if text[0] == ".":
        if _DOT_FLOAT.fullmatch(text):
            number = float(text)
    else:
        digits = text.replace("_", "")
        number = _integer(digits)
        if number is None and _FLOAT.fullmatch(digits):
            number = float(digits)
    return text if number is None or (type(number) is float and math.isinf(number)) else number


def _integer(text: str) -> int | None:
    """Return an integer that fits int64, or without a sign uint64."""
    if _DECIMAL.fullmatch(text):
        number = int(text)
    else:
        match = _BASED.fullmatch(text)
        if match is None:
            return None
        sign, hexadecimal, octal, binary = match.groups()
        number = int(hexadecimal or octal or binary, 16 if hexadecimal else 8 if octal else 2)
        number = -number if sign == "-" else number
    limit = 2**63 if text[0] in "+-" else 2**64
    return number if -(2**63) <= number < limit else None


_TAG: Final = "tag:yaml.org,2002:"
_MERGE_TAG: Final = _TAG + "merge"
_SPECIAL_KEYS: Final = {"+Inf": ".inf", "-Inf": "-.inf", "NaN": ".nan"}
_TAG_TYPES: Final[dict[str, tuple[type[Any], ...]]] = {
    _TAG + "bool": (bool,),
    _TAG + "int": (int,),
    _TAG + "float": (float, int),
    _TAG + "null": (type(None),),
}
# The reference knows timestamps by their tag only, and then keeps the text.
_TIMESTAMP: Final = re.compile(
    r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}"
    r"(?:(?:[Tt]|[ \t]+)[0-9]{1,2}:[0-9]{1,2}:[0-9]{1,2}(?:\.[0-9]*)?(?:[ \t]*(?:Z|[-+][0-9:]+))?)?"
)


def _tagged(tag: str, text: str) -> str | bool | int | float | None:
    """Return the value of a scalar with an explicit tag. Unknown tags mean nothing."""
    if tag == _TAG + "binary":
        try:
            # Invalid UTF-8 becomes U+FFFD on the reference's way through JSON.
            return base64.b64decode(re.sub(r"[\r\n]", "", text), validate=True).decode(errors="replace")
        except (binascii.Error, ValueError):
            raise Problem("CDI003", "!!binary is not base64") from None
    if tag == _TAG + "timestamp" and not _TIMESTAMP.fullmatch(text):
        raise Problem("CDI003", f"{quoted(text, 60)} is not a timestamp")
    types = _TAG_TYPES.get(tag)
    if types is None:
        return text
    value = resolve_scalar(text)
    if type(value) not in types or (tag == _TAG + "float" and type(value) is int and value >= 2**63):
        raise Problem("CDI003", f"{quoted(text, 60)} is not a {tag[len(_TAG) :]}")
    return float(value) if tag == _TAG + "float" and type(value) is int else value


def float_text(value: float) -> str:
    """Write a number as text, the shortest that tells this float32 from others, as Go prints with ``%g``."""
    if math.isnan(value):
        return "NaN"
    sign = "-" if math.copysign(1.0, value) < 0 else ""
    try:
        (value,) = struct.unpack("f", struct.pack("f", abs(value)))
    except OverflowError:
        value = math.inf
    if math.isinf(value):
        return (sign or "+") + "Inf"
    text = ""
    for precision in range(9):
        text = f"{value:.{precision}e}"
        if struct.pack("f", float(text)) == struct.pack("f", value):
            break
    mantissa, _, exponent_text = text.partition("e")
    exponent = int(exponent_text)
    if exponent < -4 or exponent >= 6:
        return f"{sign}{mantissa}e{exponent:+03d}"
    return f"{sign}{float(text):.{max(0, len(mantissa.replace('.', '')) - 1 - exponent)}f}"


# --- document → tree -----------------------------------------------------------------------------------

_NO_KEY: Final = object()
_MERGE: Final = object()


class _Anchor:
    """What an alias names: the value, and how many nodes it has (None while it is incomplete)."""

    __slots__ = ("size", "value")

    def __init__(self, value: Any, size: int | None) -> None:
        self.value = value
        self.size = size


class _Frame:
    """An open mapping or sequence. `key`: the key whose value comes next. `before`: nodes seen before it."""

    __slots__ = ("anchor", "before", "flow", "key", "node")

    def __init__(self, node: Any, anchor: _Anchor | None, before: int, *, flow: bool) -> None:
        self.node = node
        self.anchor = anchor
        self.before = before
        self.flow = flow
        self.key: Any = _NO_KEY


class _Builder:
    """The first document of `data` as dicts with text keys, lists and scalars.

    A container is attached to its parent when it begins, so nothing recurses; only the operand of a merge
    key waits until it is complete. An alias is the very object that it names.
    `lines`, if given, is filled: (id of a container, key or index) → line.
    """

    def __init__(self, data: bytes, lines: dict[tuple[int, str | int], int] | None = None) -> None:
        self._data = data
        self._lines = lines
        self._text: str | None = None  # decoded only if an escape has to be looked at
        self._escaped_slash = b"\\/" in data or b"\\\0/" in data
        self._anchors: dict[str, _Anchor] = {}
        self._visits = 0
        self._alias_visits = 0
        self._stack: list[_Frame] = []

    def tree(self) -> Any:
        """Return the root value, None if there is none or it is null. Raises `Problem` without a path."""
        if CParser is None:
            hint = "install PyYAML built with libyaml"
            raise Problem("CDI003", "PyYAML lacks libyaml, which decides what a spec means", hint=hint)
        try:
            return self._tree(CParser)
        except YAMLError as error:
            reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "it is not YAML"
            mark = getattr(error, "problem_mark", None)
            raise Problem("CDI003", str(reason), line=mark.line + 1 if mark is not None else 0) from None
        except UnicodeError:
            raise Problem("CDI003", "it is not valid Unicode") from None

    def _tree(self, parser: Callable[[bytes], Any]) -> Any:
        next_event: Callable[[], Any] = parser(self._data).get_event
        next_event()  # the stream's start
        event = next_event()
        if type(event) is StreamEndEvent:
            return None
        if event.version not in (None, (1, 1)):
            raise _at(event, "only %YAML 1.1 is understood")
        root: Any = None
        while True:
            event = next_event()
            kind = type(event)
            if kind is ScalarEvent:
                self._visits += 1
                root = self._scalar(event)
                self._add(root, event)
            elif kind is MappingStartEvent:
                self._begin({}, event)
            elif kind is SequenceStartEvent:
                self._begin([], event)
            elif kind is AliasEvent:
                root = self._alias(event)
                self._add(root, event, alias=True)
            else:
                root = self._end(event)
            if not self._stack:
                break
        # What follows the document does not matter, but its end has to be recognisable.
        next_event()
        if self._excessive_aliasing():
            raise _at(event, "its aliases multiply beyond measure")
        return root

    def _scalar(self, event: Any) -> Any:
        value: Any = event.value
        tag: str | None = event.tag
        if value == "<<" and (tag == _MERGE_TAG or (tag is None and event.implicit[0])) and self._wants_key():
            return _MERGE
        if tag is not None:
            try:
                value = _tagged(tag, value)
            except Problem as problem:
                problem.line = event.start_mark.line + 1
                raise
        elif event.implicit[0]:
            # The reference ends a plain scalar at a "?" inside brackets, and then fails.
            if "?" in value and self._stack and self._stack[-1].flow and event.style not in ('"', "'"):
                raise _at(event, "a plain scalar with a question mark inside [] or {}")
            value = resolve_scalar(value)
        if self._escaped_slash and event.style == '"':
            self._refuse_escaped_slash(event)
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchor(value, 1)
        return value

    def _wants_key(self) -> bool:
        return bool(self._stack) and type(self._stack[-1].node) is dict and self._stack[-1].key is _NO_KEY

    def _refuse_escaped_slash(self, event: Any) -> None:
        """JSON's backslash-slash is no escape in YAML 1.1; newer libyaml takes it, the reference does not."""
        if self._text is None:
            utf16 = self._data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            self._text = self._data.decode("utf-16" if utf16 else "utf-8-sig")
        raw = self._text[event.start_mark.index : event.end_mark.index]
        if "/" in re.findall(r"\\(.)", raw, re.DOTALL):
            raise _at(event, "unknown escape character: a slash must not be escaped")

    def _begin(self, node: Any, event: Any) -> None:
        if len(self._stack) >= MAX_DEPTH:
            raise _at(event, f"it is nested more than {MAX_DEPTH} levels deep")
        if self._wants_key():
            raise _at(event, "a key must be a scalar")
        anchor = None
        if event.anchor is not None:
            anchor = self._anchors[event.anchor] = _Anchor(node, None)
        if self._stack and self._stack[-1].key is not _MERGE:
            self._add(node, event)
        flow = bool(event.flow_style) or (bool(self._stack) and self._stack[-1].flow)
        self._stack.append(_Frame(node, anchor, self._visits, flow=flow))
        self._visits += 1

    def _end(self, event: Any) -> Any:
        frame = self._stack.pop()
        if frame.anchor is not None:
            frame.anchor.size = self._visits - frame.before
        if self._stack and self._stack[-1].key is _MERGE:
            self._add(frame.node, event)
        return frame.node

    def _alias(self, event: Any) -> Any:
        anchor = self._anchors.get(event.anchor)
        if anchor is None:
            raise _at(event, f"alias {quoted(event.anchor, 60)} names nothing that comes before it")
        if anchor.size is None:
            raise _at(event, f"alias {quoted(event.anchor, 60)} stands inside what it names")
        self._visits += 1 + anchor.size
        self._alias_visits += anchor.size
        if self._excessive_aliasing():
            raise _at(event, "its aliases multiply beyond measure")
        return anchor.value

    def _excessive_aliasing(self) -> bool:
        if self._alias_visits <= 100 or self._visits <= 1000:
            return False
        above = min(max(self._visits - _ALIAS_LOW, 0) / (_ALIAS_HIGH - _ALIAS_LOW), 1.0)
        return self._alias_visits / self._visits > 0.99 - 0.89 * above

    def _add(self, value: Any, event: Any, *, alias: bool = False) -> None:
        """Put a value where it belongs: into the list, as the next key, or under the last key."""
        if not self._stack:
            return
        frame = self._stack[-1]
        node, key = frame.node, frame.key
        if type(node) is list:
            key = len(node)
            node.append(value)
        elif key is _NO_KEY:
            key = frame.key = _MERGE if value is _MERGE else self._new_key(node, value, event)
        else:
            frame.key = _NO_KEY
            if key is _MERGE:
                self._merge(node, value, event, alias=alias)
            else:
                node[key] = value
            return
        if self._lines is not None:
            self._lines[id(node), key] = event.start_mark.line + 1

    def _new_key(self, node: dict[str, Any], value: Any, event: Any) -> str:
        if type(value) is str:
            key = value
        elif type(value) is bool:
            key = "true" if value else "false"
        elif type(value) is int and value < 2**63:
            key = str(value)
        elif type(value) is float:
            key = _SPECIAL_KEYS.get(text := float_text(value), text)
        else:
            raise _at(event, "a key must be a string, a boolean, a float or an integer of 64 bits")
        if key in node:
            raise _at(event, f"key {quoted(key, 60)} occurs twice in one mapping")
        return key

    def _merge(self, node: dict[str, Any], operand: Any, event: Any, *, alias: bool) -> None:
        parts = operand if type(operand) is list and not alias else [operand]
        for part in parts:
            if type(part) is not dict:
                raise _at(event, "<< takes a mapping or a list of mappings")
            for key, value in part.items():
                if key in node:
                    raise _at(event, f"key {quoted(key, 60)} occurs both here and in what << merges")
                node[key] = value
                if self._lines is not None:
                    self._lines[id(node), key] = self._lines.get((id(part), key), event.start_mark.line + 1)


def _at(event: Any, reason: str) -> Problem:
    return Problem("CDI003", reason, line=event.start_mark.line + 1)


def _line_of(data: bytes, path: Path) -> int:
    """Find the line of what `path` names, or of the innermost part of it that exists; 0 if unknown."""
    lines: dict[tuple[int, str | int], int] = {}
    try:
        node = _Builder(data, lines).tree()
    except Problem:
        return 0
    line = 0
    for step in path:
        key: str | int = step
        if type(node) is dict and isinstance(key, str) and key not in node:
            key = next((other for other in node if fold(other) == fold(str(step))), key)
        line = lines.get((id(node), key), line)
        try:
            node = node[key]
        except (LookupError, TypeError):
            break
    return line


# --- tree → model --------------------------------------------------------------------------------------

# (attribute, name on the wire, reader, what null means)
_Entry = tuple[str, str, Callable[[Any], Any], Any]


def fold(name: str) -> str:
    """Return a field name for comparison: Unicode simple folding, as far as it can end in an ASCII name."""
    return name.lower().replace("\u017f", "s")


def _kind_of(tree: Any) -> str:
    """Return the kind that a faulty spec declares; it helps to tell what the file is about."""
    if type(tree) is dict:
        for key, value in tree.items():
            if type(value) is str and fold(key) == "kind":
                return value
    return ""


def _read_object(cls: type[Any], value: Any) -> Any:
    if value is None:  # only a document can be: elsewhere null is handled before
        raise Problem("CDI003", "there is no data in it")
    if type(value) is not dict:
        raise Problem("CDI004", f"must be a mapping, not {_what(value)}")
    fields = _FIELDS[cls]
    known: dict[str, Any] = {}
    for key, item in value.items():
        entry = fields.get(key) or fields.get(fold(key))
        if entry is None:
            allowed = ", ".join(wire for _, wire, _, _ in _DECLARED[cls])
            raise Problem(
                "CDI004",
                f"there is no such field in a CDI {cls.__name__}",
                path=(key,),
                hint=f"allowed are {allowed}",
            )
        attribute, wire, read, null = entry
        if attribute in known:
            # The reference merges two spellings of one field; nobody means that.
            raise Problem("CDI004", f"field {wire} occurs twice, in different spellings", path=(key,))
        if item is None:
            known[attribute] = null
            continue
        try:
            known[attribute] = read(item)
        except Problem as problem:
            raise problem.under(wire) from None
    return cls(**known)


def _reader(kind: Wire) -> Callable[[Any], Any]:
    match kind:
        case Scalar(name="string"):
            return _read_string
        case Scalar(name="boolean"):
            return _read_bool
        case Scalar():
            return lambda value: _read_int(kind, value)
        case Object():
            return lambda value: _read_object(kind.cls, value)
        case ListOf():
            item = kind.item
            of = _reader(item if isinstance(item, Scalar) else Object(item))
            return lambda value: _read_list(of, kind.null, value)
        case StringMap():
            return _read_string_map


def _read_string(value: Any) -> str:
    kind = type(value)
    if kind is str:
        return value  # type: ignore[no-any-return]
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return str(value)
    if kind is float:
        return float_text(value)
    raise Problem("CDI004", f"must be a string, not {_what(value)}")


def _read_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise Problem("CDI004", f"must be true or false, not {_what(value)}")
    return value


def _read_int(kind: Scalar, value: Any) -> int:
    if type(value) is float and value.is_integer() and not (kind.low == 0 and math.copysign(1.0, value) < 0):
        # Through the shortest text, as the reference goes through JSON: 1.4704319472381e17 ends in 0000.
        from decimal import Decimal  # two megabytes, for a number that hardly any file has

        value = int(Decimal(repr(value)))
    if type(value) is not int:
        raise Problem("CDI004", f"must be an integer, not {_what(value)}")
    if not kind.low <= value <= kind.high:
        raise Problem("CDI004", f"must be between {kind.low} and {kind.high}")
    return value


def _read_list(read: Callable[[Any], Any], null: Any, value: Any) -> tuple[Any, ...]:
    if type(value) is not list:
        raise Problem("CDI004", f"must be a list, not {_what(value)}")
    items = []
    for index, item in enumerate(value):
        if item is None:
            # The reference dereferences nil here; see docs/facts.md#cdi-decoding.
            if null is None:
                raise Problem("CDI004", "must not be null", path=(index,))
            items.append(null)
            continue
        try:
            items.append(read(item))
        except Problem as problem:
            raise problem.under(index) from None
    return tuple(items)


def _read_string_map(value: Any) -> MappingProxyType[str, str]:
    if type(value) is not dict:
        raise Problem("CDI004", f"must be a mapping, not {_what(value)}")
    items = {}
    for key, item in value.items():
        try:
            items[key] = "" if item is None else _read_string(item)
        except Problem as problem:
            raise problem.under(key) from None
    return MappingProxyType(items)


def _what(value: Any) -> str:
    if type(value) is str:
        return f"the string {quoted(value, 60)}"
    if type(value) is bool:
        return "a boolean"
    if type(value) is int:
        return "an integer"
    if type(value) is float:
        return f"the number {value!r}"
    return "a list" if type(value) is list else "a mapping"


def _declared(cls: type[Any]) -> list[_Entry]:
    return [
        (field.name, field.metadata["wire"], _reader(field.metadata["kind"]), field.default)
        for field in attrs.fields(cls)
    ]


def _reachable(cls: type[Any]) -> list[type[Any]]:
    found = [cls]
    for outer in found:
        for field in attrs.fields(outer):
            kind = field.metadata["kind"]
            inner = kind.cls if isinstance(kind, Object) else kind.item if isinstance(kind, ListOf) else None
            if isinstance(inner, type) and inner not in found:
                found.append(inner)
    return found


_DECLARED: Final = {cls: _declared(cls) for cls in _reachable(Spec)}
_FIELDS: Final[dict[type[Any], dict[str, _Entry]]] = {
    cls: {name: entry for entry in entries for name in (entry[1], fold(entry[1]))}
    for cls, entries in _DECLARED.items()
}
