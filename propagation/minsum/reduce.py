"""Exact reductions: a smaller problem with the same optimum, and the way back.

For the three operators of __init__.py (costs: a 1, 0; b 3, 2; c 0, 6; 5 if a and b differ, 4 if b and c do), no vertex
is left: a has one neighbour and is merged into b, whose costs are then (3 + 1, 2 + 0) = (4, 2); b is merged into c,
whose costs are then (0 + 4, 6 + 2) = (4, 8); c takes 0. The constant is 4, and reading back gives 0, 0, 0.

Each rule looks at one vertex and its neighbours. The rules are applied until none changes anything:

* an option with an infinite cost, or one impossible with every option of a neighbour, is removed;
* a table that is a row plus a column is added to the costs of the vertices;
* a vertex that is a function of a neighbour (each option of the neighbour leaves it one finite option) is merged;
* a vertex with at most two neighbours is eliminated, as in eliminate.py, if the table that this leaves is small;
* an option is removed if another one is cheaper whatever the neighbours choose (dead-end elimination: Desmet et al.,
  1992; Goldstein, 1994).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...strategy.errors import StrategyError
from ..cost.conversion import Codes, Floats
from .network import Costs

JOINED = 2.0**22  # the most sums for removing a vertex with two neighbours
SAMPLES = 8  # choices of the neighbours beside which options are compared first
SAMPLED = np.arange(SAMPLES) * 7919  # the sampled options of a neighbour, modulo the number of its options
HUGE = 1e200  # in place of inf where sums are compared
NEAR = 1e-12  # the relative deviation up to which a table counts as a row plus a column


@dataclass(frozen=True)
class Reduced:
    """The rest of a problem after reduction.

    costs      its numbers
    constant   the cost of what was removed
    vertices   the vertices that are left, by number in the whole problem
    kept       their options that are left, by number in the whole problem
    """

    costs: Costs
    constant: float
    vertices: list[int]
    kept: list[Codes]
    gone: list[_Gone]
    count: int

    def whole(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The best choice for the whole problem that extends `choice`, a choice for the rest."""
        full = [0] * self.count
        for vertex, kept, option in zip(self.vertices, self.kept, choice, strict=True):
            full[vertex] = int(kept[option])
        for gone in reversed(self.gone):
            seats = (int(np.searchsorted(kept, full[v])) for v, kept in gone.near)
            full[gone.vertex] = int(gone.kept[gone.best[tuple(seats)]])
        return tuple(full)

    def part(self, choice: Sequence[int]) -> tuple[int, ...] | None:
        """A choice for the whole problem, restricted to the vertices that are left; None if it takes a removed
        option."""
        seats = []
        for vertex, kept in zip(self.vertices, self.kept, strict=True):
            seat = int(np.searchsorted(kept, choice[vertex]))
            if seat == len(kept) or kept[seat] != choice[vertex]:
                return None
            seats.append(seat)
        return tuple(seats)


@dataclass(frozen=True, slots=True)
class _Gone:
    """An eliminated vertex: its best option for each choice of `near`, vertices with their options."""

    vertex: int
    kept: Codes
    near: tuple[tuple[int, Codes], ...]
    best: Codes


def reduced(costs: Costs) -> Reduced:
    """Reduce a problem until no rule applies. Raises StrategyError if some vertex has no option left: then no choice
    has a finite cost."""
    work = Reduction(costs)
    work.run()
    return work.result()


