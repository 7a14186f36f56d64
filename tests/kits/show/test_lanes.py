"""Lanes of bars: where they lie, what is said of them, and that a name is only a name."""

from __future__ import annotations

from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from partway.show.lanes import COLOURS, Lane, LaneSpan, lanes_figure, lanes_svg

SVG = "{http://www.w3.org/2000/svg}"
BAD = "</script><img src=x onerror=alert(1)>"


def root(*lanes: Lane) -> ElementTree.Element:
    return ElementTree.fromstring(lanes_svg(lanes))


def bars(of: ElementTree.Element) -> list[tuple[float, float, float]]:
    """The place and the width of each bar, and how far down it is."""
    rects = [group.find(f"{SVG}rect") for group in of.iter(f"{SVG}g") if group.get("class") == "span"]
    return [tuple(float(rect.get(key, "")) for key in ("x", "width", "y")) for rect in rects if rect is not None]  # type: ignore[misc]


def test_bars_have_the_proportions_of_their_seconds() -> None:
    spans = (LaneSpan("a", 0.0, 0.25), LaneSpan("b", 0.25, 0.5), LaneSpan("c", 0.75, 0.25))
    assert bars(root(Lane("computing", spans))) == [(210.0, 250.0, 26.0), (460.0, 500.0, 26.0), (960.0, 250.0, 26.0)]


def test_what_runs_at_the_same_time_is_drawn_below_and_never_more_than_six_deep() -> None:
    together = tuple(LaneSpan(str(i), i * 1e-6, 1.0) for i in range(9))
    assert [y for _, _, y in bars(root(Lane("over dp", together)))] == [26, 46, 66, 86, 106, 126, 26, 46, 66]
    after = (LaneSpan("a", 0.0, 1.0), LaneSpan("b", 1.0, 1.0))
    assert {y for _, _, y in bars(root(Lane("over dp", after)))} == {26}


def test_each_bar_says_its_name_kind_times_and_what_more_there_is() -> None:
    span = LaneSpan("convert", 0.001, 0.002, "AllReduce", "1.5 MB over dp")
    said = "convert (AllReduce): 2 ms, from 1 ms on; 1.5 MB over dp"
    drawn = root(Lane("dp", (span,)))
    assert said in [title.text for title in drawn.iter(f"{SVG}title")]
    assert said in [group.get("aria-label") for group in drawn.iter(f"{SVG}g")]
    assert LaneSpan("view", 0.0, 0.0).said == "view: 0 us, from 0 us on"


def test_a_name_stands_in_a_bar_that_has_room_for_it() -> None:
    drawn = root(Lane("computing", (LaneSpan("a_long_name", 0.0, 1.0), LaneSpan("a_long_name", 1.0, 0.001))))
    texts = [text for text in drawn.iter(f"{SVG}text") if text.text == "a_long_name"]
    assert [text.get("visibility") for text in texts] == [None, "hidden"]


@pytest.mark.parametrize(
    ("seconds", "numbers"),
    [
        (0.05, ["0 ms", "10 ms", "20 ms", "30 ms", "40 ms", "50 ms"]),
        (8.0, [f"{i} s" for i in range(9)]),
        (3e-6, ["0.0 us", "0.5 us", "1.0 us", "1.5 us", "2.0 us", "2.5 us", "3.0 us"]),
    ],
)
def test_the_axis_has_round_numbers(seconds: float, numbers: list[str]) -> None:
    axis = next(g for g in root(Lane("x", (LaneSpan("a", 0.0, seconds),))).iter(f"{SVG}g") if g.get("class") == "axis")
    assert [text.text for text in axis.iter(f"{SVG}text")] == numbers


def test_each_kind_has_a_colour_and_a_word_in_the_legend() -> None:
    kinds = [f"kind {i}" for i in range(len(COLOURS) + 1)]
    spans = tuple(LaneSpan("a", float(i), 1.0, kind) for i, kind in enumerate(kinds))
    drawn = root(Lane("x", spans), Lane("y", (LaneSpan("b", 0.0, 1.0),)))
    fills = [rect.get("fill") for rect in drawn.iter(f"{SVG}rect")][: len(kinds)]
    assert fills == [fill for fill, _ in COLOURS] + [COLOURS[0][0]]
    assert [text.text for text in drawn.iter(f"{SVG}text")][-len(kinds) :] == kinds


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("fill", "outline"), COLOURS)
def test_colours_have_the_contrast_of_wcag_aa(fill: str, outline: str) -> None:
    assert contrast(fill, "#111111") >= 4.5
    assert contrast(outline, "#ffffff") >= 4.5
    assert contrast(fill, "#1b1b1f") >= 4.5


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]


def test_a_name_with_markup_is_only_a_name() -> None:
    page, seen = lanes_figure(BAD, [Lane(BAD, (LaneSpan(BAD, 0.0, 1.0, BAD, BAD),))]), _Elements()
    seen.feed(page)
    assert not {"img", "script"} & set(seen.tags)
    assert BAD not in page
    assert "&lt;/script&gt;" in page


def test_what_cannot_be_printed_is_shown_as_such() -> None:
    drawn = lanes_svg([Lane("a\0b", (LaneSpan("\ud800\n", 0.0, 1.0),))])
    assert "a�b" in drawn
    assert "��" in drawn
    drawn.encode()


def test_a_figure_has_a_table_with_a_row_for_each_bar() -> None:
    figure = lanes_figure("One step", [Lane("dp", (LaneSpan("convert", 0.001, 0.002, "AllReduce", "1.5 MB"),))])
    assert "As a table: 1 row" in figure
    row = '<tr><td>dp</td><th scope="row">convert</th><td>AllReduce</td><td>1 ms</td><td>2 ms</td><td>1.5 MB</td></tr>'
    assert row in figure


@pytest.mark.parametrize("lanes", [[], [Lane("computing", ())]])
def test_where_nothing_ran_it_says_so(lanes: list[Lane]) -> None:
    assert lanes_figure("One step", lanes) == (
        '<figure class="lanes"><figcaption>One step</figcaption><p>Nothing ran.</p></figure>'
    )
    ElementTree.fromstring(lanes_svg(lanes))
