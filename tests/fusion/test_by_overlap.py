from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partway.fusion import Member, by_index, by_overlap, by_size

SECONDS = st.integers(0, 20).map(float)


def members(sizes, keys):
    return [
        Member(i, "P", "R", (key,), torch.float32, size) for i, (size, key) in enumerate(zip(sizes, keys, strict=True))
    ]


def seconds(group, found, costs):
    waiting, per_byte = costs[found[group[0]].key]
    return waiting + per_byte * sum(found[i].bytes for i in group)


def end_of_gradients(groups, found, times, costs):
    """When the lane ends: a group waits for its last member and for the groups whose last members came before."""
    lane = 0.0
    for group in sorted(groups, key=lambda group: group[-1]):
        lane = max(lane, times[group[-1]]) + seconds(group, found, costs)
    return lane


def use_of_weights(ends, found, times, costs):
    """When the last weight is used: the weights of a segment are issued when the segment before it is first used."""
    clock = issued = lane = used_before = 0.0
    for start, end in itertools.pairwise([0, *ends]):
        for group in by_index.group(found[start:end], [end - start]):
            lane = max(lane, issued) + seconds([start + i for i in group], found, costs)
        clock = issued = max(clock + times[start] - used_before, lane)
        used_before = times[start]
    return clock + times[-1] - used_before


def every_index(count):
    for size in range(count):
        for inner in itertools.combinations(range(1, count), size):
            yield (*inner, count)


@st.composite
def problems(draw, keys="ab"):
    count = draw(st.integers(1, 8))
    found = members(
        draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)),
        draw(st.lists(st.sampled_from(keys), min_size=count, max_size=count)),
    )
    times = sorted(draw(st.lists(SECONDS, min_size=count, max_size=count)))
    costs = {member.key: (draw(SECONDS), draw(SECONDS)) for member in {m.axes: m for m in found}.values()}
    return found, times, costs


@settings(deadline=None)
@given(problems())
def test_no_index_makes_gradients_end_earlier_than_the_ends_that_are_found(problem):
    found, times, costs = problem
    ends = by_overlap.ready(found, times, costs)
    assert list(ends) == sorted(set(ends))
    assert ends[-1] == len(found)
    best = min(end_of_gradients(by_index.group(found, e), found, times, costs) for e in every_index(len(found)))
    assert end_of_gradients(by_index.group(found, ends), found, times, costs) == pytest.approx(best, rel=1e-9)


@settings(deadline=None)
@given(problems("a"))
def test_of_one_key_no_size_makes_gradients_end_earlier(problem):
    found, times, costs = problem
    ended = end_of_gradients(by_index.group(found, by_overlap.ready(found, times, costs)), found, times, costs)
    for limit in range(sum(member.bytes for member in found) + 1):
        other = end_of_gradients(by_size.group(found, limit), found, times, costs)
        assert ended <= other * (1 + 1e-9)


@settings(deadline=None)
@given(problems())
def test_no_ends_make_weights_be_used_earlier_than_those_that_are_found(problem):
    found, times, costs = problem
    ends = by_overlap.needed(found, times, costs)
    assert list(ends) == sorted(set(ends))
    assert ends[-1] == len(found)
    best = min(use_of_weights(e, found, times, costs) for e in every_index(len(found)))
    assert use_of_weights(ends, found, times, costs) == pytest.approx(best, rel=1e-9)


def test_gradients_that_are_hidden_anyway_are_sent_in_few_messages():
    found = members([1] * 6, "a" * 6)
    costs = {found[0].key: (1.0, 1.0)}
    # The last is ready long after the others, and by itself ends soonest.
    assert by_overlap.ready(found, [0, 1, 2, 3, 4, 90], costs) == (5, 6)


def test_one_message_is_best_where_waiting_costs_most():
    found = members([1] * 4, "aaaa")
    assert by_overlap.ready(found, [0.0] * 4, {found[0].key: (5.0, 0.1)}) == (4,)


def test_weights_are_gathered_while_those_before_are_used():
    found = members([1] * 3, "aaa")
    assert by_overlap.needed(found, [0.0, 10.0, 20.0], {found[0].key: (1.0, 1.0)}) == (1, 2, 3)
    assert by_overlap.needed(found, [0.0, 0.0, 0.0], {found[0].key: (5.0, 0.0)}) == (3,)


def test_without_members_nothing_ends():
    assert by_overlap.ready([], [], {}) == ()
    assert by_overlap.needed([], [], {}) == ()


@given(problems())
def test_proposals_hold_each_member_once_but_for_the_one_that_leaves_all_as_they_are(problem):
    found, times, costs = problem
    *proposed, none = by_overlap.proposals(found, by_overlap.ready(found, times, costs))
    assert none == ()
    for groups in proposed:
        assert sorted(i for group in groups for i in group) == list(range(len(found)))
        assert all(list(group) == sorted(group) and len({found[i].key for i in group}) == 1 for group in groups)


def test_sizes_are_proposed_from_each_alone_to_all_in_one():
    found = members([3 << 20] * 5, "aaaaa")
    proposed = set(by_overlap.proposals(found, (5,)))
    assert {by_size.group(found, size << 20) for size in range(64)} >= proposed - {()}
    assert {tuple((i,) for i in range(5)), (tuple(range(5)),), ()} <= proposed


def test_best_takes_the_first_of_the_least_but_for_rounding():
    seconds = {((0, 1),): 1.0 + 1e-15, ((0,), (1,)): 1.0, (): 2.0}
    assert by_overlap.best(list(seconds), seconds.__getitem__) == ((0, 1),)
    assert by_overlap.best([(), ((0,), (1,))], seconds.__getitem__) == ((0,), (1,))
