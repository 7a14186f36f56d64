"""sharding_propagation: strategies spread from the annotations, and vertices take their cheapest options in turn.

`relu(x * 2).sum()` with x split by rows, `[x:S0]`: x * 2 splits rows, since that needs no conversion, and so does relu.
The sum then has the layout `[x:P]`, partial sums, and an all-reduce converts it into the output `[x:R]`.
"""

from __future__ import annotations

import numpy as np

from ..minsum.visits import propagate, revisit
from ..problem.problem import Options, SearchProblem, VertexKind, network_of
from .solution import Solution


def sharding_propagation(problem: SearchProblem) -> Solution:
    """Visit vertices breadth-first from the annotated ones (the inputs, if none is annotated), then revisit them.

    Several starts are tried, and the cheapest plan is returned: from the annotations; from the inputs, so that an
    annotation cannot spoil unrelated parts; and from the inputs split by their leading dim, which is data parallelism.
    """
    annotated = [i for i, v in enumerate(problem.vertices) if v.annotation]
    inputs = [i for i, v in enumerate(problem.vertices) if v.kind is VertexKind.INPUT]
    network = network_of(problem)
    leading = {i: _most_split(problem.vertices[i].options) for i in inputs}
    starts = [(annotated, {}), (inputs, {}), (inputs, leading)] if annotated else [(inputs, {}), (inputs, leading)]
    plans = [revisit(network, propagate(network, sources or [0], fixed)) for sources, fixed in starts]
    best = min(plans, key=lambda plan: plan.cost)
    return Solution(best.choice, problem.cost(best.choice), best.bound)


def _most_split(options: Options) -> int:
    """The option of an input that splits its leading dim into the most parts."""
    table = options.tables[1][0]
    return int(np.argmax(table.parts(0)[options.results[0]])) if table and table.shape else 0
