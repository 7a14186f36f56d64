"""A function captured once for all sizes of some dims, and its graph at each of them.

torch.export runs the function with symbols in place of those sizes. Where the function decides something by a size,
torch records a guard: a relation between symbols that held. `AnySize.at` substitutes the sizes of a call for the
symbols, which gives the same as a capture of that call without running the function again. A size that violates a guard
is refused, as are the sizes 0 and 1, for which torch never makes symbols.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from ...strategy.errors import CaptureError
from ..graph.structure import NUMBERS, Call
from ..torch_internals import FakeTensor, at_symbols, fake_like, guards_of, range_of, symbol_of, symbols_in, tree_map
from .export.numbers import CHECKS
from .export.tracing import Attempt, Dims, Traced

aten = torch.ops.aten
Sizes = tuple[int | torch.SymInt, ...]

_OF_TENSORS = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default)
_PLAIN = (type(None), bool, int, float, complex, torch.dtype, torch.device, type)
_READ = (str, bytes, torch.Size, tuple, list, slice, range)  # repr shows all of their contents


class OtherSizesError(Exception):
    """The function does, or might do, something else for tensors of the sizes of a call."""


@dataclass(frozen=True)
class AnySize:
    """A function captured for all sizes of some dims.

    attempt   how it was traced, without the tensors of the call
    traced    the result, with symbols for sizes
    sizes     the sizes of each tensor of the call, numbers and symbols; `strides` likewise
    """

    attempt: Attempt
    traced: Traced
    sizes: tuple[Sizes, ...]
    strides: tuple[Sizes, ...]

    @property
    def dims(self) -> Dims:
        """The dims whose sizes may change: the requested ones, except those whose size the function depends on."""
        each = ((place, dim, size) for place, sizes in enumerate(self.sizes) for dim, size in enumerate(sizes))
        return frozenset((place, dim) for place, dim, size in each if symbols_in(size))

    @property
    def fixed(self) -> str:
        """The requested dims whose sizes may not change, in words."""
        names = self.attempt.call.names
        listed = [f"dim {dim} of {names[place]!r}" for place, dim in sorted(self.attempt.changing - self.dims)]
        return " and ".join(listed)

    def at(self, call: Call) -> tuple[Attempt, Traced]:
        """The result that a capture of `call` would give. Raises OtherSizesError where the function might do something
        else."""
        values = self._values(call.tensors)
        traced = replace(self.traced, module=with_sizes(self.traced.module, values))
        return replace(self.attempt, call=call), traced

    def _values(self, tensors: Sequence[torch.Tensor]) -> dict[Any, int]:
        """The values of the symbols for a call with `tensors`."""
        pairs = _pairs(self.sizes, [tensor.shape for tensor in tensors])
        lying = _pairs(self.strides, [tensor.stride() for tensor in tensors])
        return values_of_symbols(pairs, lying)


def values_of_symbols(
    pairs: Sequence[tuple[int | torch.SymInt, int]], more: Sequence[tuple[int | torch.SymInt, int]] = ()
) -> dict[Any, int]:
    """The values of the symbols that make each traced size equal the size it is paired with; `more`: pairs of strides,
    which may determine a symbol. Raises OtherSizesError where the function might do something else."""
    given = [(symbol_of(symbolic), size) for symbolic, size in reversed([*pairs, *more])]
    values = {symbol: size for symbol, size in given if symbol is not None}
    for symbolic, size in pairs:
        if not symbols_in(symbolic) <= values.keys() or at_symbols(symbolic, values) != size:
            raise OtherSizesError(f"a size is {size}, and it counts on {symbolic}")
    some = next((symbolic for symbolic, _ in pairs if isinstance(symbolic, torch.SymInt)), None)
    if some is None:
        return values
    for symbol, size in values.items():
        least, most = range_of(some, symbol)
        if not least <= size <= most:
            raise OtherSizesError(f"a size is {size}, and it counts on {least} to {most}")
    for guard in guards_of(some):
        if guard.free_symbols <= values.keys() and not bool(guard.xreplace(values)):
            raise OtherSizesError(f"it counts on {guard}")
    return values


def any_size(attempt: Attempt, traced: Traced) -> AnySize:
    """The AnySize of a trace with symbols. Raises CaptureError where a size may be part of a value that only Python
    reads, such as a string: torch records no guard for that."""
    placeholders = {node.name: node for node in traced.module.graph.nodes if node.op == "placeholder"}
    inputs = [spec.arg.name for spec in traced.signature.input_specs if spec.kind is InputKind.USER_INPUT]
    sizes = tuple(tuple(placeholders[name].meta["val"].shape) for name in inputs)
    strides = tuple(tuple(placeholders[name].meta["val"].stride()) for name in inputs)
    check_kept(traced, [size for shape in sizes for size in shape])
    return AnySize(
        replace(attempt, call=replace(attempt.call, tensors=())), traced, sizes, strides
    )  # it outlives the call


def check_kept(traced: Traced, sizes: Sequence[int | torch.SymInt]) -> None:
    """Raise CaptureError where one of `sizes` may be part of a traced value that only Python reads, or of a branch."""
    names = {str(symbol) for size in sizes for symbol in symbols_in(size)}
    for kept in (*traced.result.plain(), *traced.left.plain()):
        if not isinstance(kept, (*_PLAIN, *_READ)) or names & _words(kept):
            raise CaptureError(f"it returns or keeps a {type(kept).__name__}, which may hold a size")
    if names & (_words(traced.result.spec) | _words(traced.left.spec)):
        raise CaptureError("it returns or keeps a dict with a size in a key")
    for inner in traced.module.modules():
        nodes = inner.graph.nodes if inner is not traced.module and isinstance(inner, fx.GraphModule) else ()
        if any(is_symbolic(node.meta.get("val")) for node in nodes):
            raise CaptureError("a branch or a loop in it has tensors of such sizes")


def _pairs(symbolic: Sequence[Sizes], given: Sequence[Sequence[int]]) -> list[tuple[int | torch.SymInt, int]]:
    return [pair for pairs in zip(symbolic, given, strict=True) for pair in zip(*pairs, strict=True)]


def _words(value: Any) -> set[str]:
    """The words in the repr of a Python value that may be names of symbols."""
    return set(re.findall(r"s\d+", repr(value)))


def is_symbolic(val: Any) -> bool:
    """Whether the value of a node is, or contains, a symbolic number or a tensor with symbolic sizes."""
    if isinstance(val, torch.Tensor):
        return any(map(symbols_in, (*val.shape, *val.stride())))
    return isinstance(val, tuple(NUMBERS)) or (isinstance(val, list | tuple) and any(map(is_symbolic, val)))


def with_sizes(module: fx.GraphModule, values: Mapping[Any, int]) -> fx.GraphModule:
    """A copy of a traced graph where the symbols have `values`, without the nodes that compute numbers from sizes."""
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    for node in module.graph.nodes:
        val = node.meta.get("val")
        if node.op == "call_function" and isinstance(val, tuple(NUMBERS)) and symbols_in(val) <= values.keys():
            copies[node] = _number(node, copies, values)
            continue
        if node.target in CHECKS:
            condition = fx.map_arg(node.args, copies.__getitem__)[0]
            if not isinstance(condition, fx.Node):
                if node.target is aten._assert_scalar.default and not condition:
                    raise OtherSizesError(f"it asserts {node.args[1]}")
                continue
        if node.target is aten.slice.Tensor and _takes_all(node, copies, values):
            copies[node] = copies[node.all_input_nodes[0]]
            continue
        copy = copies[node] = _copied(node, graph, copies)
        if is_symbolic(val):
            copy.meta["val"] = tree_map(lambda each: _at(each, values), val)
    return fx.GraphModule(module, graph)


def _copied(node: fx.Node, graph: fx.Graph, copies: Mapping[fx.Node, Any]) -> fx.Node:
    """A copy of `node` with the name that it has in a capture without symbols, which has no nodes for numbers."""
    if node.op != "call_function":
        return graph.node_copy(node, copies.__getitem__)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
    target: Any = node.target
    copy = graph.call_function(target, args, kwargs, name=re.sub(r"_\d+$", "", node.name))
    copy.meta = dict(node.meta)
    return copy


def _takes_all(node: fx.Node, copies: Mapping[fx.Node, Any], values: Mapping[Any, int]) -> bool:
    """Whether a slice takes the whole of a dim: for a known size, torch makes no such slice."""
    given: tuple[Any, ...] = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    x, dim, start, end, step = given
    start, end = (copies[each] if isinstance(each, fx.Node) else each for each in (start, end))
    size = at_symbols(x.meta["val"].shape[dim], values)
    return start in (None, 0) and step == 1 and (end is None or (type(end) is int and end >= size))


def _number(node: fx.Node, copies: Mapping[fx.Node, Any], values: Mapping[Any, int]) -> Any:
    """The number that a node computes from sizes, as Python computes it. Raises OtherSizesError where Python cannot."""
    if node.target in _OF_TENSORS:
        return at_symbols(node.meta["val"], values)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
    target: Any = node.target
    try:
        return target(*args, **kwargs)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise OtherSizesError(f"a number that it computes from them: {error}") from error


def _at(val: Any, values: Mapping[Any, int]) -> Any:
    """One value of a node where the symbols have `values`. A number that depends on the values of tensors stays."""
    if not isinstance(val, FakeTensor) or any(symbols_in(size) - values.keys() for size in val.shape):
        return val
    shape, strides = ([at_symbols(size, values) for size in sizes] for sizes in (val.shape, val.stride()))
    return fake_like(val, shape, strides)
