"""The stages of planning a call, in one function: `compile_call`.

    capture                 the call as a graph of PyTorch's operators                              capture_call.py
    annotate, formulate     the layouts that annotations allow, and the strategies to choose from   passes.py
    search                  on every possible mesh; by the time of a step; within memory            `search_plan`
    lower                   the program of one rank                                                 passes.py
    differentiate, fuse     its step, at the first access                                           compiled.py

Plans and programs are cached on disk (cache.py). One thread plans at a time (planning_lock.py).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from partway.compiler.capture_call import CallInputs, capture_call, captured_call
from partway.compiler.compiled import Compiled
from partway.compiler.graphs_record import Record, record
from partway.compiler.meshes import meshes_to_try
from partway.compiler.passes import (
    Around,
    Draft,
    applied,
    search_on_cheapest_mesh,
    search_on_mesh,
    verified,
)
from partway.compiler.pick_by_step_time import earliest
from partway.compiler.planning_lock import planning
from partway.compiler.replan_within_memory import fitted
from partway.compiler.suggest_what_fits import InTime, batch_of, least_limit, what_fits, with_batch
from partway.options.algo import AlgoParameters
from partway.options.parallel import ParallelContext
from partway.propagation.capture.export.autocast import without_autocast
from partway.propagation.cost.profile import DeviceProfile, profile_of
from partway.propagation.graph.graph import Graph, without_gradients
from partway.propagation.graph.structure import name_of
from partway.propagation.plan.alternatives import Alternatives, outcome
from partway.propagation.plan.plan import Plan
from partway.propagation.plan.replay import differences
from partway.propagation.problem.formulate import warn_of_unknown
from partway.propagation.program.program import Program
from partway.propagation.torch_internals import bound_fake_results
from partway.requests.plan_inputs import PlanInputs
from partway.requests.planning_log import stage, telling
from partway.requests.request import Request
from partway.requests.user_rules import rules, text_of
from partway.reuse.cache import Entry, cache_folder
from partway.reuse.changing import CallSizes, Captured
from partway.runtime.launching.process import get_rank
from partway.strategy import Mesh, StrategyError, raise_problems
from partway.strategy.errors import DoesNotFitError

FAKE_RESULTS = 20_000  # kept by tracing from one plan to the next; some kB each


def compile_call(call: CallInputs, alike: Compiled | None = None, sizes: CallSizes | None = None) -> Compiled:
    """Capture a call and plan it on every possible mesh, unless the plan is in the cache. `alike`: the same call,
    planned for training, whose capture is reused. `sizes`: the calls of other sizes, whose captures and plans may
    replace a capture and a search for this one."""
    with planning():
        bound_fake_results(FAKE_RESULTS)
        kept = record(call.name)
        with kept.watching(), telling(f"planning {call.name}") as told:
            with stage("capture"):
                captured = (
                    Captured(alike.graph, alike.state, alike.effects) if alike else captured_call(call, kept, sizes)
                )
            with without_autocast():
                compiled = _planned_as(call, captured, kept, sizes)
            plan = compiled.plan
            told.made = f"{len(plan.operators)} operators on {plan.mesh}, {plan.certificate}"
            return compiled


def _planned_as(call: CallInputs, captured: Captured, kept: Record, sizes: CallSizes | None) -> Compiled:
    """Plan a captured call, with the strategies of a plan for other sizes if one applies."""
    if sizes is not None and (plan := sizes.plan(call.inference)) is not None:
        with contextlib.suppress(StrategyError):  # these sizes may need more memory than there is
            return _plan(call, captured, kept, plan)
    compiled = _plan(call, captured, kept)
    if sizes is not None:
        sizes.searched(compiled.plan, call.inference)
    return compiled


def _plan(call: CallInputs, captured: Captured, kept: Record, followed: Plan | None = None) -> Compiled:
    """Plan a captured call with the strategies of `followed`, a plan for other sizes, or by a search. Raises
    StrategyError if the strategies do not apply."""
    context = call.context
    loaded = Plan.load(path) if (path := context.strategy_ckpt_config.load_file) else None
    inputs = replace(plan_inputs_of(call, captured.graph, loaded), followed=followed)
    verifies = os.environ.get("PARTWAY_VERIFY") == "1"
    around = kept.planning(verified if verifies else applied)
    made = functools.cache(lambda: search_plan(inputs, meshes_to_try(inputs), around))
    entry = _entry(inputs, kept=context.enable_compile_cache and not verifies)
    try:
        plan = entry.fetch("plan", lambda: made().plan, Plan)
        local = entry.fetch("forward", lambda: made().program, Program)
    except DoesNotFitError as error:
        if not call.advised or followed is not None:
            raise
        raise _with_what_fits(error, call, inputs, kept) from None
    if followed is not None:
        made.cache_clear()  # there may be many sizes, and a draft is large: it is made again on demand
    kept.planned(plan, local)
    warn_of_unknown(inputs.graph, plan.unknown_operators)
    if context.strategy_ckpt_config.save_file and (call.processes is None or get_rank() == 0):
        plan.save(context.strategy_ckpt_config.save_file)
    compiled = Compiled(inputs, plan, local, entry, made, captured.state, captured.effects, kept, call.name)
    plan.of(lambda: _alternatives(made()), lambda: compiled.program.schedule.spans)
    return compiled


def search_plan(inputs: PlanInputs, meshes: Sequence[Mesh], around: Around = applied) -> Draft:
    """Annotate, formulate and search on each of `meshes`, and lower the best plan: the cheapest, or under level 2 the
    one with the shortest step. If its program exceeds the memory limit, the search is repeated."""
    draft = search_on_cheapest_mesh(inputs, meshes, around)
    draft = earliest(draft, around)
    return fitted(draft, around)


def plan_inputs_of(call: CallInputs, graph: Graph, loaded: Plan | None) -> PlanInputs:
    """All inputs of the plan of a captured call except the mesh."""
    every = rules()
    graph = without_gradients(graph) if call.inference else graph
    return PlanInputs(
        graph=graph,
        fn=call.fn,
        request=call.request,
        context=call.context,
        algo=call.algo,
        profile=device_profile(graph, call.request, call.context, call.memory),
        rules={node.target: every[node.target] for node in graph.nodes if node.target in every},
        processes=call.processes,
        parameters=dict(call.parameters),  # a copy, so that a later search has the same input
        inputs=dict(call.inputs),
        loaded=loaded,
        replayed=_plan_of(graph, call.request.plans),
    )


def device_profile(
    graph: Graph, request: Request, context: ParallelContext, memory: float | None = None
) -> DeviceProfile:
    """The figures of the devices of a call; `memory`: the bytes of each, if they are known."""
    device = request.device or ("cuda" if graph.device == "meta" else graph.device)
    profile = profile_of(context.device_profile or device)
    if memory is None:
        return profile
    sources = profile.sources.model_copy(update={"memory": "what the devices have"})
    return profile.model_copy(update={"memory": memory, "sources": sources})


def _plan_of(graph: Graph, plans: tuple[Plan, ...]) -> Plan | None:
    """The one of `plans` that was made for `graph`; None if `plans` is empty. Raises StrategyError if none of them was,
    with the differences from the nearest."""
    if not plans:
        return None
    problems, plan = min(((differences(graph, plan), plan) for plan in plans), key=lambda pair: len(pair[0]))
    several = f"; of {len(plans)} plans the nearest differs" if plans[1:] else ""
    raise_problems(f"the plan that was given is not one of this call{several}:", problems)
    return plan


def _entry(inputs: PlanInputs, kept: bool) -> Entry:
    """The cache entry of the plan and its programs; on disk only if `kept`."""
    graph, context = inputs.graph, inputs.context
    folder = cache_folder(context.compile_cache_path) if kept and not graph.hooks.by_number else None
    return Entry(
        graph, folder, name_of(inputs.fn), inputs.request, _options(context), _options(inputs.algo), inputs.processes,
        inputs.parameters, inputs.inputs, inputs.profile.model_dump(), text_of(inputs.rules),
        *(plan.model_dump_json() for plan in (inputs.loaded, inputs.replayed, inputs.followed) if plan),
    )  # fmt: skip


def _options(options: ParallelContext | AlgoParameters) -> tuple[Any, ...]:
    """The options, and the names of those that were set."""
    return options.model_dump(), sorted(options.model_fields_set)


def _alternatives(draft: Draft) -> Alternatives:
    """The alternatives with which `explain` compares the plan of `draft`."""
    made = outcome(draft.problem, draft.solution, draft.program)
    return Alternatives(draft.problem, made, draft.inputs.context.search_mode, draft.annotations.written)


def _with_what_fits(error: DoesNotFitError, call: CallInputs, inputs: PlanInputs, record: Record) -> DoesNotFitError:
    """`error`, that no plan of a call fits, with alternatives that would."""
    meshes, batch = meshes_to_try(inputs), batch_of((call.args, call.kwargs))

    def with_part(part: int) -> Draft:
        args, kwargs = with_batch((call.args, call.kwargs), batch or 1, part)
        smaller = replace(call, args=args, kwargs=kwargs, values=None, late=())
        graph = capture_call(smaller, record).graph
        return fitted(search_on_cheapest_mesh(plan_inputs_of(smaller, graph, inputs.loaded), meshes))

    def within(limit: float) -> Draft:
        roomy = replace(inputs, algo=inputs.algo.model_copy(update={"memory_limit": limit}))
        return fitted(search_on_cheapest_mesh(roomy, meshes))

    # a given plan, or tensors that are laid out already, cannot be used on other devices
    free = inputs.replayed is None and not inputs.parameters and not inputs.inputs
    in_time = InTime()
    least = least_limit(error, within, in_time)
    found = what_fits(
        meshes if free else [],
        lambda mesh: _fits(lambda: fitted(search_on_mesh(inputs, mesh, math.inf))),
        batch,
        lambda part: _fits(lambda: with_part(part)),
        in_time,
    )
    return error.changed(least, error.limit, found)


def _fits(plan: Callable[[], Any]) -> bool:
    """Whether `plan` returns a plan. A model may reject another batch, or a mesh a strategy, with any exception."""
    try:
        return bool(plan())
    except Exception:
        return False
