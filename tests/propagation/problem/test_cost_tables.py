"""The numbers of a problem are its costs."""

import numpy as np
import pytest
from search_problems import mlp, mlp_tensors

from partway.propagation.problem.problem import costs_of


def test_the_numbers_of_a_problem_are_its_costs(lab):
    problem = lab.problem_of(mlp, mlp_tensors(), lab.SQUARE)
    costs = costs_of(problem)
    rng = np.random.default_rng(0)
    for _ in range(20):
        choice = tuple(int(rng.integers(len(v.options))) for v in problem.vertices)
        assert costs.of(choice) == pytest.approx(problem.cost(choice))
