"""The plan with the shortest predicted step, for `shard(..., level=2)`.

A search minimises a sum: the times of operators and collectives. A step is shorter than the sum, because collectives
overlap with operators, and because those of parameters are sent in groups with one latency each. The difference is
known only after the step is made and its schedule simulated. So the search runs at several prices of a second of
communication, without the latencies of parameters' collectives; the step of each plan is made and simulated, and the
shortest one wins.

With computation C and communication M on separate lanes, a step takes at least max(C, M), which is at least
(C + p M) / (1 + p) for every price p. So each of these searches proves a bound: the cost of its optimum over 1 + p.
"""

from __future__ import annotations

from dataclasses import replace

from partway.compiler.passes import SEARCHING, Around, Draft, applied, lowered, run
from partway.compiler.replan_within_memory import program_of
from partway.propagation.cost.cost import Level
from partway.propagation.problem.problem import Settings
from partway.propagation.search.solution import Ends

PRICES = (1.0, 0.5, 0.2, 0.05)  # of a second of communication, in seconds of computing
ROUNDING = 1 - 1e-9  # a relative difference below this does not count


def earliest(draft: Draft, around: Around = applied) -> Draft:
    """Under level 2, the draft, up to its solution, of the plan with the shortest step among `draft` and those found at
    several prices of communication on its mesh. Under other levels, or if a plan was given, `draft` itself."""
    inputs = draft.inputs
    if inputs.request.level != Level.SPEED.value or inputs.replayed is not None or inputs.followed is not None:
        return draft
    best, ends, bound = draft, _end_of(draft, around), 0.0
    seen = {draft.solution.choice}
    for price in PRICES:
        tried = run(SEARCHING, replace(draft, settings=_priced(draft, price)), around)
        bound = max(bound, tried.solution.bound / (1 + price))
        if tried.solution.choice in seen:
            continue
        seen.add(tried.solution.choice)
        end = _end_of(tried, around)
        if end < ends * ROUNDING:
            best, ends = tried, end
    return replace(best, solution=replace(best.solution, ends=Ends(ends, min(bound, ends))))


def _priced(draft: Draft, price: float) -> Settings:
    """The settings of `draft` with this price of communication, and parameters in groups."""
    weights = draft.settings.weights
    priced = replace(weights, wire=price * weights.wire, latency=price * weights.latency)
    return replace(draft.settings, weights=priced, grouped=True)


def _end_of(draft: Draft, around: Around) -> float:
    """The predicted seconds of the step of a draft with a solution."""
    draft = lowered(draft, around)
    return program_of(draft).schedule.seconds + draft.plan.optimizer_time
