"""Branch and bound against brute force, where nothing is eliminated before."""

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from random_examples import examples
from search_problems import brute_force, random_costs

from partway.propagation.minsum.branch import Best, branched, ceiling, grounded
from partway.propagation.minsum.network import Costs


@examples(150)
@given(random_costs(options=5, fractions=True))
def test_the_optimum_is_found_and_proven(costs):
    optimum = brute_force(costs)
    best = Best(costs, math.inf)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("EASY", "SUMS"):
            patch.setattr(f"partway.propagation.minsum.branch.{name}", 0.0)
        bound = branched(best)
    assert best.cost == pytest.approx(optimum, abs=1e-9)
    assert bound == pytest.approx(optimum, rel=1e-6, abs=1e-6)
    assert best.choice is None or costs.of(best.choice) == best.cost


def test_a_choice_that_costs_nothing_ends_the_search():
    best = Best(Costs((np.array([8.0, 6.0, 0.0]),), {}), math.inf)  # of whole numbers the next one would be below 0
    assert branched(best) == best.cost == 0.0


def test_kicks_find_what_forests_cannot(monkeypatch):
    """The starts of ten graphs in which all vertices are neighbours, with kicks and without them."""

    def started(seed):
        rng = np.random.default_rng(seed)
        pairs = {ends: rng.integers(0, 100, (6, 6)).astype(float) for ends in itertools.combinations(range(25), 2)}
        best = Best(Costs(tuple(rng.integers(0, 100, 6).astype(float) for _ in range(25)), pairs), nodes=0)
        assert branched(best) <= best.cost
        return best.cost

    kicked = [started(seed) for seed in range(10)]
    monkeypatch.setattr("partway.propagation.minsum.branch.KICKS", 0)
    forests = [started(seed) for seed in range(10)]
    assert all(one <= other for one, other in zip(kicked, forests, strict=True))
    assert sum(kicked) < sum(forests)


@examples(100)
@given(random_costs(forbidden=False, fractions=True))
def test_without_time_the_bound_is_still_one(costs):
    best = Best(costs, time.monotonic() - 1)
    bound = branched(best)
    assert bound - 1e-9 <= brute_force(costs) <= best.cost + 1e-9


@examples(100)
@given(random_costs(forbidden=False, fractions=True))
def test_grounded_costs_are_not_negative_and_a_constant_off(costs):
    moved = Costs(tuple(own - 4 for own in costs.unary), {e: t - 2 for e, t in costs.pairs.items()})
    floor, constant = grounded(moved)
    assert min(float(array.min()) for array in (*floor.unary, *floor.pairs.values())) == 0
    choice = tuple(0 for _ in costs.unary)
    assert floor.of(choice) + constant == pytest.approx(moved.of(choice))
    assert ceiling(floor) > floor.of(choice)


def test_of_choices_that_cost_the_same_the_first_in_order_stays():
    best = Best(Costs((np.array([3.0, 1.0, 2.0, 1.0]),), {}))
    for option in (0, 3, 1, 3, 2):
        best.offer((option,))
    assert (best.cost, best.choice) == (1.0, (1,))
