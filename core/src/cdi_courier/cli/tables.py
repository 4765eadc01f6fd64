"""Tables for people: as wide as what they hold, whatever the terminal, for a name that is cut is no name.

It must not know what is in them. `explain` has its own, which takes tens of thousands of rows.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from cdi_courier.cli import plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_GAP = 2  # blanks between columns


def lines(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A line for the titles and one for each row, without blanks at the end; cells may be hostile text."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[plain(cell) for cell in row] for row in rows]
    table = Table(*titles, box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="")
    for row in cells:
        table.add_row(*(Text(cell, no_wrap=True) for cell in row))  # Text: names are no markup
    width = sum(max(map(cell_len, column)) + _GAP for column in zip(titles, *cells, strict=True))
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().split("\n")[:-1]]
