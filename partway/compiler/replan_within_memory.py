"""A plan whose step stays within the memory limit.

The search does not count all memory of a step, above all that of groups of collectives in flight; it is known only
after the step is made. So near the limit the step is made and its memory is computed from its graphs; if it is too
much, the search is repeated with the excess at each operator.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from partway.compiler.passes import SEARCHING, Around, Draft, applied, differentiated_program, fused, lowered, run
from partway.propagation.cost.conversion import Floats
from partway.propagation.graph.graph import differentiated
from partway.propagation.graph.nodes import computed_again, operator_of
from partway.propagation.plan.data import Memory
from partway.propagation.plan.plan import Plan
from partway.propagation.program.program import Program
from partway.runtime.executors.peak import moments, peak
from partway.strategy.errors import DoesNotFitError

NEAR = 0.9  # of the limit: from here on the count of the search may be too small
TRIES = 6  # searches, each with more uncounted memory than the one before
AT_OPERATORS = 3  # the first of these, in which it is added at the operators that hold it; later at all operators


def fitted(draft: Draft, around: Around = applied) -> Draft:
    """The draft with the plan of a draft with a solution or, if its step would exceed the limit, of another search with
    less room. A given plan stays as it is. Raises DoesNotFitError if no search finds one that fits."""
    first, draft = draft, lowered(draft, around)
    limit, least = draft.settings.memory_limit, math.inf
    if limit is None or draft.plan.memory.total < NEAR * limit:
        return draft
    for tried in range(TRIES):
        step = program_of(draft)
        memory = memory_of(draft.plan, step)
        least = min(least, memory.total)
        if memory.total <= limit or draft.inputs.replayed is not None:
            return replace(draft, plan=draft.plan.holding(memory))
        beside = _beside(draft, step)
        if tried >= AT_OPERATORS:
            beside += memory.total - limit
        try:
            draft = lowered(_searched_again(draft, first, beside, around), around)
        except DoesNotFitError as error:
            raise error.changed(min(error.least, least), limit) from None
    raise DoesNotFitError(f"on the mesh {draft.mesh}", least, limit, str(memory))


def program_of(draft: Draft) -> Program:
    """The program of a draft with a plan, with the backward of every differentiable output."""
    with torch.inference_mode(False):  # inference mode would record no gradients
        return fused(differentiated_program(draft.inputs, draft.program, differentiated(draft.inputs.graph)))


def _searched_again(draft: Draft, first: Draft, beside: Floats, around: Around) -> Draft:
    """`draft` searched again with the uncounted memory `beside` of its step. The bound of the first search stays valid:
    less room cannot make plans cheaper."""
    problem = draft.problem
    known = beside if problem.beside is None else np.maximum(problem.beside, beside)
    draft = run(SEARCHING[1:], replace(draft, problem=replace(problem, beside=known)), around)
    bound = min(first.solution.bound, draft.solution.cost)
    return replace(draft, solution=replace(draft.solution, bound=bound, binding=True))


def memory_of(plan: Plan, program: Program) -> Memory:
    """The memory of a rank at the peak of a plan's step, by its graphs."""
    at, known = peak(program), plan.memory
    return Memory(
        parameters=known.parameters,
        optimizer=known.optimizer,
        inputs=known.inputs,
        gradients=at.gradients,
        activations=at.kept,
        again=at.again,
        working=at.held - at.gradients - at.kept - at.again,
        phase=at.phase,
        at=operator_of(at.node) or at.node.name,
    )


def _beside(draft: Draft, program: Program) -> Floats:
    """The bytes, in the forward or backward of each vertex, that a rank holds and the search has not counted."""
    memory = draft.plan.memory
    always = memory.parameters + memory.optimizer + memory.inputs
    held: dict[str, float] = {}
    name, most = "", 0.0
    for moment in moments(program):
        most = max(most, always + moment.held)
        again = moment.phase == "backward" and computed_again(moment.node)
        if again or not operator_of(moment.node):  # its memory counts for the next operator, as that of groups does
            continue
        name = operator_of(moment.node)
        held[name], most = max(held.get(name, 0.0), most), 0.0
    held[name] = max(held.get(name, 0.0), most)
    counted = draft.solution.held
    assert counted is not None
    of_vertices = np.array([held.get(vertex.name, 0.0) for vertex in draft.problem.vertices])
    beside: Floats = np.maximum(of_vertices - np.maximum(counted.total, counted.forward), 0.0)
    return beside
