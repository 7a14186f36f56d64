import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partway.strategy import Layout, Mesh, Partial, Replicate, Shard, StrategyError
from partway.strategy.transfer import transfers, within

FIRST, SECOND = Mesh({"tp": 2}, ranks=(0, 1)), Mesh({"tp": 2}, ranks=(2, 3))
placements = st.sampled_from([Replicate(), Shard(0), Shard(1)])
meshes = st.sampled_from([Mesh({"a": 2}, ranks=(0, 1)), Mesh({"a": 2, "b": 2}, ranks=(2, 3, 4, 5)), Mesh({"c": 3})])


@st.composite
def layouts(draw):
    mesh = draw(meshes)
    return Layout(mesh, tuple(draw(placements) for _ in mesh.axes))


def elements(block):
    return itertools.product(*(range(s.start, s.stop) for s in block))


@given(layouts(), layouts(), st.tuples(st.integers(1, 7), st.integers(1, 7)))
def test_each_rank_of_the_target_gets_each_element_of_its_part_once_from_one_that_has_it(source, target, shape):
    found = transfers(source, target, shape)
    for rank in range(target.mesh.device_num):
        got = Counter(element for each in found if each.target == rank for element in elements(each.block))
        assert got == Counter(elements(target.slices(shape, rank)))
    for each in found:
        assert set(elements(each.block)) <= set(elements(source.slices(shape, each.source)))


def test_replicas_take_turns():
    found = transfers(Layout(FIRST, (Replicate(),)), Layout(SECOND, (Shard(0),)), (4, 2))
    assert [(each.source, each.target) for each in found] == [(0, 0), (1, 1)]


def test_a_rank_that_is_on_both_meshes_keeps_what_it_has():
    later = Mesh({"tp": 2}, ranks=(1, 2))
    found = transfers(Layout(FIRST, (Replicate(),)), Layout(later, (Replicate(),)), (4, 2))
    assert [(FIRST.ranks[each.source], later.ranks[each.target]) for each in found] == [(1, 1), (1, 2)]


def test_partial_sums_are_reduced_before_they_go():
    with pytest.raises(StrategyError, match=r"partial sums \(\[tp:P\]\) cannot go to another mesh \(tp=2 on"):
        transfers(Layout(FIRST, (Partial(),)), Layout(SECOND, (Replicate(),)), (4, 2))


def test_a_block_is_found_within_a_part():
    assert within((slice(4, 6), slice(0, 2)), (slice(4, 8), slice(0, 4))) == (slice(0, 2), slice(0, 2))
