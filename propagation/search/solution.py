"""The result of a search.

For the three operators of `minsum` it is `Solution((0, 0, 0), 4, 4)`: the options, the cost and the bound, which are
equal, so the plan is proven optimal. `verify_solution` adds up the cost again from those of options and conversions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ...strategy.errors import VerifyError
from ..memory.held import Held
from ..memory.keeping import cost_with_fates
from ..memory.reader import Keeping
from ..minsum.network import Found
from ..problem.problem import SearchProblem


@dataclass(frozen=True, slots=True)
class Ends:
    """The predicted end of a plan's step, and a bound on that of any plan, in seconds from the step's beginning."""

    seconds: float
    bound: float


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The other meshes that a plan could have been on: how many, and a bound on the cost of every plan on them, -inf if
    none is known."""

    meshes: int
    bound: float


@dataclass(frozen=True)
class Solution(Found):
    """One option per vertex, its cost, a bound on the cost of every plan, and further results of the search.

    attained   a plan that costs the bound is known
    replayed   the options come from a given plan: nothing was searched
    of_other_sizes   the given plan was found by a search for tensors of other sizes
    keeping    the fates of results and conversions; None: not searched for
    held       the bytes on a device during the backward
    binding    the cheapest plan would exceed the memory limit, so this is another one
    ends       the predicted end of its step, if the search predicted it
    """

    attained: bool = False
    replayed: bool = False
    of_other_sizes: bool = False
    keeping: Keeping | None = None
    held: Held | None = field(default=None, compare=False)
    binding: bool = False
    ends: Ends | None = None

    def __str__(self) -> str:
        return f"the cheapest plan costs {self.cost:.6g}, and none costs less than {self.bound:.6g}"


def solution_of(found: Found) -> Solution:
    """The solution of a problem from `found`, the result for its numbers."""
    return Solution(found.choice, found.cost, found.bound, found.width)


def verify_solution(problem: SearchProblem, solution: Solution) -> Solution:
    """Return `solution`. Raises VerifyError unless every vertex has one of its options and the cost is correct."""
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
