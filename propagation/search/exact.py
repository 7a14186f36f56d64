"""The exact search: elimination, once options that no optimal plan takes are left out where there are many.

Where all costs may be written out they go to `optimum`, which eliminates, narrowing first where elimination would be
much work. Where they are too many to write out, narrowing comes first too, from the plan of the recursive search.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from .eliminate import TABLE_LIMIT, affordable, eliminate_in, elimination_order
from .narrow import Narrowing, narrow
from .network import Costs, Matrix, among, are_few, costs_of, is_written_out, network, network_of, restricted
from .problem import SearchProblem
from .propagate import revisit
from .recursive import recursive_programming
from .solution import Solution

FEW_PAIRS = 1.5e7  # pairs of options that are left when narrowing may stop


def dynamic_programming(
    problem: SearchProblem, *, below: float = math.inf, table_limit: float = TABLE_LIMIT
) -> Solution:
    """The optimum, proven; or, where tables would pass `table_limit` entries, a plan and how far off it may be.
    `below`: as for `search`."""
    if is_written_out(problem):
        return optimum(costs_of(problem), table_limit, lambda: recursive_programming(problem).choice, below)
    known = recursive_programming(problem)
    if math.isinf(known.cost):
        return known
    capped = network_of(problem).at_most(2 * known.cost)
    rest = narrow(capped, min(known.cost, below), lambda narrowing: narrowing.pairs <= FEW_PAIRS)
    if rest.bound >= below:
        return replace(known, bound=rest.bound)
    known = _cheaper(known, rest)
    if not are_few(rest.pairs):
        return replace(known, bound=min(known.cost, rest.bound))
    costs = costs_of(restricted(problem, rest.kept))
    best = optimum(costs, table_limit, lambda: among(rest.kept, known.choice))
    return _better(replace(best, choice=rest.original(best.choice)), known, rest)


def optimum(
    costs: Costs, table_limit: float, start: Callable[[], tuple[int, ...]], below: float = math.inf
) -> Solution:
    """As `eliminate`; where that would be much work, what no optimal plan takes is left out first. `start`: a plan."""
    order = elimination_order(costs, table_limit)
    if order.quick:
        return eliminate_in(costs, order)
    written = network(costs)
    first = start()
    known = revisit(written, Solution(first, costs.of(first), -math.inf, 1))
    if math.isinf(known.cost):
        return eliminate_in(costs, order)
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
    choice = rest.original(best.choice)
    revisited = revisit(written, replace(best, choice=choice, cost=costs.of(choice)))
    return _better(replace(revisited, bound=best.bound, width=best.width), known, rest)


def _costs_left(rest: Narrowing) -> Costs:
    """The costs of the options that are left."""
    return Costs(tuple(rest.unary), {e.ends: e.costs.costs for e in rest.edges if isinstance(e.costs, Matrix)})


def _cheaper(known: Solution, rest: Narrowing) -> Solution:
    """The plan that was known, or a cheaper one that narrowing came across."""
    return known if rest.best is None else replace(known, choice=rest.best, cost=rest.upper)


def _better(best: Solution, known: Solution, rest: Narrowing) -> Solution:
    """The cheaper of the best plan among the options that are left, with its bound, and the plan that was known, with
    a bound for all plans: one with another option costs at least `rest.upper`."""
    proven = max(rest.bound, min(best.bound, rest.upper))
    cheaper = min(best, known, key=lambda solution: solution.cost)
    return replace(cheaper, bound=min(cheaper.cost, proven), width=best.width)
