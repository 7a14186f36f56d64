"""One training step of a rank as data: a forward and a backward graph, with the queries and edits that passes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..graph.graph import Text
from ..graph.port import Role
from ..graph.printer import text_of
from .local_program import LocalProgram, causes

_aten = torch.ops.aten
_TRANSPOSES = {_aten.t.default, _aten.transpose.int}
_RESHAPES = {
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.unsqueeze.default,
    _aten.view.default,
}


@dataclass(frozen=True)
class Step:
    """One training step of a rank, as two graphs.

    forward    inputs -> (outputs..., saved...)
    backward   (saved..., tangents of the differentiated outputs...) -> gradients of the inputs that need one
    wanted     whether each output is differentiated
    needed     whether each input gets a gradient
    """

    program: LocalProgram
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    wanted: tuple[bool, ...]
    needed: tuple[bool, ...]

    @property
    def gradients(self) -> list[str]:
        """The names of the results of the backward."""
        return [
            f"gradient of {p.port.name}" for p, needs in zip(self.program.inputs, self.needed, strict=True) if needs
        ]

    def __str__(self) -> str:
        return self.text({})

    def text(self, costs: Mapping[fx.Node, str]) -> str:
        """Both graphs as text; `costs`: notes on the costs of collectives."""
        outputs = [placed.port.name for placed in self.program.outputs]
        lines = ["forward", self.program.text(self.forward.graph, outputs, costs)]
        return "\n".join([*lines, *(["", "backward", self.backward_text(costs)] if self.backward else [])])

    def backward_text(self, costs: Mapping[fx.Node, str]) -> str:
        """The backward graph, which must exist, as text."""
        assert self.backward is not None
        forward, outputs = self.forward.graph, self.program.outputs
        ports = dict(zip(forward.find_nodes(op="placeholder"), self.program.inputs, strict=True))
        saved = returned_by(forward)[len(outputs) :]
        given = [("saved", ports[node].port.name if node in ports else node.name) for node in saved]
        given += [(f"gradient of {p.port.name}", "") for p, wanted in zip(outputs, self.wanted, strict=True) if wanted]
        return text_of(self.backward.graph, given, self.gradients, causes(self.program.conversions, costs))


def calls_of(graph: fx.Graph) -> list[fx.Node]:
    """The calls and constants of a graph, in order: all nodes but its inputs and its output."""
    return [node for node in graph.nodes if node.op in ("call_function", "get_attr")]


def is_port(node: fx.Node) -> bool:
    """Whether `node` is an input or the output of its graph."""
    return node.op in ("placeholder", "output")


def returned_by(graph: fx.Graph) -> tuple[Any, ...]:
    """The nodes that a graph returns, None where there is no value."""
    returned: Any = next(iter(graph.find_nodes(op="output"))).args[0]
    return tuple(returned)


def inputs_with_gradients(step: Step) -> list[int]:
    """The inputs for which the backward returns a gradient: an input on which no output depends gets none."""
    if step.backward is None:
        return []
    gradients = iter(returned_by(step.backward.graph))
    return [i for i, needs in enumerate(step.needed) if needs and next(gradients) is not None]


def undo_views(graph: fx.Graph) -> None:
    """Replace a view of a view by the original where the two are equal: autograd's formulas transpose the weight of a
    matrix product a second time, and its gradient; parts of a batch are a dim for a norm only. Calling a view takes
    as long as a small kernel."""
    for node in calls_of(graph):
        before = _undone(node)
        if before is None:
            continue
        node.replace_all_uses_with(before)
        while node is not before and not node.users:
            inner: Any = node.args[0]
            graph.erase_node(node)
            node = inner


def _undone(node: fx.Node) -> fx.Node | None:
    """The original of a view of views, if the view has its shape and strides again; else None."""
    inner = node.args[0] if node.target in _TRANSPOSES | _RESHAPES else None
    if not isinstance(inner, fx.Node):
        return None
    if node.target in _TRANSPOSES:
        dims: tuple[Any, ...] = node.args[1:]
        before: tuple[Any, ...] = inner.args[1:]
        again = inner.target is node.target and {*dims} == {*before}
        return inner.all_input_nodes[0] if again else None
    while inner.target in _RESHAPES:
        inner = inner.all_input_nodes[0]
        if (_shape(inner), inner.meta["val"].stride()) == (_shape(node), node.meta["val"].stride()):
            return inner
    return None


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


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
