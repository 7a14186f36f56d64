"""The optimum of written-out costs: elimination, after leaving out options that no optimal plan takes.

For the three operators of __init__.py, elimination computes tables of 2 x 2 sums and finds 4 at once. If that were
much work, `revisit` would improve 1, 1, 0 to 0, 0, 0, which costs 4, and a pass of messages would prove that no plan
costs less.

If elimination would be much work, options are ruled out first (narrow.py). If it still is too much, the rest is solved
by branch and bound (least.py), with a limit on nodes and not on seconds, since all processes have to find the same
plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ...strategy.errors import StrategyError
from .eliminate import EliminationOrder, affordable, eliminate_in, elimination_order
from .least import least
from .narrow import Narrowing, narrow
from .network import Costs, Found, Matrix, network
from .visits import revisit

SMALLER = 2.0**26  # sums of a step when larger tables are too much work
NODES = 4  # of branch and bound, if elimination is too much


def optimum(costs: Costs, table_limit: float, start: Callable[[], tuple[int, ...]], below: float = math.inf) -> Found:
    """As `eliminate`, but rule out options that no optimal plan takes if elimination is much work. `start` returns a
    plan."""
    order = elimination_order(costs, table_limit)
    if order.quick:
        return eliminate_in(costs, order)
    smaller = elimination_order(costs, SMALLER)  # its plan may not be the best, but often is, with a proof
    if smaller.quick:
        found = eliminate_in(costs, smaller)
        if found.proven:
            return found
        first = found.choice if math.isfinite(found.cost) else start()
    else:
        first = start()
    written = network(costs)
    known = revisit(written, Found(first, costs.of(first), -math.inf, 1))
    if math.isinf(known.cost):
        return _without_start(costs, order, known)
    capped = written.at_most(2 * known.cost)
    rest = narrow(capped, min(known.cost, below), lambda narrowing: elimination_order(_costs_left(narrowing)).quick)
    if rest.bound >= below:
        return replace(known, bound=rest.bound)
    known = _cheaper(known, rest)
    costs_left = _costs_left(rest)
    order = elimination_order(costs_left, table_limit)
    if order.too_much and math.isfinite(below):
        return replace(known, bound=rest.bound)
    best = eliminate_in(costs_left, affordable(costs_left, order))
    if order.too_much:
        best = _by_branches(costs_left, best)
    choice = rest.original(best.choice)
    revisited = revisit(written, replace(best, choice=choice, cost=costs.of(choice)))
    return _better(replace(revisited, bound=best.bound, width=best.width), known, rest)


def _without_start(costs: Costs, order: EliminationOrder, known: Found) -> Found:
    """The best choice if the known one is infinite; if all are, one of them with an infinite bound."""
    if not order.too_much:
        return eliminate_in(costs, order)
    return _by_branches(costs, replace(known, bound=-math.inf, width=order.width))


def _by_branches(costs: Costs, known: Found) -> Found:
    """A better choice and bound than the known ones, by reductions and some nodes of branch and bound."""
    try:
        found = least(costs, nodes=NODES, known=known.choice)
    except StrategyError:
        return known
    cheaper = replace(known, choice=found.choice, cost=found.cost) if found.cost < known.cost else known
    return replace(cheaper, bound=min(cheaper.cost, max(known.bound, found.bound)))


def _costs_left(rest: Narrowing) -> Costs:
    """The costs of the options that are left."""
    return Costs(tuple(rest.unary), {e.ends: e.costs.costs for e in rest.edges if isinstance(e.costs, Matrix)})


def _cheaper(known: Found, rest: Narrowing) -> Found:
    """The known plan, or a cheaper one found by narrowing."""
    return known if rest.best is None else replace(known, choice=rest.best, cost=rest.upper)


def _better(best: Found, known: Found, rest: Narrowing) -> Found:
    """The cheaper of the best plan among the remaining options, with its bound, and the known plan, with a bound for
    all plans: one with another option costs at least `rest.upper`."""
    proven = max(rest.bound, min(best.bound, rest.upper))
    cheaper = min(best, known, key=lambda solution: solution.cost)
    return replace(cheaper, bound=min(cheaper.cost, proven), width=best.width)
