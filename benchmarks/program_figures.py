"""What a program costs, counted on the two graphs that a rank runs and on nothing that planning claims.

flops(program)       floating-point operations of one rank
wire(program)        bytes that one rank sends
exchanges(program)   the windows that are made of neighbours' slices, and what they send
memory(program)      bytes that one rank holds: at rest, and at most
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from partway.propagation.cost.cost import wire_bytes
from partway.propagation.graph.nodes import is_view
from partway.propagation.ops.collectives import convert, convert_group, kind_of
from partway.propagation.program.program import Program
from partway.strategy.cut import SliceWindow
from partway.strategy.placement import Kind, placement_from_code

aten = torch.ops.aten


@dataclass(frozen=True)
class Attention:
    """The FLOPs of an attention operator: `formula` of the shapes of its first `operands` operands."""

    operands: int
    formula: Callable[..., int]

    def count(self, shapes: Sequence[Any]) -> int:
        return int(self.formula(*shapes[: self.operands]))


# What attention becomes on the CPU and the meta device; PyTorch's own table lacks it.
ATTENTION: Mapping[Any, Attention] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: Attention(3, sdpa_flop_count),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: Attention(4, sdpa_backward_flop_count),
}
_FORMULAS: Mapping[Any, Callable[..., int]] = flop_registry


def graphs(program: Program) -> tuple[fx.Graph, ...]:
    """The forward graph and, where something is differentiated, the backward graph."""
    return tuple(module.graph for module in (program.forward, program.backward) if module is not None)


def flops(program: Program) -> int:
    """Floating-point operations of one rank's matrix products, convolutions and attention, by PyTorch's formulas.

    Other operators count nothing; XLA's figures for one device, which include them, are within 1 % of these for every
    model here that it was given. Raises ValueError for an attention operator without a formula.
    """
    return sum(_flops(node) for graph in graphs(program) for node in graph.nodes)


def _flops(node: fx.Node) -> int:
    if node.op != "call_function":
        return 0
    attention = ATTENTION.get(node.target)
    if attention is not None:
        return attention.count([tuple(_value(operand).shape) for operand in node.args[: attention.operands]])
    formula = _FORMULAS.get(getattr(node.target, "overloadpacket", None))
    if formula is not None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value)
        return int(formula(*args, **kwargs, out_val=_value(node)))
    if "attention" in str(node.target):
        raise ValueError(f"no formula for the FLOPs of {node.target} (node {node.name}); add it to ATTENTION")
    return 0


def wire(program: Program) -> float:
    """Bytes that one rank sends, priced from the local shapes at both ends of every conversion in the graphs."""
    return sum(_wire(node) for graph in graphs(program) for node in graph.nodes)


def _wire(node: fx.Node) -> float:
    if node.target not in (convert, convert_group):
        return 0.0
    arguments: tuple[Any, ...] = node.args
    given, source, target, _, size, _ = arguments
    kind = kind_of(source, target)
    if kind is Kind.EXCHANGE:
        return _sent(node)
    # The payload of an all_gather is what it makes; of the others, what they are given.
    held = [node] if kind is Kind.ALL_GATHER else given if node.target is convert_group else [given]
    return sum(wire_bytes(kind, _bytes(tensor), size) for one in held for tensor in _tensors(_value(one)))


@dataclass(frozen=True)
class Exchanges:
    """What makes windows of slices in a step, and adds up the gradients of windows.

    count     conversions, each of which is one collective
    permutes  how often all ranks of an axis pass something on to the one so much further: what a compiler without such
              a collective would run
    sent      bytes that the busiest rank sends in each, added up
    """

    count: int
    permutes: int
    sent: float


def exchanges(program: Program) -> Exchanges:
    """Counted on the graphs: of each conversion the rows of a window that lie in another rank's slice."""
    found = [
        node
        for graph in graphs(program)
        for node in graph.nodes
        if node.target is convert and kind_of(str(node.args[1]), str(node.args[2])) is Kind.EXCHANGE
    ]
    return Exchanges(len(found), sum(_window(node).offsets for node in found), sum(map(_sent, found)))


def _window(node: fx.Node) -> SliceWindow:
    """The window of an exchange, whichever side of it that is."""
    sides = (placement_from_code(str(code)) for code in node.args[1:3])
    return next(side for side in sides if isinstance(side, SliceWindow))


