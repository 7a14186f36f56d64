"""The least of any costs: against brute force and against toulbar2."""

import contextlib
import itertools
import math
import resource
import time

import numpy as np
import pytest
from hypothesis import given
from random_examples import examples
from search_problems import brute_force, grid, random_costs

from partway.propagation.minsum.least import least
from partway.propagation.minsum.network import Costs
from partway.strategy.errors import StrategyError


@examples(300)
@given(random_costs(fractions=True))
def test_the_optimum_is_found_and_proven(costs):
    best = brute_force(costs)
    if math.isinf(best):
        with contextlib.suppress(StrategyError):  # reductions alone show it
            assert least(costs).bound == math.inf
        return
    found = least(costs)
    assert found.cost == costs.of(found.choice) == pytest.approx(best, abs=1e-9)
    assert found.proven


@examples(50)
@given(random_costs(forbidden=False, fractions=True))
def test_costs_may_be_negative(costs):
    moved = Costs(tuple(own - 7 for own in costs.unary), {e: 3 - table for e, table in costs.pairs.items()})
    assert least(moved).cost == pytest.approx(brute_force(moved), abs=1e-9)


@pytest.mark.parametrize(("nodes", "options"), [(60, 4), (12, 30)])
def test_neither_work_nor_memory_passes_what_there_is(nodes, options):
    """A clique, whose elimination is more work than a float can say."""
    rng = np.random.default_rng(0)
    pairs = {
        ends: rng.integers(0, 9, (options, options)).astype(float) for ends in itertools.combinations(range(nodes), 2)
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    costs = Costs(tuple(rng.integers(0, 9, options).astype(float) for _ in range(nodes)), pairs)
    found = least(costs, time.monotonic() + 2)
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
        found = least(costs)
        assert found.proven
        assert found.cost == model.Solve()[1]


def test_of_parts_that_nothing_connects_each_is_solved():
    one = grid(4, 3)
    count = len(one.unary)
    both = {**one.pairs, **{(a + count, b + count): table for (a, b), table in one.pairs.items()}}
    assert least(Costs(one.unary * 2, both)).cost == pytest.approx(2 * least(one).cost)
