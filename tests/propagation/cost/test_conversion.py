"""Conversions between layouts: their costs against a search over steps, and what they do to values."""

import dataclasses
import itertools
import math

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from random_examples import examples
from round_profile import PAIRS
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from partway.propagation.cost.conversion import ConversionStep, ConversionTable, conversion_table, tie, with_cuts
from partway.propagation.cost.cost import WEIGHTS, Level, collective_cost, hierarchies
from partway.propagation.cost.profile import profile_of
from partway.propagation.ops.collectives import COLLECTIVES, convert
from partway.runtime import record_collectives
from partway.runtime.code.assemble import assemble_code
from partway.runtime.code.slices import Placed, short_part
from partway.runtime.executors.simulate import Simulator, join, split
from partway.strategy import BROADCAST, PARTIAL, REPLICATE, Layout, Mesh, Partial, Shard
from partway.strategy.placement import PARTIAL_MAX, Kind, kind, placement_from_code, transpose

STEP = 1e-13


def table_of(shape, sizes, gradient=True, partial="sum", level=Level.SPEED, itemsize=8, profile=None, wider=1):
    mesh = Mesh.of_sizes(sizes)
    profile = profile or profile_of("cpu")
    return conversion_table(shape, itemsize, partial, gradient, mesh, profile, WEIGHTS[level], wider=wider)


def after(source, axes, placement):
    for axis in axes:
        source = source.replaced(axis, placement)
    return source


def filled(found, shape):
    """Whether every part of a tensor of `shape` has an element."""
    splits = found.splits(len(shape))
    return found.fits(shape) and all(size >= parts for size, parts in zip(shape, splits, strict=True))


def step_cost(table, source, axes, placement):
    """The cost of one step over `axes` (positions), written out; None where it is not allowed."""
    mesh, old = table.mesh, source.placements[axes[0]]
    if any(source.placements[axis] != old for axis in axes):
        return None
    if not filled(after(source, axes, placement), table.shape) or not filled(source, table.shape):
        return None
    others = [i for i in range(len(mesh.axes)) if i not in axes]
    if PARTIAL_MAX in (old, placement) and not {type(old), type(placement)} & {type(REPLICATE), type(BROADCAST)}:
        return None  # a maximum is taken of whole values only
    for state in (old, placement):
        if isinstance(state, Shard) and any(source.placements[i] == state for i in others if i > axes[0]):
            return None  # only the last axes that split a dim may come or go
    size = math.prod(mesh.sizes[axis] for axis in axes)
    held = math.prod(after(source, axes, REPLICATE).local_shape(table.shape)) * table.itemsize
    ways = [kind(old, placement), *([kind(*transpose(old, placement))] if table.gradient else [])]
    if len(axes) > 1 and not any(way.communicates for way in ways):
        return None
    total = STEP
    for phase, way in enumerate(ways):
        payload = held / size if way is Kind.ALL_TO_ALL else held
        if phase and way.communicates and COLLECTIVES[way].adds:
            payload *= table.wider
        if way.communicates:
            seconds, per_byte = collective_cost(way, payload, mesh, tuple(mesh.axes[i] for i in axes), table.profile)
            total += table.weights.latency * seconds + table.weights.wire * per_byte * payload
        if way in (Kind.PAD, Kind.KEEP):
            total += table.weights.compute * held / table.profile.memory_bandwidth
    return total


def sets_of_axes(mesh):
    every = range(len(mesh.axes))
    return [axes for count in every for axes in itertools.combinations(every, count + 1)]


def steps_of(table):
    """All steps between layouts as a graph."""
    graph = nx.DiGraph()
    for source in table.layouts:
        if filled(source, table.shape):
            graph.add_node(source)
            for axes, placement in itertools.product(sets_of_axes(table.mesh), table.states):
                if all(placement != source.placements[axis] for axis in axes):
                    cost = step_cost(table, source, axes, placement)
                    if cost is not None:
                        graph.add_edge(source, after(source, axes, placement), weight=cost)
    return graph


