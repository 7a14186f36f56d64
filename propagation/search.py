"""The searches: from a SearchProblem to one option per vertex.

One problem, three ways:

    dynamic_programming    exact: min-sum elimination along a min-degree order of the problem's graph (Dechter,
                           "Bucket elimination", 1999). Where a table would pass `TABLE_LIMIT`, its bucket is split
                           (mini-buckets, Dechter & Rish 2003): the sum of the parts' minima is a lower bound,
                           and the gap to the plan found is reported.
    sharding_propagation   breadth-first from the annotations, each vertex taking its cheapest option given its
                           visited neighbours
    recursive_programming  one mesh axis after another, each solved exactly given the axes before it
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ..strategy.choice import Choice
from ..strategy.errors import StrategyError, VerifyError
from .conversion import Floats
from .problem import Edge, Options, SearchProblem, VertexKind

TABLE_LIMIT = 2**26  # sums that one step of the elimination looks at
SLAB = 2**17  # of them at a time: 1 MiB
REPEATED = 26.0  # log2 of the joint table up to which a vertex that looks like another one goes first


class SearchMode(Choice):
    """How a plan is searched for."""

    SHARDING_PROPAGATION = "sharding_propagation"
    DYNAMIC_PROGRAMMING = "dynamic_programming"
    RECURSIVE_PROGRAMMING = "recursive_programming"


@dataclass(frozen=True)
class Solution:
    """One option per vertex, its cost, and a proven lower bound on the cost of every plan.

    `width`: the most vertices that one table of the search joined. `proven`: the plan is optimal. `attained`: a plan
    that costs the bound is known.
    """

    choice: tuple[int, ...]
    cost: float
    bound: float
    width: int
    attained: bool = False

    @property
    def proven(self) -> bool:
        return self.cost - self.bound <= 1e-9 * max(abs(self.cost), 1e-12)


def search(problem: SearchProblem, mode: SearchMode) -> Solution:
    """The plan that `mode` finds. Its cost is that of the whole problem, whatever the mode looked at, and stands beside
    the bound that the exact search proves.

    Raises StrategyError where no plan keeps to the memory limit of the problem's settings.
    """
    limit = problem.settings.memory_limit
    optimum, price = (dynamic_programming(problem), 0.0) if limit is None else within_memory(problem, limit)
    if mode is SearchMode.DYNAMIC_PROGRAMMING:
        return optimum
    other = sharding_propagation if mode is SearchMode.SHARDING_PROPAGATION else recursive_programming
    found = replace(other(problem, price), bound=optimum.bound, attained=optimum.proven)
    # at the price of memory that suits the optimum, another plan may still hold more
    return found if limit is None or problem.memory(found.choice) <= limit else optimum


@dataclass(frozen=True)
class Costs:
    """A problem as numbers: `unary[v][i]` is the cost of option i of vertex v, and `pairs[a, b][i, j]`, with a < b,
    what option i of a and option j of b cost together. Arrays that are one object are solved once."""

    unary: tuple[Floats, ...]
    pairs: Mapping[tuple[int, int], Floats]

    def of(self, choice: tuple[int, ...]) -> float:
        """The cost of one option per vertex."""
        alone = sum(float(costs[c]) for costs, c in zip(self.unary, choice, strict=True))
        return alone + sum(float(matrix[choice[a], choice[b]]) for (a, b), matrix in self.pairs.items())


def costs_of(problem: SearchProblem, price: float = 0.0) -> Costs:
    """The numbers of `problem`, with `price` for each byte of memory; those of parallel edges are added up. What has
    the same structure is the same array."""
    shared: dict[object, Floats] = {}

    def once(key: object, make: Callable[[], Floats]) -> Floats:
        if key not in shared:
            shared[key] = make()
        return shared[key]

    def alone(options: Options) -> Floats:
        return once(id(options), lambda: options.unary + price * options.memory if price else options.unary)

    parallel: dict[tuple[int, int], list[tuple[object, Edge]]] = {}
    for edge in problem.edges:
        ends = id(problem.vertices[edge.producer].options), id(problem.vertices[edge.consumer].options)
        key = (id(edge.table), *ends, edge.result, edge.operand)
        parallel.setdefault((edge.producer, edge.consumer), []).append((key, edge))
    pairs = {
        ends: once(
            tuple(key for key, _ in edges),
            lambda edges=edges: sum(edge.matrix(problem.vertices) for _, edge in edges),
        )
        for ends, edges in parallel.items()
    }
    return Costs(tuple(alone(v.options) for v in problem.vertices), pairs)


@dataclass(frozen=True, eq=False)
class _Table:
    """A function of the options of `scope`, vertices in ascending order."""

    scope: tuple[int, ...]
    values: Floats


def dynamic_programming(problem: SearchProblem, table_limit: int = TABLE_LIMIT) -> Solution:
    """The optimum, proven; or, where tables would pass `table_limit` entries, a plan and how far off it may be."""
    return eliminate(costs_of(problem), table_limit)


def within_memory(problem: SearchProblem, limit: float) -> tuple[Solution, float]:
    """The cheapest plan found that holds at most `limit` bytes on a device, with a bound on what any such plan costs,
    and the price of a byte that it was found with.

    Lagrange: for any price p of a byte the least of `cost + p * (memory - limit)` is a bound. The best price is where
    the cheapest plan changes from one that fits to one that does not: the price at which the two last found cost the
    same is tried until neither is beaten (Handler & Zang, "A dual algorithm for the constrained shortest path
    problem", 1980).
    """
    free = dynamic_programming(problem)
    if problem.memory(free.choice) <= limit:
        return free, 0.0
    fits = _least_memory(problem, free)
    if problem.memory(fits.choice) > limit:
        raise StrategyError(_too_little(problem, fits, limit))
    above, bound, best_price = free, free.bound, 0.0
    while True:
        price = (fits.cost - above.cost) / (problem.memory(above.choice) - problem.memory(fits.choice))
        if price <= best_price:
            break
        priced = eliminate(costs_of(problem, price))
        found = replace(priced, cost=problem.cost(priced.choice))
        bound, best_price = max(bound, priced.bound - price * limit), price
        held = problem.memory(found.choice)
        now = found.cost + price * held
        if now >= (fits.cost + price * problem.memory(fits.choice)) * (1 - 1e-12):
            break  # neither of the two is beaten: no price gives a higher bound
        if held <= limit:
            fits = found
        else:
            above = found
    return replace(fits, bound=bound, width=free.width), best_price


def _least_memory(problem: SearchProblem, free: Solution) -> Solution:
    """The plan that holds the least on a device; of those, one that costs little."""
    heaviest = sum(float(v.options.memory.max()) for v in problem.vertices)
    price = 1e6 * max(free.cost, 1e-12) / max(heaviest, 1.0)
    priced = eliminate(costs_of(problem, price))
    return replace(priced, cost=problem.cost(priced.choice))


def _too_little(problem: SearchProblem, least: Solution, limit: float) -> str:
    needed = problem.memory(least.choice)
    held = sorted(
        ((float(v.options.memory[c]), v.name) for v, c in zip(problem.vertices, least.choice, strict=True)),
        reverse=True,
    )
    heaviest = ", ".join(f"{name} {size / 1e9:.3g} GB" for size, name in held[:5] if size)
    return (
        f"no plan on the mesh {problem.settings.mesh} holds less than {needed / 1e9:.4g} GB on a device "
        f"(parameters, gradients, optimizer states and activations), and memory_limit is {limit / 1e9:.4g} GB; "
        f"a limit of {needed / 1e9 * 1.001:.4g} GB would do, or more devices. The heaviest: {heaviest}"
    )


def eliminate(costs: Costs, table_limit: int = TABLE_LIMIT) -> Solution:
    """Min-sum elimination: `dynamic_programming` on numbers.

    Tables that were made of the same arrays in the same way are the same table and computed once, so that a block
    that repeats costs one block and the logarithm of how often it does.
    """
    sizes = [len(unary) for unary in costs.unary]
    live = _Live(sizes)
    made: dict[object, tuple[list[_Table], Floats]] = {}
    for vertex, unary in enumerate(costs.unary):
        live.add(_Table((vertex,), unary))
    for pair, matrix in costs.pairs.items():
        live.add(_Table(pair, matrix))
    bound, width = 0.0, 0
    buckets: list[tuple[int, list[_Table]]] = []
    while (vertex := live.next()) is not None:
        bucket = live.take(vertex)
        buckets.append((vertex, bucket))
        for group in _mini_buckets(bucket, vertex, sizes, table_limit):
            scope = tuple(sorted({v for table in group for v in table.scope} - {vertex}))
            joint = (*scope, vertex)
            width = max(width, len(joint))
            seats = {v: i for i, v in enumerate(joint)}
            key = tuple(sorted((tuple(seats[v] for v in table.scope), id(table.values)) for table in group))
            if key not in made:  # the group is kept with it: an id lives as long as its array
                made[key] = group, _least(group, joint, sizes)
            rest = made[key][1]
            if scope:
                live.add(_Table(scope, rest))
            else:
                bound += float(rest)
    choice = [0] * len(sizes)
    for vertex, bucket in reversed(buckets):
        total = np.zeros(sizes[vertex])
        for table in bucket:
            total = total + table.values[tuple(slice(None) if v == vertex else choice[v] for v in table.scope)]
        choice[vertex] = int(np.argmin(total))
    return Solution(tuple(choice), costs.of(tuple(choice)), bound, width)


class _Live:
    """The tables that are left while vertices go one by one, and which vertex goes next.

    First those go that look like others (by the arrays that they are in), and all that look alike one after the other,
    so that a block that repeats is dealt with in the same way everywhere before what lies around it makes its copies
    differ; of a chain of equals every other one goes, and its rest is again a chain of equals. Otherwise the vertex
    goes that leaves the smallest joint table.
    """

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = [math.log2(max(size, 1)) for size in sizes]
        self._tables: list[dict[int, _Table]] = [{} for _ in sizes]
        self._looks = [0] * len(sizes)  # a sum of hashes, so that tables can be added and taken away
        self._alike: dict[int, set[int]] = {}
        self._gone = [False] * len(sizes)
        self._changed: set[int] = set()
        self._heap: list[tuple[bool, float, int]] = []
        self._queue: deque[tuple[int, int]] = deque()  # vertices that looked alike, and how they looked

    def add(self, table: _Table) -> None:
        for vertex in table.scope:
            self._tables[vertex][id(table)] = table
        self._note(table, 1)

    def _note(self, table: _Table, sign: int) -> None:
        for place, vertex in enumerate(table.scope):
            before = self._looks[vertex]
            if before in self._alike:
                self._alike[before].discard(vertex)
            self._looks[vertex] = before + sign * hash((id(table.values), place, len(table.scope)))
            self._changed.add(vertex)

    def _rank(self, vertex: int) -> tuple[bool, float, int]:
        near = {v for table in self._tables[vertex].values() for v in table.scope}
        cost = round(sum(self._sizes[v] for v in near), 6)
        return len(self._alike[self._looks[vertex]]) < 2 or cost > REPEATED, cost, vertex

    def _refresh(self) -> None:
        """Note how the vertices look whose tables changed."""
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
        """The vertex to go next, or None when all are gone."""
        while self._queue:
            vertex, look = self._queue.popleft()
            if not self._gone[vertex] and self._looks[vertex] == look:
                return vertex
        self._refresh()
        while self._heap:
            found = heappop(self._heap)
            vertex = found[-1]
            if self._gone[vertex]:
                continue
            if found == (rank := self._rank(vertex)):
                if not found[0]:
                    look = self._looks[vertex]
                    self._queue.extend((other, look) for other in sorted(self._alike[look] - {vertex}))
                return vertex
            heappush(self._heap, rank)
        return None

    def take(self, vertex: int) -> list[_Table]:
        """The tables of `vertex`, which is then gone."""
        found = list(self._tables[vertex].values())
        self._gone[vertex] = True
        self._alike.get(self._looks[vertex], set()).discard(vertex)
        for table in found:
            self._note(table, -1)
            for other in table.scope:
                self._tables[other].pop(id(table), None)
        return found


def _mini_buckets(tables: list[_Table], vertex: int, sizes: list[int], limit: int) -> list[list[_Table]]:
    """The tables of one bucket in groups whose joint table stays within `limit`; one group where it fits."""
    everything = {vertex}.union(*(table.scope for table in tables))
    if math.prod(sizes[v] for v in everything) <= limit:
        return [tables]
    groups: list[tuple[set[int], list[_Table]]] = []
    for table in sorted(tables, key=lambda t: -t.values.size):
        for scope, members in groups:
            if math.prod(sizes[v] for v in scope | set(table.scope)) <= limit:
                scope.update(table.scope)
                members.append(table)
                break
        else:
            groups.append(({vertex, *table.scope}, [table]))
    return [members for _, members in groups]


def _least(tables: list[_Table], joint: tuple[int, ...], sizes: list[int]) -> Floats:
    """The sum of `tables` over the options of `joint`, its last vertex taking its best option: in slabs that stay in
    the cache."""
    extents = [sizes[v] for v in joint]
    views = []
    for table in tables:
        order = sorted(range(len(table.scope)), key=lambda i, scope=table.scope: joint.index(scope[i]))  # type: ignore[misc]
        present = set(table.scope)
        view = table.values.transpose(order).reshape([sizes[v] if v in present else 1 for v in joint])
        views.append(np.ascontiguousarray(view))
    outer = next(i for i in range(len(joint)) if math.prod(extents[i:]) <= SLAB or i == len(joint) - 1)
    fixed: Floats = np.zeros((1,) * (len(joint) - outer))  # what does not change from slab to slab
    varying = []
    for view in sorted(views, key=lambda view: view.size):
        if all(n == 1 for n in view.shape[:outer]):
            fixed = fixed + view.reshape(view.shape[outer:])
        else:
            varying.append(view)
    found = np.empty(extents[:-1])
    slab = np.empty(extents[outer:])
    for index in np.ndindex(*extents[:outer]):
        before = fixed
        for view in varying:
            np.add(before, view[tuple(i if n > 1 else 0 for i, n in zip(index, view.shape, strict=False))], out=slab)
            before = slab
        if before is fixed:
            np.copyto(slab, fixed)
        found[index] = slab.min(axis=-1)
    return found


def sharding_propagation(problem: SearchProblem, price: float = 0.0) -> Solution:
    """Breadth-first from the annotated vertices (the inputs, if none is annotated), then revisiting while it pays.

    Both orders are tried where something is annotated, from the annotations and from the inputs, and the cheaper plan
    stands: an annotation cannot wreck what it has nothing to do with.
    """
    annotated = [i for i, v in enumerate(problem.vertices) if v.annotation]
    inputs = [i for i, v in enumerate(problem.vertices) if v.kind is VertexKind.INPUT]
    costs = costs_of(problem, price)
    starts = [sources for sources in (annotated, inputs) if sources] or [[0]]
    found = min((revisit(costs, propagate(costs, sources)) for sources in starts), key=lambda found: found.cost)
    return replace(found, cost=problem.cost(found.choice))


def propagate(costs: Costs, sources: list[int]) -> Solution:
    """Breadth-first from `sources`, each vertex taking its cheapest option given its visited neighbours."""
    neighbours = _neighbours(costs)
    choice: dict[int, int] = {}
    queue = deque(sources)
    seen = set(queue)
    rest = iter(range(len(costs.unary)))
    while len(choice) < len(costs.unary):
        if not queue:
            vertex = next(v for v in rest if v not in choice)
            queue.append(vertex)
            seen.add(vertex)
        vertex = queue.popleft()
        total = costs.unary[vertex]
        for other, matrix in neighbours[vertex]:
            # an unvisited neighbour will choose what suits it best
            total = total + (matrix[:, choice[other]] if other in choice else matrix.min(axis=1))
        choice[vertex] = int(np.argmin(total))
        for other, _ in neighbours[vertex]:
            if other not in seen:
                seen.add(other)
                queue.append(other)
    found = tuple(choice[i] for i in range(len(costs.unary)))
    return Solution(found, costs.of(found), -math.inf, 1)


def revisit(costs: Costs, solution: Solution) -> Solution:
    """`solution`, with every vertex looked at again as long as that pays: it may change together with its neighbours,
    each of which then takes what suits it best (for one vertex alone a change of layout seldom pays)."""
    neighbours = _neighbours(costs)
    choice = list(solution.choice)

    def given(vertex: int, but: int) -> Floats:
        """The cost of each option of `vertex`, its neighbours but one staying as they are."""
        total = costs.unary[vertex]
        for other, matrix in neighbours[vertex]:
            if other != but:
                total = total + matrix[:, choice[other]]
        return total

    queue = deque(range(len(choice)))
    waiting = set(queue)
    while queue:
        vertex = queue.popleft()
        waiting.discard(vertex)
        near = {other for other, _ in neighbours[vertex]}
        # neighbours that are neighbours of each other cannot move at the same time
        movable = [(o, m) for o, m in neighbours[vertex] if not near & {n for n, _ in neighbours[o]}]
        still = [(o, m) for o, m in neighbours[vertex] if (o, m) not in movable] if len(movable) < len(near) else []
        fields = [matrix + given(other, vertex) for other, matrix in movable]
        total = costs.unary[vertex] + sum((field.min(axis=1) for field in fields), np.zeros(1))
        total = total + sum((matrix[:, choice[other]] for other, matrix in still), np.zeros(1))
        now = costs.unary[vertex][choice[vertex]] + sum(
            float(field[choice[vertex], choice[other]]) for field, (other, _) in zip(fields, movable, strict=True)
        )
        now += sum(float(matrix[choice[vertex], choice[other]]) for other, matrix in still)
        best = int(np.argmin(total))
        if total[best] >= now - 1e-12 * abs(now) or (math.isinf(now) and math.isinf(total[best])):
            continue
        choice[vertex] = best
        for field, (other, _) in zip(fields, movable, strict=True):
            choice[other] = int(np.argmin(field[best]))
        for other in {vertex, *near, *(n for o in near for n, _ in neighbours[o])} - waiting:
            queue.append(other)
            waiting.add(other)
    found = tuple(choice)
    return Solution(found, costs.of(found), -math.inf, 1)


def _neighbours(costs: Costs) -> list[list[tuple[int, Floats]]]:
    """For each vertex its neighbours, with the costs [its option, the neighbour's]."""
    neighbours: list[list[tuple[int, Floats]]] = [[] for _ in costs.unary]
    for (a, b), matrix in costs.pairs.items():
        neighbours[a].append((b, matrix))
        neighbours[b].append((a, matrix.T))
    return neighbours


def recursive_programming(problem: SearchProblem, price: float = 0.0) -> Solution:
    """Axis by axis: the options that leave later axes whole, given what the earlier axes chose."""
    kept = [np.arange(len(v.options)) for v in problem.vertices]
    chosen: list[int] = []
    width = 0
    for axis in range(len(problem.settings.mesh.axes)):
        part = _Axes(problem, axis)
        narrowed = [part.leave_whole(i, rows) for i, rows in enumerate(kept)]
        solution = eliminate(costs_of(restricted(problem, narrowed), price))
        chosen = [int(rows[c]) for rows, c in zip(narrowed, solution.choice, strict=True)]
        kept = [part.agree(i, rows, c) for i, (rows, c) in enumerate(zip(kept, chosen, strict=True))]
        width = max(width, solution.width)
    found = tuple(chosen)
    return Solution(found, problem.cost(found), -math.inf, width)


class _Axes:
    """The options of a problem as seen on the axes up to `axis`; those of vertices that share options are one."""

    def __init__(self, problem: SearchProblem, axis: int) -> None:
        self.problem, self.axis = problem, axis
        self._seen: dict[int, tuple[NDArray[np.intp], NDArray[np.intp]]] = {}

    def _signatures(self, vertex: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """For every option a number that says what it does up to `axis`, and how much it uses later axes."""
        options = self.problem.vertices[vertex].options
        if id(options) not in self._seen:
            sides = [("operands", i) for i in range(len(options.operands))]
            sides += [("results", i) for i in range(len(options.results))]
            placed = [(options.placed(of, i), options.whole(of, i)) for of, i in sides]
            columns = [states[:, : self.axis + 1] for states, _ in placed]
            later = sum((states[:, self.axis + 1 :] != whole for states, whole in placed), np.zeros((len(options), 1)))
            _, names = np.unique(np.concatenate(columns, axis=1), axis=0, return_inverse=True)
            self._seen[id(options)] = names.reshape(-1), later.sum(axis=1).astype(np.intp)
        return self._seen[id(options)]

    def leave_whole(self, vertex: int, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Of `rows`, for each thing to do up to `axis`, the one that uses the least of later axes (none, unless
        annotated)."""
        names, later = self._signatures(vertex)
        order = rows[np.lexsort((rows, later[rows]))]
        _, first = np.unique(names[order], return_index=True)
        return np.sort(order[first])

    def agree(self, vertex: int, rows: NDArray[np.intp], chosen: int) -> NDArray[np.intp]:
        """Of `rows`, those that do what `chosen` does up to `axis`."""
        names, _ = self._signatures(vertex)
        return rows[names[rows] == names[chosen]]


def restricted(problem: SearchProblem, kept: list[NDArray[np.intp]]) -> SearchProblem:
    """`problem` with only some options of each vertex, by number."""
    shared: dict[tuple[int, bytes], Options] = {}
    vertices = []
    for vertex, rows in zip(problem.vertices, kept, strict=True):
        key = (id(vertex.options), rows.tobytes())
        if key not in shared:
            shared[key] = vertex.options.take(rows)
        vertices.append(replace(vertex, options=shared[key]))
    return replace(problem, vertices=tuple(vertices))


def verify_solution(problem: SearchProblem, solution: Solution) -> Solution:
    """Raise VerifyError unless every vertex has one of its options, at the cost that is claimed."""
    if len(solution.choice) != len(problem.vertices):
        raise VerifyError(f"the plan has {len(solution.choice)} choices for {len(problem.vertices)} vertices")
    for vertex, choice in zip(problem.vertices, solution.choice, strict=True):
        if not 0 <= choice < len(vertex.options):
            raise VerifyError(f"{vertex.name} has no option {choice}")
    cost = problem.cost(solution.choice)
    if not math.isfinite(cost) or abs(cost - solution.cost) > 1e-9 * max(abs(cost), 1e-12):
        raise VerifyError(f"the plan costs {cost}, not {solution.cost}")
    return solution
