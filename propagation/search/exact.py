"""dynamic_programming: the exact search, whose bound is reported with the plan of every mode.

The three operators of `minsum` have three columns of 2 costs and two tables of 2 x 2, which are small enough to be
written out: `optimum` eliminates them and proves that the minimum is 4. On a mesh of four axes a table has a million
entries and more. It is not written out, and `optimum_of_many` rules options out first.
"""

from __future__ import annotations

import math

from ..minsum.eliminate import TABLE_LIMIT
from ..minsum.many import optimum_of_many
from ..minsum.network import Costs, Found
from ..minsum.optimum import optimum
from ..problem.problem import SearchProblem, are_few, costs_of, is_written_out, network_of
from .recursive import recursive_programming
from .solution import Solution, solution_of


def dynamic_programming(
    problem: SearchProblem, *, below: float = math.inf, table_limit: float = TABLE_LIMIT
) -> Solution:
    """The optimum, proven; or, if tables would exceed `table_limit` entries, a plan and a bound. `below`: as for
    `search`."""

    def start() -> tuple[int, ...]:
        return recursive_programming(problem).choice

    if is_written_out(problem):
        return solution_of(optimum(costs_of(problem), table_limit, start, below))

    def of_few(costs: Costs, known: tuple[int, ...]) -> Found:
        return optimum(costs, table_limit, lambda: known)

    return solution_of(optimum_of_many(network_of(problem), start, below, are_few, of_few))
