"""A forest is solved exactly beside the others, so that a choice only gets better."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from search_problems import brute_force, random_costs

from partway.propagation.minsum.forests import by_ends, improved, kicked
from partway.propagation.minsum.network import Costs


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


def test_a_kick_changes_a_few_vertices_that_hang_together():
    rng = np.random.default_rng(0)
    costs = Costs((np.zeros(50),) * 60, {(v - 1, v): np.zeros((50, 50)) for v in range(1, 60)})
    seen = set()
    for _ in range(50):
        now = kicked(by_ends(costs), [50] * 60, [0] * 60, rng)
        changed = [v for v, option in enumerate(now) if option]
        assert 1 <= len(changed) <= 10
        assert changed[-1] - changed[0] < 10  # of a chain, a stretch
        seen |= set(changed)
    assert len(seen) > 40


def test_a_kick_of_two_vertices_stays_in_what_there_is():
    costs = Costs((np.zeros(3), np.zeros(2)), {(0, 1): np.zeros((3, 2))})
    for seed in range(20):
        first, second = kicked(by_ends(costs), [3, 2], [0, 0], np.random.default_rng(seed))
        assert first in range(3)
        assert second in range(2)
