"""The least of any sum of costs by vertex and by pair of vertices: `least`.

Of the three operators of the room's page reductions leave nothing: the least is their constant, 4. Of two such graphs
that nothing connects each is looked at by itself: 4 + 4.

Reductions (reduce.py) leave the core; what of it hangs together is eliminated where that is little work, and otherwise
divided (branch.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import networkx

from .branch import SUMS, Best, branched, grounded
from .eliminate import MANY_ENTRIES, eliminate_in, elimination_order
from .found import Choice, Found
from .network import Costs
from .reduce import reduced

AT_ONCE, EACH = 2e7, 1.5e5  # sums of an elimination before which nothing else is tried; for each vertex


def least(costs: Costs, deadline: float = math.inf, nodes: float = math.inf, known: Choice | None = None) -> Found:
    """The cheapest choice that is found, and a bound. Costs may be negative, and inf for what may not be chosen.

    deadline   on the monotonic clock, when the search ends
    nodes      of branch and bound that are looked at in each part that nothing connects to the others
    known      a choice to start from

    Where no finite choice was found it is empty and costs inf, and the bound is inf where there is none, -inf where
    that is open. Raises StrategyError where reductions show that there is none.
    """
    rest = reduced(costs)
    inside = rest.part(known) if known else None
    choice, bound = [0] * len(rest.vertices), rest.constant
    parts = _parts(rest.costs)
    for number, part in enumerate(parts):
        now = time.monotonic()
        until = now + (deadline - now) / (len(parts) - number)
        own = _part(_only(rest.costs, part), until, nodes, inside and tuple(inside[v] for v in part))
        if math.isinf(own.cost):
            return Found((), math.inf, own.bound if math.isinf(own.bound) else -math.inf)
        bound += own.bound
        for v, option in zip(part, own.choice, strict=True):
            choice[v] = option
    whole = rest.whole(choice)
    cost = costs.of(whole)
    return Found(whole, cost, min(bound, cost))


def _part(costs: Costs, deadline: float, nodes: float, known: Choice | None) -> Found:
    """The best choice for costs that hang together."""
    at_once = max(AT_ONCE, min(EACH * len(costs.unary), (deadline - time.monotonic()) * SUMS / 2))
    order = elimination_order(costs, give_up=at_once)
    if order.work <= at_once and order.entries <= MANY_ENTRIES:
        return eliminate_in(costs, order)
    floor, constant = grounded(costs)
    best = Best(floor, deadline, nodes)
    if known:
        best.offer(known)
    bound = branched(best)
    if best.choice is None:
        return Found((), math.inf, bound)
    return Found(best.choice, constant + best.cost, constant + bound)


def _parts(costs: Costs) -> list[list[int]]:
    """The vertices that hang together, the smallest part first."""
    graph = networkx.Graph()
    graph.add_nodes_from(range(len(costs.unary)))
    graph.add_edges_from(costs.pairs)
    return sorted(map(sorted, networkx.connected_components(graph)), key=len)


def _only(costs: Costs, part: Sequence[int]) -> Costs:
    seats = {v: i for i, v in enumerate(part)}
    pairs = {(seats[a], seats[b]): table for (a, b), table in costs.pairs.items() if a in seats}
    return Costs(tuple(costs.unary[v] for v in part), pairs)
