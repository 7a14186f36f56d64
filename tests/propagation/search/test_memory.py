"""The search under a memory limit, against brute force on random problems and on a small graph."""

import itertools
import math
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from random_examples import examples
from search_problems import rows

from partway.propagation.cost.cost import WEIGHTS, Level
from partway.propagation.cost.profile import profile_of
from partway.propagation.search.exact import dynamic_programming
from partway.propagation.search.memory import within_memory
from partway.propagation.search.problem import Edge, Options, SearchProblem, Settings, TensorFacts, Vertex, VertexKind
from partway.propagation.search.search import SearchMode, search
from partway.strategy import Mesh, StrategyError

MESH = Mesh({"x": 2})


@dataclass(frozen=True, eq=False)
class Matrix:
    """A table of conversion costs that is just numbers."""

    cost: np.ndarray

    def rows(self, sources):
        return self.cost[list(sources)]


def problem_with(unary, memory, pairs, limit=None):
    """A search problem with these numbers: of each vertex the costs and the bytes of its options, of pairs of vertices
    the costs together. Each vertex has one tensor, whose layout is its option."""
    vertices = []
    for i, (costs, held) in enumerate(zip(unary, memory, strict=True)):
        codes, free = np.arange(len(costs)), np.zeros(len(costs))
        factors = np.full((len(costs), 1), -1)
        options = Options(((None,), (None,)), (codes,), (codes,), factors, (), MESH, costs, free, free, held, held)
        vertices.append(Vertex(f"v{i}", VertexKind.OPERATOR if i else VertexKind.INPUT, None, options))
    edges = [Edge(None, a, 0, b, 0, Matrix(matrix)) for (a, b), matrix in pairs.items()]
    given = Settings(MESH, profile_of("cpu"), WEIGHTS[Level.SPEED], memory_limit=limit)
    return SearchProblem(None, given, tuple(vertices), tuple(edges), frozenset(), TensorFacts(), (), {}, frozenset())


@st.composite
def random_problems(draw):
    """Costs of about a millisecond and bytes of about a gigabyte, whole multiples so that ties happen, and a limit."""
    count = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = [int(n) for n in rng.integers(1, 4, count)]
    unary = [rng.integers(1, 9, n) * 1e-3 for n in sizes]
    memory = [rng.integers(0, 9, n) * 1e9 for n in sizes]
    possible = list(itertools.combinations(range(count), 2))
    chosen = draw(st.lists(st.sampled_from(possible), unique=True)) if possible else []
    pairs = {(a, b): rng.integers(0, 9, (sizes[a], sizes[b])) * 1e-3 for a, b in chosen}
    return problem_with(unary, memory, pairs), draw(st.integers(1, 40)) * 1e9


def choices_of(problem):
    return list(itertools.product(*(range(len(v.options)) for v in problem.vertices)))


def optimum_within(problem, limit):
    """The cost of the cheapest plan that holds at most `limit`; inf where there is none."""
    fits = [choice for choice in choices_of(problem) if problem.memory(choice) <= limit]
    return min((problem.cost(choice) for choice in fits), default=math.inf)


def dual_optimum(problem, limit):
    """The highest bound that a price of memory gives: the lower hull of the plans, as (bytes, cost), at the limit."""
    plans = {(problem.memory(choice), problem.cost(choice)) for choice in choices_of(problem)}
    below, above = ([plan for plan in plans if (plan[0] <= limit) == fits] for fits in (True, False))
    at = min(cost for _, cost in below)  # plans that fit
    lines = (c + (limit - m) / (n - m) * (d - c) for (m, c), (n, d) in itertools.product(below, above))
    return min([at, *lines])


@examples(400)
@given(random_problems())
def test_the_optimum_within_a_limit_lies_between_the_bound_and_the_cost(drawn):
    problem, limit = drawn
    best = optimum_within(problem, limit)
    assume(math.isfinite(best))
    found, price = within_memory(problem, limit)
    assert problem.memory(found.choice) <= limit
    assert found.cost == pytest.approx(problem.cost(found.choice))
    assert found.bound <= best * (1 + 1e-9)
    assert best <= found.cost * (1 + 1e-9)
    free = dynamic_programming(problem)
    if problem.memory(free.choice) <= limit:  # the limit does not bind
        assert (found, price) == (free, 0.0)
        assert found.proven
    else:
        assert price >= 0  # 0: a plan that fits costs as much as one that does not
        assert found.bound == pytest.approx(dual_optimum(problem, limit))


@examples(200)
@given(random_problems())
def test_a_limit_is_refused_exactly_where_no_plan_keeps_to_it(drawn):
    problem, limit = drawn
    least = min(problem.memory(choice) for choice in choices_of(problem))
    if least <= limit:
        within_memory(problem, limit)
        return
    with pytest.raises(StrategyError, match=re.escape(f"holds less than {least / 1e9:.4g} GB on a device")):
        within_memory(problem, limit)


