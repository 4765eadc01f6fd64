"""Writes what packages ship beside the program: man pages, completions, and the configuration file.

usage: reference.py FOLDER
       reference.py --settings-page >docs/settings.md

FOLDER/man/*.1, *.5; FOLDER/completions/{bash,zsh,fish}/...; FOLDER/config.toml. All of it comes from the
click commands and the settings' own classes, so it cannot tell anything else than the program does. It needs
the distributions importable, as a package's build has them, and knows nothing of packages. Its output is the
same for the same source: SOURCE_DATE_EPOCH gives the pages their date.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import re
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import attrs
import click
from cdi_courier.cli import command
from cdi_courier.policy import BUILT_IN
from cdi_courier.reloading import counts
from cdi_courier.settings import PolicyRule, RuntimeSettings, Settings
from click.shell_completion import get_completion_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PROGRAM = "cdi-courier"
_COMPLETE_VARIABLE = "_CDI_COURIER_COMPLETE"
_ENVIRONMENT = "CDI_COURIER"
_WIDTH = 98
_PAGE_WIDTH = 70  # escapes come on top

_EXIT_CODES = (
    ("0", "Yes, or done."),
    ("1", "No, or failed; the message says why."),
    ("2", "Wrong usage, or input that cannot be used."),
    ("3", "A device cannot be resolved (cdi-courier apply)."),
)
_FILES = (
    ("/etc/cdi-courier/config.toml, /etc/cdi-courier/conf.d/*.toml", "The settings, read in this order."),
    ("/run/cdi-courier", "Lock, compiled table and status socket of the daemon."),
    ("/var/lib/cdi-courier/changes", "What cdi-courier install changed, with the original bytes."),
)
_LAUNCHED = """\
It is started by a container runtime from its NRI plugin directory, as NN-cdi-courier, and does what
cdi-courier run --backend nri does for that one runtime. It takes no arguments; the runtime passes the
connection in the environment.
"""


def main() -> None:
    """Write everything below the folder that the command line names, or print the settings' page."""
    match sys.argv[1:]:
        case ["--settings-page"]:
            sys.stdout.write(settings_page())
            return
        case [name] if not name.startswith("-"):
            folder = Path(name)
        case _:
            sys.exit("usage: reference.py FOLDER | --settings-page")
    for name, text in pages().items():
        _write(folder / "man" / name, text)
    for name, text in completions().items():
        _write(folder / "completions" / name, text)
    _write(folder / "config.toml", config_file())


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# --- man pages -----------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """File name → roff (man(7)) of every command, the launched plugin and the configuration file."""
    top = click.Context(command, info_name=_PROGRAM, **command.context_settings)
    found = {f"{each.command_path.replace(' ', '-')}.1": _command_page(each) for each in _commands(top)}
    found["cdi-courier-nri.1"] = _launched_page()
    found["cdi-courier-config.toml.5"] = _settings_page()
    return found


def _commands(context: click.Context) -> Iterator[click.Context]:
    """The context of a command and of all that are below it."""
    yield context
    for name, below in _below(context):
        settings = below.context_settings
        yield from _commands(click.Context(below, parent=context, info_name=name, **settings))


def _below(context: click.Context) -> Iterator[tuple[str, click.Command]]:
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            below = context.command.get_command(context, name)
            if below is not None and not below.hidden:
                yield name, below


def _command_page(context: click.Context) -> str:
    found = context.command
    path = context.command_path.split()
    lines = [
        *_head("-".join(path), "1", found.get_short_help_str(200)),
        ".SH SYNOPSIS",
        " ".join([_bold(" ".join(path)), *map(_escaped, found.collect_usage_pieces(context))]),
        ".SH DESCRIPTION",
        *_paragraphs(found.help or ""),
    ]
    records = [p.get_help_record(context) for p in found.get_params(context) if isinstance(p, click.Option)]
    lines += [".SH OPTIONS", *_terms((_bold(record[0]), record[1]) for record in records if record)]
    below = [
        (_reference("-".join((*path, name)), "1"), each.get_short_help_str(200))
        for name, each in _below(context)
    ]
    if below:
        lines += [".SH COMMANDS", *_terms(below)]
    variable = "_".join((_ENVIRONMENT, *map(_constant, path[1:]), "OPTION"))
    lines += [
        ".SH EXIT STATUS",
        *_terms((_bold(code), text) for code, text in _EXIT_CODES),
        ".SH ENVIRONMENT",
        "Every option can also be given in the environment, as",
        f"{_bold(variable)};",
        "the command line overrides the environment, and the environment overrides files.",
        ".SH FILES",
        *_terms((_bold(name), text) for name, text in _FILES),
    ]
    also = [("-".join(path[:-1]), "1")] if len(path) > 1 else []
    return _page([*lines, *_see_also([*also, ("cdi-courier-config.toml", "5")])])


