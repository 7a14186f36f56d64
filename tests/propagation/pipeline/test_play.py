"""Schedules played: when actions run, and schedules in which devices wait for each other."""

import itertools

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from partway.propagation.pipeline.actions import ActionKind, PipelineSchedule, StageAction, Stages
from partway.propagation.pipeline.orders import gpipe, listed, one_forward_one_backward
from partway.propagation.pipeline.play import Times, played
from partway.strategy.errors import VerifyError


def test_the_example():
    times = Times.equal(2, 1.0, 0.5, 0.5)
    found = played(one_forward_one_backward(Stages(2), 2), times)
    first, second = ({str(run.action).split()[0]: run.start for run in runs} for runs in found.runs)
    assert first == {"F0": 0, "F1": 1, "B0": 3, "B1": 5}
    assert second == {"F0": 1, "B0": 2, "F1": 3, "B1": 4}
    assert (found.seconds, found.bubble, found.in_flight) == (6, 2, (2, 1))


def test_what_is_sent_to_another_device_comes_later():
    times = Times((1.0, 1.0), (1.0, 1.0), (0.0, 0.0), sent=(0.25, 0.0))
    found = played(gpipe(Stages(2), 1), times)
    assert [run.start for runs in found.runs for run in runs] == [0, 3.5, 1.25, 2.25]


def test_devices_that_wait_for_each_other_are_named():
    orders = one_forward_one_backward(Stages(2), 2).orders
    wrong = (orders[0], (orders[1][2], *orders[1][:2], orders[1][3]))  # F1 before F0: the first device waits for B0
    played(PipelineSchedule(Stages(2), 2, wrong), Times.equal(2))
    late = (orders[0][::-1], orders[1])
    with pytest.raises(
        VerifyError, match=r"device 0 waits at B1 of stage 0 for F1 of stage 0, which device 0 does not"
    ):
        played(PipelineSchedule(Stages(2), 2, late), Times.equal(2))


SECONDS = st.floats(0.0, 4.0)


@settings(phases=[Phase.generate], max_examples=60)  # a smaller example says no more, and takes minutes to find
@given(st.data())
def test_any_schedule_of_any_times_runs_to_its_end(data):
    """Each action once, after what it needs; no device does two things at once; bounded by the work of a device."""
    p, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    chunks, vee = data.draw(st.sampled_from([(1, False), (2, False), (3, False), (2, True)]))
    placed = Stages(p, chunks, vee)
    stages = st.lists(SECONDS, min_size=placed.stages, max_size=placed.stages).map(tuple)
    times = Times(*(data.draw(stages) for _ in range(4)))
    schedules = [gpipe(placed, m), listed(placed, m, times, p), listed(placed, m, times, m)]
    if not vee:
        schedules.append(one_forward_one_backward(placed, m))
    for schedule in schedules:
        found = played(schedule, times)
        ended = {run.action: run.end for runs in found.runs for run in runs}
        for runs in found.runs:
            for run in runs:
                for need in run.action.needs(placed.stages):
                    whole = ended.get(need, ended.get(need._replace(kind=ActionKind.BACKWARD)))
                    assert whole <= run.start + 1e-9
            for one, other in itertools.pairwise(runs):
                assert one.end <= other.start + 1e-9
        assert found.seconds >= max(sum(run.end - run.start for run in runs) for runs in found.runs) - 1e-9


def test_actions_need_what_their_stage_reads():
    needs = {
        str(action): [str(need) for need in action.needs(2)]
        for action in itertools.starmap(StageAction, itertools.product(ActionKind, (0, 1), (3,)))
    }
    assert needs == {
        "F3 of stage 0": [],
        "F3 of stage 1": ["F3 of stage 0"],
        "B3 of stage 0": ["F3 of stage 0", "I3 of stage 1"],
        "B3 of stage 1": ["F3 of stage 1"],
        "I3 of stage 0": ["F3 of stage 0", "I3 of stage 1"],
        "I3 of stage 1": ["F3 of stage 1"],
        "W3 of stage 0": ["I3 of stage 0"],
        "W3 of stage 1": ["I3 of stage 1"],
    }
    assert [Stages(2, 2, True).of(device) for device in (0, 1)] == [(0, 3), (1, 2)]
