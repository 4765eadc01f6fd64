"""The Markdown pages of this repository, taken apart: headings, links, fenced blocks.

As much of Markdown as these pages use. It must not know what any page is about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--((?:(?!-->).)*)-->\s*\Z", re.DOTALL)
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block. language: what stands behind the fence. comment: the HTML comment right before it."""

    page: Path
    line: int
    language: str
    text: str
    comment: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def pages() -> list[Path]:
    """Every page of the repository, without what is made or fetched."""
    made = {".venv", ".cache", "dist", "build"}
    return sorted(
        path
        for path in REPOSITORY.rglob("*.md")
        if not made & set(path.relative_to(REPOSITORY).parts) and ".pytest_cache" not in path.parts
    )


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        comment = _COMMENT.search(text, 0, found.start())
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, found[2], found[3], comment[1].strip() if comment else "")


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures."""
    prose = _CODE.sub("", _FENCE.sub("", page.read_text()))
    return _LINK.findall(prose)


def anchors(page: Path) -> set[str]:
    """What links to a page's headings may end with, as GitHub makes it."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", page.read_text())):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found
