"""Edits of TOML text: what was meant, and not one byte beside it."""

from __future__ import annotations

import copy
import tomllib
from typing import Any

import pytest
from cdi_courier import tomledit
from cdi_courier.errors import CourierError
from hypothesis import given
from hypothesis import strategies as st

OURS = "/etc/containerd/conf.d/ours*.toml"
LINE = f'imports = ["{OURS}"]'

# What stands beside the array, some of it looking like it.
STATEMENTS = (
    "version = 2",
    "# imports = [",
    "",
    "   # \"'  [ ] , é",
    'root = "/x = [ # \\" ]"',
    "state = '''\nimports = [\n\"a\", ''''",
    'temp = """\nimports = []\\\n  ""x"""""',
    'inline = {imports = ["z"], deep = [[1, 2], [3]]}  # told',
    "'quoted = key' = [\n  1, # one ]\n\n  2,\n]",
    "dotted . \"imports\" = ['no']",
    "plugins.'io.x'.y = 2020-01-01",
)
TABLES = ('[plugins."io.containerd.x"]', "  imports = ['inner']", '[[many]]\nimports = "x"', "[many.a]")
ITEMS = ('"/a/*.toml"', "'b.toml'", '"é\\"]"', '"#, "', "'''c'''")


@st.composite
def blanks(draw: st.DrawFn) -> str:
    """What may stand between the tokens of an array."""
    return "".join(draw(st.lists(st.sampled_from([" ", "\t", "\n", '# ], "\n']), max_size=3)))


@st.composite
def arrays(draw: st.DrawFn) -> str:
    """A statement `imports = [...]`, as people may write it."""
    items = draw(st.lists(st.sampled_from(ITEMS), max_size=3))
    text = draw(blanks())
    for number, item in enumerate(items):
        comma = number < len(items) - 1 or draw(st.booleans())
        text += item + draw(blanks()) + ("," + draw(blanks()) if comma else "")
    key = draw(st.sampled_from(["imports", '"imports"', "'imports'"]))
    return f"{draw(st.sampled_from(['', '  ']))}{key} {'='}[{text}]{draw(st.sampled_from(['', ' # told']))}"


@st.composite
def documents(draw: st.DrawFn, *, with_array: bool) -> tuple[str, str, str]:
    """The text before the array, the array's statement (or nothing), and the text behind it."""
    lines = draw(st.lists(st.sampled_from(STATEMENTS), unique=True))
    cut = draw(st.integers(0, len(lines)))
    array = draw(arrays()) + "\n" if with_array else ""
    before = "".join(f"{line}\n" for line in lines[:cut])
    behind = "".join(f"{line}\n" for line in lines[cut:])
    tables = draw(st.sets(st.integers(0, 2)))
    behind += "".join(f"{TABLES[number]}\n" for number in sorted(tables) if number != 1 or 0 in tables)
    if draw(st.booleans()):
        behind, array = (behind[:-1], array) if behind else (behind, array[:-1])
    if draw(st.booleans()):
        before, array, behind = (part.replace("\n", "\r\n") for part in (before, array, behind))
    return before, array, behind


def meaning(data: bytes) -> dict[str, Any]:
    return tomllib.loads(data.decode())


@given(documents(with_array=True))
def test_an_item_appended_changes_nothing_but_its_array(parts: tuple[str, str, str]):
    """The item is the array's last, and every byte before and behind the array's statement is kept."""
    before, array, behind = parts
    data = "".join(parts).encode()
    expected = copy.deepcopy(meaning(data))
    expected["imports"].append(OURS)

    edited = tomledit.append(data, "imports", OURS)

    assert meaning(edited) == expected
    assert edited.startswith(before.encode())
    assert edited.endswith(behind.encode())
    assert len(edited) <= len(data) + len(OURS) + len(array) + 8


