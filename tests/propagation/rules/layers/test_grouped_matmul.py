"""Products of grouped rows."""

import pytest
import torch

from partway.propagation.search.exact import dynamic_programming
from partway.strategy import Mesh

aten = torch.ops.aten


@pytest.mark.parametrize("axis", [Mesh({"x": 2}), Mesh({"dp": 2, "tp": 2})], ids=str)
def test_groups_of_rows_split_by_rows_by_matrices_and_within(axis, lab):
    """In bfloat16, the one dtype that the operator takes."""
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16, 16, requires_grad=True)
    ends = torch.tensor([3, 3, 5, 7], dtype=torch.int32)

    def f(x, w, ends):
        behind = torch.arange(8).unsqueeze(1) >= ends[-1]  # what is there PyTorch leaves open, also of the gradient
        x = x.bfloat16().masked_fill(behind, 0.0)
        return torch._grouped_mm(x, w.bfloat16(), offs=ends).masked_fill(behind, 0.0)

    problem = lab.problem_of(f, (x, w, ends), axis)
    expected = lab.value_and_gradients([f(x, w, ends)], [x, w])
    (vertex,) = lab.vertices_of(problem, aten._grouped_mm.default)
    options = problem.vertices[vertex].options
    assert {option.factors[0] for option in options} == {None, "t", "k", "e", "n"}
    for i in range(0, len(options), len(axis.axes)):
        chosen = lab.choose(problem, vertex, [i])
        step = lab.compiled(chosen, dynamic_programming(chosen).choice)
        tensors = lab.call_tensors(problem, f, (x, w, ends))
        found = lab.value_and_gradients(step(tensors), [x, w])
        lab.assert_same(found, expected, str(options[i]), 0.05)
