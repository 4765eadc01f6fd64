"""What a reader is told to type is run by a test, or says why it is not."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.pages import REPOSITORY, Block, blocks, pages

STRICT = [REPOSITORY / "README.md", REPOSITORY / "docs/getting-started.md"]
SHELL = [block for page in pages() for block in blocks(page) if block.language in ("sh", "bash", "console")]


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_a_shell_block_is_shell(block: Block) -> None:
    """What is fenced as sh can be read by sh; placeholders and output belong into text."""
    done = subprocess.run(["sh", "-n"], input=block.text, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "…" not in block.text


@pytest.mark.parametrize("page", STRICT, ids=lambda page: page.name)
def test_a_block_that_is_not_run_says_why(page: Path) -> None:
    """A block of getting started is run by tests/e2e/test_documentation.py or has a reason; README's have."""
    skipped = [block for block in blocks(page) if block.comment.startswith("not run")]
    reasons = [re.fullmatch(r"not run( here)?: (\w.{10,})", block.comment, re.DOTALL) for block in skipped]

    assert all(reasons)
    assert page != STRICT[0] or len(skipped) == len([b for b in blocks(page) if b.language == "sh"])
    assert [b.language for b in blocks(page) if b.language not in ("sh", "yaml", "toml", "text")] == []


def test_most_of_getting_started_is_run() -> None:
    """The page leads by blocks that a test types to a container with a device."""
    run = [b for b in blocks(STRICT[1]) if b.language == "sh" and not b.comment.startswith("not run")]

    assert len(run) >= 5


def test_each_file_that_a_page_names_exists() -> None:
    """A file that was renamed is noticed where a page leans on it."""
    path = re.compile(
        r"\b(?:core|backends|tests|docs|tools|packaging|bench|examples)/[\w/.-]+\.(?:py|md|sh|txt)\b"
    )
    own = [page for page in pages() if page.parent in (REPOSITORY, REPOSITORY / "docs")]
    named = {(page, file) for page in own for file in path.findall(page.read_text())}

    assert len(named) > 30
    assert [f"{page.name}: {file}" for page, file in sorted(named) if not (REPOSITORY / file).exists()] == []


def test_a_block_has_the_comment_right_before_it(tmp_path: Path) -> None:
    """A comment belongs to the next block alone, and one with text in between to none."""
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- a -->\n```sh\nx\n```\n<!-- b -->\n\n```sh\ny\n```\n<!-- c -->\nz\n\n```text\nz\n```\n"
    )

    assert [(block.text, block.comment) for block in blocks(page)] == [
        ("x\n", "a"),
        ("y\n", "b"),
        ("z\n", ""),
    ]
    assert [block.line for block in blocks(page)] == [2, 7, 13]
