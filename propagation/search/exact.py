"""dynamic_programming: the exact search, whose bound is reported with the plan of every mode.

Three operators with two options each have three columns and two tables of 2 x 2, which are written out: elimination
proves 4. On four axes a table has a million entries and more, and is not written out.

If all costs may be written out they go to `optimum`, which eliminates. If they are too many, options are left out
first.
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
