"""On which axes each value of a manual function varies, and so what its gradient is there.

A value of a program of one rank is on each axis of the mesh one of two things:

    alike     every rank has the same, and every rank will have the whole gradient        (Replicate)
    varying   each rank has a value of its own, and the gradient of that                  (Shard, Partial, Broadcast)

What is computed of values varies where one of them does. Where a value that is alike is computed with one that varies,
each rank makes its own use of it: from there on it is a Broadcast, whose gradients are addends, and the conversion
Replicate -> Broadcast before it adds them up in the backward. Sums over an axis, and what is gathered along it, are
alike on it. (JAX's shard_map has the same two kinds, and calls them invariant and varying.)

A value that is alike becomes a Broadcast as early as that costs nothing: where all that reads it varies, and one
operand carries its gradient. So the gradient of a weight leaves a manual function as addends, and is added up with the
others.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ..graph.graph import Graph
from ..graph.nodes import Value, argument, operands, source_of, values_of
from ..ops import by_hand, indexing
from ..ops.by_hand import COLLECTIVES
from .manual import TracedManual

Axes = frozenset[str]
_NONE: Axes = frozenset()

# Collectives whose results are the same on all ranks of their group; those of the others vary.
_ALIKE = frozenset({by_hand.all_reduce, by_hand.all_gather, by_hand.broadcast})


def axes_of(node: fx.Node) -> Axes:
    """The axes along which the ranks of a collective meet; none for another operator."""
    return frozenset(argument(node, "axes")) if node.target in COLLECTIVES else _NONE


@dataclass(frozen=True)
class Variance:
    """On which axes values vary, and on which the operands of each call must.

    An operand that needs a gradient and is alike on an axis in `wanted` is converted, Replicate -> Broadcast.
    """

    values: Mapping[Value, Axes]
    wanted: Mapping[fx.Node, Axes]

    def missing(self, node: fx.Node, operand: Value) -> Axes:
        """The axes on which `operand` of the call `node` is alike and has to vary."""
        return self.wanted[node] - self.values[operand]


def variance_of(manual: TracedManual) -> Variance:
    """The variance of a manual function's values."""
    return _Variance(manual.graph, [c.parted for c in manual.operands], [c.parted for c in manual.results]).found()


class _Variance:
    """The state of one analysis: forwards what must vary, then backwards what may as well."""

    def __init__(self, graph: Graph, given: Sequence[Axes], results: Sequence[Axes]) -> None:
        self.graph = graph
        self.values: dict[Value, Axes] = {}
        self.wanted: dict[fx.Node, Axes] = {}
        self.uses: dict[Value, list[Axes]] = {}
        for port, parted in zip(graph.inputs, given, strict=True):
            self.values[Value(port.node)] = parted
        self.calls = [node for node in graph.nodes if node.target is not operator.getitem]
        for node in self.calls:
            self._forward(node)
        for port, parted in zip(graph.outputs, results, strict=True):
            self.uses.setdefault(source_of(port.node), []).append(parted)

    def found(self) -> Variance:
        """Go back through the graph: the operands of a call learn what it wants after the call itself has."""
        for node in reversed(self.calls):
            self._back(node)
        for port in self.graph.inputs:
            self.values[Value(port.node)] |= self._as_well(values_of(port.node))
        return Variance(self.values, self.wanted)

    def _forward(self, node: fx.Node) -> None:
        together = axes_of(node)
        if node.target is indexing.position:
            together = frozenset(node.args[0])  # type: ignore[arg-type]
        wanted = together.union(*(self.values[source_of(operand)] for operand in operands(node)))
        self.wanted[node] = wanted
        for v in values_of(node):
            self.values[v] = wanted - together if node.target in _ALIKE else wanted

    def _back(self, node: fx.Node) -> None:
        results = values_of(node)
        axes = self._as_well(results)
        carriers = {source_of(o) for o in operands(node)} & self.graph.differentiable
        if node.target in COLLECTIVES:
            own = axes_of(node)
            if node.target in _ALIKE and own <= axes:  # what is added up, or gathered, is a Broadcast at once
                self._let_vary(results, own)
            axes -= own
        if len(carriers) <= 1 or not self.graph.differentiable.intersection(results):
            self._let_vary(results, axes)
            self.wanted[node] |= axes
        for operand in dict.fromkeys(map(source_of, operands(node))):
            self.uses.setdefault(operand, []).append(self.wanted[node])

    def _let_vary(self, results: Sequence[Value], axes: Axes) -> None:
        for v in results:
            self.values[v] |= axes

    def _as_well(self, results: Sequence[Value]) -> Axes:
        """The axes on which these are alike, and all that reads them wants them to vary."""
        uses = [use for v in results for use in self.uses.get(v, ())]
        alike = [use - self.values[v] for v in results for use in self.uses.get(v, ())]
        return frozenset.intersection(*alike) if uses else _NONE
