"""The plan whose step is predicted to end first: what `shard(..., level=2)` asks for.

A search minimises a sum, of what operators and collectives take. A step ends earlier, as far as collectives run while
operators compute, and as far as those of parameters are sent in groups, which wait once. How far is known once the step
is made and its schedule played. So plans are searched for at several prices of a second of communication, in which the
collectives of parameters wait for nothing; the step of each is made and played, and the one that ends first is taken.

With computing C and communication M on lanes of their own a step ends after max(C, M), which is at least
(C + p M) / (1 + p) for every price p. So each of these searches proves a bound: what its optimum costs, over 1 + p.
"""

from __future__ import annotations

from dataclasses import replace

from partway.compiler.passes import SEARCHING, Around, PlanDraft, applied, lowered, run
from partway.compiler.replan_within_memory import program_of
from partway.propagation.cost.cost import Level
from partway.propagation.problem.problem import Settings
from partway.propagation.search.solution import Ends

PRICES = (1.0, 0.5, 0.2, 0.05)  # of a second of communication, in seconds of computing
ROUNDING = 1 - 1e-9  # an end that is no earlier than that is the same


def earliest(draft: PlanDraft, around: Around[PlanDraft] = applied) -> PlanDraft:
    """Under level 2 the draft, up to its solution, of the plan that ends first among those found at some prices of
    communication, on the mesh of `draft`, which has its solution. Under other levels, and where a plan was given,
    `draft` itself."""
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


def _priced(draft: PlanDraft, price: float) -> Settings:
    """The settings of `draft` with this price of communication, and with parameters in groups."""
    weights = draft.settings.weights
    priced = replace(weights, wire=price * weights.wire, latency=price * weights.latency)
    return replace(draft.settings, weights=priced, grouped=True)


def _end_of(draft: PlanDraft, around: Around[PlanDraft]) -> float:
    """When the step of a draft that has its solution is predicted to end, in seconds from its beginning."""
    return program_of(draft, lowered(draft, around)).schedule.seconds
