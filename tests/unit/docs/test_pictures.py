"""Pictures are made of their sources and can be drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pages import REPOSITORY, links, pages

PICTURES = REPOSITORY / "docs/pictures"
SOURCES = sorted(PICTURES.glob("*.txt"))


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("picture", REPOSITORY / "tools/picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PICTURE = tool()


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_picture_is_current(source: Path) -> None:
    """`make docs` would change nothing."""
    assert source.with_suffix(".svg").read_text() == PICTURE.draw(source.read_text())


def test_every_picture_has_a_source_and_a_page() -> None:
    """No picture lies about that nobody can change, or that nobody sees."""
    shown = {(page.parent / link).resolve() for page in pages() for link in links(page) if "://" not in link}
    drawn = set(PICTURES.glob("*.svg"))

    assert drawn == {source.with_suffix(".svg") for source in SOURCES}
    assert drawn <= shown


@given(
    heading=st.text(
        st.characters(blacklist_categories=["Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"]), min_size=1
    )
)
def test_whatever_is_written_into_a_box_the_picture_is_xml(heading: str) -> None:
    """Text is text, also where it looks like markup."""
    drawn = PICTURE.draw(f"title {heading}\nbox a 0 0 {heading}\n")
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.text]

    assert heading in texts


@pytest.mark.parametrize(
    "line", ["circle a", "box a", "box a x 0 A", "arrow a b"], ids=["word", "short", "number", "no boxes"]
)
def test_a_line_that_means_nothing_is_named(line: str) -> None:
    """A typing mistake is found where it is."""
    with pytest.raises(ValueError, match=r"^line 2: "):
        PICTURE.draw(f"title T\n{line}\n")
