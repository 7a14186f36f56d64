"""The planned graph for networkx: the readers of each tensor, the layouts, and the bytes of conversions.

Collectives name the tensor that they convert and the operator that caused them. Here each belongs to one edge: that of
the first reader that it serves, so that the edges add up to the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...strategy.errors import StrategyError, shown
from ...strategy.notation import counted
from ..program.collective import Collective
from .data import OperatorPlan, PlanData, Producer, ProducerKind, TensorPlan

if TYPE_CHECKING:
    import networkx

Codes = tuple[str, ...]


@dataclass(frozen=True)
class Read:
    """Operand `operand` of the node `reader` (an operator, or `output NAME`): a tensor, laid out as `read_as`."""

    producer: Producer
    produced_as: Codes | None
    reader: str
    operand: int
    read_as: Codes

    def changes(self, axes: Iterable[int]) -> bool:
        """Whether the tensor is converted on one of `axes`."""
        return self.produced_as is None or any(self.produced_as[i] != self.read_as[i] for i in axes)


def planned_graph(plan: PlanData) -> networkx.MultiDiGraph:
    """See Plan.to_networkx."""
    reads = placed_reads(plan)
    import networkx  # takes a tenth of a second, and few plans need it

    mesh = dict(zip(plan.axes, plan.sizes, strict=True))
    graph = networkx.MultiDiGraph(mesh=mesh, wire_bytes=plan.wire_bytes, predicted_time=plan.predicted_time)
    for side, tensors in (("input", plan.inputs), ("output", plan.outputs)):
        graph.add_nodes_from((f"{side} {t.name}", _tensor(side, t)) for t in tensors)
    graph.add_nodes_from((o.name, _operator(plan, o)) for o in plan.operators)
    for read, collectives in reads:
        source = node_of(read.producer)
        if read.producer.kind is ProducerKind.CONSTANT:
            graph.add_node(source, kind="constant", name=read.producer.name)
        graph.add_edge(
            source,
            read.reader,
            key=read.operand,
            tensor=read.producer.tensor,
            result=read.producer.result,
            produced_as=read.produced_as,
            read_as=read.read_as,
            collectives=collectives,
            wire_bytes=sum((c.wire_bytes for c in collectives), 0.0),
            seconds=sum((c.predicted_time for c in collectives), 0.0),
        )
    return graph


def placed_reads(plan: PlanData) -> list[tuple[Read, tuple[Collective, ...]]]:
    """All reads of operators and outputs, in order, each with the collectives on its edge. Raises StrategyError as
    Plan.to_networkx."""
    if reason := _why_not(plan):
        raise StrategyError(reason)
    reads = list(_reads(plan))
    return [(read, tuple(here)) for read, here in zip(reads, _placed(plan, reads), strict=True)]


def _why_not(plan: PlanData) -> str:
    """Why `plan` has no graph; "" if it has one. (An edited plan can be followed without one.)"""
    if not plan.has_producers:
        return (
            "the plan was saved by a version of Partway that did not keep which tensors each operator reads, so its "
            "graph has no edges; plan the call again with this version, and save that plan"
        )
    results = {f"input {t.name}": 1 for t in plan.inputs}

    def produced(producer: Producer) -> bool:
        constant = producer.kind is ProducerKind.CONSTANT
        return constant or 0 <= producer.result < results.get(node_of(producer), 0)

    read = set()
    for o in plan.operators:
        producers = o.producers or ()
        if len(producers) != len(o.operands):
            counts = counted(len(o.operands), "operand"), counted(len(producers), "producer")
            return f"operator {shown(o.name)} of the plan has {counts[0]} and {counts[1]}"
        for producer in producers:
            if not produced(producer):
                return f"operator {shown(o.name)} of the plan reads {shown(producer.tensor)}, which nothing produces"
        read |= {producer.tensor for producer in producers}
        results[o.name] = len(o.results)
    for t in plan.outputs:
        if t.producer is not None and not produced(t.producer):
            return f"output {shown(t.name)} of the plan is {shown(t.producer.tensor)}, which nothing produces"
        read |= {t.producer.tensor} if t.producer else set()
    for c in plan.collectives:
        if unknown := [axis for axis in c.axes if axis not in plan.axes]:
            known = ", ".join(plan.axes)
            where = f"is over the axis {shown(unknown[0])}; the mesh of the plan has {known}"
            return f"a collective of {shown(c.tensor)} {where}"
    unread = [c.tensor for c in plan.collectives if c.tensor not in read]
    return f"nothing in the plan reads {shown(unread[0])}, which a collective converts" if unread else ""


def node_of(producer: Producer) -> str:
    """The name of a producer's node. (Names of operators have no space, so no two nodes have one name.)"""
    return producer.name if producer.kind is ProducerKind.OPERATOR else f"{producer.kind} {producer.name}"


def _tensor(side: str, t: TensorPlan) -> dict[str, Any]:
    return {
        "kind": side,
        "name": t.name,
        "role": t.role.value,
        "shape": t.shape,
        "dtype": t.dtype,
        "layout": t.codes,
        "annotation": t.annotation,
        "seconds": t.seconds,
    }


def _operator(plan: PlanData, o: OperatorPlan) -> dict[str, Any]:
    return {
        "kind": "operator",
        "name": o.name,
        "operator": o.operator,
        "result": o.result,
        "module": o.module,
        "source": o.source,
        "strategy": o.strategy,
        "factors": dict(zip(plan.axes, o.factors, strict=True)),
        "layouts": o.results,
        "annotation": o.annotation,
        "seconds": o.seconds,
        "held_bytes": o.held_bytes,
        "fate": o.fate,
        "again": o.again,
    }


def _reads(plan: PlanData) -> Iterator[Read]:
    """All reads of operators and outputs, in order."""
    inputs = {t.name: t.codes for t in plan.inputs}
    results = {o.name: o.results for o in plan.operators}

    def produced_as(producer: Producer) -> Codes | None:
        match producer.kind:
            case ProducerKind.INPUT:
                return inputs[producer.name]
            case ProducerKind.OPERATOR:
                return results[producer.name][producer.result]
            case ProducerKind.CONSTANT:
                return None

    for o in plan.operators:
        for operand, (producer, codes) in enumerate(zip(o.producers or (), o.operands, strict=True)):
            yield Read(producer, produced_as(producer), o.name, operand, codes)
    for t in plan.outputs:
        if t.producer is not None:
            yield Read(t.producer, produced_as(t.producer), f"output {t.name}", 0, t.codes)


def _placed(plan: PlanData, reads: list[Read]) -> list[list[Collective]]:
    """The collectives on the edge of each of `reads`; each collective is on one edge."""
    placed: list[list[Collective]] = [[] for _ in reads]
    by_tensor: dict[str, list[int]] = {}
    for i, read in enumerate(reads):
        by_tensor.setdefault(read.producer.tensor, []).append(i)
    for c in plan.collectives:
        # a collective that serves all readers names none of them
        readers = [i for i in by_tensor[c.tensor] if reads[i].reader == c.where] or by_tensor[c.tensor]
        axes = [plan.axes.index(axis) for axis in c.axes]
        placed[next((i for i in readers if reads[i].changes(axes)), readers[0])].append(c)
    return placed
