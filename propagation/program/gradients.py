"""Edits of the gradients of parameters: 16-bit ones are summed over ranks in 32 bits, since over many ranks a 16-bit
sum would lose small addends, and all are multiplied by a factor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...strategy.placement import PARTIAL, placement_from_code
from ..graph.graph import Text
from ..graph.nodes import is_port, returned_by
from ..graph.port import Role
from ..ops.collectives import convert, is_reduction, kind_of
from .program import Program

aten = torch.ops.aten
_NARROW = (torch.bfloat16, torch.float16)
_MOVES = (
    aten._to_copy.default, aten.mul.Scalar, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, convert,
)  # fmt: skip


def reduce_in_float32(program: Program) -> Program:
    """`program` with every sum over ranks of a parameter's gradient in bfloat16 or float16 taken in float32. The result
    is rounded once, unless it becomes float32 anyway, as under autocast."""
    if program.backward is None:
        return program
    graph, conversions = fx.Graph(), list(program.conversions)
    graph.output(graph.graph_copy(program.backward.graph, {}))
    wider = _Wider()
    for node in _reductions(graph, program):
        operand, *how, tag = node.args
        assert isinstance(operand, fx.Node) and isinstance(tag, int)
        wide = replace(
            conversions[tag],
            tag=len(conversions),
            dtype=torch.float32,
            parameter=True,
            whole_bytes=conversions[tag].whole_bytes * 2,
        )
        conversions.append(wide)
        with graph.inserting_before(node):
            raised = _cast(graph, operand, wider[operand.meta["val"]])
            reduced = graph.call_function(convert, (raised, *how, wide.tag))
            reduced.meta["val"] = wider[node.meta["val"]]
            rounded = _cast(graph, reduced, node.meta["val"])
        for user in [user for user in node.users if user.target is aten._to_copy.default]:
            if user.meta["val"].dtype is torch.float32:
                user.replace_all_uses_with(reduced)
        node.replace_all_uses_with(rounded)
    graph.eliminate_dead_code(is_impure_node=is_port)
    return replace(program, conversions=tuple(conversions), backward=Text(program.backward, graph))


def _reductions(graph: fx.Graph, program: Program) -> list[fx.Node]:
    """The sums over ranks of 16-bit values among the last conversions and casts of parameters' gradients."""
    sums: dict[fx.Node, None] = {}
    placed = [placed for placed, needs in zip(program.inputs, program.needed, strict=True) if needs]
    for port, node in zip(placed, returned_by(graph), strict=True):
        while port.port.role is Role.PARAMETER and isinstance(node, fx.Node) and node.target in _MOVES:
            if node.target is convert and _adds_narrow(node):
                sums[node] = None
            node = node.all_input_nodes[0]
    return list(sums)


def _adds_narrow(node: fx.Node) -> bool:
    source, target = str(node.args[1]), str(node.args[2])
    sums = is_reduction(kind_of(source, target)) and placement_from_code(source) == PARTIAL
    return sums and node.meta["val"].dtype in _NARROW


class _Wider(dict[torch.Tensor, torch.Tensor]):
    """The float32 version of each value. Equal layers share their fake tensors."""

    def __missing__(self, value: torch.Tensor) -> torch.Tensor:
        self[value] = value.to(torch.float32)
        return self[value]


def _cast(graph: fx.Graph, node: fx.Node, like: torch.Tensor) -> fx.Node:
    """`node` cast to the dtype of `like`, its new value."""
    cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": like.dtype})
    cast.meta["val"] = like
    return cast


def scale_parameter_gradients(program: Program, factor: float) -> Program:
    """`program` with the gradient of every parameter multiplied by `factor`."""
    if program.backward is None or factor == 1:
        return program
    graph = fx.Graph()
    returned: Any = graph.graph_copy(program.backward.graph, {})
    placed = [p for p, needs in zip(program.inputs, program.needed, strict=True) if needs]

    def scaled(gradient: fx.Node) -> fx.Node:
        product = graph.call_function(torch.ops.aten.mul.Scalar, (gradient, factor))
        product.meta["val"] = torch.ops.aten.mul.Scalar(gradient.meta["val"], factor)
        return product

    gradients = [
        scaled(gradient) if p.port.role is Role.PARAMETER and gradient is not None else gradient
        for p, gradient in zip(placed, returned, strict=True)
    ]
    graph.output(tuple(gradients))
    return replace(program, backward=Text(program.backward, graph))
