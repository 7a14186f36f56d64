"""A solution is checked before it is used."""

import dataclasses

import pytest
from search_problems import mlp, mlp_tensors

from partway.propagation.search.exact import dynamic_programming
from partway.propagation.search.solution import verify_solution
from partway.strategy import VerifyError


def test_a_solution_that_was_tampered_with_is_refused(lab):
    problem = lab.problem_of(mlp, mlp_tensors(), lab.LINE)
    good = verify_solution(problem, dynamic_programming(problem))
    first = problem.vertices[0]
    with pytest.raises(VerifyError, match=f"{first.name} has no option {len(first.options)}"):
        verify_solution(problem, dataclasses.replace(good, choice=(len(first.options), *good.choice[1:])))
    with pytest.raises(VerifyError, match="has no option -1"):
        verify_solution(problem, dataclasses.replace(good, choice=(-1, *good.choice[1:])))
    with pytest.raises(VerifyError, match="the plan costs"):
        verify_solution(problem, dataclasses.replace(good, cost=good.cost * 0.9))
    with pytest.raises(VerifyError, match="choices for"):
        verify_solution(problem, dataclasses.replace(good, choice=good.choice[1:]))
