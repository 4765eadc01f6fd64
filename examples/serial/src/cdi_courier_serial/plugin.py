"""The entry point of the dialect and the generator: two hooks that return data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdi_courier.hookspecs import Generator, hookimpl

from .dialect import SERIAL
from .generator import generate

if TYPE_CHECKING:
    from cdi_courier.annotations import Dialect


@hookimpl
def cdi_courier_dialects() -> tuple[Dialect, ...]:
    """One dialect; it answers once ``[annotations] dialects`` names it."""
    return (SERIAL,)


@hookimpl
def cdi_courier_generators() -> tuple[Generator, ...]:
    """One generator, ``cdi-courier generate serial``."""
    return (Generator("serial", "serial ports, by the names that udev gives them", generate),)
