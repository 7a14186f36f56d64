"""Exact search: min-sum elimination over the graph of a problem, which computes equal parts once.

For the three operators of __init__.py (costs: a 1, 0; b 3, 2; c 0, 6; 5 if a and b differ, 4 if b and c do):

    eliminate a     b=0: min(1 + 0, 0 + 5) = 1            b=1: min(1 + 5, 0 + 0) = 0            table (1, 0) over b
    eliminate b     c=0: min(3 + 1 + 0, 2 + 0 + 4) = 4    c=1: min(3 + 1 + 4, 2 + 0 + 0) = 2    table (4, 2) over c
    eliminate c     min(0 + 4, 6 + 2) = 4                                                       the minimum
    read back       c=0, so b=0 (4 < 6), so a=0 (1 < 5)

Vertices are eliminated one by one: the best option of a vertex for every choice of its neighbours leaves a table over
these (Dechter, "Bucket elimination", 1999). If a table would be too large, its bucket is split (mini-buckets, Dechter &
Rish 2003): the sum of the parts' minima is then a lower bound, and the plan found may not be the best.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from ..cost.conversion import Floats
from .network import Costs, Found

TABLE_LIMIT = 2**28  # sums of one step of the elimination
MUCH_WORK = 3e9  # sums of an elimination, some 6 s of them, above which options are left out first
MANY_ENTRIES = 2**27  # entries of all tables together, which stay until the options are read off: 1 GB
SMALL_TABLES = (2**24, 2**21, 2**18, 2**15, 2**12)  # limits to try while all tables together are far too much
SLAB = 2**17  # sums at a time: 1 MiB
REPEATED = 26.0  # log2 of the joint table up to which a vertex that looks like another one goes first


@dataclass(frozen=True, eq=False, slots=True)
class _Table:
    """A function of the options of `scope`, vertices in ascending order. Its symbol identifies its numbers: tables
    computed from the same tables in the same way share it. Compared by identity."""

    scope: tuple[int, ...]
    symbol: int


@dataclass(frozen=True)
class _Elimination:
    """The elimination of one vertex: the tables over it, and for each group of them (a single one, unless that would be
    too large) the remaining table over the other vertices."""

    vertex: int
    bucket: list[_Table]
    left: list[_Table]


@dataclass(frozen=True)
class EliminationOrder:
    """The order in which vertices are eliminated, and the tables to compute.

    recipes    by symbol, the tables that one is computed from and the vertices that they join, of which the last is
               eliminated
    arrays     by symbol, the numbers of the tables that the costs consist of
    constant   the cost of the vertices with one option among themselves
    work       the number of sums; inf: more than a float can say
    entries    the number of entries of all its tables
    width      the largest number of vertices that one table joins
    pattern    the structure of the costs
    """

    steps: list[_Elimination]
    recipes: dict[int, tuple[list[_Table], tuple[int, ...]]]
    arrays: dict[int, Floats]
    constant: float
    work: float
    entries: float
    width: int
    pattern: object = None

    @property
    def quick(self) -> bool:
        """Whether it is so little work that no options need to be ruled out first."""
        return self.work <= MUCH_WORK and self.entries <= MANY_ENTRIES

    @property
    def too_much(self) -> bool:
        """Whether its tables are too much work to compute, or too much memory to keep."""
        return self.work > 4 * MUCH_WORK or self.entries > MANY_ENTRIES


@dataclass(frozen=True)
class _Given:
    """The tables that costs consist of: each with its symbol, the numbers of each symbol, and the cost of the vertices
    with one option among themselves. `pattern`: all of that but the numbers."""

    tables: list[_Table]
    arrays: dict[int, Floats]
    constant: float
    pattern: object


def _given(costs: Costs) -> _Given:
    sizes = [len(unary) for unary in costs.unary]
    symbols: dict[int, int] = {}
    tables, arrays, constant = [], dict[int, Floats](), 0.0
    for scope, array in (*(((vertex,), unary) for vertex, unary in enumerate(costs.unary)), *costs.pairs.items()):
        open_ones = tuple(vertex for vertex in scope if sizes[vertex] > 1)
        if not open_ones:  # a vertex with one option has no choice, and joins nothing
            constant += float(array.sum())
            continue
        symbol = symbols.setdefault(id(array), len(symbols))
        arrays[symbol] = array if open_ones == scope else array.reshape([sizes[vertex] for vertex in open_ones])
        tables.append(_Table(open_ones, symbol))
    return _Given(tables, arrays, constant, (tuple(sizes), tuple((table.scope, table.symbol) for table in tables)))


def order_like(order: EliminationOrder, costs: Costs) -> EliminationOrder | None:
    """`order` for other costs of the same structure; None if the structure differs."""
    given = _given(costs)
    return replace(order, arrays=given.arrays, constant=given.constant) if given.pattern == order.pattern else None


def elimination_order(costs: Costs, table_limit: float = math.inf, give_up: float = math.inf) -> EliminationOrder:
    """The elimination order, which depends on the structure and not on the numbers. Once its work exceeds `give_up` it
    stops, with infinite work."""
    sizes = [len(unary) for unary in costs.unary]
    given, live = _given(costs), _Live(sizes)
    symbols: dict[object, int] = {("given", symbol): symbol for symbol in given.arrays}
    for table in given.tables:
        live.add(table)
    steps: list[_Elimination] = []
    recipes: dict[int, tuple[list[_Table], tuple[int, ...]]] = {}
    work, entries, width = 0.0, 0.0, 0
    while (vertex := live.next()) is not None:
        bucket = live.take(vertex)
        left = []
        for group in _mini_buckets(bucket, vertex, sizes, table_limit):
            scope = tuple(sorted({v for table in group for v in table.scope} - {vertex}))
            joint = (*scope, vertex)
            seats = {v: i for i, v in enumerate(joint)}
            width = max(width, len(joint))
            made_of = tuple(sorted((tuple(seats[v] for v in table.scope), table.symbol) for table in group))
            symbol = symbols.setdefault(made_of, len(symbols))
            if symbol not in recipes:
                recipes[symbol] = group, joint
                work += _product(sizes, joint)
                entries += _product(sizes, scope)
            left.append(_Table(scope, symbol))
            if scope:
                live.add(left[-1])
        steps.append(_Elimination(vertex, bucket, left))
        if work > give_up:
            work = math.inf
            break
    return EliminationOrder(steps, recipes, given.arrays, given.constant, work, entries, width, given.pattern)


def affordable(costs: Costs, order: EliminationOrder) -> EliminationOrder:
    """`order`, or if it is too much work, one with the largest limit on tables that can all be kept; its plan may not
    be the best."""
    for limit in SMALL_TABLES:
        if not order.too_much:
            break
        order = elimination_order(costs, limit)
    return order


def _product(sizes: list[int], vertices: Iterable[int]) -> float:
    """The number of joint choices of the vertices; inf where a float overflows."""
    return math.prod(float(sizes[v]) for v in vertices)


def eliminate(costs: Costs, table_limit: float = TABLE_LIMIT) -> Found:
    """Find the minimum by min-sum elimination: `dynamic_programming` on numbers.

    Tables computed from the same arrays in the same way are computed once, so that a repeated block costs one block and
    the logarithm of the number of repetitions."""
    return eliminate_in(costs, elimination_order(costs, table_limit))


def eliminate_in(costs: Costs, order: EliminationOrder) -> Found:
    """Compute the tables of `order`, then the options from its end to its beginning."""
    sizes = [len(unary) for unary in costs.unary]
    values = dict(order.arrays)
    for symbol, (group, joint) in order.recipes.items():
        values[symbol] = _least([(table.scope, values[table.symbol]) for table in group], joint, sizes)
    ends = [table for step in order.steps for table in step.left if not table.scope]
    bound = order.constant + sum(float(values[table.symbol]) for table in ends)
    choice = [0] * len(sizes)
    for step in reversed(order.steps):
        total = np.zeros(sizes[step.vertex])
        for table in step.bucket:
            index = tuple(slice(None) if v == step.vertex else choice[v] for v in table.scope)
            total = total + values[table.symbol][index]
        choice[step.vertex] = int(np.argmin(total))
    return Found(tuple(choice), costs.of(tuple(choice)), bound, order.width)


class _Live:
    """The tables that are left during elimination, and the choice of the next vertex.

    Vertices that look like others (by the arrays of their tables) are eliminated first, all that look alike one after
    the other, so that every copy of a repeated block is eliminated in the same way before its surroundings make the
    copies differ. In a chain of equal vertices every other one is eliminated, which leaves a chain of equal vertices.
    Otherwise the vertex with the smallest joint table is next.
    """

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = [math.log2(max(size, 1)) for size in sizes]
        self._tables: list[dict[_Table, None]] = [{} for _ in sizes]
        self._looks = [0] * len(sizes)  # a sum of hashes, so that tables can be added and taken away
        self._alike: dict[int, set[int]] = {}
        self._gone = [False] * len(sizes)
        self._changed: set[int] = set()
        self._heap: list[tuple[bool, float, int]] = []
        self._queue: deque[tuple[int, int]] = deque()  # vertices that looked alike, and how they looked

    def add(self, table: _Table) -> None:
        for vertex in table.scope:
            self._tables[vertex][table] = None
        self._note(table, 1)

    def _note(self, table: _Table, sign: int) -> None:
        for place, vertex in enumerate(table.scope):
            before = self._looks[vertex]
            if before in self._alike:
                self._alike[before].discard(vertex)
            self._looks[vertex] = before + sign * hash((table.symbol, place, len(table.scope)))
            self._changed.add(vertex)

    def _rank(self, vertex: int) -> tuple[bool, float, int]:
        near = {v for table in self._tables[vertex] for v in table.scope}
        cost = round(sum(self._sizes[v] for v in near), 6)
        return len(self._alike[self._looks[vertex]]) < 2 or cost > REPEATED, cost, vertex

    def _refresh(self) -> None:
        """Update the looks of the vertices whose tables changed."""
        changed = {v for v in self._changed if not self._gone[v]}
        self._changed = set()
        for vertex in changed:
            self._alike.setdefault(self._looks[vertex], set()).add(vertex)
        for vertex in list(changed):
            alike = self._alike[self._looks[vertex]]
            if len(alike) == 2:  # the other one was alone so far
                changed |= alike
        for vertex in changed:
            heappush(self._heap, self._rank(vertex))

    def next(self) -> int | None:
        """The vertex to eliminate next, or None if none is left."""
        while self._queue:
            vertex, look = self._queue.popleft()
            if not self._gone[vertex] and self._looks[vertex] == look:
                return vertex
        self._refresh()
        while self._heap:
            rank = heappop(self._heap)
            vertex = rank[-1]
            if self._gone[vertex]:
                continue
            if rank == (now := self._rank(vertex)):
                if not rank[0]:
                    look = self._looks[vertex]
                    self._queue.extend((other, look) for other in sorted(self._alike[look] - {vertex}))
                return vertex
            heappush(self._heap, now)
        return None

    def take(self, vertex: int) -> list[_Table]:
        """Remove `vertex` and return its tables."""
        tables = list(self._tables[vertex])
        self._gone[vertex] = True
        self._alike.get(self._looks[vertex], set()).discard(vertex)
        for table in tables:
            self._note(table, -1)
            for other in table.scope:
                self._tables[other].pop(table, None)
        return tables


def _mini_buckets(tables: list[_Table], vertex: int, sizes: list[int], limit: float) -> list[list[_Table]]:
    """The tables of one bucket in groups whose joint table stays within `limit`; one group where it fits."""
    everything = {vertex}.union(*(table.scope for table in tables))
    if _product(sizes, everything) <= limit:
        return [tables]
    groups: list[tuple[set[int], list[_Table]]] = []
    for table in sorted(tables, key=lambda t: -_product(sizes, t.scope)):
        for scope, members in groups:
            if _product(sizes, scope | set(table.scope)) <= limit:
                scope.update(table.scope)
                members.append(table)
                break
        else:
            groups.append(({vertex, *table.scope}, [table]))
    return [members for _, members in groups]


def _least(tables: list[tuple[tuple[int, ...], Floats]], joint: tuple[int, ...], sizes: list[int]) -> Floats:
    """The sum of `tables` over the options of `joint`, minimised over its last vertex: in slabs that stay in the cache,
    with that vertex first, so that the minimum is taken over whole rows at a time."""
    *scope, last = joint
    extents, many = [sizes[v] for v in scope], sizes[last]
    views = []  # each with the dims of the scope, then the last vertex
    for own, values in tables:
        seats = [joint.index(v) for v in own]
        view = values.transpose(sorted(range(len(own)), key=seats.__getitem__))
        views.append(view.reshape([sizes[v] if v in own else 1 for v in joint]))
    outer = next((i for i in range(len(scope)) if many * math.prod(extents[i:]) <= SLAB), len(scope))
    fixed: Floats = np.zeros((1,) * (len(joint) - outer))  # what does not change from slab to slab
    varying = []
    for view in sorted(views, key=lambda view: view.size):
        if all(n == 1 for n in view.shape[:outer]):
            fixed = fixed + np.moveaxis(view.reshape(view.shape[outer:]), -1, 0)
        else:
            varying.append(np.ascontiguousarray(np.moveaxis(view, -1, outer)))  # each slab is one piece
    least = np.empty(extents)
    if outer == 0:
        slab = np.empty((many, *extents))
        np.copyto(slab, fixed)
        slab.min(axis=0, out=least)
        return least
    rows_of = max(SLAB // (many * math.prod(extents[outer:])), 1)  # rows of the dim before that go together
    slab = np.empty((min(rows_of, extents[outer - 1]), many, *extents[outer:]))
    for index in np.ndindex(*extents[: outer - 1]):
        for start in range(0, extents[outer - 1], rows_of):
            rows = slice(start, min(start + rows_of, extents[outer - 1]))
            here = slab[: rows.stop - rows.start]
            np.copyto(here, fixed)
            for view in varying:
                part = view[tuple(i if n > 1 else 0 for i, n in zip(index, view.shape, strict=False))]
                here += part[rows] if part.shape[0] > 1 else part
            here.min(axis=1, out=least[(*index, rows)])
    return least
