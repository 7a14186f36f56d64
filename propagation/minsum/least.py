"""Minimize any sum of costs by vertex and by pair of vertices: `least`.

For the three operators of __init__.py, reductions leave no vertex: the minimum is their constant, 4. Two such graphs
without a connection cost 4 + 4; each connected part is solved by itself.

Reductions (reduce.py) leave a core. Each connected part of the core is eliminated if that is little work, and otherwise
solved by branch and bound (branch.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import networkx

from .branch import SUMS, Best, branched, grounded
from .eliminate import MANY_ENTRIES, eliminate_in, elimination_order
from .network import Choice, Costs, Found
from .reduce import reduced

AT_ONCE, EACH = 2e7, 1.5e5  # sums of an elimination that is tried first; the same per vertex


def least(costs: Costs, deadline: float = math.inf, nodes: float = math.inf, known: Choice | None = None) -> Found:
    """The cheapest choice found, and a bound. Costs may be negative, and inf for impossible options.

    deadline   on the monotonic clock, when the search ends
    nodes      of branch and bound, for each connected part
    known      a choice to start from

    If no finite choice is found, the choice is empty with cost inf; the bound is then inf if there is none, and -inf if
    that is unknown. Raises StrategyError if reductions show that there is none.
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
    """The best choice for the costs of one connected part."""
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
    """The connected parts, the smallest first."""
    graph = networkx.Graph()
    graph.add_nodes_from(range(len(costs.unary)))
    graph.add_edges_from(costs.pairs)
    return sorted(map(sorted, networkx.connected_components(graph)), key=len)


def _only(costs: Costs, part: Sequence[int]) -> Costs:
    seats = {v: i for i, v in enumerate(part)}
    pairs = {(seats[a], seats[b]): table for (a, b), table in costs.pairs.items() if a in seats}
    return Costs(tuple(costs.unary[v] for v in part), pairs)
