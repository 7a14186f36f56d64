"""Options that no optimal plan takes are found before the exact search joins tables.

Tree-reweighted message passing (Kolmogorov, "Convergent tree-reweighted message passing for energy minimization",
2006, TRW-S): messages along the edges shift costs between vertices so that a sum of minima, one for each vertex,
bounds the cost of every plan from below. The bound with one option forced follows at each vertex on the way; an
option whose bound lies above the cost of a plan that is known is dropped.

Any messages give a valid bound. Write m(e, v) for the message of edge e to its end v, and

    h(v) = unary(v) + the messages to v        r(e) = pair(e) - the messages of e

so that a plan costs the sum of all h and r. A pass in vertex order computes at each vertex s, for its edges e to later
vertices, the message that makes `g(s) h(s) + r(e)` at least 0 for all options, with g(s) one over the larger number
of edges on one side. The sum of `(1 - g(s) edges sent) h(s)` is then a bound, and likewise backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .conversion import Floats


@dataclass(eq=False)
class _Edge:
    """One edge between vertices `ends[0] < ends[1]`: its costs, and its message to each end."""

    ends: tuple[int, int]
    costs: Floats
    messages: list[Floats]

    def other(self, side: int) -> int:
        return self.ends[1 - side]

    def send(self, side: int, share: Floats) -> None:
        """The message from the end at `side`, whose share of its costs is `share`."""
        rest = share - self.messages[side]
        if side == 0:
            self.messages[1] = (self.costs + rest[:, None]).min(axis=0)
        else:
            self.messages[0] = (self.costs + rest).min(axis=1)


class Narrowing:
    """The options that are left of every vertex, the bound, and the best plan that was met."""

    def __init__(self, unary: list[Floats], pairs: dict[tuple[int, int], Floats], upper: float) -> None:
        clipped: dict[int, Floats] = {}
        for costs in (*unary, *pairs.values()):  # a plan with a cost above the known plan's is of no interest
            if id(costs) not in clipped:
                clipped[id(costs)] = np.minimum(costs, upper)
        self.upper, self.bound = upper, -np.inf
        self.kept = [np.arange(len(costs)) for costs in unary]
        self.unary = [clipped[id(costs)] for costs in unary]
        self.edges = [
            _Edge(ends, clipped[id(costs)], [np.zeros(len(unary[ends[0]])), np.zeros(len(unary[ends[1]]))])
            for ends, costs in pairs.items()
        ]
        self.sides: list[tuple[list[_Edge], list[_Edge]]] = [([], []) for _ in unary]  # to earlier, to later vertices
        for edge in self.edges:
            self.sides[edge.ends[0]][1].append(edge)
            self.sides[edge.ends[1]][0].append(edge)
        self._settled: list[Floats] = [np.zeros(len(costs)) for costs in unary]

    def heights(self, vertex: int) -> Floats:
        """The costs of each option after all shifts."""
        earlier, later = self.sides[vertex]
        total = self.unary[vertex]
        for edge in earlier:
            total = total + edge.messages[1]
        for edge in later:
            total = total + edge.messages[0]
        return total

    def sweep(self, forward: bool) -> NDArray[np.intp]:
        """One pass. Returns the plan of options that it settles on by the way."""
        order = range(len(self.unary)) if forward else range(len(self.unary) - 1, -1, -1)
        ahead, behind = (1, 0) if forward else (0, 1)  # index into `sides`, and the side of an edge we stand on
        share = [1.0 / max(len(earlier), len(later), 1) for earlier, later in self.sides]
        heights = [self.heights(v) for v in range(len(self.unary))]
        owed = [len(self.sides[v][behind]) for v in range(len(self.unary))]  # edges whose far end is still to come

        def rest(v: int) -> float:
            return float((heights[v] - share[v] * owed[v] * self._settled[v]).min())

        rests = [rest(v) for v in range(len(self.unary))]
        outlook = sum(rests)
        settled: list[Floats] = list(self._settled)
        plan = np.zeros(len(self.unary), dtype=np.intp)
        for s in order:
            outlook -= rests[s]
            here = heights[s]
            self.bound = max(self.bound, outlook + float(here.min()))
            keep = outlook + here <= self.upper * (1 + 1e-9)
            self._pick(s, behind, plan)
            if not keep.all() and keep.any():
                here = heights[s] = np.where(keep, here, here + 2 * self.upper)
                self._dropped(s, keep)
            settled[s] = here
            outlook += float(here.min()) * (1 - share[s] * len(self.sides[s][ahead]))
            for edge in self.sides[s][ahead]:
                side = edge.ends.index(s)
                far = edge.other(side)
                before = edge.messages[1 - side]
                edge.send(side, share[s] * here)
                heights[far] = heights[far] + edge.messages[1 - side] - before
                owed[far] -= 1
                new = rest(far)
                outlook += new - rests[far]
                rests[far] = new
        self._settled = settled
        return plan

    def _pick(self, s: int, behind: int, plan: NDArray[np.intp]) -> None:
        """The option of `s` that suits the vertices behind it as they were picked, and the messages from ahead."""
        total = self.unary[s]
        for edge in self.sides[s][behind]:
            side = edge.ends.index(s)
            chosen = plan[edge.other(side)]
            total = total + (edge.costs[:, chosen] if side == 0 else edge.costs[chosen])
        for edge in self.sides[s][1 - behind]:
            total = total + edge.messages[edge.ends.index(s)]
        plan[s] = int(np.argmin(total))

    def _dropped(self, s: int, keep: NDArray[np.bool_]) -> None:
        self.unary[s] = np.where(keep, self.unary[s], self.unary[s] + 2 * self.upper)
