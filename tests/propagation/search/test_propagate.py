"""sharding_propagation: what spreads from the annotations."""

import pytest
import torch
from search_problems import annotated_problem, mlp, mlp_tensors

from partway.propagation.minsum.network import network
from partway.propagation.minsum.visits import propagate, revisit
from partway.propagation.problem.problem import VertexKind, costs_of
from partway.propagation.search.exact import dynamic_programming
from partway.propagation.search.propagate import sharding_propagation
from partway.strategy import BROADCAST, Layout, Shard


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (4,)])
def test_propagation_is_never_worse_than_from_either_start(lab, sizes):
    problem = annotated_problem(lab, sizes)
    costs = costs_of(problem)
    annotated = [i for i, v in enumerate(problem.vertices) if v.annotation]
    inputs = [i for i, v in enumerate(problem.vertices) if v.kind is VertexKind.INPUT]
    assert annotated
    assert len(inputs) > 1
    found = sharding_propagation(problem)
    for sources in (annotated, inputs):
        start = propagate(network(costs), sources)
        assert found.cost <= revisit(network(costs), start).cost * (1 + 1e-12) <= start.cost * (1 + 2e-12)
    assert found.cost >= dynamic_programming(problem).cost * (1 - 1e-12)


def test_propagation_spreads_an_annotation_to_its_neighbours(lab):
    split = Layout(lab.LINE, (Shard(0),))
    _, *parameters = mlp_tensors()
    problem = lab.problem_of(mlp, (torch.ones(4096, 4).double(), *parameters), lab.LINE, {"x": ((split,), "by hand")})
    solution = sharding_propagation(problem)
    first, second = lab.vertices_of(problem, torch.ops.aten.linear.default)
    for vertex in (first, second):
        chosen = problem.vertices[vertex].options[solution.choice[vertex]]
        assert chosen.factors == ("_1",)
        assert chosen.operands[1].placements == (BROADCAST,)


def test_an_input_without_dims_has_nothing_to_split(lab):
    x, scale = torch.ones(8, 4).double(), torch.tensor(2.0).double()
    problem = lab.problem_of(lambda x, scale: x * scale, (x, scale), lab.LINE)
    solution = sharding_propagation(problem)
    assert solution.cost == pytest.approx(dynamic_programming(problem).cost)
