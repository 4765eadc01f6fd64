"""docs/errors.md and the code name the same error codes."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/errors.md").read_text()
PREFIXES = "SET|ANN|POL|CDI|NRI|DLV|HST|PLG|CHG|EXP|GEN|HOK|CRI|STA"
CODE = re.compile(rf'"((?:{PREFIXES})[0-9]{{3}})\b')


def test_the_catalogue_lists_exactly_the_codes_that_the_code_uses():
    """Every code that a user can see is explained, and none is explained that nobody can see."""
    used = {
        code
        for folder in ("core/src", "backends")
        for file in (ROOT / folder).rglob("*.py")
        for code in CODE.findall(file.read_text())
    }
    listed = re.findall(r"^\| ([A-Z]{3}[0-9]{3}) \|", PAGE, re.MULTILINE)

    assert sorted(listed) == sorted(used)


def test_every_code_has_a_cause_and_a_cure():
    """No row leaves a reader with a code alone, and what it says of cause and cure are two things."""
    rows = [line for line in PAGE.splitlines() if re.match(r"\| [A-Z]{3}[0-9]{3} \|", line)]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]

    assert [cell[0] for cell in cells if len(cell) != 3] == []
    # A sentence each, which may begin with the name of a program.
    sentence = re.compile(r"[A-Za-z`\[].{6,}\.")
    assert [code for code, cause, _ in cells if not sentence.fullmatch(cause)] == []
    assert [code for code, _, cure in cells if not sentence.fullmatch(cure)] == []
    assert [code for code, cause, cure in cells if cause == cure] == []


def test_codes_stand_in_order_below_a_heading():
    """A code is found by its number: those of a prefix are together and ascend, in a table with its head."""
    parts = PAGE.split("\n## ")[1:]
    codes = [re.findall(r"^\| ([A-Z]{3}[0-9]{3}) \|", part, re.MULTILINE) for part in parts]
    prefixes = [{code[:3] for code in part} for part in codes]
    rows = re.findall(r"^\| ([A-Z]{3}[0-9]{3}) \|.*$", PAGE, re.MULTILINE)
    tables = re.findall(
        r"^\| code \| cause \| cure \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", PAGE + "\n", re.MULTILINE
    )

    assert [part for part in codes if part != sorted(part)] == []
    assert [sorted(several) for several in prefixes if len(several) > 1] == []
    assert sum(table.count("\n") for table in tables) == len(rows)


def test_every_code_that_a_page_names_is_in_the_catalogue():
    """No page sends a reader to a code that is not explained."""
    listed = set(re.findall(r"^\| ([A-Z]{3}[0-9]{3}) \|", PAGE, re.MULTILINE))
    named = {
        (page.name, f"{prefix}{number}")
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for prefix, number in re.findall(rf"\b({PREFIXES})([0-9]{{3}})\b", page.read_text())
    }

    assert sorted(pair for pair in named if pair[1] not in listed) == []
