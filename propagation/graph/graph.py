"""The Graph: one call of a function as a flat, functional graph of ATen operators.

A Graph is a `torch.fx.GraphModule` with the roles of its inputs and outputs. `capture` makes it once; every later pass
reads it, and none changes it.

What `verify` checks: every node is a placeholder, a call of an ATen or Partway operator (or getitem), or the
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
    """A graph and its constants, to be read and never called. (A GraphModule writes and compiles the Python text of
    its `forward`, which for a deep model takes longer than all other work on its graph.)"""

    def recompile(self) -> PythonCode:
        """Return an empty code: the graph is never called."""
        return PythonCode(src="", globals={}, _lineno_map=None, _prologue_start=0)

    def __str__(self) -> str:
        return str(self.graph)


class Counts(Protocol):
    """The assumptions of a graph about its `count` last inputs, which are numbers."""

    @property
    def count(self) -> int:
        """The number of these inputs."""
        ...

    def hold(self, given: Sequence[int]) -> bool:
        """Whether the assumptions hold for the numbers `given`."""
        ...


@dataclass(frozen=True)
class CalledHooks:
    """The hooks that a graph calls. It keeps them alive, since operators refer to them by number only.

    by_number   the hooks that operators call
    observers   the hooks of modules that only observe: a plan does not depend on them
    """

    by_number: Mapping[int, Hook] = field(default_factory=dict)
    observers: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Graph:
    """A captured function.

    result    the structure of the function's result; `left`: of the tensors that it leaves behind
    aliases   the other names of a tied parameter, each with the name that is an input
    device    the type of device of the call's tensors ("meta" ones are planned as on the CPU)
    asked     the function's questions about values, with their answers in this course
    hooks     the hooks that it calls (capture/hooks/hooks.py)
    read      the tensors from outside whose values became numbers of the graph
    counts    its assumptions about the numbers that are its last inputs; None without such inputs
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
        """The values in `on`, and those that depend differentiably on one of them."""
        needs = set(on)
        for node in self.nodes:
            if node.target is operator.getitem or node.target in NO_GRADIENT:
                continue
            if not needs.isdisjoint(map(source_of, operands(node))):
                for v in values_of(node):
                    result = tensor_of(v)
                    if isinstance(result, torch.Tensor) and (result.is_floating_point() or result.is_complex()):
                        needs.add(v)
        return frozenset(needs)

    def __str__(self) -> str:
        return text_of(self.module.graph, named(self.inputs), [port.name for port in self.outputs])


def verify(graph: Graph) -> Graph:
    """Return `graph`. Raises VerifyError if it breaks a promise of this module."""
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
