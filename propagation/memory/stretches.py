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
from collections.abc import Iterable, Sequence

from ..graph.nodes import region_of
from ..problem.problem import SearchProblem, VertexKind

SHORTEST, LONGEST = 10, 64  # vertices of a stretch: a block of a network has dozens


def stretches_of(problem: SearchProblem, shortest: int = SHORTEST) -> tuple[int, ...]:
    """The number of each vertex's stretch, ascending. Inputs are in the stretch that first reads them, so that nothing
    is kept for them; no call of torch.utils.checkpoint is cut. `shortest`: the fewest vertices of a stretch."""
    count = len(problem.vertices)
    last = list(range(count))
    first = [count] * count
    for edge in problem.edges:
        last[edge.producer] = max(last[edge.producer], edge.consumer)
        first[edge.producer] = min(first[edge.producer], edge.consumer)
    inputs = at_hand(problem)
    crossing = crossings([(here, last[here]) for here in range(count) if not inputs[here]], count, LONGEST)
    # a hub stays with its producer
    may = [vertex.kind is not VertexKind.HUB for vertex in problem.vertices]
    for start, stop in _regions(problem):
        may[start + 1 : stop + 1] = [False] * (stop - start)
    begin = inputs.index(False) if False in inputs else count
    starts = cuts(crossing, shortest, LONGEST, begin, may)
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


def crossings(values: Iterable[tuple[int, int]], count: int, longest: int) -> list[int]:
    """For each of `count` places, the number of values that are made before it and read at it or behind it; `values`:
    the places of each where it is made, and where it is read last. One that crosses more than `longest` places would
    cross every one, and does not count."""
    change = [0] * (count + 1)
    for made, read in values:
        if read - made <= longest:
            change[made + 1] += 1
            change[read + 1] -= 1
    return list(itertools.accumulate(change[:-1]))


def cuts(
    crossing: Sequence[int], shortest: int, longest: int, begin: int = 0, may: Sequence[bool] | None = None
) -> list[int]:
    """Where stretches start: each next one where the fewest values cross, among the near places where it `may` (None:
    all), or else at the first such place behind them. A place where few values cross (between two layers, the residual)
    wins from wherever the search for it starts, so cuts come to the same places of each layer."""
    starts, stop = [begin], len(crossing) - shortest
    while True:
        far = starts[-1] + longest
        near = [here for here in range(starts[-1] + shortest, min(far, stop) + 1) if may is None or may[here]]
        behind = next((here for here in range(far + 1, stop + 1) if may is None or may[here]), None)
        if near:
            starts.append(min(near, key=crossing.__getitem__))
        elif behind is not None:
            starts.append(behind)
        else:
            return starts


def _regions(problem: SearchProblem) -> list[tuple[int, int]]:
    """The first and the last vertex of each call of torch.utils.checkpoint."""
    spans: dict[int, tuple[int, int]] = {}
    for here, vertex in enumerate(problem.vertices):
        if vertex.kind is VertexKind.OPERATOR and (region := region_of(vertex.node)) is not None:
            start, _ = spans.get(region, (here, here))
            spans[region] = start, here
    return list(spans.values())
