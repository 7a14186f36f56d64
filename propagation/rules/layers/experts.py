"""Mixtures of experts: `dispatch` makes the rows of tokens for their experts, `combine` adds them up, and between them
are products of rows with the matrices of their experts, and operators on each row by itself.

Beside a split of the features, an axis has these options:

    factor     tokens x    rows    experts' weights    result of combine    sends
    token      Shard(0)    T0      Broadcast           Shard(0)             the weights, where they are not whole
    exchange   Shard(0)    E0      Shard(0)            Shard(0)             rows to their experts, and back
    once       Shard(0)    E0      Shard(0)            Shard(0)             tokens to the ranks of their experts, with
                                                                            their experts' numbers and weights, and sums
    expert     Broadcast   E0      Shard(0)            Partial              tokens to all ranks, and sums of results

T0 are the rows of a rank's tokens, E0 those of its experts (`Routed`). Of several axes each has its own option: experts
are cut over all but those with `token`, in the order of the mesh. Axes with the same option are one joint group. With
`once` on an axis of nodes and `exchange` on one inside them, a token that goes to two experts of a node is sent there
once, and copied in the node (DeepSeek-V3's report, 2024, section 3.2.2).
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import fx

from ....strategy.layout import expected_rows
from ....strategy.placement import BROADCAST, PARTIAL, Placement, Routed, Shard
from ...graph.nodes import argument, module_path, operands, shape, value
from ...ops.experts import (
    arrival,
    combine,
    counted,
    dispatch,
    give_rows,
    parted,
    reorder,
    route,
    route_once,
    take_rows,
    take_weights,
)
from ...ops.indexing import position
from ..row import Row, RowFunction
from ..rule import Emitter, Exchange, Hop, Rule

aten = torch.ops.aten
TOKEN, EXPERT, EXCHANGE, ONCE = "token", "expert", "exchange", "once"
BY_EXPERT = (EXPERT, EXCHANGE, ONCE)
_S0: Placement = Shard(0)
_COPY = Routed("copy")
# Their local forms depend on the number of rows by the shape of the result alone.
_LOCALIZED = (aten.reshape.default, aten.view.default, aten.expand.default, aten.slice.Tensor)


@dataclass(frozen=True, slots=True)
class Routing:
    """How a value belongs to the rows of a dispatch, the node `source`, of `tokens` tokens to `experts` experts: its
    placements by token and by expert, and that of slots whose tokens were sent once."""

    source: fx.Node
    tokens: int
    experts: int
    token: Routed
    expert: Routed
    copy: Routed | None = None

    @property
    def placements(self) -> tuple[Routed, ...]:
        """The placements that it may have on an axis beside the usual ones."""
        return (self.token, self.expert) if self.copy is None else (self.token, self.expert, self.copy)


def routings_of_dispatch(node: fx.Node) -> tuple[Routing, Routing, Routing]:
    """The routings of the results of a dispatch: its rows, the ends of its experts' rows, and their slots."""
    tokens, experts = shape(operands(node)[1])[0], int(argument(node, "experts"))
    rows = Routing(node, tokens, experts, Routed(TOKEN), Routed(EXPERT))
    return rows, replace(rows, token=Routed(TOKEN, None)), replace(rows, copy=_COPY)


def routed(node: fx.Node, rule: Rule, given: Sequence[Routing | None]) -> tuple[Rule, tuple[Routing | None, ...]]:
    """The rule of a call with operands of the routings `given`, with their placements as further options, and the
    routings of its results. A call that depends on other rows has no further options."""
    plain = rule, (None,) * len(rule.results)
    known = [each for each in given if each]
    if len({each.source for each in known}) != 1:
        return plain
    if node.target is combine:
        return (_combined(node, rule, known[0]) if given[0] and given[1] else rule), (None,)
    first = next((each for each in known if each.token.dim is not None), None)
    along = [d[r.token.dim] for d, r in zip(rule.operands, given, strict=True) if r and r.token.dim is not None]
    if first is None or len(set(along)) != 1 or len(along[0]) != 1:
        return plain
    (factor,) = along[0]
    others = [dims for dims, each in zip(rule.operands, given, strict=True) if not each]
    if any(factor in parts for dims in others for parts in dims):
        return plain
    if rule.experts and any((rule.experts,) not in dims for dims in others):
        return plain  # the ends of other rows
    if not (rule.local is None or rule.experts or node.target in _LOCALIZED):
        return plain
    if any(halo.factor == factor for halo in rule.windows):
        return plain
    results = [next((d for d, parts in enumerate(dims) if parts == (factor,)), None) for dims in rule.results]
    if None in results and (factor not in rule.reduce or rule.reduce_by != "sum"):
        return plain
    of_results = tuple(
        None if dim is None else replace(first, token=Routed(TOKEN, dim), expert=Routed(EXPERT, dim)) for dim in results
    )
    return _with_routes(rule, given, of_results, first), of_results


