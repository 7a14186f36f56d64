"""Limits on what a choice uses: against brute force, and against an integer program."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from min_sum_limits import Resource
from min_sum_solve import solve
from random_examples import examples
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp
from search_problems import plans, random_costs

from partway.propagation.minsum.network import Costs
from partway.strategy.errors import StrategyError


def drawn_resources(costs, seed, share=(0.4, 1.2)):
    """One to three resources; the last of several counts only some of the vertices, as a time does."""
    rng = np.random.default_rng(seed)
    resources, many = [], int(rng.integers(1, 4))
    for number in range(many):
        counted = rng.random(len(costs.unary)) < (0.5 if number and number == many - 1 else 1.0)
        uses = tuple(
            rng.integers(0, 20, len(own)).astype(float) * there for own, there in zip(costs.unary, counted, strict=True)
        )
        resources.append(Resource(uses, float(round(sum(use.mean() for use in uses) * rng.uniform(*share)))))
    return resources


def fits(resources, choice):
    return all(sum(float(use[c]) for use, c in zip(r.uses, choice, strict=True)) <= r.limit for r in resources)


@pytest.mark.slow
@examples(60)
@given(random_costs(vertices=5, options=4, fractions=True), st.integers(0, 2**32))
def test_the_cheapest_choice_within_the_limits_is_found(costs, seed):
    resources = drawn_resources(costs, seed)
    best = min((cost for choice, cost in plans(costs).items() if fits(resources, choice)), default=math.inf)
    try:
        found = solve(costs, resources=resources)
    except StrategyError:
        assert math.isinf(best)
        return
    assert fits(resources, found.choice)
    assert found.cost == costs.of(found.choice)
    assert found.bound <= best + 1e-6 * abs(best)
    assert found.cost <= best * (1 + 1e-3) + 1e-6


def program(costs, resources):
    """The optimum of the integer program: an option of each vertex, a pair of options of each table."""
    firsts = np.cumsum([0, *(len(own) for own in costs.unary)])
    count = firsts[-1] + sum(table.size for table in costs.pairs.values())
    rows, right = [], []
    for v, own in enumerate(costs.unary):
        row = sparse.lil_matrix((1, count))
        row[0, firsts[v] : firsts[v] + len(own)] = 1
        rows.append(row)
        right.append(1.0)
    at, weights = firsts[-1], [np.concatenate(costs.unary)]
    for (a, b), table in costs.pairs.items():
        seats = np.arange(table.size).reshape(table.shape) + at
        for v, lines in ((a, seats), (b, seats.T)):
            for i, line in enumerate(lines):
                row = sparse.lil_matrix((1, count))
                row[0, line] = 1
                row[0, firsts[v] + i] = -1
                rows.append(row)
                right.append(0.0)
        weights.append(table.ravel())
        at += table.size
    weight = np.concatenate(weights)
    constraints = [LinearConstraint(sparse.vstack(rows).tocsr(), right, right)]
    for resource in resources:
        use = np.zeros(count)
        use[: firsts[-1]] = np.concatenate(resource.uses)
        constraints.append(LinearConstraint(use[None], -np.inf, resource.limit))
    found = milp(
        np.where(np.isfinite(weight), weight, 0.0), integrality=(np.arange(count) < firsts[-1]).astype(int),
        bounds=Bounds(0, np.isfinite(weight).astype(float)), constraints=constraints,
    )  # fmt: skip
    return found.fun if found.status == 0 else math.inf


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_gap_to_the_integer_program_is_small(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, 6, 24)
    pairs = {}
    for v in range(1, 24):
        for u in {max(v - 1, 0), max(v - 3, 0), int(rng.integers(v))}:
            pairs[u, v] = rng.integers(0, 30, (sizes[u], sizes[v])).astype(float)
    costs = Costs(tuple(rng.integers(0, 60, n).astype(float) for n in sizes), pairs)
    resources = drawn_resources(costs, seed, share=(0.75, 0.9))
    optimum = program(costs, resources)
    found = solve(costs, resources=resources, seconds=300)  # of which it takes a few, wherever it is run
    assert fits(resources, found.choice)
    assert optimum - 1e-6 <= found.cost <= 1.02 * optimum
    assert found.bound <= optimum + 1e-6
    assert found.gap <= 0.02
    assert costs.of(found.choice) == found.cost


def test_a_limit_that_nothing_keeps_to_is_an_error_that_says_by_how_much():
    costs = Costs((np.zeros(2), np.zeros(2)), {(0, 1): np.array([[0.0, math.inf], [0.0, 0.0]])})
    uses = (np.array([3.0, 5.0]), np.array([4.0, 1.0]))
    assert solve(costs, resources=[Resource(uses, 6.0)]).choice == (1, 1)
    with pytest.raises(StrategyError, match=r"no choice keeps to the limit 5 of resource 0: any uses at least 6"):
        solve(costs, resources=[Resource(uses, 5.0)])


def test_limits_that_only_together_are_too_much_are_an_error():
    costs = Costs((np.zeros(2),) * 3, {(0, 1): np.ones((2, 2)), (1, 2): np.ones((2, 2))})
    one, other = (np.array([1.0, 0.0]),) * 3, (np.array([0.0, 1.0]),) * 3
    with pytest.raises(
        StrategyError, match="no choice that keeps to all limits was found; there is one for each limit"
    ):
        solve(costs, resources=[Resource(one, 1.0), Resource(other, 1.0)], seconds=2)
