from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from partway.fusion import Fusion, FusionMode, Member, by_size, group

MB = 1024 * 1024


def members(*sizes, axes=None):
    axes = axes or ["dp"] * len(sizes)
    drawn = enumerate(zip(sizes, axes, strict=True))
    return [Member(i, "P", "R", (axis,), torch.float32, size) for i, (size, axis) in drawn]


def test_group_is_filled_up_to_the_limit_and_a_large_member_is_alone():
    assert by_size.group(members(40, 30, 20, 90, 10), 64) == ((0,), (1, 2), (3,), (4,))


def test_limit_itself_may_be_reached():
    assert by_size.group(members(32, 32, 1), 64) == ((0, 1), (2,))


def test_keys_fill_groups_of_their_own():
    assert by_size.group(members(30, 30, 30, 30, 30, axes="abaab"), 64) == ((0, 2), (1, 4), (3,))


def test_sums_and_maxima_are_no_group():
    found = [Member(i, code, "R", "dp", torch.float32, 8) for i, code in enumerate(["P", "Pmax", "P", "Pmax"])]
    assert by_size.group(found, 64) == ((0, 2), (1, 3))


def test_auto_is_64_mb_and_size_counts_in_mb():
    found = members(*[20 * MB] * 7)
    assert group(found, Fusion(FusionMode.AUTO)) == ((0, 1, 2), (3, 4, 5), (6,))
    assert group(found, Fusion(FusionMode.SIZE, 40)) == ((0, 1), (2, 3), (4, 5), (6,))
    assert group(found, Fusion(FusionMode.SIZE, 39)) == tuple((i,) for i in range(7))


def test_no_members_no_groups():
    assert by_size.group([], 64) == ()


@given(st.lists(st.tuples(st.integers(0, 100), st.sampled_from("ab"))), st.integers(1, 150))
def test_each_member_once_in_order_within_the_limit_and_no_group_ends_early(drawn, limit):
    found = members(*(size for size, _ in drawn), axes=[axis for _, axis in drawn])
    groups = by_size.group(found, limit)
    total = [sum(found[i].bytes for i in positions) for positions in groups]
    assert sorted(i for positions in groups for i in positions) == list(range(len(found)))
    assert [positions[0] for positions in groups] == sorted(positions[0] for positions in groups)
    for positions, size in zip(groups, total, strict=True):
        assert list(positions) == sorted(positions)
        assert len({found[i].key for i in positions}) == 1
        assert size <= limit or len(positions) == 1
    for axis in "ab":
        own = [each for each in zip(groups, total, strict=True) if found[each[0][0]].axes == (axis,)]
        for (_, size), (after, _) in pairwise(own):
            assert size + found[after[0]].bytes > limit


def test_sizes_are_proposed_from_each_alone_to_all_in_one():
    found = members(*[3 * MB] * 5)
    proposed = set(by_size.powers(found))
    assert {by_size.group(found, size << 20) for size in range(64)} >= proposed
    assert {tuple((i,) for i in range(5)), (tuple(range(5)),)} <= proposed


@given(st.lists(st.tuples(st.integers(1, 3 << 20), st.sampled_from("ab")), min_size=1, max_size=12))
def test_sizes_are_those_of_all_whole_numbers_of_megabytes_each_once(drawn):
    sizes, axes = zip(*drawn, strict=True)
    found = members(*sizes, axes=axes)
    every = [by_size.group(found, size << 20) for size in range(1, 40)]
    assert list(by_size.every(found)) == list(dict.fromkeys(every))
