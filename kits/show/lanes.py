"""Timelines as lanes of bars on one axis of time: an SVG, and the part of a page around it.

    lanes_svg([Lane("computing", (LaneSpan("linear", 0.0, 0.002, "forward"),))])    # the picture alone
    lanes_figure("One step", lanes)                                                 # with buttons and a table

The picture is self-contained. `lanes.js` adds zooming and keyboard navigation, and `lanes.css` is its style; a page has
each once, for any number of figures (`STYLE`, `SCRIPT`). Names appear as text everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from partway.show.page.markup import safe
from partway.strategy import counted
from partway.strategy.basics import lasting

STYLE = Path(__file__).with_name("lanes.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("lanes.js").read_text(encoding="utf-8")

# The fill and the outline of each kind. Dark text on a fill, and an outline on white, have the contrast of WCAG AA; so
# has a fill on a dark page.
COLOURS = (
    ("#bcd7f5", "#1f5fa8"),
    ("#fbd3a8", "#a85a00"),
    ("#bfe5c0", "#2b7031"),
    ("#dccbf3", "#6a3fb0"),
    ("#f7c6d9", "#a8275f"),
    ("#b5e5e1", "#136f69"),
    ("#f2e3a0", "#7a6400"),
    ("#d5d8dc", "#555b63"),
)
ROWS = 6  # rows of one lane, for spans that run at the same time
_LEFT, _WIDE, _RIGHT, _TOP = 210.0, 1000.0, 30.0, 26.0  # names of lanes, room of bars, margin, axis; in pixels
_ROW, _BAR, _GAP, _LETTER = 20.0, 17.0, 8.0, 6.3
_TICKS = 8


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """A bar of a lane.

    kind    determines its colour, with a word in the legend
    title   further text for its tooltip, such as its bytes
    """

    name: str
    start_s: float
    seconds: float
    kind: str = ""
    title: str = ""

    @property
    def end_s(self) -> float:
        """The time of its end."""
        return self.start_s + self.seconds

    @property
    def said(self) -> str:
        """All its facts, as a line."""
        of = f" ({self.kind})" if self.kind else ""
        more = f"; {self.title}" if self.title else ""
        return f"{self.name}{of}: {lasting(self.seconds)}, from {lasting(self.start_s)} on{more}"


@dataclass(frozen=True, slots=True)
class Lane:
    """The bars of one lane. Spans that run at the same time are drawn below each other."""

    name: str
    spans: tuple[LaneSpan, ...]


def lanes_svg(lanes: Sequence[Lane], title: str = "What runs when") -> str:
    """The lanes as one `svg` element, from second 0 (or the first span, if that is before) to the last end."""
    starts = [span.start_s for lane in lanes for span in lane.spans]
    first = min([0.0, *starts])
    last = max((span.end_s for lane in lanes for span in lane.spans), default=first)
    scale = _Scale(first, last if last > first else first + 1e-3)
    colours = _colours(lanes)
    high, body = _TOP, list[str]()
    for lane in lanes:
        lines, rows = _lane(lane, high, scale, colours)
        body += lines
        high += _ROW * rows + _GAP
    wide = _LEFT + _WIDE + _RIGHT
    legend, below = _legend(colours, high + 16)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="group" aria-label="{safe(title)}" viewBox="0 0 {wide:g} '
        f'{below:g}" font-family="ui-sans-serif, system-ui, sans-serif" font-size="11" data-from="{scale.first!r}" '
        f'data-until="{scale.last!r}" data-left="{_LEFT:g}" data-wide="{_WIDE:g}">'
    )
    return "\n".join([head, *_axis(scale, high), *body, *legend, "</svg>"])


def lanes_figure(title: str, lanes: Sequence[Lane]) -> str:
    """The picture with its buttons, and a table with the same content for those who cannot see it."""
    buttons = "".join(
        f'<button type="button" data-do="{does}" aria-label="{label}">{sign}</button>'
        for does, label, sign in (
            ("in", "Zoom in", "+"),
            ("out", "Zoom out", "−"),
            ("left", "Earlier", "←"),
            ("right", "Later", "→"),
            ("all", "Show all", "all"),
        )
    )
    count = sum(len(lane.spans) for lane in lanes)
    if not count:
        return f'<figure class="lanes"><figcaption>{safe(title)}</figcaption><p>Nothing ran.</p></figure>'
    return "\n".join(
        [
            f'<figure class="lanes"><figcaption>{safe(title)}</figcaption>',
            f'<div class="tools" role="toolbar" aria-label="Zoom" hidden>{buttons}<span class="hint">or + − 0; arrow '
            "keys walk from bar to bar; Ctrl and the wheel zoom, dragging moves</span></div>",
            f'<div class="scroll">{lanes_svg(lanes, title)}</div>',
            '<p class="said" aria-live="polite">Point at a bar.</p>',
            f"<details><summary>As a table: {counted(count, 'row')}</summary>{lanes_table(lanes)}</details></figure>",
        ]
    )


def lanes_table(lanes: Sequence[Lane]) -> str:
    """A `table` element with a row for each span."""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("lane", "what", "kind", "from", "takes", "more"))
    rows = [
        f'<tr><td>{safe(lane.name)}</td><th scope="row">{safe(span.name)}</th><td>{safe(span.kind)}</td>'
        f"<td>{lasting(span.start_s)}</td><td>{lasting(span.seconds)}</td><td>{safe(span.title)}</td></tr>"
        for lane in lanes
        for span in lane.spans
    ]
    return "\n".join([f"<table><thead><tr>{head}</tr></thead><tbody>", *rows, "</tbody></table>"])


# -- The parts of the picture ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    """Seconds as pixels."""

    first: float
    last: float

    def x(self, second: float) -> float:
        return _LEFT + self.wide(second - self.first)

    def wide(self, seconds: float) -> float:
        return _WIDE * seconds / (self.last - self.first)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """The labelled seconds of the axis, and their labels. (lanes.js does the same for a zoomed picture.)"""
        rough = (self.last - self.first) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
        unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if self.last >= u), (1e-6, "us"))
        digits = max(0, -math.floor(math.log10(step / unit) + 1e-9))
        for number in range(math.ceil(self.first / step), math.floor(self.last / step + 1e-9) + 1):
            yield number * step, f"{number * step / unit:.{digits}f} {name}"


def _colours(lanes: Sequence[Lane]) -> dict[str, tuple[str, str]]:
    """The colour of each kind, in order of appearance."""
    kinds = dict.fromkeys(span.kind for lane in lanes for span in lane.spans)
    return {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(kinds)}


def _axis(scale: _Scale, bottom: float) -> Iterator[str]:
    yield '<g class="axis">'
    for second, number in scale.ticks():
        x = scale.x(second)
        yield (
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{_TOP - 6:g}" y2="{bottom:g}" stroke="currentColor" '
            f'stroke-opacity="0.2"/><text x="{x:.2f}" y="{_TOP - 10:g}" text-anchor="middle" fill="currentColor">'
            f"{number}</text>"
        )
    yield "</g>"


def _lane(lane: Lane, top: float, scale: _Scale, colours: Mapping[str, tuple[str, str]]) -> tuple[list[str], int]:
    """A lane that begins at `top`, and its number of rows."""
    fits = int((_LEFT - 12) / _LETTER)
    short = lane.name if len(lane.name) <= fits else f"{lane.name[: fits - 1]}…"
    placed = list(_rows(lane.spans))
    rows = 1 + max((row for _, row in placed), default=0)
    middle = top + _ROW * rows / 2 + 3
    bars = [_bar(span, top + _ROW * row, scale, colours[span.kind]) for span, row in placed]
    name = f'<text x="{_LEFT - 8:g}" y="{middle:g}" text-anchor="end" fill="currentColor">{safe(short)}</text>'
    head = f'<g class="lane" role="group" aria-label="{safe(lane.name)}"><g><title>{safe(lane.name)}</title>{name}</g>'
    return [head, *bars, "</g>"], rows


def _rows(spans: Sequence[LaneSpan]) -> Iterator[tuple[LaneSpan, int]]:
    """Each span with its row: the first free one, or else the one that is free soonest."""
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        row = next((i for i, end in enumerate(ends) if end <= span.start_s + 1e-9), len(ends))
        if row == ROWS:
            row = min(range(ROWS), key=ends.__getitem__)
        ends[row : row + 1] = [span.end_s]
        yield span, row


def _bar(span: LaneSpan, top: float, scale: _Scale, colour: tuple[str, str]) -> str:
    x, wide = scale.x(span.start_s), max(scale.wide(span.seconds), 0.75)
    hidden = "" if _LETTER * len(span.name) + 6 <= wide else ' visibility="hidden"'
    fill, outline = colour
    return (
        f'<g class="span" role="img" tabindex="-1" aria-label="{safe(span.said)}" data-start="{span.start_s!r}" '
        f'data-seconds="{span.seconds!r}"><title>{safe(span.said)}</title><rect x="{x:.2f}" y="{top:g}" '
        f'width="{wide:.2f}" height="{_BAR:g}" fill="{fill}" stroke="{outline}" stroke-width="0.75"/>'
        f'<text x="{x + 3:.2f}" y="{top + 12:g}" fill="#111"{hidden}>{safe(span.name)}</text></g>'
    )


def _legend(colours: Mapping[str, tuple[str, str]], top: float) -> tuple[list[str], float]:
    """The legend of the colours, and the bottom of the picture."""
    lines, x = list[str](), _LEFT
    for kind, (fill, outline) in colours.items():
        if not kind:
            continue
        wide = 24 + _LETTER * len(kind)
        if x > _LEFT and x + wide > _LEFT + _WIDE:
            x, top = _LEFT, top + 18
        lines.append(
            f'<rect x="{x:g}" y="{top - 9:g}" width="11" height="11" fill="{fill}" stroke="{outline}"/>'
            f'<text x="{x + 16:g}" y="{top:g}" fill="currentColor">{safe(kind)}</text>'
        )
        x += wide + 12
    return lines, top + (12 if lines else -8)
