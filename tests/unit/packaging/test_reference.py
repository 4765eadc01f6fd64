"""What packages ship beside the program is made from the program itself."""

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import attrs
import click
import pytest
from cdi_courier.cli import command
from cdi_courier.policy import BUILT_IN
from cdi_courier.settings import PolicyRule, Settings, load
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings_of(text: str, folder: Path) -> Settings:
    file = folder / "config.toml"
    file.write_text(text)
    return attrs.evolve(load([file]), files=())


def test_the_configuration_file_changes_nothing(reference: ModuleType, tmp_path: Path) -> None:
    """As it is shipped, every setting has its default."""
    shipped = settings_of(reference.config_file(), tmp_path)

    assert shipped == settings_of("", tmp_path)


def test_the_configuration_file_shows_every_setting_at_its_default(
    reference: ModuleType, tmp_path: Path
) -> None:
    """With the comment signs before keys taken away it is what holds without it, and nothing is left out."""
    text = re.sub(r"^#(?=[a-z[])", "", reference.config_file(), flags=re.MULTILINE)
    shown = tomllib.loads(text)
    settings = settings_of(text, tmp_path)
    policy = settings.policy
    as_default = attrs.evolve(settings, runtimes={}, policy=attrs.evolve(policy, rules=(), sources=()))
    keys = {
        section.name: {a.name for a in attrs.fields(section.type) if not a.metadata.get("internal")}
        for section in attrs.fields(Settings)
        if section.name not in ("files", "runtimes")
    }

    assert as_default == settings_of("", tmp_path)
    assert policy.rules == (PolicyRule(BUILT_IN.action, namespaces=BUILT_IN.namespaces),)
    assert {name: set(table) for name, table in shown.items() if name != "runtimes"} == keys


def commands(found: click.Command, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    below = []
    if isinstance(found, click.Group):
        context = click.Context(found)
        for name in found.list_commands(context):
            each = found.get_command(context, name)
            assert each is not None
            below += commands(each, (*path, name))
    return [path, *below]


def test_every_command_has_a_page(reference: ModuleType) -> None:
    """Every command and every command below it is described, with all of its options."""
    pages = reference.pages()

    assert {"-".join(path) + ".1" for path in commands(command, ("cdi-courier",))} <= set(pages)
    assert "\\-\\-nri\\-socket PATH" in pages["cdi-courier-run.1"]
    assert "\\fBgate_dir\\fR = " in pages["cdi-courier-config.toml.5"]


@given(st.text(alphabet=".'\\\\-abc fB\n\"", max_size=200))
def test_text_cannot_be_taken_for_markup(reference: ModuleType, text: str) -> None:
    """No line that was text begins a request, and every backslash begins an escape of ours."""
    lines = [line for line in reference._paragraphs(text) if line != ".PP"]

    assert not [line for line in lines if line.startswith((".", "'"))]
    assert not re.search(r"\\(?![e&-]|\([a-z]{2})", "\n".join(lines).replace("\\e", ""))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_ask_the_command(reference: ModuleType, shell: str) -> None:
    """Each shell's file asks `cdi-courier` itself, by the variable that it answers to."""
    (text,) = [text for name, text in reference.completions().items() if name.startswith(shell)]

    assert f"_CDI_COURIER_COMPLETE={shell}_complete" in text


def test_zsh_completes_at_the_first_tab(reference: ModuleType) -> None:
    """The file that zsh loads by itself completes, rather than only register how it would."""
    old = "#compdef x\nf() { :; }\ncompdef f cdi-courier;\n"

    assert 'f "$@"' in reference._autoloaded(old, "f")


def test_the_bash_file_is_sound(reference: ModuleType) -> None:
    """Bash can read the file of its completions."""
    done = subprocess.run(
        ["/bin/bash", "-n"], input=reference.completions()["bash/cdi-courier"], text=True, timeout=20
    )

    assert done.returncode == 0
