"""Rule out options that no optimal plan takes, before the exact search joins tables.

For the three operators of __init__.py (costs: a 1, 0; b 3, 2; c 0, 6; 5 if a and b differ, 4 if b and c do), the plan
1, 1, 0 is known, which costs 6. A pass from a to c:

    a tells b    b=0: min(1 + 0, 0 + 5) = 1    b=1: min(1 + 5, 0 + 0) = 0    b now costs (3 + 1, 2 + 0) = (4, 2)
    b tells c    c=0: min(4 + 0, 2 + 4) = 4    c=1: min(4 + 4, 2 + 0) = 2    c now costs (0 + 4, 6 + 2) = (4, 8)

No plan costs less than 4, and none with c=1 costs less than 8, so that option is dropped.

Tree-reweighted message passing (Kolmogorov, "Convergent tree-reweighted message passing for energy minimization",
2006, TRW-S): messages along the edges shift costs between vertices, so that the sum of the minima of all vertices
bounds the cost of every plan from below. A pass also gives a bound for each option, on the plans that take it; an
option whose bound exceeds the cost of a known plan is dropped.

Any messages give a valid bound. Write m(e, v) for the message of edge e to its end v, and

    h(v) = unary(v) + the messages to v        r(e) = pair(e) - the messages of e

so that the cost of a plan is the sum of all h and r. A pass in vertex order computes, at each vertex s and for each of
its edges e to later vertices, the message that makes `g(s) h(s) + r(e)` at least 0 for all options, with g(s) one over
the larger number of edges on one side. The sum of `(1 - g(s) edges sent) h(s)` is then a bound, and likewise backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ...strategy.basics.blocks import tell
from ..cost.conversion import Floats
from .network import Between, Network, originals

SWEEPS = 40  # at most, forward and backward
PATIENCE = 12  # sweeps after which narrowing stops once hardly any option goes
ROUND = 4  # sweeps between removals of dropped options from the arrays


def narrow(network: Network, upper: float, enough: Callable[[Narrowing], bool]) -> Narrowing:
    """Drop options that no plan cheaper than `upper` takes, until `enough` says that few are left, or few more can be
    dropped."""
    narrowing = Narrowing(network, upper)
    left = narrowing.left
    for sweep in range(SWEEPS):
        narrowing.sweep(forward=sweep % 2 == 0)
        tell(narrowing.upper, narrowing.bound)
        if narrowing.bound >= narrowing.upper * (1 - 1e-9):
            break
        if sweep % ROUND == ROUND - 1:
            narrowing.settle()
            narrowing.shrink()
            if enough(narrowing) or (sweep > PATIENCE and narrowing.left > 0.97 * left):
                break
            left = narrowing.left
    narrowing.shrink()
    return narrowing


@dataclass(eq=False)
class _Edge:
    """One edge between vertices `ends[0] < ends[1]`: its costs, and its message to each end."""

    ends: tuple[int, int]
    costs: Between
    messages: list[Floats]

    def send(self, side: int, share: Floats) -> None:
        """The message from the end at `side`, whose share of its costs is `share`."""
        self.messages[1 - side] = self.costs.least(share - self.messages[side], side)


class Narrowing:
    """The state of narrowing a network.

    upper   the cost of the best known plan
    best    that plan, by number in the whole problem; None: narrowing has found none cheaper than the first
    bound   a lower bound on the cost of every plan
    worth   for each option that is left, a lower bound on the cost of any plan that takes it
    kept    the options that are left of every vertex, by number in the whole problem
    unary   their costs; includes options dropped since the last `shrink`
    edges   the costs between them, and the messages
    """

    def __init__(self, network: Network, upper: float) -> None:
        unary = network.unary
        self.upper, self.bound = upper, -np.inf
        self.best: tuple[int, ...] | None = None
        self.kept = [np.arange(len(costs)) for costs in unary]
        self.worth = [np.full(len(costs), -np.inf) for costs in unary]
        self._alive = [np.ones(len(costs), dtype=bool) for costs in unary]
        self.unary = [np.minimum(costs, 2 * upper) for costs in unary]
        self.edges = [_Edge(ends, costs, [np.zeros(n) for n in costs.shape]) for ends, costs in network.edges]
        self.sides: list[tuple[list[_Edge], list[_Edge]]] = [([], []) for _ in unary]  # to earlier, to later vertices
        for edge in self.edges:
            self.sides[edge.ends[0]][1].append(edge)
            self.sides[edge.ends[1]][0].append(edge)
        self._settled: list[Floats] = [np.zeros(len(costs)) for costs in unary]

    @property
    def left(self) -> int:
        """The number of options that are left in all."""
        return sum(int(alive.sum()) for alive in self._alive)

    @property
    def pairs(self) -> int:
        """The number of pairs of options that are left (after `shrink`)."""
        return sum(edge.costs.shape[0] * edge.costs.shape[1] for edge in self.edges)

    def original(self, choice: Iterable[int]) -> tuple[int, ...]:
        """A choice among the options that are left, by their numbers in the whole problem."""
        return originals(self.kept, choice)

    def shrink(self) -> None:
        """Remove the dropped options from all arrays."""
        for v, alive in enumerate(self._alive):
            if not alive.all():
                self.kept[v], self.unary[v] = self.kept[v][alive], self.unary[v][alive]
                self._settled[v], self.worth[v] = self._settled[v][alive], self.worth[v][alive]
        for edge in self.edges:
            a, b = (self._alive[v] for v in edge.ends)
            if not (a.all() and b.all()):
                edge.costs = edge.costs.take(a, b)
                edge.messages = [edge.messages[0][a], edge.messages[1][b]]
        self._alive = [np.ones(len(kept), dtype=bool) for kept in self.kept]

    def heights(self, vertex: int) -> Floats:
        """The costs of each option after all shifts."""
        earlier, later = self.sides[vertex]
        total = self.unary[vertex]
        for edge in earlier:
            total = total + edge.messages[1]
        for edge in later:
            total = total + edge.messages[0]
        return total

    def settle(self) -> None:
        """Make a plan: vertices in order take the best options given the earlier vertices' options and the later ones'
        messages. It replaces the known plan if it is cheaper."""
        plan = np.zeros(len(self.unary), dtype=np.intp)
        cost = 0.0
        for s, (earlier, later) in enumerate(self.sides):
            here = self.unary[s]
            for edge in earlier:
                here = here + edge.costs.with_option(int(plan[edge.ends[0]]), 0)
            outlook = here + sum((edge.messages[0] for edge in later), np.zeros(1))
            plan[s] = int(np.argmin(outlook))
            cost += float(here[plan[s]])
        if cost < self.upper:
            self.upper = cost
            self.best = self.original(plan)

    def sweep(self, forward: bool) -> None:
        """One pass over the vertices: shift costs, raise the bound, drop options.

        Of a vertex that the pass has not reached, a part of its worth after the last pass, in the other direction,
        covers its edges to other such vertices; the rest counts here.
        """
        order = range(len(self.unary)) if forward else range(len(self.unary) - 1, -1, -1)
        ahead, behind = (1, 0) if forward else (0, 1)  # the side of a vertex on which its edges to later ones are
        share = [1.0 / max(len(earlier), len(later), 1) for earlier, later in self.sides]
        heights = [self.heights(v) for v in range(len(self.unary))]
        covering = [len(self.sides[v][behind]) for v in range(len(self.unary))]

        def rest(v: int) -> float:
            return float((heights[v] - share[v] * covering[v] * self._settled[v]).min())

        rests = [rest(v) for v in range(len(self.unary))]
        elsewhere = sum(rests)  # a bound on what all vertices but the present one cost
        settled = list(self._settled)
        for s in order:
            elsewhere -= rests[s]
            here = heights[s]
            self.bound = max(self.bound, elsewhere + float(here.min()))
            self.worth[s] = np.maximum(self.worth[s], elsewhere + here)
            hopeless = (self.worth[s] > self.upper * (1 + 1e-9)) & self._alive[s]
            if hopeless.any() and not hopeless.all():
                self._alive[s] &= ~hopeless
                fine = np.where(hopeless, 2 * self.upper, 0.0)
                self.unary[s] = self.unary[s] + fine
                here = heights[s] = here + fine
            settled[s] = here
            elsewhere += float(here.min()) * (1 - share[s] * len(self.sides[s][ahead]))
            for edge in self.sides[s][ahead]:
                side = edge.ends.index(s)
                far = edge.ends[1 - side]
                before = edge.messages[1 - side]
                edge.send(side, share[s] * here)
                heights[far] = heights[far] + edge.messages[1 - side] - before
                covering[far] -= 1
                now = rest(far)
                elsewhere += now - rests[far]
                rests[far] = now
        self._settled = settled
