"""The exact search against brute force, also where its costs are too many to be written out."""

import math

import pytest
import torch
import torch.nn.functional as F
from search_problems import brute_force, rows

from partway.propagation.problem.problem import costs_of, pairs_of
from partway.propagation.search.exact import dynamic_programming
from partway.propagation.search.recursive import recursive_programming
from partway.strategy import Mesh


def test_dynamic_programming_is_brute_force_on_a_small_graph(lab):
    x = torch.randn(4, 6, requires_grad=True)
    problem = lab.problem_of(rows, (x,), lab.LINE)
    costs = costs_of(problem)
    total = math.prod(len(u) for u in costs.unary)
    assert 1000 < total < 200_000
    found = dynamic_programming(problem)
    assert found.cost == pytest.approx(brute_force(costs))
    assert found.cost == pytest.approx(problem.cost(found.choice))


def block(x, w, v):
    return F.linear(torch.relu(F.linear(x, w)), v).pow(2).mean()


def test_a_problem_too_large_to_write_out_is_solved_all_the_same(lab, monkeypatch):
    tensors = tuple(torch.randn(s, requires_grad=True) for s in [(8, 4), (8, 4), (4, 8)])
    problem = lab.problem_of(block, tensors, Mesh.of_sizes((2, 2)))
    exact = dynamic_programming(problem)
    assert exact.proven
    monkeypatch.setattr("partway.propagation.problem.problem.MANY_PAIRS", pairs_of(problem) - 1)
    monkeypatch.setattr("partway.propagation.minsum.many.FEW_PAIRS", 100)
    found = dynamic_programming(problem)
    assert found.cost == pytest.approx(exact.cost, rel=1e-12)
    assert found.bound <= exact.cost * (1 + 1e-9)
    assert problem.cost(found.choice) == pytest.approx(found.cost)
    assert recursive_programming(problem).cost >= exact.cost * (1 - 1e-12)
