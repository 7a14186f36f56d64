"""The owners and readers of memory, which decide what may be overwritten and what must be copied."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ...propagation.graph.nodes import REPLACING, draws_random_numbers, is_identity
from ...propagation.ops.collectives import convert, convert_group, kind_of
from ...propagation.ops.python.hooked import calls_hook
from ...propagation.ops.random_numbers import draw
from ...propagation.ops.registration import own_memory
from ...propagation.torch_internals import OpOverload, makes_memory
from .region import Region
from .strides import strides_of

_aten = torch.ops.aten

# Views of all of a tensor: they keep no more memory alive than they show.
_WHOLE_VIEWS = {
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.t.default, _aten.transpose.int,
    _aten.permute.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.unsqueeze.default,
}  # fmt: skip

# Elementwise operators, and their forms that write into the first operand.
_IN_PLACE: dict[Any, Any] = {
    _aten.add.Scalar: _aten.add_.Scalar,
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.addcmul.default: _aten.addcmul_.default,
    _aten.div.Scalar: _aten.div_.Scalar,
    _aten.div.Tensor: _aten.div_.Tensor,
    _aten.mul.Scalar: _aten.mul_.Scalar,
    _aten.mul.Tensor: _aten.mul_.Tensor,
    _aten.neg.default: _aten.neg_.default,
    _aten.relu.default: _aten.relu_.default,
    _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.tanh.default: _aten.tanh_.default,
}

# Operators with a form that writes its result into the argument of this name, which may be the first operand.
_OUT_OF_PLACE: dict[Any, tuple[Any, str]] = {
    _aten.gelu_backward.default: (_aten.gelu_backward.grad_input, "grad_input"),
    _aten.tanh_backward.default: (_aten.tanh_backward.grad_input, "grad_input"),
    _aten.threshold_backward.default: (_aten.threshold_backward.grad_input, "grad_input"),
}
_COMMUTES = {_aten.add.Tensor, _aten.mul.Tensor}

# Operators, beside collectives, that only start an operation: they return an object whose `wait` returns the value.
AWAITED: frozenset[Any] = frozenset()


def _slice_scatter_(x: Tensor, source: Tensor, *where: int, **named: int) -> Tensor:
    _aten.slice.Tensor(x, *where, **named).copy_(source)
    return x


def _select_scatter_(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    x.select(dim, index).copy_(source)
    return x


# Operators that replace elements. They are idempotent, so that simulated ranks may share the memory they write into.
_INTO_IT = _aten.index_copy_.default, _select_scatter_, _slice_scatter_
_INTO: dict[Any, Any] = dict(zip(REPLACING, _INTO_IT, strict=True))


@dataclass(frozen=True)
class Overwrite:
    """A call that writes into the memory of its first operand, allocated by `owner`. `private`: see `CallOperator`."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    owner: fx.Node
    private: bool


def overwriting(node: fx.Node, written: Collection[fx.Node] = ()) -> Overwrite | None:
    """The call of `node` in a form that writes into an operand, if nothing else reads that memory and it fits the
    result exactly. New memory, which must be mapped and cleared, costs as much as the arithmetic. `written`: the inputs
    that a call may write into (see written.py)."""
    if node.target in _INTO:
        operand = node.args[0]
        owner = owner_of(operand, node, written)
        if isinstance(operand, fx.Node) and owner is not None and _is_like(operand, node):
            private = owner in written or is_private(owner)
            return Overwrite(_INTO[node.target], node.args, node.kwargs, owner, private)
        return None
    if node.target not in _IN_PLACE and node.target not in _OUT_OF_PLACE:
        return None
    first, *rest = node.args
    orders = [(first, *rest)]
    if node.target in _COMMUTES and len(rest) == 1 and not node.kwargs:
        orders.append((rest[0], first))
    for args in orders:
        operand = args[0]
        owner = owner_of(operand, node)
        if isinstance(operand, fx.Node) and owner is not None and _is_like(operand, node):
            if node.target in _IN_PLACE:
                return Overwrite(_IN_PLACE[node.target], args, node.kwargs, owner, is_private(owner))
            target, name = _OUT_OF_PLACE[node.target]
            return Overwrite(target, args, {**node.kwargs, name: operand}, owner, is_private(owner))
    return None


