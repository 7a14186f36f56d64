"""Queries of one node of a graph: its operator, operands and results, its origin, and the kind of its operator.

The origin, for people, is a module and a line of the caller's code. A piece is traced once for all equal pieces. So a
node traced from another, forward or backward, keeps the position of that node in the piece in the "custom" part of its
meta data; each copy of it takes its origin from the node at this position in the piece that the copy is for.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.fx.traceback import annotate, preserve_node_meta

from ...strategy.placement import Kind
from ..ops.by_hand import COLLECTIVES
from ..ops.collectives import constrain, convert, kind_of
from ..ops.python.functions import functions_of, run
from ..ops.python.manual import call_manual, manual_of
from ..torch_internals import OpOverload, schema_of

_REGION = "partway_checkpoint"


def stays(node: fx.Node) -> bool:
    """Whether `node` stays in a captured graph though nothing reads it: ports, and collectives in the user's code,
    which other ranks wait for."""
    return node.op in ("placeholder", "output") or node.target in COLLECTIVES


def value(node: fx.Node) -> Any:
    """The fake tensor (or tuple of them) that `node` produces."""
    return node.meta["val"]


def bytes_of(value: Any) -> int:
    """The bytes of a tensor; 0 for any other value."""
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def is_tensor(node: Any) -> bool:
    """Whether `node` is a node that produces one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def shape(node: fx.Node) -> tuple[int, ...]:
    """The global shape of the tensor that `node` produces."""
    return tuple(value(node).shape)


def operator_name(node: fx.Node) -> str:
    """`aten.linear.default` for a node that calls it; `manual.ring` for one that calls the manual function of
    `ring`."""
    if node.target is call_manual:
        return f"manual.{manual_of(str(node.args[1])).word}"
    return str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "?")


def name_of_call(node: fx.Node) -> str:
    """The name of the operator that `node` calls, also inside auto_functionalized."""
    text = functions_of(str(node.args[1])).text if node.target is run else ""
    writing = re.search(r"auto_functionalized\w*\(torch\.ops\.([\w.]+)", text)
    return writing[1] if writing else operator_name(node)


def describe(node: fx.Node) -> str:
    """The dtype and shape of the tensor that `node` produces, as `float32[8, 16]`; else the type of its value."""
    val = node.meta.get("val")
    return described(val) or type(val).__name__


def described(val: Any) -> str:
    """The dtype and shape of a tensor, as `float32[8, 16]`; "" for any other value."""
    return f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}" if isinstance(val, torch.Tensor) else ""


def module_path(node: fx.Node) -> str:
    """The path of the innermost module that `node` was captured in, as `transformer.h.0.attn`."""
    return traced_path(node).removeprefix("fn").removeprefix(".")


def traced_path(node: fx.Node) -> str:
    """The path of the innermost module in the form of torch.export."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        return str(path)
    return ""


def source_line(node: fx.Node) -> str:
    """The line of the user's code that `node` comes from, as `model.py:31, in forward: x = self.l(x)`. If no user code
    calls its module, as in an nn.Sequential that is sharded itself, the module: `module 2`."""
    line, path = _own_line(node.meta.get("stack_trace") or ""), module_path(node)
    return line or (f"module {path}" if path else "")


@lru_cache(maxsize=1024)  # the operators of all layers come from a few lines
def _own_line(stack_trace: str) -> str:
    where, _, code = own_frame(stack_trace).partition("\n")
    path, *rest = where.split(", ")
    path = path.removeprefix('File "').removesuffix('"')
    return f"{path}:{rest[0].removeprefix('line ')}, {rest[1]}: {code}" if len(rest) > 1 else path


def own_frame(stack_trace: str) -> str:
    """The innermost frame of a stack trace that is neither PyTorch's nor Partway's: its place, with the name of its
    file for the path, and its line of code."""
    trace = stack_trace.strip().splitlines()
    frames = [i for i, line in enumerate(trace) if line.lstrip().startswith("File ")]
    own = [i for i in frames if is_persons(trace[i].strip().removeprefix('File "'))]
    if not own:
        return ""
    path, *where = trace[own[-1]].strip().split(", ")
    name = path.removeprefix('File "').removesuffix('"').rsplit("/", 1)[-1]
    code = trace[own[-1] + 1].strip() if own[-1] + 1 < len(trace) else ""
    return ", ".join((f'File "{name}"', *where)) + f"\n{code}"


def is_persons(filename: str) -> bool:
    """Whether a source file is neither PyTorch's nor ours."""
    return not filename.startswith(_others())


