"""The options of an operator: all possible ones, those that the settings leave, and the cost of each by itself.

A product of x[m, k] and w[k, n] on an axis of two devices, with the rule "m k, k n -> m n", even sizes, and figures by
which the whole takes 8 s on one device:

    splits     x               w               result          seconds
    m          Shard(0)        Broadcast       Shard(0)        4
    n          Broadcast       Shard(1)        Shard(1)        4
    k          Shard(1)        Shard(0)        Partial(sum)    4
    nothing    Replicate       Replicate       Replicate       8

On two axes there are 16 rows, each a choice for one axis with a choice for the other.

All options of a call are columns of numbers, one row for every choice of a factor, or of none, on every mesh axis.
A new preference of the settings goes into `_preferred`, a new cost into `_work` or `_exchanges`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...strategy.placement import BROADCAST, REPLICATE, Partial, Placement, step_kind
from ..cost.conversion import Codes, ConversionTable, Floats, Mask, digits_of
from ..cost.cost import BACKWARD_FACTOR, collective_cost, looked_up, operator_seconds
from ..cost.rates import OperatorRates
from ..ops.collectives import payload_of_whole
from ..rules.layers.experts import BY_EXPERT
from ..rules.rule import AxisOption, Exchange, Rule, axis_options, hops_of
from .problem import Options, Settings

Tables = tuple[ConversionTable | None, ...]  # of several values; None: not a tensor


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """The properties of an operator call that its options depend on.

    rule                None: it has none, and can only be replicated
    operands, results   the conversion tables of its tensors
    dtype               the dtype it computes in
    constant            for each operand, whether it depends on no parameter and no input
    reached             for each operand, whether a gradient reaches it
    differentiated      a gradient reaches a result of it
    recomputed          the backward computes it once more
    view                its result is a view of an operand
    in_place            it writes its second operand into the first
    by_batch            it splits its leading dim if the settings prefer that
    rates               its measured rates
    looks_up            it reads only as much of its first operand as its result has
    name                of the operator
    """

    rule: Rule | None
    operands: Tables
    results: Tables
    dtype: torch.dtype
    constant: tuple[bool, ...]
    reached: tuple[bool, ...]
    differentiated: bool
    recomputed: bool
    view: bool
    in_place: bool
    by_batch: bool
    rates: OperatorRates | None = None
    looks_up: bool = False
    name: str = ""


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some options of a call.

    factors             the factor that each axis splits, by its number in the rule; -1 for none
    operands, results   the code of each tensor's layout
    devices             the number of devices that share the work
    parts               the number of parts of the work; fewer than the devices if a slice is short
    """

    factors: Codes
    operands: tuple[Codes, ...]
    results: tuple[Codes, ...]
    devices: Floats
    parts: Floats

    def take(self, keep: Mask) -> _Rows:
        """The rows in `keep`."""
        operands, results = (tuple(codes[keep] for codes in side) for side in (self.operands, self.results))
        return _Rows(self.factors[keep], operands, results, self.devices[keep], self.parts[keep])

    def tensors(self, call: OperatorCall) -> Iterator[tuple[ConversionTable, Codes]]:
        """The table and the layouts of every operand, then of every result."""
        yield from _tensors(call.operands, self.operands)
        yield from _tensors(call.results, self.results)


def operator_options(call: OperatorCall, settings: Settings) -> Options:
    """All options of an operator that divide evenly, or unevenly if its rule allows, minus those settings exclude."""
    rule, choices = call.rule, _on_one_axis(call)
    if rule is None:
        rule = Rule(tuple(() for _ in call.operands), tuple(() for _ in call.results), {})
    rows, exist = _every(call, rule, choices, settings)
    rows = rows.take(_preferred(call, rule, rows, exist, settings))
    seconds, flops, held, again, made = _work(call, rule, rows, settings)
    unary = settings.weights.compute * seconds + settings.weights.memory * held / 1e9
    costs, arrived, saved = _exchanges(call, rule, rows, seconds, settings)
    unary = unary + costs
    return Options(
        tables=(call.operands, call.results),
        operands=rows.operands,
        results=rows.results,
        factors=rows.factors,
        names=tuple(rule.sizes),
        mesh=settings.mesh,
        unary=unary,
        seconds=seconds,
        flops=flops,
        held=held,
        memory=held,
        again=again,
        made=made,
        arrived=arrived,
        saved=saved,
    )


# -- all options


def _on_one_axis(call: OperatorCall) -> tuple[AxisOption, ...]:
    """The options of the operator on one axis."""
    if call.rule is None:
        operands, results = len(call.operands), len(call.results)
        options = tuple(AxisOption(None, (p,) * operands, (p,) * results) for p in (REPLICATE, BROADCAST))
    else:
        options = axis_options(call.rule)
    return tuple(option for option in options if _exists(option, call))


def _exists(option: AxisOption, call: OperatorCall) -> bool:
    """Whether the tensors of an operator can have these placements. Addends of constants alone would double work."""
    addends = [c for c, p in zip(call.constant, option.operands, strict=True) if isinstance(p, Partial)]
    if addends and all(addends):
        return False
    placed = zip((*call.operands, *call.results), (*option.operands, *option.results), strict=True)
    return all(table is None or placement in table.states for table, placement in placed)


