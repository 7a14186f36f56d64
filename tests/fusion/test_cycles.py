from __future__ import annotations

from graphlib import TopologicalSorter

from hypothesis import given
from hypothesis import strategies as st

from partway.fusion.cycles import split_cycles


def test_independent_members_stay_together():
    assert split_cycles(((0, 1, 2), (3, 4)), [set()] * 5) == ((0, 1, 2), (3, 4))


def test_member_that_needs_another_of_its_group_starts_a_new_piece():
    assert split_cycles(((0, 1, 2, 3),), [set(), set(), {0}, set()]) == ((0, 1), (2, 3))


def test_two_groups_that_would_wait_for_each_other_are_parted():
    # 1 needs 0, and 2 needs 3: {0, 2} and {1, 3} are each free of cycles, but not both.
    assert split_cycles(((0, 2), (1, 3)), [set(), {0}, {3}, set()]) == ((0, 2), (1,), (3,))


def test_need_through_another_group_counts():
    # 1 needs 0 and 3 needs 2; with 1 and 2 together, 3 needs 0.
    assert split_cycles(((1, 2), (0, 3)), [set(), {0}, set(), {2}]) == ((1, 2), (0,), (3,))


@st.composite
def proposals(draw):
    count = draw(st.integers(1, 12))
    needs = []
    for i in range(count):
        direct = draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else set()
        needs.append(direct.union(*(needs[j] for j in direct)))
    label = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    groups = [tuple(i for i in range(count) if label[i] == k) for k in range(4)]
    return tuple(positions for positions in groups if positions), needs


@given(proposals())
def test_pieces_hold_each_member_once_in_order_and_can_be_run_one_after_another(proposal):
    groups, needs = proposal
    pieces = split_cycles(groups, needs)
    assert [i for piece in pieces for i in piece] == [i for positions in groups for i in positions]
    assert all(any(set(piece) <= set(positions) for positions in groups) for piece in pieces)
    owner = {i: piece for piece in pieces for i in piece}
    assert all(i not in needs[j] for piece in pieces for i in piece for j in piece)
    order = TopologicalSorter({piece: {owner[j] for i in piece for j in needs[i]} for piece in pieces})
    assert set(order.static_order()) == set(pieces)  # raises CycleError if one waits for itself
