"""The entry `search`, and the table of search modes.

For the three operators of `minsum`, dynamic_programming finds 0, 0, 0, which costs 4, and proves that it is optimal.
sharding_propagation, from the first operator, propagates to 1, 1, 0, which costs 6, and revisits to 0, 0, 0. The bound
of both is 4.

A mode is a row of `SEARCHES`. The exact search runs in every mode, since it proves the bound.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ...strategy.basics.choice import Choice
from ...strategy.errors import StrategyError, VerifyError
from ..problem.problem import SearchProblem
from .exact import dynamic_programming
from .propagate import sharding_propagation
from .recursive import recursive_programming
from .solution import Solution
from .within_memory import has_room, with_fates, within_memory


class SearchMode(Choice):
    """The search modes."""

    SHARDING_PROPAGATION = "sharding_propagation"
    DYNAMIC_PROGRAMMING = "dynamic_programming"
    RECURSIVE_PROGRAMMING = "recursive_programming"


@dataclass(frozen=True)
class Search:
    """The search of one mode.

    find   a plan of the problem; None: the plan of the exact search
    """

    find: Callable[[SearchProblem], Solution] | None

    @property
    def exact(self) -> bool:
        """Whether its plan is that of the exact search, the cheapest under the same annotations."""
        return self.find is None


SEARCHES: Mapping[SearchMode, Search] = {
    SearchMode.DYNAMIC_PROGRAMMING: Search(None),
    SearchMode.SHARDING_PROPAGATION: Search(sharding_propagation),
    SearchMode.RECURSIVE_PROGRAMMING: Search(recursive_programming),
}


def find(problem: SearchProblem, mode: SearchMode) -> Solution | None:
    """The strategies that `mode` finds by itself, without a bound and fates; None if it takes those of the exact
    search. (If they cost more than a plan on another mesh, the exact search can be skipped on this one.)"""
    own = SEARCHES[mode].find
    return own(problem) if own else None


def search(
    problem: SearchProblem, mode: SearchMode, below: float = math.inf, found: Solution | None = None
) -> Solution:
    """The plan that `mode` finds. Its cost is always that of the whole problem, and its bound is proven by the exact
    search. If another mesh has a plan that costs `below`, any plan is returned once a cheaper one is ruled out, or
    would be too much work to find. `found`: the result of `find`, if known.

    Raises StrategyError if no plan keeps to the memory limit of the problem's settings, or if there is none.
    """
    plan = found or find(problem, mode)
    if plan is not None and below <= plan.cost < math.inf and has_room(problem, plan.choice):
        return plan
    exact = dynamic_programming(problem, below=below)
    if math.isinf(exact.cost):
        raise StrategyError(_impossible(problem, exact))
    if plan is None:
        return exact if exact.bound >= below else within_memory(problem, exact)
    plan = replace(plan, cost=problem.cost(plan.choice), bound=exact.bound, attained=exact.proven)
    # vertices that choose one after another may end up with conversions that `elementwise_follow` makes impossible, and
    # their choices may take more memory than there is
    with contextlib.suppress(StrategyError):
        if math.isfinite(plan.cost):
            return with_fates(problem, plan)
    return within_memory(problem, exact)


def _impossible(problem: SearchProblem, plan: Solution) -> str:
    """The text that names an impossible conversion of a plan."""
    for edge in problem.edges:
        producer, consumer = problem.vertices[edge.producer], problem.vertices[edge.consumer]
        before = producer.options[plan.choice[edge.producer]].results[edge.result]
        after = consumer.options[plan.choice[edge.consumer]].operands[edge.operand]
        if math.isinf(edge.table.rows([edge.table.index[before]])[0, edge.table.index[after]]):
            return (
                f"no plan was found on the mesh {problem.settings.mesh}: {producer.name} gives "
                f"{list(edge.table.shape)} as {before}, {consumer.name} takes it as {after}, and no conversion is "
                "allowed between them; set elementwise_op_strategy_follow=False, or drop an annotation near them"
            )
    raise VerifyError("the plan costs inf, but none of its conversions is impossible")