def _constant(name: str) -> str:
    return name.upper().replace("-", "_")


def _launched_page() -> str:
    return _page([
        *_head("cdi-courier-nri", "1", "cdi-courier as an NRI plugin that the container runtime launches"),
        ".SH SYNOPSIS",
        _bold("cdi-courier-nri"),
        ".SH DESCRIPTION",
        *_paragraphs(_LAUNCHED),
        *_see_also([("cdi-courier-run", "1"), ("cdi-courier-config.toml", "5")]),
    ])  # fmt: skip


def _settings_page() -> str:
    lines = [
        *_head("cdi-courier-config.toml", "5", "the settings of cdi-courier"),
        ".SH SYNOPSIS",
        "/etc/cdi\\-courier/config.toml",
        ".br",
        "/etc/cdi\\-courier/conf.d/*.toml",
        ".SH DESCRIPTION",
        *_paragraphs(_INTRODUCTION),
        _bold("cdi-courier config check"),
        "reads every file and says whether all of it is right.",
    ]
    for section in attrs.fields(Settings):
        if section.metadata.get("internal"):
            continue
        lines += [f".SH {_escaped(section.name.upper())}", *_paragraphs(_about(section))]
        for table, cls in _tables(section):
            if table != section.name:
                lines += [".SS " + _escaped(f"[[{table}]]"), *_paragraphs(_doc(cls))]
            lines += _terms((f"{_bold(a.name)} = {_escaped(_default(a))}", _described(a)) for a in _keys(cls))
    return _page([*lines, *_see_also([("cdi-courier", "1"), ("cdi-courier-config-check", "1")])])


def _head(name: str, section: str, summary: str) -> list[str]:
    date = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))))
    version = importlib.metadata.version(_PROGRAM)
    summary = summary.strip().rstrip(".")
    return [
        f'.TH {_escaped(name.upper())} {section} {date} "{_PROGRAM} {version}" "{_PROGRAM}"',
        # A long word that cannot be broken would else stretch its line.
        ".ad l",
        ".SH NAME",
        f"{_escaped(name)} \\-",
        *_paragraphs(summary[:1].lower() + summary[1:]),
    ]


def _see_also(pages: Iterable[tuple[str, str]]) -> list[str]:
    return [".SH SEE ALSO", ",\n".join(_reference(*page) for page in pages)]


def _reference(name: str, section: str) -> str:
    return f"{_bold(name)}({section})"


def _paragraphs(text: str) -> list[str]:
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text).strip()):
        lines += [*([".PP"] if lines else []), *map(_escaped, textwrap.wrap(paragraph, _PAGE_WIDTH))]
    return lines


def _terms(terms: Iterable[tuple[str, str]]) -> list[str]:
    """Tagged paragraphs. terms: (roff, plain text)."""
    return [line for term, text in terms for line in (".TP", term, *(_paragraphs(text) or ["\\&"]))]


def _bold(text: str) -> str:
    return f"\\fB{_escaped(text)}\\fR"


