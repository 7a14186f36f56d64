"""Schedules of pipelines: their bubbles and microbatches in flight beside formulas, and those of torch."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules

from partway.propagation.pipeline.actions import ActionKind, PipelineSchedule, StageAction, Stages
from partway.propagation.pipeline.orders import gpipe, listed, one_forward_one_backward
from partway.propagation.pipeline.play import Times, played

SIZES = [(4, 8), (8, 16), (16, 64)]


def of(placed, orders, microbatches, seconds=3.0):
    """What the schedule takes if all stages of a device together take `seconds` for a microbatch."""
    each = seconds / 3 / placed.chunks
    times = Times.equal(placed.stages, each, each, each)
    schedule = orders(placed, microbatches, times)
    assert sorted(action for order in schedule.orders for action in order) == every(placed, microbatches, schedule)
    return played(schedule, times)


def every(placed, microbatches, schedule):
    """Every action that a batch needs, once."""
    kinds = {action.kind for action in schedule.orders[0]}
    assert kinds in ({"F", "B"}, {"F", "I", "W"})
    return sorted(StageAction(k, s, m) for k in kinds for s in range(placed.stages) for m in range(microbatches))


@pytest.mark.parametrize(("p", "m"), [*SIZES, (3, 7), (4, 2), (1, 3)])
def test_gpipe_and_1f1b_wait_as_long_and_hold_all_microbatches_or_few(p, m):
    for orders, most in ((gpipe, m), (one_forward_one_backward, min(p, m))):
        found = of(Stages(p), lambda placed, many, _, orders=orders: orders(placed, many), m)
        assert found.bubble == pytest.approx(3 * (p - 1))
        assert max(found.in_flight) == most


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("v", [2, 4])
def test_interleaved_stages_wait_a_part_of_that(p, m, v):
    found = of(Stages(p, v), lambda placed, many, _: one_forward_one_backward(placed, many), m)
    assert found.bubble == pytest.approx(3 * (p - 1) / v)
    assert max(found.in_flight) == pytest.approx(p + (p - 1) / v)


@pytest.mark.parametrize(("p", "m"), [*SIZES, (3, 7), (4, 2), (1, 3)])
@pytest.mark.parametrize("placed", [(1, False), (2, False), (2, True)], ids=["", "chunks", "vee"])
def test_where_weights_wait_no_device_does_but_at_the_start(p, m, placed):
    chunks, vee = placed
    found = of(Stages(p, chunks, vee), lambda placed, many, times: listed(placed, many, times, p), m)
    assert found.bubble <= (p - 1) / chunks * max(1, 3 * p / m - 2) + 1e-9
    assert max(found.in_flight) <= p


@pytest.mark.parametrize(("p", "m", "v"), [(4, 6, 2), (3, 7, 3), (4, 2, 2), (8, 20, 2)])
def test_interleaved_stages_take_any_number_of_microbatches(p, m, v):
    found = of(Stages(p, v), lambda placed, many, _: one_forward_one_backward(placed, many), m)
    alone = of(Stages(p), lambda placed, many, _: one_forward_one_backward(placed, many), m)
    assert found.bubble <= alone.bubble
    assert max(found.in_flight) <= p + (p - 1) / v + 1


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(
    ("name", "chunks", "vee"),
    [("Interleaved1F1B", 2, False), ("InterleavedZeroBubble", 2, False), ("ZBVZeroBubble", 2, True)],
)
def test_no_schedule_of_torch_waits_less(p, m, name, chunks, vee):
    placed = Stages(p, chunks, vee)
    theirs = PipelineSchedule(placed, m, tuple(torchs(name, placed, m, device) for device in range(p)))
    times = Times.equal(placed.stages, *[1 / chunks] * 3)
    split = "Zero" in name
    ours = listed(placed, m, times, p) if split else one_forward_one_backward(placed, m)
    assert played(ours, times).bubble <= played(theirs, times).bubble + 1e-9


KINDS = dict(zip(("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"), ActionKind, strict=True))


def torchs(name, placed, microbatches, device):
    """The actions of one device in torch's schedule, made of stages that compute nothing."""
    stages = [
        SimpleNamespace(
            group_rank=device, group_size=placed.devices, stage_index=stage, num_stages=placed.stages,
            is_first=stage == 0, is_last=stage == placed.stages - 1, has_backward=True, group=None, submod=None,
            device="cpu",
        )
        for stage in placed.of(device)
    ]  # fmt: skip
    its = schedules.get_schedule_class(name)(stages, microbatches, loss_fn=lambda output, _: output)
    flat = [part for each in its.pipeline_order[device] if each is not None for part in each.sub_actions or (each,)]
    computed = [each for each in flat if each.computation_type.name in KINDS]
    return tuple(StageAction(KINDS[c.computation_type.name], c.stage_index, c.microbatch_index) for c in computed)


def test_the_first_that_may_start_runs_first_by_the_real_times():
    """A slow last stage: its device never waits after its first forward."""
    placed, times = Stages(3), Times((1.0, 1.0, 4.0), (1.0, 1.0, 4.0), (1.0, 1.0, 4.0))
    runs = played(listed(placed, 8, times, 3), times).runs[2]
    assert runs[0].start == 2.0
    assert runs[-1].end == 2.0 + 8 * 12
