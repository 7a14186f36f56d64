"""One training step of a rank as data: a forward and a backward graph, and what the passes on them ask of a graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..graph.graph import Text
from ..graph.port import Role
from .local_program import LocalProgram

_TRANSPOSES = {torch.ops.aten.t.default, torch.ops.aten.transpose.int}


@dataclass(frozen=True)
class Step:
    """One training step of a rank, as two graphs.

    forward    inputs -> (outputs..., saved...)
    backward   (saved..., tangents of the differentiated outputs...) -> gradients of the inputs that need one
    wanted     for each output whether it is differentiated
    needed     for each input whether it gets a gradient
    """

    program: LocalProgram
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    wanted: tuple[bool, ...]
    needed: tuple[bool, ...]


def calls_of(graph: fx.Graph) -> list[fx.Node]:
    """What a graph computes, in order: all but its inputs and its output."""
    return [node for node in graph.nodes if node.op in ("call_function", "get_attr")]


def is_port(node: fx.Node) -> bool:
    """Whether `node` is an input or the output of its graph."""
    return node.op in ("placeholder", "output")


def returned_by(graph: fx.Graph) -> tuple[Any, ...]:
    """The nodes that a graph returns, None where there is no value."""
    returned: Any = next(iter(graph.find_nodes(op="output"))).args[0]
    return tuple(returned)


def undo_transposes(graph: fx.Graph) -> None:
    """Read in place of the transpose of a transpose what that was of: autograd's formulas transpose the weight of a
    matrix product again, and its gradient. A call of a view takes as long as that of a small kernel."""
    for node in calls_of(graph):
        inner: Any = node.args[0] if node.target in _TRANSPOSES else None
        if isinstance(inner, fx.Node) and inner.target is node.target and {*node.args[1:]} == {*inner.args[1:]}:
            before: Any = inner.args[0]
            node.replace_all_uses_with(before)
            graph.erase_node(node)
            if not inner.users:
                graph.erase_node(inner)


def scale_parameter_gradients(step: Step, factor: float) -> Step:
    """`step` with the gradient of every parameter multiplied by `factor`."""
    if step.backward is None or factor == 1:
        return step
    graph = fx.Graph()
    returned: Any = graph.graph_copy(step.backward.graph, {})
    placed = [p for p, needs in zip(step.program.inputs, step.needed, strict=True) if needs]

    def scaled(gradient: fx.Node) -> fx.Node:
        product = graph.call_function(torch.ops.aten.mul.Scalar, (gradient, factor))
        product.meta["val"] = torch.ops.aten.mul.Scalar(gradient.meta["val"], factor)
        return product

    gradients = [
        scaled(gradient) if p.port.role is Role.PARAMETER and gradient is not None else gradient
        for p, gradient in zip(placed, returned, strict=True)
    ]
    graph.output(tuple(gradients))
    return replace(step, backward=Text(step.backward, graph))
