"""The operators of a step know the modules and lines that they come from, though equal pieces are traced once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import partway as pw
from partway.propagation.graph.nodes import calls_of, module_path, operator_name, region_of, source_line

LAYERS = 5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x)).tanh()


class Deep(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x.sum()


def graphs(fn: object, *args: Tensor) -> list[fx.Graph]:
    step = pw.compile(fn, args, mesh={"dp": 2}, in_strategy=(("dp", None),)).program  # type: ignore[arg-type]
    assert step.backward is not None
    return [step.forward.graph, step.backward.graph]


@pytest.mark.parametrize("again", [False, True])
def test_each_layer_has_operators_of_its_own(again: bool) -> None:
    forward, backward = (
        Counter((operator_name(n), module_path(n)) for n in calls_of(graph) if n.op == "call_function")
        for graph in graphs(Deep(again), torch.ones(4, 8))
    )
    for i in range(LAYERS):
        assert forward["aten.addmm.default", f"layers.{i}.inner"] == 1
        assert forward["aten.tanh.default", f"layers.{i}"] == 1
        assert backward["aten.tanh_backward.default", f"layers.{i}"] == 1
        assert backward["aten.mm.default", f"layers.{i}.inner"] == 2
        assert backward["aten.addmm.default", f"layers.{i}.inner"] == again  # which is computed again there


def test_lines_are_those_of_the_forward_in_the_backward_too() -> None:
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        return (y * y.exp()).sum()

    x = torch.ones(4, 8, requires_grad=True)
    forward, backward = ({n.name: source_line(n) for n in calls_of(graph)} for graph in graphs(f, x))
    assert forward["sin"].endswith("y = x.sin()")
    assert forward["exp"].endswith("return (y * y.exp()).sum()")
    assert backward["cos"].endswith("y = x.sin()")  # which only the backward reads
    assert set(backward.values()) == {forward["sin"], forward["exp"]}


def test_a_backward_that_fills_a_buffer_has_lines_too() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.fft.rfft(x).abs().sum()

    _, backward = graphs(f, torch.ones(4, 8, requires_grad=True))
    lines = [source_line(n) for n in calls_of(backward) if "fft" in operator_name(n)]
    assert lines
    assert all(line.endswith("return torch.fft.rfft(x).abs().sum()") for line in lines)


def test_regions_are_those_of_the_forward_alone() -> None:
    forward, _ = graphs(Deep(again=True), torch.ones(4, 8))
    norms = [node for node in calls_of(forward) if operator_name(node) == "aten.native_layer_norm.default"]
    assert [module_path(node) for node in norms] == [f"layers.{i}.norm" for i in range(LAYERS)]
    assert len({region_of(node) for node in norms} - {None}) == LAYERS
