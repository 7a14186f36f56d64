"""Messages by colours: the bound is one, no cheaper choice is lost, and shifted costs are the costs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from search_problems import plans, random_costs

from partway.propagation.minsum.messages import Messages, colours
from partway.propagation.minsum.network import Costs


@examples(300)
@given(random_costs(options=5, fractions=True), st.floats(0.0, 0.5), st.integers(1, 12))
def test_the_bound_is_one_and_no_cheaper_choice_is_lost(costs, above, sweeps):
    every = plans(costs)
    best = min(every.values())
    if np.isinf(best):
        return
    upper = best * (1 + above) + 1e-6
    messages = Messages(costs, upper)
    for sweep in range(sweeps):
        messages.sweep(forward=sweep % 2 == 0)
        assert messages.bound <= best + 1e-9
        assert messages.settle() in every
    left, shifted = messages.left(), messages.shifted()
    for choice, cost in every.items():
        if cost < upper * (1 - 1e-9):
            assert all(c in rows for c, rows in zip(choice, left, strict=True))
            assert all(messages.worth[c, v] <= cost + 1e-9 for v, c in enumerate(choice))
            seats = tuple(int(np.searchsorted(rows, c)) for c, rows in zip(choice, left, strict=True))
            assert shifted.of(seats) == pytest.approx(cost, abs=1e-8)


def test_on_a_tree_the_bound_becomes_the_optimum():
    rng = np.random.default_rng(0)
    costs = Costs(tuple(rng.random(3) for _ in range(7)), {((v - 1) // 2, v): rng.random((3, 3)) for v in range(1, 7)})
    best = min(plans(costs).values())
    messages = Messages(costs, best + 0.5)
    for sweep in range(20):
        messages.sweep(forward=sweep % 2 == 0)
    assert messages.bound == pytest.approx(best)
    assert costs.of(messages.settle()) == pytest.approx(best)


def test_neighbours_have_different_colours():
    near = [[1, 2, 3], [0, 2], [0, 1], [0], []]
    chosen = colours(near)
    assert all(chosen[v] != chosen[u] for v, others in enumerate(near) for u in others)
    assert max(chosen) == 2
