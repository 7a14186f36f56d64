"""Where gradients flow inside an island, which follows from where they flow around its call."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from ..graph.nodes import Value, operands, source_of, values_of
from ..graph.queries import gradient_flow
from .island import Island


def gradients_inside(island: Island, call: fx.Node, flows: Collection[Value]) -> frozenset[Value]:
    """The values of `island` that a gradient reaches, where `flows` are those of the graph with its `call`."""
    graph = island.graph
    given = zip(graph.inputs, map(source_of, operands(call)), strict=True)
    needing = graph.depending(Value(port.node) for port, outer in given if outer in flows)
    return gradient_flow(graph, tuple(v in flows for v in values_of(call))) & needing
