"""The exact search when there are too many pairs of options to write out, as on a mesh of four axes.

For the three operators of __init__.py (costs: a 1, 0; b 3, 2; c 0, 6; 5 if a and b differ, 4 if b and c do), c has one
neighbour and is merged into it, and then so is b:

    c into b     b=0: 3 + min(0 + 0, 4 + 6) = 3      b=1: 2 + min(4 + 0, 0 + 6) = 6
    b into a     a=0: 1 + min(0 + 3, 5 + 6) = 4      a=1: 0 + min(5 + 3, 0 + 6) = 6
    read back    a costs (4, 6) and takes 0; so b takes 0 (3 < 11), and c takes 0

If vertices have more neighbours, a network is left, whose options messages rule out.

Costs of edges stay conversions, and a message is a shortest path on the grid of layouts (narrow.py). Vertices with one
neighbour, such as most parameters, are merged into it first, so they need no messages. The plan that the messages
suggest is improved by induced forests (as in forests.py, but by messages). Once few options are left, the costs of the
best ones are written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...strategy.basics.blocks import tell
from ..cost.conversion import Floats, Mask
from .eliminate import eliminate_in, elimination_order
from .forests import forest
from .narrow import ROUND, SWEEPS, Narrowing
from .network import Between, Converting, Costs, Found, Matrix, Network, among
from .visits import propagate

BEST = 48  # options of each vertex that are written out to find a plan, once at most LEFT are left on average
LEFT = 500
FEW_PAIRS = 1e6  # pairs of options left at which narrowing may stop: writing out a row is a shortest path too
LITTLE_WORK = 3e8  # sums of an elimination that may run every round
HARDLY = 0.97  # narrowing stops if more than this share of the options is left after a round


def optimum_of_many(
    network: Network,
    start: Callable[[], tuple[int, ...]],
    below: float,
    few: Callable[[int], bool],
    optimum: Callable[[Costs, tuple[int, ...]], Found],
) -> Found:
    """The optimum of `network`, proven, or a plan and a bound; cost inf if no plan was found.

    start     returns a plan, in case the first one found is impossible
    below     as for `search`
    few       whether this many pairs of options may be written out
    optimum   the best plan by written-out costs, given a plan
    """
    trimmed = _trimmed(network)
    known = propagate(trimmed.network, [0])
    if math.isinf(known.cost):
        whole = start()
        known = replace(known, choice=tuple(whole[v] for v in trimmed.vertices), cost=network.of(whole))
        if math.isinf(known.cost):
            return replace(known, choice=whole)
    known, rest = _narrowed(trimmed.network, known, below)
    bound, width = rest.bound, 1
    if rest.bound < below and few(rest.pairs):
        every = [np.ones(len(kept), dtype=bool) for kept in rest.kept]
        found = optimum(_written(rest, every), among(rest.kept, known.choice))
        bound, width = max(rest.bound, min(found.bound, rest.upper)), found.width
        if found.cost < known.cost:
            known = replace(known, choice=rest.original(found.choice), cost=found.cost)
    return Found(trimmed.whole(known.choice), known.cost, min(bound, known.cost), width)


@dataclass(frozen=True)
class _Leaf:
    """A vertex merged into its neighbour: the costs of its options, the neighbour, and the costs between them, in which
    the leaf is on `side`."""

    vertex: int
    unary: Floats
    neighbour: int
    between: Between
    side: int


@dataclass(frozen=True)
class _Trimmed:
    """A network without its leaves, whose minimal costs are added to those of their neighbours.

    vertices   the number of each vertex in the whole network
    leaves     the merged vertices, in order
    """

    network: Network
    vertices: tuple[int, ...]
    leaves: tuple[_Leaf, ...]

    def whole(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice of the whole network that extends `choice`."""
        chosen = dict(zip(self.vertices, choice, strict=True))
        for leaf in reversed(self.leaves):
            costs = leaf.unary + leaf.between.with_option(chosen[leaf.neighbour], 1 - leaf.side)
            chosen[leaf.vertex] = int(np.argmin(costs))
        return tuple(chosen[v] for v in range(len(chosen)))


def _trimmed(network: Network) -> _Trimmed:
    unary = list(network.unary)
    near: list[dict[int, tuple[Between, int]]] = [{} for _ in unary]
    for (a, b), between in network.edges:
        near[a][b], near[b][a] = (between, 0), (between, 1)
    leaves: list[_Leaf] = []
    ready = [v for v in range(len(unary)) if len(near[v]) == 1]
    while ready:
        vertex = ready.pop()
        if len(near[vertex]) != 1:  # its neighbour was a leaf, too
            continue
        ((other, (between, side)),) = near[vertex].items()
        leaves.append(_Leaf(vertex, unary[vertex], other, between, side))
        unary[other] = unary[other] + between.least(unary[vertex], side)
        near[vertex].clear()
        del near[other][vertex]
        if len(near[other]) == 1:
            ready.append(other)
    gone = {leaf.vertex for leaf in leaves}
    left = tuple(v for v in range(len(unary)) if v not in gone)
    seats = {v: i for i, v in enumerate(left)}
    edges = tuple(((seats[a], seats[b]), c) for (a, b), c in network.edges if a in seats and b in seats)
    return _Trimmed(Network(tuple(unary[v] for v in left), edges), left, tuple(leaves))