TABLES = [
    ((4, 6), (2,)),
    ((4,), (2, 2)),
    ((8, 6), (2, 3)),
    ((8, 1, 4), (2, 2)),
    ((8,), (2, 2, 2)),
    ((), (2, 2)),
    ((3, 5), (2,)),
    ((1024, 64), (4, 2)),
]


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize(("gradient", "partial"), [(True, "sum"), (False, "sum"), (False, "max")])
@pytest.mark.parametrize(("shape", "sizes"), TABLES)
def test_costs_are_those_of_the_shortest_chains_of_steps(shape, sizes, gradient, partial, level):
    table = table_of(shape, sizes, gradient, partial, level)
    expected = dict(nx.all_pairs_dijkstra_path_length(steps_of(table)))
    for (i, source), (j, target) in itertools.product(enumerate(table.layouts), repeat=2):
        found = table.cost[i, j]
        wanted = expected.get(source, {}).get(target, math.inf)
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-20), f"{source} -> {target}"


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize(("shape", "wider"), [((64,), 1), ((1024, 64), 1), ((120, 64), 2)])
def test_large_collectives_between_nodes_cost_what_their_steps_cost(shape, wider, level):
    table = table_of(shape, (2, 4), level=level, profile=PAIRS, wider=wider)
    least = hierarchies(table.mesh, table.mesh.axes, PAIRS)[Kind.ALL_REDUCE].least
    assert {(64,): 0, (1024, 64): 2, (120, 64): 1}[shape] == sum(8 * math.prod(shape) * n >= least for n in (1, wider))
    expected = dict(nx.all_pairs_dijkstra_path_length(steps_of(table)))
    for (i, source), (j, target) in itertools.product(enumerate(table.layouts), repeat=2):
        wanted = expected.get(source, {}).get(target, math.inf)
        assert table.cost[i, j] == pytest.approx(wanted, rel=1e-9, abs=1e-20), f"{source} -> {target}"


@pytest.mark.parametrize("partial", ["sum", "max", None])
@pytest.mark.parametrize(("shape", "sizes"), [*TABLES[:5], ((4, 4), (2, 2, 2))])
def test_a_path_is_a_chain_of_allowed_steps_that_costs_what_the_table_says(shape, sizes, partial):
    table = table_of(shape, sizes, partial != "max", partial)
    valid = [found for found, ok in zip(table.layouts, table.valid, strict=True) if ok]
    rng = np.random.default_rng(0)
    for _ in range(150):
        source, target = (valid[int(rng.integers(len(valid)))] for _ in range(2))
        here, total = source, 0.0
        for step in table.path(source, target):
            axes = [table.mesh.index(axis) for axis in step.axes]
            assert all(here.placements[axis] == step.source != step.target for axis in axes)
            cost = step_cost(table, here, axes, step.target)
            assert cost is not None, f"{here} -> {step}"
            here, total = after(here, axes, step.target), total + cost
            assert here == step.after
        assert here == target
        assert total == pytest.approx(table.cost[table.index[source], table.index[target]], rel=1e-9, abs=1e-20)


