"""recursive_programming: one mesh axis after another, each solved exactly given the axes before it.

On a 2 x 2 mesh an operator that may split rows on each axis has four options. The search first compares the two that
leave rows whole on the second axis. If splitting rows on the first axis is cheapest for all operators, it then compares
the two options that do so: rows split or whole on the second axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ..cost.conversion import Codes, tie
from ..minsum.eliminate import TABLE_LIMIT, affordable, eliminate_in, elimination_order
from ..minsum.network import originals
from ..problem.problem import SearchProblem, costs_of, restricted
from .solution import Solution


def recursive_programming(problem: SearchProblem) -> Solution:
    """Solve axis by axis: with the options that leave later axes whole, given the choice on earlier axes."""
    kept = [np.arange(len(v.options)) for v in problem.vertices]
    plan: tuple[int, ...] = ()
    width = 0
    for axis in range(len(problem.settings.mesh.axes)):
        part = _Axes(problem, range(axis + 1))
        narrowed = [part.leave_whole(i, rows) for i, rows in enumerate(kept)]
        costs = costs_of(restricted(_tied_up_to(problem, axis), narrowed))
        solution = eliminate_in(costs, affordable(costs, elimination_order(costs, TABLE_LIMIT)))
        plan = originals(narrowed, solution.choice)
        kept = [part.agree(i, rows, c) for i, (rows, c) in enumerate(zip(kept, plan, strict=True))]
        width = max(width, solution.width)
    return Solution(plan, problem.cost(plan), -math.inf, width)


def _tied_up_to(problem: SearchProblem, axis: int) -> SearchProblem:
    """`problem`, in which tied layouts may still differ on the axes after `axis`, which are not chosen yet."""
    axes = problem.settings.mesh.axes[: axis + 1]
    if not problem.settings.elementwise_follow:
        return problem
    edges = (replace(edge, table=tie(edge.table, axes)) if edge.table.tied else edge for edge in problem.edges)
    return replace(problem, edges=tuple(edges))


class _Axes:
    """The options of a problem as seen on some axes, computed once for vertices that share options."""

    def __init__(self, problem: SearchProblem, axes: Iterable[int]) -> None:
        self.problem, self.axes = problem, list(axes)
        self.others = [axis for axis in range(len(problem.settings.mesh.axes)) if axis not in self.axes]
        self._seen: dict[int, tuple[Codes, Codes]] = {}

    def _signatures(self, vertex: int) -> tuple[Codes, Codes]:
        """For every option, a number that identifies its states on these axes, and how much it uses the others."""
        options = self.problem.vertices[vertex].options
        if id(options) not in self._seen:
            placed = list(options.states())
            columns = [states[:, self.axes] for states, _ in placed]
            used = [(states[:, self.others] != whole).sum(axis=1) for states, whole in placed]
            _, names = np.unique(np.concatenate(columns, axis=1), axis=0, return_inverse=True)
            self._seen[id(options)] = names.reshape(-1), np.sum(used, axis=0)
        return self._seen[id(options)]

    def leave_whole(self, vertex: int, rows: Codes) -> Codes:
        """For each combination of states on these axes, the one of `rows` that uses the other axes least (not at all,
        unless annotated)."""
        names, used = self._signatures(vertex)
        order = rows[np.lexsort((rows, used[rows]))]
        _, first = np.unique(names[order], return_index=True)
        return np.sort(order[first])

    def agree(self, vertex: int, rows: Codes, chosen: int) -> Codes:
        """Those of `rows` that have the states of `chosen` on these axes."""
        names, _ = self._signatures(vertex)
        alike: Codes = rows[names[rows] == names[chosen]]
        return alike