def _narrowed(network: Network, known: Found, below: float) -> tuple[Found, Narrowing]:
    """The best plan found, and the options that a cheaper one may take."""
    narrowing = Narrowing(network.at_most(2 * known.cost), min(known.cost, below))
    left, random = narrowing.left, np.random.default_rng(0)
    for sweep in range(SWEEPS):
        narrowing.sweep(forward=sweep % 2 == 0)
        tell(narrowing.upper, narrowing.bound)
        if narrowing.bound >= narrowing.upper * (1 - 1e-9):
            break
        if sweep % ROUND == ROUND - 1:
            narrowing.shrink()
            few = narrowing.left <= LEFT * len(network.unary)
            choice = _best_of_few(narrowing) if few else _suggested(network, narrowing, random)
            if choice is not None and (cost := network.of(choice)) < known.cost:
                known = replace(known, choice=choice, cost=cost)
                narrowing.upper = min(narrowing.upper, cost)
            if narrowing.pairs <= FEW_PAIRS or (sweep > 2 * ROUND and narrowing.left > HARDLY * left):
                break
            left = narrowing.left
    narrowing.shrink()
    return known, narrowing


def _suggested(network: Network, narrowing: Narrowing, random: np.random.Generator) -> tuple[int, ...]:
    """The plan of the options that cost least by the messages, improved by an induced forest."""
    choice = [int(kept[worth.argmin()]) for kept, worth in zip(narrowing.kept, narrowing.worth, strict=True)]
    return tuple(improved(network, choice, random))


def improved(network: Network, choice: Sequence[int], random: np.random.Generator) -> list[int]:
    """`choice` with the best options of one random induced forest; it costs no more."""
    near: list[dict[int, tuple[Between, int]]] = [{} for _ in network.unary]
    for (a, b), between in network.edges:
        near[a][b], near[b][a] = (between, 0), (between, 1)
    parents, order = forest(near, random)
    heights: dict[int, Floats] = {}
    for v in order:
        heights[v] = network.unary[v]
        for other, (between, side) in near[v].items():
            if other not in parents:
                heights[v] = heights[v] + between.with_option(choice[other], 1 - side)
    for v in reversed(order):
        if (parent := parents[v]) >= 0:
            between, side = near[v][parent]
            heights[parent] = heights[parent] + between.least(heights[v], side)
    now = list(choice)
    for v in order:
        height = heights[v]
        if (parent := parents[v]) >= 0:
            between, side = near[v][parent]
            height = height + between.with_option(now[parent], 1 - side)
        now[v] = int(height.argmin())
    return now


def _best_of_few(narrowing: Narrowing) -> tuple[int, ...] | None:
    """The best plan among the BEST options of each vertex with the lowest bounds; None if finding it is much work."""
    rows: list[Mask] = []
    for worth in narrowing.worth:
        rows.append(np.zeros(len(worth), dtype=bool))
        rows[-1][np.argsort(worth, kind="stable")[:BEST]] = True
    costs = _written(narrowing, rows)
    order = elimination_order(costs)
    if order.work > LITTLE_WORK:
        return None
    choice = eliminate_in(costs, order).choice
    return tuple(int(kept[row][c]) for kept, row, c in zip(narrowing.kept, rows, choice, strict=True))


def _written(narrowing: Narrowing, rows: Sequence[Mask]) -> Costs:
    """The costs of some of the options that are left, written out; equal costs are one array."""
    shared: dict[object, Floats] = {}
    pairs: dict[tuple[int, int], Floats] = {}
    for edge in narrowing.edges:
        a, b = edge.ends
        between = edge.costs.take(rows[a], rows[b])
        pairs[a, b] = _numbers(between, shared)
    return Costs(tuple(unary[row] for unary, row in zip(narrowing.unary, rows, strict=True)), pairs)


def _numbers(between: Between, shared: dict[object, Floats]) -> Floats:
    if isinstance(between, Matrix):
        return between.costs
    assert isinstance(between, Converting)
    key = id(between.table), between.rows.tobytes(), between.columns.tobytes()
    if key not in shared:
        different, places = np.unique(between.rows, return_inverse=True)
        costs = between.table.rows(different.tolist())[:, between.columns][places]
        shared[key] = np.minimum(costs, between.most)
    return shared[key]