@pytest.mark.parametrize("partial", ["sum", "max", None])
@pytest.mark.parametrize(("shape", "sizes"), [*TABLES[:5], ((4, 4), (2, 2, 2))])
def test_a_conversion_whose_path_has_a_barred_step_is_impossible_and_others_cost_the_same(shape, sizes, partial):
    table = table_of(shape, sizes, partial != "max", partial)
    every = [
        (tuple(table.mesh.axes[i] for i in axes), source, target)
        for axes in sets_of_axes(table.mesh)
        for source, target in itertools.permutations(table.states, 2)
    ]
    rng = np.random.default_rng(0)
    barred = frozenset(every[i] for i in rng.integers(len(every), size=max(1, len(every) // 5)))
    codes = np.flatnonzero(table.valid)
    without = dataclasses.replace(table, barred=barred)
    costs = without.rows(codes)
    values = rng.random(len(table.layouts))
    assert np.array_equal(without.spread(values, forward=True)[codes], (values[codes, None] + costs).min(axis=0)[codes])
    assert np.array_equal(without.spread(values, forward=False)[codes], (values + costs).min(axis=1))
    impossible = 0
    for i, j in itertools.product(range(len(codes)), codes) if len(codes) < 40 else rng.integers(40, size=(300, 2)):
        path = table.path(table.layouts[codes[i]], table.layouts[j]) if table.valid[j] else ()
        if any((step.axes, step.source, step.target) in barred for step in path):
            impossible += 1
            assert math.isinf(costs[i, j])
        else:
            assert costs[i, j] == table.cost[codes[i], j]
    assert impossible


def test_every_valid_layout_becomes_every_other():
    for shape, sizes in TABLES:
        for partial in ("sum", None):
            table = table_of(shape, sizes, partial=partial)
            assert np.isfinite(table.cost[np.ix_(table.valid, table.valid)]).all()


def test_a_layout_with_more_parts_than_elements_is_out_of_reach():
    table = table_of((2, 4), (3,))
    uneven = table.index[Layout(table.mesh, (Shard(0),))]
    whole = table.index[Layout(table.mesh, (REPLICATE,))]
    assert math.isinf(table.cost[whole, uneven])
    assert math.isinf(table.cost[uneven, whole])
    assert math.isinf(table.cost[uneven, uneven])


def test_no_state_splits_a_dim_of_size_1_and_booleans_have_no_addends():
    assert table_of((1, 4), (2,)).states == (Shard(1), REPLICATE, BROADCAST, PARTIAL)
    assert table_of((4,), (2,), partial=None).states == (Shard(0), REPLICATE, BROADCAST)


def test_what_one_rank_holds():
    table = table_of((8, 6), (2, 3))
    assert table.local_bytes(Layout(table.mesh, (Shard(0), Shard(1)))) == 8 * 6 * 8 / 6
    assert table.local_bytes(Layout(table.mesh, (Shard(1), Shard(0)))) == 3 * 3 * 8  # of the ranks with a full slice
    assert table.local_bytes(Layout(table.mesh, (PARTIAL, Shard(1)))) == 8 * 6 * 8 / 3
    assert table.local_bytes(Layout(table.mesh, (BROADCAST, REPLICATE))) == 8 * 6 * 8


def codes(mesh, text):
    return Layout(mesh, tuple(map(placement_from_code, text.split())))


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        ("P R", "S0 R", "d0 P>S0"),
        ("S0 R", "R S0", "d0 S0>R d1 R>S0"),
        ("S0 S0", "R R", "d0,d1 S0>R"),
        ("R S0", "S0 S0", "d1 S0>P d0 R>S0 d1 P>S0"),
        ("S0 P", "S0 R", "d1 P>R"),
        ("R R", "R R", ""),
        ("P P", "S0 S0", "d0,d1 P>S0"),
        ("P P", "R R", "d0,d1 P>R"),
        ("R R", "B B", "d0,d1 R>B"),
        ("S0 S0", "S1 S1", "d0,d1 S0>S1"),
        ("R R", "B S1", "d1 R>S1 d0 R>B"),
    ],
)
def test_the_way_between_two_layouts(source, target, wanted):
    table = table_of((64, 64), (2, 2), level=Level.COMMUNICATION)
    path = table.path(codes(table.mesh, source), codes(table.mesh, target))
    assert " ".join(f"{','.join(step.axes)} {step.source}>{step.target}" for step in path) == wanted


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        ("Pmax R", "R R", "d0 Pmax>R"),
        ("Pmax R", "S0 R", "d0 Pmax>R d0 R>S0"),
        ("S0 R", "Pmax R", "d0 S0>R d0 R>Pmax"),
        ("B S1", "Pmax S1", "d0 B>Pmax"),
    ],
)
def test_the_way_of_a_maximum(source, target, wanted):
    table = table_of((64, 64), (2, 2), False, "max")
    path = table.path(codes(table.mesh, source), codes(table.mesh, target))
    assert " ".join(f"{','.join(step.axes)} {step.source}>{step.target}" for step in path) == wanted


def test_a_maximum_over_two_axes_is_one_collective():
    table = table_of((64, 64), (2, 2), False, "max")
    joint, rest = table.path(codes(table.mesh, "Pmax Pmax"), codes(table.mesh, "B R"))
    assert joint.axes == ("d0", "d1")
    assert kind(joint.source, joint.target) is Kind.ALL_REDUCE
    assert kind(rest.source, rest.target) is Kind.NOTHING  # Replicate and Broadcast are one value: either first


def test_tables_are_shared():
    assert table_of((4, 4), (2,)) is table_of((4, 4), (2,))
    assert isinstance(table_of((4, 4), (2,)), ConversionTable)


# -- on values


def parts_of(whole, found, generator):
    """Parts of `whole` laid out as `found`: addends are random numbers with the right sum, candidates for a maximum
    are below it on all ranks but one."""
    mesh = found.mesh
    parts = split(whole, found)
    for axis, placement in enumerate(found.placements):
        if placement == PARTIAL:
            for group in mesh.groups(mesh.axes[axis]):
                noise = [torch.randint(-9, 9, parts[r].shape, generator=generator).double() for r in group]
                for rank in group[1:]:
                    parts[rank] = torch.zeros_like(parts[rank])
                for i, rank in enumerate(group):
                    parts[rank] = parts[rank] + noise[i] - noise[i - 1]
        elif placement == PARTIAL_MAX:
            # on one coordinate for all groups: a rank that is largest on every axis has the maximum
            largest = int(torch.randint(mesh.sizes[axis], (), generator=generator))
            for group in mesh.groups(mesh.axes[axis]):
                for i, rank in enumerate(group):
                    below = torch.randint(0, 9, parts[rank].shape, generator=generator)
                    parts[rank] = parts[rank] - (below if i != largest else 0)
    return copied(parts, found)


