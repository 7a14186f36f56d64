"""The Graph: one call of a function as a flat, functional graph of ATen operators.

The carrier is a `torch.fx.GraphModule`; a Graph is that module with the roles of its inputs and outputs. It is
made once by `capture` and read by every later pass; none of them changes it.

What `verify` promises: every node is a placeholder, a call of an ATen or Partway operator (or getitem), or the
output; no operator writes to its operands; every tensor has `meta["val"]` with its global shape and dtype.
"""

from __future__ import annotations

import operator
import os
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import fx

from ...strategy.errors import VerifyError
from ..ops.functions import functions_of, run
from ..ops.random_numbers import draw
from ..torch_internals import OpOverload
from .port import Port, Role
from .question import Question
from .structure import Structure

_REGION = "partway_checkpoint"


class Text(fx.GraphModule):
    """A graph with its constants that is read and never called. (A GraphModule writes and compiles the Python text of
    its `forward`, which for a deep model takes longer than all that is done with its graph.)"""

    def recompile(self) -> fx.graph.PythonCode:
        return fx.graph.PythonCode(src="", globals={}, _lineno_map=None, _prologue_start=0)

    def __str__(self) -> str:
        return str(self.graph)


@dataclass(frozen=True)
class Graph:
    """A captured function. `aliases` maps the other names of a tied parameter to the one that is an input;
    `device` is the type of device of the call's tensors ("meta" ones are planned as on the CPU);
    `asked` is what the function asked of values in its course, with the answers of this one; `left` is like `result`,
    of what the function leaves behind; `hooks` are those that it calls (hooks.py); `read` are the tensors from outside
    of which values became numbers of the graph."""

    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    result: Structure
    aliases: dict[str, str]
    constants: dict[str, torch.Tensor]
    device: str = "cpu"
    asked: tuple[tuple[Question, bool | int], ...] = ()
    left: Structure | None = None
    hooks: Any = None
    read: tuple[torch.Tensor, ...] = ()

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The operators in order."""
        return tuple(node for node in self.module.graph.nodes if node.op == "call_function")

    @cached_property
    def differentiable(self) -> frozenset[Value]:
        """The values that depend differentiably on an input that requires a gradient."""
        needs = {Value(port.node) for port in self.inputs if port.requires_grad}
        for node in self.nodes:
            if node.target is operator.getitem or node.target is torch.ops.aten.detach.default:
                continue
            if any(source_of(operand) in needs for operand in operands(node)):
                for v in values_of(node):
                    result = tensor_of(v)
                    if isinstance(result, torch.Tensor) and (result.is_floating_point() or result.is_complex()):
                        needs.add(v)
        return frozenset(needs)

    def __str__(self) -> str:
        lines = [f"{port.role.value} {port.name}: {describe(port.node)}" for port in self.inputs]
        lines += [f"{node.name} = {operator_name(node)}: {describe(node)}" for node in self.nodes]
        lines += [f"return {port.name} ({port.role.value}) = {port.node.name}" for port in self.outputs]
        return "\n".join(lines)


def value(node: fx.Node) -> Any:
    """The fake tensor (or tuple of them) that `node` produces."""
    return node.meta["val"]


def is_tensor(node: Any) -> bool:
    """Whether `node` is a node that produces one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def shape(node: fx.Node) -> tuple[int, ...]:
    """The global shape of the tensor that `node` produces."""
    return tuple(value(node).shape)


def operator_name(node: fx.Node) -> str:
    """`aten.linear.default` for a node that calls it."""
    return str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "?")


def name_of_call(node: fx.Node) -> str:
    """The name of the operator that `node` calls, also of one that writes to its operands."""
    text = functions_of(str(node.args[1])).text if node.target is run else ""
    found = re.search(r"auto_functionalized\w*\(torch\.ops\.([\w.]+)", text)
    return found[1] if found else operator_name(node)


def describe(node: fx.Node) -> str:
    """The dtype and shape of what `node` produces, as `float32[8, 16]`."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}"
    return type(val).__name__


def module_path(node: fx.Node) -> str:
    """The path of the innermost module that `node` was captured in, as `transformer.h.0.attn`."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        return str(path).removeprefix("fn").removeprefix(".")
    return ""


def source_line(node: fx.Node) -> str:
    """The line of the user's code that `node` comes from, as `model.py:31, in forward: x = self.l(x)`."""
    return _own_line(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=1024)  # the operators of all layers come from a few lines
