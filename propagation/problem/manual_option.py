"""The one option of a manual function: the layouts that the user wrote, and the cost of its program.

A manual function of three operators, a product, an all-reduce of its result and a relu, has one option: its operands
are split as the user wrote. It costs the product and the relu of one rank's part, and the all-reduce.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import fx

from ...strategy.layout import Layout, layout
from ...strategy.placement import BROADCAST, step_kind
from ..cost.conversion import ConversionTable, Floats
from ..cost.cost import BACKWARD_FACTOR, collective_cost, operator_seconds, rates_of
from ..graph.nodes import Value, bytes_of, is_view, operands, source_of, tensor_of, values_of
from ..manual.flows import gradients_inside
from ..manual.manual import TracedManual
from ..manual.writing import ManualConversion, WrittenManual, written
from ..ops.by_hand import COLLECTIVES
from ..ops.collectives import payload_of_whole
from ..ops.python.manual import manual_of
from ..rules.table import rule_of
from .problem import Options, Settings

Tables = tuple[ConversionTable, ...]


def option_of_manual(
    call: fx.Node, operands: Tables, results: Tables, flows: Collection[Value], settings: Settings
) -> Options:
    """The option of the call of a manual function, whose operands and results have these tables. `flows`: the values of
    the surrounding graph that a gradient reaches."""
    its: TracedManual = manual_of(str(call.args[1]))
    text, inside = written(its), gradients_inside(its, call, flows)
    seconds, flops, held = _work(its, inside, settings)
    unary = settings.weights.compute * seconds + settings.weights.memory * held / 1e9
    unary += sum(_cost(c, c.has_gradient(inside), settings) for c in text.conversions)

    def codes(tables: Tables, layouts: Sequence[Layout]) -> tuple[np.ndarray, ...]:
        return tuple(np.array([table.index[lo]], dtype=np.intp) for table, lo in zip(tables, layouts, strict=True))

    def one(number: float) -> Floats:
        return np.array([number])

    return Options(
        tables=(operands, results),
        operands=codes(operands, operand_layouts(its, text)),
        results=codes(results, [result.layout for result in its.results]),
        factors=np.full((1, len(its.mesh.axes)), -1, dtype=np.intp),
        names=(),
        mesh=its.mesh,
        unary=one(unary),
        seconds=one(seconds),
        flops=one(flops),
        held=one(held),
        memory=one(held),
        again=one(seconds),
        made=one(held),
        arrived=one(0.0),
        saved=one(0.0),
    )


def operand_layouts(its: TracedManual, text: WrittenManual) -> list[Layout]:
    """The layouts of the operands: a whole tensor that ranks use in their own way is a Broadcast."""
    values = [text.variance.values[Value(port.node)] for port in its.graph.inputs]
    return [
        layout(
            its.mesh,
            tuple(
                BROADCAST if axis in crossing.whole & varies else placement
                for axis, placement in zip(its.mesh.axes, crossing.layout.placements, strict=True)
            ),
        )
        for crossing, varies in zip(its.operands, values, strict=True)
    ]


def _cost(c: ManualConversion, gradient: bool, settings: Settings) -> float:
    """The cost of a collective of a manual function, forward and backward."""
    mesh, weights, cost = settings.mesh, settings.weights, 0.0
    for phase in ("forward", "backward"):
        kind = step_kind(c.source, c.target, phase, gradient)
        if kind.communicates:
            size = mesh.size(*c.axes)
            payload = payload_of_whole(kind, c.source, c.target, c.whole_bytes, size, phase == "forward")
            waiting, per_byte = collective_cost(kind, payload, mesh, c.axes, settings.profile)
            cost += weights.latency * waiting + weights.wire * per_byte * payload
    return cost


def _work(its: TracedManual, inside: Collection[Value], settings: Settings) -> tuple[float, float, float]:
    """The seconds and flops of a rank's operators, forward and backward, and the bytes kept for the backward."""
    seconds = flops = held = 0.0
    for node in its.graph.nodes:
        results = [t for t in map(tensor_of, values_of(node)) if isinstance(t, torch.Tensor)]
        if node.target in COLLECTIVES or is_view(node) or not results:
            continue
        kept = sum(map(bytes_of, results))
        moved = kept + sum(bytes_of(tensor_of(source_of(operand))) for operand in operands(node))
        rule = rule_of(node)
        computed = rule.flops if rule else 0.0
        reached = any(v in inside for v in values_of(node))
        passes = 1.0 + (BACKWARD_FACTOR if reached else 0.0)
        rates = rates_of(node, settings.profile)
        measured = rates.forward if rates else None
        dtype, name = results[0].dtype, str(node.target)
        seconds += passes * float(operator_seconds(computed, moved, dtype, settings.profile, measured, kept, name))
        flops += passes * computed
        held += kept if reached else 0
    return seconds, flops, held
