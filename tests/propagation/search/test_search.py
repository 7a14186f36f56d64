"""The searches against brute force: on random numbers, and on small graphs."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from partway.propagation.search.eliminate import eliminate, elimination_order
from partway.propagation.search.exact import dynamic_programming
from partway.propagation.search.network import Costs, costs_of, network
from partway.propagation.search.problem import VertexKind
from partway.propagation.search.propagate import propagate, revisit, sharding_propagation
from partway.propagation.search.recursive import recursive_programming
from partway.propagation.search.search import SearchMode, search
from partway.propagation.search.solution import verify_solution
from partway.strategy import BROADCAST, REPLICATE, Layout, Mesh, Shard, VerifyError


@st.composite
def random_costs(draw, vertices=6, options=4, forbidden=True):
    """Costs of a random graph: whole numbers, so that ties happen, and some choices that are impossible."""
    count = draw(st.integers(1, vertices))
    sizes = draw(st.lists(st.integers(1, options), min_size=count, max_size=count))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    possible = list(itertools.combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(possible), unique=True)) if possible else []

    def numbers(*shape):
        found = rng.integers(0, 9, shape).astype(float)
        if forbidden and rng.random() < 0.3:
            found[rng.random(shape) < 0.2] = math.inf
        return found

    return Costs(tuple(numbers(n) for n in sizes), {(a, b): numbers(sizes[a], sizes[b]) for a, b in edges})


def brute_force(costs):
    return min(costs.of(choice) for choice in itertools.product(*(range(len(u)) for u in costs.unary)))


@settings(max_examples=400, deadline=None)
@given(random_costs())
def test_elimination_finds_the_optimum_and_proves_it(costs):
    solution = eliminate(costs)
    best = brute_force(costs)
    assert solution.cost == best == solution.bound
    assert math.isinf(best) or solution.proven
    assert costs.of(solution.choice) == solution.cost


@settings(max_examples=400, deadline=None)
@given(random_costs(vertices=7, options=3, forbidden=False), st.integers(1, 30))
def test_with_small_tables_the_optimum_lies_between_the_bound_and_the_cost(costs, limit):
    solution = eliminate(costs, limit)
    assert solution.bound <= brute_force(costs) <= solution.cost
    assert costs.of(solution.choice) == solution.cost
    if solution.proven:
        assert solution.cost == brute_force(costs)


@settings(max_examples=200, deadline=None)
@given(random_costs(forbidden=False), st.data())
def test_propagation_claims_the_cost_of_its_plan_and_is_never_better_than_the_optimum(costs, data):
    sources = data.draw(st.lists(st.integers(0, len(costs.unary) - 1), unique=True))
    solution = propagate(network(costs), sources)
    assert costs.of(solution.choice) == solution.cost >= brute_force(costs)
    assert solution.bound == -math.inf
    assert not solution.proven


@settings(max_examples=400, deadline=None)
@given(random_costs(vertices=7), st.data())
def test_revisiting_never_makes_a_plan_worse_and_claims_its_cost(costs, data):
    start = propagate(network(costs), data.draw(st.lists(st.integers(0, len(costs.unary) - 1), unique=True)))
    found = revisit(network(costs), start)
    assert brute_force(costs) <= found.cost == costs.of(found.choice) <= start.cost
    assert revisit(network(costs), found).cost == found.cost


def alone(costs, choice):
    """The least cost after one vertex changes its option."""
    changed = (
        costs.of((*choice[:v], option, *choice[v + 1 :])) for v, u in enumerate(costs.unary) for option in range(len(u))
    )
    return min(changed)


@settings(max_examples=300, deadline=None)
@given(random_costs(vertices=7))
def test_after_revisiting_no_vertex_gains_by_changing(costs):
    found = revisit(network(costs), propagate(network(costs), [0]))
    assert alone(costs, found.choice) >= found.cost or math.isinf(found.cost)


def test_each_vertex_goes_when_it_has_the_fewest_neighbours_left():
    chain = Costs((np.zeros(2),) * 5, {(i, i + 1): np.zeros((2, 2)) for i in range(4)})
    assert eliminate(chain).width == 2
    star = Costs((np.zeros(2),) * 5, {(0, i): np.zeros((2, 2)) for i in range(1, 5)})
    assert eliminate(star).width == 2
    clique = Costs((np.zeros(2),) * 4, {pair: np.zeros((2, 2)) for pair in itertools.combinations(range(4), 2)})
    assert eliminate(clique).width == 4


def test_a_table_that_would_be_too_large_is_never_built():
    wide = Costs((np.zeros(8),) * 12, {pair: np.ones((8, 8)) for pair in itertools.combinations(range(12), 2)})
    solution = eliminate(wide, 600)
    assert solution.width <= 3
    assert solution.bound <= 66 == solution.cost


# -- arrays that are shared are solved once


@st.composite
def repeated_costs(draw, most=40):
    """A chain of equal blocks, its arrays the same objects in each, between a prefix and a suffix of its own; a vertex
    may be next to all blocks, as a tied weight is. Returns the costs and how many blocks there are."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, size = draw(st.integers(1, most)), draw(st.integers(1, 3))
    ends = [draw(st.integers(0, 2)) for _ in range(2)]
    tied = draw(st.booleans())

    def numbers(*shape):
        return rng.integers(0, 9, shape).astype(float)

    sizes = [int(n) for n in rng.integers(2, 4, size)]
    alone = [numbers(n) for n in sizes]
    inside = {(a, b): numbers(sizes[a], sizes[b]) for a, b in itertools.combinations(range(size), 2)}
    inside = {pair: matrix for pair, matrix in inside.items() if pair[1] == pair[0] + 1 or rng.random() < 0.4}
    link, tie = numbers(sizes[-1], sizes[0]), [numbers(2, sizes[i]) for i in range(size)]
    unary, pairs = ([numbers(2)], {}) if tied else ([], {})

    def add(costs):
        unary.append(costs)
        return len(unary) - 1

    def block(before):
        at = [add(costs) for costs in alone]
        pairs.update({(at[a], at[b]): matrix for (a, b), matrix in inside.items()})
        if before is not None:
            pairs[before, at[0]] = link if len(unary[before]) == sizes[-1] else numbers(len(unary[before]), sizes[0])
        if tied:
            pairs.update({(0, vertex): tie[i] for i, vertex in enumerate(at[:1])})
        return at[-1]

    last = None
    for place in range(ends[0] + count + ends[1]):
        if ends[0] <= place < ends[0] + count:
            last = block(last)
            continue
        vertex = add(numbers(3))
        if last is not None:
            pairs[last, vertex] = numbers(len(unary[last]), 3)
        last = vertex
    return Costs(tuple(unary), pairs), count


