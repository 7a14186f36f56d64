"""Gradients of several backwards with one reduction at the end.

In the backward, a parameter's gradient ends with the collectives that bring it into the parameter's layout, and perhaps
with operators that scale or cast the result. All of these are linear, so they can wait: a micro-batch keeps its rank's
addends, and the last one adds them to its own before its collectives run, as early as ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..graph.graph import Text
from ..graph.nodes import is_port, returned_by
from ..graph.port import Role
from ..ops.collectives import convert, kind_of
from .program import Program

_add = torch.ops.aten.add.Tensor
_SCALES_OR_CASTS = (torch.ops.aten.mul.Scalar, torch.ops.aten._to_copy.default)


@dataclass(frozen=True)
class Accumulation:
    """The backwards of a Program whose reductions wait.

    inputs   the inputs of the program whose gradients wait
    early    (saved..., tangents...) -> gradients; for `inputs` the addends of this rank
    last     (saved..., tangents..., addends...) -> gradients
    rest     a Program of which only the backward runs: (addends...) -> their gradients
    """

    inputs: tuple[int, ...]
    early: Program
    last: Program
    rest: Program

    def __str__(self) -> str:
        waiting = [f"gradient of {self.rest.inputs[i].port.name}" for i in self.inputs]
        texts = {
            "early": self.early.text("backward"),
            "last": self.last.text("backward"),
            "rest": self.rest.text("backward", (), waiting),
        }
        return "\n\n".join(f"{name}\n{text}" for name, text in texts.items())


def accumulation(program: Program) -> Accumulation | None:
    """How the gradients of `program` accumulate, or None if no reduction of a parameter's gradient can wait."""
    if program.backward is None:
        return None
    needed = [i for i, needs in enumerate(program.needed) if needs]
    gradients = returned_by(program.backward.graph)
    waiting = {
        needed[k]: reduction
        for k, gradient in enumerate(gradients)
        if program.inputs[needed[k]].port.role is Role.PARAMETER and (reduction := _reduction(gradient, gradients))
    }
    if not waiting:
        return None
    reductions = list(waiting.values())
    places = [needed.index(i) for i in waiting]
    backwards = [
        replace(program, backward=Text(program.backward, make(program.backward, reductions, places)))
        for make in (_early, _last, _rest)
    ]
    return Accumulation(tuple(waiting), *backwards)


def _early(backward: fx.GraphModule, reductions: list[fx.Node], places: list[int]) -> fx.Graph:
    graph, new = _copy(backward)
    swap = dict(zip(places, (new[reduction.all_input_nodes[0]] for reduction in reductions), strict=True))
    _output(graph).args = (tuple(swap.get(k, gradient) for k, gradient in enumerate(returned_by(graph))),)
    graph.eliminate_dead_code(is_impure_node=is_port)
    return graph


def _last(backward: fx.GraphModule, reductions: list[fx.Node], places: list[int]) -> fx.Graph:
    graph, new = _copy(backward)
    operands = [new[reduction.all_input_nodes[0]] for reduction in reductions]
    for reduction, operand, addend in zip(reductions, operands, _more_inputs(graph, operands), strict=True):
        with graph.inserting_before(new[reduction]):
            added = graph.call_function(_add, (operand, addend))
        added.meta["val"] = operand.meta["val"]
        new[reduction].replace_input_with(operand, added)
    return graph


def _rest(backward: fx.GraphModule, reductions: list[fx.Node], places: list[int]) -> fx.Graph:
    graph, new = _copy(backward)
    operands = [new[reduction.all_input_nodes[0]] for reduction in reductions]
    before = graph.find_nodes(op="placeholder")
    for reduction, operand, addend in zip(reductions, operands, _more_inputs(graph, operands), strict=True):
        new[reduction].replace_input_with(operand, addend)
    _output(graph).args = (tuple(returned_by(graph)[k] for k in places),)
    graph.eliminate_dead_code(is_impure_node=is_port)
    for node in before:
        graph.erase_node(node)
    return graph


def _reduction(gradient: Any, gradients: tuple[Any, ...]) -> fx.Node | None:
    """The first of the collectives that `gradient` ends with, if nothing else reads their results."""
    node, first = gradient, None
    while isinstance(node, fx.Node) and len(node.users) == 1 and gradients.count(gradient) == 1:
        if node.target is convert:
            first = node if kind_of(str(node.args[1]), str(node.args[2])).communicates else first
        elif node.target not in _SCALES_OR_CASTS:
            break
        node = node.all_input_nodes[0]
    return first


def _copy(module: fx.GraphModule) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, new))
    return graph, new


def _more_inputs(graph: fx.Graph, like: list[fx.Node]) -> list[fx.Node]:
    """New inputs at the end of those of `graph`, each like a node but contiguous."""
    inputs = list(graph.find_nodes(op="placeholder"))[-1:]
    for operand in like:
        with graph.inserting_after(inputs[-1]):
            node = graph.placeholder("addend")
        node.target = node.name  # an argument of the graph's function, so it must be unique too
        node.meta["val"] = operand.meta["val"].new_empty(operand.meta["val"].shape)
        inputs.append(node)
    return inputs[1:]


def _output(graph: fx.Graph) -> fx.Node:
    output: fx.Node = next(iter(graph.find_nodes(op="output")))
    return output
