"""Edits of the gradients of parameters: 16-bit ones are summed over ranks in 32 bits, since over many ranks a 16-bit
sum would lose small addends, and all are multiplied by a factor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...strategy.placement import PARTIAL, Kind, placement_from_code
from ..graph.graph import Text
from ..graph.nodes import is_port
from ..graph.port import Role
from ..ops.collectives import TAG, convert, is_reduction, kind_of
from ..problem.problem import SUMMED_IN
from .program import Program

aten = torch.ops.aten


def reduce_in_float32(program: Program) -> Program:
    """`program` with every sum over ranks of a parameter's gradient in bfloat16 or float16 taken in float32. The result
    is rounded once, unless it becomes float32 anyway, as under autocast. A part that nothing but the caller reads is
    rounded at the end, so that the backward goes on while it is being summed."""
    if program.backward is None:
        return program
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.backward.graph, {}))
    wider, end = _Wider(), graph.output_node()
    for node in [node for node in graph.find_nodes(op="call_function", target=convert) if _is_wide(node, program)]:
        operand, *how = node.args
        with graph.inserting_before(node):
            raised = _cast(graph, operand, wider[operand.meta["val"]])
            reduced = graph.call_function(convert, (raised, *how))
            reduced.meta["val"] = wider[node.meta["val"]]
        scattered = kind_of(str(how[0]), str(how[1])) is Kind.REDUCE_SCATTER
        with graph.inserting_before(end if scattered and set(node.users) == {end} else node):
            rounded = _cast(graph, reduced, node.meta["val"])
        for user in [user for user in node.users if user.target is aten._to_copy.default]:
            if user.meta["val"].dtype is SUMMED_IN:
                user.replace_all_uses_with(reduced)
        node.replace_all_uses_with(rounded)
    graph.eliminate_dead_code(is_impure_node=is_port)
    return replace(program, backward=Text(program.backward, graph))


def _is_wide(node: fx.Node, program: Program) -> bool:
    """Whether a conversion of the backward is a sum over ranks of a 16-bit gradient of a parameter."""
    arguments: tuple[Any, ...] = node.args
    _, source, target, _, _, tag = arguments[: TAG + 1]
    adds = is_reduction(kind_of(str(source), str(target))) and placement_from_code(str(source)) == PARTIAL
    return adds and program.conversions[tag].wider > 1


class _Wider(dict[torch.Tensor, torch.Tensor]):
    """The float32 version of each value. Equal layers share their fake tensors."""

    def __missing__(self, value: torch.Tensor) -> torch.Tensor:
        self[value] = value.to(SUMMED_IN)
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
