"""A manual function as local operators and conversions, which lowering puts in the place of its call.

Collectives become conversions between the placements of `strategy/placement.py`, so that they are priced, grouped, run
and differentiated like those of the plan:

    all_reduce       Partial -> Replicate            all_gather     Shard -> Replicate
    reduce_scatter   Partial -> Shard                all_to_all     Shard -> Shard
    permute          Shard -> SliceWindow, of a new leading dim along which every rank has one element
    broadcast        all ranks but the root mask their tensors, which are summed

with Broadcast in place of Replicate if ranks use the result in their own way (variance.py). A reduction other than a
sum is computed from gathered or exchanged parts.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ...strategy.cut import Cut, SliceWindow
from ...strategy.errors import CaptureError
from ...strategy.placement import BROADCAST, PARTIAL, PARTIAL_MAX, REPLICATE, Placement, Shard
from ..graph.nodes import (
    Value,
    argument,
    at_source,
    inherit_line,
    mark,
    operands,
    region_of,
    source_of,
    tensor_of,
    value,
    values_of,
)
from ..ops import by_hand, indexing
from ..ops.by_hand import COLLECTIVES
from ..ops.collectives import convert
from ..ops.keyed import WRITTEN
from ..ops.python.manual import alike
from ..ops.random_numbers import draw
from ..rules.rule import Emitter, LocalShapes
from ..rules.table import rule_of
from .manual import Crossing, TracedManual
from .variance import Variance, axes_of, variance_of

aten = torch.ops.aten
_REDUCED = {"max": aten.amax.default, "min": aten.amin.default}


@dataclass(frozen=True, slots=True)
class ManualConversion:
    """A conversion of a manual function: `of` a value of its graph, caused by the call `at` (None: by a result)."""

    of: Value
    axes: tuple[str, ...]
    source: Placement
    target: Placement
    whole_bytes: int
    at: fx.Node | None

    def has_gradient(self, flows: Collection[Value]) -> bool:
        """Whether its transpose runs, where `flows` are the values that a gradient reaches. Values that are only
        compared over ranks are detached."""
        return self.of in flows and PARTIAL_MAX not in (self.source, self.target)


@dataclass(frozen=True)
class WrittenManual:
    """The graph that a rank runs; the tag of a conversion is its place in `conversions`."""

    graph: fx.Graph
    conversions: tuple[ManualConversion, ...]
    variance: Variance


def written(manual: TracedManual) -> WrittenManual:
    """`manual` in the form that a rank runs. With PARTWAY_VERIFY=1 it checks that results declared whole are."""
    verifies = os.environ.get("PARTWAY_VERIFY") == "1"
    if (manual.key, verifies) not in WRITTEN:
        WRITTEN[manual.key, verifies] = _Writing(manual, verifies).written()
    known: WrittenManual = WRITTEN[manual.key, verifies]
    return known


class _Writing:
    """The state of writing one manual function: the node that stands for each value."""

    def __init__(self, manual: TracedManual, verifies: bool) -> None:
        self.manual, self.mesh, self.verifies = manual, manual.mesh, verifies
        self.variance = variance_of(manual)
        self.able = manual.graph.differentiable
        self.graph = fx.Graph()
        self.local: dict[Value, fx.Node] = {}
        self.varied: dict[tuple[Value, frozenset[str]], fx.Node] = {}
        self.conversions: list[ManualConversion] = []

    def written(self) -> WrittenManual:
        for port in self.manual.graph.inputs:
            self.local[Value(port.node)] = self.graph.placeholder(port.node.name)
        for node in self.manual.graph.nodes:
            if node.target is not operator.getitem:
                before = len(self.graph.nodes)
                self._write(node)
                for new in list(self.graph.nodes)[before:]:
                    mark(new, region_of(node))
                    inherit_line(new, node)
        ports = zip(self.manual.graph.outputs, self.manual.results, strict=True)
        self.graph.output(tuple(self._result(source_of(port.node), crossing) for port, crossing in ports))
        return WrittenManual(self.graph, tuple(self.conversions), self.variance)

    def _write(self, node: fx.Node) -> None:
        taken = iter([self._operand(node, source_of(operand)) for operand in operands(node)])
        called: Any = map_arg((node.args, node.kwargs), lambda _: next(taken))
        args, kwargs = called
        if node.target in COLLECTIVES:
            result: Any = _COLLECTIVES[node.target](_CollectiveCall(self, node, args[0]))
        else:
            result = self._local_form(node, tuple(args), dict(kwargs))
        if not isinstance(value(node), tuple | list):
            self.local[Value(node)] = result
            return
        for v in values_of(node):
            if isinstance(tensor_of(v), torch.Tensor):
                one = isinstance(result, fx.Node)
                self.local[v] = self.call(operator.getitem, result, v.index) if one else result[v.index]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of an operator."""
        return self.graph.call_function(target, args, kwargs)

    def convert(
        self, x: fx.Node, of: Value, axes: frozenset[str], source: Placement, target: Placement, at: fx.Node | None
    ) -> fx.Node:
        """A conversion of `x`, a rank's tensor of the value `of` or a view of it."""
        tensor = tensor_of(of)
        ordered = tuple(axis for axis in self.mesh.axes if axis in axes)
        size = self.mesh.size(*ordered)
        held = tensor.numel() * tensor.element_size()
        whole_bytes = held * size if isinstance(source, Shard) else held
        tag = len(self.conversions)
        self.conversions.append(ManualConversion(of, ordered, source, target, whole_bytes, at))
        return self.call(convert, x, str(source), str(target), list(ordered), size, tag)

    def _operand(self, node: fx.Node, v: Value) -> fx.Node:
        """The operand `v` of a call, as a Broadcast on the axes where it is alike and has to vary."""
        missing = self.variance.missing(node, v)
        return self._varied(v, missing, node) if missing and v in self.able else self.local[v]

    def _varied(self, v: Value, axes: frozenset[str], at: fx.Node | None) -> fx.Node:
        if (v, axes) not in self.varied:
            self.varied[v, axes] = self.convert(self.local[v], v, axes, REPLICATE, BROADCAST, at)
        return self.varied[v, axes]

    def _result(self, v: Value, crossing: Crossing) -> fx.Node:
        """A result: slices and addends vary; a whole is alike, or declared to be."""
        varies, x = self.variance.values[v], self.local[v]
        said = crossing.whole & varies
        if said and self.verifies:
            x = self._verified(x, v, said, crossing.name)
        if v not in self.able:
            return x
        if missing := crossing.parted - varies:
            return self._varied(v, missing, None)
        return self.convert(x, v, said, BROADCAST, REPLICATE, None) if said else x

    def _verified(self, x: fx.Node, v: Value, said: frozenset[str], name: str) -> fx.Node:
        """A call that returns `x` if it is the same on all ranks along `said`, and raises otherwise."""
        tensor, compared = tensor_of(v), self.call(aten.detach.default, x)
        if tensor.dtype.is_complex:
            compared = self.call(aten.view_as_real.default, compared)
        elif tensor.dtype is torch.bool:
            compared = self.call(aten._to_copy.default, compared, dtype=torch.uint8)
        turn = (
            aten.neg.default if tensor.dtype.is_floating_point or tensor.dtype.is_complex else aten.bitwise_not.default
        )
        largest = self.convert(compared, v, said, PARTIAL_MAX, REPLICATE, None)
        least = self.call(turn, self.convert(self.call(turn, compared), v, said, PARTIAL_MAX, REPLICATE, None))
        axes = ",".join(axis for axis in self.mesh.axes if axis in said)
        return self.call(alike, x, largest, least, f"{name}, over {axes},")

    # -- local operators

    def _local_form(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if node.target is draw:
            return self._drawn(node, args, kwargs)
        rule = rule_of(node)
        if rule is None or rule.local is None:
            return self.call(node.target, *args, **kwargs)
        shapes = LocalShapes(
            tuple(_shape(source_of(operand)) for operand in operands(node)), tuple(map(_shape, values_of(node)))
        )
        return rule.local(Emitter(node, rule, shapes, shapes.operands, self.graph, {}), args, kwargs)

    def _drawn(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Random numbers. Where they vary, a rank's are its part of a tensor with a leading dim of one element per
        rank."""
        axes = tuple(axis for axis in self.mesh.axes if axis in self.variance.values[Value(node)])
        if not axes:
            return self.call(node.target, *args, **kwargs)
        key, _, _, _, kind, given, size, *rest = args
        sizes = tuple(map(self.mesh.size, axes))
        count = math.prod(sizes)
        place = self.call(indexing.position, list(axes), list(sizes))
        cut = str(Cut(count, sizes))
        drawn = self.call(draw, key, [place], [0], [cut], kind, given, [count, *size], *rest, **kwargs)
        return self.call(aten.reshape.default, drawn, list(size))


def _shape(v: Value) -> tuple[int, ...]:
    tensor = tensor_of(v)
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else ()


# -- collectives


@dataclass(frozen=True)
class _CollectiveCall:
    """One call of a collective, while it is written."""

    writing: _Writing
    node: fx.Node
    x: fx.Node

    def __getattr__(self, name: str) -> Any:
        return argument(self.node, name)

    @cached_property
    def v(self) -> Value:
        """The value that it takes."""
        return source_of(operands(self.node)[0])

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Its shape on a rank."""
        return _shape(self.v)

    @cached_property
    def count(self) -> int:
        """The number of its ranks."""
        return self.writing.mesh.size(*self.axes)

    @cached_property
    def whole(self) -> Placement:
        """The placement of a result that is alike on all ranks."""
        varies = self.writing.variance.values[Value(self.node)]
        return BROADCAST if axes_of(self.node) <= varies else REPLICATE

    def apply(self, target: Any, *args: Any) -> fx.Node:
        """A call of a local operator."""
        return self.writing.call(target, *args)

    def convert(self, x: fx.Node, source: Placement, target: Placement) -> fx.Node:
        """A conversion along the axes of the call."""
        return self.writing.convert(x, self.v, axes_of(self.node), source, target, self.node)

    def gathered(self) -> fx.Node:
        """The tensors of all ranks, stacked in a new leading dim."""
        return self.convert(self.apply(aten.unsqueeze.default, self.x, 0), Shard(0), self.whole)

    def exchanged(self, dim: int) -> fx.Node:
        """The pieces along `dim` that all ranks have for this one, stacked in a new leading dim."""
        shape = list(self.shape)
        pieces = [*shape[:dim], self.count, shape[dim] // self.count, *shape[dim + 1 :]]
        order = [dim, *range(dim), *range(dim + 1, len(pieces))]
        stacked = self.apply(aten.permute.default, self.apply(aten.reshape.default, self.x, pieces), order)
        sent = self.apply(aten.unsqueeze.default, stacked, 1)
        received = self.convert(sent, Shard(1), Shard(0))
        return self.apply(aten.squeeze.dim, received, 0)

    def elsewhere(self) -> fx.Node:
        """A mask on the device of the tensor: true on every rank but the root."""
        axes = [axis for axis in self.writing.mesh.axes if axis in self.axes]
        place = self.apply(indexing.position, axes, [self.writing.mesh.size(axis) for axis in axes])
        counts = [int(rank == self.root) for rank in range(self.count)]
        behind = self.apply(indexing.behind, self.apply(aten.unsqueeze.default, self.x, 0), place, 0, counts)
        return self.apply(aten.reshape.default, behind, [])

    def reduced(self, stack: fx.Node) -> fx.Node:
        """The reduction of a stack."""
        if self.op == "prod":
            return self.writing.call(aten.prod.dim_int, stack, 0, dtype=tensor_of(self.v).dtype)
        return self.apply(_REDUCED[self.op], stack, [0])

    def check_even(self, sizes: Sequence[int]) -> None:
        """Raise CaptureError for parts of different sizes."""
        if len(set(sizes)) > 1:
            raise CaptureError(
                f"{self.node.target} is called with parts of the sizes {list(sizes)} in a manual function, where all "
                f"ranks have tensors of one shape; pad them{at_source(self.node)}"
            )


def _all_reduce(c: _CollectiveCall) -> fx.Node:
    if c.op in ("sum", "mean"):
        return _mean(c, c.convert(c.x, PARTIAL, c.whole))
    tensor = tensor_of(c.v)
    if c.op == "max" and c.v not in c.writing.able and tensor.dtype is not torch.bool:
        return c.convert(c.x, PARTIAL_MAX, c.whole)
    return c.reduced(c.gathered())


def _mean(c: _CollectiveCall, total: fx.Node) -> fx.Node:
    return c.apply(aten.div.Scalar, total, c.count) if c.op == "mean" else total


def _all_gather(c: _CollectiveCall) -> fx.Node:
    c.check_even(c.sizes)
    return c.convert(c.x, Shard(c.dim), c.whole)


def _reduce_scatter(c: _CollectiveCall) -> fx.Node:
    c.check_even(c.sizes)
    if c.op in ("sum", "mean"):
        return _mean(c, c.convert(c.x, PARTIAL, Shard(c.dim)))
    return c.reduced(c.exchanged(c.dim))


def _all_to_all(c: _CollectiveCall) -> fx.Node:
    c.check_even(c.sends)
    c.check_even(c.receives)
    if c.split_dim != c.concat_dim:
        return c.convert(c.x, Shard(c.concat_dim), Shard(c.split_dim))
    order = [*range(1, c.split_dim + 1), 0, *range(c.split_dim + 1, len(c.shape) + 1)]
    together = c.apply(aten.permute.default, c.exchanged(c.split_dim), order)
    return c.apply(aten.reshape.default, together, list(c.shape))


def _permute(c: _CollectiveCall) -> fx.Node:
    pairs = dict(zip(c.pairs[1::2], c.pairs[::2], strict=True))
    sizes = tuple(c.writing.mesh.size(axis) for axis in c.writing.mesh.axes if axis in c.axes)
    spans = tuple((pairs[i], pairs[i] + 1) if i in pairs else (0, 0) for i in range(c.count))
    window = SliceWindow(0, Cut(c.count, sizes), spans, 1)
    moved = c.convert(c.apply(aten.unsqueeze.default, c.x, 0), Shard(0), window)
    return c.apply(aten.squeeze.dim, moved, 0)


def _broadcast(c: _CollectiveCall) -> fx.Node:
    other = c.elsewhere()
    flag = tensor_of(c.v).dtype is torch.bool
    x = c.writing.call(aten._to_copy.default, c.x, dtype=torch.uint8) if flag else c.x
    sent = c.convert(c.apply(aten.masked_fill.Scalar, x, other, 0), PARTIAL, c.whole)
    return c.writing.call(aten._to_copy.default, sent, dtype=torch.bool) if flag else sent


def _reduce(c: _CollectiveCall) -> fx.Node:
    return c.apply(aten.masked_fill.Scalar, c.convert(c.x, PARTIAL, BROADCAST), c.elsewhere(), 0)


def _send_receive(c: _CollectiveCall) -> list[fx.Node]:
    """Write an empty exchange as no nodes; exchanges that differ by rank became permutations in the merged trace."""
    _, targets, sources, *_ = c.node.args
    if not targets and not sources:
        return []
    raise CaptureError(
        f"every rank of a manual function sends to {targets} and receives from {sources}; compute the neighbours of a "
        f"rank from pw.axis_index{at_source(c.node)}"
    )


_COLLECTIVES: Mapping[Any, Callable[[_CollectiveCall], Any]] = {
    by_hand.all_reduce: _all_reduce,
    by_hand.all_gather: _all_gather,
    by_hand.reduce_scatter: _reduce_scatter,
    by_hand.broadcast: _broadcast,
    by_hand.reduce: _reduce,
    by_hand.all_to_all: _all_to_all,
    by_hand.permute: _permute,
    by_hand.send_receive: _send_receive,
}