class Reduction:
    """The state of reducing: tables by both ends, the first index that of the vertex they are kept under."""

    def __init__(self, costs: Costs) -> None:
        self.unary = list(costs.unary)
        self.tables: list[dict[int, Floats]] = [{} for _ in costs.unary]
        for (a, b), table in costs.pairs.items():
            self.tables[a][b], self.tables[b][a] = table, table.T
        self.kept: list[Codes] = [np.arange(len(own)) for own in costs.unary]
        self.constant = 0.0
        self.gone: list[_Gone] = []
        self.there = [True] * len(self.unary)
        self.plain = {(a, b) for a, b in costs.pairs}  # tables that may be a row plus a column
        self.queue = deque(range(len(self.unary)))
        self.waiting = [True] * len(self.unary)

    def run(self) -> None:
        """Apply the rules until none applies."""
        while self.queue:
            vertex = self.queue.popleft()
            self.waiting[vertex] = False
            if self.there[vertex]:
                self._look_at(vertex)

    def result(self) -> Reduced:
        """The remaining problem."""
        left = [v for v, there in enumerate(self.there) if there]
        seats = {v: i for i, v in enumerate(left)}
        pairs = {
            (seats[a], seats[b]): np.ascontiguousarray(self.tables[a][b])
            for a in left
            for b in sorted(self.tables[a])
            if a < b
        }
        costs = Costs(tuple(self.unary[v] for v in left), pairs)
        return Reduced(costs, self.constant, left, [self.kept[v] for v in left], self.gone, len(self.there))

    def _again(self, *vertices: int) -> None:
        for vertex in vertices:
            if not self.waiting[vertex]:
                self.waiting[vertex] = True
                self.queue.append(vertex)

    def _look_at(self, v: int) -> None:
        self._leave_out_impossible(v)
        self._take_out_sums(v)
        if self._goes(v):
            return
        if self._is_function(v):
            return
        if self._leave_out_undercut(v):
            self._again(v)

    def _keep(self, v: int, rows: Codes) -> None:
        """Keep only the options of `v` in `rows`, numbers or a mask."""
        self.unary[v], self.kept[v] = self.unary[v][rows], self.kept[v][rows]
        for u, table in self.tables[v].items():
            self._put(v, u, table[rows])
        self._again(*self.tables[v])

    def _put(self, v: int, u: int, table: Floats) -> None:
        self.tables[v][u], self.tables[u][v] = table, table.T
        self.plain.add((min(u, v), max(u, v)))

    def _cut(self, v: int, u: int) -> None:
        del self.tables[v][u], self.tables[u][v]

    def _leave_out_impossible(self, v: int) -> None:
        possible = np.isfinite(self.unary[v])
        for table in self.tables[v].values():
            possible &= np.isfinite(table.min(axis=1, initial=math.inf))
        if not possible.any():
            raise StrategyError(
                f"no choice of options has a finite cost: every option of vertex {v} costs inf, by itself or with any "
                "option of a neighbour that has not been ruled out in this way"
            )
        if not possible.all():
            self._keep(v, possible)

    def _take_out_sums(self, v: int) -> None:
        """Remove tables that are a row plus a column."""
        for u in list(self.tables[v]):
            ends = min(u, v), max(u, v)
            if ends not in self.plain:
                continue
            self.plain.discard(ends)
            table = self.tables[v][u]
            if not _is_sum(table[[0, -1]][:, [0, -1]]) or not _is_sum(table):  # the corners rule most out
                continue
            column = table[:, 0] - table[0, 0]
            self.unary[v] = self.unary[v] + column
            self.unary[u] = self.unary[u] + table[0]
            self._cut(v, u)
            self._again(u)

    def _leave(self, v: int, near: tuple[int, ...], best: Codes) -> None:
        self.gone.append(_Gone(v, self.kept[v], tuple((u, self.kept[u]) for u in near), best))
        self.there[v] = False
        for u in list(self.tables[v]):
            self._cut(v, u)
            self._again(u)

    def _goes(self, v: int) -> bool:
        """Eliminate `v` if it has at most two neighbours; return whether it did."""
        near, own = tuple(self.tables[v]), self.unary[v]
        if len(near) > 2:
            return False
        if len(near) == 2 and len(own) * math.prod(len(self.unary[u]) for u in near) > JOINED:
            return False
        if not near:
            total = own
        elif len(near) == 1:
            total = own + self.tables[near[0]][v]
        else:
            total = own + self.tables[near[0]][v][:, None] + self.tables[near[1]][v][None]
        best, least = np.asarray(total.argmin(axis=-1)), np.asarray(total.min(axis=-1))
        self._leave(v, near, best)
        if not near:
            self.constant += float(least)
        elif len(near) == 1:
            self.unary[near[0]] = self.unary[near[0]] + least
        else:
            a, b = near
            self._put(a, b, self.tables[a][b] + least if b in self.tables[a] else least)
        return True

    def _is_function(self, v: int) -> bool:
        """Merge `v` into a neighbour of which it is a function; return whether there was one."""
        for u, table in self.tables[v].items():
            if len(self.unary[u]) < len(self.unary[v]) or np.isfinite(table[:, 0]).sum() != 1:
                continue
            finite = np.isfinite(table)
            if (finite.sum(axis=0) != 1).any():
                continue
            of = finite.argmax(axis=0)
            self.unary[u] = self.unary[u] + self.unary[v][of] + table[of, np.arange(len(of))]
            others = [(w, other[of]) for w, other in self.tables[v].items() if w != u]
            self._leave(v, (u,), of)
            for w, other in others:
                self._put(u, w, self.tables[u][w] + other if w in self.tables[u] else other)
            return True
        return False

    def _leave_out_undercut(self, v: int) -> bool:
        """Remove options if another one is cheaper whatever the neighbours choose; return whether there were any. A few
        choices of the neighbours already rule out most pairs of options."""
        own, tables = self.unary[v], list(self.tables[v].values())
        beside = own[:, None] + np.zeros(SAMPLES)
        for place, table in enumerate(tables):
            beside += np.minimum(table[:, (SAMPLED * (place + 1)) % table.shape[1]], HUGE)
        cheaper = np.ones((len(own), len(own)), dtype=bool)  # [option, another one that may undercut it]
        for costs in beside.T:
            cheaper &= costs[:, None] >= costs
        np.fill_diagonal(cheaper, False)
        options, others = np.nonzero(cheaper)
        saved = own[options] - own[others]
        with np.errstate(invalid="ignore"):
            for table in tables:
                if not len(options):
                    return False
                apart = table[options] - table[others]
                least = np.where(np.isnan(apart), math.inf, apart).min(axis=1)  # inf less inf: neither can be chosen
                saved = saved + least
                able = saved > -math.inf  # the other is possible wherever the one is
                if not able.all():
                    options, others, saved = options[able], others[able], saved[able]
        alive = np.ones(len(own), dtype=bool)
        undercut = saved >= 0
        for option, other in zip(options[undercut].tolist(), others[undercut].tolist(), strict=True):
            if alive[other]:  # one of two equal options stays
                alive[option] = False
        if alive.all():
            return False
        self._keep(v, alive)
        return True


def _is_sum(table: Floats) -> bool:
    """Whether a table is a row plus a column."""
    if not np.isfinite(table).all():
        return False
    row, column = table[0], table[:, 0] - table[0, 0]
    return bool((np.abs(table - row - column[:, None]) <= NEAR * np.maximum(np.abs(table), np.abs(row))).all())