@lru_cache(maxsize=1)
def _others() -> tuple[str, ...]:
    """The prefixes of the paths of PyTorch's files and of ours."""
    ours = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    return ("<", *(os.path.join(folder, "") for folder in (os.path.dirname(torch.__file__), ours)))


def region_of(node: fx.Node) -> int | None:
    """The call of torch.utils.checkpoint that `node` was captured in; None outside of any."""
    return (node.meta.get("custom") or {}).get(_REGION)


def marked(region: int) -> dict[str, int]:
    """The mark of a node of a region: the "custom" part of its meta data, which PyTorch copies from trace to trace."""
    return {_REGION: region}


def mark(node: fx.Node, region: int | None) -> None:
    """Note that `node` belongs to `region`."""
    if region is not None:
        node.meta["custom"] = marked(region)


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensor operands of `node` in the order of its arguments, a repeated one repeated."""
    nodes: list[fx.Node] = []
    map_arg((node.args, node.kwargs), nodes.append)
    return tuple(nodes)


def argument_names(node: fx.Node) -> list[str]:
    """The names of the arguments of a call's operator."""
    return [formal.name for formal in schema_of(node.target).arguments]


def argument(node: fx.Node, name: str) -> Any:
    """The argument called `name` of a call of an operator, or its default. Raises KeyError if there is none."""
    for i, formal in enumerate(schema_of(node.target).arguments):
        if formal.name == name:
            if i < len(node.args):
                return node.args[i]
            return node.kwargs.get(name, formal.default_value if formal.has_default_value() else None)
    raise KeyError(f"{node.target} has no argument {name!r}")


def per_dim(value: Any, count: int) -> list[int]:
    """An argument as a list with one number per dim: `value` may be one number for all of them."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return [int(v) for v in values] * (count if len(values) == 1 else 1)


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether the call draws from a random generator. (Operators of attention, recurrent layers and dropout can; a call
    of them with probability 0, or outside training, does not.)"""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = argument_names(node)
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    chances = [arguments.get(name, 0.0) for name in ("dropout", "dropout_p") if name in names]
    return all(chances) and bool(arguments.get("train", True))


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of the graph: result `index` of `node`."""

    node: fx.Node
    index: int = 0


def values_of(node: fx.Node) -> tuple[Value, ...]:
    """The results of `node`."""
    val = value(node)
    return tuple(Value(node, i) for i in range(len(val))) if isinstance(val, tuple | list) else (Value(node),)


def results_of(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors of the results of `node`."""
    val = value(node)
    return list(val) if isinstance(val, tuple | list) else [val]


def source_of(node: fx.Node) -> Value:
    """The value that `node` stands for: a result of its operand for a getitem, else its own result."""
    if node.target is operator.getitem:
        return Value(node.args[0], node.args[1])  # type: ignore[arg-type]
    return Value(node)


def tensor_of(v: Value) -> torch.Tensor:
    """The fake tensor of a value."""
    val = value(v.node)
    tensor: torch.Tensor = val[v.index] if isinstance(val, tuple | list) else val
    return tensor


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


def rearranges(node: fx.Node) -> bool:
    """Whether the operator returns the numbers of its operand in another order, shape or dtype: a view, a copy or a
    cast."""
    return is_view(node) or node.target in _COPIES


REPLACING = (
    torch.ops.aten.index_copy.default,
    torch.ops.aten.select_scatter.default,
    torch.ops.aten.slice_scatter.default,
)
"""Operators that give their first operand with the elements of the second in the place of some of its own."""


def is_pointwise(target: Any) -> bool:
    """Whether PyTorch tags the operator `target` as pointwise: each element depends on the elements at its place."""
    return torch.Tag.pointwise in getattr(target, "tags", ())


def is_identity(node: fx.Node) -> bool:
    """Whether a node returns its operand: a no-op conversion, an alias or, where autograd is off, a detach."""
    if node.target is convert:
        return kind_of(str(node.args[1]), str(node.args[2])) is Kind.NOTHING
    return node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def is_view(node: fx.Node) -> bool:
    """Whether the operator returns a view of its operand's memory."""
    if not isinstance(node.target, OpOverload):
        return False
    return node.target is constrain or any(a.alias_info is not None for a in schema_of(node.target).arguments)


def at_source(node: fx.Node) -> str:
    """The source line of `node` as the end of a message, or nothing."""
    line = source_line(node)
    return f"\n  at {line}" if line else ""


def calls_of(graph: fx.Graph) -> list[fx.Node]:
    """The calls and constants of a graph, in order: all nodes but its inputs and its output."""
    return [node for node in graph.nodes if node.op in ("call_function", "get_attr")]


def is_port(node: fx.Node) -> bool:
    """Whether `node` is an input or the output of its graph."""
    return node.op in ("placeholder", "output")


