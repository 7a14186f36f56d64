"""A forest is solved exactly beside the others, so that a choice only gets better."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from search_problems import brute_force, random_costs

from partway.propagation.search.forests import by_ends, improved
from partway.propagation.search.network import Costs


@examples(200)
@given(random_costs(forbidden=False, fractions=True), st.integers(0, 2**32))
def test_a_choice_only_gets_better(costs, seed):
    rng, tables = np.random.default_rng(seed), by_ends(costs)
    choice = [int(rng.integers(len(own))) for own in costs.unary]
    for _ in range(5):
        better = improved(costs, tables, choice, rng)
        assert costs.of(tuple(better)) <= costs.of(tuple(choice)) + 1e-12
        choice = better


def test_a_tree_is_solved_at_once():
    rng = np.random.default_rng(0)
    costs = Costs(tuple(rng.random(3) for _ in range(8)), {((v - 1) // 2, v): rng.random((3, 3)) for v in range(1, 8)})
    found = improved(costs, by_ends(costs), [0] * 8, rng)
    assert costs.of(tuple(found)) == pytest.approx(brute_force(costs))
