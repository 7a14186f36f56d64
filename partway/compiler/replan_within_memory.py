"""A plan whose step stays within the memory limit.

The search does not count all memory of a step, above all that of groups of collectives in flight; it is known only
after the step is made. So near the limit the step is made and its memory is computed from its graphs; if it is too
much, the search is repeated with the excess at each operator. A plan that was too large is then too large for the
search.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from partway.compiler.passes import SEARCHING, Around, Draft, applied, differentiated_program, fused, lowered, run
from partway.propagation.cost.conversion import Floats
from partway.propagation.graph.graph import differentiated
from partway.propagation.memory.backward_memory import at_vertices
from partway.propagation.memory.held import Held, Purpose
from partway.propagation.plan.data import Memory
from partway.propagation.plan.plan import Plan
from partway.propagation.program.program import Program
from partway.runtime.executors.peak import held_by
from partway.strategy.errors import DoesNotFitError

NEAR = 0.9  # of the limit: from here on the count of the search may be too small
SEARCHES = 6  # each with more uncounted memory than the one before


def fitted(draft: Draft, around: Around = applied) -> Draft:
    """The draft with the plan of a draft with a solution or, if its step would exceed the limit, of another search with
    less room. A given plan stays as it is. Raises DoesNotFitError if no search finds one that fits."""
    draft = lowered(draft, around)
    limit, bound, least = draft.settings.memory_limit, draft.solution.bound, math.inf
    if limit is None or draft.plan.memory.total < NEAR * limit:
        return draft
    for _ in range(SEARCHES):
        held = held_in_step(draft.plan, program_of(draft))
        memory = Memory.at_peak(held)
        if memory.total <= limit or draft.inputs.replayed is not None:
            return replace(draft, plan=draft.plan.holding(memory))
        least = min(least, memory.total)
        problem = replace(draft.problem, beside=np.maximum(draft.problem.beside, _beside(draft, held)))
        try:
            draft = run(SEARCHING[1:], replace(draft, problem=problem), around)
        except DoesNotFitError as error:
            raise error.changed(min(error.least, least), limit) from None
        # less room cannot make plans cheaper: the bound of the first search stays valid
        solution = replace(draft.solution, bound=min(bound, draft.solution.cost), binding=True)
        draft = lowered(replace(draft, solution=solution), around)
    raise DoesNotFitError(f"on the mesh {draft.mesh}", least, limit, str(memory))


def program_of(draft: Draft) -> Program:
    """The program of a draft with a plan, with the backward of every differentiable output."""
    with torch.inference_mode(False):  # inference mode would record no gradients
        return fused(differentiated_program(draft.inputs, draft.program, differentiated(draft.inputs.graph)))


def held_in_step(plan: Plan, program: Program) -> Held:
    """The bytes that a rank holds in a step of `program`, that of `plan`."""
    rest = plan.memory
    throughout = {Purpose.PARAMETERS: rest.parameters, Purpose.OPTIMIZER: rest.optimizer, Purpose.INPUTS: rest.inputs}
    return held_by(program, throughout)


def _beside(draft: Draft, held: Held) -> Floats:
    """The bytes, in the forward or backward of each vertex, that a rank holds and the search has not counted."""
    most = {vertex.name: 0.0 for vertex in draft.problem.vertices}
    name, waiting = "", 0.0
    for moment, size in zip(held.moments, held.total.tolist(), strict=True):
        waiting = max(waiting, size)
        if moment.of in most:  # other memory counts for the next operator that does
            name = moment.of
            most[name], waiting = max(most[name], waiting), 0.0
    if name:
        most[name] = max(most[name], waiting)
    counted = draft.solution.held
    assert counted is not None
    of_vertices = np.array([most[vertex.name] for vertex in draft.problem.vertices])
    beside: Floats = np.maximum(of_vertices - at_vertices(counted), 0.0)
    return beside
