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
from collections.abc import Mapping
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np

from ..strategy.choice import Choice
from ..strategy.errors import VerifyError
from .problem import Floats, SearchProblem, VertexKind

TABLE_LIMIT = 2**24  # entries of one table: 128 MiB


class SearchMode(Choice):
    """How a plan is searched for."""

    SHARDING_PROPAGATION = "sharding_propagation"
    DYNAMIC_PROGRAMMING = "dynamic_programming"
    RECURSIVE_PROGRAMMING = "recursive_programming"


@dataclass(frozen=True)
class Solution:
    """One option per vertex, its cost, and a proven lower bound on the cost of every plan.

    `width`: the most vertices that one table of the search joined. `proven`: the plan is optimal.
    """

    choice: tuple[int, ...]
    cost: float
    bound: float
    width: int

    @property
    def proven(self) -> bool:
        return self.cost - self.bound <= 1e-9 * max(abs(self.cost), 1e-12)


def search(problem: SearchProblem, mode: SearchMode) -> Solution:
    """The plan that `mode` finds. Its cost is that of the whole problem, whatever the mode looked at."""
    match mode:
        case SearchMode.DYNAMIC_PROGRAMMING:
            return dynamic_programming(problem)
        case SearchMode.SHARDING_PROPAGATION:
            return sharding_propagation(problem)
        case SearchMode.RECURSIVE_PROGRAMMING:
            return recursive_programming(problem)


@dataclass(frozen=True)
class Costs:
    """A problem as numbers: `unary[v][i]` is the cost of option i of vertex v, and `pairs[a, b][i, j]`, with a < b,
    what option i of a and option j of b cost together."""

    unary: tuple[Floats, ...]
    pairs: Mapping[tuple[int, int], Floats]

    def of(self, choice: tuple[int, ...]) -> float:
        """The cost of one option per vertex."""
        alone = sum(float(costs[c]) for costs, c in zip(self.unary, choice, strict=True))
        return alone + sum(float(matrix[choice[a], choice[b]]) for (a, b), matrix in self.pairs.items())


def costs_of(problem: SearchProblem) -> Costs:
    """The numbers of `problem`; those of parallel edges are added up."""
    pairs: dict[tuple[int, int], Floats] = {}
    for edge in problem.edges:
        matrix = edge.matrix(problem.vertices)
        key = (edge.producer, edge.consumer)
        pairs[key] = pairs[key] + matrix if key in pairs else matrix
    return Costs(tuple(v.unary for v in problem.vertices), pairs)


@dataclass(frozen=True)
class _Table:
    """A function of the options of `scope`."""

    scope: tuple[int, ...]
    values: Floats


def dynamic_programming(problem: SearchProblem, table_limit: int = TABLE_LIMIT) -> Solution:
    """The optimum, proven; or, where tables would pass `table_limit` entries, a plan and how far off it may be."""
    return eliminate(costs_of(problem), table_limit)


def eliminate(costs: Costs, table_limit: int = TABLE_LIMIT) -> Solution:
    """Min-sum elimination: `dynamic_programming` on numbers."""
    sizes = [len(unary) for unary in costs.unary]
    buckets: list[list[_Table]] = [[] for _ in sizes]
    order = elimination_order(costs)
    place = {vertex: i for i, vertex in enumerate(order)}

    def file(table: _Table) -> None:
        buckets[min(table.scope, key=place.__getitem__)].append(table)

    for vertex, unary in enumerate(costs.unary):
        file(_Table((vertex,), unary))
    for pair, matrix in costs.pairs.items():
        file(_Table(pair, matrix))
    originals = [list(bucket) for bucket in buckets]
    bound, width = 0.0, 0
    for vertex in order:
        for group in _mini_buckets(buckets[vertex], vertex, sizes, table_limit):
            joined = _join(group, vertex)
            width = max(width, len(joined.scope))
            rest = joined.values.min(axis=-1)
            if joined.scope[:-1]:
                file(_Table(joined.scope[:-1], rest))
            else:
                bound += float(rest)
    choice = [0] * len(sizes)
    for vertex in reversed(order):
        tables = buckets[vertex] if not math.isinf(bound) else originals[vertex]
        total = np.zeros(sizes[vertex])
        for table in tables:
            total = total + _slice(table, vertex, choice)
        choice[vertex] = int(np.argmin(total))
    return Solution(tuple(choice), costs.of(tuple(choice)), bound, width)


def elimination_order(costs: Costs) -> list[int]:
    """Vertices so that the next to go has the fewest neighbours left, which are then joined (min-degree)."""
    graph = nx.Graph()
    graph.add_nodes_from(range(len(costs.unary)))
    graph.add_edges_from(costs.pairs)
    waiting: dict[int, set[int]] = {}
    for vertex, degree in graph.degree():
        waiting.setdefault(degree, set()).add(vertex)
    order: list[int] = []

    def move(vertex: int, before: int) -> None:
        waiting[before].discard(vertex)
        waiting.setdefault(graph.degree(vertex), set()).add(vertex)

    while len(order) < len(costs.unary):
        least = min(degree for degree, vertices in waiting.items() if vertices)
        vertex = min(waiting[least])
        waiting[least].discard(vertex)
        neighbours = list(graph.neighbors(vertex))
        degrees = {n: graph.degree(n) for n in neighbours}
        graph.add_edges_from((a, b) for i, a in enumerate(neighbours) for b in neighbours[i + 1 :])
        graph.remove_node(vertex)
        for n in neighbours:
            move(n, degrees[n])
        order.append(vertex)
    return order


