"""Options with fates: which there are, and what they cost. Their optimum against all of them: test_memory.py."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from partway.propagation.graph.nodes import draws_random_numbers
from partway.propagation.memory.fates import AGAIN, GONE, KEPT
from partway.propagation.memory.keeping import cost_with_fates, keep_problem, seconds_again
from partway.propagation.memory.needs import needs_of
from partway.propagation.memory.reader import Keeping, moving
from partway.propagation.minsum.eliminate import eliminate
from partway.propagation.problem.problem import Recompute
from partway.propagation.search.exact import dynamic_programming


def with_fates(lab, fn, *shapes, only_free=False, **changes):
    tensors = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    problem = lab.problem_of(fn, tensors, lab.LINE, **changes)
    return problem, keep_problem(problem, needs_of(problem.graph, problem.tensors.flows), only_free=only_free)


def fates_of(problem, fates):
    return {vertex.name: set(facts.fates) for vertex, facts in zip(problem.vertices, fates.facts, strict=True)}


def layer(x, w):
    return torch.tanh(F.linear(x, w)).t().sum()


def test_an_operator_whose_backward_reads_its_result_cannot_let_it_go(lab):
    found = fates_of(*with_fates(lab, layer, (8, 4), (4, 4)))
    assert found["tanh"] == {KEPT, AGAIN}
    assert found["linear"] == {KEPT, AGAIN, GONE}
    assert found["t"] == {AGAIN, GONE}  # a view is not kept by itself


def test_only_what_is_free_may_be_had_again_unless_it_must(lab):
    found = fates_of(*with_fates(lab, layer, (8, 4), (4, 4), only_free=True))
    assert found["linear"] == {KEPT, GONE}
    assert found["tanh"] == {KEPT, AGAIN}


def test_recompute_none_leaves_views_only(lab):
    found = fates_of(*with_fates(lab, layer, (8, 4), (4, 4), recompute=Recompute.NONE))
    assert {name for name, fates in found.items() if AGAIN in fates} == {"t"}


def test_random_numbers_are_never_drawn_again(lab):
    problem, fates = with_fates(lab, lambda x: (torch.bernoulli(torch.sigmoid(x)) * x).sum(), (8, 4))
    found = fates_of(problem, fates)
    drawing = [found[v.name] for v in problem.vertices if v.kind == "operator" and draws_random_numbers(v.node)]
    assert drawing
    assert all(AGAIN not in fates for fates in drawing)


def test_what_a_person_marked_stays_as_marked(lab):
    def fn(x, w):
        return checkpoint(lambda x: torch.tanh(F.linear(x, w)).sin(), x, use_reentrant=False).sum()

    found = fates_of(*with_fates(lab, fn, (8, 4), (4, 4)))
    assert found["linear"] == found["tanh"] == {AGAIN}


@pytest.mark.parametrize("price", [0.0, 1e-9, 1e-6])
def test_what_numbers_stand_for_costs_what_the_search_said(lab, price):
    problem, fates = with_fates(lab, layer, (64, 8), (8, 8))
    at = np.full(len(problem.vertices), price)
    found = eliminate(fates.costs(at))
    kept = fates.read_off(found.choice, at)
    assert kept.cost + float(at @ kept.held) == pytest.approx(found.cost, rel=1e-4)
    assert cost_with_fates(problem, kept.choice, kept.keeping) == pytest.approx(kept.cost)


def test_strategies_may_be_given(lab):
    problem, fates = with_fates(lab, layer, (64, 8), (8, 8))
    choice = dynamic_programming(problem).choice
    own = fates.at(choice)
    assert all(len(vertex.options) == 1 for vertex in own.problem.vertices)
    assert own.original((0,) * len(choice)) == choice


def test_some_options_may_be_left(lab):
    problem, fates = with_fates(lab, layer, (64, 8), (8, 8))
    choice = dynamic_programming(problem).choice
    some = fates.among([np.array(sorted({0, c})) for c in choice])
    numbers = some.numbers(choice, (KEPT,) * len(choice))
    at = np.zeros(len(choice))
    assert some.original(some.read_off(numbers, at).choice) == choice
    assert fates.original(choice) == choice
    assert some.read_off(numbers, at).cost == fates.read_off(fates.numbers(choice, (KEPT,) * len(choice)), at).cost


def test_seconds_again_are_those_of_what_is_computed_again(lab):
    problem, _ = with_fates(lab, layer, (64, 8), (8, 8))
    choice = dynamic_programming(problem).choice
    edges = (False,) * len(problem.edges)
    nothing = Keeping((KEPT,) * len(choice), edges, edges, 0.0)
    assert seconds_again(problem, choice, nothing) == 0.0
    again = Keeping((AGAIN,) * len(choice), edges, edges, 0.0)
    every = sum(float(v.options.again[c]) for v, c in zip(problem.vertices, choice, strict=True))
    assert seconds_again(problem, choice, again) == pytest.approx(every) != 0.0


def test_a_slice_moves_nothing():
    assert not moving(1e-13, 2e-13)
    assert moving(1e-5, 2e-5)
    assert not moving(np.inf, np.inf)
