"""The problem as data: options by number, and what the conversions of a tensor cost."""

import numpy as np
import pytest
import torch
from search_problems import mlp, mlp_tensors
from torch import nn

from partway.propagation.graph.nodes import Value
from partway.strategy import REPLICATE


@pytest.fixture
def problem(lab):
    return lab.problem_of(mlp, mlp_tensors(), lab.SQUARE)


def test_options_are_the_same_by_number_by_mask_and_in_order(problem):
    options = problem.vertices[0].options
    some = np.arange(len(options)) % 2 == 0
    assert [*options.take(some)] == [*options.take(np.flatnonzero(some))] == [*options][::2]
    assert options.take(np.ones(len(options), dtype=bool)) is options
    assert options[-1] == [*options][-1]
    with pytest.raises(IndexError):
        options[len(options)]


def test_the_states_of_options_are_their_placements(problem):
    vertex = next(v for v in problem.vertices if v.rule and len(v.options.operands) == 2)
    layouts = zip(*(option.operands + option.results for option in vertex.options), strict=True)
    for (states, whole), tensors in zip(vertex.options.states(), layouts, strict=True):
        replicated = np.array([[p == REPLICATE for p in layout.placements] for layout in tensors])
        assert ((states == whole) == replicated).all()


def test_a_choice_costs_its_options_and_the_conversions_between_them(problem):
    choice = tuple(len(v.options) - 1 for v in problem.vertices)
    unary = sum(v.unary[c] for v, c in zip(problem.vertices, choice, strict=True))
    between = sum(e.matrix(problem.vertices)[choice[e.producer], choice[e.consumer]] for e in problem.edges)
    assert problem.cost(choice) == pytest.approx(unary + between)


def test_what_is_split_stays_split_but_outputs_and_parameters_kept_in_parts(lab):
    layer, x = nn.Linear(8, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)

    def stay(**changes):
        problem = lab.problem_of(layer, (x,), lab.LINE, stay_split=True, **changes)
        weight = next(Value(port.node) for port in problem.graph.inputs if port.name == "weight")
        result = Value(problem.graph.outputs[0].node)
        return (
            problem.table(weight).stay_split,
            problem.table(result).stay_split,
            problem.table(result, output=True).stay_split,
        )

    assert stay() == (True, True, False)
    assert stay(shard_parameters=0) == (False, True, False)


def test_collectives_of_parameters_that_are_grouped_wait_for_nothing(lab):
    layer, x = nn.Linear(8, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)

    def waits(*, grouped):
        problem = lab.problem_of(layer, (x,), lab.LINE, grouped=grouped)
        named = {port.name: Value(port.node) for port in problem.graph.inputs}
        return problem.settings.weights.latency, *(
            problem.table(named[name]).weights.latency for name in ("weight", "bias", "input")
        )

    latency, *each = waits(grouped=False)
    assert latency > 0
    assert each == [latency, latency, latency]
    assert waits(grouped=True) == (latency, 0, 0, latency)