def _escaped(text: str) -> str:
    """Text as roff shows it literally: a dash that can be copied, no control line, quotes as they are."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    text = text.replace("^", "\\(ha").replace("~", "\\(ti").replace("…", "...").replace("→", "\\(->")
    return f"\\&{text}" if text.startswith(".") else text


def _page(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


# --- the configuration file ----------------------------------------------------------------------------

_INTRODUCTION = """\
Read in order: /etc/cdi-courier/config.toml, then /etc/cdi-courier/conf.d/*.toml bytewise. Every key is
optional. An unknown table or key, or a value of a wrong type, is an error that names file, line, key and what
is allowed.

The last file wins, except that policy.rules of a later file are tried before those of earlier files.
Command-line options override files.
"""
_BUILT_IN_RULE = {"action": (BUILT_IN.action,), "namespaces": (BUILT_IN.namespaces,)}
_EXAMPLE_RUNTIME = 'containerd = { backend = "nri", restart = "systemctl restart containerd" }'


def config_file() -> str:
    """``config.toml`` with every setting in a comment at its default."""
    wrapped = [textwrap.wrap(paragraph, _WIDTH) for paragraph in _INTRODUCTION.strip().split("\n\n")]
    lines = ["# The settings of cdi-courier, each at its default: see cdi-courier-config.toml(5).", "#"]
    for paragraph in wrapped:
        lines += [*(f"# {line}" for line in paragraph), "#"]
    lines.pop()
    for section in attrs.fields(Settings):
        if section.metadata.get("internal"):
            continue
        lines += ["", f"# {_about(section)}"]
        if section.name == "runtimes":
            lines += ["[runtimes]", *(f"# {a.name}: {a.metadata['doc']}" for a in _keys(RuntimeSettings))]
            lines.append(f"#{_EXAMPLE_RUNTIME}")
            continue
        for table, cls in _tables(section):
            if table == section.name:
                lines += [f"[{table}]", *map(_setting, _keys(cls))]
            else:
                lines += ["", f"# {_doc(cls)} This one is built in and always last.", f"#[[{table}]]"]
                lines += [_setting(a, *_BUILT_IN_RULE.get(a.name, ())) for a in _keys(cls)]
    return _page(lines)


def _setting(attribute: attrs.Attribute[Any], *value: Any) -> str:
    setting = f"#{attribute.name} = {_toml(*value) if value else _default(attribute)}"
    described = _described(attribute)
    return f"{setting:<35} # {described}" if described else setting


def _tables(section: attrs.Attribute[Any]) -> Iterator[tuple[str, type]]:
    """Table's name → its class, those inside of it last."""
    cls = RuntimeSettings if section.name == "runtimes" else section.type
    assert isinstance(cls, type)  # noqa: S101 - attrs resolves them
    yield section.name, cls
    if section.name == "policy":
        yield "policy.rules", PolicyRule


def _keys(cls: type) -> list[attrs.Attribute[Any]]:
    # The rules are tables of their own.
    return [a for a in attrs.fields(cls) if not a.metadata.get("internal") and a.name != "rules"]


def _about(section: attrs.Attribute[Any]) -> str:
    return _doc(next(_tables(section))[1])


def _doc(cls: type) -> str:
    """A settings class's first line without the table's name."""
    line = (cls.__doc__ or "").splitlines()[0].partition(": ")[2]
    return line[:1].upper() + line[1:]


def _choices(attribute: attrs.Attribute[Any]) -> tuple[str, ...]:
    return get_args(attribute.type) if get_origin(attribute.type) is Literal else ()


def _described(attribute: attrs.Attribute[Any]) -> str:
    return "; ".join(filter(None, (" | ".join(_choices(attribute)), attribute.metadata["doc"])))


def _default(attribute: attrs.Attribute[Any]) -> str:
    return '"allow"' if attribute.default is attrs.NOTHING else _toml(attribute.default)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value)


# --- the page of the settings ---------------------------------------------------------------------------

_PAGE_HEAD = """\
<!-- Made by `make docs` of the settings' classes; change core/src/cdi_courier/settings.py instead. -->

# Settings

Every key is optional. An unknown table or key, or a value of a wrong type, is an error that names file, line,
key and what is allowed ([SET001 and further](errors.md#settings)); `cdi-courier config check` reads all files
as the daemon does.

Read are, in this order, `/etc/cdi-courier/config.toml` and `/etc/cdi-courier/conf.d/*.toml` bytewise; for a
user who is not root, `~/.config/cdi-courier` takes the place of `/etc/cdi-courier`. A later file's value
replaces an earlier one's, lists too; entries of `[runtimes]` merge key by key; the rules of a later file are
tried *before* those of earlier ones. `--config FILE` reads that file alone.

Each option of a command can also be given in the environment, as `CDI_COURIER_`, the command and the option:
`CDI_COURIER_RUN_BACKEND=nri`. Options override the environment, the environment overrides files.

The last column says when a change counts: at a *reload* (`systemctl reload cdi-courier`), a *restart*, or the
next `cdi-courier install`. Hooks and the runtime wrapper look at the files for each container.

```toml
# /etc/cdi-courier/conf.d/50-site.toml
[annotations]
domains = ["nvidia.cdi.k8s.io", "amd.cdi.k8s.io"]

[[policy.rules]]
action = "allow"
namespaces = ["ml-*"]
devices = ["nvidia.com/gpu=*"]
```
"""


def settings_page() -> str:
    """``docs/settings.md``."""
    lines = [_PAGE_HEAD]
    for section in attrs.fields(Settings):
        if section.metadata.get("internal"):
            continue
        for table, cls in _tables(section):
            title = (
                "[runtimes.KEY]" if table == "runtimes" else f"[[{table}]]" if "." in table else f"[{table}]"
            )
            lines += [f"## `{title}`", "", _doc(cls).replace("``", "`"), ""]
            if table == "runtimes":
                lines += [_RUNTIME_KEYS, ""]
            lines += ["| key | type | default | meaning | counts |", "|---|---|---|---|---|"]
            lines += [_row(section.name, a) for a in _keys(cls)]
            if cls is PolicyRule:
                lines += ["", f"Last comes a rule that is always there: {_BUILT_IN_WORDS}."]
            lines.append("")
    return "\n".join(lines)


_BUILT_IN_WORDS = f"`{BUILT_IN.action}` anything in `{'`, `'.join(BUILT_IN.namespaces)}`"


_RUNTIME_KEYS = """\
KEY is a kind (`containerd`, `cri-o`, `docker`, `podman`) or, in quotes, the path of the runtime's socket; a
path beats a kind."""

_TYPES: dict[Any, str] = {str: "string", int: "whole number", float: "number", bool: "boolean"}


def _row(section: str, attribute: attrs.Attribute[Any]) -> str:
    many = get_origin(attribute.type) is tuple
    cells = (
        f"`{attribute.name}`",
        ", ".join(f'`"{choice}"`' for choice in _choices(attribute))
        or _TYPES.get(attribute.type, "strings" if many else ""),
        "(required)" if attribute.default is attrs.NOTHING else f"`{_toml(attribute.default)}`",
        re.sub(r"([*|\[\]])", r"\\\1", attribute.metadata["doc"]),
        counts(f"{section}.{attribute.name}"),
    )
    return f"| {' | '.join(cells)} |"


# --- completions ---------------------------------------------------------------------------------------

_COMPLETION_FILES = {
    # click's name of the shell → where that shell's packages put the file
    "bash": f"bash/{_PROGRAM}",
    "zsh": f"zsh/_{_PROGRAM}",
    "fish": f"fish/{_PROGRAM}.fish",
}


def completions() -> dict[str, str]:
    """File name below the shells' folders → click's completion script."""
    found = {}
    for shell, name in _COMPLETION_FILES.items():
        cls = get_completion_class(shell)
        assert cls is not None  # noqa: S101 - click has had all three since 8.0
        completer = cls(command, {}, _PROGRAM, _COMPLETE_VARIABLE)
        # Not source(), which also looks at the version of the bash that happens to be here.
        text = completer.source_template % completer.source_vars()
        found[name] = (_autoloaded(text, completer.func_name) if shell == "zsh" else text).strip() + "\n"
    return found


def _autoloaded(text: str, function: str) -> str:
    """In zsh a completion file runs as the function itself; click before 8.1.8 only registers one."""
    if "loadautofunc" in text:
        return text
    registering = f"compdef {function} {_PROGRAM};"
    assert registering in text  # noqa: S101 - click's template has changed
    return text.replace(
        registering,
        f'if [[ $zsh_eval_context[-1] == loadautofunc ]]; then\n    {function} "$@"\nelse\n'
        f"    {registering}\nfi",
    )


if __name__ == "__main__":
    main()