@given(documents(with_array=True), st.booleans())
def test_an_item_taken_out_changes_nothing_but_its_array(parts: tuple[str, str, str], keep: bool):
    """What was appended can be taken out again: the document means what it meant."""
    before, _, behind = parts
    data = "".join(parts).encode()
    expected = copy.deepcopy(meaning(data))
    if not expected["imports"] and not keep:
        del expected["imports"]

    edited = tomledit.take_out(tomledit.append(data, "imports", OURS), "imports", OURS, keep=keep)

    assert meaning(edited) == expected
    assert edited.startswith(before.encode())
    assert edited.endswith(behind.encode())


@given(documents(with_array=True), st.data())
def test_any_item_can_be_taken_out(parts: tuple[str, str, str], data: st.DataObject):
    """The first of the equal items goes, and comments and the other items stay."""
    before, _array, behind = parts
    text = "".join(parts).encode()
    expected = copy.deepcopy(meaning(text))
    items = expected["imports"]
    item = data.draw(st.sampled_from(items)) if items else "absent"
    if item in items:
        items.remove(item)

    edited = tomledit.take_out(text, "imports", item, keep=True)

    assert meaning(edited) == expected
    assert edited.startswith(before.encode())
    assert edited.endswith(behind.encode())
    assert edited.count(b"# ]") == text.count(b"# ]")


@given(documents(with_array=False))
def test_a_line_added_is_all_that_is_added(parts: tuple[str, str, str]):
    """Taking the line out of the result gives the document back, whatever ends its lines."""
    data = "".join(parts).encode()

    edited = tomledit.add_line(data, LINE, after="version")

    assert meaning(edited) == {**meaning(data), "imports": [OURS]}
    newline = b"\r\n" if b"\r\n" in data else b"\n"
    line = LINE.encode()
    assert data in (edited.replace(line + newline, b"", 1), edited.replace(newline + line, b"", 1))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param('imports = ["a"]', 'imports = ["a", "x"]', id="one-line"),
        pytest.param("imports = []", 'imports = ["x"]', id="empty"),
        pytest.param('imports = ["a",] # c', 'imports = ["a", "x",] # c', id="trailing-comma"),
        pytest.param(
            'imports = [\n\t"a", # first\n\t# last\n]',
            'imports = [\n\t"a", # first\n\t"x",\n\t# last\n]',
            id="a-line-each",
        ),
        pytest.param(
            'imports = [\r\n  "a" # first\r\n]', 'imports = [\r\n  "a", # first\r\n  "x"\r\n]', id="crlf"
        ),
    ],
)
def test_an_item_is_written_as_its_neighbours_are(before: str, after: str):
    """Appending keeps the array's layout, and taking out restores it byte for byte."""
    assert tomledit.append(before.encode(), "imports", "x").decode() == after
    assert tomledit.take_out(after.encode(), "imports", "x", keep=True).decode() == before


@pytest.mark.parametrize(
    ("before", "original", "after"),
    [
        pytest.param("[a]\nb = 1 # c\nours = 2\n# d\n", "", "[a]\nb = 1 # c\n# d\n", id="added-key"),
        pytest.param("[a]\nours = 2 # c\n", "[a]\nours = 1\n", "[a]\nours = 1 # c\n", id="changed-key"),
        pytest.param("[b]\nc = 1\n", "", "[b]\nc = 1\n", id="gone-already"),
        pytest.param("x = {ours = 1, b = 2}\n", "", "x = {ours = 1, b = 2}\n", id="elsewhere"),
    ],
)
def test_keys_become_what_they_were(before: str, original: str, after: str):
    """A key that is ours goes, or gets its value of then; the rest of its table stays as it is."""
    edited = tomledit.remove(before.encode(), [("a", "ours")], tomllib.loads(original))

    assert edited.decode() == after


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"imports = [", id="not-toml"),
        pytest.param(b"\xff", id="not-utf-8"),
        pytest.param(b"version = 2\n", id="no-array"),
        pytest.param(b"a = " + b"[" * 3000, id="too-deep"),
    ],
)
def test_what_cannot_be_edited_is_said(text: bytes):
    """No document that cannot be read, or lacks the array, comes back changed."""
    with pytest.raises(CourierError) as caught:
        tomledit.append(text, "imports", "x")

    assert caught.value.code == "CHG006"