def copied(parts, found):
    """`parts` with the copies of one part equal on the axes that replicate it."""
    mesh, out = found.mesh, list(parts)
    for rank in range(mesh.device_num):
        coordinate = [
            c if isinstance(p, Shard | Partial) else 0
            for c, p in zip(mesh.coordinate(rank), found.placements, strict=True)
        ]
        out[rank] = parts[mesh.rank(tuple(coordinate))]
    return out


def assert_parts_of(whole, parts, found):
    """`parts` are those of `whole` laid out as `found`, its copies equal."""
    shape = tuple(whole.shape)
    assert torch.equal(join(parts, found, shape), whole)
    parts = [short_part(part, Placed(found, shape), rank) for rank, part in enumerate(parts)]
    for part, copy in zip(parts, copied(parts, found), strict=True):
        assert torch.equal(part, copy)


def path_of(table, source, target):
    """The steps of a path as a program has them."""
    steps, here = [], source
    for step in table.path(source, target):
        steps.append(with_cuts(step, here, table.shape))
        here = step.after
    return tuple(steps)


def convert_all(mesh, steps, parts, pair):
    """Run `steps` as the simulator does; `pair` gives (source, target) of a step."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    for step in steps:
        source, target = pair(step)
        if source != target:
            axes = list(step.axes)
            node = graph.call_function(convert, (node, str(source), str(target), axes, mesh.size(*axes), 0))
    graph.output((node,))
    (found,) = Simulator(mesh).run(assemble_code(fx.GraphModule(torch.nn.Module(), graph), "forward"), [parts])
    return found


@st.composite
def two_layouts(draw, partial=PARTIAL):
    sizes = draw(st.sampled_from([(2,), (3,), (2, 2), (2, 3), (2, 2, 2)]))
    shape = draw(st.sampled_from([(24,), (8, 6), (4, 24), (2, 12, 3), (28,), (13, 9), (5, 11), (8, 25)]))
    mesh = Mesh.of_sizes(sizes)
    states = [*(Shard(d) for d in range(len(shape))), REPLICATE, BROADCAST, partial]
    layouts = [Layout(mesh, tuple(draw(st.sampled_from(states)) for _ in sizes)) for _ in range(2)]
    assume(all(filled(found, shape) for found in layouts))
    return shape, sizes, *layouts


@examples(250)
@given(two_layouts(), st.integers(0, 999))
def test_a_path_keeps_the_value_and_its_transpose_the_gradient(drawn, seed):
    shape, sizes, source, target = drawn
    generator = torch.Generator().manual_seed(seed)
    table = table_of(shape, sizes)
    path = path_of(table, source, target)
    whole = torch.randint(-99, 99, shape, generator=generator).double()
    start = parts_of(whole, source, generator)
    assert torch.equal(join(start, source, shape), whole)
    end = convert_all(table.mesh, path, start, lambda step: (step.source, step.target))
    assert_parts_of(whole, end, target)
    back = parts_of(whole, target.dual(), generator)
    gradient = convert_all(table.mesh, path[::-1], back, lambda step: transpose(step.source, step.target))
    assert torch.equal(join(gradient, source.dual(), shape), whole)


@examples(150)
@given(two_layouts(PARTIAL_MAX), st.integers(0, 999))
def test_a_path_keeps_a_maximum(drawn, seed):
    shape, sizes, source, target = drawn
    generator = torch.Generator().manual_seed(seed)
    table = table_of(shape, sizes, False, "max")
    whole = torch.randint(-99, 99, shape, generator=generator).double()
    start = parts_of(whole, source, generator)
    assert torch.equal(join(start, source, shape), whole)
    end = convert_all(table.mesh, path_of(table, source, target), start, lambda step: (step.source, step.target))
    assert torch.equal(join(end, target, shape), whole)
    assert torch.equal(join([part.long() for part in end], target, shape), whole.long())


def test_the_same_dim_on_two_axes_is_moved_in_one_piece():
    table = table_of((16,), (2, 2))
    source, target = codes(table.mesh, "S0 S0"), codes(table.mesh, "R S0")
    whole = torch.arange(16.0)
    parts = split(whole, source)
    end = convert_all(table.mesh, table.path(source, target), parts, lambda s: (s.source, s.target))
    assert torch.equal(join(end, target), whole)
    assert torch.equal(end[1], whole[8:])


# -- along several axes at once


def joint_steps(before, shape):
    """Every step of one or several axes from the layout `before`: they have one placement, and get one other."""
    states = [*(Shard(d) for d in range(len(shape))), REPLICATE, BROADCAST, PARTIAL]
    numbers = range(len(before.placements))
    for axes in (found for n in numbers for found in itertools.combinations(numbers, n + 1)):
        (source, *others) = {before.placements[axis] for axis in axes}
        inside = {p for i, p in enumerate(before.placements) if i > axes[0] and i not in axes}
        for target in states:
            after = before
            for axis in axes:
                after = after.replaced(axis, target)
            # a dim is cut by its axes in order, so these have to be the last that cut it
            cut = {p for p in (source, target) if isinstance(p, Shard)} & inside
            if not others and source != target and not cut and after.divides(shape):
                yield ConversionStep(tuple(before.mesh.axes[axis] for axis in axes), source, target, after)


@st.composite
def chains(draw):
    """A shape, a layout and a chain of steps from it."""
    mesh = Mesh.of_sizes(draw(st.sampled_from([(2, 2), (2, 3), (2, 2, 2)])))
    shape = draw(st.sampled_from([(24,), (24, 12), (24, 2, 24)]))
    states = [Shard(0), REPLICATE, BROADCAST, PARTIAL]
    source = here = Layout(mesh, tuple(draw(st.sampled_from(states)) for _ in mesh.axes))
    chain = []
    for _ in range(draw(st.integers(1, 5))):
        steps = list(joint_steps(here, shape))
        joint = [step for step in steps if len(step.axes) > 1]
        chain.append(draw(st.sampled_from(joint or steps) | st.sampled_from(steps)))
        here = chain[-1].after
    return shape, source, chain


@examples(150)
@given(chains(), st.integers(0, 999))
def test_a_chain_of_joint_conversions_keeps_the_value_and_its_derivative_the_gradient(drawn, seed):
    shape, source, chain = drawn
    mesh, target = source.mesh, chain[-1].after
    generator = torch.Generator().manual_seed(seed)

    def forward_and_backward(x, gradient):
        y = x
        for tag, step in enumerate(chain):
            y = convert(y, str(step.source), str(step.target), list(step.axes), mesh.size(*step.axes), tag)
        return y, *torch.autograd.grad(y, x, gradient)

    with FakeTensorMode():
        x = torch.empty(source.local_shape(shape), dtype=torch.float64, requires_grad=True)
        gradient = torch.empty(target.local_shape(shape), dtype=torch.float64)
        code = assemble_code(make_fx(forward_and_backward)(x, gradient), "forward")
    wholes = [torch.randint(-99, 99, shape, generator=generator).double() for _ in range(2)]
    values = [parts_of(w, found, generator) for w, found in zip(wholes, (source, target.dual()), strict=True)]
    with record_collectives() as events:
        results = Simulator(mesh).run(code, values)
    for whole, parts, found in zip(wholes, results, (target, source.dual()), strict=True):
        assert_parts_of(whole, parts, found)
    forward = [(kind(step.source, step.target), step.axes, mesh.size(*step.axes)) for step in chain]
    ways = [(kind(*transpose(step.source, step.target)), step.axes, mesh.size(*step.axes)) for step in chain[::-1]]
    expected = [way for way in (*forward, *ways) if way[0].communicates]
    assert [(e.kind, e.axes, e.group_size) for e in events] == expected


@pytest.mark.parametrize("axes", [(), (0,), (0, 1)])
def test_a_tied_table_converts_nothing_along_its_axes(axes):
    free = table_of((4, 8), (2, 2))
    table = tie(free, tuple(free.mesh.axes[a] for a in axes))
    assert table is tie(free, table.tied)
    i, j = np.ix_(np.flatnonzero(table.valid), np.flatnonzero(table.valid))
    same = np.all([free.digits[i, a] == free.digits[j, a] for a in axes], axis=0) if axes else np.ones((1, 1), bool)
    assert np.array_equal(np.isfinite(table.cost[i, j]), np.broadcast_to(same, (i.size, j.size)))
    assert (table.cost[i, j] >= free.cost[i, j]).all()
    values = np.where(table.valid, np.random.default_rng(0).random(len(table.digits)), np.inf)
    for forward in (True, False):
        spread = (values[:, None] + (table.cost if forward else table.cost.T)).min(axis=0)
        np.testing.assert_allclose(table.spread(values, forward)[table.valid], spread[table.valid], rtol=1e-12)
