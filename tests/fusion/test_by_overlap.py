from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partway.fusion import Member, by_index, by_overlap, by_size
from partway.fusion.by_overlap import Compute, Gradients, Offer, Send

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


def offered(found, times, costs):
    """The problem of gradients that are ready at `times`, with nothing else on the lane."""
    events = []
    for member, (before, now) in enumerate(itertools.pairwise([0, *times])):
        events += [Compute(now - before), Offer(member)]
    return Gradients(found, costs, tuple(events))


@st.composite
def schedules(draw, keys="abc"):
    """Gradients between computing, other collectives that computing or a gradient waits for, and computing
    that waits for gradients."""
    found, _, costs = draw(problems(keys))
    events, unread, late, sent = [], [], [], 0
    some = st.integers(0, 9).map(float)
    for member in range(len(found)):
        for _ in range(draw(st.integers(0, 3))):
            what = draw(st.sampled_from(["compute", "send", "wait", *["read"] * (member > 0)]))
            if what == "send":
                events.append(Send(sent, draw(SECONDS)))
                unread, sent = [*unread, sent], sent + 1
            elif what == "wait" and unread:
                events.append(Compute(draw(some), (draw(st.sampled_from(unread)),)))
            elif what == "read":
                read = draw(st.sets(st.integers(0, member - 1), min_size=1, max_size=2))
                if draw(st.booleans()):
                    events += [Compute(0.0, (), tuple(sorted(read))), Send(sent, draw(SECONDS), tuple(sorted(read)))]
                    late, sent = [*late, (sent, tuple(sorted(read)))], sent + 1
                elif late:
                    other, read = draw(st.sampled_from(late))
                    events.append(Compute(draw(some), (other,), read))
                else:
                    events.append(Compute(draw(some), (), tuple(sorted(read))))
            else:
                events.append(Compute(draw(SECONDS)))
        waits = unread and draw(st.booleans())
        events.append(Offer(member, (draw(st.sampled_from(unread)),) if waits else ()))
    events.append(Compute(draw(SECONDS)))
    return Gradients(found, costs, tuple(events))


def contiguous_within_keys(found):
    """All groupings in which the groups of each key are contiguous among its members."""
    keys = [[i for i, member in enumerate(found) if member.key == key] for key in {member.key for member in found}]
    parted = [
        [tuple(tuple(of[a:b]) for a, b in itertools.pairwise([0, *ends])) for ends in every_index(len(of))]
        for of in keys
    ]
    return [tuple(itertools.chain(*groups)) for groups in itertools.product(*parted)]


def the_least(problem, groupings):
    return min(by_overlap.seconds(problem, groups) for groups in groupings)


@settings(deadline=None)
@given(problems())
def test_gradients_are_played_as_the_rule_says(problem):
    found, times, costs = problem
    for ends in every_index(min(len(found), 5)):
        groups = by_index.group(found, ends)
        ended = by_overlap.seconds(offered(found, times, costs), groups)
        assert ended == max(times[-1], end_of_gradients(groups, found, times, costs))


@settings(deadline=None, max_examples=200)
@given(schedules())
def test_the_search_finds_the_least_of_all_groups_that_are_contiguous_within_their_keys(problem):
    groups, proved = by_overlap.search(problem, 10**6, math.inf, tied=False)
    assert proved
    least = the_least(problem, contiguous_within_keys(problem.members))
    assert by_overlap.seconds(problem, groups) == pytest.approx(least, rel=1e-9)


@settings(deadline=None, max_examples=200)
@given(schedules())
def test_tied_it_finds_the_least_of_every_index(problem):
    groups, proved = by_overlap.search(problem, 10**6, math.inf, tied=True)
    indices = [by_index.group(problem.members, ends) for ends in every_index(len(problem.members))]
    assert proved
    assert set(groups) in map(set, indices)
    assert by_overlap.seconds(problem, groups) == pytest.approx(the_least(problem, indices), rel=1e-9)


@settings(deadline=None, max_examples=200)
@given(schedules())
def test_no_index_and_no_size_makes_gradients_end_earlier_than_the_best_groups(problem):
    found = problem.members
    groups = by_overlap.best_groups(problem)
    assert sorted(i for group in groups for i in group) == list(range(len(found)))
    assert all(list(group) == sorted(group) and len({found[i].key for i in group}) == 1 for group in groups)
    others = [by_index.group(found, ends) for ends in every_index(len(found))]
    others += [by_size.group(found, limit) for limit in range(sum(member.bytes for member in found) + 1)]
    assert by_overlap.seconds(problem, groups) <= the_least(problem, others) * (1 + 1e-9)


