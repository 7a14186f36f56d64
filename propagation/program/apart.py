"""Backwards of a program's outputs one after another: the backward of some outputs, and the outputs whose backwards
share nothing.

PyTorch has a node for each operator, so that a gradient of one output runs, and frees, only the operators that lead to
it. A call of a program is one node for them all, and does the same with a backward for each set of outputs that is
asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from ..graph.graph import Text
from ..graph.nodes import calls_of, is_port, operator_name, rearranges, returned_by
from ..ops.collectives import convert
from .program import Program

_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.sub.Tensor)
_KEEPS_NOTHING = (*_SUMS, _aten.neg.default, _aten.add.Scalar, _aten.sub.Scalar, convert)
_OF_NO_VALUES = ("ones_like", "full_like", "new_ones", "new_full")  # read only a tensor's shape


def of_outputs(program: Program, asked: Sequence[bool]) -> Program:
    """`program` with the backward of the outputs marked in `asked`, some of those that it differentiates. It takes the
    same saved values; an input on which none of these outputs depends has no gradient."""
    assert program.backward is not None
    source, graph = program.backward.graph, fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    zero: set[fx.Node] = set()  # the values linear in the tangents that are zero
    linear: set[fx.Node] = set()
    placeholders = source.find_nodes(op="placeholder")
    tangents = placeholders[len(placeholders) - sum(program.wanted) :]
    linear.update(tangents)
    for tangent, ask in zip(tangents, itertools.compress(asked, program.wanted), strict=True):
        if not ask:
            zero.add(tangent)
    for node in placeholders:
        if node not in zero:
            env[node] = graph.node_copy(node)
    for node in calls_of(source):
        operands = node.all_input_nodes
        absent = [operand for operand in operands if operand in zero]
        present = [operand for operand in operands if operand in linear and operand not in zero]
        if present or absent:
            linear.add(node)
        if absent and not present and not operator_name(node).removeprefix("aten.").startswith(_OF_NO_VALUES):
            zero.add(node)
        elif absent and node.target is _aten.add.Tensor and not node.kwargs:
            env[node] = env[present[0]]
        else:
            env |= {operand: _zeros(graph, operand) for operand in absent if operand not in env}
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(None if end is None or end in zero else env[end] for end in returned_by(source)))
    graph.eliminate_dead_code(is_impure_node=is_port)
    return replace(program, backward=Text(program.backward, graph), wanted=tuple(asked))


def _zeros(graph: fx.Graph, like: fx.Node) -> fx.Node:
    value = like.meta["val"]
    zeros = graph.call_function(
        _aten.full.default, (list(value.shape), 0), {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    )
    zeros.meta["val"] = value
    return zeros


def entangled(program: Program) -> list[set[int]]:
    """For each output, the outputs, including itself, whose backwards share saved tensors with its own: both depend on
    an operator that keeps something for it. (A sum keeps nothing, nor does an operator that rearranges.)"""
    graph = program.lowered.graph
    placeholders = graph.find_nodes(op="placeholder")
    needs = {n for n, placed in zip(placeholders, program.inputs, strict=True) if placed.port.requires_grad}
    keeping = set()
    for node in calls_of(graph):
        if any(operand in needs for operand in node.all_input_nodes):
            needs.add(node)
            if node.target not in _KEEPS_NOTHING and not rearranges(node):
                keeping.add(node)
    leads_to: dict[fx.Node, int] = {}  # the outputs that a node leads to, a bit for each
    for i, end in enumerate(returned_by(graph)):
        leads_to[end] = leads_to.get(end, 0) | 1 << i
    for node in reversed(calls_of(graph)):
        for operand in node.all_input_nodes:
            leads_to[operand] = leads_to.get(operand, 0) | leads_to.get(node, 0)
    together_with = [{i} for i in range(len(program.outputs))]
    for together in {leads_to.get(node, 0) for node in keeping}:
        outputs = {i for i in range(len(together_with)) if together >> i & 1}
        for i in outputs:
            together_with[i] |= outputs
    return together_with
