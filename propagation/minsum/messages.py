"""Messages of all vertices of a colour at once, for costs that are written out and do not repeat.

For the three operators of __init__.py, b has two neighbours and gets the first colour, a and c the second, so a pass
has two steps. The bound is 0 at first, 2.5 after a pass from b to a and c, and 4, the optimum, after the pass back.

narrow.py derives the bounds. There vertices send one after the other, which suits long thin graphs. Here vertices are
coloured so that neighbours have different colours, and all vertices of a colour send at once. Their tables are stacked
into arrays: together if they are few, and otherwise by shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ..cost.conversion import Codes, Floats
from .network import Costs

STACK = 2**17  # numbers in one stack of tables: 1 MiB
ABOVE = 1e-9  # relative to the cost of a plan: how far above it a bound has to lie for an option to go


def colours(near: list[list[int]]) -> list[int]:
    """A colour for each vertex that differs from those of its neighbours `near`; vertices with many neighbours choose
    first."""
    chosen = [-1] * len(near)
    for v in sorted(range(len(near)), key=lambda v: -len(near[v])):
        taken = {chosen[u] for u in near[v]}
        chosen[v] = next(colour for colour in range(len(near)) if colour not in taken)
    return chosen


@dataclass(eq=False)
class _Side:
    """The ends of the edges of a stack on one side: their vertices, and the indices to sum over the edges of each."""

    vertices: Codes
    order: Codes
    starts: Codes
    each: Codes

    @classmethod
    def of(cls, vertices: Codes) -> _Side:
        order = np.argsort(vertices, kind="stable")
        each, starts = np.unique(vertices[order], return_index=True)
        return cls(vertices, order, starts, each)

    def add(self, heights: Floats, more: Floats) -> None:
        """Add the values `more` of the edges of each vertex to its heights."""
        total = more[:, self.order]
        if len(self.each) < len(self.vertices):
            total = np.add.reduceat(total, self.starts, axis=1)
        heights[: len(more), self.each] += total


@dataclass(eq=False)
class _Stack:
    """Edges between vertices of two colours: `tables[option of side 0, option of side 1, edge]`, padded to one shape,
    and the messages to each side [option, edge]."""

    edges: list[tuple[int, int]]
    sides: tuple[_Side, _Side]
    tables: Floats
    messages: list[Floats] = field(default_factory=list)

    def send(self, side: int, share: Floats) -> Floats:
        """Send the messages from the ends at `side`, given the shares of their costs; return how much they change."""
        least = share - self.messages[side]
        if side == 0:
            now = (self.tables + least[:, None]).min(axis=0)
        else:
            now = (self.tables + least[None]).min(axis=1)
        change: Floats = now - self.messages[1 - side]
        self.messages[1 - side] = now
        return change


class Messages:
    """The state of passing messages for costs, none of them negative; options above `upper` are ruled out.

    bound   a lower bound on the cost of the choices cheaper than `upper`
    worth   a lower bound on the cost of a choice with an option [option, vertex]
    """

    def __init__(self, costs: Costs, upper: float) -> None:
        self.upper, self.bound, self._most = upper, 0.0, 2 * upper + 1.0
        self.sizes = [len(own) for own in costs.unary]
        count, most = len(self.sizes), max(self.sizes)
        self.unary = np.full((most, count), self._most)
        self.dead = np.full((most, count), np.inf)  # inf for options that are ruled out
        for v, own in enumerate(costs.unary):
            self.unary[: len(own), v] = np.minimum(own, self._most)
            self.dead[: len(own), v] = np.where(own > upper * (1 + ABOVE), np.inf, 0.0)
        self.heights = self.unary.copy()
        self.worth = np.full((most, count), -np.inf)
        self._settled = np.zeros((most, count))
        self._stack_up(costs)

    def _stack_up(self, costs: Costs) -> None:
        near: list[list[int]] = [[] for _ in self.sizes]
        for a, b in costs.pairs:
            near[a].append(b)
            near[b].append(a)
        self.colour = np.array(colours(near))
        count = int(self.colour.max()) + 1
        self.levels: list[list[list[_Stack]]] = [[[] for _ in range(count)] for _ in range(2)]  # by side, by colour
        earlier, later = np.zeros(len(near)), np.zeros(len(near))
        self.stacks: list[_Stack] = []
        for edges in self._together(costs.pairs):
            stack = self._stacked(costs, edges)
            self.stacks.append(stack)
            for side in (0, 1):
                self.levels[side][self.colour[edges[0][side]]].append(stack)
            np.add.at(later, [a for a, _ in edges], 1)
            np.add.at(earlier, [b for _, b in edges], 1)
        self._sent = (later, earlier)  # how many edges a vertex sends along, forward and backward
        self._share = 1.0 / np.maximum(np.maximum(earlier, later), 1.0)
        self._members = [np.flatnonzero(self.colour == colour) for colour in range(count)]

    def _together(self, pairs: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """The edges of each stack: those between two colours; if too many, those with tables of similar shape."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for a, b in pairs:
            ends = (a, b) if self.colour[a] < self.colour[b] else (b, a)
            found.setdefault((int(self.colour[ends[0]]), int(self.colour[ends[1]])), []).append(ends)
        for _, edges in sorted(found.items()):
            if len(edges) * max(self.sizes[a] for a, _ in edges) * max(self.sizes[b] for _, b in edges) <= STACK:
                yield edges
                continue
            shapes: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for a, b in edges:
                shapes.setdefault((self.sizes[a].bit_length(), self.sizes[b].bit_length()), []).append((a, b))
            for about, alike in sorted(shapes.items()):
                many = max(STACK >> sum(about), 1)
                yield from (alike[start : start + many] for start in range(0, len(alike), many))

    def _stacked(self, costs: Costs, edges: list[tuple[int, int]]) -> _Stack:
        shape = [max(self.sizes[ends[side]] for ends in edges) for side in (0, 1)]
        tables = np.full((*shape, len(edges)), self._most)
        for place, (a, b) in enumerate(edges):
            table = costs.pairs[a, b] if a < b else costs.pairs[b, a].T
            tables[: table.shape[0], : table.shape[1], place] = np.minimum(table, self._most)
        ends = np.array(edges)
        sides = _Side.of(ends[:, 0]), _Side.of(ends[:, 1])
        return _Stack(edges, sides, tables, [np.zeros((n, len(edges))) for n in shape])

    def sweep(self, forward: bool) -> None:
        """One pass over the colours, as `Narrowing.sweep`."""
        side = 0 if forward else 1
        covering, sends = self._sent[1 - side].copy(), self._sent[side]
        rests = self._rest(slice(None), covering)
        if np.isinf(rests).any():  # a vertex has no option left
            self.bound = np.inf
            return
        settled = self._settled.copy()
        order = range(len(self._members)) if forward else reversed(range(len(self._members)))
        for colour in order:
            members = self._members[colour]
            here = self.heights[:, members] + self.dead[:, members]
            elsewhere = rests.sum() - rests[members]
            self.bound = max(self.bound, float((elsewhere + here.min(axis=0)).max()))
            worth = self.worth[:, members] = np.maximum(self.worth[:, members], elsewhere + here)
            self.dead[:, members] = np.where(worth > self.upper * (1 + ABOVE), np.inf, self.dead[:, members])
            here = here + self.dead[:, members]
            lowest = here.min(axis=0)
            if np.isinf(lowest).any():
                self.bound = np.inf
                return
            settled[:, members] = self.heights[:, members]
            rests[members] = lowest * (1 - self._share[members] * sends[members])
            touched = []
            for stack in self.levels[side][colour]:
                near, far = stack.sides[side], stack.sides[1 - side]
                rows = stack.tables.shape[side]
                share = (
                    self._share[near.vertices] * self.heights[:rows, near.vertices] + self.dead[:rows, near.vertices]
                )
                far.add(self.heights, stack.send(side, share))
                np.subtract.at(covering, far.vertices, 1)
                touched.append(far.each)
            if touched:
                some = np.unique(np.concatenate(touched))
                rests[some] = self._rest(some, covering)
        self._settled = settled

    def _rest(self, some: Codes | slice, covering: Floats) -> Floats:
        """The least costs of vertices, without the part that covers their edges to vertices still to come."""
        covered = (self._share[some] * covering[some]) * self._settled[:, some]
        rest: Floats = (self.heights[:, some] - covered + self.dead[:, some]).min(axis=0)
        return rest

    def settle(self) -> tuple[int, ...]:
        """A choice: colours in order take the best options given the earlier ones and the messages of the later."""
        outlook = self.heights + self.dead
        choice = np.zeros(len(self.sizes), dtype=np.intp)
        for members, stacks in zip(self._members, self.levels[0], strict=True):
            choice[members] = outlook[:, members].argmin(axis=0)
            for stack in stacks:
                beside = stack.tables[choice[stack.sides[0].vertices], :, np.arange(len(stack.edges))].T
                stack.sides[1].add(outlook, beside - stack.messages[1])
        return tuple(choice.tolist())

    def left(self) -> list[Codes]:
        """The options of each vertex that a choice cheaper than `upper` may take."""
        return [np.flatnonzero(self.dead[:n, v] == 0) for v, n in enumerate(self.sizes)]

    def shifted(self) -> Costs:
        """The costs of the options that are left, shifted by the messages; each choice costs the same as before."""
        left = self.left()
        pairs = {ends: table for stack in self.stacks for ends, table in self._shifted(stack, left)}
        unary = tuple(self.heights[rows, v] for v, rows in enumerate(left))
        return Costs(unary, dict(sorted(pairs.items())))

    def _shifted(self, stack: _Stack, left: list[Codes]) -> Iterator[tuple[tuple[int, int], Floats]]:
        tables = stack.tables - stack.messages[0][:, None] - stack.messages[1][None]
        for place, (a, b) in enumerate(stack.edges):
            table = tables[:, :, place][np.ix_(left[a], left[b])]
            yield ((a, b), table) if a < b else ((b, a), table.T)