def _sent(node: fx.Node) -> float:
    """Bytes that the busiest rank sends in an exchange: where windows are made, of its slice to the others; where
    what overlaps is added up, of its window to those whose slices that is."""
    window = _window(node)
    sent = [0] * len(window.spans)
    for position in range(len(window.spans)):
        for strip in window.strips(position):
            if strip.source != position:
                sent[position if window.adds else strip.source] += strip.rows
    given = _value(node.args[0])
    return max(sent) * _bytes(given) / given.shape[window.dim]


@dataclass(frozen=True)
class Held:
    """Bytes on one rank. rest: parameters, buffers and the batch; peak: the most at any time of one step, `rest` and
    the gradients made so far included."""

    rest: int
    peak: int

    @property
    def beyond_rest(self) -> int:
        """What a step needs beside what is there before it."""
        return self.peak - self.rest


@dataclass(frozen=True)
class _Moment:
    """One instruction: the storages that it makes, with their bytes, and all that it touches."""

    makes: tuple[tuple[int, int], ...]
    touches: frozenset[int]


def memory(program: Program) -> Held:
    """Liveness over the forward and then the backward graph: a tensor lives from the operator that makes it to the
    last one that reads it, a view as long as what it looks at; inputs, results and gradients live to the end.

    The workspace of an operator is not known here and not counted.
    """
    moments, rest, kept = _moments(program)
    size = dict(rest)
    last: dict[int, int] = {}
    for time, moment in enumerate(moments):
        size.update(moment.makes)
        last.update(dict.fromkeys(moment.touches, time))
    dying: dict[int, list[int]] = {}
    for storage, time in last.items():
        if storage not in kept:
            dying.setdefault(time, []).append(storage)
    live = peak = sum(rest.values())
    for time, moment in enumerate(moments):
        live += sum(made for _, made in moment.makes)
        peak = max(peak, live)
        live -= sum(size[storage] for storage in dying.get(time, ()))
    return Held(sum(rest.values()), peak)


def _moments(program: Program) -> tuple[list[_Moment], dict[int, int], frozenset[int]]:
    """The instructions of one step; the storages at rest, with their bytes; and those that live to the end."""
    fresh = iter(range(10**9))
    storages: dict[fx.Node, tuple[int, ...]] = {}  # one for each tensor of a node's value
    moments: list[_Moment] = []
    rest: dict[int, int] = {}
    kept: set[int] = set()
    carried: list[tuple[int, ...]] = []  # what the forward hands to the backward
    for backward, graph in enumerate(graphs(program)):
        for position, node in enumerate(graph.find_nodes(op="placeholder")):
            if backward and position < len(carried):
                storages[node] = carried[position]
            else:  # an input, or the gradient of a result
                storages[node] = (next(fresh),)
                rest[storages[node][0]] = _bytes(_value(node))
        for node in graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            shared = _shared(node, storages)
            made = () if shared else tuple((next(fresh), _bytes(t)) for t in _tensors(_value(node)))
            storages[node] = shared or tuple(storage for storage, _ in made)
            read = {s for operand in node.all_input_nodes for s in storages[operand]}
            moments.append(_Moment(made, frozenset(read | {storage for storage, _ in made})))
        returned = graph.output_node().args[0]
        ends = [storages[end] if isinstance(end, fx.Node) else () for end in returned]  # type: ignore[union-attr]
        results = len(ends) if backward else len(program.outputs)
        kept.update(storage for end in ends[:results] for storage in end)
        carried = ends[results:]
    return moments, rest, frozenset(kept | rest.keys())


def _shared(node: fx.Node, storages: dict[fx.Node, tuple[int, ...]]) -> tuple[int, ...]:
    """The storages that the result of `node` has in common with an operand; none if it has its own."""
    if node.target is operator.getitem:
        parent, index = node.args
        return (storages[parent][index],)  # type: ignore[index]
    if node.target is convert:
        same = kind_of(str(node.args[1]), str(node.args[2])) is Kind.NOTHING
    else:
        same = is_view(node) or node.target is aten._unsafe_view.default
    if not same:
        return ()
    (base,) = storages[node.all_input_nodes[0]]
    return (base,) * len(list(_tensors(_value(node))))


def _value(node: Any) -> Any:
    """The fake tensor of a node, or the tensors of one with several results."""
    return node.meta["val"]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a value; of an absent result (None) an empty one in its place, so that positions stay."""
    for found in value if isinstance(value, tuple | list) else (value,):
        yield found if isinstance(found, torch.Tensor) else torch.empty(0, device="meta")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