def _own_line(stack_trace: str) -> str:
    """The innermost line of a stack trace that is neither PyTorch's nor Partway's."""
    trace = stack_trace.strip().splitlines()
    frames = [i for i, line in enumerate(trace) if line.lstrip().startswith("File ")]
    others = ("/torch/nn/", "/torch/utils/", os.path.dirname(os.path.dirname(__file__)) + os.sep, '"<')
    own = [i for i in frames if not any(folder in trace[i] for folder in others)]
    if not own:
        return ""
    where = trace[own[-1]].strip().split(", ")
    path = where[0].removeprefix('File "').removesuffix('"').rsplit("/", 1)[-1]
    code = trace[own[-1] + 1].strip() if own[-1] + 1 < len(trace) else ""
    return f"{path}:{where[1].removeprefix('line ')}, {where[2]}: {code}" if len(where) > 2 else path


def region_of(node: fx.Node) -> int | None:
    """The call of torch.utils.checkpoint that `node` was captured in, None outside of all."""
    return (node.meta.get("custom") or {}).get(_REGION)


def marked(region: int) -> dict[str, int]:
    """What marks a node of a region: the "custom" part of its meta data, which PyTorch carries from trace to trace."""
    return {_REGION: region}


def mark(node: fx.Node, region: int | None) -> None:
    """Note that `node` belongs to `region`."""
    if region is not None:
        node.meta["custom"] = marked(region)


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensor operands of `node` in the order of its arguments, a repeated one repeated."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return tuple(found)


def argument_names(node: fx.Node) -> list[str]:
    """The names of the arguments that the operator of a call takes."""
    return [formal.name for formal in node.target._schema.arguments]  # type: ignore[union-attr]


def argument(node: fx.Node, name: str) -> Any:
    """The argument called `name` of a call of an operator, or its default."""
    for i, formal in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if formal.name == name:
            if i < len(node.args):
                return node.args[i]
            return node.kwargs.get(name, formal.default_value if formal.has_default_value() else None)
    raise KeyError(f"{node.target} has no argument {name!r}")


def per_dim(value: Any, count: int) -> list[int]:
    """An argument that may stand for all dims, once for each."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return [int(v) for v in values] * (count if len(values) == 1 else 1)


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether the call draws from a random generator. (Attention, recurrent layers and dropout are operators that can;
    without a probability, or outside training, a call of them does not.)"""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = argument_names(node)
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    chances = [given.get(name, 0.0) for name in ("dropout", "dropout_p") if name in names]
    return all(chances) and bool(given.get("train", True))


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the graph: result `index` of `node`."""

    node: fx.Node
    index: int = 0


def values_of(node: fx.Node) -> tuple[Value, ...]:
    """The results of `node`."""
    found = value(node)
    return tuple(Value(node, i) for i in range(len(found))) if isinstance(found, tuple | list) else (Value(node),)


def results_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that a call gives."""
    found = value(node)
    return list(found) if isinstance(found, tuple | list) else [found]


def source_of(node: fx.Node) -> Value:
    """The value that `node` stands for: a getitem stands for a result of its operand."""
    if node.target is operator.getitem:
        return Value(node.args[0], node.args[1])  # type: ignore[arg-type]
    return Value(node)


def tensor_of(v: Value) -> torch.Tensor:
    """The fake tensor of a value."""
    found = value(v.node)
    tensor: torch.Tensor = found[v.index] if isinstance(found, tuple | list) else found
    return tensor


def constant_nodes(graph: Graph) -> frozenset[fx.Node]:
    """Operators that depend on no parameter and no input of the call; a buffer is one tensor for all. What is drawn
    depends on none, but rather than whole it is drawn in the parts that are wanted."""
    varying = {port.node for port in graph.inputs if port.role in (Role.PARAMETER, Role.INPUT) or port.requires_grad}
    constants = {port.node for port in graph.inputs if port.node not in varying}
    for node in graph.nodes:
        if node.target is not draw and all(operand in constants for operand in operands(node)):
            constants.add(node)
    return frozenset(constants)


def differentiated(graph: Graph) -> tuple[bool, ...]:
    """For each output whether its gradient is planned: the scalars (losses), or all if there is none."""
    needs = graph.differentiable
    able = [port.role in (Role.RESULT, Role.LEFT) and source_of(port.node) in needs for port in graph.outputs]
    losses = [a and not value(port.node).shape for a, port in zip(able, graph.outputs, strict=True)]
    return tuple(losses if any(losses) else able)


def beside_losses(graph: Graph) -> frozenset[str]:
    """The results that are no scalars, by name, of a function that returns a loss too."""
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
        if any(v in reached for v in values_of(node)):
            reached |= {v for v in map(source_of, operands(node)) if v in needs}
    return frozenset(reached & needs)


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
            raise VerifyError(f"node {node.name} calls {node.target}, which is no operator")
        if node.target._schema.is_mutable:
            raise VerifyError(f"node {node.name} calls {node.target}, which writes to its operands")
        if "val" not in node.meta:
            raise VerifyError(f"node {node.name} has no value")
    return graph
