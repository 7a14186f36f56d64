"""The page of `partway bench fusion`: its rows, its picture, and that names are only names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from partway.measure.bench import BenchResult, Case, ContenderFigures, policies
from partway.measure.bench_page import page
from partway.propagation.cost.profile import profile_of
from partway.propagation.program.timeline import COMMUNICATION, COMPUTE, Span
from partway.strategy import StrategyError

BAD = "</script><img src=x onerror=alert(1)>"
STEP = [
    Span("linear", "forward", COMPUTE, 0.0, 0.01, {"kind": "linear"}),
    Span("convert", "backward", COMMUNICATION, 0.01, 0.02, {"kind": "all_reduce", "axes": "dp", "bytes": 3 << 20}),
]


def compared(rounds: int = 3, model: str = "mlp", **changes: object) -> BenchResult:
    """Two contenders with made-up figures, DDP the faster one."""
    case = Case(model, 2, "cpu", rounds, False, policies(12), "profile.json", "overlap", True)
    seconds = tuple(0.01 * (i + 1) for i in range(rounds))
    ours = ContenderFigures("overlap", 3, 3_000_000, tuple(2 * s for s in seconds), seconds, 0.01, 0.002)
    ddp = ContenderFigures("DDP", 2, 2_000_000, seconds, seconds, None, None)
    found = BenchResult(case, profile_of("cpu"), 12, (ours, ddp), {"torch": "0", "cores": 2})
    return replace(found, **changes)  # type: ignore[arg-type]


def rows(text: str) -> list[list[str]]:
    body = text[text.index("<tbody>") : text.index("</tbody>")]
    return [re.findall(r">([^<]*)</t[hd]>", row) for row in body.split("</tr>")[:-1]]


def test_contenders_are_ordered_by_their_steps() -> None:
    assert rows(page(compared())) == [
        ["DDP", "20.0 (10.0-30.0)", "1.000 (1.000-1.000)", "20.0 (10.0-30.0)", "", "", "2", "2 MB"],
        ["overlap", "40.0 (20.0-60.0)", "2.000 (2.000-2.000)", "20.0 (10.0-30.0)", "10.0", "0.50", "3", "3 MB"],
    ]


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_picture_has_a_bar_for_what_was_measured_and_for_what_was_predicted(rounds: int) -> None:
    text = page(compared(rounds))
    drawn = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    bars = list(drawn.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(bars) == 3 + 2  # two measured, one predicted, and the legend


def test_it_says_what_was_compared_and_where() -> None:
    text = page(compared())
    assert "mlp, 12 gradients, 2 processes on cpu. A step is a forward, a backward and SGD" in text
    assert "3 rounds. Predicted with the profile cpu" in text
    assert "torch 0, cores 2" in text


def test_timelines_are_drawn_where_there_are_some() -> None:
    assert "What runs when" not in page(compared())
    assert "<script" not in page(compared())
    text = page(compared(timelines={"predicted": STEP, "measured": STEP}))
    assert "What runs when: overlap" in text
    assert 'aria-label="collectives over dp, measured"' in text
    assert "convert (all_reduce): 20 ms, from 10 ms on; 3.15 MB" in text


def test_a_name_with_markup_is_only_a_name() -> None:
    text = page(compared(model=BAD, timelines={"measured": [replace(STEP[0], name=BAD)]}))
    assert "<img" not in text
    assert text.count("<script") == 1


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    compared().save_html(tmp_path / "page.html")
    with pytest.raises(StrategyError) as error:
        compared().save_html(tmp_path)
    assert str(error.value) == f"could not write the page to {str(tmp_path)!r}: Is a directory"
