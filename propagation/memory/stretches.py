"""Stretches of a graph: the backward recomputes one stretch at a time.

In a block of three operators the third reads the results of both others, as the addition of a residual does:

    after operator         1    2    3
    values that cross      1    2    1

A graph of many such blocks is cut after operators 1 or 3, where one value is kept, and not after 2.

A recomputed value is held from the first operator of the backward that reads it, or is recomputed from it, to the last.
If everything were recomputed from the inputs alone, all values would be held at once. So the operators, in their order,
are cut where few values cross, and the crossing values are kept: then the values of one stretch at a time are held
again. In torch.utils.checkpoint users choose these places.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..graph.nodes import region_of
from ..problem.problem import SearchProblem, VertexKind

SHORTEST, LONGEST = 10, 64  # vertices of a stretch: a block of a network has dozens


def stretches_of(problem: SearchProblem, shortest: int = SHORTEST) -> tuple[int, ...]:
    """The number of each vertex's stretch, ascending. Inputs are in the stretch that first reads them, so that nothing
    is kept for them; no call of torch.utils.checkpoint is cut. `shortest`: the fewest vertices of a stretch."""
    count = len(problem.vertices)
    change = [0] * (count + 1)
    last = list(range(count))
    first = [count] * count
    for edge in problem.edges:
        last[edge.producer] = max(last[edge.producer], edge.consumer)
        first[edge.producer] = min(first[edge.producer], edge.consumer)
    inputs = at_hand(problem)
    for here in range(count):
        if not inputs[here] and last[here] - here <= LONGEST:  # a value with a distant reader crosses every place
            change[here + 1] += 1
            change[last[here] + 1] -= 1
    crossing = list(itertools.accumulate(change[:-1]))
    # a hub stays with its producer
    may = [vertex.kind is not VertexKind.HUB for vertex in problem.vertices]
    for start, stop in _regions(problem):
        may[start + 1 : stop + 1] = [False] * (stop - start)
    begin = inputs.index(False) if False in inputs else count
    starts = _cuts(crossing, may, begin, shortest)
    numbers = [0] * count
    for number, (start, stop) in enumerate(itertools.pairwise([*starts, count])):
        numbers[start:stop] = [number] * (stop - start)
    for here in range(count):
        if inputs[here] and first[here] < count:
            numbers[here] = numbers[first[here]]
    return tuple(numbers)


def at_hand(problem: SearchProblem) -> list[bool]:
    """Whether each vertex is an input or the hub of one, which can always be read."""
    inputs = [vertex.kind is VertexKind.INPUT for vertex in problem.vertices]
    for edge in problem.edges:
        if problem.vertices[edge.consumer].kind is VertexKind.HUB and inputs[edge.producer]:
            inputs[edge.consumer] = True
    return inputs


def _cuts(crossing: Sequence[int], may: Sequence[bool], begin: int, shortest: int) -> list[int]:
    """Where stretches start: each next one where the fewest values cross, among the near places where it `may`, or else
    at the first such place behind them."""
    starts = [begin]
    while True:
        places = [here for here in range(starts[-1] + shortest, len(crossing) - shortest + 1) if may[here]]
        near = [here for here in places if here <= starts[-1] + LONGEST]
        if not places:
            return starts
        starts.append(min(near, key=crossing.__getitem__) if near else places[0])


def _regions(problem: SearchProblem) -> list[tuple[int, int]]:
    """The first and the last vertex of each call of torch.utils.checkpoint."""
    spans: dict[int, tuple[int, int]] = {}
    for here, vertex in enumerate(problem.vertices):
        if vertex.kind is VertexKind.OPERATOR and (region := region_of(vertex.node)) is not None:
            start, _ = spans.get(region, (here, here))
            spans[region] = start, here
    return list(spans.values())
