from __future__ import annotations

from hypothesis import given
from overlap_cases import every_index, members, message, offered, problems

from partway.fusion import by_index
from partway.fusion.events import Compute, GradientEvents, Offer, best, seconds
from partway.fusion.gradient_overlap import best_groups


def end_of_gradients(groups, found, times, costs):
    """When the lane ends: a group waits for its last member and for the groups whose last members came before."""
    lane = 0.0
    for group in sorted(groups, key=lambda group: group[-1]):
        lane = max(lane, times[group[-1]]) + message(group, found, costs)
    return lane


@given(problems())
def test_gradients_are_played_as_the_rule_says(problem):
    found, times, costs = problem
    for ends in every_index(min(len(found), 5)):
        groups = by_index.group(found, ends)
        ended = seconds(offered(found, times, costs), groups)
        assert ended == max(times[-1], end_of_gradients(groups, found, times, costs))


def test_computing_that_reads_a_gradient_stands_back_until_its_group_has_been_issued():
    both = members([4, 4], "aa")
    events = (Compute(1.0), Offer(0), Compute(2.0, (), (0,)), Compute(3.0), Offer(1))
    problem = GradientEvents(both, {both[0].key: (1.0, 1.0)}, events)
    assert seconds(problem, ((0,), (1,))) == 1 + 5 + 2 + 3 + 5
    assert seconds(problem, ((0, 1),)) == 1 + 3 + 9 + 2
    assert best_groups(problem) == ((0, 1),)


def test_best_takes_the_first_of_the_least_but_for_rounding():
    times = {((0, 1),): 1.0 + 1e-15, ((0,), (1,)): 1.0, (): 2.0}
    assert best(list(times), times.__getitem__) == ((0, 1),)
    assert best([(), ((0,), (1,))], times.__getitem__) == ((0,), (1,))
