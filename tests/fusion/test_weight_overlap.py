from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from overlap_cases import every_index, members, message, problems

from partway.fusion import by_index
from partway.fusion.weight_overlap import needed


def use_of_weights(ends, found, times, costs):
    """When the last weight is used: the weights of a segment are issued when the segment before it is first used."""
    clock = issued = lane = used_before = 0.0
    for start, end in itertools.pairwise([0, *ends]):
        for group in by_index.group(found[start:end], [end - start]):
            lane = max(lane, issued) + message([start + i for i in group], found, costs)
        clock = issued = max(clock + times[start] - used_before, lane)
        used_before = times[start]
    return clock + times[-1] - used_before


@given(problems())
def test_no_ends_make_weights_be_used_earlier_than_those_that_are_found(problem):
    found, times, costs = problem
    ends = needed(found, times, costs)
    assert list(ends) == sorted(set(ends))
    assert ends[-1] == len(found)
    best = min(use_of_weights(e, found, times, costs) for e in every_index(len(found)))
    assert use_of_weights(ends, found, times, costs) == pytest.approx(best, rel=1e-9)


def test_weights_are_gathered_while_those_before_are_used():
    found = members([1] * 3, "aaa")
    assert needed(found, [0.0, 10.0, 20.0], {found[0].key: (1.0, 1.0)}) == (1, 2, 3)
    assert needed(found, [0.0, 0.0, 0.0], {found[0].key: (5.0, 0.0)}) == (3,)


def test_without_members_nothing_ends():
    assert needed([], [], {}) == ()