def _mini_buckets(tables: list[_Table], vertex: int, sizes: list[int], limit: int) -> list[list[_Table]]:
    """The tables of one bucket in groups whose joint table stays within `limit`; one group where it fits."""
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


def _join(tables: list[_Table], vertex: int) -> _Table:
    """The sum of `tables`, with `vertex` as the last axis."""
    scope = (*sorted({v for table in tables for v in table.scope} - {vertex}), vertex)
    total = np.zeros((1,) * len(scope))
    for table in tables:
        order = sorted(range(len(table.scope)), key=lambda i, table=table: scope.index(table.scope[i]))  # type: ignore[misc]
        values = table.values.transpose(order)
        present = set(table.scope)
        total = total + values.reshape([values.shape[_rank(scope, v, present)] if v in present else 1 for v in scope])
    return _Table(scope, total)


def _rank(scope: tuple[int, ...], vertex: int, present: set[int]) -> int:
    return [v for v in scope if v in present].index(vertex)


def _slice(table: _Table, vertex: int, choice: list[int]) -> Floats:
    """The costs of the options of `vertex`, the other vertices of the table being chosen."""
    index = tuple(slice(None) if v == vertex else choice[v] for v in table.scope)
    found: Floats = table.values[index]
    return found


def sharding_propagation(problem: SearchProblem) -> Solution:
    """Breadth-first from the annotated vertices (the inputs, if none is annotated)."""
    annotated = [i for i, v in enumerate(problem.vertices) if v.annotation]
    inputs = [i for i, v in enumerate(problem.vertices) if v.kind is VertexKind.INPUT]
    return propagate(costs_of(problem), annotated or inputs)


def propagate(costs: Costs, sources: list[int]) -> Solution:
    """Breadth-first from `sources`: `sharding_propagation` on numbers."""
    neighbours: list[list[tuple[int, Floats]]] = [[] for _ in costs.unary]
    for (a, b), matrix in costs.pairs.items():
        neighbours[a].append((b, matrix))
        neighbours[b].append((a, matrix.T))
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


def recursive_programming(problem: SearchProblem) -> Solution:
    """Axis by axis: the options that leave later axes whole, given what the earlier axes chose."""
    kept = [list(range(len(v.options))) for v in problem.vertices]
    solution = None
    axes = len(problem.settings.mesh.axes)
    for axis in range(axes):
        narrowed = [_leave_whole(problem, i, options, axis) for i, options in enumerate(kept)]
        part = _restricted(problem, narrowed)
        solution = dynamic_programming(part)
        chosen = [narrowed[i][c] for i, c in enumerate(solution.choice)]
        kept = [_agree(problem, i, options, chosen[i], axis) for i, options in enumerate(kept)]
    assert solution is not None
    found = tuple(chosen)
    return Solution(found, problem.cost(found), -math.inf, solution.width)


def _signature(problem: SearchProblem, vertex: int, option: int, axes: slice) -> tuple[object, ...]:
    o = problem.vertices[vertex].options[option]
    return tuple(layout.placements[axes] for layout in (*o.operands, *o.results))


def _leave_whole(problem: SearchProblem, vertex: int, options: list[int], axis: int) -> list[int]:
    """Of `options`, those that use the least of the axes after `axis` (none, unless annotated)."""

    def later(option: int) -> int:
        o = problem.vertices[vertex].options[option]
        return sum(str(p) != "R" for layout in (*o.operands, *o.results) for p in layout.placements[axis + 1 :])

    least: dict[tuple[object, ...], tuple[int, int]] = {}
    for option in options:
        key = _signature(problem, vertex, option, slice(0, axis + 1))
        least[key] = min(least.get(key, (later(option), option)), (later(option), option))
    return [option for _, option in least.values()]


def _agree(problem: SearchProblem, vertex: int, options: list[int], chosen: int, axis: int) -> list[int]:
    wanted = _signature(problem, vertex, chosen, slice(0, axis + 1))
    return [o for o in options if _signature(problem, vertex, o, slice(0, axis + 1)) == wanted]


def _restricted(problem: SearchProblem, kept: list[list[int]]) -> SearchProblem:
    vertices = tuple(
        replace(
            v,
            options=tuple(v.options[i] for i in keep),
            unary=v.unary[keep],
            seconds=v.seconds[keep],
            held=v.held[keep],
        )
        for v, keep in zip(problem.vertices, kept, strict=True)
    )
    return replace(problem, vertices=vertices)


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