def _with_routes(
    rule: Rule, given: Sequence[Routing | None], results: Sequence[Routing | None], routing: Routing
) -> Rule:
    """`rule` with its tensors placed by token, and by expert."""

    def placed(by: str) -> dict[int, Placement]:
        every: dict[int, Placement] = {}
        for i, (dims, each) in enumerate(zip(rule.operands, given, strict=True)):
            own = by == EXPERT and (rule.experts,) in dims
            every[i] = getattr(each, by) if each else Shard(dims.index((rule.experts,))) if own else BROADCAST
        for i, one in enumerate(results):
            every[len(given) + i] = getattr(one, by) if one else PARTIAL
        return every

    ways = {TOKEN: routing.tokens, EXPERT: routing.experts}
    # As a factor of its own the experts could be cut in another order than their rows.
    alone = {rule.experts: 1} if rule.experts else {}
    return _with(rule, ways | alone, *(Exchange(way, "", placed(way), _no_hops) for way in ways))


def _with(rule: Rule, sizes: dict[str, int], *exchanges: Exchange) -> Rule:
    return replace(rule, sizes={**rule.sizes, **sizes}, exchanges=(*rule.exchanges, *exchanges))


def _no_hops(counts: tuple[int, ...]) -> tuple[Hop, ...]:
    return ()


def _dispatch_hops(rows: int, counts: tuple[int, ...]) -> tuple[Hop, ...]:
    """Those of the numbers of rows, and of the rows, tensor number `rows`."""
    return Hop(rows + 1, _S0, Shard(1), math.prod(counts)), Hop(rows, Routed(TOKEN), Routed(EXPERT))


def _combine_hops(counts: tuple[int, ...]) -> tuple[Hop, ...]:
    return (Hop(0, Routed(EXPERT), Routed(TOKEN), saved=True),)


def _once_hops(many: int, experts: int, weighted: bool, counts: tuple[int, ...]) -> tuple[Hop, ...]:
    """Those of a dispatch of each token to `many` experts: of the numbers of tokens, of tokens, experts and weights."""
    rows = 3 if weighted else 2
    sent = _copies(many, experts, math.prod(counts))
    there = Routed(TOKEN), Routed(EXPERT)
    of_tokens = (Hop(rows, *there, sent / many), *(Hop(each, *there, sent) for each in range(1, rows)))
    return Hop(rows + 1, _S0, Shard(1)), *of_tokens


def _once_back_hops(many: int, experts: int, wider: Fraction, counts: tuple[int, ...]) -> tuple[Hop, ...]:
    """Those of a combine: of weights, and of sums, whose elements are `wider` times those of rows."""
    sent = _copies(many, experts, math.prod(counts))
    return (
        Hop(2, Routed(TOKEN), Routed(EXPERT), sent, saved=True),
        Hop(0, Routed(EXPERT), Routed(TOKEN), sent / many * wider),
    )


