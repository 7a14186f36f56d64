"""Timelines on a page: a lane for computing and one for each axis, and no more bars than one can see."""

from __future__ import annotations

import pytest

from partway.propagation.program.timeline import Span
from partway.show.page.time import MOST, timeline_sections
from partway.strategy import StrategyError


def spans(count: int = 3) -> list[Span]:
    made = [Span(f"mm_{i}", "forward", "compute", i * 1e-3, 1e-3, {"kind": "aten.mm.default"}) for i in range(count)]
    return [
        *made,
        Span("convert", "forward", "communication", 0.0, 2e-3, {"kind": "all_reduce", "axes": "dp", "bytes": 8}),
    ]


def test_no_spans_make_no_section():
    assert list(timeline_sections({"predicted": (), "measured": []})) == []


def test_each_axis_has_a_lane_and_each_timeline_a_figure():
    (section,) = timeline_sections({"predicted": spans(), "measured": spans(), "none": []})
    assert section.title == "What runs when"
    assert section.body.count("<figure") == 2
    for words in ("One step, predicted", "One step, measured", 'aria-label="computing"', "collectives over dp", "8 B"):
        assert words in section.body
    assert section.body.index("computing") < section.body.index("collectives over dp")


def test_spans_too_short_to_see_are_joined_and_their_time_stays():
    (section,) = timeline_sections({"predicted": spans(20 * MOST)})
    assert section.body.count('class="span"') <= 2 * MOST
    assert "one after another" in section.body
    assert f"mm_{20 * MOST - 1}" in section.body


def test_names_are_text():
    (section,) = timeline_sections({"</script><b>": [Span("</script><b>", "forward", "compute", 0, 1)]})
    assert "</script>" not in section.body
    assert "<b>" not in section.body


@pytest.mark.parametrize("wrong", [5, [1, 2], {"measured": 5}, {"measured": [1]}, {"measured": "spans"}, spans()])
def test_what_is_no_timeline_is_refused(wrong):
    with pytest.raises(StrategyError, match="write a dict from names to lists of Spans"):
        list(timeline_sections(wrong))
