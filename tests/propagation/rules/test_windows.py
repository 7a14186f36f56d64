"""What windowed operators read: reaches, the windows that follow from them, and one window for several readers."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from partway.propagation.rules.windows import Halo, Spread, Strided, WholeRows, by_dim, own_slice, place_in, united
from partway.strategy.cut import Cut, SliceWindow

SMALL = st.integers(1, 4)


def reads(run, size, start, stop):
    """The first and the last element of an operand of `size` on which elements [start, stop) of the result depend."""
    x = torch.zeros(1, 1, size, requires_grad=True)
    (found,) = torch.autograd.grad(run(x)[0, 0, start:stop].sum(), x)
    places = found.flatten().nonzero().flatten().tolist()
    return (places[0], places[-1] + 1) if places else None


# -- Reaches


@given(SMALL, SMALL, SMALL, st.integers(0, 3), st.integers(2, 12), st.data())
def test_a_kernel_reaches_what_a_convolution_reads(kernel, stride, dilation, before, size, data):
    extent = dilation * (kernel - 1) + 1
    assume(size + 2 * before >= extent)
    run = lambda x: F.conv1d(x, torch.ones(1, 1, kernel), None, stride, before, dilation)  # noqa: E731
    made = run(torch.zeros(1, 1, size)).shape[-1]
    start = data.draw(st.integers(0, made - 1))
    stop = data.draw(st.integers(start + 1, made))
    begin, end = Strided(extent, stride, before)(start, stop)
    assert end - begin == (stop - start - 1) * stride + extent
    found = reads(run, size, start, stop)
    assert found is None or (begin <= found[0] and found[1] <= end)
    if dilation == 1 and stride <= kernel:  # else there is something between the elements that are read
        assert found in (None, (max(begin, 0), min(end, size)))


@given(SMALL, SMALL, SMALL, st.integers(0, 3), st.integers(2, 8), st.data())
def test_a_range_is_of_what_its_reach_is_spread_over(kernel, stride, dilation, before, size, data):
    extent, ones = dilation * (kernel - 1) + 1, torch.ones(1, 1, kernel)
    made = (size - 1) * stride + extent - 2 * before
    assume(made >= 1)
    start = data.draw(st.integers(0, made - 1))
    stop = data.draw(st.integers(start + 1, made))
    reach = Spread(extent, stride, before)
    begin, end = reach(start, stop)
    x = torch.rand(1, 1, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = F.conv_transpose1d(x, ones.double(), None, stride, before, dilation=dilation)
    window = F.pad(x, (max(-begin, 0), max(end - size, 0)))[..., max(begin, 0) : max(begin, 0) + end - begin]
    local = F.conv_transpose1d(window, ones.double(), None, stride, dilation=dilation)
    place = reach.place(start)
    assert 0 <= place <= place + stop - start <= local.shape[-1]
    torch.testing.assert_close(local[..., place : place + stop - start], whole[..., start:stop])


def test_the_reach_of_some_ranges():
    assert Strided(3, 1, 1)(4, 8) == (3, 9)
    assert Strided(3, 2, 1)(4, 8) == (7, 16)
    assert Strided(1, 1, 2)(0, 4) == (-2, 2)
    assert Spread(3, 2, 1)(16, 32) == (8, 17)
    assert Spread(2, 2)(4, 8) == (2, 4)
    assert Spread(1, 3)(4, 6) == (1, 3)
    assert WholeRows(Spread(2, 2), 5)(4, 8) == (10, 20)


# -- Windows of a halo


def test_a_rank_has_the_reach_of_its_slice_of_the_result():
    window = Halo(0, "s0", Strided(3, 2, 1), 1.5).window(2, Cut(16, (4,)), Cut(8, (4,)))
    assert window == SliceWindow(2, Cut(16, (4,)), ((-1, 4), (3, 8), (7, 12), (11, 16)), 5, 1.5)


def test_short_slices_have_short_windows_of_the_same_width():
    window = Halo(0, "s0", Strided(3, 1, 1)).window(0, Cut(5, (4,)), Cut(5, (4,)))
    assert window.spans == ((-1, 3), (1, 5), (3, 6), (5, 5))
    assert window.width == 4


@given(st.integers(2, 30), st.integers(2, 8), SMALL, SMALL, SMALL)
def test_a_window_is_as_wide_as_the_operator_needs_for_a_full_slice(made, count, extent, stride, before):
    assume(made >= count)
    cut = Cut(made, (count,))
    size = (made - 1) * stride + extent - before
    assume(size >= count)
    window = Halo(0, "s0", Strided(extent, stride, before)).window(0, Cut(size, (count,)), cut)
    assert window.width == (cut.width - 1) * stride + extent
    assert all(stop - start <= window.width for start, stop in window.spans)


def test_windows_of_an_operand_are_found_by_dim():
    row, column, other = (SliceWindow(dim, Cut(4, (2,)), ((0, 3), (1, 4)), 3) for dim in (2, 3, 0))
    assert by_dim({(0, "s0"): row, (0, "s1"): column, (1, "k"): other}, 0) == {2: row, 3: column}


# -- One window for several readers

CUT = Cut(12, (3,))
CLOSE = SliceWindow(0, CUT, ((-1, 5), (3, 9), (7, 13)), 6)
FAR = SliceWindow(0, CUT, ((-2, 6), (2, 10), (6, 14)), 8)


def test_the_larger_window_serves_the_reader_of_the_smaller():
    assert united([{0: CLOSE}, {0: FAR}]) == {0: FAR}
    assert place_in(FAR, CLOSE) == 1
    assert place_in(FAR, own_slice(FAR)) == 2


def test_a_reader_without_a_window_reads_the_slice():
    behind = SliceWindow(0, CUT, ((4, 6), (8, 10), (12, 14)), 2)
    assert united([{0: behind}, {}]) == {0: SliceWindow(0, CUT, ((0, 6), (4, 10), (8, 14)), 6)}


def test_windows_of_several_dims_are_united_by_dim():
    other = SliceWindow(1, CUT, FAR.spans, 8)
    assert united([{0: CLOSE}, {0: FAR, 1: other}]) == {0: FAR, 1: other}


def test_no_window_serves_readers_that_differ_beyond_the_ends():
    assert united([{0: CLOSE}, {0: SliceWindow(0, CUT, FAR.spans, 8, float("-inf"))}]) is None


def test_no_window_serves_readers_that_lie_otherwise_on_each_rank():
    shrinking = SliceWindow(0, CUT, ((0, 5), (3, 8), (6, 11)), 5)
    assert united([{0: CLOSE}, {0: shrinking}]) is None
    assert place_in(CLOSE, shrinking) is None


def test_a_window_that_is_not_inside_has_no_place():
    assert place_in(CLOSE, FAR) is None


def test_ranks_with_nothing_do_not_matter():
    empty = SliceWindow(0, CUT, ((-1, 5), (3, 9), (12, 12)), 6)
    assert place_in(FAR, empty) == 1


@pytest.mark.parametrize("readers", [[{0: CLOSE}, {0: CLOSE}], [{0: CLOSE}]])
def test_equal_windows_are_united_into_themselves(readers):
    assert united(readers) == {0: CLOSE}
