"""The search under a memory limit: how all is split, what is kept and what is computed again, as one decision.

Without a limit in sight the strategies are those of the cheapest plan, and nothing is kept that costs nothing to have
again. Where that does not fit, strategies and fates are searched for together, at a price of a byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from ...strategy.errors import StrategyError
from ..cost.conversion import Floats
from .eliminate import (
    TABLE_LIMIT,
    EliminationOrder,
    affordable,
    eliminate_in,
    elimination_order,
    order_like,
)
from .exact import optimum
from .keeping import CHEAP, Keeping, KeepProblem, Kept, keep_problem
from .needs import Needs, needs_of
from .problem import AMONG, Recompute, SearchProblem, Settings
from .solution import Solution
from .timeline import Timeline, timeline

ROUNDS = 8  # prices that are tried between one that is too low and one that is high enough
CURVE_FROM, CURVE_BY, CURVE_STEP, CURVE_IDLE = 1e-3, 4.0, 1e-2, 6  # prices of a curve, and how far points are apart
LADDER, STEEP = 8, 12.0  # prices that are tried until one is high enough, each so many times the one before


@dataclass(frozen=True)
class Point:
    """A plan with its fates: what it costs, and the bytes that a device holds while each vertex runs, `modelled` as
    prices count them and `held` in truth.

    numbers   its options with fates, as `KeepProblem.costs` numbers them
    """

    numbers: tuple[int, ...]
    choice: tuple[int, ...]
    keeping: Keeping
    cost: float
    modelled: Floats
    held: Floats
    when: Timeline

    @property
    def peak(self) -> float:
        """The most bytes that a device holds at a time."""
        return float(self.held.max(initial=0.0))


def kept_for_free(problem: SearchProblem, choice: tuple[int, ...], needs: Mapping[fx.Node, Needs]) -> Point:
    """The strategies of `choice`, of which the fewest bytes are kept that may be at next to no cost; under
    `Recompute.ALL` the fewest of all."""
    everything = problem.settings.recompute is Recompute.ALL
    own = keep_problem(problem, needs, only_free=not everything).at(choice)
    prices = np.zeros(len(problem.vertices))
    price = _outweighing(problem) if everything else _next_to_nothing(problem.settings)
    prices[-1:] = 2 * price  # what is computed again at once is there with what it is computed of
    return _solved(own, prices, between=price)[0]


def with_fates(problem: SearchProblem, found: Solution) -> Solution:
    """`found`, a solution, with what is kept: the cheapest that keeps to the memory limit. Strategies stay as they are.
    Raises StrategyError where nothing does."""
    needs = needs_of(problem.graph, problem.tensors.flows)
    first, limit = kept_for_free(problem, found.choice, needs), problem.settings.memory_limit
    if limit is not None and first.peak > limit:
        first = _Search(keep_problem(problem, needs, only_free=False).at(found.choice), limit, first).best(found)[0]
        return replace(_solution(found, first, found.bound), binding=True)
    return _solution(found, first, found.bound)


def within_memory(problem: SearchProblem, free: Solution) -> Solution:
    """The cheapest plan found that keeps to the memory limit of `problem`, with a bound on what any such plan costs.
    `free`: the cheapest one without a limit. Raises StrategyError where none is found.

    Lagrange: for any price p of a byte the least of `cost + p * (memory - limit)` is a bound. The best price is where
    the cheapest plan changes from one that fits to one that does not: the price at which the two last found cost the
    same is tried until neither is beaten (Handler & Zang, "A dual algorithm for the constrained shortest path
    problem", 1980). Layers that are alike change all at once; so of the two plans one is taken in the first stretches
    and the other in the rest, as far as that fits.
    """
    needs = needs_of(problem.graph, problem.tensors.flows)
    first, limit = kept_for_free(problem, free.choice, needs), problem.settings.memory_limit
    if limit is None or first.peak <= limit:
        return _solution(free, first, free.bound)
    point, bound = _Search(keep_problem(problem, needs, only_free=False), limit, first).best(free)
    return replace(_solution(free, point, bound), binding=True)


def trade_offs(problem: SearchProblem, free: Solution) -> Iterator[Solution]:
    """Plans of which each holds less at its peak than the one before, and costs more: `free`, the cheapest, with what
    is free to have again, then the optimum at one price of a byte after the other."""
    needs = needs_of(problem.graph, problem.tensors.flows)
    first = kept_for_free(problem, free.choice, needs)
    yield _solution(free, first, free.bound)
    tried, least, idle = _Search(keep_problem(problem, needs, only_free=False), 0.0, first), first.peak, 0
    price = CURVE_FROM * max(free.cost, 1e-12) / max(first.peak, 1.0)
    while idle < CURVE_IDLE:
        point = tried.at_price(price)
        tried.look_at(point)
        idle = idle + 1 if point.peak >= least * (1 - CURVE_STEP) else 0
        if not idle:
            least = point.peak
            yield _solution(free, point, point.cost)
        price *= CURVE_BY


class _Search:
    """The prices that were tried, and what was found."""

    def __init__(self, problem: KeepProblem, limit: float, first: Point) -> None:
        self.problem, self.limit = problem, limit
        self.weights = np.zeros(len(problem.stretches))
        self.weights[int(first.held.argmax())] = 1.0
        self.tried: list[tuple[Floats, float]] = []  # prices, and the least of cost and priced bytes
        self.first, self.width = first, 1
        self.order: EliminationOrder | None = None
        self.known = problem.numbers(first.choice, first.keeping.fates)

    def best(self, free: Solution) -> tuple[Point, float]:
        """The cheapest plan that is found, and a bound."""
        above, below = self._bracket(free)
        best = below
        for _ in range(ROUNDS):
            saved = float(self.weights @ (above.modelled - below.modelled))
            if saved <= 0 or below.cost <= above.cost:
                break
            price = (below.cost - above.cost) / saved
            point = self.at_price(price)
            dual = point.cost + price * float(self.weights @ point.modelled)
            if dual >= (below.cost + price * float(self.weights @ below.modelled)) * (1 - 1e-9):
                break
            if point.peak <= self.limit:
                below = point
                best = min(best, point, key=lambda p: p.cost)
            else:
                above = point
        best = min([best, *self._crossed(above, below)], key=lambda p: p.cost)
        return self._answer(free, best)

    def _bracket(self, free: Solution) -> tuple[Point, Point]:
        """A plan that does not fit, and one that does: a byte costs more and more, at the times when too many are
        held."""
        above = least = self.first
        price = 1e-2 * free.cost / self.limit
        for _ in range(LADDER):
            point = self.at_price(price)
            least = min(least, point, key=lambda p: p.peak)
            if point.peak <= self.limit:
                return above, point
            above = point
            self.look_at(point)
            price *= STEEP
        raise StrategyError(_too_little(self.problem, least, self.limit))

    def at_price(self, price: float) -> Point:
        """The cheapest plan when a byte at the peak costs `price`."""
        prices = price * self.weights
        point, found, self.order = _solved(self.problem, prices, self.order, self.known)
        self.known = point.numbers
        self.tried.append((prices, found.bound))
        self.width = max(self.width, found.width)
        return point

    def look_at(self, point: Point) -> None:
        """From now on a byte costs something at the peak of `point` too."""
        when = int(point.held.argmax())
        if not self.weights[when]:
            self.weights[when] = self.weights.max()
            self.weights /= self.weights.sum()

    def _crossed(self, above: Point, below: Point) -> Iterator[Point]:
        """Plans that are `below` in the first stretches and `above` in the rest, or the other way round: of each kind
        the one with the most of `above` that fits."""
        stretches = np.array(self.problem.stretches)
        found = False
        for early, late, of_above in ((below, above, -1), (above, below, 1)):
            low, high = 0, self.problem.count  # stretches of `above` that fit, that do not fit
            if found:
                return
            while high - low > 1:
                many = (low + high) // 2
                border = self.problem.count - many if of_above < 0 else many
                numbers = np.where(stretches < border, early.numbers, late.numbers)
                point = _read(self.problem, tuple(int(n) for n in numbers), np.zeros(len(stretches)))
                if math.isfinite(point.cost) and point.peak <= self.limit:
                    low, found = many, True
                    yield point
                else:
                    high = many

    def _answer(self, free: Solution, point: Point) -> tuple[Point, float]:
        """With the best bound: beside what the search counts, others have to do with the room that this plan takes."""
        room = self.limit - (point.held - point.modelled)
        bound = max([free.bound, *(dual - float(prices @ room) for prices, dual in self.tried)])
        return point, min(bound, point.cost)


def _solved(
    problem: KeepProblem,
    prices: Floats,
    like: EliminationOrder | None = None,
    known: tuple[int, ...] | None = None,
    between: float = 0.0,
) -> tuple[Point, Solution, EliminationOrder]:
    """The cheapest plan at these prices, what was found of it, and the order in which; `like`: that of other prices;
    `known`: the numbers of a plan."""
    costs = problem.costs(prices, between)
    order = (like and order_like(like, costs)) or elimination_order(costs, TABLE_LIMIT)
    if order.quick or known is None:
        found = eliminate_in(costs, affordable(costs, order))
    else:
        start = known
        found = optimum(costs, TABLE_LIMIT, lambda: start)
    return _read(problem, found.choice, prices, between), found, order


def _read(problem: KeepProblem, numbers: tuple[int, ...], prices: Floats, between: float = 0.0) -> Point:
    kept: Kept = problem.read_off(numbers, prices, between)
    when = timeline(problem, kept.choice, kept)
    held = np.maximum(when.total, when.forward)
    return Point(numbers, problem.chosen or kept.choice, kept.keeping, kept.cost, kept.held, held, when)


def _next_to_nothing(settings: Settings) -> float:
    """A price of a byte at which only what is free is computed again."""
    return CHEAP * settings.weights.compute / settings.profile.memory_bandwidth


def _outweighing(problem: SearchProblem) -> float:
    """A price of a byte beside which nothing else counts, within what floats can add up."""
    heaviest = sum(float(v.options.memory.max()) for v in problem.vertices)
    return 1e6 / max(heaviest, 1.0)


def _solution(free: Solution, point: Point, bound: float) -> Solution:
    return replace(free, choice=point.choice, cost=point.cost, bound=bound, keeping=point.keeping, held=point.when)


def _too_little(problem: KeepProblem, least: Point, limit: float) -> str:
    """Why no plan keeps to the limit, and which would do; `least` is the plan that holds the least."""
    of, always = problem.problem, least.when.always
    phase, at = least.when.moment
    held = [*((size, name) for name, size in always.items())]
    if phase == "forward":
        held.append((float(least.when.forward[at]) - sum(always.values()), "activations and what operators work with"))
    else:
        held += [
            (float(least.when.kept[at]), "activations"), (float(least.when.again[at]), "what is computed again"),
            (float(least.when.gradients[at]), "gradients of activations"),
            (float(least.when.parameter_gradients[at]), "gradients of parameters"),
        ]  # fmt: skip
    held.sort(reverse=True)
    heaviest = ", ".join(f"{name} {size / 1e9:.3g} GB" for size, name in held[:5] if size)
    heaviest += f", in the {phase} of {of.vertices[at].name}"
    among = AMONG if of.approximate else ""
    return (
        f"no plan was found on the mesh {of.settings.mesh}{among} that holds less than {least.peak / 1e9:.4g} GB on a "
        "device (parameters, gradients, optimizer states, activations and what operators work with), and memory_limit "
        f"is {limit / 1e9:.4g} GB; a limit of {least.peak / 1e9 * 1.001:.4g} GB would do, or more devices. The "
        f"heaviest: {heaviest}"
    )
