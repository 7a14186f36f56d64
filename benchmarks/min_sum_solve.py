"""Partway's search as a solver of any min-sum problem, also within limits on what a choice uses: `solve`.

Plans come from `minsum.least`, which takes neither limits nor anything that is no problem; this front is what
benchmarks/min_sum.py compares with other solvers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
from min_sum_limits import Limited, Resource, within
from min_sum_reduce import reduced_with

from partway.propagation.minsum.branch import Choice
from partway.propagation.minsum.least import Found, least
from partway.propagation.minsum.network import Costs
from partway.strategy.errors import StrategyError

AT_A_PRICE = 2.0  # seconds for the least at one price of each resource


def solve(costs: Costs, *, resources: Sequence[Resource] = (), seconds: float = 60.0) -> Found:
    """One option for each vertex, so that `costs` are as low as possible and no resource is used beyond its limit.

    costs       of each option by itself and of each two options of vertices with a table between them; any numbers,
                also negative ones, and inf for what may not be chosen
    resources   what is limited: how much each option of each vertex uses, and how much may be used in all
    seconds     how long to look, about; what was found by then is returned, with the bound that is proven

    What is done is exact: reductions, elimination, branch and bound (and for resources prices, whose bound is closed by
    dividing). Raises StrategyError where no choice has a finite cost, where none keeps to the limits, or where none was
    found in time; the message says which.
    """
    _check(costs, resources)
    if resources:
        return _within(costs, resources, time.monotonic() + seconds)
    found = least(costs, time.monotonic() + seconds)
    if math.isinf(found.cost):  # and the bound, if that is proven
        proven = "no choice of options has a finite cost"
        raise StrategyError(proven if found.bound > 0 else f"{proven} as far as was found in {seconds:g} s")
    return found


def _check(costs: Costs, resources: Sequence[Resource]) -> None:
    sizes = [len(own) for own in costs.unary]
    if not all(sizes):
        raise StrategyError(f"vertex {sizes.index(0)} has no option")
    for (a, b), table in costs.pairs.items():
        if not 0 <= a < b < len(sizes):
            raise StrategyError(
                f"the table of vertices {(a, b)}: vertices are 0 to {len(sizes) - 1}, the lower one first"
            )
        if table.shape != (sizes[a], sizes[b]):
            raise StrategyError(
                f"the table of vertices {(a, b)} is {table.shape}, and they have {(sizes[a], sizes[b])} options"
            )
    for number, resource in enumerate(resources):
        if [len(use) for use in resource.uses] != sizes:
            raise StrategyError(f"resource {number} needs the use of each option of each vertex")
        if not all(np.isfinite(use).all() for use in resource.uses):
            raise StrategyError(
                f"resource {number} has uses that are not finite: an option that may not be chosen costs inf"
            )
    arrays = (*costs.unary, *costs.pairs.values())
    if any(bool(np.isnan(array).any() or (array == -math.inf).any()) for array in arrays):
        raise StrategyError("costs are numbers or inf, and there is nan or -inf among them")


def _within(costs: Costs, resources: Sequence[Resource], deadline: float) -> Found:
    """The least within limits."""
    uses = [np.stack([resource.uses[v] for resource in resources]) for v in range(len(costs.unary))]
    rest, left, spent = reduced_with(costs, uses)
    room = np.array([resource.limit for resource in resources]) - spent
    lowest = sum((use.min(axis=1) for use in left), np.zeros(len(room)))
    if (room < lowest - 1e-9 * (np.abs(spent) + np.abs(lowest))).any():
        raise StrategyError(_beyond(costs, resources))
    if not rest.vertices:
        whole = rest.whole(())
        return Found(whole, costs.of(whole), costs.of(whole))

    def at_a_price(priced: Costs, seconds: float) -> tuple[Choice, float]:
        found = least(priced, time.monotonic() + min(seconds, AT_A_PRICE))
        return found.choice, found.bound

    limited = Limited(rest.costs, left, room, at_a_price, deadline)
    bound = rest.constant + within(limited)
    if limited.choice is None:
        raise StrategyError(_beyond(costs, resources))
    whole = rest.whole(limited.choice)
    return Found(whole, costs.of(whole), min(bound, costs.of(whole)))


def _beyond(costs: Costs, resources: Sequence[Resource]) -> str:
    """Why no choice keeps to the limits, as far as that is known."""
    for number, resource in enumerate(resources):
        allowed = (
            np.where(np.isfinite(own), use, math.inf) for own, use in zip(costs.unary, resource.uses, strict=True)
        )
        pairs = {ends: np.where(np.isfinite(table), 0.0, math.inf) for ends, table in costs.pairs.items()}
        lowest = least(Costs(tuple(allowed), pairs), time.monotonic() + AT_A_PRICE)
        if lowest.bound > resource.limit + 1e-9 * abs(resource.limit):
            much = f"any uses at least {lowest.bound:g}"
            return f"no choice keeps to the limit {resource.limit:g} of resource {number}: {much}"
    return "no choice that keeps to all limits was found; there is one for each limit by itself"
