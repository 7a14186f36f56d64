"""The search as a solver of any problem: what it returns in time, and what it refuses."""

import math

import numpy as np
import pytest
from min_sum_limits import Resource
from min_sum_solve import solve
from search_problems import grid

from partway.propagation.minsum.network import Costs
from partway.strategy.errors import StrategyError


def test_what_is_much_work_is_bounded_in_time():
    costs = grid(24, 6, coupling=40)
    found = solve(costs, seconds=2)
    assert 0 <= found.gap < 0.3
    assert costs.of(found.choice) == found.cost


@pytest.mark.parametrize(
    ("costs", "resources", "message"),
    [
        (Costs((np.zeros(2), np.zeros(0)), {}), (), "vertex 1 has no option"),
        (
            Costs((np.zeros(2),) * 2, {(1, 0): np.zeros((2, 2))}),
            (),
            r"vertices \(1, 0\): vertices are 0 to 1, the lower one",
        ),
        (
            Costs((np.zeros(2),) * 2, {(0, 1): np.zeros((2, 3))}),
            (),
            r"\(0, 1\) is \(2, 3\), and they have \(2, 2\) options",
        ),
        (Costs((np.array([math.nan]),), {}), (), "costs are numbers or inf, and there is nan or -inf among them"),
        (Costs((np.zeros(2),), {}), (Resource((np.zeros(3),), 1.0),), "resource 0 needs the use of each option"),
        (
            Costs((np.zeros(1),), {}),
            (Resource((np.array([math.inf]),), 1.0),),
            "resource 0 has uses that are not finite",
        ),
    ],
)
def test_what_is_no_problem_is_refused(costs, resources, message):
    with pytest.raises(StrategyError, match=message):
        solve(costs, resources=resources)


def test_where_no_choice_is_finite_that_is_an_error():
    costs = Costs((np.zeros(2),) * 2, {(0, 1): np.full((2, 2), math.inf)})
    with pytest.raises(StrategyError, match="no choice of options has a finite cost"):
        solve(costs)
