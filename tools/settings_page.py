"""Prints docs/settings.md, made of the settings' model: ``tools/settings_page.py >docs/settings.md``.

It must not know any setting by name but for the introduction: what a key means stands in the model alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import attrs
from cdi_courier import settings

_HEAD = """\
<!-- Made by tools/settings_page.py of core/src/cdi_courier/settings.py. Change that, then `make docs`. -->

# Settings

Every key is optional. `cdi-courier config check` reads all files as the daemon does and names file, line and key of
whatever is wrong.

Read are, in this order, `/etc/cdi-courier/config.toml` and `/etc/cdi-courier/conf.d/*.toml` by name; of a user who is
not root, the same below `~/.config/cdi-courier`. A later file's value replaces an earlier one's, lists too; `[runtimes]`
entries merge key by key; the rules of a later file are tried before those of earlier ones. `--config FILE` reads FILE
alone. Options of the command line go before the environment (`CDI_COURIER_`, command and option), that before files.

The files are read when the daemon starts, and for every container by hooks and wrappers."""

_TYPES = {str: "string", int: "whole number", float: "number", bool: "true or false"}


def page() -> str:
    """The page, with its last line feed."""
    parts = [_HEAD]
    for attribute in attrs.fields(settings.Settings):
        if attribute.metadata.get("internal"):
            continue
        type_ = attribute.type
        if get_origin(type_) is not None and issubclass(get_origin(type_), Mapping):
            parts += _section(get_args(type_)[1], f"runtimes.{_either(settings.RUNTIME_KINDS)}")
        else:
            assert isinstance(type_, type)
            parts += _section(type_, attribute.name)
    return "\n".join(parts) + "\n"


def _section(model: type, name: str) -> Iterator[str]:
    title, _, doc = (model.__doc__ or "").partition(": ")
    yield f"\n## {title.replace('``', '`')}\n"
    yield f"{doc[:1].upper()}{doc[1:].strip()}\n"
    nested = []
    yield "| key | type | default | |"
    yield "|---|---|---|---|"
    for attribute in attrs.fields(model):
        inner = _model_of(attribute.type)
        if attribute.metadata.get("internal"):
            continue
        if inner is not None:
            nested.append((inner, f"{name}.{attribute.name}"))
            continue
        cells = (_kind(attribute.type), _default(attribute.default), attribute.metadata["doc"])
        yield f"| `{attribute.name}` | {' | '.join(cells)} |"
    for inner, path in nested:
        yield from _section(inner, path)


def _model_of(type_: Any) -> type | None:
    """The class of the tables in a list of tables."""
    arguments = get_args(type_) if get_origin(type_) is tuple else ()
    return arguments[0] if arguments and attrs.has(arguments[0]) else None


def _kind(type_: Any) -> str:
    if get_origin(type_) is Literal:
        return _either(get_args(type_))
    if get_origin(type_) is tuple:
        return "list of strings"
    return _TYPES[type_]


def _either(values: tuple[str, ...]) -> str:
    return ", ".join(f'`"{value}"`' for value in values)


def _default(value: Any) -> str:
    if value is attrs.NOTHING:
        return "required"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return "`[" + ", ".join(f'"{item}"' for item in value) + "]`"
    return f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(page())
