"""What things are predicted to cost, by hand-worked examples."""

import pytest
import torch
import torch.nn.functional as F

from partway.propagation.cost import (
    PROFILES,
    WEIGHTS,
    DeviceProfile,
    Level,
    collective_seconds,
    operator_seconds,
    profile_of,
    steps,
    waiting_seconds,
    wire_bytes,
)
from partway.strategy import StrategyError
from partway.strategy.placement import Kind

LOCAL = [Kind.SLICE, Kind.PAD, Kind.KEEP, Kind.NOTHING]
ROUND = DeviceProfile("round", flops=1e12, memory_bandwidth=1e11, link_bandwidth=1e9, latency=1e-6, launch=1e-5)


@pytest.mark.parametrize(
    ("kind", "wire", "messages"),
    [
        (Kind.ALL_REDUCE, 1500, 6),
        (Kind.ALL_GATHER, 750, 3),
        (Kind.REDUCE_SCATTER, 750, 3),
        (Kind.ALL_TO_ALL, 750, 3),
    ],
)
def test_a_ring_of_4_ranks(kind, wire, messages):
    assert wire_bytes(kind, 1000, 4) == wire
    assert steps(kind, 4) == messages
    assert waiting_seconds(kind, 4, ROUND) == pytest.approx(1e-5 + messages * 1e-6)
    assert collective_seconds(kind, 1000, 4, ROUND) == pytest.approx(1e-5 + messages * 1e-6 + wire * 1e-9)


@pytest.mark.parametrize("kind", LOCAL)
def test_what_needs_no_other_rank_sends_nothing(kind):
    assert wire_bytes(kind, 1000, 4) == steps(kind, 4) == collective_seconds(kind, 1000, 4, ROUND) == 0


def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather():
    for size in (2, 3, 8):
        both = wire_bytes(Kind.REDUCE_SCATTER, 960, size) + wire_bytes(Kind.ALL_GATHER, 960, size)
        assert wire_bytes(Kind.ALL_REDUCE, 960, size) == pytest.approx(both)
        assert steps(Kind.ALL_REDUCE, size) == 2 * steps(Kind.ALL_GATHER, size)


def test_an_axis_of_one_rank_sends_nothing():
    assert wire_bytes(Kind.ALL_REDUCE, 1000, 1) == steps(Kind.ALL_REDUCE, 1) == 0


def test_an_operator_is_bound_by_its_operations_or_by_its_memory():
    assert operator_seconds(1e12, 1e9, ROUND) == 1.0
    assert operator_seconds(1e9, 1e11, ROUND) == 1.0
    assert operator_seconds(0, 0, ROUND) == 0


def test_a_profile_is_found_by_the_type_of_device():
    assert profile_of("cpu") is PROFILES["cpu"]
    with pytest.raises(StrategyError, match="no device profile for 'tpu'; accepted: 'cpu', 'cuda'"):
        profile_of("tpu")


def test_levels_weigh_what_they_are_named_for():
    assert WEIGHTS[Level(0)].wire > WEIGHTS[Level(0)].compute
    assert WEIGHTS[Level(1)].memory > WEIGHTS[Level(1)].wire
    assert WEIGHTS[Level(2)].wire == WEIGHTS[Level(2)].compute == WEIGHTS[Level(2)].latency == 1


def test_a_split_contraction_takes_its_share_of_the_time_and_a_replicated_one_all_of_it(lab):
    x, w = torch.empty(512, 512, requires_grad=True), torch.empty(512, 512, requires_grad=True)
    problem = lab.problem_of(F.linear, (x, w), lab.SQUARE)
    (at,) = lab.vertices_of(problem, torch.ops.aten.linear.default)
    vertex = problem.vertices[at]
    whole = 3 * 2 * 512**3 / PROFILES["cpu"].flops  # forward, and a gradient for each operand
    for option, seconds in zip(vertex.options, vertex.seconds, strict=True):
        split = 2 ** sum(factor is not None for factor in option.factors)
        assert seconds == pytest.approx(whole / split)


def test_views_are_free(lab):

    x = torch.empty(8, 8, requires_grad=True)
    problem = lab.problem_of(lambda x: x.t().exp(), (x,), lab.LINE)
    (at,) = lab.vertices_of(problem, torch.ops.aten.t.default)
    assert not problem.vertices[at].seconds.any()
    assert not problem.vertices[at].held.any()
