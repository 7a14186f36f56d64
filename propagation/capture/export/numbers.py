"""Numbers that a function reads from tensors, as by `loss.item()`, remain tensors of one element in the graph.

Operators compute with them in float64 and int64, as Python does. Where an operator takes a number as a scalar, its
overload for tensors takes the tensor. Numbers among the results become Python numbers when the call is over
(structure.py). No gradient passes through a number.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from ...graph.nodes import is_tensor, value
from ...graph.structure import NUMBERS
from ...rules.builder import Builder

aten = torch.ops.aten

_READS = (aten.item.default, aten._local_scalar_dense.default)
CHECKS = frozenset(
    {aten._assert_scalar.default, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default}
)
_ARITHMETIC: dict[Any, Any] = {
    operator.add: aten.add.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.neg: aten.neg.default,
    operator.pow: aten.pow.Tensor_Tensor,
    operator.sub: aten.sub.Tensor,
    operator.truediv: aten.div.Tensor,
}
# Operators whose second operand may be a number, with their overloads for tensors.
_OF_TENSORS: dict[Any, Any] = {
    getattr(getattr(aten, name), overload): getattr(aten, name).Tensor
    for name in ("add", "sub", "mul", "div")
    for overload in ("Tensor", "Scalar")
}


def numbers_as_tensors(module: fx.GraphModule) -> None:
    """Replace numbers that are read from tensors by tensors (in place). Numbers used for more than arithmetic stay,
    with everything computed from them."""
    if not any(node.target in _READS for node in module.graph.nodes):
        return
    for node in reversed(module.graph.nodes):  # checks of numbers, and the operators that only these read
        if node.target in CHECKS or (isinstance(node.meta.get("val"), tuple(NUMBERS)) and not node.users):
            module.graph.erase_node(node)
    tensors: dict[fx.Node, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "call_function":
            _rewrite(module.graph, node, tensors)
    for node in reversed(module.graph.nodes):
        if not node.users and (node in tensors or any(operand in tensors for operand in node.all_input_nodes)):
            module.graph.erase_node(node)


def tensors_read(exported: torch.export.ExportedProgram) -> list[torch.Tensor]:
    """The tensors from outside the function that the traced graph reads as numbers: torch.export keeps their current
    values as constants."""
    follows: dict[fx.Node, dict[int, torch.Tensor]] = {}  # the constants of a node computed from these alone
    constants: dict[str, Any] = {
        spec.arg.name: exported.constants[spec.target or ""]
        for spec in exported.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR
    }
    read: dict[int, torch.Tensor] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in constants:
            follows[node] = {id(constants[node.name]): constants[node.name]}
        elif node.op == "call_function" and all(operand in follows for operand in node.all_input_nodes):
            follows[node] = {i: tensor for operand in node.all_input_nodes for i, tensor in follows[operand].items()}
            read |= follows[node] if node.target in _READS else {}
    return list(read.values())


def _rewrite(graph: fx.Graph, node: fx.Node, tensors: dict[fx.Node, fx.Node]) -> None:
    """Rewrite `node`, if it reads or takes a number, in terms of `tensors`, which stand for numbers."""
    build = Builder(graph, node, 1, {})
    if node.target in _READS:
        read = node.args[0]
        assert isinstance(read, fx.Node)
        number = build(aten.detach.default, build(aten.reshape.default, read, []))
        tensors[node] = build.cast(number, _dtype(node))
        return
    if not any(operand in tensors for operand in node.all_input_nodes):
        return
    if node.target is torch.sym_float:
        tensors[node] = build.cast(tensors[node.all_input_nodes[0]], torch.float64)
    elif node.target in _ARITHMETIC:
        operands = [_operand(build, arg, tensors, _dtype(node)) for arg in node.args]
        if all(isinstance(operand, fx.Node) for operand in operands):
            tensors[node] = build.cast(build(_ARITHMETIC[node.target], *operands), _dtype(node))
    elif node.target is aten.scalar_tensor.default:
        node.replace_all_uses_with(build.cast(tensors[node.all_input_nodes[0]], value(node).dtype))
    elif node.target in _OF_TENSORS and is_tensor(node.args[0]) and node.args[1] in tensors and not node.kwargs:
        result = build(_OF_TENSORS[node.target], node.args[0], tensors[node.args[1]])  # type: ignore[index]
        node.replace_all_uses_with(build.cast(result, value(node).dtype))
    elif node.target is aten.select.int and node.args[2] in tensors:
        node.replace_all_uses_with(_selected(build, node, tensors[node.args[2]]))  # type: ignore[index]


def _selected(build: Builder, node: fx.Node, index: fx.Node) -> fx.Node:
    """The element that `node` selects at `index`, which counts from the end where it is negative."""
    x, dim = node.args[:2]
    assert isinstance(x, fx.Node)
    assert isinstance(dim, int)
    size = value(x).shape[dim]
    place = build(aten.where.self, build(aten.lt.Scalar, index, 0), build(aten.add.Tensor, index, size), index)
    selected = build(aten.index_select.default, x, dim, build(aten.reshape.default, place, [1]))
    return build(aten.squeeze.dim, selected, dim)


def _operand(build: Builder, arg: Any, tensors: dict[fx.Node, fx.Node], dtype: torch.dtype) -> Any:
    """A tensor for an operand of arithmetic; None for a number that stays one."""
    if isinstance(arg, fx.Node):
        return tensors.get(arg)
    return build(aten.scalar_tensor.default, arg, dtype=dtype)


def _dtype(node: fx.Node) -> torch.dtype:
    """The dtype of the tensor for the number that `node` gives."""
    return NUMBERS[type(node.meta["val"])]
