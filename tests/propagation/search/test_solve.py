"""The search for any problem: against brute force, against toulbar2, and what it refuses."""

import itertools
import math
import resource

import numpy as np
import pytest
from hypothesis import given
from random_examples import examples
from search_problems import brute_force, random_costs

from partway.propagation.search.exact import optimum
from partway.propagation.search.network import Costs
from partway.propagation.search.resources import Resource
from partway.propagation.search.solve import solve
from partway.strategy.errors import StrategyError


@examples(300)
@given(random_costs(fractions=True))
def test_the_optimum_is_found_and_proven(costs):
    best = brute_force(costs)
    if math.isinf(best):
        with pytest.raises(StrategyError, match="no choice of options has a finite cost"):
            solve(costs)
        return
    found = solve(costs)
    assert found.cost == costs.of(found.choice) == pytest.approx(best, abs=1e-9)
    assert found.proven
    assert found.plans[0] == (found.cost, found.choice)


@examples(50)
@given(random_costs(forbidden=False, fractions=True))
def test_costs_may_be_negative(costs):
    moved = Costs(tuple(own - 7 for own in costs.unary), {e: 3 - table for e, table in costs.pairs.items()})
    assert solve(moved).cost == pytest.approx(brute_force(moved), abs=1e-9)


def grid(side, options, seed=0, coupling=9):
    """A grid, with costs that are whole numbers and some that are infinite."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for v in range(side * side):
        for u in (v + 1, v + side):
            if u < side * side and (u == v + side or u % side):
                pairs[v, u] = rng.integers(0, coupling + 1, (options, options)).astype(float)
                pairs[v, u][rng.random((options, options)) < 0.05] = math.inf
    return Costs(tuple(rng.integers(0, 30, options).astype(float) for _ in range(side * side)), pairs)


def test_what_is_much_work_is_bounded_in_time():
    costs = grid(24, 6, coupling=40)
    found = solve(costs, seconds=2)
    assert 0 <= found.gap < 0.3
    assert costs.of(found.choice) == found.cost


@pytest.mark.parametrize(("nodes", "options"), [(60, 4), (12, 30)])
def test_neither_work_nor_memory_passes_what_there_is(nodes, options):
    """A clique, whose elimination is more work than a float can say."""
    rng = np.random.default_rng(0)
    pairs = {
        ends: rng.integers(0, 9, (options, options)).astype(float) for ends in itertools.combinations(range(nodes), 2)
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = solve(Costs(tuple(rng.integers(0, 9, options).astype(float) for _ in range(nodes)), pairs), seconds=2)
    assert found.bound <= found.cost < math.inf
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 3e9


def test_an_optimum_that_messages_prove_is_toulbar2s():
    pytoulbar2 = pytest.importorskip("pytoulbar2", reason="toulbar2 is a judge where it is installed")
    for seed in range(5):
        costs = grid(7, 4, seed)
        most = 10**6
        model = pytoulbar2.CFN(float(most), resolution=0)
        for v, own in enumerate(costs.unary):
            model.AddVariable(f"x{v}", range(len(own)))
            model.AddFunction([v], own.tolist())
        for ends, table in costs.pairs.items():
            model.AddFunction(list(ends), np.where(np.isfinite(table), table, most).ravel().tolist())
        found = solve(costs)
        assert found.proven
        assert found.cost == model.Solve()[1]


def test_of_parts_that_nothing_connects_each_is_solved():
    one = grid(4, 3)
    count = len(one.unary)
    both = {**one.pairs, **{(a + count, b + count): table for (a, b), table in one.pairs.items()}}
    assert solve(Costs(one.unary * 2, both)).cost == pytest.approx(2 * solve(one).cost)


def test_a_caller_gives_prices_and_gets_several_choices():
    costs = grid(14, 5, coupling=40)
    priced = Costs(tuple(own + 3.0 * np.arange(5) for own in costs.unary), costs.pairs)
    found = solve(priced, seconds=5)
    assert len(found.plans) > 1
    assert all(priced.of(choice) == pytest.approx(cost) for cost, choice in found.plans)
    assert found.plans == tuple(sorted(found.plans))


@pytest.mark.parametrize(
    ("costs", "resources", "message"),
    [
        (Costs((np.zeros(2), np.zeros(0)), {}), (), "vertex 1 has no option"),
        (
            Costs((np.zeros(2),) * 2, {(1, 0): np.zeros((2, 2))}),
            (),
            r"vertices \(1, 0\): vertices are 0 to 1, the lower one",
        ),
        (
            Costs((np.zeros(2),) * 2, {(0, 1): np.zeros((2, 3))}),
            (),
            r"\(0, 1\) is \(2, 3\), and they have \(2, 2\) options",
        ),
        (Costs((np.array([math.nan]),), {}), (), "costs are numbers or inf, and there is nan or -inf among them"),
        (Costs((np.zeros(2),), {}), (Resource((np.zeros(3),), 1.0),), "resource 0 needs the use of each option"),
        (
            Costs((np.zeros(1),), {}),
            (Resource((np.array([math.inf]),), 1.0),),
            "resource 0 has uses that are not finite",
        ),
    ],
)
def test_what_is_no_problem_is_refused(costs, resources, message):
    with pytest.raises(StrategyError, match=message):
        solve(costs, resources=resources)


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
