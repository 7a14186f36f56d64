"""What things are predicted to cost, by hand-worked examples and by what was measured on H100s."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from round_profile import FLAT, NODE, PAIRS, ROUND, profile_with

from partway.propagation.cost.cost import (
    CHUNK,
    LINE,
    WEIGHTS,
    Level,
    collective_cost,
    collective_costs,
    collective_seconds,
    costs_over,
    hierarchies,
    looked_up,
    operator_seconds,
    ranks_by_level,
    sent_by_level,
    steps,
    update_seconds,
    wire_bytes,
)
from partway.propagation.cost.profile import profile_of
from partway.propagation.ops.collectives import COLLECTIVES, figures_of
from partway.strategy import Mesh, StrategyError
from partway.strategy.placement import Kind

LOCAL = [Kind.SLICE, Kind.PAD, Kind.KEEP, Kind.NOTHING]
NODES = profile_with(levels=[NODE, FLAT])


def cost(kind, sizes, profile, *axes, payload=0):
    """The cost over the given axes, by number; of all axes by default."""
    mesh = Mesh.of_sizes(sizes)
    return collective_cost(kind, payload, mesh, tuple(mesh.axes[axis] for axis in axes or range(len(sizes))), profile)


# -- One level -------------------------------------------------------------------------------------------------------


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
    assert cost(kind, (4,), ROUND) == pytest.approx((1e-5 + messages * 1e-6, wire * 1e-12))
    seconds = collective_seconds(kind, 1000, Mesh({"x": 4}), ("x",), ROUND)
    assert seconds == pytest.approx(1e-5 + messages * 1e-6 + wire * 1e-9)


@pytest.mark.parametrize("kind", LOCAL)
def test_what_needs_no_other_rank_sends_nothing(kind):
    assert wire_bytes(kind, 1000, 4) == steps(kind, 4) == 0
    assert cost(kind, (4,), ROUND) == (0, 0)


def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather():
    for size in (2, 3, 8):
        both = wire_bytes(Kind.REDUCE_SCATTER, 960, size) + wire_bytes(Kind.ALL_GATHER, 960, size)
        assert wire_bytes(Kind.ALL_REDUCE, 960, size) == pytest.approx(both)
        assert steps(Kind.ALL_REDUCE, size) == 2 * steps(Kind.ALL_GATHER, size)


def test_an_exchange_is_one_message_of_what_the_busiest_rank_sends_at_the_pace_of_an_all_to_all():
    assert wire_bytes(Kind.EXCHANGE, 960, 8) == 960
    assert steps(Kind.EXCHANGE, 8) == 1
    (waiting, per_byte), (longer, byte) = (cost(kind, (8,), ROUND) for kind in (Kind.EXCHANGE, Kind.ALL_TO_ALL))
    assert per_byte == pytest.approx(byte * 8 / 7)
    assert waiting < longer


@pytest.mark.parametrize("kind", sorted(set(COLLECTIVES) - {Kind.EXCHANGE}))
def test_an_axis_of_one_rank_costs_nothing(kind):
    assert wire_bytes(kind, 1000, 1) == steps(kind, 1) == 0
    assert cost(kind, (1,), ROUND) == cost(kind, (1, 8), NODES, 0) == (0, 0)


# -- Several levels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "axes", "devices", "by_level"),
    [
        ((32, 8), (1,), (8, None), (8, 1)),  # inside the node
        ((32, 8), (0,), (8, None), (1, 32)),  # each rank of a node with its like in the other nodes
        ((32, 8), (0, 1), (8, None), (8, 32)),
        ((32, 8), (1, 0), (8, None), (8, 32)),
        ((16,), (0,), (8, None), (8, 2)),
        ((4, 4), (0,), (8, None), (2, 2)),
        ((2, 2, 2), (0, 2), (4, 8, None), (2, 2, 1)),
        ((8, 4), (0, 1), (4, 8, None), (4, 2, 4)),
        ((7,), (0,), (8, None), (7, 1)),
        ((2, 3), (0,), (8, None), (2, 1)),
        ((3, 8), (0,), (8, None), (1, 3)),
        ((3, 3), (1,), (8, None), (1, 3)),  # the ranks 6, 7 | 8
        ((2, 6), (1,), (8, None), (1, 6)),
        ((12,), (0,), (8, None), (1, 12)),
        ((7, 2), (0,), (8, None), (1, 7)),
        ((4, 6), (1,), (4, 8, None), (1, 1, 6)),
        ((4, 12), (1,), (4, 12, None), (4, 3, 1)),
        ((2, 12), (1,), (4, 8, None), (4, 1, 3)),  # fours are whole; their pairs are not
    ],
)
def test_which_ranks_of_a_group_each_level_joins(sizes, axes, devices, by_level):
    mesh = Mesh.of_sizes(sizes)
    assert ranks_by_level(mesh, tuple(mesh.axes[axis] for axis in axes), devices) == by_level


def test_a_group_inside_a_node_uses_the_node():
    assert cost(Kind.ALL_GATHER, (32, 8), NODES, 1) == pytest.approx((5e-6 + 7 * 2e-6, 7 / 8 / 1e11))


def test_a_group_across_nodes_uses_the_network_whoever_else_does():
    assert cost(Kind.ALL_REDUCE, (32, 8), NODES, 0) == pytest.approx((1e-5 + 62 * 1e-6, 2 * 31 / 32 / 1e9))


@pytest.mark.parametrize(("kind", "passes"), [(Kind.ALL_REDUCE, 2), (Kind.ALL_GATHER, 1), (Kind.REDUCE_SCATTER, 1)])
def test_a_ring_of_whole_nodes_crosses_between_them_with_what_a_rank_of_all_sends(kind, passes):
    waiting = 1e-5 + passes * ((255 - 31) * 2e-6 + 31 * 1e-6)  # one launch; of 255 links in a row 31 are between nodes
    across = passes * 1 / 8 * 255 / 256 / 1e9
    assert costs_over(NODES.levels, (8, 32))[kind] == pytest.approx((waiting, across))


def test_an_all_reduce_by_trees_waits_for_the_logarithm_of_the_nodes_and_crosses_with_their_share():
    trees = profile_with(levels=[NODE, {**FLAT, "trees": True}])
    waiting = 1e-5 + 2 * (7 * 2e-6 + 5 * 1e-6)
    assert cost(Kind.ALL_REDUCE, (32, 8), trees) == pytest.approx((waiting, 2 / 8 * 31 / 32 / 1e9))
    assert cost(Kind.ALL_REDUCE, (33, 8), trees)[0] == pytest.approx(waiting + 2e-6)
    mesh = Mesh.of_sizes((32, 8))
    assert cost(Kind.ALL_GATHER, (32, 8), trees) == collective_costs(mesh, mesh.axes, NODES)[Kind.ALL_GATHER]


def test_an_all_reduce_over_2048_ranks_waits_for_fewer_messages_than_there_are_ranks():
    waiting, _ = cost(Kind.ALL_REDUCE, (256, 8), profile_of("h100"))
    assert 1e-4 < waiting < 3e-4


# 2 nodes of 2 ranks, an all_reduce: 1e-5 + 6 messages and 2 * 3/4 / 2 of the payload flat; in steps 2 * (5e-6 + 2e-6) +
# 1e-5 + 2 * 1e-6 and 2 * 1/2 of a chunk inside, and 2 * 1/2 / 2 of the payload between the nodes. One that only gathers
# or scatters does half of either.
def seconds_of(times):
    """Before a byte, in one step and in several."""
    return 1e-5 + times * (2 * 2e-6 + 1e-6), 1e-5 + times * (7e-6 + 1e-6 + CHUNK / 2e11)


IN_STEPS = [(Kind.ALL_REDUCE, 2), (Kind.ALL_GATHER, 1), (Kind.REDUCE_SCATTER, 1)]


@pytest.mark.parametrize(("kind", "times"), IN_STEPS)
def test_a_large_collective_goes_in_steps_where_less_crosses_between_the_nodes(kind, times):
    once, waits = seconds_of(times)
    steps = hierarchies(Mesh({"x": 4}), ("x",), PAIRS)[kind]
    least = (waits - once) / (times * 0.125e-9)
    assert (steps.kind, steps.within, steps.least) == (kind, 2, pytest.approx(least, abs=1))
    rates = times * 0.375e-9, times * 0.25e-9
    assert cost(kind, (4,), PAIRS, payload=least - 1) == pytest.approx((once, rates[0]))
    assert cost(kind, (4,), PAIRS, payload=least + 2) == pytest.approx((waits, rates[1]))
    assert collective_seconds(kind, 1e9, Mesh({"x": 4}), ("x",), PAIRS) == pytest.approx(waits + 1e9 * rates[1])
    both = cost(kind, (2, 2), PAIRS, payload=np.array([0, 1e9]))
    assert [list(figures) for figures in both] == [pytest.approx([once, waits]), pytest.approx(list(rates))]


@pytest.mark.parametrize(("kind", "times"), IN_STEPS)
def test_a_price_meets_that_of_one_step_where_the_steps_begin(kind, times):
    least = hierarchies(Mesh({"x": 4}), ("x",), PAIRS)[kind].least
    seconds = [collective_seconds(kind, n, Mesh({"x": 4}), ("x",), PAIRS) for n in (least - 1, least)]
    assert seconds[1] == pytest.approx(seconds[0], rel=1e-4)


@pytest.mark.parametrize(
    ("sizes", "axes", "profile"),
    [
        ((4,), (0,), ROUND),  # one level
        ((2, 2), (0,), PAIRS),  # one rank in each node
        ((2, 2), (1,), PAIRS),  # one node
        ((4,), (0,), profile_with(levels=[{**NODE, "devices": 2}, {**FLAT, "trees": True}])),  # NCCL has its own steps
        ((4,), (0,), profile_with(levels=[{**NODE, "devices": 2, "bandwidth": 1e9}, FLAT])),  # as slow inside
    ],
)
def test_a_collective_has_one_step_where_more_do_not_help(sizes, axes, profile):
    mesh = Mesh.of_sizes(sizes)
    assert not hierarchies(mesh, tuple(mesh.axes[axis] for axis in axes), profile)


def test_the_units_of_a_collective_are_those_of_the_level_within_the_slowest():
    levels = [{**NODE, "devices": 2}, {**NODE, "name": "rack", "devices": 4}, FLAT]
    found = hierarchies(Mesh({"x": 8}), ("x",), profile_with(levels=levels))
    assert {kind: steps.within for kind, steps in found.items()} == {kind: 4 for kind, _ in IN_STEPS}
    slow_racks = [levels[0], {**FLAT, "name": "rack", "devices": 4}, FLAT]
    found = hierarchies(Mesh({"x": 8}), ("x",), profile_with(levels=slow_racks))
    assert {kind: steps.within for kind, steps in found.items()} == {kind: 2 for kind, _ in IN_STEPS}


def test_messages_from_rank_to_rank_cross_with_what_other_nodes_lack():
    waiting = 1e-5 + 7 * 2e-6 + 31 * 1e-6
    assert cost(Kind.ALL_TO_ALL, (32, 8), NODES) == pytest.approx((waiting, 31 / 32 / 1e9))


def test_each_level_carries_the_share_of_the_bytes_that_the_levels_inside_leave():
    assert sent_by_level(Kind.ALL_REDUCE, (2, 4)) == (1, 0.875)
    assert sent_by_level(Kind.ALL_REDUCE, (2, 4), (False, True)) == (1, 0.75)
    assert sent_by_level(Kind.ALL_GATHER, (2, 4)) == (0.5, 0.4375)
    assert sent_by_level(Kind.ALL_TO_ALL, (2, 4)) == (0.5, 0.75)
    assert sent_by_level(Kind.ALL_GATHER, (1, 4)) == (0, 0.75)
    two = Mesh({"x": 16}), ("x",), NODES
    assert costs_over(NODES.levels, (8, 2))[Kind.ALL_GATHER] == collective_cost(Kind.ALL_GATHER, 0, *two)


def test_the_busiest_level_sets_the_pace():
    slow_node = profile_with(levels=[{**NODE, "bandwidth": 5e9}, FLAT])
    inside, across = 7 / 8 / 5e9, 1 / 8 * 15 / 16 / 1e9
    assert inside > across
    assert cost(Kind.ALL_GATHER, (2, 8), slow_node)[1] == pytest.approx(inside)


def test_a_group_that_does_not_fill_its_nodes_is_a_ring_over_the_network():
    assert cost(Kind.ALL_REDUCE, (12,), NODES) == pytest.approx(cost(Kind.ALL_REDUCE, (12,), ROUND))


def test_a_table_is_read_by_size_as_what_each_rank_sends():
    table = {"2": 2e9, "8": 4e9}
    level = {**FLAT, "bandwidth": dict.fromkeys(sorted(k.value for k in COLLECTIVES if figures_of(k) is k), table)}
    rates = profile_with(levels=[level])

    def sent(n):
        return wire_bytes(Kind.ALL_GATHER, 1, n) / cost(Kind.ALL_GATHER, (n,), rates)[1]

    assert cost(Kind.ALL_GATHER, (2,), rates)[1] == pytest.approx(1 / 2e9)
    assert cost(Kind.ALL_GATHER, (8,), rates)[1] == pytest.approx(1 / 4e9)
    assert sent(2) == pytest.approx(1e9)
    assert sent(8) == sent(64) == pytest.approx(3.5e9)  # beyond the table as at its end
    assert sent(4) == pytest.approx(1e9 + 2.5e9 / 2)  # half way by the logarithm


def test_a_mesh_that_the_network_cannot_hold_is_an_error_with_the_way_out():
    one_node = profile_with(levels=[NODE])
    assert cost(Kind.ALL_GATHER, (8,), one_node)[0] > 0
    with pytest.raises(StrategyError) as error:
        cost(Kind.ALL_GATHER, (2, 8), one_node, 1)
    assert str(error.value) == (
        "the mesh d0=2, d1=8 has 16 devices, and the network of device profile 'round' joins 8 (levels[0], node); use "
        "a mesh of at most 8, or a profile with one more level"
    )


def test_an_axis_that_the_mesh_lacks_is_an_error():
    with pytest.raises(StrategyError, match="the mesh has no axis 'tp'; its axes are x=4"):
        collective_cost(Kind.ALL_GATHER, 0, Mesh({"x": 4}), ("tp",), ROUND)


MEASURED = [  # kind, nodes, devices of a node, GB/s of payload, microseconds
    (Kind.ALL_GATHER, 1, 2, 537, 8),
    (Kind.ALL_GATHER, 1, 4, 434, 17),
    (Kind.ALL_GATHER, 1, 8, 394, 30),
    (Kind.REDUCE_SCATTER, 1, 8, 394, 30),
    (Kind.ALL_REDUCE, 1, 2, 324, 10),
    (Kind.ALL_REDUCE, 1, 4, 236, 15),
    (Kind.ALL_REDUCE, 1, 8, 267, 31),
    (Kind.ALL_REDUCE, 2, 8, 267, 53),
    (Kind.ALL_REDUCE, 8, 8, 160, 109),
    (Kind.ALL_GATHER, 2, 8, 410, 70),
]


@pytest.mark.parametrize(("kind", "nodes", "devices", "rate", "wait"), MEASURED)
def test_the_h100_preset_predicts_what_was_measured(kind, nodes, devices, rate, wait):
    waiting, per_byte = cost(kind, (nodes, devices), profile_of("h100"))
    assert 1e-9 / per_byte == pytest.approx(rate, rel=0.05)
    assert waiting * 1e6 == pytest.approx(wait, rel=0.15)


# -- Operators -------------------------------------------------------------------------------------------------------


def test_an_operator_takes_the_time_of_its_operations_and_of_its_bytes():
    assert operator_seconds(1e12, 0, torch.float32, ROUND) == 1.0
    assert operator_seconds(0, 1e11, torch.float32, ROUND) == 1.0
    assert operator_seconds(1e12, 1e11, torch.float32, ROUND) == 2.0
    assert operator_seconds(0, 0, torch.float32, ROUND) == 0


def test_the_shares_that_a_device_reaches_make_its_operators_slower():
    half = profile_with(reached={"products": 0.5, "attention": 0.125, "memory": 0.25, "source": "a test"})
    assert operator_seconds(1e12, 1e11, torch.float32, half) == 2.0 + 4.0
    assert operator_seconds(1e12, 1e11, torch.float32, half, name="aten._scaled_dot_product") == 8.0 + 4.0


def test_an_optimizer_reads_and_writes_a_parameter_and_its_states_and_reads_the_gradient():
    assert update_seconds(1e11, 2.0, ROUND) == pytest.approx(7.0)  # Adam
    assert update_seconds(1e11, 0.0, ROUND) == pytest.approx(3.0)  # SGD
    assert update_seconds(1e11, 2.0, profile_with(overhead=1.0)) == pytest.approx(7.0)


def test_a_lookup_reads_a_line_of_memory_at_least_for_each_row():
    moved, table, results = 1e9 + 2000.0, 1e9, 1000.0
    assert looked_up(moved, table, results, 1000.0) == 3000.0  # as much of the table as the results have
    assert looked_up(moved, table, results, 8.0) == 2000.0 + 1000.0 * LINE / 8
    assert looked_up(3000.0, 1000.0, 1000.0, 8.0) == 3000.0  # at most the table


@pytest.mark.parametrize(
    ("dtype", "peak"),
    [
        (torch.float64, 5e11),
        (torch.complex128, 5e11),
        (torch.float32, 1e12),
        (torch.complex64, 1e12),
        (torch.int64, 1e12),
        (torch.bool, 1e12),
        (torch.bfloat16, 4e12),
        (torch.float16, 2e12),
    ],
)
def test_the_peak_is_that_of_the_dtype(dtype, peak):
    assert operator_seconds(1e12, 0, dtype, ROUND) == 1e12 / peak


def test_an_even_split_never_looks_worse_than_the_whole_however_large_the_overhead():
    heavy = profile_with(overhead=7e-6)
    for flops, moved in ((1e3, 1e2), (1e9, 1e3), (1e3, 1e9)):
        whole, half = (operator_seconds(flops / n, moved / n, torch.float32, heavy) for n in (1, 2))
        assert half < whole
        assert whole - half == pytest.approx(operator_seconds(flops / 2, moved / 2, torch.float32, ROUND))


def test_levels_weigh_what_they_are_named_for():
    assert WEIGHTS[Level(0)].wire > WEIGHTS[Level(0)].compute
    assert WEIGHTS[Level(1)].memory > WEIGHTS[Level(1)].wire
    assert WEIGHTS[Level(2)].wire == WEIGHTS[Level(2)].compute == WEIGHTS[Level(2)].latency == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_split_contraction_takes_its_share_of_the_time_and_a_replicated_one_all_of_it(lab, dtype):
    x, w = (torch.empty(512, 512, requires_grad=True, dtype=dtype) for _ in range(2))
    problem = lab.problem_of(F.linear, (x, w), lab.SQUARE)
    (at,) = lab.vertices_of(problem, torch.ops.aten.linear.default)
    vertex = problem.vertices[at]
    profile, tables = profile_of("cpu"), (*vertex.options.tables[0], *vertex.options.tables[1])
    for option, seconds in zip(vertex.options, vertex.seconds, strict=True):
        work = 2 * 512**3 / 2 ** sum(factor is not None for factor in option.factors)
        placed = zip(tables, (*option.operands, *option.results), strict=True)
        moved = sum(table.local_bytes(layout) for table, layout in placed)
        # forward, and a gradient for each operand
        assert seconds == pytest.approx(3 * operator_seconds(work, moved, dtype, profile))


def test_views_are_free(lab):

    x = torch.empty(8, 8, requires_grad=True)
    problem = lab.problem_of(lambda x: x.t().exp(), (x,), lab.LINE)
    (at,) = lab.vertices_of(problem, torch.ops.aten.t.default)
    assert not problem.vertices[at].seconds.any()
    assert not problem.vertices[at].held.any()
