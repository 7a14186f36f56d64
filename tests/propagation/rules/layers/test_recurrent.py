"""Recurrent layers."""

import torch
from cases import case, real, tensors_of

from partway.propagation.search.exact import dynamic_programming

aten = torch.ops.aten


def test_layers_drop_the_same_however_the_batch_is_split(lab):
    def f(x, h, w, u):
        return torch.lstm(x, [h, h], [w, u] * 4, False, 2, 0.5, True, True, False)

    args = tensors_of(case(None, "", f, real(3, 4, 4), real(4, 4, 2), real(8, 4), real(8, 2)))
    problem = lab.problem_of(f, args, lab.LINE, on_unknown_op="warn")
    found = []
    for factor in (None, "b"):
        chosen = problem
        for vertex in lab.vertices_of(problem, aten.lstm.input):
            options = problem.vertices[vertex].options
            chosen = lab.choose(chosen, vertex, [i for i, o in enumerate(options) if o.factors == (factor,)])
        step = lab.compiled(chosen, dynamic_programming(chosen).choice)
        torch.manual_seed(3)
        found.append(lab.value_and_gradients(step(lab.call_tensors(problem, f, args)), args))
    lab.assert_same(*found)
