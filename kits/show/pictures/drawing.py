"""Parts of a tensor as a table for a terminal, and as an SVG.

A box is a part, with the numbers of the devices that hold it. In the SVG boxes have the proportions of the parts, and a
part has the colour of its first device; text beside the boxes has the colour of the text around the picture.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rich import box
from rich.console import Console
from rich.table import Table

from partway.show.pictures.parts import LayoutParts, Panel, listed
from partway.strategy import Span

MOST = 16  # rows and columns of a picture; of more the first and the last
_WIDE, _HIGH, _LEAST = 480.0, 220.0, 22.0  # a grid in the SVG, and its smallest box, in pixels
_LINE, _LEFT, _TOP = 18.0, 76.0, 26.0


def text_of(title: str, parts: LayoutParts) -> str:
    """The picture for a terminal."""
    out = io.StringIO()
    console = Console(file=out, width=10_000, color_system=None)
    console.print(title, markup=False, highlight=False)
    for line in _beside(parts):
        console.print(f"  {line}", markup=False, highlight=False)
    for panel in parts.panels():
        if panel.at:
            console.print(_at(panel), markup=False, highlight=False)
        console.print(_table(parts, panel))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _beside(parts: LayoutParts) -> Iterator[str]:
    yield from parts.meanings()
    if parts.idle:
        yield f"{_devices(parts.idle, listed(parts.idle))}: nothing"


def _devices(devices: Sequence[int], words: str) -> str:
    return f"device{'s' if len(devices) > 1 else ''} {words}"


def _at(panel: Panel) -> str:
    return ", ".join(f"dim {dim} {_span(span)}" for dim, span in panel.at)


def _span(span: Span) -> str:
    return f"{span[0]}:{span[1]}"


def _table(parts: LayoutParts, panel: Panel) -> Table:
    row, column = parts.axes
    table = Table(box=box.SQUARE, show_lines=True, padding=(0, 1))
    corner = [f"dim {row} ↓" if row is not None else "", f"dim {column} →" if column is not None else ""]
    table.add_column(" ".join(filter(None, corner)), justify="right", no_wrap=True)
    columns = _some(range(len(parts.spans(column))))
    for i in columns:
        head = "" if column is None else _span(parts.spans(column)[i]) if i >= 0 else "…"
        table.add_column(head, justify="center", no_wrap=True)
    for r in _some(range(len(parts.spans(row)))):
        head = "" if row is None else _span(parts.spans(row)[r]) if r >= 0 else "…"
        table.add_row(head, *(parts.words(panel.devices[r][c]) if r >= 0 and c >= 0 else "…" for c in columns))
    return table


def _some(numbers: Sequence[int], most: int = MOST) -> list[int]:
    """The numbers that are drawn, with -1 for those in between that are not."""
    if len(numbers) <= most:
        return list(numbers)
    return [*numbers[: most // 2], -1, *numbers[-most // 2 + 1 :]]


@dataclass(frozen=True)
class _Place:
    """The place of a row or a column of boxes, and its label; `number`: -1 for those that are left out."""

    number: int
    start: float
    size: float
    label: str


def svg_of(title: str, parts: LayoutParts, most: int = MOST) -> str:
    """The picture for a notebook or a page: one self-contained `svg` element. `most` rows and columns are drawn."""
    lines = [title, *_beside(parts)]
    high = _LINE * len(lines) + 10
    body: list[str] = []
    row, column = parts.axes
    columns = _places(parts, column, _WIDE, _LEFT, most)
    rows = _places(parts, row, _height(parts, most), _TOP, most)
    for panel in parts.panels():
        body.append(f'<g transform="translate(0 {high:g})">')
        body += _panel(parts, panel, rows, columns)
        body.append("</g>")
        high += rows[-1].start + rows[-1].size + _LINE
    texts = [_text(4, _LINE * (i + 1), line, bold=not i) for i, line in enumerate(lines)]
    wide = max(_LEFT + _WIDE + 10, *(7.2 * len(line) + 8 for line in lines))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{wide:g}" height="{high:g}" '
        f'viewBox="0 0 {wide:g} {high:g}" font-family="ui-sans-serif, system-ui, sans-serif" font-size="12">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", *texts, *body, "</svg>"])


def _height(parts: LayoutParts, most: int) -> float:
    """The height of a grid, in the proportion of its dims, within limits."""
    row, column = parts.axes
    if row is None or column is None:
        return 40.0
    fair = _WIDE * parts.shape[row] / parts.shape[column]
    return min(max(fair, 60.0, _LEAST * len(_some(range(len(parts.spans(row))), most))), _HIGH)


def _places(parts: LayoutParts, dim: int | None, room: float, start: float, most: int) -> list[_Place]:
    spans = parts.spans(dim)
    numbers = _some(range(len(spans)), most)
    sizes = [spans[n][1] - spans[n][0] if n >= 0 else 0 for n in numbers]
    each = [max(_LEAST, room * size / (sum(sizes) or 1)) for size in sizes]
    found = []
    for number, size in zip(numbers, each, strict=True):
        label = "" if dim is None else _span(spans[number]) if number >= 0 else "…"
        found.append(_Place(number, start, size * room / sum(each), label))
        start += size * room / sum(each)
    return found


def _panel(parts: LayoutParts, panel: Panel, rows: Sequence[_Place], columns: Sequence[_Place]) -> Iterator[str]:
    row, column = parts.axes
    head = [
        f"dim {row} down" if row is not None else "",
        f"dim {column} across" if column is not None else "",
        _at(panel),
    ]
    yield _text(_LEFT, 10, "; ".join(filter(None, head)), size=11)
    for place in columns:
        yield _text(place.start + place.size / 2, _TOP - 3, place.label, anchor="middle", size=10)
    for line in rows:
        yield _text(_LEFT - 6, line.start + line.size / 2 + 4, line.label, anchor="end", size=10)
        for across in columns:
            shown = line.number >= 0 and across.number >= 0
            devices = panel.devices[line.number][across.number] if shown else ()
            yield _box(parts, line, across, devices)


def _box(parts: LayoutParts, down: _Place, across: _Place, devices: Sequence[int]) -> str:
    """One part, with the devices that hold it."""
    words = parts.words(devices) if devices else "…"
    fits = 6.6 * len(words) < across.size - 4
    hue = 360 * parts.places[devices[0]] / len(parts.devices) if devices else 0
    fill = f"hsl({hue:.0f} 70% 82%)" if devices else "none"
    said = f"{_devices(devices, words)}: {down.label or 'all'}, {across.label or 'all'}"
    x, y = across.start + across.size / 2, down.start + down.size / 2 + 4
    label = f'<text x="{x:g}" y="{y:g}" text-anchor="middle" fill="#1a1a1a">{escape(words)}</text>' if fits else ""
    return (
        f'<g><title>{escape(said)}</title><rect x="{across.start:g}" y="{down.start:g}" width="{across.size:g}" '
        f'height="{down.size:g}" fill="{fill}" stroke="#555"/>{label}</g>'
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight} fill="currentColor">'
        f"{escape(words)}</text>"
    )
