"""What a device holds while the backward runs, counted by hand on small graphs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from partway.propagation.memory.backward_memory import timeline
from partway.propagation.memory.fates import AGAIN, KEPT
from partway.propagation.memory.held import Purpose
from partway.propagation.memory.keeping import keep_problem
from partway.propagation.memory.needs import needs_of
from partway.propagation.problem.problem import Recompute
from partway.propagation.search.exact import dynamic_programming


def of_whole(lab, fn, *shapes, recompute=Recompute.NONE):
    """The timeline of `fn` where nothing is split, and what it is of."""
    tensors = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    problem = lab.problem_of(fn, tensors, lab.LINE, recompute=recompute)
    for i, vertex in enumerate(problem.vertices):
        whole = [j for j, option in enumerate(vertex.options) if not any(option.factors) and _is_whole(option)]
        problem = lab.choose(problem, i, whole[:1])
    fates = keep_problem(problem, needs_of(problem.graph, problem.tensors.flows), only_free=False)
    choice = dynamic_programming(problem).choice
    own = fates.at(choice)
    nothing = np.zeros(len(problem.vertices))
    kept = own.read_off([0] * len(choice), nothing)
    return problem, kept, timeline(own, kept)


def _is_whole(option):
    return all(str(p) == "R" for layout in (*option.operands, *option.results) for p in layout.placements)


def at(problem, name):
    return next(i for i, vertex in enumerate(problem.vertices) if vertex.name == name)


def test_kept_values_go_one_after_another(lab):
    problem, _, found = of_whole(lab, lambda x: torch.sin(torch.sin(torch.sin(x))).sum(), (4, 8))
    size = 4 * 8 * 4
    # the third sine reads the second one's result, the second the first one's; nothing reads the third one's, which
    # this choice keeps all the same
    kept = [float(found.by_purpose[Purpose.KEPT][at(problem, name)]) for name in ("sin_2", "sin_1", "sin")]
    assert kept == [3 * size, size, 0.0]


def test_inputs_are_there_throughout(lab):
    _, _, found = of_whole(lab, lambda x: torch.sin(x).sum(), (4, 8))
    assert set(found.by_purpose[Purpose.INPUTS]) == {4 * 8 * 4}
    assert not found.by_purpose[Purpose.PARAMETERS].any()
    assert not found.by_purpose[Purpose.OPTIMIZER].any()
    assert found.total.min() >= 4 * 8 * 4


def test_a_gradient_is_there_from_the_last_reader_to_the_producer(lab):
    problem, _, found = of_whole(lab, lambda x: (torch.sin(x) * 2).exp().sum(), (4, 8))
    size = 4 * 8 * 4
    assert found.by_purpose[Purpose.VALUES][at(problem, "exp")] >= size
    assert found.by_purpose[Purpose.VALUES][at(problem, "sin")] >= size


def test_an_addition_passes_its_gradient_on(lab):
    problem, _, found = of_whole(lab, lambda x: (torch.sin(x) + torch.cos(x)).sum(), (4, 8))
    assert found.by_purpose[Purpose.VALUES][at(problem, "add")] <= 2 * 4 * 8 * 4


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.AUTO])
def test_the_peak_of_a_layer_is_what_its_largest_values_are(lab, recompute):
    def fn(x, w):
        return F.linear(torch.tanh(F.linear(x, w)), w).sum()

    problem, kept, found = of_whole(lab, fn, (64, 8), (8, 8), recompute=recompute)
    backward, forward = found.total.reshape(2, -1)
    assert forward.max() <= backward.max() + 2 * 64 * 8 * 4
    assert KEPT in kept.keeping.fates
    assert len(found.total) == 2 * len(problem.vertices)


SIZE = 4 * 8 * 4  # bytes of the values below


def test_a_gradient_is_written_over_that_of_the_result_where_nobody_else_reads_it(lab):
    problem, _, found = of_whole(lab, lambda x: (torch.relu(torch.exp(x)) * 2).exp().sum(), (4, 8))
    assert [float(found.by_purpose[Purpose.VALUES][at(problem, name)]) for name in ("exp_1", "mul", "relu")] == [
        2 * SIZE,
        SIZE,
        SIZE,
    ]


def test_the_gradient_of_a_residual_stream_is_there_once(lab):
    def fn(x):
        for _ in range(4):
            x = x + torch.exp(x)
        return x.sin().sum()

    problem, _, found = of_whole(lab, fn, (4, 8))
    # of the stream, what the exponential makes of it, and nothing of the blocks behind
    assert (
        max(float(found.by_purpose[Purpose.VALUES][at(problem, name)]) for name in ("exp", "exp_1", "exp_2"))
        == 2 * SIZE
    )


def test_parts_of_a_split_have_a_gradient_each(lab):
    problem, _, found = of_whole(lab, lambda x: sum(p.exp().sum() for p in x.sin().split(2)), (4, 8))
    assert (
        float(found.by_purpose[Purpose.VALUES][at(problem, "split")]) >= 2 * SIZE
    )  # those of the parts, and what is joined of them


def test_a_hub_lies_in_the_memory_of_what_it_is_of(lab):
    def fn(x):
        y = torch.tanh(x)
        return (y.sin() + y.cos()).sum()

    problem, kept, found = of_whole(lab, fn, (4, 8))
    assert kept.keeping.fates[at(problem, "tanh")] is KEPT
    assert float(found.by_purpose[Purpose.KEPT][at(problem, "hub of tanh")]) == SIZE


def test_what_a_backward_reads_a_view_of_is_there_when_it_is_computed_again(lab):
    def fn(x, w):
        y = F.linear(torch.tanh(x), w)  # of which the product reads views
        return (y.view(8, 32) @ y.view(32, 8)).sin().sum()

    tensors = [torch.randn(32, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)]
    problem = lab.problem_of(fn, tensors, lab.LINE)
    needs = needs_of(problem.graph, problem.tensors.flows)
    choice = dynamic_programming(problem).choice
    own = keep_problem(problem, needs, only_free=False).at(choice)
    again = {at(problem, name) for name in ("linear", "hub of linear", "view", "view_1")}
    numbers = [facts.fates.index(AGAIN) if i in again else 0 for i, facts in enumerate(own.facts)]
    kept = own.read_off(numbers, np.zeros(len(numbers)))
    linear = at(problem, "linear")
    found = timeline(own, kept)
    made = float(problem.vertices[linear].options.made[choice[linear]])
    assert float(found.by_purpose[Purpose.AGAIN][at(problem, "matmul")]) >= made > 0
