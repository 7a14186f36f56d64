"""The optimum of costs against brute force, also where options are left out first."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from search_problems import brute_force, random_costs

from partway.propagation.minsum.optimum import optimum


@examples(150)
@given(random_costs(options=5, forbidden=False, fractions=True), st.data())
def test_with_much_work_the_optimum_is_still_found_and_proven(costs, data):
    start = tuple(data.draw(st.integers(0, len(u) - 1)) for u in costs.unary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partway.propagation.minsum.eliminate.MUCH_WORK", 0.0)
        found = optimum(costs, math.inf, lambda: start)
    best = brute_force(costs)
    assert found.cost == pytest.approx(best, abs=1e-12)
    assert found.bound <= best + 1e-9
    assert costs.of(found.choice) == pytest.approx(found.cost)


@examples(100)
@given(random_costs(options=5, forbidden=False, fractions=True), st.floats(0.5, 1.5))
def test_what_need_not_be_found_is_not_claimed(costs, share):
    best = brute_force(costs)
    below = best * share
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partway.propagation.minsum.eliminate.MUCH_WORK", 0.0)
        found = optimum(costs, math.inf, lambda: (0,) * len(costs.unary), below)
    assert found.cost >= best - 1e-9
    if best < below * (1 - 1e-6) and found.bound >= found.cost:  # it may give up, and then claims no more than a bound
        assert found.cost == pytest.approx(best, abs=1e-12)


@examples(100)
@given(random_costs(options=5, fractions=True))
def test_where_elimination_is_too_much_the_search_of_programs_divides(costs):
    """Also from a start that is infinite, from which elimination without a limit was tried once."""
    best = brute_force(costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partway.propagation.minsum.eliminate.MUCH_WORK", 0.0)
        found = optimum(costs, math.inf, lambda: (0,) * len(costs.unary))
    assert found.bound <= best + 1e-9
    assert found.cost == pytest.approx(best, abs=1e-9)
    assert math.isinf(best) or costs.of(found.choice) == pytest.approx(found.cost)
