"""The memory of the gradients of values, as intervals of the vertices.

Operators 1, 2 and 3 form a chain, and their results have 4 bytes each. The gradient of 1's result is held while the
backward is at 2, which computes it, and at 1, which reads it; the gradient of 2's result is held at 3 and 2. So 8 bytes
are held at 2. If 2 is a view, both gradients share 4 bytes, which are held from 3 to 1.

The backward goes from the last vertex to the first. The gradient of a value is held from the value's last reader,
which computes the first addend, until its producer has read it. Further addends are added in place.

A gradient often needs no memory of its own (paths.py).
"""

from __future__ import annotations

import numpy as np

from ..cost.conversion import Codes, Floats
from .keeping import KeepProblem
from .paths import Passing
from .reader import Conversions


def gradients(problem: KeepProblem, found: Conversions) -> tuple[Codes, Codes, Floats]:
    """The gradients of values, except of parameters: the vertices that each is held from, backward, down to, and its
    bytes, as (down to, from, bytes). `found`: the conversion of each edge."""
    backward = _Backward(problem, found)
    backward.run()
    ends, starts = (np.array(each, dtype=np.intp) for each in (backward.ends, backward.starts))
    return ends, starts, np.array(backward.sizes, dtype=np.float64)


class _Backward:
    """The walk over the backward. Gradients have numbers; of each the bytes, the first and the last vertex, and whether
    it belongs to one value alone, so that it may be written over."""

    def __init__(self, problem: KeepProblem, found: Conversions) -> None:
        self.paths, self.input = problem.paths, problem.reader.input.tolist()
        self.before, self.after, self.moves = found.before.tolist(), found.after.tolist(), found.moves.tolist()
        self.sizes, self.starts, self.ends, self.own = list[float](), list[int](), list[int](), list[bool]()
        self.of: list[dict[int, int]] = [{} for _ in self.paths.leaving]  # of each vertex's results
        self.waiting = list(self.paths.waiting)

    def run(self) -> None:
        """Walk it."""
        for i in reversed(range(len(self.of))):
            for number, reader, result in self.paths.leaving[i]:
                self._arrive(i, number, reader, result)
            for gradient in self.of[i].values():
                self.ends[gradient] = i

    def _arrive(self, i: int, number: int, reader: int, result: int) -> None:
        """Add an addend of the gradient of a result of vertex i, which arrives along edge `number`."""
        results, before, after, moves = self.of[reader], self.before[number], self.after[number], self.moves[number]
        own = next(iter(results.values())) if len(results) == 1 else None  # the gradient of its one result
        if moves and before != after:
            self._new(after, reader)
        if own is not None and self.paths.multiplies[reader] and after < self.sizes[own]:
            self._new(self.sizes[own], reader)  # a product as large as the result, which is summed
        if self.input[i]:
            return
        addend = None
        if own is not None and not moves and self.sizes[own] == before and self._serves(reader, own):
            addend = own
        if addend is None:
            addend = self._new(before, reader)
        other = self.of[i].get(result)
        self.of[i][result] = addend if other is None else self._sum(other, addend, reader)

    def _new(self, size: float, at: int) -> int:
        self.sizes.append(size)
        self.starts.append(at)
        self.ends.append(at)
        self.own.append(True)
        return len(self.sizes) - 1

    def _serves(self, reader: int, own: int) -> bool:
        """Whether the gradient of a reader's result can serve as that of an operand, without other memory."""
        passing = self.paths.passing[reader]
        if passing is Passing.SAME:
            self.own[own] = self.own[own] and self.waiting[reader] == 1
            return True
        if not self.own[own] or passing is Passing.OTHER:
            return False
        self.waiting[reader], taken = 0, self.waiting[reader] == 0  # by another operand
        return not taken

    def _sum(self, one: int, other: int, at: int) -> int:
        """The sum of two addends, the second made at vertex `at`; in the memory of one of them if possible."""
        self.ends[one] = min(self.ends[one], at)
        if one != other:
            for addend in (other, one):
                if self.own[addend]:
                    return addend
        return self._new(self.sizes[one], at)
