"""The Graph: one call of a function as a flat, functional graph of ATen operators.

A Graph is a `torch.fx.GraphModule` with the roles of its inputs and outputs. `capture` makes it once; every later pass
reads it, and none changes it.

What `verify` checks: every node is a placeholder, a call of an ATen or Partway operator (or getitem), or the
output; no operator writes to its operands; every tensor has `meta["val"]` with its global shape and dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx.graph import PythonCode

from ...strategy.errors import VerifyError
from ..ops.constants import NO_GRADIENT
from ..ops.python.hooked import Hook
from ..ops.random_numbers import draw
from ..torch_internals import OpOverload, schema_of
from .nodes import (
    REPLACING,
    Value,
    draws_random_numbers,
    is_view,
    operands,
    region_of,
    shape,
    source_of,
    tensor_of,
    value,
    values_of,
)
from .port import Port, Role
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
    hooks     the hooks that it calls (capture/hooks.py)
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


# -- Queries of a graph: constants, differentiated outputs, gradient flow, recomputed operators


def constant_nodes(graph: Graph) -> frozenset[fx.Node]:
    """The operators that depend on no parameter and no input of the call; a buffer is one tensor for all ranks. Random
    numbers are left out: only the wanted parts of them are drawn."""
    varying = {port.node for port in graph.inputs if port.role in (Role.PARAMETER, Role.INPUT) or port.requires_grad}
    constants = {port.node for port in graph.inputs if port.node not in varying}
    for node in graph.nodes:
        if node.target is not draw and constants.issuperset(operands(node)):
            constants.add(node)
    return frozenset(constants)


def differentiated(graph: Graph) -> tuple[bool, ...]:
    """Whether the gradient of each output is planned: of the scalars (losses), or of all outputs if there is none."""
    needs = graph.differentiable
    able = [port.role in (Role.RESULT, Role.LEFT) and source_of(port.node) in needs for port in graph.outputs]
    losses = [a and not value(port.node).shape for a, port in zip(able, graph.outputs, strict=True)]
    return tuple(losses if any(losses) else able)


def without_gradients(graph: Graph) -> Graph:
    """`graph` for a call whose gradient is never taken."""
    inputs, outputs = (
        tuple(replace(port, requires_grad=False) for port in ports) for ports in (graph.inputs, graph.outputs)
    )
    return replace(graph, inputs=inputs, outputs=outputs)


def may_return(graph: fx.Graph, value: fx.Node) -> bool:
    """Whether memory of `value` may be in a result of `graph`. An ATen operator makes memory of its own unless its
    schema declares an alias of an operand; any other operator may return an operand's memory."""
    holding = {value}
    for node in graph.nodes:
        if not holding.isdisjoint(node.all_input_nodes):
            if node.op == "output":
                return True
            if not _makes_memory(node):
                holding.add(node)
    return False


def writing_in_place(graph: Graph) -> frozenset[fx.Node]:
    """The operators of a call without gradients that may update an input, such as a cache of keys and values, in
    place: each replaces elements of the input, and nothing else reads the input. (The runtime does so if the input and
    its new value have the same layout, and no other result may have its memory.)"""
    given = {port.name: port.node for port in graph.inputs if port.role is Role.INPUT}
    updates = () if graph.differentiable else (port for port in graph.outputs if port.role is Role.INPUT_UPDATE)
    new = {port.name: source_of(port.node).node for port in updates}
    return frozenset(
        node
        for name, node in new.items()
        if node.target in REPLACING and operands(node)[0] is given[name] and len(given[name].users) == 1
    )


# these return an operand itself in evaluation, or a view, without their schemas declaring it
_UNSAID = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "_unsafe_view"}


def _makes_memory(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    return not is_view(node) and schema_of(node.target).name.removeprefix("aten::") not in _UNSAID


def in_caches(graph: Graph) -> frozenset[str]:
    """The names of the results that a call without gradients returns in objects of the types that it was given, such as
    a cache of keys and values: the next call takes them."""
    results = [port for port in graph.outputs if port.role is Role.RESULT]
    inside = [port for port, is_inside in zip(results, graph.result.in_given_objects(), strict=True) if is_inside]
    if graph.differentiable:
        return frozenset()
    return frozenset(port.name for port in inside if tensor_of(source_of(port.node)).is_floating_point())


def beside_losses(graph: Graph) -> frozenset[str]:
    """The names of the results that are not scalars, if the function also returns a loss."""
    results = [port for port in graph.outputs if port.role is Role.RESULT]
    has_loss = any(port.requires_grad and not shape(port.node) for port in results)
    return frozenset(port.name for port in results if has_loss and shape(port.node))


def gradient_flow(graph: Graph, wanted: tuple[bool, ...]) -> frozenset[Value]:
    """The values that a gradient reaches when the outputs in `wanted` are differentiated."""
    needs = graph.differentiable
    reached = {source_of(port.node) for port, want in zip(graph.outputs, wanted, strict=True) if want}
    for node in reversed(graph.nodes):
        if node.target is operator.getitem:
            continue
        if not reached.isdisjoint(values_of(node)):
            reached |= needs.intersection(map(source_of, operands(node)))
    return frozenset(reached & needs)


def recomputed(graph: Graph) -> frozenset[fx.Node]:
    """The operators inside calls of torch.utils.checkpoint whose results are not kept: they draw no random numbers, and
    only the same call reads their results."""
    results = {source_of(port.node).node for port in graph.outputs}
    readers: dict[fx.Node, set[int | None]] = {}
    for node in graph.nodes:
        if node.target is not operator.getitem:
            for operand in operands(node):
                readers.setdefault(source_of(operand).node, set()).add(region_of(node))
    return frozenset(
        node
        for node in graph.nodes
        if region_of(node) is not None and node not in results and not draws_random_numbers(node)
        if readers.get(node, set()) <= {region_of(node)}
    )