def returned_by(graph: fx.Graph) -> tuple[Any, ...]:
    """The nodes that a graph returns, None where there is no value."""
    returned: Any = next(iter(graph.find_nodes(op="output"))).args[0]
    return tuple(returned)


# -- Origins of the nodes of a step

_LINE = "stack_trace"
_AGAIN = "partway_again"
_OPERATOR = "partway_operator"
_KEYS = ("nn_module_stack", _LINE, _AGAIN, _OPERATOR)
_POSITION = "partway_position"
_UNSIZED = "partway_unsized"


def note_unsized(node: fx.Node, dims: tuple[int, ...], strides: bool) -> None:
    """Note that the sizes of `dims` of a value are known only at run time; `strides`: its strides, too."""
    node.meta[_UNSIZED] = dims, strides


def is_unsized(node: fx.Node) -> bool:
    """Whether the size of a value is known only at run time."""
    return _UNSIZED in node.meta


def has_any_strides(node: fx.Node) -> bool:
    """Whether the strides of a value are known only at run time."""
    return is_unsized(node) and bool(node.meta[_UNSIZED][1])


def unsized_dims(node: fx.Node) -> tuple[int, ...]:
    """The dims of a value whose sizes are known only at run time."""
    dims: tuple[int, ...] = node.meta[_UNSIZED][0] if is_unsized(node) else ()
    return dims


def inherit(new: fx.Node, old: fx.Node) -> None:
    """Give `new` the origin of `old`, unless it has its own."""
    new.meta |= {key: old.meta[key] for key in _KEYS if key in old.meta and key not in new.meta}


def inherit_line(new: fx.Node, old: fx.Node) -> None:
    """Give `new` the line of `old`; its module is set later."""
    if _LINE in old.meta:
        new.meta[_LINE] = old.meta[_LINE]


def computed_again(node: fx.Node) -> bool | None:
    """Whether the backward computes `node` again where it reads it; None if nothing was noted."""
    noted: bool | None = node.meta.get(_AGAIN)
    return noted


def compute_again(node: fx.Node, again: bool) -> None:
    """Note whether the backward computes `node` again where it reads it."""
    node.meta[_AGAIN] = again


def operator_of(node: fx.Node) -> str:
    """The operator of the captured call that `node`, or its gradient, is a part of; "" if nothing was noted."""
    noted: str = node.meta.get(_OPERATOR, "")
    return noted


def note_operator(node: fx.Node, name: str) -> None:
    """Note the operator of the captured call that `node` is a part of."""
    node.meta.setdefault(_OPERATOR, name)


def number(nodes: Sequence[fx.Node]) -> None:
    """Note in each node its position."""
    for i, node in enumerate(nodes):
        node.meta["custom"] = {**node.meta.get("custom", {}), _POSITION: i}


def position(node: fx.Node) -> int | None:
    """The position of the node that `node` was traced from; None if there is none."""
    found: int | None = node.meta.get("custom", {}).get(_POSITION)
    return found


class _Gradients:
    """Tracks the node whose gradient is being computed, by hooks that autograd calls before it computes one."""

    def __init__(self) -> None:
        self._now = ExitStack()

    def announce(self, results: Any, of: int) -> None:
        """Have autograd announce the gradient of `results`, those of the node at position `of`."""
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, torch.Tensor) and result.grad_fn is not None:
                result.grad_fn.register_prehook(lambda _: self._enter(of))

    def _enter(self, of: int) -> None:
        self.end()
        self._now.enter_context(annotate({_POSITION: of}))

    def end(self) -> None:
        """Leave the current node: what follows belongs to none."""
        self._now.close()


class _Runner(fx.Interpreter):
    """Runs a module and gives the nodes traced from each node the "custom" meta data of that node."""

    def __init__(self, module: fx.GraphModule, gradients: _Gradients) -> None:
        super().__init__(module)
        self._gradients = gradients

    def run_node(self, n: fx.Node) -> Any:
        arguments = self.fetch_args_kwargs_from_env(n)
        with annotate(n.meta.get("custom", {})):
            results = getattr(self, n.op)(n.target, *arguments)
        found = position(n)
        if found is not None:
            self._gradients.announce(results, found)
        return results


@contextmanager
def tracing() -> Iterator[Callable[..., tuple[Any, ...]]]:
    """Give `run(module, *inputs)`. The nodes traced in the block from a node that it runs, and from that node's
    gradient, keep its "custom" meta data."""
    gradients = _Gradients()
    with preserve_node_meta():
        try:
            yield lambda module, *inputs: tuple(_Runner(module, gradients).run(*inputs))
        finally:
            gradients.end()
