"""Links between our own pages lead somewhere."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest
from support.pages import REPOSITORY, anchors, links, pages

PAGES = [path for path in pages() if links(path)]


def broken(page: Path) -> list[str]:
    """Links to nothing; those out of the repository are not looked at."""
    found = []
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or not target.is_relative_to(REPOSITORY):
            found.append(f"{link}: there is no such file")
        elif anchor and anchor not in anchors(target):
            found.append(f"{link}: {target.name} has no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_each_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    """A page or heading that was renamed is noticed where it is linked to."""
    assert broken(page) == []


def test_every_page_of_docs_can_be_reached_from_the_readme() -> None:
    """A reader who follows links from README.md comes to each page of docs/."""
    seen: set[Path] = set()
    todo = [REPOSITORY / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        local = (link.partition("#")[0] for link in links(page) if "://" not in link)
        todo += [(page.parent / link).resolve() for link in local if link]

    assert set((REPOSITORY / "docs").glob("*.md")) - seen == set()


def test_a_broken_link_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way for a link to be wrong is one that the check above sees."""
    monkeypatch.setitem(broken.__globals__, "REPOSITORY", tmp_path)
    (tmp_path / "b.md").write_text("# One `two`: three\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md#one-two-three) [x](c.md) [x](b.md#four) ![x](d.svg) `[x](e.md)` [x](../f.md)\n")

    assert [text.partition(":")[0] for text in broken(page)] == ["c.md", "b.md#four", "d.svg", "../f.md"]
