"""Leaving options out: the bound is one, and no plan that is cheaper than the known one is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from search_problems import brute_force, plans, random_costs

from partway.propagation.minsum.narrow import Narrowing, narrow
from partway.propagation.minsum.network import Costs, network


@examples(300)
@given(random_costs(options=5, forbidden=False, fractions=True), st.floats(0.0, 0.5), st.integers(1, 12))
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
    worth = [dict(zip(rows.tolist(), least, strict=True)) for rows, least in zip(found.kept, found.worth, strict=True)]
    for choice, cost in every.items():
        if cost < found.upper * (1 - 1e-9):
            assert all(least[c] <= cost * (1 + 1e-9) + 1e-9 for c, least in zip(choice, worth, strict=True))
        if cost < found.upper * (1 - 1e-9):
            assert all(c in rows for c, rows in zip(choice, kept, strict=True)), (choice, cost, found.upper)


@examples(100)
@given(random_costs(options=5, forbidden=False, fractions=True))
def test_on_a_chain_the_bound_becomes_the_optimum(costs):
    chain = Costs(costs.unary, {ends: m for ends, m in costs.pairs.items() if ends[1] == ends[0] + 1})
    best = brute_force(chain)
    found = narrow(network(chain), best + 1.0, lambda _: False)
    assert found.bound == pytest.approx(best, abs=1e-9)