def copied(costs):
    """The same numbers, each in an array of its own."""
    return Costs(tuple(map(np.copy, costs.unary)), {pair: np.copy(matrix) for pair, matrix in costs.pairs.items()})


@settings(max_examples=300, deadline=None)
@given(repeated_costs())
def test_shared_arrays_change_nothing_but_the_time(drawn):
    costs, _ = drawn
    once, each = eliminate(costs), eliminate(copied(costs))
    assert once.cost == once.bound == each.cost == each.bound
    assert costs.of(once.choice) == once.cost
    if math.prod(len(unary) for unary in costs.unary) < 3000:
        assert once.cost == brute_force(costs)


@settings(max_examples=300, deadline=None)
@given(repeated_costs(most=6), st.integers(1, 60))
def test_shared_arrays_with_small_tables_keep_the_bound(drawn, limit):
    costs, _ = drawn
    optimum, found = eliminate(copied(costs)).cost, eliminate(costs, limit)
    assert found.bound <= optimum <= found.cost == costs.of(found.choice)


@settings(max_examples=300, deadline=None)
@given(random_costs(), st.data())
def test_equal_arrays_in_any_places_are_still_the_same_problem(costs, data):
    """The same objects also where nothing repeats in a row: unary costs of one size, matrices of one shape."""
    unary = [data.draw(st.sampled_from([u for u in costs.unary if len(u) == len(own)])) for own in costs.unary]
    shapes = {pair: [m for m in costs.pairs.values() if m.shape == own.shape] for pair, own in costs.pairs.items()}
    mixed = Costs(tuple(unary), {pair: data.draw(st.sampled_from(same)) for pair, same in shapes.items()})
    found = eliminate(mixed)
    assert found.cost == found.bound == brute_force(mixed)


