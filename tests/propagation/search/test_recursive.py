"""recursive_programming: one axis after another."""

import math

import pytest
from search_problems import mlp, mlp_tensors

from partway.propagation.search.exact import dynamic_programming
from partway.propagation.search.recursive import recursive_programming
from partway.propagation.search.solution import verify_solution
from partway.strategy import REPLICATE, Layout, Shard


def test_recursion_on_one_axis_is_the_optimum(lab):
    problem = lab.problem_of(mlp, mlp_tensors(), lab.LINE)
    assert recursive_programming(problem).cost == pytest.approx(dynamic_programming(problem).cost)


def test_recursion_keeps_what_is_annotated_on_a_later_axis(lab):
    later = Layout(lab.SQUARE, (REPLICATE, Shard(1)))
    problem = lab.problem_of(mlp, mlp_tensors(), lab.SQUARE, {"w": ((later,), "by hand")})
    solution = verify_solution(problem, recursive_programming(problem))
    at = next(i for i, v in enumerate(problem.vertices) if v.name == "w")
    assert problem.vertices[at].options[solution.choice[at]].results == (later,)


def test_recursion_takes_small_tables_where_all_are_too_much_work(lab, monkeypatch):
    problem = lab.problem_of(mlp, mlp_tensors(), lab.SQUARE)
    exact = recursive_programming(problem)
    monkeypatch.setattr("partway.propagation.minsum.eliminate.MUCH_WORK", 0.0)
    monkeypatch.setattr("partway.propagation.minsum.eliminate.SMALL_TABLES", (1.0,))
    found = verify_solution(problem, recursive_programming(problem))
    assert exact.cost < found.cost < math.inf
