"""Small edits of TOML text that leave every other byte alone.

Strings are put in and taken out by a scanner that splices the text, so that nothing else can change; `remove`
takes out keys anywhere, by the scanner too or, where a table is in pieces, by tomlkit. Every result is read
back and compared with what was meant before it is returned. It must not know whose files these are.
"""

from __future__ import annotations

import contextlib
import copy
import re
import tomllib
from typing import TYPE_CHECKING, Any

from cdi_courier.errors import CourierError, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Key = tuple[str, ...]

_TOKEN = re.compile(
    r"""
    (?P<string> \"\"\" (?:\\.|[^\\])*? \"\"\" \"{0,2} | ''' .*? ''' '{0,2} | "(?:\\.|[^"\\])*" | '[^']*' )
    | (?P<comment> \#[^\n]* )
    | (?P<newline> \n )
    | (?P<open> [\[{] )
    | (?P<close> [\]}] )
    | (?P<comma> , )
    | (?P<equals> = )
    | (?P<blank> [ \t\r]+ )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)

_Token = re.Match[str]


def parse(data: bytes) -> dict[str, Any]:
    """The document. Raises `ValueError` for what is not UTF-8 or not TOML."""
    try:
        return tomllib.loads(data.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None


def add_line(data: bytes, line: str, after: str = "") -> bytes:
    """The document with `line` at its root, behind the root key `after` if it has that, else as its first.

    line: ``key = value`` of a key that the document lacks. Raises `CourierError` ``CHG006``.
    """
    text, newline = _text(data), _newline(data)
    statement = _find(text, (after,)) if after else None
    if statement is None:
        edited = line + newline + text
    else:
        end = text.find("\n", statement[2])
        head, tail = (text + newline, "") if end < 0 else (text[: end + 1], text[end + 1 :])
        edited = head + line + (newline + tail if end >= 0 else "")
    return _checked(data, edited, lambda document: document.update(tomllib.loads(line)), "the line added")


def append(data: bytes, key: str, value: str) -> bytes:
    """The document with `value` as the last item of the array of strings `key` at its root.

    Raises `CourierError` ``CHG006``.
    """
    text = _text(data)
    found = _find(text, (key,))
    if found is None:
        raise _impossible(f"it has no array {key}")
    _, start, end = found
    tokens = _tokens(text, start, end)
    item = quoted(value, None)
    last = next((i for i in reversed(range(len(tokens))) if tokens[i].lastgroup == "string"), None)
    if last is None:
        edited = text[: start + 1] + item + text[start + 1 :]
    else:
        comma = next((token for token in tokens[last:] if token.lastgroup == "comma"), None)
        anchor = comma or tokens[last]
        line_end = next(
            (t.start() for t in tokens if t.start() >= anchor.end() and t.lastgroup == "newline"), None
        )
        if line_end is None:
            at = anchor.end()
            edited = text[:at] + (f" {item}," if comma else f", {item}") + text[at:]
        else:
            at = line_end - (text[line_end - 1] == "\r")
            first = tokens[last].start()
            indent = re.match(r"[ \t]*", text[text.rfind("\n", 0, first) + 1 :])
            assert indent is not None  # noqa: S101 - it matches nothing at least
            lead = indent[0] if "\n" in text[start:first] else "  "
            edited = (
                text[: anchor.end()]
                + ("" if comma else ",")
                + text[anchor.end() : at]
                + _newline(data)
                + lead
                + item
                + ("," if comma else "")
                + text[at:]
            )
    return _checked(data, edited, lambda document: document[key].append(value), f"{value} added to {key}")


def take_out(data: bytes, key: str, value: str, *, keep: bool) -> bytes:
    """The document without `value` in the array of strings `key` at its root; as it is, if it is not there.

    keep: whether an array that becomes empty stays. Raises `CourierError` ``CHG006``.
    """
    document = _document(data)
    values = document.get(key)
    if not isinstance(values, list) or value not in values:
        return data
    text = _text(data)
    found = _find(text, (key,))
    if found is None:
        raise _impossible(f"{key} is not written as one array")
    begin, start, end = found
    if len(values) == 1 and not keep:
        line_end = text.find("\n", end)
        edited = text[:begin] + ("" if line_end < 0 else text[line_end + 1 :])
        return _checked(data, edited, lambda d: d.pop(key), f"{key} taken out")
    tokens = _tokens(text, start, end)
    at = next(i for i, t in enumerate(tokens) if t.lastgroup == "string" and _string(t[0]) == value)
    follows = next((t for t in tokens[at + 1 :] if t.lastgroup in ("comma", "string")), None)
    precedes = next((t for t in reversed(tokens[:at]) if t.lastgroup == "comma"), None)
    left, right = tokens[at].span()
    cuts = []
    if follows is not None and follows.lastgroup == "comma" and not text[right : follows.start()].strip():
        right = follows.end()
    elif (comma := follows or precedes) is not None and comma.lastgroup == "comma":
        cuts.append(comma.span())
    # A line that held nothing else goes whole; on a shared one, the blanks before the item do.
    line = text.rfind("\n", start, left) + 1
    rest = text.find("\n", right, end)
    if line and rest >= 0 and not text[line:left].strip() and not text[right:rest].strip():
        left, right = line, rest + 1
    else:
        left -= len(text[:left]) - len(text[:left].rstrip(" \t"))
        if text[left - 1] == "[":
            right += len(text[right:]) - len(text[right:].lstrip(" \t"))
    cuts.append((left, right))
    edited = text
    for first, last in sorted(cuts, reverse=True):
        edited = edited[:first] + edited[last:]
    return _checked(data, edited, lambda d: d[key].remove(value), f"{value} taken out of {key}")


def put(data: bytes, key: Key, value: str) -> bytes:
    """The document with the string at `key`, in place of what is there.

    A key that is new comes first in its table, which is added at the end where there is none. Raises
    `CourierError` ``CHG006``.
    """
    text, newline = _text(data), _newline(data)
    header = 0  # where the table's own statements begin
    literal = quoted(value, None)
    for path, _, start, end in _statements(text):
        if path == key:
            edited = text[:start] + literal + text[end:]
            break
        if start == end and path == key[:-1]:
            header = end
    else:
        name = _literal_key(key[-1:])
        if header:
            line_end = text.find("\n", header)
            head, tail = (
                (text + newline, "") if line_end < 0 else (text[: line_end + 1], text[line_end + 1 :])
            )
            edited = f"{head}{name} = {literal}{newline}{tail}"
        else:
            edited = _end(text, newline) + f"[{_literal_key(key[:-1])}]{newline}{name} = {literal}{newline}"

    def change(document: dict[str, Any]) -> None:
        _below(document, key[:-1])[key[-1]] = value

    return _checked(data, edited, change, f"{key[-1]} set")


def add_table(data: bytes, key: Key, table: Mapping[str, Any]) -> bytes:
    """The document with a new table at its end. Raises `CourierError` ``CHG006``."""
    import tomlkit

    text, newline = _text(data), _newline(data)
    outer = tomlkit.document()
    inner: Any = outer
    for part in key[:-1]:
        below = tomlkit.table(is_super_table=True)
        inner.add(tomlkit.key(part), below)
        # What was added is not always the same object.
        inner = inner[part]
    inner.add(tomlkit.key(key[-1]), tomlkit.item(dict(table)))
    lines = tomlkit.dumps(outer).rstrip("\n").split("\n")
    edited = _end(text, newline) + newline.join([*lines, ""])

    def change(document: dict[str, Any]) -> None:
        parent = _below(document, key[:-1])
        if key[-1] in parent:
            raise _impossible(f"it has a table {key[-1]} already")
        parent[key[-1]] = dict(table)

    return _checked(data, edited, change, f"table {key[-1]} added")


def remove(data: bytes, keys: Sequence[Key], original: dict[str, Any]) -> bytes:
    """The document with each of `keys` as `original` has it: without it, or with its value of then.

    A table that becomes empty goes too, unless `original` has it. Raises `CourierError` ``CHG006``.
    """

    def edit(document: Any) -> None:
        for key in keys:
            restore(document, key, original)

    meant = _document(data)
    edit(meant)
    with contextlib.suppress(CourierError):
        return _checked(data, _cut(_text(data), meant, original, keys), edit, "our keys taken out")
    # Inline tables, and values of then that are no strings.
    import tomlkit

    try:
        document = tomlkit.parse(_text(data))
        edit(document)
        edited = tomlkit.dumps(document)
    except Exception as error:  # noqa: BLE001 - tomlkit fails in many ways on tables in pieces
        raise _impossible(f"{type(error).__name__}: {error}") from None
    return _checked(data, edited, edit, "our keys taken out")


def _cut(text: str, meant: Any, original: Any, keys: Sequence[Key]) -> str:
    """The text without the statements of what is not in `meant`, and with strings of `keys` as in it."""
    cuts: list[tuple[int, int, str]] = []
    for path, begin, start, end in _statements(text):
        value = _at(meant, path)
        if value is None:
            line, line_end = text.rfind("\n", 0, begin) + 1, text.find("\n", end)
            if start == end and re.search(r"\n\r?\n\Z", text[:line]):
                # Before a table's header the blank line goes as well.
                line = text.rfind("\n", 0, line - 1) + 1
            cuts.append((line, len(text) if line_end < 0 else line_end + 1, ""))
        elif path in keys and isinstance(value, str) and _at(original, path) == value:
            cuts.append((start, end, quoted(value, None)))
    for begin, end, instead in reversed(cuts):
        text = text[:begin] + instead + text[end:]
    return text


def _at(document: Any, key: Key) -> Any:
    for part in key:
        document = document.get(part) if isinstance(document, dict) else None
    return document


def _below(document: dict[str, Any], key: Key) -> dict[str, Any]:
    """The table at `key`, made if it is not there."""
    for part in key:
        document = document.setdefault(part, {})
        if not isinstance(document, dict):
            raise _impossible(f"{part} is no table")
    return document


def restore(document: Any, key: Key, original: Any) -> None:
    """Have a key as in `original`, or not at all; a table that is left empty and was not there goes too."""
    name, *rest = key
    there = isinstance(original, dict) and name in original
    if rest:
        inner = document.get(name)
        if isinstance(inner, dict):
            restore(inner, tuple(rest), original[name] if there else None)
            if not inner and not there:
                document.pop(name)
    elif there:
        document[name] = original[name]
    else:
        document.pop(name, None)


def _text(data: bytes) -> str:
    _document(data)  # what is scanned is known to be TOML
    return data.decode()


def _newline(data: bytes) -> str:
    return "\r\n" if b"\r\n" in data else "\n"


def _document(data: bytes) -> dict[str, Any]:
    try:
        return parse(data)
    except ValueError as error:
        raise _impossible(f"it is not TOML: {error}") from None


def _checked(data: bytes, edited: str, change: Callable[[dict[str, Any]], object], what: str) -> bytes:
    expected = copy.deepcopy(_document(data))
    change(expected)
    result = edited.encode()
    try:
        right = parse(result) == expected
    except ValueError:
        right = False
    if not right:
        raise _impossible(f"the text with {what} would not mean that")
    return result


def _impossible(why: str) -> CourierError:
    return CourierError("CHG006", f"the file cannot be edited: {why}", "edit it by hand")


def _tokens(text: str, start: int, end: int) -> list[_Token]:
    tokens = []
    while start < end:
        token = _TOKEN.match(text, start)
        assert token is not None  # noqa: S101 - the last alternative matches any character
        tokens.append(token)
        start = token.end()
    return tokens


def _string(text: str) -> str:
    value = tomllib.loads(f"x = {text}")["x"]
    assert isinstance(value, str)  # noqa: S101 - a string token is one
    return value


def _find(text: str, key: Key) -> tuple[int, int, int] | None:
    """A statement at the root: the begin of its line, then its value's begin and end."""
    for path, begin, start, end in _statements(text):
        if start == end:
            return None  # the first table
        if path == key:
            return text.rfind("\n", 0, begin) + 1, start, end
    return None


def _statements(text: str) -> Iterator[tuple[Key, int, int, int]]:
    """Each statement: its absolute key, and the begin of it and of its value, and the value's end.

    A table's header is one without a value, whose begin and end are both where the header ends. What stands
    in arrays of tables is left out.
    """
    table: Key = ()
    at, skipped = 0, False
    while at < len(text):
        token = _TOKEN.match(text, at)
        assert token is not None  # noqa: S101 - the last alternative matches any character
        if token.lastgroup in ("blank", "comment", "newline"):
            at = token.end()
            continue
        if token.lastgroup == "open":
            end = _value_end(text, at)
            skipped = text.startswith("[[", at)
            table = () if skipped else _path(tomllib.loads(text[at:end]))
            if not skipped:
                yield table, at, end, end
            at = end
            continue
        begin = at
        while token.lastgroup != "equals":
            token = _TOKEN.match(text, token.end())
            assert token is not None  # noqa: S101 - what is TOML has an = here
        name = tomllib.loads(f"{text[begin : token.start()]} = 0")
        blank = re.compile(r"[ \t]*").match(text, token.end())
        start = blank.end() if blank else token.end()
        at = _value_end(text, start)
        if not skipped:
            yield (*table, *_path(name)), begin, start, at


def _literal_key(key: Key) -> str:
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else quoted(part, None) for part in key)


def _end(text: str, newline: str) -> str:
    """The text, ready for another table behind a blank line."""
    if not text:
        return ""
    return text + ("" if text.endswith("\n") else newline) + newline


def _value_end(text: str, at: int) -> int:
    depth, end = 0, at
    while (token := _TOKEN.match(text, at)) is not None:
        kind = token.lastgroup
        if depth == 0 and kind in ("newline", "comment"):
            break
        depth += (kind == "open") - (kind == "close")
        at = token.end()
        if kind != "blank":
            end = at
    return end


def _path(name: Any) -> Key:
    parts = []
    while isinstance(name, dict) and name:
        ((part, name),) = name.items()
        parts.append(part)
    return tuple(parts)
