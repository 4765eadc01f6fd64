"""docs/settings.md is what the settings' classes say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import attrs
from cdi_courier.settings import Settings, load
from support.pages import REPOSITORY, blocks, pages

PAGE = REPOSITORY / "docs/settings.md"


def test_the_page_is_current() -> None:
    """`make docs` would change nothing."""
    done = subprocess.run(
        [sys.executable, "tools/reference.py", "--settings-page"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )

    assert PAGE.read_text() == done.stdout


def test_every_key_has_a_meaning() -> None:
    """No key is listed without a word of what it does."""
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]

    assert len(rows) > 40
    assert [row[1] for row in rows if not row[4].strip()] == []


def test_every_toml_block_of_the_docs_is_a_usable_configuration(tmp_path) -> None:
    """What can be pasted from a page into a file of settings is accepted, and no key of it is unknown."""
    sections = {a.name for a in attrs.fields(Settings)}
    found = [
        block
        for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
        for block in blocks(page)
        if block.language == "toml"
    ]
    for block in found:
        assert set(tomllib.loads(block.text)) <= sections, f"{block} is of another program: fence it as text"
        file = tmp_path / "config.toml"
        file.write_text(block.text)
        load([file])

    assert len(found) >= 2


def test_every_setting_that_a_page_names_exists() -> None:
    """No page tells a reader to set a key that would be refused as unknown."""
    parts = re.split(r"^## `\[([a-z_]+)\S*\]`$", PAGE.read_text(), flags=re.MULTILINE)
    keys = {
        section: set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
        for section, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    named = {
        (page.name, section, key)
        for page in pages()
        for section, key in re.findall(r"\[([a-z_]+)\] ([a-z_]+)\b", page.read_text())
        if section in keys and section != "runtimes"  # whose keys are runtimes
    }

    assert len(named) > 50
    assert sorted(name for name in named if name[2] not in keys[name[1]]) == []
