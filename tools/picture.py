"""Draws docs/pictures/NAME.svg from NAME.txt, as text on stdout: ``picture.py NAME.txt >NAME.svg``.

A source has a line each for

    title TEXT
    box NAME COLUMN ROW HEADING [/ LINE]
    arrow NAME NAME [LABEL]
    note COLUMN ROW TEXT

Columns and rows are counted from 0 and may be halves. Arrows go between the nearest sides of two boxes. It
must not know what any picture is about.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

_WIDTH: Final = 184
_HEIGHT: Final = 52
_COLUMN: Final = 244
_ROW: Final = 88
_MARGIN: Final = 16

_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" \
font-family="sans-serif" font-size="13">
  <title>{title}</title>
  <defs>
    <marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
      <path d="M0 0L8 4L0 8z" fill="#555"/>
    </marker>
  </defs>
  <rect width="{width:g}" height="{height:g}" fill="#fff"/>
"""


class _Box(NamedTuple):
    x: float
    y: float
    heading: str
    line: str

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + _WIDTH / 2, self.y + _HEIGHT / 2


def draw(source: str) -> str:
    """The picture as SVG. Raises `ValueError` that names the line that cannot be understood."""
    title = ""
    boxes: dict[str, _Box] = {}
    arrows: list[tuple[str, str, str]] = []
    notes: list[tuple[float, float, str]] = []
    for number, line in enumerate(source.splitlines(), 1):
        word, _, rest = line.strip().partition(" ")
        try:
            if word == "title":
                title = rest
            elif word == "box":
                name, column, row, text = rest.split(None, 3)
                heading, _, below = text.partition(" / ")
                boxes[name] = _Box(*_place(column, row), heading, below)
            elif word == "arrow":
                start, end, *label = rest.split(None, 2)
                if not {start, end} <= set(boxes):
                    raise ValueError("an arrow needs two boxes that stand before it")  # noqa: TRY301
                arrows.append((start, end, "".join(label)))
            elif word == "note":
                column, row, text = rest.split(None, 2)
                notes.append((*_place(column, row), text))
            elif word and not word.startswith("#"):
                raise ValueError(f"there is no {word}")  # noqa: TRY301
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    every = [(box.x, box.y) for box in boxes.values()] + [(x, y) for x, y, _ in notes]
    if not every:
        raise ValueError("there is nothing to draw: no box and no note")
    width = max(x for x, _ in every) + _WIDTH + _MARGIN
    height = max(y for _, y in every) + _HEIGHT + _MARGIN
    parts = [_HEAD.format(width=width, height=height, title=escape(title))]
    parts += [_arrow(boxes[start], boxes[end], label) for start, end, label in arrows]
    parts += map(_box, boxes.values())
    parts += [
        f'  <text x="{x:g}" y="{y + _HEIGHT / 2:g}" fill="#555" font-size="11">{escape(text)}</text>\n'
        for x, y, text in notes
    ]
    return "".join(parts) + "</svg>\n"


def _place(column: str, row: str) -> tuple[float, float]:
    return _MARGIN + float(column) * _COLUMN, _MARGIN + float(row) * _ROW


def _box(box: _Box) -> str:
    x, y = box.middle
    lines = [
        (
            f'  <rect x="{box.x:g}" y="{box.y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="#eef3fb" '
            'stroke="#3b6ea5"/>'
        ),
        (
            f'  <text x="{x:g}" y="{y - 4 if box.line else y + 5:g}" text-anchor="middle" fill="#1c2733">'
            f"{escape(box.heading)}</text>"
        ),
    ]
    if box.line:
        lines.append(
            f'  <text x="{x:g}" y="{y + 14:g}" text-anchor="middle" fill="#1c2733" font-size="11">'
            f"{escape(box.line)}</text>"
        )
    return "\n".join(lines) + "\n"


def _arrow(start: _Box, end: _Box, label: str) -> str:
    (x1, y1), (x2, y2) = start.middle, end.middle
    # From side to side, unless one stands above the other.
    if abs(x2 - x1) >= _WIDTH:
        side = _WIDTH / 2 if x2 > x1 else -_WIDTH / 2
        x1, x2 = x1 + side, x2 - side
    else:
        side = _HEIGHT / 2 if y2 > y1 else -_HEIGHT / 2
        y1, y2 = y1 + side, y2 - side
    # Written twice: the first, wider and white, parts the letters from the line.
    text = "".join(
        f'  <text x="{(x1 + x2) / 2 + 4:g}" y="{(y1 + y2) / 2 + 4:g}" text-anchor="middle" '
        f'font-size="11" {look}>{escape(label)}</text>\n'
        for look in (('fill="#fff" stroke="#fff" stroke-width="5"', 'fill="#555"') if label else ())
    )
    line = f"M{x1:g} {y1:g}L{x2:g} {y2:g}"
    return f'  <path d="{line}" stroke="#555" stroke-width="1.5" fill="none" marker-end="url(#a)"/>\n{text}'


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: picture.py NAME.txt >NAME.svg")
    try:
        sys.stdout.write(draw(Path(sys.argv[1]).read_text()))
    except ValueError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
