"""A plan by visits: each vertex takes its cheapest option given its neighbours.

For the three operators of __init__.py (costs: a 1, 0; b 3, 2; c 0, 6; 5 if a and b differ, 4 if b and c do), from a:

    propagate    a takes 1 (0 < 1); given that, b takes 1 (2 + 0 < 3 + 5), and c takes 0 (0 + 4 < 6 + 0): cost 6
    revisit      a=0 with b=0 costs 1 + min(0 + 3 + 0, 5 + 2 + 4) = 4, which is less than 6: the plan is now 0, 0, 0.
                 Neither gains alone: 1, 0, 0 costs 8, and 0, 1, 0 costs 12

`propagate` visits each vertex once, breadth-first; `revisit` then changes a plan as long as its cost falls.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np

from ..cost.conversion import Floats
from .network import Between, Found, Network


def propagate(network: Network, sources: list[int], fixed: Mapping[int, int] | None = None) -> Found:
    """Go breadth-first from `sources`: each vertex takes its cheapest option given its visited neighbours, or its
    option in `fixed`."""
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
            # an unvisited neighbour will take its best option
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
    return Found(plan, network.of(plan), -math.inf, 1)


def revisit(network: Network, found: Found) -> Found:
    """`found`, improved by revisiting vertices as long as the cost falls. A vertex may change together with its
    neighbours, each of which then takes its best option: a change of one vertex alone seldom pays."""
    neighbours = _neighbours(network)
    near = [{other for other, _, _ in edges} for edges in neighbours]
    choice = list(found.choice)

    def costs_beside(vertex: int, but: int) -> Floats:
        """The cost of each option of `vertex`, without its edge to `but`, given the options of its other neighbours."""
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
    return Found(plan, network.of(plan), -math.inf, 1)


def _neighbours(network: Network) -> list[list[tuple[int, Between, int]]]:
    """For each vertex its neighbours, the costs between, and the side that the vertex is on."""
    neighbours: list[list[tuple[int, Between, int]]] = [[] for _ in network.unary]
    for (a, b), between in network.edges:
        neighbours[a].append((b, between, 0))
        neighbours[b].append((a, between, 1))
    return neighbours