@settings(deadline=None)
@given(schedules("a"), st.integers(1, 3))
def test_a_search_of_few_states_finds_less_than_what_is_known_and_proves_no_more_than_is_true(problem, width):
    known = by_overlap.seconds(problem, (tuple(range(len(problem.members))),))
    groups, proved = by_overlap.search(problem, width, known, tied=False)
    least = the_least(problem, contiguous_within_keys(problem.members))
    if groups is not None:
        assert by_overlap.seconds(problem, groups) < known
    if proved:
        found = known if groups is None else by_overlap.seconds(problem, groups)
        assert found == pytest.approx(least, rel=1e-9)


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
    assert by_overlap.best_groups(offered(found, [0, 1, 2, 3, 4, 90], costs)) == ((0, 1, 2, 3, 4), (5,))


def test_one_message_is_best_where_waiting_costs_most():
    found = members([1] * 4, "aaaa")
    assert by_overlap.best_groups(offered(found, [0.0] * 4, {found[0].key: (5.0, 0.1)})) == ((0, 1, 2, 3),)


def test_a_gradient_is_sent_before_a_collective_that_computing_waits_for_only_where_there_is_time():
    found = members([4, 4], "aa")
    costs = {found[0].key: (1.0, 1.0)}

    def groups(free):  # seconds between the first gradient and the collective that computing waits for
        events = [Offer(0), Compute(free), Send(0, 1.0), Compute(9.0, (0,)), Offer(1)]
        return by_overlap.best_groups(Gradients(found, costs, tuple(events)))

    assert groups(6.0) == ((0,), (1,))
    assert groups(0.0) == ((0, 1),)


def test_computing_that_reads_a_gradient_stands_back_until_its_group_has_been_issued():
    found = members([4, 4], "aa")
    costs = {found[0].key: (1.0, 1.0)}
    events = (Compute(1.0), Offer(0), Compute(2.0, (), (0,)), Compute(3.0), Offer(1))
    problem = Gradients(found, costs, events)
    assert by_overlap.seconds(problem, ((0,), (1,))) == 1 + 5 + 2 + 3 + 5
    assert by_overlap.seconds(problem, ((0, 1),)) == 1 + 3 + 9 + 2
    assert by_overlap.best_groups(problem) == ((0, 1),)


def test_weights_are_gathered_while_those_before_are_used():
    found = members([1] * 3, "aaa")
    assert by_overlap.needed(found, [0.0, 10.0, 20.0], {found[0].key: (1.0, 1.0)}) == (1, 2, 3)
    assert by_overlap.needed(found, [0.0, 0.0, 0.0], {found[0].key: (5.0, 0.0)}) == (3,)


def test_without_members_nothing_ends():
    assert by_overlap.best_groups(Gradients((), {}, (Compute(1.0),))) == ()
    assert by_overlap.needed([], [], {}) == ()


def test_sizes_are_proposed_from_each_alone_to_all_in_one():
    found = members([3 << 20] * 5, "aaaaa")
    proposed = set(by_overlap.proposals(found))
    assert {by_size.group(found, size << 20) for size in range(64)} >= proposed
    assert {tuple((i,) for i in range(5)), (tuple(range(5)),)} <= proposed


@given(st.lists(st.tuples(st.integers(1, 3 << 20), st.sampled_from("ab")), min_size=1, max_size=12))
def test_sizes_are_those_of_all_whole_numbers_of_megabytes_each_once(drawn):
    found = members(*zip(*drawn, strict=True))
    every = [by_size.group(found, size << 20) for size in range(1, 40)]
    assert list(by_overlap.sizes(found)) == list(dict.fromkeys(every))


def test_best_takes_the_first_of_the_least_but_for_rounding():
    seconds = {((0, 1),): 1.0 + 1e-15, ((0,), (1,)): 1.0, (): 2.0}
    assert by_overlap.best(list(seconds), seconds.__getitem__) == ((0, 1),)
    assert by_overlap.best([(), ((0,), (1,))], seconds.__getitem__) == ((0,), (1,))
