from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partway.fusion import Fusion, FusionMode, Member, by_index, group
from partway.strategy.errors import ContextError


def members(keys):
    return [Member(i, "P", "R", (axis,), torch.float32, 4) for i, axis in enumerate(keys)]


def test_20_35_makes_the_first_20_the_next_15_and_the_rest():
    groups = group(members(["dp"] * 50), Fusion(FusionMode.INDEX, (20, 35)))
    assert groups == (tuple(range(20)), tuple(range(20, 35)), tuple(range(35, 50)))


def test_segment_with_several_keys_is_a_group_for_each():
    assert by_index.group(members("abaabb"), [3]) == ((0, 2), (1,), (3,), (4, 5))


def test_index_equal_to_the_count_leaves_no_rest():
    assert by_index.group(members("aaaa"), [2, 4]) == ((0, 1), (2, 3))


def test_too_large_index_is_rejected_naming_how_many_there_are():
    with pytest.raises(ContextError, match=r"index \[2, 5, 9\] goes beyond the 4 gradient AllReduces of this program"):
        by_index.group(members("aaaa"), [2, 5, 9])
    with pytest.raises(ContextError, match=r"leave out 5, 9: what is left after the last index is one more group"):
        by_index.group(members("aaaa"), [2, 5, 9])


def test_program_without_collectives_has_no_groups_whatever_the_indices():
    assert by_index.group([], [20, 35]) == ()


@given(st.lists(st.sampled_from("ab"), min_size=1), st.data())
def test_each_member_once_in_order_and_only_with_its_segment_and_key(keys, data):
    found = members(keys)
    ends = sorted(data.draw(st.sets(st.integers(1, len(found)), min_size=1)))
    groups = by_index.group(found, ends)
    assert sorted(i for positions in groups for i in positions) == list(range(len(found)))
    belongs = [(sum(end <= i for end in ends), key) for i, key in enumerate(keys)]
    for positions in groups:
        assert list(positions) == sorted(positions)
        assert len({belongs[i] for i in positions}) == 1
    assert len(groups) == len(set(belongs))
