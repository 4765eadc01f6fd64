"""Commands and options that the pages name are the program's own."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from cdi_courier.cli import command
from support.pages import blocks, pages

_CALL = re.compile(r"(?<![\w/.-])cdi-courier +([^`|;&#()\n]+)")
_INLINE = re.compile(r"`(cdi-courier[^`]+)`")
# The example's, which `generate` has where that is installed.
_GENERATORS = {"serial"}


def calls(page: Path) -> list[list[str]]:
    """The words behind each ``cdi-courier`` in shell blocks and in code within a sentence."""
    text = "\n".join(block.text for block in blocks(page) if block.language == "sh")
    inline = [" ".join(found.split()) for found in _INLINE.findall(page.read_text())]
    return [found.split() for found in _CALL.findall("\n".join([text, *inline]))]


def unknown(words: list[str]) -> list[str]:
    """What of a call the program does not have: a command, or an option of it."""
    context = click.Context(command)
    current: click.Command = command
    options = {"--help"}
    wrong = []
    at_command = True
    for word in words:
        if word.startswith("--"):
            known = options | {name for parameter in current.params for name in parameter.opts}
            wrong += [] if word.partition("=")[0] in known else [word]
        elif at_command and isinstance(current, click.Group) and re.fullmatch("[a-z-]+", word):
            found = current.get_command(context, word)
            if found is None:
                return [] if word in _GENERATORS else [word]
            current = found
        else:
            at_command = False
    return wrong


@pytest.mark.parametrize("page", [page for page in pages() if calls(page)], ids=lambda page: page.stem)
def test_a_page_names_no_command_or_option_that_does_not_exist(page: Path) -> None:
    """What was renamed in the program is noticed where a reader is told to type it."""
    assert [(" ".join(words), found) for words in calls(page) if (found := unknown(words))] == []


def test_what_does_not_exist_would_be_found(tmp_path: Path) -> None:
    """In a block, and in code within a sentence that goes on in the next line."""
    page = tmp_path / "page.md"
    page.write_text(
        "Type `cdi-courier\nexplane x` or `cdi-courier config check`.\n\n"
        "```sh\ncdi-courier install --systemd --aply    # so\ncdi-courier generate alias a --node /x\n```\n"
    )

    assert [unknown(words) for words in calls(page)] == [["--aply"], [], ["explane"], []]
