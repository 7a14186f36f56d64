"""The least of any sum of costs by vertex and by pair of vertices, wherever they come from: `solve`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import networkx
import numpy as np

from ...strategy.errors import StrategyError
from .branch import SUMS, Best, Choice, branched, grounded
from .eliminate import MANY_ENTRIES, eliminate_in, elimination_order
from .network import Costs
from .reduce import reduced
from .resources import Limited, Resource, within

AT_ONCE, EACH = 2e7, 1.5e5  # sums of an elimination before which nothing else is tried; for each vertex
AT_A_PRICE = 2.0  # seconds for the least at one price of each resource


@dataclass(frozen=True)
class Found:
    """What `solve` found.

    choice   one option for each vertex, by number
    cost     what it costs
    bound    what no choice costs less than
    plans    the best choices that were come across, each with its cost, cheapest first
    """

    choice: Choice
    cost: float
    bound: float
    plans: tuple[tuple[float, Choice], ...] = ()

    @property
    def gap(self) -> float:
        """How far above the bound the cost may lie, relative to the cost."""
        return (self.cost - self.bound) / max(abs(self.cost), 1e-12)

    @property
    def proven(self) -> bool:
        """Whether nothing costs less."""
        return self.gap <= 1e-9


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


def least(costs: Costs, deadline: float = math.inf, nodes: float = math.inf, known: Choice | None = None) -> Found:
    """As `solve`, without limits. `deadline`: on the monotonic clock; `nodes`: how many nodes of branch and bound are
    looked at in each part that nothing connects to the others; `known`: a choice to start from. Where no finite choice
    was found it is empty and costs inf, and the bound is inf where there is none, -inf where that is open."""
    rest = reduced(costs)
    inside = rest.part(known) if known else None
    choice, bound = [0] * len(rest.vertices), rest.constant
    plans: tuple[tuple[float, Choice], ...] = ()
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
        plans = own.plans
    whole = rest.whole(choice)
    cost = costs.of(whole)
    others = [rest.whole(other) for _, other in plans] if len(parts) == 1 else []
    return Found(whole, cost, min(bound, cost), _ranked(costs, [whole, *others]))


def _within(costs: Costs, resources: Sequence[Resource], deadline: float) -> Found:
    """The least within limits."""
    uses = [np.stack([resource.uses[v] for resource in resources]) for v in range(len(costs.unary))]
    rest = reduced(costs, uses)
    room = np.array([resource.limit for resource in resources]) - rest.spent
    lowest = sum((use.min(axis=1) for use in rest.uses), np.zeros(len(room)))
    if (room < lowest - 1e-9 * (np.abs(rest.spent) + np.abs(lowest))).any():
        raise StrategyError(_beyond(costs, resources))
    if not rest.vertices:
        whole = rest.whole(())
        return Found(whole, costs.of(whole), costs.of(whole))

    def at_a_price(priced: Costs, seconds: float) -> tuple[Choice, float]:
        found = least(priced, time.monotonic() + min(seconds, AT_A_PRICE))
        return found.choice, found.bound

    limited = Limited(rest.costs, rest.uses, room, at_a_price, deadline)
    bound = rest.constant + within(limited)
    if not limited.plans:
        raise StrategyError(_beyond(costs, resources))
    plans = _ranked(costs, [rest.whole(choice) for _, choice in limited.plans])
    cost, whole = plans[0]
    return Found(whole, cost, min(bound, cost), plans)


def _ranked(costs: Costs, choices: Sequence[Choice]) -> tuple[tuple[float, Choice], ...]:
    """Choices with their costs, cheapest first."""
    return tuple(sorted((costs.of(choice), choice) for choice in dict.fromkeys(choices)))


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


def _part(costs: Costs, deadline: float, nodes: float, known: Choice | None) -> Found:
    """The best choice for costs that hang together."""
    at_once = max(AT_ONCE, min(EACH * len(costs.unary), (deadline - time.monotonic()) * SUMS / 2))
    order = elimination_order(costs, give_up=at_once)
    if order.work <= at_once and order.entries <= MANY_ENTRIES:
        found = eliminate_in(costs, order)
        return Found(found.choice, found.cost, found.bound)
    floor, constant = grounded(costs)
    best = Best(floor, deadline, nodes)
    if known:
        best.offer(known)
    bound = branched(best)
    if not best.plans:
        return Found((), math.inf, bound)
    plans = tuple((constant + cost, choice) for cost, choice in best.plans)
    return Found(plans[0][1], plans[0][0], constant + bound, plans)


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
