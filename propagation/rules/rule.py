"""The rule of one operator, and the options on one mesh axis that follow from it.

A rule names the *factors* of an operator: index letters that its operands and results share, as in
`... k, n k, +n -> ... n`. Splitting a factor over an axis splits every tensor that has it:

    an operand that has the factor   Shard          an operand that lacks it   Broadcast
    a result that has it             Shard          a result that lacks it     Partial (the factor is summed)

Most rules are written as text (`row.py`), the others as functions of the call (`dims.py` has their helpers). If a rank
runs a call that differs from the global one, the rule's `local` writes it with an `Emitter`.

An operator may also own an `Exchange`: a split with other placements than above, under which the local form sends each
rank the data that it lacks. Windows (`windows.py`) are exchanged before the local form, as several readers share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ...strategy.cut import Cut, SliceWindow
from ...strategy.placement import BROADCAST, PARTIAL, REPLICATE, Partial, Placement, Routed, Shard, sharded
from ..graph.nodes import operands, value
from ..ops import indexing
from ..ops.collectives import Bytes
from .windows import Halo

Dims = tuple[tuple[str, ...], ...]  # the factors of each dim, major first; () cannot be split
# (emitter, args and kwargs with the local operands) -> the node of the local result, or one for each of several results
Localize = Callable[["Emitter", tuple[Any, ...], dict[str, Any]], fx.Node | tuple[fx.Node, ...]]


@dataclass(frozen=True, slots=True)
class LocalShapes:
    """The local shapes of the tensor operands and of the results of a call."""

    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Hop:
    """A conversion inside an operator. It moves `times` as much data as a rank's part of tensor `tensor`, a number
    counted over the operands, then the results. `saved`: the backward of the operator reads what arrives."""

    tensor: int
    source: Placement
    target: Placement
    times: int | Fraction = 1
    saved: bool = False

    def whole_bytes(self, held: Bytes, size: int) -> Bytes:
        """The bytes of the whole value, of which each of `size` ranks holds `held` bytes."""
        if isinstance(self.target, SliceWindow):
            return held // self.target.cut.width * self.target.cut.size
        moved = held * self.times.numerator // self.times.denominator
        return moved * (size if isinstance(self.source, Shard | Routed) else 1)

    def arrived_bytes(self, whole: Bytes, size: int) -> Bytes:
        """The bytes that one of `size` ranks has of the `whole` after it."""
        return whole // size if isinstance(self.target, Shard | Routed) else whole


@dataclass(frozen=True, slots=True)
class Exchange:
    """A further way to split a factor, under which the local form communicates: a ring of keys and values, a product
    that gathers while it multiplies.

    factor   the name of this way; it is in the rule's sizes beside the factor itself (`owning`)
    of       the factor that it splits; "" if it is no split of one
    placed   the placements of some tensors, numbered as in `Hop`, that differ from those under a plain split of `of`;
             without `of` those of all tensors
    hops     from the sizes of the axes, major first, to the conversions of the local form, in order
    beside   it communicates while the operator computes, and costs only the time beyond that
    """

    factor: str
    of: str
    placed: Mapping[int, Placement]
    hops: Callable[[tuple[int, ...]], tuple[Hop, ...]]
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """The factors of one call of an operator.

    operands, results   the dims of each tensor operand (in the order of `graph.operands(node)`) and result
    sizes               the global size of each factor
    reduce              factors that are summed over: a result that lacks one is Partial when it is split
    reduce_by           "sum", or "max" for maxima (a value with a gradient cannot be Partial(max), so these splits drop
                        out)
    additive            operands that enter the sum once
    linear              sets of operands in which the operator is jointly linear, the others held fixed
    flops               floating-point operations of the whole forward call; > 0 marks a contraction
    local               writes the local form, if it differs from the global call
    windows             halos of factors whose slices of the result need more of an operand than the same slice
    exchanges           further ways to split factors, in which `local` communicates
    even                factors that must be split evenly
    fill                the value of operands in the padding of uneven shards (None: any numbers), for an operator whose
                        value or derivative might not be finite there
    masks               `local` itself masks the padding of uneven shards that are summed
    whole_gradients     gradients must be whole on every rank, not addends: unsplit tensors are Replicate
    experts             the factor of the experts whose rows its operand has, sorted by expert
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    reduce: frozenset[str] = frozenset()
    reduce_by: str = "sum"
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    flops: float = 0.0
    local: Localize | None = None
    windows: tuple[Halo, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    even: frozenset[str] = frozenset()
    fill: float | None = None
    masks: bool = False
    whole_gradients: bool = False
    experts: str = ""

    @property
    def uneven(self) -> frozenset[str]:
        """The factors that may be split unevenly: those that are a whole dim, and are not exchanged."""
        merged = {f for dims in (*self.operands, *self.results) for parts in dims if len(parts) > 1 for f in parts}
        return frozenset(self.sizes) - merged - self.even - {exchange.factor for exchange in self.exchanges}

    @property
    def owners(self) -> tuple[Halo | Exchange, ...]:
        """The halos and exchanges, which communicate on the operator's own account."""
        return (*self.windows, *self.exchanges)

    def dim_of(self, halo: Halo) -> int:
        """The dim of its operand along which `halo` lies."""
        return self.operands[halo.operand].index((halo.factor,))

    def carries_leading(self, batched: tuple[bool, ...]) -> tuple[bool, ...]:
        """For each result whether its leading dim is that of an operand marked in `batched`."""
        leading = [dims[0][:1] for dims, marked in zip(self.operands, batched, strict=True) if dims and marked]
        return tuple(bool(dims and dims[0]) and dims[0][:1] in leading for dims in self.results)


def owning(rule: Rule, *exchanges: Exchange) -> Rule:
    """`rule` with those of `exchanges` whose factors it has."""
    own = tuple(exchange for exchange in exchanges if exchange.of in rule.sizes)
    sizes = {**rule.sizes, **{exchange.factor: rule.sizes[exchange.of] for exchange in own}}
    return replace(rule, sizes=sizes, exchanges=(*rule.exchanges, *own))


def hops_of(
    rule: Rule, owner: Halo | Exchange, counts: tuple[int, ...], sizes: Sequence[tuple[int, ...] | None]
) -> tuple[Hop, ...]:
    """The conversions of `owner` if axes of the sizes `counts` split its factor. `sizes`: the size of each operand,
    None for one that is no tensor."""
    if isinstance(owner, Exchange):
        return owner.hops(counts)
    size = sizes[owner.operand]
    if size is None:
        return ()
    dim = rule.dim_of(owner)
    window = owner.window(dim, Cut(size[dim], counts), Cut(rule.sizes[owner.factor], counts))
    return (Hop(owner.operand, Shard(dim), window),) if window.local is None else ()


Split = Mapping[str, Mapping[str, int]]  # for each split factor, the axes that split it, with their sizes


def windows_of(rule: Rule, split: Split, sizes: Sequence[tuple[int, ...]]) -> dict[tuple[int, str], SliceWindow]:
    """For each operand (of the global `sizes`) and factor the window that a rank reads, if a slice is not enough."""
    windows = {}
    for halo in rule.windows:
        if halo.factor in split:
            counts, dim = tuple(split[halo.factor].values()), rule.dim_of(halo)
            operand, result = Cut(sizes[halo.operand][dim], counts), Cut(rule.sizes[halo.factor], counts)
            windows[halo.operand, halo.factor] = halo.window(dim, operand, result)
    return windows


@dataclass(frozen=True, eq=False)
class Emitter:
    """Writes the local form of one call: the operators that a rank runs in its place.

    node     the global call
    rule     its rule
    shapes   the local shapes of its tensors
    whole    the global shapes of its operands
    graph    the graph that it adds nodes to
    split    for each split factor, the axes that split it, major first, with their sizes
    send     writes a conversion along some axes; of routed rows with the numbers of rows that ranks send and get
    axes     those of the mesh, major first, with their sizes
    more     a number of rows that is added to every number of rows that is not known before run time
    expert_load   as in the settings of the search
    """

    node: fx.Node
    rule: Rule
    shapes: LocalShapes
    whole: tuple[tuple[int, ...], ...]
    graph: fx.Graph
    split: Split
    send: Callable[[fx.Node, Hop, tuple[str, ...], fx.Node | None], fx.Node] | None = None
    axes: Mapping[str, int] = field(default_factory=dict)
    more: int = 0
    expert_load: float | None = None

    @cached_property
    def windows(self) -> Mapping[tuple[int, str], SliceWindow]:
        """For each operand and split factor with a halo, the window that the rank holds in place of its slice."""
        return windows_of(self.rule, self.split, self.whole)

    def cut(self, factor: str) -> Cut:
        """How the result is cut along `factor`. (A factor that the rule lacks belongs to a dim of size 1.)"""
        return Cut(self.rule.sizes.get(factor, 1), tuple(self.split.get(factor, {}).values()))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of the operator `target`."""
        return self.graph.call_function(target, args, kwargs)

    def position(self, factor: str) -> fx.Node | None:
        """A node for the index of the rank's part of `factor` (None: it is whole)."""
        axes = self.split.get(factor)
        return self.call(indexing.position, list(axes), list(axes.values())) if axes else None

    def bounds(self, factor: str) -> list[int]:
        """The starts of the ranks' parts of `factor`, and the end of the last part."""
        return [0, *(stop for _, stop in self.cut(factor).spans)]

    def hops(self, factor: str) -> tuple[Hop, ...]:
        """The conversions of the exchange `factor`; none if it is not split."""
        exchange = next(exchange for exchange in self.rule.exchanges if exchange.factor == factor)
        return exchange.hops(tuple(self.split[factor].values())) if factor in self.split else ()

    def sent(self, factor: str, number: int, x: fx.Node) -> fx.Node:
        """`x` after hop `number` of the exchange `factor`. The local form writes each hop once."""
        return self.routed(factor, self.hops(factor)[number], x, None)

    def routed(self, factor: str, hop: Hop, x: fx.Node, counts: fx.Node | None) -> fx.Node:
        """`x` after a hop of the exchange `factor`; `counts`: the numbers of rows to send to each rank, and to get."""
        assert self.send is not None, f"{self.node.target} exchanges {factor} where nothing is split"
        return self.send(x, hop, tuple(self.split[factor]), counts)

    def padding_masks(self, i: int, part: fx.Node) -> list[fx.Node]:
        """A mask of the padding, which broadcasts to the local `part`, for each dim along which operand `i` is split
        unevenly."""
        masks = []
        for dim, parts in enumerate(self.rule.operands[i]):
            if len(parts) == 1 and parts[0] in self.split:
                cut = Cut(self.whole[i][dim], tuple(self.split[parts[0]].values()))
                if not cut.even:
                    counts = [stop - start for start, stop in cut.spans]
                    masks.append(self.call(indexing.behind, part, self.position(parts[0]), dim, counts))
        return masks

    def filled(self, i: int, part: fx.Node) -> fx.Node:
        """The local `part` of operand `i`, with its padding filled as the rule requires."""
        rule = self.rule
        summed = {f for f in rule.reduce & set(self.split) if (f,) in rule.operands[i]}
        number = rule.fill
        if number is None and summed and not rule.masks:
            number = -math.inf if rule.reduce_by == "max" else 0.0
        if number is None:
            return part
        element = _element(number, value(operands(self.node)[i]))
        for mask in self.padding_masks(i, part):
            part = self.call(torch.ops.aten.masked_fill.Scalar, part, mask, element)
        return part


def _element(number: float, tensor: torch.Tensor) -> float | int | bool:
    """`number` as an element of `tensor`; minus infinity becomes the least value of its dtype."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return number
    if tensor.dtype is torch.bool:
        return number > 0
    return torch.iinfo(tensor.dtype).min if number == -math.inf else int(number)


@dataclass(frozen=True, slots=True)
class AxisOption:
    """An option of an operator on one axis: the factor that it splits, if any, and the placements of its tensors."""

    factor: str | None
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]

    def __str__(self) -> str:
        return f"split {self.factor}" if self.factor else str(self.operands[0] if self.operands else REPLICATE)


def axis_options(rule: Rule) -> tuple[AxisOption, ...]:
    """Every option that `rule` allows on one axis, divisible or not."""
    options = [_split(rule, factor) for factor in rule.sizes if rule.sizes[factor] > 1]
    count, results = len(rule.operands), len(rule.results)
    options.append(AxisOption(None, (REPLICATE,) * count, (REPLICATE,) * results))
    if count and not rule.whole_gradients:
        options.append(AxisOption(None, (BROADCAST,) * count, (BROADCAST,) * results))
    for together in rule.linear:
        placed = tuple(PARTIAL if i in together else BROADCAST for i in range(count))
        options.append(AxisOption(None, placed, (PARTIAL,) * results))
    return tuple(dict.fromkeys(option for option in options if option is not None))


def _split(rule: Rule, factor: str) -> AxisOption | None:
    """The option that splits `factor`; None if it is not the major part of a dim, or a result lacks it without
    reducing over it."""
    exchange = next((exchange for exchange in rule.exchanges if exchange.factor == factor), None)
    if exchange:
        return _exchanging(exchange, _split(rule, exchange.of) if exchange.of else _unplaced(rule))
    placed: list[Placement] = []
    for i, dims in enumerate(rule.operands):
        dim = _dim_of(dims, factor, rule.sizes)
        if dim is None:
            placed.append(PARTIAL if i in rule.additive and factor in rule.reduce else BROADCAST)
        elif dim < 0:
            return None
        else:
            placed.append(sharded(dim))
    results: list[Placement] = []
    for dims in rule.results:
        dim = _dim_of(dims, factor, rule.sizes)
        if (dim is None and factor not in rule.reduce) or (dim is not None and dim < 0):
            return None
        results.append(Partial(rule.reduce_by) if dim is None else sharded(dim))
    return AxisOption(factor, tuple(placed), tuple(results))


def _unplaced(rule: Rule) -> AxisOption:
    return AxisOption(None, (REPLICATE,) * len(rule.operands), (REPLICATE,) * len(rule.results))


def _exchanging(exchange: Exchange, plain: AxisOption | None) -> AxisOption | None:
    """The option `plain`, a split of the factor, with the placements of the exchange."""
    if plain is None:
        return None
    placed = [exchange.placed.get(i, p) for i, p in enumerate((*plain.operands, *plain.results))]
    count = len(plain.operands)
    return AxisOption(exchange.factor, tuple(placed[:count]), tuple(placed[count:]))


def _dim_of(dims: Dims, factor: str, sizes: Mapping[str, int]) -> int | None:
    """The dim of which `factor` is the major part; None if no dim has it; -1 if it is not the major part."""
    for dim, parts in enumerate(dims):
        if factor in parts:
            before = parts[: parts.index(factor)]
            return dim if all(sizes[part] == 1 for part in before) else -1
    return None