def _is_like(one: fx.Node, other: fx.Node) -> bool:
    """Whether the values of two nodes have the same shape, dtype and strides."""
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return (a.shape, a.dtype, strides_of(a)) == (b.shape, b.dtype, strides_of(b))


def is_whole_view(node: fx.Node) -> bool:
    """Whether a node returns a view of all of its operand."""
    return node.target in _WHOLE_VIEWS or is_identity(node)


def owner_of(node: Any, reader: fx.Node, written: Collection[fx.Node] = ()) -> fx.Node | None:
    """The node that allocates the memory of `node`, or the input of `written` that it is, if `reader` alone reads all
    of that memory, and once."""
    while isinstance(node, fx.Node) and set(node.users) == {reader} and _reads(reader)[node] == 1:
        if node in written or _is_fresh(node):
            return node
        if not is_whole_view(node):
            return None
        node, reader = node.all_input_nodes[0], node
    return None


def runs_once(node: fx.Node) -> bool:
    """Whether one simulated rank runs a call for all."""
    return node.op == "call_function" and (draws_random_numbers(node) or calls_hook(node))


def is_awaited(node: fx.Node) -> bool:
    """Whether the result of a call must be waited for."""
    if node.target in (convert, convert_group):
        return kind_of(str(node.args[1]), str(node.args[2])).communicates
    return node.target in AWAITED


def is_private(owner: fx.Node | None) -> bool:
    """Whether each simulated rank allocates this memory by itself: neither its group together nor one rank for all."""
    if owner is None:
        return False
    maker = _maker(owner)
    together = maker.target in (convert, convert_group) or runs_once(maker)
    return bool(maker.all_input_nodes) and not together


def _reads(node: fx.Node) -> Counter[fx.Node]:
    """The number of times that `node` reads each of its operands."""
    counts: Counter[fx.Node] = Counter()

    def see(operand: fx.Node) -> fx.Node:
        counts[operand] += 1
        return operand

    map_arg((node.args, node.kwargs), see)
    return counts


def may_share(returned: Any) -> tuple[bool, ...]:
    """For each output, whether it may share memory: see `Code.shared`."""
    roots = [_root(o) if isinstance(o, fx.Node) else None for o in returned]
    count = Counter(roots)
    return tuple(root is not None and (not _is_fresh(root) or count[root] > 1) for root in roots)


def _root(node: fx.Node) -> fx.Node:
    """The value of which `node` is a whole view, or `node` itself."""
    while is_whole_view(node):
        node = node.all_input_nodes[0]
    return node


def memory_of(node: fx.Node) -> fx.Node:
    """The value whose memory `node` may have, all or a part of it."""
    while node.all_input_nodes and not _makes_memory(_maker(node)):
        node = node.all_input_nodes[0]
    return node


def _is_fresh(node: fx.Node) -> bool:
    """Whether an operator allocates memory for `node` alone."""
    maker = _maker(node)
    if isinstance(maker.target, Region):
        return maker is not node and maker.target.owned[node.args[1]]  # type: ignore[index]
    return _makes_memory(maker)


def owned_by(stretch: Collection[fx.Node], results: Sequence[fx.Node]) -> list[bool]:
    """For each of the results of a stretch, whether an operator in it allocates memory for that result alone."""
    memory = Counter(map(memory_of, results))
    return [root in stretch and _is_fresh(root) and memory[root] == 1 for root in map(_root, results)]


def _maker(node: fx.Node) -> fx.Node:
    """The call of which `node` is a result."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _makes_memory(node: fx.Node) -> bool:
    if node.target in (convert, convert_group):
        return kind_of(str(node.args[1]), str(node.args[2])).communicates
    return (
        node.target in own_memory
        or node.target is draw
        or (isinstance(node.target, OpOverload) and makes_memory(node.target))
    )