def chain_of(blocks, size=4, seed=0):
    """`blocks` equal blocks of `size` vertices, each a small clique, in a chain."""
    rng = np.random.default_rng(seed)
    alone = [rng.random(5) for _ in range(size)]
    inside = {pair: rng.random((5, 5)) for pair in itertools.combinations(range(size), 2)}
    link = rng.random((5, 5))
    pairs = {(b * size + i, b * size + j): m for b in range(blocks) for (i, j), m in inside.items()}
    pairs.update({((b + 1) * size - 1, (b + 1) * size): link for b in range(blocks - 1)})
    return Costs(tuple(alone * blocks), pairs)


def test_the_tables_computed_grow_with_the_logarithm_of_the_repeats():
    def tables(costs):
        return len(elimination_order(costs).recipes)

    for size in (1, 2, 4):
        counts = [tables(chain_of(blocks, size)) for blocks in (8, 16, 32, 64, 128, 256)]
        steps = np.diff(counts)
        assert steps.max() <= 4, counts  # twice as many blocks, a few tables more
        assert counts[-1] < tables(copied(chain_of(256, size))) / 4


def test_a_chain_of_many_blocks_is_solved_exactly():
    costs = chain_of(1000)
    once, each = eliminate(costs), eliminate(copied(costs))
    assert once.cost == pytest.approx(each.cost, rel=1e-12)
    assert once.cost == pytest.approx(once.bound, rel=1e-12)


# -- small graphs


def mlp(x, w, v, b):
    return F.linear(torch.relu(F.linear(x, w)), v, b).pow(2).mean()


def mlp_tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 4), (4, 4), (4, 4), (4,)]
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes)


def rows(x):
    return (x * 2 + x.sum(0, keepdim=True)).sum(1)


@pytest.mark.parametrize("mode", list(SearchMode))
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_every_search_gives_a_plan_that_computes_the_right_thing(lab, mode, sizes):
    args = mlp_tensors()
    mesh = Mesh.of_sizes(sizes)
    split = Layout(mesh, (Shard(0), *[REPLICATE] * (len(sizes) - 1)))
    problem = lab.problem_of(mlp, args, mesh, {"x": ((split,), "by hand")})
    solution = verify_solution(problem, search(problem, mode))
    optimum = dynamic_programming(problem)
    assert optimum.proven
    assert optimum.cost == pytest.approx(optimum.bound)
    assert solution.cost >= optimum.cost - 1e-15
    assert solution.cost == problem.cost(solution.choice)
    at = next(i for i, v in enumerate(problem.vertices) if v.name == "x")
    assert problem.vertices[at].options[solution.choice[at]].results == (split,)
    tensors = lab.call_tensors(problem, mlp, args)
    lab.check_choice(problem, solution.choice, mlp, args, lab.value_and_gradients([mlp(*args)], tensors), str(mode))


def test_dynamic_programming_is_brute_force_on_a_small_graph(lab):
    x = torch.randn(4, 6, requires_grad=True)
    problem = lab.problem_of(rows, (x,), lab.LINE)
    costs = costs_of(problem)
    total = math.prod(len(u) for u in costs.unary)
    assert 1000 < total < 200_000
    found = dynamic_programming(problem)
    assert found.cost == pytest.approx(brute_force(costs))
    assert found.cost == pytest.approx(problem.cost(found.choice))


def test_the_numbers_of_a_problem_are_its_costs(lab):
    problem = lab.problem_of(mlp, mlp_tensors(), lab.SQUARE)
    costs = costs_of(problem)
    rng = np.random.default_rng(0)
    for _ in range(20):
        choice = tuple(int(rng.integers(len(v.options))) for v in problem.vertices)
        assert costs.of(choice) == pytest.approx(problem.cost(choice))


def test_recursion_on_one_axis_is_the_optimum(lab):
    problem = lab.problem_of(mlp, mlp_tensors(), lab.LINE)
    assert recursive_programming(problem).cost == pytest.approx(dynamic_programming(problem).cost)


def test_recursion_keeps_what_is_annotated_on_a_later_axis(lab):
    later = Layout(lab.SQUARE, (REPLICATE, Shard(1)))
    problem = lab.problem_of(mlp, mlp_tensors(), lab.SQUARE, {"w": ((later,), "by hand")})
    solution = verify_solution(problem, recursive_programming(problem))
    at = next(i for i, v in enumerate(problem.vertices) if v.name == "w")
    assert problem.vertices[at].options[solution.choice[at]].results == (later,)


