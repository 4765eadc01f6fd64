"""docs/facts.md and those who rest on it name the same facts."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from support.pages import REPOSITORY, anchors, pages

PAGE = REPOSITORY / "docs/facts.md"
FOLDERS = ("core", "backends", "bench", "demo", "examples", "packaging", "tests", "tools")
KINDS = {".py", ".sh", ".toml", ".service"}
MADE = {".venv", ".cache", "__pycache__", "dist", "build"}

# A page, and headings of it: the first right behind its name, others behind commas, on the next line too.
REFERENCE = re.compile(r"\b((?:[\w.-]+/)*[\w-]+\.md)((?:#[\w-]+)?(?:,\s+#[\w-]+)*)")
# Ways to name a section of a text that is not here.
BARE = re.compile(r"§|\bcontracts?\b[^\n]{0,20}\b[a-z]\.\d|\bsections? \d")


@cache
def sources() -> dict[str, str]:
    """Path of a source file → what it says; without this file, which has examples of what is wrong."""
    found = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*") if path.suffix in KINDS]
    kept = [path for path in found if not MADE & set(path.parts) and path != Path(__file__)]
    return {str(path.relative_to(REPOSITORY)): path.read_text() for path in sorted(kept)}


def references(text: str) -> list[tuple[str, str]]:
    """(page, heading) of each reference; the heading is empty if none is named."""
    return [
        (page, heading)
        for page, headings in REFERENCE.findall(text)
        for heading in re.findall(r"#([\w-]+)", headings) or [""]
    ]


def dead(text: str) -> list[str]:
    """References to pages or headings that are not there, and to sections of texts that nobody has."""
    found = [f"{page}#{heading}" for page, heading in references(text) if not leads(page, heading)]
    return found + BARE.findall(text)


def leads(page: str, heading: str) -> bool:
    """Whether there is such a page and heading, if one is named. Names without a hyphen may be made up."""
    if not page.startswith("docs/"):
        return "-" not in page or any(path.name == page.rpartition("/")[2] for path in pages())
    path = REPOSITORY / page
    return path.is_file() and (not heading or heading in anchors(path))


def entries() -> set[str]:
    """The anchors of the facts, without those of the sections that they stand in."""
    return anchors(PAGE) - {
        re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-")
        for heading in re.findall(r"^##? (.+)$", PAGE.read_text(), re.MULTILINE)
    }


def test_what_the_code_rests_on_can_be_looked_up() -> None:
    """Each page and heading that a source file names is there, and none names a section of anything else."""
    wrong = {file: found for file, text in sources().items() if (found := dead(text))}

    assert len(sources()) > 300
    assert wrong == {}


def test_every_fact_is_one_that_something_rests_on() -> None:
    """No entry stays when the code that needed it has gone."""
    cited = {
        heading
        for text in [*sources().values(), *(page.read_text() for page in pages() if page != PAGE)]
        for page, heading in references(text)
        if page.rpartition("/")[2] == PAGE.name
    }

    assert len(entries()) > 50
    assert entries() - cited == set()


def test_every_fact_says_how_it_is_known() -> None:
    """An entry ends with who read it where, on what it was seen, or which test shows it."""
    parts = re.split(r"^### (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    known = re.compile(r"(?:^| )\*(?:Read|Seen|Tested): [^*]+\.\*$", re.MULTILINE)

    assert [name for name, text in zip(parts[1::2], parts[2::2], strict=True) if not known.search(text)] == []


def test_a_reference_that_leads_nowhere_would_be_found() -> None:
    """Each way for a reference to be wrong is one that the check above sees."""
    wrong = (
        "docs/facts.md#nri-frames, #nri-frame, docs/fact.md#cdi-names, (docs/facts.md#cdi-names,\n#cdi-name) "
        "§2.4 contracts a.2, design section 3; README.md, docs/choosing.md, docs/facts.md#cdi-names, a-b.md"
    )

    assert dead(wrong) == [
        "docs/facts.md#nri-frame",
        "docs/fact.md#cdi-names",
        "docs/facts.md#cdi-name",
        "a-b.md#",
        "§",
        "contracts a.2",
        "section 3",
    ]
