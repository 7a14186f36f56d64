"""Reductions against brute force: the optimum of what is left is that of the whole, and so is the way back."""

import math

import numpy as np
import pytest
from hypothesis import given
from random_examples import examples
from search_problems import plans, reducible

from partway.propagation.minsum.network import Costs
from partway.propagation.minsum.reduce import reduced
from partway.strategy.errors import StrategyError


@examples(400)
@given(reducible())
def test_the_optimum_stays_and_is_found_again(costs):
    best = min(plans(costs).values())
    try:
        rest = reduced(costs)
    except StrategyError:
        assert math.isinf(best)
        return
    left = plans(rest.costs)
    choice = min(left, key=left.__getitem__)
    assert left[choice] + rest.constant == pytest.approx(best, rel=1e-9)
    assert costs.of(rest.whole(choice)) == pytest.approx(best, rel=1e-9)


def test_what_follows_from_one_vertex_or_adds_up_is_gone():
    """A clique of four with tables of no structure, each of its vertices with a chain of followers, which are next to
    one another by tables that add up."""
    rng = np.random.default_rng(0)
    unary, pairs = [rng.random(4) for _ in range(4)], {}
    for a in range(4):
        for b in range(a):
            pairs[b, a] = rng.random((4, 4))
    for _ in range(200):
        of, v = int(rng.integers(len(unary))), len(unary)
        table = np.full((len(unary[of]), 3), math.inf)
        table[np.arange(len(table)), rng.integers(0, 3, len(table))] = 0.0
        pairs[of, v] = table
        unary.append(rng.random(3))
        if v > 5 and of != v - 1:
            pairs[v - 1, v] = rng.random((len(unary[v - 1]), 1)) + rng.random(3)
    rest = reduced(Costs(tuple(unary), pairs))
    assert rest.vertices == [] or set(rest.vertices) <= {0, 1, 2, 3}


def test_of_options_that_are_equal_one_stays():
    clique = {(a, b): np.array([[1.0, 0.0, 1.0], [0.0, 5.0, 0.0], [1.0, 0.0, 1.0]]) for b in range(4) for a in range(b)}
    rest = reduced(Costs((np.array([3.0, 2.0, 3.0]),) * 4, clique))
    assert all(len(kept) <= 2 for kept in rest.kept)


def test_what_no_choice_can_have_is_an_error_that_names_the_vertex():
    costs = Costs((np.zeros(2), np.zeros(2)), {(0, 1): np.full((2, 2), math.inf)})
    with pytest.raises(
        StrategyError, match=r"no choice of options has a finite cost: every option of vertex 0 costs inf"
    ):
        reduced(costs)


def test_a_choice_of_the_whole_as_one_of_what_is_left():
    rng = np.random.default_rng(1)
    clique = {(a, b): rng.random((3, 3)) for b in range(5) for a in range(b)}
    rest = reduced(Costs(tuple(rng.random(3) for _ in range(5)), clique))
    inside = tuple(len(kept) - 1 for kept in rest.kept)
    assert rest.part(rest.whole(inside)) == inside
