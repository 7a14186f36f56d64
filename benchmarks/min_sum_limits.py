"""Limits on what a choice uses: a price for each resource, a bound from prices, and choices that keep to the limits.

For any prices p >= 0 the least of `cost + p * (use - limit)` is a bound (Lagrange). The prices rise where more is used
than there is and fall where less is, by subgradients with Polyak's step. Choices found at prices are repaired: options
change one at a time that save most of what is too much for what they cost. Where a gap is left, the options of a vertex
are divided, and prices go on from there in both parts, the one with the lower bound first.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partway.propagation.minsum.branch import Choice
from partway.propagation.minsum.forests import by_ends, improved
from partway.propagation.minsum.network import Costs
from partway.strategy.errors import StrategyError

Codes, Floats = NDArray[np.intp], NDArray[np.float64]

ROUNDS, LATER_ROUNDS = 60, 10  # prices that are tried for the whole, and for a part
CLOSE = 1e-4  # of the cost: a gap that need not be closed
PATIENCE = 4  # prices that raise nothing, after which steps are halved
SMALLEST = 1e-2  # of a full step: where prices stop
BEYOND = 0.05  # of the bound, how far above it a choice is thought to be where none is known
FORESTS = 20  # that are tried to improve a choice
Least = Callable[[Costs, float], tuple[Choice, float]]  # costs and seconds to the best choice (or none), and a bound


@dataclass(frozen=True)
class Resource:
    """What is limited: a choice may use `limit` in all, where an option of a vertex uses `uses[vertex][option]`.

    What is held in a time of the step is one, with uses for the vertices that hold something then."""

    uses: tuple[Floats, ...]
    limit: float


@dataclass
class Limited:
    """Costs, uses of each vertex [resource, option], and room for each resource; with the best choice so far.

    Uses are kept relative to the room, so that prices are costs of as much as there is."""

    costs: Costs
    uses: Sequence[Floats]
    room: Floats
    least: Least
    deadline: float
    cost: float = math.inf
    choice: Choice | None = None

    def __post_init__(self) -> None:
        largest = np.array([max(float(np.abs(use[r]).max()) for use in self.uses) for r in range(len(self.room))])
        scale = np.where(self.room > 0, self.room, np.where(largest > 0, largest, 1.0))
        self.room = self.room / scale + 1e-9
        self.uses = [use / scale[:, None] for use in self.uses]
        shape = len(self.costs.unary), max(len(own) for own in self.costs.unary)
        self._uses = np.zeros((len(self.room), *shape))
        for v, use in enumerate(self.uses):
            self._uses[:, v, : use.shape[1]] = use
        self.tables = by_ends(self.costs)

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.deadline

    def used(self, choice: Sequence[int]) -> Floats:
        """How much a choice uses of each resource."""
        total: Floats = self._uses[:, np.arange(len(choice)), list(choice)].sum(axis=1)
        return total

    def offer(self, choice: Choice) -> None:
        """Note a choice, if it keeps to the limits."""
        cost = self.costs.of(choice)
        if cost < self.cost and bool((self.used(choice) <= self.room).all()):
            self.cost, self.choice = cost, choice

    def priced(self, prices: Floats, kept: Sequence[Codes]) -> Costs:
        """The costs of some options with the price of what they use."""
        unary = tuple(
            (own + prices @ use)[rows] for own, use, rows in zip(self.costs.unary, self.uses, kept, strict=True)
        )
        sizes = [len(own) for own in self.costs.unary]
        pairs = dict(self.costs.pairs)
        few = {v for v, rows in enumerate(kept) if len(rows) < sizes[v]}
        for (a, b), table in self.costs.pairs.items():
            if a in few or b in few:
                pairs[a, b] = table[np.ix_(kept[a], kept[b])]
        return Costs(unary, pairs)


@dataclass(frozen=True)
class _Part:
    """The choices with some options: prices that suit them, and the choices found at the last prices."""

    kept: list[Codes]
    prices: Floats
    bound: float
    plans: list[Choice]


def within(limited: Limited) -> float:
    """Look for the cheapest choice that keeps to the limits, until the time is over or it is proven; what none costs
    less than. Choices are noted in `limited`."""
    everything = [np.arange(len(own)) for own in limited.costs.unary]
    whole = _bounded(limited, _Part(everything, np.zeros(len(limited.room)), -math.inf, []), ROUNDS)
    _improve(limited, whole.prices)
    number = itertools.count()
    waiting = [(whole.bound, next(number), whole)]
    while waiting:
        bound = waiting[0][0]
        if bound >= limited.cost - CLOSE * abs(limited.cost) or limited.late:
            return min(bound, limited.cost)
        part = heapq.heappop(waiting)[-1]
        for half in _halves(limited, part):
            found = _bounded(limited, half, LATER_ROUNDS)
            if found.bound < limited.cost:
                heapq.heappush(waiting, (found.bound, next(number), found))
    return limited.cost


def _bounded(limited: Limited, part: _Part, rounds: int) -> _Part:
    """`part` with better prices, and the bound that they give."""
    prices, bound = part.prices, part.bound
    plans: list[Choice] = []
    at, step, idle = prices, 1.0, 0
    for round_ in range(rounds):
        left = max(limited.deadline - time.monotonic(), 0.0)
        try:
            choice, value = limited.least(limited.priced(at, part.kept), left / 4)
        except StrategyError:
            return _Part(part.kept, at, math.inf, plans)
        if not choice:  # none was found in time
            return _Part(part.kept, prices, max(bound, value - float(at @ limited.room)), plans)
        value -= float(at @ limited.room)
        chosen = tuple(int(rows[c]) for rows, c in zip(part.kept, choice, strict=True))
        plans.append(chosen)
        limited.offer(chosen)
        limited.offer(_repaired(limited, chosen, at))
        more = limited.used(chosen) - limited.room
        if value > bound + 1e-6 * abs(bound):
            idle = 0
        else:
            idle += 1
        if value > bound or round_ == 0:
            bound, prices = max(value, bound), at
        if idle >= PATIENCE:
            at, step, idle = prices, step / 2, 0
        if bound >= limited.cost - CLOSE * abs(limited.cost) or step < SMALLEST or limited.late:
            break
        aim = limited.cost if limited.choice else bound + BEYOND * max(abs(bound), 1.0) * (1 + round_)
        slope = np.where((at <= 0) & (more < 0), 0.0, more)
        if not slope.any():
            break
        at = np.maximum(at + step * max(aim - value, 0.0) / float(slope @ slope) * slope, 0.0)
    return _Part(part.kept, prices, bound, plans[-6:])


def _halves(limited: Limited, part: _Part) -> list[_Part]:
    """The options of one vertex, about which the choices at the last prices differ most, in two parts."""
    plans = np.array(part.plans or [tuple(int(rows[0]) for rows in part.kept)])
    weights = np.array([float(np.ptp(use, axis=1).max()) for use in limited.uses])
    differ = np.array([len(set(column)) - 1 for column in plans.T.tolist()])
    open_ones = np.array([len(rows) > 1 for rows in part.kept])
    if not open_ones.any():
        return []
    v = int(np.argmax(np.where(open_ones, (differ + 1e-3) * (weights + 1e-9), -1.0)))
    rows = part.kept[v]
    own = limited.costs.unary[v] + part.prices @ limited.uses[v]
    first = {int(plan[v]) for plan in part.plans[-1:]}
    ranked = sorted(rows.tolist(), key=lambda option: (option not in first, own[option]))
    cut = 1 if differ[v] else (len(ranked) + 1) // 2
    parts = []
    for some in (ranked[:cut], ranked[cut:]):
        kept = [*part.kept[:v], np.array(sorted(some)), *part.kept[v + 1 :]]
        parts.append(_Part(kept, part.prices, part.bound, []))
    return parts


def _improve(limited: Limited, prices: Floats) -> None:
    """Random forests at prices around `prices`, repaired."""
    random = np.random.default_rng(0)
    everything = [np.arange(len(own)) for own in limited.costs.unary]
    for _ in range(FORESTS):
        if limited.late or limited.choice is None:
            return
        at = prices * np.exp(0.2 * random.standard_normal(len(prices)))
        priced = limited.priced(at, everything)
        choice = tuple(improved(priced, limited.tables, list(limited.choice), random))
        limited.offer(choice)
        limited.offer(_repaired(limited, choice, at))


def _repaired(limited: Limited, choice: Choice, prices: Floats) -> Choice:
    """`choice` with options changed one at a time: while something is over its limit those that save most of it for
    what they cost at `prices`, then those that cost less and keep to the limits."""
    moves = _Moves(limited, choice)
    for _ in range(4 * len(choice)):
        dearer, over, after = moves.look()
        now = float(np.maximum(over, 0.0).sum())
        too_much = np.maximum(after, 0.0).sum(axis=0)
        if now > 0:
            at_prices = dearer + np.tensordot(prices, after - over[:, None, None], axes=1)
            saved = now - too_much
            worth = np.where(saved > 1e-12, at_prices / np.maximum(saved, 1e-12), math.inf)
        else:
            worth = np.where((too_much <= 0) & (dearer < -1e-9 * (1 + abs(limited.cost))), dearer, math.inf)
            worth = np.where(np.isfinite(worth), worth, math.inf)
        v, option = np.unravel_index(int(np.argmin(worth)), worth.shape)
        if math.isinf(worth[v, option]):
            break
        moves.move(int(v), int(option))
    return tuple(moves.choice)


class _Moves:
    """What it costs and uses to change the option of one vertex of a choice."""

    def __init__(self, limited: Limited, choice: Choice) -> None:
        self.limited, self.choice = limited, list(choice)
        self.beside = np.full(limited._uses.shape[1:], math.inf)
        for v in range(len(choice)):
            self._beside(v)

    def _beside(self, v: int) -> None:
        total = self.limited.costs.unary[v]
        for u, table in self.limited.tables[v].items():
            total = total + table[:, self.choice[u]]
        self.beside[v, : len(total)] = total

    def look(self) -> tuple[Floats, Floats, Floats]:
        """For each vertex and option what more it costs; and how much is used of each resource beyond its limit, now
        and then."""
        seats, choice = np.arange(len(self.choice)), np.array(self.choice)
        dearer = self.beside - self.beside[seats, choice][:, None]
        uses = self.limited._uses
        over = self.limited.used(self.choice) - self.limited.room
        after = over[:, None, None] + uses - uses[:, seats, choice][:, :, None]
        return dearer, over, after

    def move(self, v: int, option: int) -> None:
        """Change an option."""
        self.choice[v] = option
        for u in self.limited.tables[v]:
            self._beside(u)
