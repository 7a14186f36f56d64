"""The axes on which each value of a manual function varies, which determine its gradient.

On each axis of the mesh, a value of a program of one rank has one of two kinds:

    alike     every rank has the same value, and will have the whole gradient            (Replicate)
    varying   each rank has its own value, and the gradient of that                      (Shard, Partial, Broadcast)

A result varies if one of its operands does. Where an operator takes an alike value together with a varying one, each
rank uses it in its own way: from there on it is a Broadcast, whose gradients are addends, and the conversion
Replicate -> Broadcast before it sums them in the backward. The results of a sum or a gather over an axis are alike on
it. (JAX's shard_map has the same two kinds, and calls them invariant and varying.)

An alike value becomes a Broadcast as early as that costs nothing: where all its readers vary, and one operand carries
its gradient. So the gradient of a weight leaves a manual function as addends, and is summed with the others.
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
    """The axes along which the ranks of a collective meet; none for any other operator."""
    return frozenset(argument(node, "axes")) if node.target in COLLECTIVES else _NONE


@dataclass(frozen=True)
class Variance:
    """The axes on which values vary, and those on which the operands of each call must.

    An operand that needs a gradient and is alike on an axis in `wanted` is converted from Replicate to Broadcast.
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
    """The state of one analysis: a forward pass finds what must vary, a backward pass what may."""

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
        """Go back through the graph: each call fixes what it wants before its operands do."""
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
            if node.target in _ALIKE and own <= axes:  # a sum or a gather results in a Broadcast directly
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
        """The axes on which `results` are alike and all their readers want them to vary."""
        uses = [use for v in results for use in self.uses.get(v, ())]
        alike = [use - self.values[v] for v in results for use in self.uses.get(v, ())]
        return frozenset.intersection(*alike) if uses else _NONE