def _copies(many: int, experts: int, parts: int) -> Fraction:
    """The number of parts of the experts that have any of `many` different experts, drawn with equal chances: the mean,
    with so few digits that it is exact in figures."""
    many = min(many, experts)
    none = Fraction(math.comb(experts - experts // parts, many), math.comb(experts, many))
    return (parts * (1 - none)).limit_denominator(1000)


def _ways(
    rule: Rule, tokens: int, experts: int, placed: dict[str, tuple[Placement, ...]], exchange: Any, once: Any
) -> Rule:
    both = math.gcd(tokens, experts)
    sizes, hops = {TOKEN: tokens, EXPERT: experts, EXCHANGE: both, ONCE: both}, {EXCHANGE: exchange, ONCE: once}
    ways = (Exchange(way, "", dict(enumerate(each)), hops.get(way, _no_hops)) for way, each in placed.items())
    return _with(rule, sizes, *ways)


def _dispatch_rule(node: fx.Node) -> Rule:
    x, ids, *weights = map(shape, operands(node))
    experts = int(argument(node, "experts"))
    rule = Rule(
        (((), ("d",)), ((), ()), *(((), ()) for _ in weights)),
        (((), ("d",)), ((),), ((),)),
        {"d": x[1]},
        linear=(frozenset({0}), *(frozenset({2}) for _ in weights)),
        local=_local_dispatch,
    )
    by_token, by_expert, count = Routed(TOKEN), Routed(EXPERT), 2 + len(weights)
    placed: dict[str, tuple[Placement, ...]] = {
        "d": (Shard(1), *[BROADCAST] * (count - 1), Shard(1), BROADCAST, BROADCAST),
        TOKEN: (*[_S0] * count, by_token, Routed(TOKEN, None), by_token),
        EXPERT: (*[BROADCAST] * count, by_expert, by_expert, by_expert),
        EXCHANGE: (*[_S0] * count, by_expert, by_expert, by_token),
        ONCE: (*[_S0] * count, by_expert, by_expert, _COPY),
    }
    once = partial(_once_hops, ids[1], experts, bool(weights))
    return _ways(rule, ids[0], experts, placed, partial(_dispatch_hops, count), once)


def _combine_rule(node: fx.Node) -> Rule:
    rows = shape(operands(node)[0])
    return Rule(
        (((), ("d",)), ((),), ((), ())),
        (((), ("d",)),),
        {"d": rows[1]},
        linear=(frozenset({0}), frozenset({2})),
        local=_local_combine,
    )


def _combined(node: fx.Node, rule: Rule, routing: Routing) -> Rule:
    by_token, by_expert = routing.token, routing.expert
    placed: dict[str, tuple[Placement, ...]] = {
        TOKEN: (by_token, by_token, _S0, _S0),
        EXPERT: (by_expert, by_expert, BROADCAST, PARTIAL),
        EXCHANGE: (by_expert, by_token, _S0, _S0),
        ONCE: (by_expert, _COPY, _S0, _S0),
    }
    rows, _, weights = map(value, operands(node))
    wider = Fraction(torch.promote_types(rows.dtype, weights.dtype).itemsize, rows.dtype.itemsize)
    once = partial(_once_back_hops, weights.shape[1], routing.experts, wider)
    return _ways(rule, routing.tokens, routing.experts, placed, _combine_hops, once)


# -- Local forms


@dataclass(frozen=True)
class _Cuts:
    """The number of ranks that exchange rows, of the experts of one, and of ranks that are sent tokens once."""

    exchanged: int
    experts: int
    copies: int

    @property
    def sent(self) -> int:
        """The experts whose rows a rank sends: its own, and those of the ranks with which it exchanges."""
        return self.exchanged * self.experts


def _cuts(emit: Emitter, experts: int) -> _Cuts:
    own, moved, copies = (math.prod(emit.split.get(way, {}).values()) for way in BY_EXPERT)
    return _Cuts(moved, experts // (own * moved * copies), copies)


def _local_dispatch(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, ids, experts, *rest = args
    weights = rest[0] if rest else kwargs.get("weights")
    each, cuts, sent_once = emit.shapes.operands[1][1], _cuts(emit, experts), list[fx.Node]()
    if ONCE in emit.split:
        x, ids, weights, sent_once = _copied(emit, x, ids, weights, experts)
    digits = _digits(emit, experts, EXPERT, ONCE)
    places = [emit.call(position, [axis], [size]) for axis, (_, size) in digits.items()]
    widths, sizes = ([digit[i] for digit in digits.values()] for i in range(2))
    made = emit.call(route, ids, places, widths, sizes, experts, _kept(emit, emit.shapes.operands[1]))
    where, counts = (emit.call(operator.getitem, made, i) for i in range(2))
    rows = emit.call(take_rows, x, where, each, ids) if sent_once else emit.call(take_rows, x, where, each)
    if weights is not None:
        weighted = emit.call(aten.mul.Tensor, rows, emit.call(take_weights, weights, where))
        rows = emit.call(aten._to_copy.default, weighted, dtype=value(operands(emit.node)[0]).dtype)
    if EXCHANGE not in emit.split:
        ends = emit.call(aten.cumsum.default, _told(emit, counts), 0, dtype=torch.int32)
        return rows, ends, emit.call(aten.cat.default, [*sent_once, where]) if sent_once else where
    received = _told(emit, emit.sent(EXCHANGE, 0, emit.call(aten.view.default, counts, [1, cuts.sent])))
    leaving = emit.call(aten.view.default, counts, [cuts.exchanged, cuts.experts])
    sent, got = (emit.call(aten.sum.dim_IntList, each, [1]) for each in (leaving, received))
    hop, expected = emit.hops(EXCHANGE)[1], emit.shapes.results[0][0]
    arrived = emit.routed(
        EXCHANGE,
        replace(hop, target=Routed(EXPERT, rows=expected)),
        rows,
        emit.call(aten.stack.default, [sent, got]),
    )
    order = emit.call(arrival, received, expected)
    ends = emit.call(aten.cumsum.default, emit.call(aten.sum.dim_IntList, received, [0]), 0, dtype=torch.int32)
    flat = emit.call(aten.view.default, received, [cuts.sent])
    where = emit.call(
        aten.cat.default, [*sent_once, emit.call(aten._to_copy.default, flat, dtype=torch.int64), sent, where]
    )
    return emit.call(reorder, arrived, order, False), ends, where


def _copied(
    emit: Emitter, x: fx.Node, ids: fx.Node, weights: fx.Node | None, experts: int
) -> tuple[fx.Node, fx.Node, fx.Node | None, list[fx.Node]]:
    """The tokens that a rank is sent once, with the numbers of their experts and their weights; and how many it sends
    to each rank and gets, and which."""
    ranks, widths = _cuts(emit, experts).copies, [width for width, _ in _digits(emit, experts, ONCE).values()]
    made = emit.call(route_once, ids, widths, list(emit.split[ONCE].values()), experts, _sent_once(emit, experts))
    which, leaving = (emit.call(operator.getitem, made, i) for i in range(2))
    coming = emit.sent(ONCE, 0, emit.call(aten.view.default, leaving, [1, ranks]))
    counts = emit.call(aten.stack.default, [leaving, emit.call(aten.view.default, coming, [ranks])])
    expected, came = _sent_once(emit, experts), []
    for hop, each in zip(emit.hops(ONCE)[1:], (x, ids, weights), strict=False):
        assert each is not None
        target = replace(hop, target=Routed(EXPERT, rows=expected))
        came.append(emit.routed(ONCE, target, emit.call(take_rows, each, which, 1), counts))
    flat = emit.call(aten.view.default, emit.call(aten._to_copy.default, counts, dtype=torch.int64), [2 * ranks])
    return came[0], came[1], came[2] if weights is not None else None, [flat, which]


def _sent_once(emit: Emitter, experts: int) -> int:
    """The tokens that a rank expects to send, or to get, once for each part of the experts."""
    tokens, each = emit.shapes.operands[-1 if emit.node.target is combine else 1]
    parts = _cuts(emit, experts).copies
    copies = min(Fraction(parts), _copies(each, experts, parts) * Fraction(emit.expert_load or 1.0))
    return math.ceil(tokens * copies) + emit.more


def _digits(emit: Emitter, experts: int, *ways: str) -> dict[str, tuple[int, int]]:
    """The axes with one of the options `ways`, major first: the digit of an expert along an axis is
    (e // width) % size."""
    digits, width = {}, experts
    for axis, size in _sizes(emit, *BY_EXPERT).items():
        width //= size
        if any(axis in emit.split.get(way, {}) for way in ways):
            digits[axis] = width, size
    return digits


def _told(emit: Emitter, counts: fx.Node) -> fx.Node:
    """The numbers of rows of a rank's experts, after whoever listens has heard of them."""
    by_expert = _sizes(emit, *BY_EXPERT)
    routed = _sizes(emit, TOKEN, *BY_EXPERT)
    copies = {axis: size for axis, size in emit.axes.items() if axis not in routed}
    copy, part = (emit.call(position, list(axes), list(axes.values())) for axes in (copies, by_expert))
    allowed = emit.shapes.results[0][0] - emit.more if by_expert and emit.expert_load is not None else -1
    layer = f"{module_path(emit.node)}.{emit.node.name}".removeprefix(".")
    return emit.call(counted, counts, copy, part, allowed, layer)


def _sizes(emit: Emitter, *ways: str) -> dict[str, int]:
    """The axes with one of the options `ways`, major first, with their sizes."""
    return {axis: size for axis, size in emit.axes.items() if any(axis in emit.split.get(way, {}) for way in ways)}


def _local_combine(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    rows, where, weights = args
    tokens, _ = emit.shapes.operands[2]
    cuts = _cuts(emit, emit.rule.sizes.get(EXPERT, 1))
    if ONCE in emit.split:
        flat = emit.call(aten.slice.Tensor, where, 0, 0, 2 * cuts.copies)
        leaving, coming = (
            emit.call(aten.slice.Tensor, flat, 0, i * cuts.copies, (i + 1) * cuts.copies) for i in range(2)
        )
        rest = emit.call(aten.slice.Tensor, where, 0, 2 * cuts.copies, sys.maxsize)
        expected = _sent_once(emit, emit.rule.sizes[EXPERT])
        others = _kept(emit, emit.shapes.operands[2]) + (cuts.sent + cuts.exchanged if EXCHANGE in emit.split else 0)
        made = emit.call(parted, rest, leaving, expected, others)
        which, where = (emit.call(operator.getitem, made, i) for i in range(2))
        there, back = emit.hops(ONCE)
        weights = emit.routed(
            ONCE,
            replace(there, target=Routed(EXPERT, rows=expected)),
            emit.call(take_rows, weights, which, 1),
            emit.call(aten.stack.default, [leaving, coming]),
        )
    if EXCHANGE in emit.split:
        received = emit.call(
            aten.view.default, emit.call(aten.slice.Tensor, where, 0, 0, cuts.sent), [cuts.exchanged, cuts.experts]
        )
        first = cuts.sent + cuts.exchanged
        sent = emit.call(aten.slice.Tensor, where, 0, cuts.sent, first)
        where = emit.call(aten.slice.Tensor, where, 0, first, sys.maxsize)
        got = emit.call(aten.sum.dim_IntList, received, [1])
        order = emit.call(arrival, received, emit.shapes.operands[0][0])
        hop = emit.hops(EXCHANGE)[0]
        rows = emit.routed(
            EXCHANGE,
            replace(hop, target=Routed(TOKEN, rows=_kept(emit, emit.shapes.operands[2]))),
            emit.call(reorder, rows, order, True),
            emit.call(aten.stack.default, [got, sent]),
        )
    sums = emit.call(combine, rows, where, weights)
    if ONCE not in emit.split:
        return sums
    back = replace(back, target=Routed(TOKEN, rows=expected))
    came = emit.routed(ONCE, back, sums, emit.call(aten.stack.default, [coming, leaving]))
    return emit.call(give_rows, came, which, 1, tokens)


def _kept(emit: Emitter, slots: tuple[int, ...]) -> int:
    """The rows that a rank expects to make of its tokens, of which it has the `slots`: those of all experts, or of the
    part of experts whose rows other ranks with the same tokens do not make."""
    own, copies = (math.prod(emit.split.get(way, {}).values()) for way in (EXPERT, ONCE))
    rows, parts = math.prod(slots) * copies, own * copies
    return rows if parts == 1 else expected_rows(rows, parts, emit.more, emit.expert_load or 1.0)


ROWS: dict[Any, Row | RowFunction] = {
    dispatch: _dispatch_rule,
    combine: _combine_rule,
}
