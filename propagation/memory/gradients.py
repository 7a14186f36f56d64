"""The memory of the gradients of values, as intervals of the vertices.

Operators 1, 2 and 3 form a chain, and their results have 4 bytes each. The gradient of 1's result is held while the
backward is at 2, which computes it, and at 1, which reads it; the gradient of 2's result is held at 3 and 2. So 8 bytes
are held at 2. If 2 is a view, both gradients share 4 bytes, which are held from 3 to 1.

The backward goes from the last vertex to the first. The gradient of a value is held from the value's last reader,
which computes the first addend, until its producer has read it. Further addends are added in place.

A gradient often needs no memory of its own. A view, a hub and an addition pass on the gradient of their result; and for
most elementwise operators the runtime writes a gradient over that of the result, if nothing else reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..problem.problem import VertexKind
from .keeping import Converted, KeepProblem

_aten = torch.ops.aten
_ADD = _aten.add.Tensor

# Operators whose backward the runtime may let write over the gradient of the result.
_IN_PLACE = {
    _aten.div.Scalar, _aten.div.Tensor, _aten.gelu.default, _aten.mul.Scalar, _aten.mul.Tensor, _aten.neg.default,
    _aten.relu.default, _aten.sub.Tensor, _aten.tanh.default,
}  # fmt: skip


@dataclass(eq=False)
class Gradient:
    """Bytes that are held while the backward goes from vertex `start` down to vertex `end`.

    own   belongs to one value alone, so that it may be written over
    """

    size: float
    start: int
    end: int
    own: bool = True


def gradients(problem: KeepProblem, found: Sequence[Converted]) -> list[Gradient]:
    """The gradients of values, except of parameters; `found`: the conversion of each edge."""
    return _Backward(problem, found).run()


class _Backward:
    def __init__(self, problem: KeepProblem, found: Sequence[Converted]) -> None:
        self.p, self.found = problem, found
        self.vertices, self.edges = problem.problem.vertices, problem.problem.edges
        self.made: list[Gradient] = []
        self.of: list[dict[int, Gradient]] = [{} for _ in self.vertices]  # of each vertex's results
        self.leaving: list[list[int]] = [[] for _ in self.vertices]  # the edges to a vertex's readers, the last first
        for number in sorted(range(len(self.edges)), key=lambda n: -self.edges[n].consumer):
            edge = self.edges[number]
            reads = self.vertices[edge.consumer].kind is not VertexKind.OUTPUT
            if reads and edge.value in problem.problem.tensors.flows:
                self.leaving[edge.producer].append(number)
        self.waiting = Counter(self.edges[n].consumer for numbers in self.leaving for n in numbers)

    def run(self) -> list[Gradient]:
        """Walk the backward."""
        for i in reversed(range(len(self.vertices))):
            for number in self.leaving[i]:
                self._arrive(i, number)
            for gradient in self.of[i].values():
                gradient.end = i
        return self.made

    def _arrive(self, i: int, number: int) -> None:
        """Add an addend of the gradient of a result of vertex i, which arrives along edge `number`."""
        edge, conversion = self.edges[number], self.found[number]
        reader, result = edge.consumer, edge.result
        own = self._of_result(reader)
        if conversion.moves and conversion.before != conversion.after:
            self._new(conversion.after, reader)
        if own is not None and self._multiplies(reader) and conversion.after < own.size:
            self._new(own.size, reader)  # a product as large as the result, which is summed
        if self.vertices[i].kind is VertexKind.INPUT:
            return
        addend = None
        if own is not None and not conversion.moves and own.size == conversion.before:
            addend = self._passed(reader, own)
        addend = addend or self._new(conversion.before, reader)
        before = self.of[i].get(result)
        self.of[i][result] = addend if before is None else self._sum(before, addend, reader)

    def _multiplies(self, i: int) -> bool:
        return self.vertices[i].kind is VertexKind.OPERATOR and self.vertices[i].node.target is _aten.mul.Tensor

    def _new(self, size: float, at: int) -> Gradient:
        self.made.append(Gradient(size, at, at))
        return self.made[-1]

    def _of_result(self, i: int) -> Gradient | None:
        """The gradient of the result of vertex i, or None unless exactly one result has a gradient."""
        return next(iter(self.of[i].values())) if len(self.of[i]) == 1 else None

    def _passed(self, reader: int, own: Gradient) -> Gradient | None:
        """The gradient of a reader's result if it can serve as that of an operand, without other memory; else None."""
        vertex = self.vertices[reader]
        alone = self.waiting[reader] == 1
        if vertex.kind is VertexKind.HUB or self.p.facts[reader].view or vertex.node.target is _ADD:
            own.own = own.own and alone
            return own
        if own.own and vertex.node.target in _IN_PLACE and self._takes(reader):
            return own
        return None

    def _takes(self, reader: int) -> bool:
        """Whether no other operand of the reader has the memory of its result's gradient yet."""
        self.waiting[reader], taken = 0, self.waiting[reader] == 0
        return not taken

    def _sum(self, one: Gradient, other: Gradient, at: int) -> Gradient:
        """The sum of two addends, the second made at vertex `at`; in the memory of one of them if possible."""
        one.end = min(one.end, at)
        if one is not other:
            for addend in (other, one):
                if addend.own:
                    return addend
        return self._new(one.size, at)
