"""Costs that are too many to be written out: the optimum, a bound, and plans on the way."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from search_problems import brute_force, plans, random_costs

from partway.propagation.minsum.eliminate import eliminate
from partway.propagation.minsum.many import improved, optimum_of_many
from partway.propagation.minsum.network import Costs, network

COSTS = random_costs(options=5, forbidden=False, fractions=True)


def solved(costs, below=math.inf, few=True, start=None, left=500):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partway.propagation.minsum.many.LEFT", left)
        patch.setattr("partway.propagation.minsum.many.FEW_PAIRS", 20)
        return optimum_of_many(
            network(costs), lambda: start, below, lambda _: few, lambda costs, start: eliminate(costs)
        )


@examples(150)
@given(COSTS, st.sampled_from([0, 500]))
def test_the_optimum_is_found_and_proven(costs, left):
    found, best = solved(costs, left=left), brute_force(costs)
    assert found.cost == pytest.approx(best, abs=1e-12)
    assert costs.of(found.choice) == pytest.approx(found.cost)
    assert found.bound == pytest.approx(best, abs=1e-12)


@examples(100)
@given(COSTS, st.floats(0.5, 1.5))
def test_what_need_not_be_found_is_not_claimed(costs, share):
    best = brute_force(costs)
    found = solved(costs, below=share * best)
    assert costs.of(found.choice) == pytest.approx(found.cost)
    assert min(found.bound, share * best) <= best + 1e-9
    if best < share * best * (1 - 1e-6):
        assert found.cost == pytest.approx(best, abs=1e-12)


@examples(50)
@given(COSTS)
def test_what_is_too_much_to_write_out_has_a_plan_and_a_bound(costs):
    found, best = solved(costs, few=False), brute_force(costs)
    assert costs.of(found.choice) == pytest.approx(found.cost)
    assert found.bound - 1e-9 <= best <= found.cost + 1e-9


@examples(100)
@given(random_costs(options=4, forbidden=True, fractions=True))
def test_where_some_pairs_are_impossible_the_plan_that_is_given_is_where_it_starts(costs):
    every = plans(costs)
    best = min(every, key=every.get)
    found = solved(costs, start=best)
    assert found.cost == pytest.approx(every[best], abs=1e-12)
    assert math.isinf(found.cost) or costs.of(found.choice) == pytest.approx(found.cost)


@examples(100)
@given(COSTS, st.data())
def test_the_options_of_a_forest_cost_no_more_and_a_tree_is_solved_at_once(costs, data):
    choice = [data.draw(st.integers(0, len(unary) - 1)) for unary in costs.unary]
    better = improved(network(costs), choice, np.random.default_rng(0))
    assert costs.of(tuple(better)) <= costs.of(tuple(choice)) + 1e-12
    chain = Costs(costs.unary, {ends: m for ends, m in costs.pairs.items() if ends[1] == ends[0] + 1})
    best = improved(network(chain), choice, np.random.default_rng(0))
    assert chain.of(tuple(best)) == pytest.approx(brute_force(chain), abs=1e-12)
    assert solved(chain).cost == pytest.approx(brute_force(chain), abs=1e-12)
