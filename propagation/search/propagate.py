"""sharding_propagation: strategies spread from the annotations, each vertex taking what suits its neighbours.

`propagate` goes breadth-first and looks at each vertex once; `revisit` then changes a plan while that pays, and serves
the exact search too, for a plan to start from.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..cost.conversion import Floats
from .network import Between, Network, network_of
from .problem import Options, SearchProblem, VertexKind
from .solution import Solution


def sharding_propagation(problem: SearchProblem) -> Solution:
    """Breadth-first from the annotated vertices (the inputs, if none is annotated), then revisiting while it pays.

    Several starts are tried, and the cheapest plan stands: from the annotations; from the inputs, so that an
    annotation cannot wreck what it has nothing to do with; and from the inputs split by their leading dim, which is
    data parallelism.
    """
    annotated = [i for i, v in enumerate(problem.vertices) if v.annotation]
    inputs = [i for i, v in enumerate(problem.vertices) if v.kind is VertexKind.INPUT]
    network = network_of(problem)
    leading = {i: _most_split(problem.vertices[i].options) for i in inputs}
    starts = [(annotated, {}), (inputs, {}), (inputs, leading)] if annotated else [(inputs, {}), (inputs, leading)]
    plans = [revisit(network, propagate(network, sources or [0], fixed)) for sources, fixed in starts]
    best = min(plans, key=lambda plan: plan.cost)
    return replace(best, cost=problem.cost(best.choice))


def _most_split(options: Options) -> int:
    """The option of an input that splits its leading dim into the most parts."""
    table = options.tables[1][0]
    return int(np.argmax(table.parts(0)[options.results[0]])) if table else 0


def propagate(network: Network, sources: list[int], fixed: Mapping[int, int] | None = None) -> Solution:
    """Breadth-first from `sources`, each vertex taking its cheapest option given its visited neighbours; those in
    `fixed` take the option that stands there."""
    neighbours = _neighbours(network)
    choice: dict[int, int] = {}
    queue = deque(sources)
    seen = set(queue)
    rest = iter(range(len(network.unary)))
    while len(choice) < len(network.unary):
        if not queue:
            vertex = next(v for v in rest if v not in choice)
            queue.append(vertex)
            seen.add(vertex)
        vertex = queue.popleft()
        total = network.unary[vertex]
        for other, between, side in neighbours[vertex]:
            # an unvisited neighbour will choose what suits it best
            if other in choice:
                total = total + between.with_option(choice[other], 1 - side)
            else:
                total = total + between.least(np.zeros(len(network.unary[other])), 1 - side)
        choice[vertex] = (fixed or {}).get(vertex, int(np.argmin(total)))
        for other, _, _ in neighbours[vertex]:
            if other not in seen:
                seen.add(other)
                queue.append(other)
    plan = tuple(choice[i] for i in range(len(network.unary)))
    return Solution(plan, network.of(plan), -math.inf, 1)


def revisit(network: Network, solution: Solution) -> Solution:
    """`solution`, with every vertex looked at again as long as that pays: it may change together with its neighbours,
    each of which then takes what suits it best (for one vertex alone a change of layout seldom pays)."""
    neighbours = _neighbours(network)
    near = [{other for other, _, _ in edges} for edges in neighbours]
    choice = list(solution.choice)

    def costs_beside(vertex: int, but: int) -> Floats:
        """The cost of each option of `vertex`, its neighbours but one staying as they are."""
        total = network.unary[vertex]
        for other, between, side in neighbours[vertex]:
            if other != but:
                total = total + between.with_option(choice[other], 1 - side)
        return total

    queue = deque(range(len(choice)))
    waiting = set(queue)
    while queue:
        vertex = queue.popleft()
        waiting.discard(vertex)
        # neighbours that are neighbours of each other cannot move at the same time
        moving = {other: costs_beside(other, vertex) for other in near[vertex] if not near[vertex] & near[other]}
        total = network.unary[vertex]
        now = float(total[choice[vertex]])
        for other, between, side in neighbours[vertex]:
            unmoved = between.with_option(choice[other], 1 - side)
            now += float(unmoved[choice[vertex]]) + float(moving[other][choice[other]] if other in moving else 0.0)
            total = total + (between.least(moving[other], 1 - side) if other in moving else unmoved)
        best = int(np.argmin(total))
        if total[best] >= now * (1 - 1e-12):
            continue
        choice[vertex] = best
        for other, between, side in neighbours[vertex]:
            if other in moving:
                choice[other] = int(np.argmin(between.with_option(best, side) + moving[other]))
        for other in {vertex, *near[vertex], *(n for o in near[vertex] for n in near[o])} - waiting:
            queue.append(other)
            waiting.add(other)
    plan = tuple(choice)
    return Solution(plan, network.of(plan), -math.inf, 1)


def _neighbours(network: Network) -> list[list[tuple[int, Between, int]]]:
    """For each vertex its neighbours, what stands between, and on which side of it the vertex is."""
    neighbours: list[list[tuple[int, Between, int]]] = [[] for _ in network.unary]
    for (a, b), between in network.edges:
        neighbours[a].append((b, between, 0))
        neighbours[b].append((a, between, 1))
    return neighbours