@examples(200)
@given(random_problems())
def test_the_limit_that_an_error_names_is_one_that_works(drawn):
    problem, _ = drawn
    least = min(problem.memory(choice) for choice in choices_of(problem))
    assume(least > 0)
    with pytest.raises(StrategyError) as refused:
        within_memory(problem, least * 0.9)
    named = re.search(r"a limit of (\S+) GB would do", str(refused.value))
    assert named
    found, _ = within_memory(problem, float(named[1]) * 1e9)
    assert problem.memory(found.choice) == least


@examples(150)
@given(random_problems(), st.sampled_from(list(SearchMode)))
def test_every_search_keeps_to_the_limit_and_carries_its_bound(drawn, mode):
    problem, limit = drawn
    best = optimum_within(problem, limit)
    assume(math.isfinite(best))
    assume(mode is not SearchMode.RECURSIVE_PROGRAMMING)  # it needs the placements of real tensors
    limited = problem_with(
        [v.unary for v in problem.vertices],
        [v.options.memory for v in problem.vertices],
        {(e.producer, e.consumer): e.table.cost for e in problem.edges},
        limit,
    )
    found = search(limited, mode)
    assert limited.memory(found.choice) <= limit
    assert found.bound <= best * (1 + 1e-9)
    assert best <= found.cost * (1 + 1e-9)


def trade(limit=None):
    """One vertex: 1, 2 or 4 ms with 8, 4 or 1 GB."""
    return problem_with([np.array([1e-3, 2e-3, 4e-3])], [np.array([8e9, 4e9, 1e9])], {}, limit)


@pytest.mark.parametrize(
    ("limit", "cost"), [(9e9, 1e-3), (8e9, 1e-3), (7.9e9, 2e-3), (4e9, 2e-3), (3.9e9, 4e-3), (1e9, 4e-3)]
)
def test_as_much_is_paid_as_the_limit_takes(limit, cost):
    found, _ = within_memory(trade(), limit)
    assert found.cost == pytest.approx(cost)


def test_the_bound_is_the_straight_line_between_the_plans_on_both_sides():
    found, price = within_memory(trade(), 6e9)  # half way between 8 GB in 1 ms and 4 GB in 2 ms
    assert (found.cost, found.bound) == (pytest.approx(2e-3), pytest.approx(1.5e-3))
    assert price == pytest.approx(1e-3 / 4e9)
    assert not found.proven


def test_an_impossible_limit_says_what_would_do_and_what_is_heaviest():
    unary = [np.array([1e-3, 2e-3]), np.array([1e-3]), np.array([1e-3])]
    memory = [np.array([6e9, 3e9]), np.array([2e9]), np.array([0.0])]
    problem = problem_with(unary, memory, {(0, 1): np.zeros((2, 1)), (1, 2): np.zeros((1, 1))}, 4e9)
    for mode in (SearchMode.DYNAMIC_PROGRAMMING, SearchMode.SHARDING_PROPAGATION):
        with pytest.raises(StrategyError) as refused:
            search(problem, mode)
        assert str(refused.value) == (
            "no plan on the mesh x=2 holds less than 5 GB on a device (parameters, gradients, optimizer states and "
            "activations), and memory_limit is 4 GB; a limit of 5.005 GB would do, or more devices. The heaviest: "
            "v0 3 GB, v1 2 GB"
        )


def layer(x, w):
    return F.linear(x, w).square().sum()


@pytest.mark.parametrize(("fn", "shapes"), [(rows, [(4, 6)]), (layer, [(8, 4), (4, 4)])])
def test_on_a_small_graph_every_limit_is_met_as_well_as_the_bound_says(lab, fn, shapes):
    tensors = [torch.randn(s, requires_grad=True) for s in shapes]
    problem = lab.problem_of(fn, tensors, lab.LINE)
    every = choices_of(problem)
    assert 100 < len(every) < 50_000
    plans = [(problem.memory(choice), problem.cost(choice)) for choice in every]
    levels = sorted({held for held, _ in plans})
    free = dynamic_programming(problem)
    for limit in (*levels[:8], *levels[8::5]):
        best = min(cost for held, cost in plans if held <= limit)
        if math.isinf(best):
            continue
        found, _ = within_memory(problem, limit)
        assert problem.memory(found.choice) <= limit
        assert found.bound <= best * (1 + 1e-9)
        assert free.cost <= best * (1 + 1e-9)
        assert best <= found.cost * (1 + 1e-9)
    with pytest.raises(StrategyError, match=r"no plan on the mesh x=2 holds less than"):
        within_memory(problem, levels[0] * 0.99)