def test_recursion_takes_small_tables_where_all_are_too_much_work(lab, monkeypatch):
    problem = lab.problem_of(mlp, mlp_tensors(), lab.SQUARE)
    exact = recursive_programming(problem)
    monkeypatch.setattr("partway.propagation.search.eliminate.MUCH_WORK", 0.0)
    monkeypatch.setattr("partway.propagation.search.eliminate.SMALL_TABLES", 1.0)
    found = verify_solution(problem, recursive_programming(problem))
    assert exact.cost < found.cost < math.inf


def annotated_problem(lab, sizes=(2, 2)):
    mesh = Mesh.of_sizes(sizes)
    later = Layout(mesh, (*[REPLICATE] * (len(sizes) - 1), Shard(1)))
    return lab.problem_of(mlp, mlp_tensors(), mesh, {"w": ((later,), "by hand")})


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (4,)])
def test_propagation_is_never_worse_than_from_either_start(lab, sizes):
    problem = annotated_problem(lab, sizes)
    costs = costs_of(problem)
    annotated = [i for i, v in enumerate(problem.vertices) if v.annotation]
    inputs = [i for i, v in enumerate(problem.vertices) if v.kind is VertexKind.INPUT]
    assert annotated
    assert len(inputs) > 1
    found = sharding_propagation(problem)
    for sources in (annotated, inputs):
        start = propagate(network(costs), sources)
        assert found.cost <= revisit(network(costs), start).cost * (1 + 1e-12) <= start.cost * (1 + 2e-12)
    assert found.cost >= dynamic_programming(problem).cost * (1 - 1e-12)


@pytest.mark.parametrize("mode", list(SearchMode))
def test_every_search_carries_the_bound_that_is_proven(lab, mode):
    problem = annotated_problem(lab)
    found, optimum = search(problem, mode), dynamic_programming(problem)
    assert found.bound == optimum.bound
    assert found.bound <= found.cost * (1 + 1e-12)
    assert found.proven == (found.cost <= optimum.cost * (1 + 1e-9))


def test_propagation_spreads_an_annotation_to_its_neighbours(lab):
    split = Layout(lab.LINE, (Shard(0),))
    _, *parameters = mlp_tensors()
    problem = lab.problem_of(mlp, (torch.ones(4096, 4).double(), *parameters), lab.LINE, {"x": ((split,), "by hand")})
    solution = sharding_propagation(problem)
    first, second = lab.vertices_of(problem, torch.ops.aten.linear.default)
    for vertex in (first, second):
        chosen = problem.vertices[vertex].options[solution.choice[vertex]]
        assert chosen.factors == ("_1",)
        assert chosen.operands[1].placements == (BROADCAST,)


def test_a_solution_that_was_tampered_with_is_refused(lab):
    problem = lab.problem_of(mlp, mlp_tensors(), lab.LINE)
    good = verify_solution(problem, dynamic_programming(problem))
    first = problem.vertices[0]
    with pytest.raises(VerifyError, match=f"{first.name} has no option {len(first.options)}"):
        verify_solution(problem, dataclasses.replace(good, choice=(len(first.options), *good.choice[1:])))
    with pytest.raises(VerifyError, match="has no option -1"):
        verify_solution(problem, dataclasses.replace(good, choice=(-1, *good.choice[1:])))
    with pytest.raises(VerifyError, match="the plan costs"):
        verify_solution(problem, dataclasses.replace(good, cost=good.cost * 0.9))
    with pytest.raises(VerifyError, match="choices for"):
        verify_solution(problem, dataclasses.replace(good, choice=good.choice[1:]))


def test_vertices_with_one_option_join_nothing_however_many_there_are():
    fixed = 70  # more than an array may have dims
    unary = (np.array([1.0, 0.0]), *(np.array([0.5]) for _ in range(fixed)))
    pairs = {(0, i): np.array([[0.0], [0.25]]) for i in range(1, fixed + 1)} | {(1, 2): np.array([[2.0]])}
    costs = Costs(unary, pairs)
    found = eliminate(costs)
    assert found.choice == (0,) * (fixed + 1)
    assert found.cost == found.bound == costs.of(found.choice) == 1.0 + 0.5 * fixed + 2.0
    assert found.width == 1
