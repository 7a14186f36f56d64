"""Where gradients flow inside a manual function, derived from where they flow around its call."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from ..graph.graph import gradient_flow
from ..graph.nodes import Value, operands, source_of, values_of
from .manual import TracedManual


def gradients_inside(manual: TracedManual, call: fx.Node, flows: Collection[Value]) -> frozenset[Value]:
    """The values of `manual` that a gradient reaches, where `flows` are those of the graph with its `call`."""
    graph = manual.graph
    given = zip(graph.inputs, map(source_of, operands(call)), strict=True)
    needing = graph.depending(Value(port.node) for port, outer in given if outer in flows)
    return gradient_flow(graph, tuple(v in flows for v in values_of(call))) & needing
