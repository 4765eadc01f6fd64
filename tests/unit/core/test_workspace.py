"""The four distributions fit together, and who imports whom is as designed."""

from __future__ import annotations

import ast
import graphlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DISTRIBUTIONS = [ROOT / "core", *sorted((ROOT / "backends").iterdir())]
DISTRIBUTIONS = [path for path in DISTRIBUTIONS if (path / "pyproject.toml").exists()]
BACKENDS = DISTRIBUTIONS[1:]
CORE = ROOT / "core" / "src" / "cdi_courier"


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, also within functions and for type checkers, written absolutely."""
    package = [*path.relative_to(next(p for p in path.parents if p.name == "src")).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def offenders(folder: Path, *forbidden: str) -> set[str]:
    """Files that import a forbidden module or anything in it."""
    return {
        str(path.relative_to(ROOT))
        for path in folder.rglob("*.py")
        for name in imports(path)
        if any(name == module or name.startswith(f"{module}.") for module in forbidden)
    }


def test_there_are_four_distributions_with_one_version() -> None:
    """Each pyproject.toml has a literal version, and all are equal."""
    versions = {project(folder)["version"] for folder in DISTRIBUTIONS}

    assert len(DISTRIBUTIONS) == 4
    assert len(versions) == 1


@pytest.mark.parametrize("folder", BACKENDS, ids=lambda folder: folder.name)
def test_a_backend_depends_on_the_core_of_its_version(folder: Path) -> None:
    """A backend requires exactly the core that was released with it."""
    made = project(folder)

    assert f"cdi-courier=={made['version']}" in made["dependencies"]
    assert set(made["entry-points"]["cdi_courier"]) == {folder.name}


def test_every_distribution_has_the_same_license() -> None:
    """The LICENSE files of the repository and of each distribution are one Apache-2.0 text."""
    texts = {(folder / "LICENSE").read_bytes() for folder in (ROOT, *DISTRIBUTIONS)}

    (text,) = texts
    assert b"Apache License" in text
    assert b"Version 2.0, January 2004" in text
    assert all(project(folder)["license"] == {"text": "Apache-2.0"} for folder in DISTRIBUTIONS)


def packages(folder: Path) -> list[str]:
    return [path.name for path in (folder / "src").iterdir() if (path / "__init__.py").exists()]


def test_the_core_imports_no_backend() -> None:
    """The core knows no backend; backends know the core."""
    names = [name for folder in BACKENDS for name in packages(folder)]

    assert len(names) == 3
    assert not offenders(CORE, *names)


@pytest.mark.parametrize("folder", BACKENDS, ids=lambda folder: folder.name)
def test_a_backend_imports_no_other_backend(folder: Path) -> None:
    """Backends meet only in the core, unless one requires another because it installs that one's files."""
    needed = project(folder)["dependencies"]
    others = [
        name
        for other in BACKENDS
        if other != folder and not any(project(other)["name"] in requirement for requirement in needed)
        for name in packages(other)
    ]

    assert not offenders(folder / "src", *others)


def test_nothing_imports_the_command() -> None:
    """Only the command itself and python -m import cdi_courier.cli."""
    found = {f for folder in DISTRIBUTIONS for f in offenders(folder / "src", "cdi_courier.cli")}

    allowed = {f for f in found if f.startswith("core/src/cdi_courier/cli/") or f.endswith("/__main__.py")}
    assert found == allowed


def test_the_cdi_part_knows_no_annotations() -> None:
    """Reading spec files depends neither on who asks nor on how."""
    found = offenders(
        CORE / "cdi",
        *(
            f"cdi_courier.{name}"
            for name in ("annotations", "dialects", "policy", "request", "settings", "injector")
        ),
    )

    assert not found


def module_name(path: Path) -> str:
    parts = path.relative_to(next(p for p in path.parents if p.name == "src")).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_imports_in_a_circle() -> None:
    """Whoever reads one can read what it stands on before it, and that on what it stands on."""
    modules = {module_name(path): path for folder in DISTRIBUTIONS for path in (folder / "src").rglob("*.py")}
    graph = {}
    for name, path in modules.items():
        found = {other for other in imports(path) if other in modules and other != name}
        # Of a package that is only the way to a module, the package itself is not meant.
        graph[name] = {other for other in found if not any(o.startswith(f"{other}.") for o in found)}

    assert len(graph) > 100
    assert list(graphlib.TopologicalSorter(graph).static_order())
