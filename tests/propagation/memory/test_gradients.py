"""Which memory the gradients of values take, counted by hand on small graphs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from partway.propagation.memory.gradients import gradients
from partway.propagation.memory.keeping import keep_problem
from partway.propagation.memory.needs import needs_of
from partway.propagation.search.exact import dynamic_programming

SIZE = 4 * 8 * 4  # of float32[4, 8]


def found_of(lab, fn, shapes=((4, 8),)):
    """The gradients of `fn` where nothing is split: the names of the vertices from the one that makes the first addend
    to the one that has read it, and the bytes. Those that are there at one moment only are left out."""
    tensors = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    problem = lab.problem_of(fn, tensors, lab.LINE)
    for i, vertex in enumerate(problem.vertices):
        whole = [j for j, option in enumerate(vertex.options) if not any(option.factors) and is_whole(option)]
        problem = lab.choose(problem, i, whole[:1])
    fates = keep_problem(problem, needs_of(problem.graph, problem.tensors.flows), only_free=False)
    choice = dynamic_programming(problem).choice
    found = gradients(fates, fates.reader.conversions(np.array(choice)))
    names = [vertex.name for vertex in problem.vertices]
    return [(names[start], names[end], size) for end, start, size in zip(*found, strict=True) if end < start]


def is_whole(option):
    return all(str(p) == "R" for layout in (*option.operands, *option.results) for p in layout.placements)


def test_a_gradient_is_there_from_its_reader_to_its_producer(lab):
    assert found_of(lab, lambda x: x.sin().exp().sum()) == [("sum_1", "exp", SIZE), ("exp", "sin", SIZE)]


def test_what_the_runtime_overwrites_views_and_additions_take_none_of_their_own(lab):
    assert found_of(lab, lambda x: x.sin().neg().sum()) == [("sum_1", "sin", SIZE)]
    assert found_of(lab, lambda x: x.sin().view(8, 4).sum()) == [("sum_1", "sin", SIZE)]
    assert found_of(lab, lambda x: (x.sin() + 1).sum()) == [("sum_1", "sin", SIZE)]


def test_a_product_is_as_large_as_it_is_where_an_operand_is_smaller(lab):
    found = found_of(lab, lambda x, y: (x.sin() * y.sin()).sum(), ((4, 8), (1, 8)))
    assert ("mul", "sin_1", SIZE / 4) in found


def test_addends_are_added_into_one(lab):
    # the exponential's addend comes first, and the hyperbolic tangent's is added to it
    def fn(x):
        y = x.sin()
        return F.linear(y, y.exp()).sum() + y.tanh().sum()

    into_sine = [size for _, end, size in found_of(lab, fn) if end == "sin"]
    assert into_sine
    assert max(into_sine) == SIZE


@pytest.mark.parametrize("times", [2, 5])
def test_a_residual_stream_has_one_gradient_however_many_blocks_read_it(lab, times):
    def fn(x):
        x = x.sin()
        for _ in range(times):
            x = x + x.exp()
        return x.sum()

    at_once = [(start, end) for start, end, _ in found_of(lab, fn)]
    assert len([1 for start, _ in at_once if start == "sum_1"]) == 1
