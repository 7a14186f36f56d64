"""The page of `partway bench fusion`: the contenders by the time of their steps, and the timeline of one of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from partway.measure.contenders import quartiles, spread, three_quartiles
from partway.show import COLOURS, SCRIPT, STYLE, beside, lanes_figure, safe, sheet_of, totals
from partway.strategy.basics import human

if TYPE_CHECKING:
    from partway.measure.bench import BenchResult, ContenderFigures

_LEFT, _WIDE, _ROW = 150.0, 720.0, 34.0  # of the picture, in pixels
_MEASURED, _PREDICTED = COLOURS[0], COLOURS[1]
_WHISKER = "#2f7ac0"  # visible on the bar, on white and on black
_HEAD = (
    "contender",
    "step, ms: median (min-max)",
    "÷ DDP (quartiles)",
    "without optimizer, ms",
    "predicted, ms",
    "predicted ÷ measured",
    "collectives",
    "bytes",
)


def page(found: BenchResult) -> str:
    """The page of a comparison, with its timelines if it has some."""
    ranked = sorted(found.figures, key=lambda one: statistics.median(one.seconds))
    facts = ", ".join(f"{name} {value}" for name, value in found.facts.items())
    rounds = len(ranked[0].seconds)
    parts = [
        f"<p>{safe(found.title)}. A step is a forward, a backward and SGD, on the slowest rank; all contenders take "
        "turns, "
        f"{rounds} rounds. Predicted with the profile {safe(found.profile.name)}. "
        f'<span class="soft">{safe(facts)}</span></p>',
        "<h2>Steps</h2>",
        '<p class="soft">Milliseconds of forward and backward.</p>',
        _picture(ranked),
        f'<div class="wide">{_table(found, ranked)}</div>',
    ]
    if found.timelines:
        parts += [
            f"<h2>What runs when: {safe(found.case.traced)}</h2>",
            "<p>A further step of this contender, on rank 0.</p>",
            totals(found.timelines),
            lanes_figure("Measured and predicted", beside(found.timelines)),
        ]
    return sheet_of(f"Fusion of {found.case.model}", "\n".join(parts), STYLE, SCRIPT if found.timelines else "")


def _table(found: BenchResult, ranked: Sequence[ContenderFigures]) -> str:
    head = "".join(f'<th scope="col"{" class=number" if i else ""}>{name}</th>' for i, name in enumerate(_HEAD))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(_rows(found, ranked))}</tbody></table>"


def _rows(found: BenchResult, ranked: Sequence[ContenderFigures]) -> Iterator[str]:
    for one in ranked:
        predicted = ("", "")
        if one.predicted is not None:
            predicted = (f"{1e3 * one.predicted:.1f}", f"{one.predicted_over_measured:.2f}")
        cells = (
            spread(one.seconds),
            quartiles(found.ratios(one)),
            spread(one.computed),
            *predicted,
            str(one.collectives),
            human(one.bytes),
        )
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        yield f'<tr><th scope="row">{safe(one.name)}</th>{numbers}</tr>'


def _picture(ranked: Sequence[ContenderFigures]) -> str:
    """Bars of the forward and backward, measured with its quartiles and predicted. (The slowest step may take many
    times the median if other processes run.)"""
    middles = [three_quartiles(one.computed) for one in ranked]
    most = max([high for _, _, high in middles] + [one.predicted or 0.0 for one in ranked]) or 1.0
    high = _ROW * len(ranked) + 26
    said = "Milliseconds of forward and backward: measured with quartiles, and predicted"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{said}" viewBox="0 0 {_LEFT + _WIDE + 90:g} '
        f'{high:g}" font-family="ui-sans-serif, system-ui, sans-serif" font-size="12" '
        'style="width:100%;max-width:960px">',
        f"<title>{said}</title>",
    ]
    for row, (one, middle) in enumerate(zip(ranked, middles, strict=True)):
        lines += _bars(one, middle, _ROW * row + 4, _WIDE / most)
    for x, (fill, outline), name in (
        (_LEFT, _MEASURED, "measured, with quartiles"),
        (_LEFT + 190, _PREDICTED, "predicted"),
    ):
        lines.append(
            f'<rect x="{x:g}" y="{high - 18:g}" width="11" height="11" fill="{fill}" stroke="{outline}"/>'
            f'<text x="{x + 16:g}" y="{high - 8:g}" fill="currentColor">{name}</text>'
        )
    return "\n".join([*lines, "</svg>"])


def _bars(one: ContenderFigures, middle: Sequence[float], top: float, scale: float) -> Iterator[str]:
    low, median, high = middle
    yield f'<text x="{_LEFT - 8:g}" y="{top + 15:g}" text-anchor="end" fill="currentColor">{safe(one.name)}</text>'
    yield _bar(top, 14, median * scale, _MEASURED)
    yield (
        f'<line x1="{_LEFT + low * scale:.2f}" x2="{_LEFT + high * scale:.2f}" y1="{top + 7:g}" y2="{top + 7:g}" '
        f'stroke="{_WHISKER}" stroke-width="2"/>'
    )
    yield (f'<text x="{_LEFT + high * scale + 6:.2f}" y="{top + 12:g}" fill="currentColor">{1e3 * median:.1f}</text>')
    if one.predicted is not None:
        yield _bar(top + 16, 8, one.predicted * scale, _PREDICTED)


def _bar(top: float, tall: float, wide: float, colour: tuple[str, str]) -> str:
    fill, outline = colour
    return (
        f'<rect x="{_LEFT:g}" y="{top:g}" width="{max(wide, 0.75):.2f}" height="{tall:g}" fill="{fill}" '
        f'stroke="{outline}" stroke-width="0.75"/>'
    )
