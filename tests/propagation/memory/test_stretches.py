"""Where a graph is cut, so that one stretch at a time is computed again."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from partway.propagation.memory.stretches import LONGEST, SHORTEST, at_hand, stretches_of
from partway.propagation.problem.problem import VertexKind


class Deep(nn.Module):
    """Blocks between which only a residual crosses; `run` calls one."""

    def __init__(self, count=6, run=lambda block, *args: block(*args)):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(8, 32) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(32, 8) for _ in range(count))
        self.norm, self.run = nn.LayerNorm(8), run

    def block(self, x, up, down):
        y = up(self.norm(x))
        return x + down(F.gelu(y) * torch.tanh(y).exp())

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = self.run(self.block, x, up, down)
        return x.square().sum()


def cut(lab, module):
    problem = lab.problem_of(module, [torch.randn(4, 8)], lab.LINE)
    return problem, stretches_of(problem)


def test_stretches_follow_one_another_and_end_at_the_residual(lab):
    problem, numbers = cut(lab, Deep())
    inputs = at_hand(problem)
    own = [n for n, given in zip(numbers, inputs, strict=True) if not given]
    assert own == sorted(own)
    assert set(numbers) == set(range(max(numbers) + 1))
    crossing = {e.value for e in problem.edges if numbers[e.producer] != numbers[e.consumer] and not inputs[e.producer]}
    assert all(value.node.name.startswith("add") for value in crossing)
    sizes = [own.count(n) for n in set(own)]
    assert max(sizes) <= LONGEST + SHORTEST
    assert len(sizes) >= 3


def test_an_input_is_in_the_stretch_that_reads_it_first(lab):
    problem, numbers = cut(lab, Deep())
    first = {}
    for edge in problem.edges:
        first[edge.producer] = min(first.get(edge.producer, edge.consumer), edge.consumer)
    for i, vertex in enumerate(problem.vertices):
        if vertex.kind is VertexKind.INPUT:
            assert numbers[i] == numbers[first[i]]


def test_a_call_of_checkpoint_is_not_cut(lab):
    def all_but_the_last(block, x, *args):
        return block(x, *args)

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Deep(run=all_but_the_last)

        def forward(self, x):
            return checkpoint(self.net, x.sin(), use_reentrant=False)

    problem, numbers = cut(lab, Whole())
    inside = {
        numbers[i]
        for i, v in enumerate(problem.vertices)
        if v.kind is VertexKind.OPERATOR and (v.node.meta.get("custom") or {}).get("partway_checkpoint") is not None
    }
    assert len(inside) == 1


def test_a_short_graph_is_one_stretch(lab):
    _, numbers = cut(lab, nn.Linear(8, 8))
    assert set(numbers) == {0}
