"""What a search returns.

Of three operators with the options 0, 0, 0 at a cost of 4 and a bound of 4 it is `Solution((0, 0, 0), 4, 4)`, proven;
`verify_solution` adds 4 up again, from the options' costs and those of conversions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...strategy.errors import VerifyError
from ..memory.backward_memory import HeldBytes
from ..memory.keeping import Keeping, cost_with_fates
from ..minsum.found import Found
from ..problem.problem import SearchProblem


@dataclass(frozen=True, slots=True)
class Ends:
    """When the step of a plan is predicted to end, and a bound on when that of any plan does, in seconds from its
    beginning."""

    seconds: float
    bound: float


@dataclass(frozen=True)
class Solution(Found):
    """One option per vertex, with its cost and a bound on that of every plan, and what the search says beside.

    attained   a plan that costs the bound is known
    replayed   the options are those of a plan that was given: nothing was searched
    of_other_sizes   that plan was made by a search, for tensors of other sizes
    keeping    what is kept for the backward and what is computed again; None: it was not asked
    held       what a device holds while the backward runs
    binding    the cheapest plan would hold more than the memory limit, so that this one is another
    ends       when its step ends, where the search has asked
    """

    attained: bool = False
    replayed: bool = False
    of_other_sizes: bool = False
    keeping: Keeping | None = None
    held: HeldBytes | None = field(default=None, compare=False)
    binding: bool = False
    ends: Ends | None = None

    def __str__(self) -> str:
        return f"the cheapest plan costs {self.cost:.6g}, and none costs less than {self.bound:.6g}"


def solution_of(found: Found) -> Solution:
    """What was found of a problem's numbers, as a solution of the problem."""
    return Solution(found.choice, found.cost, found.bound, found.width)


def verify_solution(problem: SearchProblem, solution: Solution) -> Solution:
    """Raise VerifyError unless every vertex has one of its options, at the cost that is claimed."""
    if len(solution.choice) != len(problem.vertices):
        raise VerifyError(f"the plan has {len(solution.choice)} choices for {len(problem.vertices)} vertices")
    for vertex, choice in zip(problem.vertices, solution.choice, strict=True):
        if not 0 <= choice < len(vertex.options):
            raise VerifyError(f"{vertex.name} has no option {choice}")
    cost = problem.cost(solution.choice)
    if solution.keeping:
        cost = cost_with_fates(problem, solution.choice, solution.keeping)
    if not math.isfinite(cost) or abs(cost - solution.cost) > 1e-9 * max(abs(cost), 1e-12):
        raise VerifyError(f"the plan costs {cost}, not {solution.cost}")
    return solution