def _every(call: OperatorCall, rule: Rule, choices: tuple[AxisOption, ...], settings: Settings) -> tuple[_Rows, Mask]:
    """All rows with one of `choices` on every axis, and whether in each every tensor and factor has enough elements."""
    picks = digits_of(len(choices), len(settings.mesh.axes))
    sizes = np.array(settings.mesh.sizes)
    exist = np.ones(len(picks), dtype=bool)
    devices, parts = np.ones(len(picks)), np.ones(len(picks))
    uneven = rule.uneven
    for factor, size in rule.sizes.items():
        splits = np.array([choice.factor == factor for choice in choices])[picks]
        cuts = np.where(splits, sizes, 1).prod(axis=1)
        filled = (cuts <= size) | (size in settings.short)
        exist &= (size % cuts == 0) | (filled & (factor in uneven))
        devices *= cuts
        parts *= max(size, 1) / -(-max(size, 1) // cuts)
    names = tuple(rule.sizes)
    by_expert = np.array([choice.factor in BY_EXPERT for choice in choices])[picks]
    parts = np.maximum(parts / np.minimum(settings.load, np.where(by_expert, sizes, 1).prod(axis=1)), 1)
    split = np.array([names.index(choice.factor) if choice.factor else -1 for choice in choices], dtype=np.intp)
    rows = _Rows(
        split[picks],
        tuple(_codes_of(t, [choice.operands[i] for choice in choices], picks) for i, t in enumerate(call.operands)),
        tuple(_codes_of(t, [choice.results[i] for choice in choices], picks) for i, t in enumerate(call.results)),
        devices,
        parts,
    )
    for table, codes in rows.tensors(call):
        exist &= table.valid[codes]
    if rule.exchanges:
        exchanged = np.isin(rows.factors, [names.index(each.factor) for each in rule.exchanges]).any(axis=1)
        for table, codes in rows.tensors(call):
            exist &= table.even[codes] | ~exchanged
    return rows, exist


def _codes_of(table: ConversionTable | None, placements: list[Placement], picks: Codes) -> Codes:
    """The layouts of one tensor, given its placement on an axis under each option of that axis."""
    if table is None:
        return np.zeros(len(picks), dtype=np.intp)
    states = np.array([table.states.index(p) for p in placements], dtype=np.intp)[picks]
    codes: Codes = states @ len(table.states) ** np.arange(picks.shape[1] - 1, -1, -1)
    return codes


# -- options that the settings leave


def _preferred(call: OperatorCall, rule: Rule, rows: _Rows, keep: Mask, settings: Settings) -> Mask:
    """The rows in `keep` that the settings leave: aligned slices, the batch by default, full use of the devices."""
    if rule.flops and settings.slice_align > 1:
        aligned = keep & _aligned(call, rows, settings.slice_align)
        keep = aligned if aligned.any() else keep
    if settings.batch_by_default and call.by_batch and call.results and call.results[0]:
        first, codes = call.results[0], rows.results[0]
        even = keep & first.even[codes]
        keep = _most(even if even.any() else keep, first.parts(0)[codes])
    if rule.flops and settings.fully_use_devices:
        keep = _most(keep, rows.devices)
    return keep


def _aligned(call: OperatorCall, rows: _Rows, multiple: int) -> Mask:
    """The rows under which a slice of the last dim of every tensor has a multiple of `multiple` elements."""
    aligned = np.ones(len(rows.factors), dtype=bool)
    for table, codes in rows.tensors(call):
        if table.shape:
            cuts = table.parts(len(table.shape) - 1)[codes]
            aligned &= (cuts == 1) | (-(-table.shape[-1] // cuts) % multiple == 0)
    return aligned


def _most(keep: Mask, score: Any) -> Mask:
    """The rows in `keep` with the highest score."""
    best: Mask = keep & (score == score[keep].max()) if keep.any() else keep
    return best


def cheapest(options: Options, count: int | None) -> Options:
    """The options that `keep_cheapest` leaves, the first ones among equals."""
    if count is None or len(options) <= count:
        return options
    return options.take(np.sort(np.argsort(options.unary, kind="stable")[:count]))


# -- costs


def _work(
    call: OperatorCall, rule: Rule, rows: _Rows, settings: Settings
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """For every row: the seconds and the flops of the operator on one device, forward and backward, the most bytes of
    its results that are kept, the seconds of one more forward, and the bytes of its results.

    The backward of a contraction computes a product for each operand that needs a gradient; that of another operator
    takes BACKWARD_FACTOR forwards, unless it was measured."""
    nothing = np.zeros(len(rows.parts))
    if call.view:
        return nothing, nothing, nothing, nothing, nothing
    results = sum((table.held[codes] for table, codes in _tensors(call.results, rows.results)), nothing)
    moved = results + sum(table.held[codes] for table, codes in _tensors(call.operands, rows.operands))
    if call.in_place:
        moved = moved - 2 * results
        results = nothing
    passes = _backward_passes(call, rule) if call.differentiated else 0.0
    flops = rule.flops / rows.parts
    again, backward = _seconds(call, rule, rows, flops, moved, results, settings)
    made = results
    if call.recomputed:  # but a sum of addends is kept, so that its collective runs once
        results = results * _has_addends(call, rows)
    held = results if call.differentiated else nothing
    return again + backward, (1.0 + passes) * flops, held, again, made


def _seconds(
    call: OperatorCall, rule: Rule, rows: _Rows, flops: Floats, moved: Floats, results: Floats, settings: Settings
) -> tuple[Floats, Floats]:
    """For every row, the seconds of a forward, and of the backward with its recomputation."""
    profile, rates, read = settings.profile, call.rates, moved
    if call.looks_up and call.operands[0] and call.results[0]:
        table = call.operands[0].held[rows.operands[0]]
        read = looked_up(moved, table, results, call.results[0].last_dim(rows.results[0]))
    if rates is None:
        again = operator_seconds(flops, read, call.dtype, profile, name=call.name)
        return again, (_backward_passes(call, rule) if call.differentiated else 0.0) * again
    again = operator_seconds(flops, read, call.dtype, profile, rates.forward, results)
    if not call.differentiated:
        return again, np.zeros_like(again)
    if rates.backward is None:
        return again, _backward_passes(call, rule) * again
    products = _products(call, rule) if rule.flops else 1
    backward = operator_seconds(products * flops, moved, call.dtype, profile, rates.backward, results)
    return again, backward + (again if call.recomputed else 0.0)


def _backward_passes(call: OperatorCall, rule: Rule) -> float:
    """The work of the backward in units of the forward."""
    passes = float(_products(call, rule)) if rule.flops else BACKWARD_FACTOR
    return passes + (1.0 if call.recomputed else 0.0)


def _products(call: OperatorCall, rule: Rule) -> int:
    """The number of operands of a contraction with a gradient; its backward computes a product for each."""
    return max(sum(reached and i not in rule.additive for i, reached in enumerate(call.reached)), 1)


def _has_addends(call: OperatorCall, rows: _Rows) -> Any:
    """Whether a result is Partial on some axis, for every row."""
    placed = [(t, t.digits[codes]) for t, codes in _tensors(call.results, rows.results) if t.partial]
    return sum(((digits == len(t.states) - 1).any(axis=1) for t, digits in placed), np.False_)


def _exchanges(
    call: OperatorCall, rule: Rule, rows: _Rows, seconds: Floats, settings: Settings
) -> tuple[Floats, Floats, Floats]:
    """The cost of the operator's own collectives under every row, forward and backward: those that make windows of its
    operands, and those of its local form; the bytes that the latter bring in the forward, and those of them that the
    backward reads. `seconds`: its computation."""
    mesh, weights = settings.mesh, settings.weights
    cost, arrived, saved = (np.zeros(len(rows.factors)) for _ in range(3))
    names, tables = tuple(rule.sizes), (*call.operands, *call.results)
    codes = (*rows.operands, *rows.results)
    sizes = [table.shape if table else None for table in call.operands]
    reached = (*call.reached, *(call.differentiated for _ in call.results))
    for owner in rule.owners:
        split = rows.factors == names.index(owner.factor)
        for pattern in np.unique(split[split.any(axis=1)], axis=0) if split.any() else ():
            axes = tuple(axis for axis, splits in zip(mesh.axes, pattern, strict=True) if splits)
            counts = tuple(map(mesh.size, axes))
            alike = (split == pattern).all(axis=1)
            size, moving = mesh.size(*axes), np.zeros(alike.sum())
            for hop, phase in itertools.product(hops_of(rule, owner, counts, sizes), ("forward", "backward")):
                table = tables[hop.tensor]
                if table is None:
                    continue
                kind = step_kind(hop.source, hop.target, phase, reached[hop.tensor] and table.gradient)
                if not kind.communicates:
                    continue
                whole = hop.whole_bytes(table.held[codes[hop.tensor][alike]], size)
                if phase == "forward" and isinstance(owner, Exchange) and call.differentiated:
                    came = hop.arrived_bytes(whole, size)
                    arrived[alike] += came
                    saved[alike] += came * hop.saved
                payload = payload_of_whole(kind, hop.source, hop.target, whole, size, phase == "forward")
                waiting, per_byte = collective_cost(kind, payload, mesh, axes, settings.profile)
                cost[alike] += weights.latency * waiting + weights.wire * per_byte * payload
                moving += per_byte * payload
            if isinstance(owner, Exchange) and owner.beside:  # the last of n blocks of work overlaps with nothing
                cost[alike] -= weights.wire * np.minimum(moving, (1 - 1 / size) * seconds[alike])
    return cost, arrived, saved


def _tensors(tables: Tables, columns: Iterable[Codes]) -> Iterator[tuple[ConversionTable, Codes]]:
    return ((table, codes) for table, codes in zip(tables, columns, strict=True) if table is not None)
