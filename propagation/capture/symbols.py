"""A function captured once for all sizes of some dims, or for all values of some integers among its arguments.

torch.export runs the function with symbols in place of those sizes; the size of an empty tensor stands for an integer.
Where the function decides something by a symbol, torch records a guard: a relation between symbols that held.

Of sizes, `AnySize.at` substitutes those of a call, which gives the same as a capture of that call without running the
function again. A size that violates a guard is refused, as are 0 and 1, for which torch never makes symbols. An integer
becomes a tensor of one element, an input of the graph like any other, and operators compute with it (numbers.py);
`CapturedCounts` tells whether the guards hold for those of another call. A function with tensors whose sizes depend on
an integer has no such graph.
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
from .export.tracing import Attempt, Dims, Traced, checked, of_size

aten = torch.ops.aten
Sizes = tuple[int | torch.SymInt, ...]

_OF_TENSORS = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default)
_PLAIN = (type(None), bool, int, float, complex, torch.dtype, torch.device, type)
_READ = (str, bytes, torch.Size, tuple, list, slice, range)  # repr shows all of their contents


class OtherSizesError(Exception):
    """The function does, or might do, something else for tensors of the sizes of a call."""


@dataclass(frozen=True)
class AnySize:
    """A function captured with symbols for some sizes.

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
        count = len(call.tensors) - call.numbers
        tensors = [*call.tensors[:count], *(of_size(int(number)) for number in call.tensors[count:])]
        pairs = _pairs(self.sizes, [tensor.shape for tensor in tensors])
        values = _values(pairs, _pairs(self.strides, [tensor.stride() for tensor in tensors]))
        return replace(self.attempt, call=call), replace(self.traced, module=_with_sizes(self.traced.module, values))


@dataclass(frozen=True, eq=False)
class CapturedCounts:
    """The conditions of a graph on integers: the guards on the traced `numbers`, and that everything `computed` from
    them fits int64, unlike Python's unbounded integers."""

    numbers: tuple[int | torch.SymInt, ...]
    computed: tuple[torch.SymInt, ...]

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.numbers)

    def hold(self, given: Sequence[int]) -> bool:
        """Whether a call with the numbers `given` has the same graph."""
        try:
            values = _values(list(zip(self.numbers, given, strict=True)))
        except OtherSizesError:
            return False
        return all(abs(at_symbols(each, values)) < 2**63 for each in self.computed)


def _values(
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
    inputs = [node.meta["val"] for node in _inputs(traced)]
    sizes, strides = tuple(tuple(x.shape) for x in inputs), tuple(tuple(x.stride()) for x in inputs)
    _check_kept(traced, [size for shape in sizes for size in shape])
    outliving = replace(attempt, call=replace(attempt.call, tensors=()))
    return AnySize(outliving, traced, sizes, strides)


def counted(captured: AnySize) -> tuple[Traced, CapturedCounts]:
    """The trace of a function captured for any values of integers, with tensors for these (in place), and its
    conditions. Raises CaptureError where a size depends on one of them."""
    traced, graph = captured.traced, captured.traced.module.graph
    vals = [node.meta.get("val") for node in graph.nodes if node.op == "call_function"]
    computed = tuple(val for val in vals if isinstance(val, torch.SymInt) and symbols_in(val))
    count = captured.attempt.call.numbers
    for node in _inputs(traced)[-count:]:
        _become_number(graph, node)
    traced = checked(traced, captured.attempt.fn)
    for node in graph.nodes:
        if is_symbolic(node.meta.get("val")):
            raise CaptureError(f"a size, or what {node.name} does, follows from a number that changes")
    return traced, CapturedCounts(tuple(sizes[0] for sizes in captured.sizes[-count:]), computed)


def _inputs(traced: Traced) -> list[fx.Node]:
    """The nodes of the tensors of the call."""
    placeholders = {node.name: node for node in traced.module.graph.nodes if node.op == "placeholder"}
    return [placeholders[s.arg.name] for s in traced.signature.input_specs if s.kind is InputKind.USER_INPUT]


def _become_number(graph: fx.Graph, node: fx.Node) -> None:
    """Turn an empty input, whose size stands for a number, into a 0-dim tensor of that number."""
    stood_for: FakeTensor = node.meta["val"]
    for user in list(node.users):
        if user.target is not aten.sym_size.int:
            raise CaptureError(f"{user.name} reads what stands for a number")
        with graph.inserting_before(user):
            number: Any = graph.call_function(aten._local_scalar_dense.default, (node,))
        number.meta = {**user.meta}
        user.replace_all_uses_with(number)
        graph.erase_node(user)
    with stood_for.fake_mode:
        node.meta["val"] = torch.empty((), dtype=torch.int64)


def _check_kept(traced: Traced, sizes: Sequence[int | torch.SymInt]) -> None:
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


def _with_sizes(module: fx.GraphModule, values: Mapping[Any, int]) -> fx.GraphModule:
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
