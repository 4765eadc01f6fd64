"""docs/plugins.md and the example that it goes through say the same."""

from __future__ import annotations

import ast
import re
import tomllib

from cdi_courier import hookspecs
from support.pages import REPOSITORY, links

PAGE = REPOSITORY / "docs/plugins.md"
EXAMPLE = REPOSITORY / "examples/serial"
SOURCES = sorted((EXAMPLE / "src").rglob("*.py"))


def imported() -> set[str]:
    """The modules of the core that the example and its tests import, also for type checkers."""
    found = set()
    for source in (*SOURCES, *(EXAMPLE / "tests").glob("*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                modules = [name for name in names if is_module(name)] or [node.module]
                found |= {module for module in modules if module.startswith("cdi_courier.")}
    return found


def is_module(name: str) -> bool:
    path = REPOSITORY / "core/src" / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def test_the_example_imports_only_what_may_be_relied_on() -> None:
    """A stranger who follows the page needs no module that may change without a word."""
    table = PAGE.read_text().partition("## What may be relied on")[2].partition("\n## ")[0]
    promised = set(re.findall(r"`(cdi_courier[\w.]*)`", table))

    assert imported() - promised == set()
    assert [name for name in promised if not is_module(name)] == []


def test_every_module_of_the_example_is_gone_through() -> None:
    """The page leads to the example's files, and to all that has a hook."""
    linked = {link.rpartition("/")[2] for link in links(PAGE)}
    hooked = {source.name for source in SOURCES if "@hookimpl" in source.read_text()} - {"plugin.py"}

    assert {"generator.py", "dialect.py", "backend.py", "pyproject.toml", *hooked} <= linked


def test_the_example_implements_every_hook() -> None:
    """There is no hook that an author finds no example of."""
    hooks = {name for name in vars(hookspecs) if name.startswith("cdi_courier_")}
    text = "".join(source.read_text() for source in SOURCES)

    assert {hook for hook in hooks if f"def {hook}(" not in text} == set()


def test_the_page_shows_the_example_s_entry_points() -> None:
    """What is to be copied into a pyproject.toml is what stands in the example's."""
    made = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    shown = PAGE.read_text()

    for name, module in made["project"]["entry-points"]["cdi_courier"].items():
        assert f'{name} = "{module}"' in shown
