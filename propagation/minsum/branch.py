"""Branch and bound, for problems that are too much work to eliminate.

For the three operators of __init__.py (costs: a 1, 0; b 3, 2; c 0, 6; 5 if a and b differ, 4 if b and c do), the
search branches on b, which has the most neighbours. With b=1, its cheaper option, the minimum is
0 + 2 + min(4 + 0, 0 + 6) = 6; with b=0 it is 1 + 3 + min(0 + 0, 4 + 6) = 4. No node is left, so 4 is the optimum.

A node of the search is the problem restricted to some of its options. Messages bound it and rule options out, exact
reductions shrink it, and the rest is eliminated if that is little work. Otherwise the options of one vertex are halved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...strategy.basics.blocks import tell
from ...strategy.errors import StrategyError
from .eliminate import MANY_ENTRIES, eliminate_in, elimination_order
from .forests import Tables, by_ends, improved, kicked
from .messages import Messages
from .network import Choice, Costs, originals
from .reduce import reduced

EASY = 2e7  # sums of an elimination that is done at once
SUMS = 1.5e8  # sums per second, at least
LONGEST = 10.0  # seconds that one elimination may take
SWEEPS, EVERY = 60, 6  # sweeps of messages at a node, and after how many of them a choice is read off
HARDLY = 0.1  # the share of the gap that messages have to close in EVERY sweeps to go on
GONE = 0.05  # the share of the options that has to go for a node to be reduced again
TRIES, LATER_TRIES = 60, 6  # forests in a row without improvement after which to stop; after a kick
KICKS, IDLE_KICKS = 20_000, 20  # kicks at the start, divided by the vertices; kicks in a row without improvement

Lift = Callable[[Choice], Choice]


def grounded(costs: Costs) -> tuple[Costs, float]:
    """The costs, shifted so that none is negative, and the constant by which this lowers the cost of each choice."""
    lows = [float(own.min()) for own in costs.unary]
    pair_lows = {ends: float(table.min()) for ends, table in costs.pairs.items()}
    unary = tuple(own - low for own, low in zip(costs.unary, lows, strict=True))
    pairs = {ends: table - pair_lows[ends] for ends, table in costs.pairs.items()}
    return Costs(unary, pairs), sum(lows) + sum(pair_lows.values())


def ceiling(costs: Costs) -> float:
    """More than the cost of any finite choice, if no cost is negative."""
    arrays = (*costs.unary, *costs.pairs.values())
    return 1.0 + sum(float(array[np.isfinite(array)].max(initial=0.0)) for array in arrays)


@dataclass
class Best:
    """The best choice that a search has found (the first in order among equals), and the limits of the search: a time,
    or a number of nodes, which is the same on every machine."""

    costs: Costs
    deadline: float = math.inf
    nodes: float = math.inf
    cost: float = math.inf
    choice: Choice | None = None

    def __post_init__(self) -> None:
        self._most = ceiling(self.costs)
        arrays = (*self.costs.unary, *self.costs.pairs.values())
        whole = all(bool((array[np.isfinite(array)] % 1 == 0).all()) for array in arrays)
        self._step = 1 - 1e-6 if whole else 0.0  # between two costs that differ

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    @property
    def upper(self) -> float:
        """The cost that a better choice has to be below."""
        return self._most if self.choice is None else self.cost - self._step - 1e-9 * abs(self.cost)

    def offer(self, choice: Choice) -> float:
        """Keep `choice` if it is the best one so far, and return its cost."""
        cost = self.costs.of(choice)
        if cost < self.cost or (self.choice is not None and (cost, choice) < (self.cost, self.choice)):
            self.cost, self.choice = cost, choice
        return cost


@dataclass(frozen=True)
class _Node:
    """The problem restricted to some of its options: their costs, which exclude `constant`; `lift`, which maps a choice
    of it to one of the whole problem; and a lower bound on the cost of its choices."""

    costs: Costs
    lift: Lift
    constant: float
    bound: float


def branched(best: Best) -> float:
    """Search until no better choice can exist or a limit is reached; return a lower bound."""
    waiting = [_Node(best.costs, lambda choice: choice, 0.0, _start(best))]
    closed = math.inf  # the least bound of the abandoned nodes
    while waiting:
        node = waiting.pop()
        if node.bound >= best.upper:
            continue
        if best.late or best.nodes <= 0:
            closed = min(closed, node.bound)
            continue
        best.nodes -= 1
        waiting += _looked_at(node, best)
        tell(best.cost, min([best.cost, closed, *(n.bound for n in waiting)]))
    return min(best.cost, closed)


def _start(best: Best) -> float:
    """Offer choices read off messages, improved by random forests and kicks; return a lower bound."""
    messages = Messages(best.costs, best.upper)
    for sweep in range(2 * EVERY):
        messages.sweep(forward=sweep % 2 == 0)
        if math.isinf(messages.bound):
            return messages.bound
        if sweep % EVERY == 0 or sweep == 2 * EVERY - 1:
            best.offer(messages.settle())
    if best.upper <= 0.0:  # no cost is negative, so no choice is cheaper
        return messages.bound
    capped = Costs(
        tuple(np.minimum(own, best.upper) for own in best.costs.unary),
        {ends: np.minimum(table, best.upper) for ends, table in best.costs.pairs.items()},
    )
    tables, random, sizes = by_ends(capped), np.random.default_rng(0), [len(own) for own in capped.unary]
    choice = list(messages.settle() if best.choice is None else best.choice)
    cost, choice = _settled(best, capped, tables, choice, random, TRIES)
    idle, left = 0, KICKS // len(sizes)
    while idle < IDLE_KICKS and left > 0 and not best.late:
        kick = kicked(tables, sizes, choice, random)
        now, other = _settled(best, capped, tables, kick, random, LATER_TRIES)
        idle = 0 if now < cost * (1 - 1e-9) else idle + 1
        left -= 1
        if now <= cost:
            cost, choice = now, other
    best.offer(tuple(choice))
    return messages.bound


def _settled(
    best: Best, costs: Costs, tables: Tables, choice: list[int], random: np.random.Generator, tries: int
) -> tuple[float, list[int]]:
    """Improve `choice` until `tries` forests in a row improve nothing or the deadline has passed. Return the cost and
    the choice."""
    cost, idle = costs.of(tuple(choice)), 0
    while idle < tries and not best.late:
        choice = improved(costs, tables, choice, random)
        now = costs.of(tuple(choice))
        idle = 0 if now < cost * (1 - 1e-9) else idle + 1
        cost = min(cost, now)
    return cost, choice


def _looked_at(node: _Node, best: Best) -> list[_Node]:
    """Solve a node, discard it, or branch; return the new nodes, the most promising one last."""
    costs, lift, constant, bound = node.costs, node.lift, node.constant, node.bound
    while True:
        try:
            rest = reduced(costs)
        except StrategyError:
            return []
        lift = _after(lift, rest.whole)
        costs, shift = grounded(rest.costs)
        constant += rest.constant + shift
        if not costs.unary:
            best.offer(lift(()))
            return []
        if _eliminated(costs, lift, best, EASY):
            return []
        room = best.upper - constant
        if room <= 0:
            return []
        messages = Messages(costs, room)
        if not _pass(messages, lift, best, constant):
            return []
        bound = max(bound, constant + messages.bound)
        before, left = sum(messages.sizes), messages.left()
        costs, lift = messages.shifted(), _after(lift, _among(left))
        if best.late or sum(map(len, left)) > (1 - GONE) * before:
            break
    affordable = min(LONGEST, best.deadline - time.monotonic()) * SUMS
    if _eliminated(costs, lift, best, affordable):
        return []
    return _divided(_Node(costs, lift, constant, bound))


def _pass(messages: Messages, lift: Lift, best: Best, constant: float) -> bool:
    """Pass messages while that raises the bound; return whether a better choice may exist."""
    last = -math.inf
    for sweep in range(SWEEPS):
        messages.sweep(forward=sweep % 2 == 0)
        if messages.bound >= messages.upper:
            return False
        if sweep % EVERY == EVERY - 1:
            best.offer(lift(messages.settle()))
            messages.upper = min(messages.upper, best.upper - constant)
            if best.late or messages.bound - last < HARDLY * (messages.upper - last):
                break
            last = messages.bound
    return messages.bound < messages.upper


def _eliminated(costs: Costs, lift: Lift, best: Best, work: float) -> bool:
    """Eliminate and offer the best choice, if that takes at most `work` sums; return whether it did."""
    order = elimination_order(costs, give_up=work)
    if order.work > work or order.entries > MANY_ENTRIES:
        return False
    best.offer(lift(eliminate_in(costs, order).choice))
    return True


def _divided(node: _Node) -> list[_Node]:
    """Two nodes, each with half of the options of one vertex; the one with the cheapest option comes last."""
    degree = [0] * len(node.costs.unary)
    for a, b in node.costs.pairs:
        degree[a] += 1
        degree[b] += 1
    sizes = [len(own) for own in node.costs.unary]
    vertex = max((v for v, n in enumerate(sizes) if n > 1), key=lambda v: degree[v] / math.log2(sizes[v] + 1))
    ranked = np.argsort(node.costs.unary[vertex], kind="stable")
    halves = np.sort(ranked[len(ranked) // 2 :]), np.sort(ranked[: len(ranked) // 2])
    parts = []
    for half in halves:
        rows = [half if v == vertex else np.arange(n) for v, n in enumerate(sizes)]
        unary = tuple(own[half] if v == vertex else own for v, own in enumerate(node.costs.unary))
        pairs = {
            (a, b): table[half] if a == vertex else table[:, half] if b == vertex else table
            for (a, b), table in node.costs.pairs.items()
        }
        parts.append(_Node(Costs(unary, pairs), _after(node.lift, _among(rows)), node.constant, node.bound))
    return parts


def _after(lift: Lift, inner: Lift) -> Lift:
    return lambda choice: lift(inner(choice))


def _among(kept: Sequence[np.ndarray]) -> Lift:
    return lambda choice: originals(kept, choice)
