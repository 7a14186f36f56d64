"""Reductions under limits, against brute force."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from min_sum_reduce import reduced_with
from random_examples import examples
from search_problems import plans, reducible

from partway.strategy.errors import StrategyError


@examples(200)
@given(reducible(options=3), st.integers(0, 2**32))
def test_with_uses_no_choice_is_lost_that_costs_and_uses_least(costs, seed):
    rng = np.random.default_rng(seed)
    uses = [rng.integers(0, 4, (2, len(own))).astype(float) for own in costs.unary]

    def used(uses, choice):
        return sum((use[:, c] for use, c in zip(uses, choice, strict=True)), np.zeros(2))

    limit = used(uses, [rng.integers(len(own)) for own in costs.unary])
    allowed = [cost for choice, cost in plans(costs).items() if (used(uses, choice) <= limit).all()]
    best = min(allowed, default=math.inf)
    try:
        rest, left, spent = reduced_with(costs, uses)
    except StrategyError:
        assert math.isinf(best)
        return
    fitting = {}
    for choice, cost in plans(rest.costs).items():
        if (spent + used(left, choice) <= limit).all():
            fitting[choice] = cost + rest.constant
            if math.isfinite(cost):
                np.testing.assert_allclose(used(uses, rest.whole(choice)), spent + used(left, choice))
    assert min(fitting.values(), default=math.inf) == pytest.approx(best, rel=1e-9)
