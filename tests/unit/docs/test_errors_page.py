"""docs/errors.md and the code name the same error codes."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
CODE = re.compile(r'"((?:SET|ANN|POL|CDI|NRI|DLV|HST|PLG|CHG|EXP|GEN|HOK|CRI|STA)[0-9]{3})\b')


def test_the_catalogue_lists_exactly_the_codes_that_the_code_uses():
    """Every code that a user can see is explained, and none is explained that nobody can see."""
    used = {
        code
        for folder in ("core/src", "backends")
        for file in (ROOT / folder).rglob("*.py")
        for code in CODE.findall(file.read_text())
    }
    listed = re.findall(r"^\| ([A-Z]{3}[0-9]{3}) \|", (ROOT / "docs/errors.md").read_text(), re.MULTILINE)

    assert sorted(listed) == sorted(used)
