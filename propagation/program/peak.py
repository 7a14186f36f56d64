"""How many bytes of tensors one rank holds while a step runs, from the text of its two graphs alone.

A tensor's memory is there from the operator that makes it to the last one, forward or backward, that reads it or a view
of it. What the step returns, results and gradients, is there until the end; so are its inputs, which are not counted.
What operators need for themselves while they run is not in the text.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import fx

from ...strategy.placement import Kind
from ..graph.nodes import bytes_of, is_view
from ..ops.collectives import convert, kind_of
from .step import Step, calls_of, returned_by


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes that are there while `node`, an operator of the "forward" or the "backward", runs."""

    phase: str
    node: fx.Node
    held: int


def moments(step: Step) -> list[Moment]:
    """What a rank holds beside the inputs while each operator of `step` runs, in their order."""
    memory: dict[fx.Node, Hashable] = {}
    sizes: dict[Hashable, int] = {}
    calls = [("forward", node) for node in calls_of(step.forward.graph)]
    returned = returned_by(step.forward.graph)
    ends = list(returned if step.backward is None else returned[: len(step.program.outputs)])
    for node in step.forward.graph.nodes:
        _place(node, memory, sizes)
    if step.backward is not None:
        saved = iter(returned[len(step.program.outputs) :])
        for node in step.backward.graph.nodes:
            if node.op == "placeholder" and (kept := next(saved, None)) is not None:
                memory[node] = memory[kept]
            else:
                _place(node, memory, sizes)
        calls += [("backward", node) for node in calls_of(step.backward.graph)]
        ends += returned_by(step.backward.graph)
    last = {memory[operand]: i for i, (_, node) in enumerate(calls) for operand in (node, *node.all_input_nodes)}
    last |= {memory[node]: len(calls) for node in ends if isinstance(node, fx.Node)}
    gone: dict[int, list[Hashable]] = {}
    for key, i in last.items():
        gone.setdefault(i, []).append(key)
    there: set[Hashable] = set()
    held, every = 0, []
    for i, (phase, node) in enumerate(calls):
        results = [user for user in node.users if user.target is operator.getitem]
        new = {memory[made] for made in (node, *results)} - there
        there |= new
        held += sum(sizes[key] for key in new)
        every.append(Moment(phase, node, held))
        held -= sum(sizes[key] for key in gone.get(i, ()) if key in there)
    return every


def _place(node: fx.Node, memory: dict[fx.Node, Hashable], sizes: dict[Hashable, int]) -> None:
    """Note in whose memory `node` lies, and how large that is."""
    if node.op == "output":
        return
    operand = next(iter(node.all_input_nodes), None)
    if operand is not None and (is_view(node) or _looks_at_its_operand(node)):
        memory[node] = memory[operand]
    elif operand is not None and node.target is operator.getitem and memory[operand] is not operand:
        memory[node] = memory[operand]  # one of the views that a call gives
    elif operand is not None and node.target is operator.getitem:
        memory[node] = memory[operand], node.args[1]
        sizes[memory[node]] = bytes_of(node.meta.get("val"))
    else:
        memory[node] = node
        sizes[node] = bytes_of(node.meta.get("val")) if node.op == "call_function" else 0


def _looks_at_its_operand(node: fx.Node) -> bool:
    """Whether what a call gives is its operand, or a slice of it that lies in one piece."""
    if node.target is torch.ops.aten._unsafe_view.default:
        return True
    if node.target is not convert:
        return False
    kind = kind_of(str(node.args[1]), str(node.args[2]))
    return kind is Kind.NOTHING or (kind is Kind.SLICE and node.meta["val"].is_contiguous())
