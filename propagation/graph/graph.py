"""The Graph: one call of a function as a flat, functional graph of ATen operators.

The carrier is a `torch.fx.GraphModule`; a Graph is that module with the roles of its inputs and outputs. It is
made once by `capture` and read by every later pass; none of them changes it.

What `verify` promises: every node is a placeholder, a call of an ATen or Partway operator (or getitem), or the
output; no operator writes to its operands; every tensor has `meta["val"]` with its global shape and dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx.graph import PythonCode

from ...strategy.errors import VerifyError
from ..ops.constants import NO_GRADIENT
from ..ops.python.hooked import Hook
from ..torch_internals import OpOverload, schema_of
from .nodes import Value, operands, source_of, tensor_of, values_of
from .port import Port
from .printer import named, text_of
from .question import Question
from .structure import Structure


class Text(fx.GraphModule):
    """A graph with its constants that is read and never called. (A GraphModule writes and compiles the Python text of
    its `forward`, which for a deep model takes longer than all that is done with its graph.)"""

    def recompile(self) -> PythonCode:
        """Nothing: there is no text."""
        return PythonCode(src="", globals={}, _lineno_map=None, _prologue_start=0)

    def __str__(self) -> str:
        return str(self.graph)


class Counts(Protocol):
    """What a graph counts on of numbers that are given to it; `count`: how many these are."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def hold(self, given: Sequence[int]) -> bool:
        """Whether it is the graph of a call with the numbers `given`."""
        ...


@dataclass(frozen=True)
class CalledHooks:
    """The hooks that a graph calls. It keeps them alive: operators know them by their numbers only.

    by_number   what the operators call
    observers   the hooks of modules that only look: a plan does not depend on them
    """

    by_number: Mapping[int, Hook] = field(default_factory=dict)
    observers: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A captured function.

    result    the structure of what the function returns; `left`: of what it leaves behind
    aliases   the other names of a tied parameter, with the one that is an input
    device    the type of device of the call's tensors ("meta" ones are planned as on the CPU)
    asked     what the function asked of values in its course, with the answers of this one
    hooks     those that it calls (capture/hooks/hooks.py)
    read      the tensors from outside whose values became numbers of the graph
    counts    what it counts on of the numbers that are its last inputs; None where there are none
    """

    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    result: Structure
    aliases: dict[str, str]
    constants: dict[str, torch.Tensor]
    device: str = "cpu"
    asked: tuple[tuple[Question, bool | int], ...] = ()
    left: Structure | None = None
    hooks: CalledHooks = field(default_factory=CalledHooks)
    read: tuple[torch.Tensor, ...] = ()
    counts: Counts | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The operators in order."""
        return tuple(node for node in self.module.graph.nodes if node.op == "call_function")

    @cached_property
    def differentiable(self) -> frozenset[Value]:
        """The values that depend differentiably on an input that requires a gradient."""
        return self.depending(Value(port.node) for port in self.inputs if port.requires_grad)

    def depending(self, on: Iterable[Value]) -> frozenset[Value]:
        """The values that depend differentiably on one of `on`, and these."""
        needs = set(on)
        for node in self.nodes:
            if node.target is operator.getitem or node.target in NO_GRADIENT:
                continue
            if any(source_of(operand) in needs for operand in operands(node)):
                for v in values_of(node):
                    result = tensor_of(v)
                    if isinstance(result, torch.Tensor) and (result.is_floating_point() or result.is_complex()):
                        needs.add(v)
        return frozenset(needs)

    def __str__(self) -> str:
        return text_of(self.module.graph, named(self.inputs), [port.name for port in self.outputs])


def verify(graph: Graph) -> Graph:
    """Raise VerifyError unless `graph` keeps what this module promises; return it otherwise."""
    for node in graph.module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function":
            raise VerifyError(f"the graph has a {node.op} node, {node.name}")
        if node.target is operator.getitem:
            continue
        if not isinstance(node.target, OpOverload):
            raise VerifyError(f"node {node.name} calls {node.target}, which is not an operator")
        if schema_of(node.target).is_mutable:
            raise VerifyError(f"node {node.name} calls {node.target}, which writes to its operands")
        if "val" not in node.meta:
            raise VerifyError(f"node {node.name} has no value")
    return graph