def test_a_result_that_means_something_else_is_refused():
    """A line that the document cannot take, since its key is there already, is an error, not a file."""
    with pytest.raises(CourierError) as caught:
        tomledit.add_line(b'imports = ["a"]\n', LINE)

    assert caught.value.code == "CHG006"


# Tables and strings in them

CRI = ("plugins", "io.containerd.grpc.v1.cri", "containerd")
NAME, OURS_TABLE = (*CRI, "default_runtime_name"), (*CRI, "runtimes", "our's")
TABLE = {"runtime_type": "x", "pod_annotations": ["a/*"], "options": {"BinaryName": "/é", "Systemd": True}}

CONFIGURATIONS = {
    "empty": "",
    "no-final-newline": "version = 2",
    "the-table": f'version = 2\n\n[{CRI[0]}."{CRI[1]}".{CRI[2]}] # c\n  default_runtime_name = "runc" # d\n',
    "the-table-without-the-key": f'[{CRI[0]}."{CRI[1]}".{CRI[2]}]\n  a = 1\n# end\n',
    "only-tables-below": (
        f'[plugins]\n  [plugins."{CRI[1]}"]\n  x = 1\n'
        f'[plugins."{CRI[1]}".{CRI[2]}.runtimes.runc]\nruntime_type = "y"\n[other]\n'
    ),
    "dotted": f'plugins."{CRI[1]}".x = 1\n[a]\nb = """\n[plugins]\n"""\n',
    "arrays-of-tables": '[[plugins_]]\ndefault_runtime_name = "x"\n[[plugins_]]\n[last]\n',
    "crlf": f'version = 2\r\n\r\n[{CRI[0]}."{CRI[1]}"]\r\ny = [\r\n 1\r\n]\r\n',
}

configurations = pytest.mark.parametrize("text", CONFIGURATIONS.values(), ids=list(CONFIGURATIONS))


def with_ours(data: bytes) -> bytes:
    return tomledit.add_table(tomledit.put(data, NAME, "our's"), OURS_TABLE, TABLE)


@configurations
def test_a_table_and_a_string_are_all_that_is_added(text: str):
    """Every line that was there is still there, but for the string that is replaced."""
    edited = with_ours(text.encode())
    found = meaning(edited)
    table = found["plugins"][CRI[1]]["containerd"]

    assert table.pop("default_runtime_name") == "our's"
    assert table["runtimes"].pop("our's") == TABLE
    before = meaning(text.encode()).get("plugins", {}).get(CRI[1], {}).get("containerd", {})
    before.pop("default_runtime_name", None)
    assert {key: value for key, value in table.items() if value} == before
    kept = [line for line in text.split("\n") if "default_runtime_name" not in line or "[[" in text]
    assert all(line in edited.decode() for line in kept)


@configurations
def test_they_are_taken_out_again(text: str):
    """From a document that somebody has added to, only they go, and the string is what it was."""
    theirs = "\n# theirs\n[theirs]\nkey = 1\n"
    edited = with_ours(text.encode()) + theirs.encode()
    left = tomledit.remove(edited, [OURS_TABLE, NAME], meaning(text.encode()))

    assert meaning(left) == {**meaning(text.encode()), "theirs": {"key": 1}}
    assert left.endswith(theirs.encode())
    assert all(line in left.decode() for line in text.split("\n"))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('plugins = {"io.containerd.grpc.v1.cri" = {}}\n', id="inline"),
        pytest.param(f'[plugins."{CRI[1]}"]\ncontainerd.x = 1\n', id="dotted-below-a-table"),
        pytest.param(f'[plugins]\n"{CRI[1]}" = "a string"\n', id="no-table"),
    ],
)
def test_where_a_table_cannot_stand_that_is_said(text: str):
    """TOML does not let everything be added to from outside."""
    with pytest.raises(CourierError) as caught:
        with_ours(text.encode())

    assert caught.value.code == "CHG006"


def test_a_table_that_is_there_is_not_added_again():
    """It is somebody's."""
    with pytest.raises(CourierError) as caught:
        tomledit.add_table(b"[a.b]\n", ("a", "b"), {})

    assert caught.value.code == "CHG006"
