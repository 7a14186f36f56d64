"""The predicted schedule of one step on one rank: when each operator and each collective runs.

Five nodes of a graph, in this order, with the seconds that each takes alone:

    node             seconds    lane             starts    ends
    a                2          compute          0         2
    all_reduce(a)    3          communication    2         5
    b = f(a)         2          compute          2         4
    all_reduce(b)    2          communication    5         7       the lane is free at 5
    all_reduce(a)+1  1          compute          5         6       waits for its operand

The step takes 7 s. Operators run for 5 of them, so 2 s of communication are exposed.

Operators run on the compute lane in the order of the graph. Collectives are issued at their place in the graph and run
one after another on a communication lane; a queued one has a shorter latency. Each level of the network is a lane: a
sum inside a node does not wait for a gather between nodes, since their process groups use other links. While operators
and collectives run, each may slow the other down by the factors of the profile: on a CPU they share the cores. An
operator that reads the result of a collective waits for it, and so do all later operators. This is how a rank runs its
graph (`runtime/executors/execute.py`). The backward starts after the forward has ended.

The times of operators are those of `propagation/cost/cost.py`, with PyTorch's formulas for the FLOPs of matrix
products, convolutions and attention. Views, and conversions that only change a tensor's meaning, take no time unless
the profile has a measured time for their calls.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ...strategy.mesh import Mesh
from ...strategy.placement import Kind, Partial, Placement, Shard, placement_from_code
from ..cost.cost import (
    LOOKUPS,
    Hierarchy,
    collective_costs,
    hierarchies,
    looked_up,
    operator_seconds,
    outermost,
    rates_of,
)
from ..cost.profile import ALONE, DeviceProfile, Together
from ..cost.rates import VIEW
from ..graph.nodes import is_pointwise, is_view, operands
from ..ops.collectives import TAG, WORTH_A_CALL, convert, convert_group, kind_of, payload_bytes
from ..torch_internals import FakeTensorMode
from .timeline import COMMUNICATION, COMPUTE, Span

aten = torch.ops.aten

Unit = tuple[fx.Node, ...]  # nodes that run as one


@dataclass(frozen=True)
class Schedule:
    """The predicted schedule of one step.

    spans     operators and collectives, in the order in which they are issued
    seconds   the duration of the step
    """

    spans: tuple[Span, ...]
    seconds: float

    @property
    def computing(self) -> float:
        """Seconds in which operators run."""
        return sum(span.seconds for span in self.spans if span.lane == COMPUTE)

    @property
    def communicating(self) -> float:
        """Seconds in which collectives run."""
        return sum(span.seconds for span in self.spans if span.lane == COMMUNICATION)

    @property
    def exposed(self) -> float:
        """Seconds in which no operator runs: the communication that is not hidden behind one."""
        return max(self.seconds - self.computing, 0.0)


def predict(graphs: Mapping[str, fx.Graph], mesh: Mesh, profile: DeviceProfile) -> Schedule:
    """The schedule of the graphs of a program, by phase, whose placeholders have their local values in `meta["val"]`.

    Raises StrategyError for a mesh with more devices than the network of the profile joins.
    """
    spans: list[Span] = []
    start = 0.0
    for phase, graph in graphs.items():
        work = work_of(graph, mesh, profile)
        played, end = play([(node,) for node in graph.nodes], work, profile.together)
        for ((node,), begin, ended), item in zip(played, work.values(), strict=True):
            if item.lane is not None:
                spans.append(Span(node.name, phase, item.lane, start + begin, ended - begin, item.args))
        start += end
    return Schedule(tuple(spans), start)


# -- Playing an order of nodes ---------------------------------------------------------------------------------------


class Work(NamedTuple):
    """The time of a node: `waiting + per_byte * payload + copying` seconds on its lane (None: no time). `level`: the
    outermost level of the network that a collective uses; `hierarchy`: the steps of a large one, if it has several.

    A `late` node waits for nothing: a tensor is taken out of a group only where it is read.
    """

    lane: str | None
    waiting: float = 0.0
    per_byte: float = 0.0
    payload: int = 0
    late: bool = False
    kind: str = ""
    axes: tuple[str, ...] = ()
    copying: float = 0.0
    level: int = 0
    hierarchy: Hierarchy | None = None

    @property
    def seconds(self) -> float:
        """The seconds on its lane."""
        waiting, per_byte = self.rates(self.payload)
        return waiting + per_byte * self.payload + self.copying

    def rates(self, payload: float) -> tuple[float, float]:
        """The seconds of a collective of `payload` bytes before and per byte: a large one may have several steps."""
        once = self.waiting, self.per_byte
        return self.hierarchy.or_once(payload, *once) if self.hierarchy else once

    @property
    def args(self) -> dict[str, Any]:
        """Details for a timeline."""
        if self.lane != COMMUNICATION:
            return {"kind": self.kind}
        return {"kind": self.kind, "axes": ",".join(self.axes), "bytes": self.payload}


_FREE = Work(None)
UNHEARD = Work(None, late=True)  # a collective left out of a prediction: neither it nor its readers wait


class Ran(NamedTuple):
    """A unit with the seconds at which it starts and ends."""

    unit: Unit
    start: float
    end: float


def play(order: Iterable[Unit], work: Mapping[fx.Node, Work], together: Together = ALONE) -> tuple[list[Ran], float]:
    """When each unit of `order` runs, and the second at which all have ended. `together`: the speed of each lane while
    the other one runs too.

    A unit of several nodes is one collective with the payloads of all.
    """
    lanes = _Lanes(together)
    over: dict[fx.Node, frozenset[int]] = {}  # the collectives that the readers of a node wait for
    begun: list[tuple[Unit, float, float]] = []
    of_collectives: dict[int, int] = {}  # the place of each collective's unit
    for unit in order:
        item = work[unit[0]]
        waits = frozenset[int]().union(*(over[operand] for node in unit for operand in node.all_input_nodes))
        if not item.late:
            lanes.wait_for(waits)
            waits = frozenset()
        start = lanes.clock
        if item.lane == COMPUTE:
            lanes.compute(item.seconds)
        elif item.lane == COMMUNICATION:
            payload, copying = (sum(getattr(work[node], name) for node in unit) for name in ("payload", "copying"))
            waiting, per_byte = item.rates(payload)
            number = lanes.send(item.level, waiting, per_byte * payload + copying)
            waits = frozenset({number})
            of_collectives[number] = len(begun)
        begun.append((unit, start, lanes.clock))
        over.update(dict.fromkeys(unit, waits))
    lanes.wait_for(frozenset(of_collectives))
    played = [Ran(*each) for each in begun]
    for number, place in of_collectives.items():
        played[place] = Ran(begun[place][0], lanes.starts[number], lanes.ends[number])
    for place, (unit, _, _) in enumerate(begun):
        if work[unit[0]].late:  # a tensor is taken out of a group where it is read
            when = max((lanes.ends[number] for number in over[unit[0]]), default=0.0)
            played[place] = Ran(unit, when, when)
    return played, lanes.clock


class _Lanes:
    """The compute lane up to `clock`, and the collectives sent: of each lane of `under_way` the first runs, the others
    wait.

    While operators and collectives run, each has the share `together` of its speed alone.
    """

    def __init__(self, together: Together) -> None:
        self.together, self.clock, self.sent = together, 0.0, 0
        self.starts: dict[int, float] = {}
        self.ends: dict[int, float] = {}
        self.under_way: dict[int, deque[tuple[int, float]]] = {}  # each with the seconds left, running alone

    def send(self, level: int, waiting: float, moving: float) -> int:
        """Issue a collective that takes `waiting + moving` seconds alone on the lane of a level, and return its number.
        It begins when the lane is free."""
        number, lane = self.sent, self.under_way.setdefault(level, deque())
        self.sent += 1
        share = self.together.queued if lane else 1.0
        lane.append((number, share * waiting + moving))
        if len(lane) == 1:
            self.starts[number] = self.clock
        return number

    def compute(self, seconds: float) -> None:
        """Run operators that take `seconds` alone."""
        slow, fast = self.together.computing, self.together.communicating
        while self.under_way and seconds > 0.0:
            passed = min(seconds / slow, self._least() / fast)
            self._pass(passed, fast)
            seconds = 0.0 if seconds / slow <= passed else seconds - passed * slow
        self.clock += seconds

    def wait_for(self, numbers: frozenset[int]) -> None:
        """Keep the compute lane idle until these collectives have ended."""
        while any(number not in self.ends for number in numbers):
            self._pass(self._least(), 1.0)

    def _least(self) -> float:
        """The seconds that are left of the collective that ends first."""
        return min(lane[0][1] for lane in self.under_way.values())

    def _pass(self, passed: float, speed: float) -> None:
        """Let `passed` seconds pass, in which collectives run with `speed`."""
        self.clock += passed
        for level, lane in [*self.under_way.items()]:
            number, left = lane[0]
            if left / speed > passed:
                lane[0] = number, left - passed * speed
                continue
            lane.popleft()
            self.ends[number] = self.clock
            if lane:
                self.starts[lane[0][0]] = self.clock
            else:
                del self.under_way[level]


# -- What each node takes --------------------------------------------------------------------------------------------


def work_of(graph: fx.Graph, mesh: Mesh, profile: DeviceProfile) -> dict[fx.Node, Work]:
    """The work of each node of `graph`; raises as `predict`."""
    meter = Meter(graph, mesh, profile)
    return {node: meter.work(node) for node in graph.nodes}


class Meter:
    """Computes the work of the nodes of one graph, and caches figures that many nodes share."""

    def __init__(self, graph: fx.Graph, mesh: Mesh, profile: DeviceProfile) -> None:
        self.mesh, self.profile = mesh, profile
        self.values = _values(graph)
        self._bytes: dict[int, int] = {}  # by the identity of a value, which `values` keeps alive
        self._flops: dict[Hashable, int] = {}

    def work(self, node: fx.Node) -> Work:
        """The work of a node."""
        if node.op != "call_function":
            return _FREE
        if node.target is operator.getitem:
            return UNHEARD if node.all_input_nodes[0].target is convert_group else self._call(node)
        if node.target in (convert, convert_group):
            return self._conversion(node)
        return self._call(node) if is_view(node) or node.target in _RESHAPES else self._operator(node)

    def held(self, node: fx.Node) -> int:
        """The bytes of a node's value; elements of expanded dims count once."""
        value = self.values[node]
        if id(value) not in self._bytes:
            self._bytes[id(value)] = sum(map(_bytes, _tensors(value)))
        return self._bytes[id(value)]

    def _call(self, node: fx.Node) -> Work:
        """The work of a call that moves no data."""
        rates = self.profile.rates_of(str(node.target), VIEW)
        return Work(COMPUTE, rates.forward.call, kind=str(node.target)) if rates else _FREE

    def _conversion(self, node: fx.Node) -> Work:
        arguments: tuple[Any, ...] = node.args
        given, source, target, axes, size = arguments[:TAG]
        kind = kind_of(source, target)
        read, written = sum(map(self.held, node.all_input_nodes)), self.held(node)
        if kind.communicates:
            before, after = placement_from_code(source), placement_from_code(target)
            payload = sum(
                payload_bytes(before, after, part.shape, part.element_size(), size)
                for operand in (given if isinstance(given, list | tuple) else [given])
                for part in _tensors(self.values[operand])
            )
            over = self.mesh, tuple(axes), self.profile
            waiting, per_byte = collective_costs(*over)[kind]
            return Work(
                COMMUNICATION,
                waiting,
                per_byte,
                payload,
                kind=kind.value,
                axes=tuple(axes),
                copying=self._copying(node, before, after),
                level=outermost(*over),
                hierarchy=hierarchies(*over).get(kind),
            )
        if kind is Kind.NOTHING:
            return self._call(node)
        rates = self.profile.rates_of(str(aten.clone.default))  # a part of a tensor, which is copied
        measured = rates.forward if rates else None
        seconds = operator_seconds(0, read + written, torch.float32, self.profile, measured, written)
        return Work(COMPUTE, float(seconds), kind=kind.value)

    def _copying(self, node: fx.Node, before: Placement, after: Placement) -> float:
        """The seconds of copying the non-contiguous pieces of a collective: into one buffer before it, or out of one
        after it (`runtime/executors/issue.py`). 0 for a profile without measured operators."""
        rates = self.profile.rates_of(str(aten.clone.default))
        if rates is None:
            return 0.0
        read, written = list(map(self.held, node.all_input_nodes)), self.held(node)
        if isinstance(before, Partial) and not isinstance(after, Shard):  # large ones are reduced in place
            read = [size for size in read if size < WORTH_A_CALL]
            written = sum(read)
        copied = [
            size
            for placement, size in ((after, sum(read)), (before, written))
            if node.target is convert_group or (isinstance(placement, Shard) and (placement.dim or placement.cut))
        ]
        figures = np.array(copied)
        return float(operator_seconds(0, 2 * figures, torch.float32, self.profile, rates.forward, figures).sum())

    def _operator(self, node: fx.Node) -> Work:
        flops, moved, written = self.figures(node)
        dtype = next((tensor.dtype for tensor in _tensors(self.values[node])), torch.float32)
        rates = rates_of(node, self.profile, lambda operand: self.values[operand].shape)
        measured = rates.forward if rates else None
        name = str(node.target)
        seconds = operator_seconds(flops, moved, dtype, self.profile, measured, written, name)
        return Work(COMPUTE, float(seconds), kind=name)

    def figures(self, node: fx.Node) -> tuple[int, int, int]:
        """The floating-point operations of an operator, the bytes it reads and writes, and of these those it writes."""
        written, moved = self.held(node), self.moved(node)
        if node.target in LOOKUPS:
            result = _tensors(self.values[node])[0]
            row = (result.shape[-1] if result.dim() else 1) * result.element_size()
            moved = round(float(looked_up(moved, self.held(node.all_input_nodes[0]), written, row)))
        return self._counted(node), moved, written

    def moved(self, node: fx.Node) -> int:
        """The bytes that an operator reads and writes."""
        return self.held(node) + sum(map(self.held, node.all_input_nodes))

    def _counted(self, node: fx.Node) -> int:
        """The floating-point operations of matrix products, convolutions and attention; 0 for all others."""
        if len(operands(node)) < 2 or is_pointwise(node.target):
            return 0
        shapes = tuple((tuple(t.shape), t.dtype) for o in node.all_input_nodes for t in _tensors(self.values[o]))
        key = node.target, shapes, repr(map_arg((node.args, node.kwargs), lambda _: None))
        if key not in self._flops:
            self._flops[key] = self._count(node)
        return self._flops[key]

    def _count(self, node: fx.Node) -> int:
        counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION)
        with FakeTensorMode(), torch.no_grad():
            like = {operand: _fresh(self.values[operand]) for operand in node.all_input_nodes}
            args, kwargs = map_arg((node.args, node.kwargs), like.__getitem__)
            with counter:
                node.target(*args, **kwargs)  # type: ignore[operator]
        return counter.get_total_flops()


_RESHAPES = (aten._unsafe_view.default, aten.reshape.default)
# The operators of attention on the CPU and the meta device, which PyTorch's own table lacks.
_ATTENTION: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def _values(graph: fx.Graph) -> dict[fx.Node, Any]:
    """The fake value of each node; those of nodes added after tracing are computed from their operands."""
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if "val" in node.meta:
            values[node] = node.meta["val"]
        elif node.op == "get_attr":
            values[node] = getattr(graph.owning_module, str(node.target))
        elif node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values


def _tensors(value: Any) -> list[torch.Tensor]:
    several = value if isinstance(value, tuple | list) else (value,)
    return [tensor for tensor in several if isinstance(tensor, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


def _fresh(value: Any) -> Any:
    """A value like `value` in the active fake mode."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device=value.device)
    return tuple(map(_fresh, value)) if isinstance(value, tuple | list) else value
