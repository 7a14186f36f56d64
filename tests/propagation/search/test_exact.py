"""The exact search against brute force, also where options are left out first."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from search_problems import brute_force, random_costs, rows

from partway.propagation.search.exact import dynamic_programming, optimum
from partway.propagation.search.network import costs_of, pairs_of
from partway.propagation.search.recursive import recursive_programming
from partway.strategy import Mesh


def test_dynamic_programming_is_brute_force_on_a_small_graph(lab):
    x = torch.randn(4, 6, requires_grad=True)
    problem = lab.problem_of(rows, (x,), lab.LINE)
    costs = costs_of(problem)
    total = math.prod(len(u) for u in costs.unary)
    assert 1000 < total < 200_000
    found = dynamic_programming(problem)
    assert found.cost == pytest.approx(brute_force(costs))
    assert found.cost == pytest.approx(problem.cost(found.choice))


@examples(150)
@given(random_costs(options=5, forbidden=False, fractions=True), st.data())
def test_with_much_work_the_optimum_is_still_found_and_proven(costs, data):
    start = tuple(data.draw(st.integers(0, len(u) - 1)) for u in costs.unary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partway.propagation.search.eliminate.MUCH_WORK", 0.0)
        found = optimum(costs, math.inf, lambda: start)
    best = brute_force(costs)
    assert found.cost == pytest.approx(best, abs=1e-12)
    assert found.bound <= best + 1e-9
    assert costs.of(found.choice) == pytest.approx(found.cost)


@examples(100)
@given(random_costs(options=5, forbidden=False, fractions=True), st.floats(0.5, 1.5))
def test_what_need_not_be_found_is_not_claimed(costs, share):
    best = brute_force(costs)
    below = best * share
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partway.propagation.search.eliminate.MUCH_WORK", 0.0)
        found = optimum(costs, math.inf, lambda: (0,) * len(costs.unary), below)
    assert found.cost >= best - 1e-9
    if best < below * (1 - 1e-6) and found.bound >= found.cost:  # it may give up, and then claims no more than a bound
        assert found.cost == pytest.approx(best, abs=1e-12)


@examples(100)
@given(random_costs(options=5, fractions=True))
def test_where_elimination_is_too_much_the_search_of_programs_divides(costs):
    """Also from a start that is infinite, from which elimination without a limit was tried once."""
    best = brute_force(costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partway.propagation.search.eliminate.MUCH_WORK", 0.0)
        found = optimum(costs, math.inf, lambda: (0,) * len(costs.unary))
    assert found.bound <= best + 1e-9
    assert found.cost == pytest.approx(best, abs=1e-9)
    assert math.isinf(best) or costs.of(found.choice) == pytest.approx(found.cost)


def block(x, w, v):
    return F.linear(torch.relu(F.linear(x, w)), v).pow(2).mean()


def test_a_problem_too_large_to_write_out_is_solved_all_the_same(lab, monkeypatch):
    tensors = tuple(torch.randn(s, requires_grad=True) for s in [(8, 4), (8, 4), (4, 8)])
    problem = lab.problem_of(block, tensors, Mesh.of_sizes((2, 2)))
    exact = dynamic_programming(problem)
    assert exact.proven
    monkeypatch.setattr("partway.propagation.search.network.MANY_PAIRS", pairs_of(problem) - 1)
    monkeypatch.setattr("partway.propagation.search.many.FEW_PAIRS", 100)
    found = dynamic_programming(problem)
    assert found.cost == pytest.approx(exact.cost, rel=1e-12)
    assert found.bound <= exact.cost * (1 + 1e-9)
    assert problem.cost(found.choice) == pytest.approx(found.cost)
    assert recursive_programming(problem).cost >= exact.cost * (1 - 1e-12)
