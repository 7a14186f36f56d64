"""How dims are cut: slices that are not all full, and windows over their edges."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partway.strategy.cut import REPEATS, Cut, SliceWindow

CUTS = st.builds(Cut, st.integers(1, 40), st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
FILLS = st.sampled_from([0.0, -1.5, float("-inf"), *REPEATS])
PAD = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}  # as numpy calls them


@st.composite
def windows(draw):
    """Windows of any ranges; where elements repeat, as far beyond the ends as torch.nn.functional.pad goes."""
    cut, fill = draw(CUTS), draw(FILLS)
    far = {"reflect": cut.size - 1, "circular": cut.size}.get(fill, 9)
    ends = st.integers(-far, cut.size + far)
    spans = tuple(tuple(sorted((draw(ends), draw(ends)))) for _ in cut.spans)
    width = max(stop - start for start, stop in spans) + draw(st.integers(0, 2))
    return SliceWindow(draw(st.integers(0, 3)), cut, spans, max(width, 1), fill, draw(st.booleans()))


# -- Slices


@given(st.integers(1, 60), st.integers(1, 9))
def test_one_axis_cuts_as_chunk_does(size, count):
    cut, dim = Cut(size, (count,)), torch.arange(size)
    parts = [dim[start:stop].tolist() for start, stop in cut.spans]
    chunks = [part.tolist() for part in dim.chunk(count)]
    assert parts == chunks + [[]] * (count - len(chunks))
    assert cut.width == len(chunks[0])


@given(CUTS)
def test_slices_cover_the_dim_in_order_and_none_is_wider_than_the_first(cut):
    places = [place for start, stop in cut.spans for place in range(start, stop)]
    assert places == list(range(cut.size))
    assert len(cut.spans) == np.prod(cut.axes)
    assert all(0 <= stop - start <= cut.width for start, stop in cut.spans)
    assert cut.even == all(stop - start == cut.width for start, stop in cut.spans)


@given(CUTS)
def test_an_axis_cuts_what_the_axes_before_it_left(cut):
    outer = Cut(cut.size, cut.axes[:1])
    expected = []
    for start, stop in outer.spans:
        inner = Cut(outer.width, cut.axes[1:]).spans if cut.axes[1:] else ((0, outer.width),)
        expected += [(min(start + a, stop), min(start + b, stop)) for a, b in inner]
    assert cut.spans == tuple(expected)


@pytest.mark.parametrize(
    ("size", "axes", "width", "spans", "even"),
    [
        (28, (8,), 4, ((0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 24), (24, 28), (28, 28)), False),
        (8, (2, 2), 2, ((0, 2), (2, 4), (4, 6), (6, 8)), True),
        (7, (2, 2), 2, ((0, 2), (2, 4), (4, 6), (6, 7)), False),
        (5, (2, 2), 2, ((0, 2), (2, 3), (3, 5), (5, 5)), False),
        (3, (), 3, ((0, 3),), True),
    ],
)
def test_the_slices_of_some_cuts(size, axes, width, spans, even):
    cut = Cut(size, axes)
    assert (cut.width, cut.spans, cut.even) == (width, spans, even)


@given(CUTS)
def test_a_cut_is_what_its_text_says(cut):
    assert Cut.of_text(str(cut)) == cut


# -- Windows


def held(window):
    """What each rank has of a dim whose elements are 0, 1, 2, ..."""
    return [list(range(start, stop)) for start, stop in window.cut.spans]


def made(window, position):
    """The window of one rank as its strips put it together, None where they leave it to be filled."""
    start, stop = window.spans[position]
    found = [None] * (stop - start)
    for strip in window.strips(position):
        for i in range(strip.count):
            assert found[strip.at + i] is None
            found[strip.at + i] = held(window)[strip.source][strip.start + i * strip.step]
    return found


def wanted(window, position):
    """The window of one rank of the dim as numpy pads it."""
    start, stop = window.spans[position]
    size, far = window.cut.size, max(map(abs, (start, stop)))
    beyond = {"mode": PAD[window.fill]} if window.fill in PAD else {"constant_values": -1}
    padded = np.pad(np.arange(size), (far, far), **beyond).tolist()
    return [None if element < 0 else element for element in padded[start + far : stop + far]]


@given(windows())
def test_a_window_is_made_of_the_elements_that_lie_there(window):
    for position in range(len(window.spans)):
        assert made(window, position) == wanted(window, position)


@given(windows())
def test_strips_follow_one_another(window):
    for position in range(len(window.spans)):
        strips = window.strips(position)
        assert all(a.at + a.count <= b.at for a, b in pairwise(strips))
        assert all(strip.count >= 1 and strip.step in (-1, 0, 1) for strip in strips)


@given(windows())
def test_the_busiest_rank_is_counted(window):
    ranks = range(len(window.spans))
    moved = [(strip, to) for to in ranks for strip in window.strips(to) if strip.source != to]
    sent = [sum(strip.rows for strip, _ in moved if strip.source == rank) for rank in ranks]
    returned = [sum(strip.rows for strip, to in moved if to == rank) for rank in ranks]
    assert window.rows == (max(sent), max(returned))
    assert window.offsets == len({to - strip.source for strip, to in moved})


@given(windows())
def test_a_window_is_local_where_every_rank_has_it_at_one_place(window):
    place = window.local
    full = [(i, span) for i, span in enumerate(window.spans) if span[0] < span[1]]
    if place is None or not full:
        return
    assert place + window.width <= window.cut.width
    for i, (start, stop) in full:
        assert wanted(window, i) == held(window)[i][place : place + stop - start]


def test_the_middle_of_slices_is_local_and_what_reaches_over_an_edge_is_not():
    cut = Cut(12, (3,))
    assert SliceWindow(0, cut, ((1, 3), (5, 7), (9, 11)), 2).local == 1
    assert SliceWindow(0, cut, ((1, 3), (5, 7), (12, 12)), 2).local == 1
    assert SliceWindow(0, cut, ((1, 3), (4, 6), (9, 11)), 2).local is None
    assert SliceWindow(0, cut, ((0, 5), (4, 9), (8, 12)), 5).local is None
    assert SliceWindow(0, cut, ((3, 4), (7, 8), (11, 12)), 2).local is None


@given(windows())
def test_a_window_is_what_its_text_says(window):
    assert SliceWindow.of_text(str(window)) == window


def test_beyond_the_ends_is_a_number_or_zero_where_elements_repeat():
    cut = Cut(4, (2,))
    assert SliceWindow(0, cut, cut.spans, 2, 3.5).filled == 3.5
    assert SliceWindow(0, cut, cut.spans, 2, "reflect").filled == 0.0


def test_one_element_over_and_over_is_one_row():
    window = SliceWindow(0, Cut(4, (2,)), ((-3, 2), (2, 7)), 5, "replicate")
    assert [(s.source, s.start, s.count, s.step, s.rows) for s in window.strips(1)] == [
        (1, 0, 2, 1, 2),
        (1, 1, 3, 0, 1),
    ]
    assert window.rows == (0, 0)
