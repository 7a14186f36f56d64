"""Leaving options out: the bound is one, and no plan that is cheaper than the known one is lost."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partway.propagation.cost.conversion import conversion_table
from partway.propagation.cost.cost import WEIGHTS, Level
from partway.propagation.cost.profile import profile_of
from partway.propagation.search.eliminate import eliminate, elimination_order
from partway.propagation.search.exact import dynamic_programming, optimum
from partway.propagation.search.narrow import Narrowing, narrow
from partway.propagation.search.network import Converting, Costs, Matrix, network, pairs_of
from partway.propagation.search.recursive import recursive_programming
from partway.strategy import Mesh


@st.composite
def problems(draw, vertices=6, options=5):
    count = draw(st.integers(1, vertices))
    sizes = draw(st.lists(st.integers(1, options), min_size=count, max_size=count))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    possible = list(itertools.combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(possible), unique=True)) if possible else []
    whole = draw(st.booleans())  # whole numbers, so that ties happen

    def numbers(*shape):
        return rng.integers(0, 9, shape).astype(float) if whole else rng.random(shape)

    return Costs(tuple(numbers(n) for n in sizes), {(a, b): numbers(sizes[a], sizes[b]) for a, b in edges})


def plans(costs):
    return {choice: costs.of(choice) for choice in itertools.product(*(range(len(u)) for u in costs.unary))}


@settings(max_examples=300, deadline=None)
@given(problems(), st.floats(0.0, 0.5), st.integers(1, 12))
def test_the_bound_is_one_and_no_cheaper_plan_is_lost(costs, above, sweeps):
    every = plans(costs)
    best = min(every.values())
    upper = best * (1 + above) + 1e-9
    found = Narrowing(network(costs), upper)
    for sweep in range(sweeps):
        found.sweep(forward=sweep % 2 == 0)
        assert found.bound <= best + 1e-9
        if sweep % 3 == 2:
            found.settle()
            assert found.best is None or every[found.best] == pytest.approx(found.upper)
            found.shrink()
    found.shrink()
    kept = [set(rows.tolist()) for rows in found.kept]
    for choice, cost in every.items():
        if cost < found.upper * (1 - 1e-9):
            assert all(c in rows for c, rows in zip(choice, kept, strict=True)), (choice, cost, found.upper)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_on_a_chain_the_bound_becomes_the_optimum(costs):
    chain = Costs(costs.unary, {ends: m for ends, m in costs.pairs.items() if ends[1] == ends[0] + 1})
    best = min(plans(chain).values())
    found = narrow(network(chain), best + 1.0, lambda _: False)
    assert found.bound == pytest.approx(best, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(problems(), st.data())
def test_with_much_work_the_optimum_is_still_found_and_proven(costs, data):
    start = tuple(data.draw(st.integers(0, len(u) - 1)) for u in costs.unary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partway.propagation.search.eliminate.MUCH_WORK", 0.0)
        found = optimum(costs, math.inf, lambda: start)
    best = min(plans(costs).values())
    assert found.cost == pytest.approx(best, abs=1e-12)
    assert found.bound <= best + 1e-9
    assert costs.of(found.choice) == pytest.approx(found.cost)


@settings(max_examples=100, deadline=None)
@given(problems(), st.floats(0.5, 1.5))
def test_what_need_not_be_found_is_not_claimed(costs, share):
    best = min(plans(costs).values())
    below = best * share
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partway.propagation.search.eliminate.MUCH_WORK", 0.0)
        found = optimum(costs, math.inf, lambda: (0,) * len(costs.unary), below)
    assert found.cost >= best - 1e-9
    if best < below * (1 - 1e-6) and found.bound >= found.cost:  # it may give up, and then claims no more than a bound
        assert found.cost == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("gradient", [True, False])
def test_conversions_that_are_not_written_out_cost_the_same(gradient):
    mesh = Mesh.of_sizes((2, 3, 2))
    table = conversion_table((12, 6), 4, "sum", gradient, mesh, profile_of("cpu"), WEIGHTS[Level.COMMUNICATION])
    rng = np.random.default_rng(0)
    valid = np.flatnonzero(table.valid)
    rows, columns = rng.choice(valid, 40), rng.choice(valid, 30)
    lazy, written = Converting(table, rows, columns), Matrix(table.cost[np.ix_(rows, columns)])
    assert lazy.shape == written.shape == (40, 30)
    for side, count in ((0, 40), (1, 30)):
        alone = rng.random(count)
        np.testing.assert_allclose(lazy.least(alone, side), written.least(alone, side), rtol=1e-12)
        np.testing.assert_allclose(lazy.with_option(3, side), written.with_option(3, side), rtol=1e-12)
    some = rng.random(40) < 0.5, rng.random(30) < 0.5
    np.testing.assert_allclose(
        lazy.take(*some).least(np.zeros(some[0].sum()), 0), written.take(*some).least(np.zeros(some[0].sum()), 0)
    )


def test_a_problem_too_large_to_write_out_is_solved_all_the_same(lab, monkeypatch):
    import torch
    import torch.nn.functional as F

    def block(x, w, v):
        return F.linear(torch.relu(F.linear(x, w)), v).pow(2).mean()

    tensors = tuple(torch.randn(s, requires_grad=True) for s in [(8, 4), (8, 4), (4, 8)])
    problem = lab.problem_of(block, tensors, Mesh.of_sizes((2, 2)))
    exact = dynamic_programming(problem)
    assert exact.proven
    monkeypatch.setattr("partway.propagation.search.network.MANY_PAIRS", pairs_of(problem) - 1)
    monkeypatch.setattr("partway.propagation.search.exact.FEW_PAIRS", 100)
    found = dynamic_programming(problem)
    assert found.cost == pytest.approx(exact.cost, rel=1e-12)
    assert found.bound <= exact.cost * (1 + 1e-9)
    assert problem.cost(found.choice) == pytest.approx(found.cost)
    assert recursive_programming(problem).cost >= exact.cost * (1 - 1e-12)


def test_nothing_is_computed_for_a_schedule():
    costs = Costs((np.zeros(3),) * 4, {(i, i + 1): np.full((3, 3), np.nan) for i in range(3)})
    order = elimination_order(costs)
    assert len(order.steps) == 4
    assert order.width == 2
    assert order.work == sum(math.prod([3] * len(joint)) for _, joint in order.recipes.values())
    assert eliminate(Costs(costs.unary, {ends: np.ones((3, 3)) for ends in costs.pairs})).cost == 3
