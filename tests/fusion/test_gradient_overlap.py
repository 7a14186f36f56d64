from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from overlap_cases import contiguous_within_keys, every_index, members, offered, schedules, the_least
from random_examples import examples

from partway.fusion import by_index, by_size
from partway.fusion.events import Compute, GradientEvents, Offer, Send, seconds
from partway.fusion.gradient_overlap import best_groups, search


@examples(200)
@given(schedules())
def test_the_search_finds_the_least_of_all_groups_that_are_contiguous_within_their_keys(problem):
    groups, proved = search(problem, 10**6, math.inf, tied=False)
    assert proved
    least = the_least(problem, contiguous_within_keys(problem.members))
    assert seconds(problem, groups) == pytest.approx(least, rel=1e-9)


@examples(200)
@given(schedules())
def test_tied_it_finds_the_least_of_every_index(problem):
    groups, proved = search(problem, 10**6, math.inf, tied=True)
    indices = [by_index.group(problem.members, ends) for ends in every_index(len(problem.members))]
    assert proved
    assert set(groups) in map(set, indices)
    assert seconds(problem, groups) == pytest.approx(the_least(problem, indices), rel=1e-9)


@examples(200)
@given(schedules())
def test_no_index_and_no_size_makes_gradients_end_earlier_than_the_best_groups(problem):
    found = problem.members
    groups = best_groups(problem)
    assert sorted(i for group in groups for i in group) == list(range(len(found)))
    assert all(list(group) == sorted(group) and len({found[i].key for i in group}) == 1 for group in groups)
    others = [by_index.group(found, ends) for ends in every_index(len(found))]
    others += [by_size.group(found, limit) for limit in range(sum(member.bytes for member in found) + 1)]
    assert seconds(problem, groups) <= the_least(problem, others) * (1 + 1e-9)


@given(schedules("a"), st.integers(1, 3))
def test_a_search_of_few_states_finds_less_than_what_is_known_and_proves_no_more_than_is_true(problem, width):
    known = seconds(problem, (tuple(range(len(problem.members))),))
    groups, proved = search(problem, width, known, tied=False)
    least = the_least(problem, contiguous_within_keys(problem.members))
    if groups is not None:
        assert seconds(problem, groups) < known
    if proved:
        found = known if groups is None else seconds(problem, groups)
        assert found == pytest.approx(least, rel=1e-9)


def test_gradients_that_are_hidden_anyway_are_sent_in_few_messages():
    found = members([1] * 6, "a" * 6)
    costs = {found[0].key: (1.0, 1.0)}
    # The last is ready long after the others, and by itself ends soonest.
    assert best_groups(offered(found, [0, 1, 2, 3, 4, 90], costs)) == ((0, 1, 2, 3, 4), (5,))


def test_one_message_is_best_where_waiting_costs_most():
    found = members([1] * 4, "aaaa")
    assert best_groups(offered(found, [0.0] * 4, {found[0].key: (5.0, 0.1)})) == ((0, 1, 2, 3),)


def test_a_gradient_is_sent_before_a_collective_that_computing_waits_for_only_where_there_is_time():
    found = members([4, 4], "aa")
    costs = {found[0].key: (1.0, 1.0)}

    def groups(free):  # seconds between the first gradient and the collective that computing waits for
        events = [Offer(0), Compute(free), Send(0, 1.0), Compute(9.0, (0,)), Offer(1)]
        return best_groups(GradientEvents(found, costs, tuple(events)))

    assert groups(6.0) == ((0,), (1,))
    assert groups(0.0) == ((0, 1),)


def test_without_members_nothing_ends():
    assert best_groups(GradientEvents((), {}, (Compute(1.0),))) == ()
