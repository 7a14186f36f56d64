"""sharding_propagation: what spreads from the annotations, and what revisiting improves."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_examples import examples
from search_problems import annotated_problem, brute_force, mlp, mlp_tensors, random_costs

from partway.propagation.search.exact import dynamic_programming
from partway.propagation.search.network import costs_of, network
from partway.propagation.search.problem import VertexKind
from partway.propagation.search.propagate import propagate, revisit, sharding_propagation
from partway.strategy import BROADCAST, Layout, Shard


@examples(200)
@given(random_costs(forbidden=False), st.data())
def test_propagation_claims_the_cost_of_its_plan_and_is_never_better_than_the_optimum(costs, data):
    sources = data.draw(st.lists(st.integers(0, len(costs.unary) - 1), unique=True))
    solution = propagate(network(costs), sources)
    assert costs.of(solution.choice) == solution.cost >= brute_force(costs)
    assert solution.bound == -math.inf
    assert not solution.proven


@examples(400)
@given(random_costs(vertices=7), st.data())
def test_revisiting_never_makes_a_plan_worse_and_claims_its_cost(costs, data):
    start = propagate(network(costs), data.draw(st.lists(st.integers(0, len(costs.unary) - 1), unique=True)))
    found = revisit(network(costs), start)
    assert brute_force(costs) <= found.cost == costs.of(found.choice) <= start.cost
    assert revisit(network(costs), found).cost == found.cost


def alone(costs, choice):
    """The least cost after one vertex changes its option."""
    changed = (
        costs.of((*choice[:v], option, *choice[v + 1 :])) for v, u in enumerate(costs.unary) for option in range(len(u))
    )
    return min(changed)


@examples(300)
@given(random_costs(vertices=7))
def test_after_revisiting_no_vertex_gains_by_changing(costs):
    found = revisit(network(costs), propagate(network(costs), [0]))
    assert alone(costs, found.choice) >= found.cost or math.isinf(found.cost)


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
