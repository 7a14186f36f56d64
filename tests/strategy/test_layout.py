import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partway.strategy import BROADCAST, PARTIAL, REPLICATE, Layout, Mesh, Shard, StrategyError
from partway.strategy.layout import layout

MESH = Mesh({"dp": 2, "tp": 4})


SPLITS = (Shard(0), Shard(1), REPLICATE)


@st.composite
def layouts(draw, placements=(*SPLITS, BROADCAST, PARTIAL)):
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    return Layout(Mesh.of_sizes(tuple(sizes)), tuple(draw(st.sampled_from(placements)) for _ in sizes))


def test_a_dim_split_by_two_axes_is_cut_by_the_first_into_the_largest_pieces():
    both = Layout(MESH, (Shard(0), Shard(0)))
    assert both.splits(2) == (8, 1)
    assert both.axes_of(0) == ("dp", "tp")
    assert [both.slices((16, 3), rank)[0] for rank in (0, 1, 4)] == [slice(0, 2), slice(2, 4), slice(8, 10)]


def test_only_shards_make_a_local_shape_smaller():
    assert Layout(MESH, (BROADCAST, PARTIAL)).local_shape((5, 7)) == (5, 7)
    assert Layout(MESH, (Shard(1), Shard(0))).local_shape((8, 6)) == (2, 3)


@given(layouts(), st.integers(1, 3), st.integers(1, 3))
def test_global_and_local_shapes_are_inverse(one, rows, columns):
    whole = one.global_shape((rows, columns))
    assert one.divides(whole)
    assert one.local_shape(whole) == (rows, columns)


@given(layouts(SPLITS))
def test_the_slices_of_all_ranks_hold_every_element_as_often_as_it_is_replicated(one):
    shape = one.global_shape((2, 3))
    held = torch.zeros(shape)
    for rank in range(one.mesh.device_num):
        held[one.slices(shape, rank)] += 1
    assert (held == one.mesh.device_num / math.prod(one.splits(2))).all()


@given(layouts())
def test_the_gradient_of_a_gradient_is_laid_out_without_broadcast(one):
    assert BROADCAST not in one.dual().placements
    if BROADCAST not in one.placements and PARTIAL not in one.placements:
        assert one.dual() == one


def test_the_factory_returns_the_same_object_for_the_same_value():
    assert layout(MESH, (Shard(0), REPLICATE)) is layout(Mesh({"dp": 2, "tp": 4}), (Shard(0), REPLICATE))


def test_replacing_one_placement_leaves_the_others():
    assert str(Layout.replicated(MESH).replaced(1, Shard(0))) == "[dp:R tp:S0]"
    assert str(Layout.replicated(MESH).replaced(0, BROADCAST)) == "[dp:B tp:R]"


@pytest.mark.parametrize(("shape", "fits"), [((8, 4), True), ((8, 6), False), ((8,), False), ((0, 4), True)])
def test_a_layout_divides_shapes_that_have_its_dims_in_even_parts(shape, fits):
    assert Layout(MESH, (Shard(0), Shard(1))).divides(shape) is fits


@pytest.mark.parametrize(("shape", "fits"), [((2, 5), True), ((2, 3), True), ((8,), False), ((1, 4), False)])
def test_a_layout_fits_shapes_that_have_its_dims_with_elements_to_split(shape, fits):
    assert Layout(MESH, (Shard(0), Shard(1))).fits(shape) is fits


def test_short_slices_are_cut_axis_by_axis_and_leave_the_last_ranks_less():
    one = Layout(MESH, (REPLICATE, Shard(1)))
    assert one.local_shape((8, 6)) == (8, 2)
    assert [one.slices((8, 6), rank)[1] for rank in range(4)] == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 6)]
    both = Layout(MESH, (Shard(0), Shard(0)))
    assert both.local_shape((13,)) == (2,)
    assert [both.slices((13,), rank)[0].stop for rank in range(8)] == [2, 4, 6, 7, 9, 11, 13, 13]


def test_a_shape_without_the_split_dim_is_rejected_naming_layout_and_shape():
    one = Layout(MESH, (REPLICATE, Shard(1)))
    for ask in (one.local_shape, lambda shape: one.slices(shape, 0)):
        with pytest.raises(StrategyError, match=r"the layout \[dp:R tp:S1\] splits dim 1, which the shape \[8\] lacks"):
            ask((8,))


def test_a_wrong_number_of_placements_is_rejected():
    with pytest.raises(StrategyError, match="a layout on the mesh dp=2, tp=4 takes 2 placements, not 1"):
        Layout(MESH, (REPLICATE,))


def test_a_thing_that_is_no_placement_is_rejected():
    with pytest.raises(StrategyError, match="'dp' is not a placement; write Shard"):
        Layout(MESH, ("dp", REPLICATE))


def test_whole_on_an_axis_is_replicate_or_broadcast():
    found = Layout(MESH, (REPLICATE, Shard(0))).with_broadcasts()
    assert list(map(str, found)) == ["[dp:R tp:S0]", "[dp:B tp:S0]"]
    found = Layout.replicated(MESH).with_broadcasts()
    assert list(map(str, found)) == ["[dp:R tp:R]", "[dp:R tp:B]", "[dp:B tp:R]", "[dp:B tp:B]"]
    fixed = Layout(MESH, (BROADCAST, PARTIAL))
    assert fixed.with_broadcasts() == (fixed,)


@given(layouts())
def test_every_rank_holds_the_same_with_broadcast_for_replicate(one):
    assert one.with_broadcasts()[0] == one
    shape = (216, 216)
    for other in one.with_broadcasts():
        for rank in range(one.mesh.device_num):
            assert other.slices(shape, rank) == one.slices(shape, rank)


def test_a_dtensor_is_cut_alike_unless_several_axes_cut_a_dim_whose_first_cut_is_uneven():
    assert Layout(MESH, (REPLICATE, Shard(0))).chunks((50257,))
    assert Layout(MESH, (Shard(0), Shard(0))).chunks((12,))
    assert not Layout(MESH, (Shard(0), Shard(0))).chunks((50257,))
