"""The plan with the shortest predicted step, for `shard(..., level=2)`.

A search minimises a sum: the times of operators and collectives. A step is shorter than the sum, because collectives
overlap with operators, and because those of parameters are sent in groups with one latency each. The difference is
known only after the step is made and its schedule simulated. So the search runs at several prices of a second of
communication, without the latencies of parameters' collectives; the step of each plan is made and simulated, and the
shortest one wins.

Each of these searches also proves a bound. Let C be the seconds of computation and M those of communication, alone, on
k lanes. In a second of a step in which both run, `computing` of C and at most k * `communicating` of M are done; in any
other, at most 1 of C or k of M. So a * C + b * M is at most the step, if a * computing + b * k * communicating <= 1,
a <= 1 and b * k <= 1. With b = p * a for the price p, a times the cost of the optimum is a bound (`least_share`). With
one lane and no slowdown, a is 1 / (1 + p): the step is at least C, M, and any mean of both.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from partway.compiler.passes import SEARCHING, Around, Draft, applied, lowered, run
from partway.compiler.replan_within_memory import program_of
from partway.propagation.cost.cost import Level, outermost
from partway.propagation.cost.profile import DeviceProfile
from partway.propagation.problem.problem import Settings
from partway.propagation.search.solution import Ends
from partway.strategy import Mesh

PRICES = (1.0, 0.5, 0.2, 0.02)  # of a second of communication, in seconds of computing
ROUNDING = 1 - 1e-9  # a relative difference below this does not count


def earliest(draft: Draft, around: Around = applied) -> Draft:
    """Under level 2, the draft, up to its solution, of the plan with the shortest step among `draft` and those found at
    several prices of communication on its mesh. Under other levels, or if a plan was given, `draft` itself."""
    inputs = draft.inputs
    if inputs.request.level != Level.SPEED.value or inputs.replayed is not None or inputs.followed is not None:
        return draft
    best, ends, bound = draft, _end_of(draft, around), 0.0
    seen, lanes = {draft.solution.choice}, _lanes(draft.mesh, inputs.profile)
    for price in PRICES:
        tried = run(SEARCHING, replace(draft, settings=_priced(draft, price)), around)
        bound = max(bound, tried.solution.bound * least_share(price, inputs.profile, lanes))
        if tried.solution.choice in seen:
            continue
        seen.add(tried.solution.choice)
        end = _end_of(tried, around)
        if end < ends * ROUNDING:
            best, ends = tried, end
    return replace(best, solution=replace(best.solution, ends=Ends(ends, min(bound, ends))))


def _priced(draft: Draft, price: float) -> Settings:
    """The settings of `draft` with this price of communication, with the latencies of collectives that have queued, and
    parameters in groups."""
    weights, queued = draft.settings.weights, draft.inputs.profile.together.queued
    priced = replace(weights, wire=price * weights.wire, latency=price * queued * weights.latency)
    return replace(draft.settings, weights=priced, grouped=True)


def least_share(price: float, profile: DeviceProfile, lanes: int) -> float:
    """The share of C + price * M, computation and communication alone, that every step takes at least."""
    together = profile.together
    both = together.computing + price * lanes * together.communicating
    return min(1.0, 1.0 / (price * lanes), 1.0 / both)


def _lanes(mesh: Mesh, profile: DeviceProfile) -> int:
    """The number of lanes on which collectives over axes of a mesh run."""
    sets = (axes for count in range(1, len(mesh.axes) + 1) for axes in itertools.combinations(mesh.axes, count))
    return len({outermost(mesh, axes, profile) for axes in sets if mesh.size(*axes) > 1}) or 1


def _end_of(draft: Draft, around: Around) -> float:
    """The predicted seconds of the step of a draft with a solution."""
    draft = lowered(draft, around)
    return program_of(draft).schedule.seconds + draft.plan.optimizer_time
