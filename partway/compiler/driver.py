"""What happens to a call, in one function: `compile_call`.

    capture                 the call as a graph of PyTorch's operators                        capture_call.py
    annotate, formulate     the layouts that annotations allow, and the strategies to choose from   passes.py
    search                  on every mesh that is possible; by the end of a step; within memory    `search_plan`
    lower                   the program of one rank                                           passes.py
    differentiate, fuse     its step, when that is first asked for                            compiled.py

Plans and programs lie in a cache on disk (cache.py). One thread plans at a time (planning_lock.py).
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
    PlanDraft,
    Planned,
    applied,
    search_on_cheapest_mesh,
    search_on_mesh,
    verified,
)
from partway.compiler.pick_by_step_time import earliest
from partway.compiler.planning_lock import planning
from partway.compiler.replan_within_memory import Fitted, fitted
from partway.compiler.suggest_what_fits import InTime, batch_of, least_limit, what_fits, with_batch
from partway.options.algo import AlgoParameters
from partway.options.parallel import ParallelContext
from partway.propagation.cost.profile import DeviceProfile, profile_of
from partway.propagation.graph.graph import Graph
from partway.propagation.graph.queries import without_gradients
from partway.propagation.graph.structure import name_of
from partway.propagation.plan.alternatives import Alternatives, outcome
from partway.propagation.plan.plan import Plan
from partway.propagation.plan.replay import differences
from partway.propagation.problem.formulate import warn_of_unknown
from partway.propagation.program.local_program import LocalProgram
from partway.propagation.torch_internals import bound_fake_results
from partway.requests.plan_inputs import PlanInputs
from partway.requests.planning_log import stage, telling
from partway.requests.request import Request
from partway.requests.user_rules import rules, text_of
from partway.reuse.cache import Entry, cache_folder
from partway.reuse.changing_sizes import CallSizes, Captured
from partway.runtime.launching.process import get_rank
from partway.strategy import Mesh, StrategyError, raise_problems
from partway.strategy.errors import DoesNotFitError

FAKE_RESULTS = 20_000  # that tracing keeps from one plan to the next; some kB each


def compile_call(call: CallInputs, alike: Compiled | None = None, sizes: CallSizes | None = None) -> Compiled:
    """Capture a call and plan it: on every mesh that it may be planned on, unless the plan is in the cache. `alike`:
    the same call as it was planned for training; it is not captured again. `sizes`: what is known of calls of other
    sizes, by which it may be captured and planned without running the function and without a search."""
    with planning():
        bound_fake_results(FAKE_RESULTS)
        kept = record(call.name)
        with kept.watching(), telling(f"planning {call.name}") as told:
            with stage("capture"):
                captured = (
                    Captured(alike.graph, alike.state, alike.effects) if alike else captured_call(call, kept, sizes)
                )
            compiled = _planned_as(call, captured, kept, sizes)
            plan = compiled.plan
            told.made = f"{len(plan.operators)} operators on {plan.mesh}, {plan.certificate}"
            return compiled


def _planned_as(call: CallInputs, captured: Captured, kept: Record, sizes: CallSizes | None) -> Compiled:
    """A captured call, planned, with the strategies of a plan for other sizes where there is one that serves."""
    if sizes is not None and (plan := sizes.plan(call.inference)) is not None:
        with contextlib.suppress(StrategyError):  # these sizes may ask for more memory than there is
            return _plan(call, captured, kept, plan)
    compiled = _plan(call, captured, kept)
    if sizes is not None:
        sizes.searched(compiled.plan, call.inference)
    return compiled


def _plan(call: CallInputs, captured: Captured, kept: Record, followed: Plan | None = None) -> Compiled:
    """A captured call, planned; with the strategies of `followed`, a plan for other sizes, or by a search. Raises
    StrategyError where these cannot be followed."""
    context = call.context
    loaded = Plan.load(path) if (path := context.strategy_ckpt_config.load_file) else None
    inputs = replace(plan_inputs_of(call, captured.graph, loaded), followed=followed)
    verifies = os.environ.get("PARTWAY_VERIFY") == "1"
    around = kept.planning(verified if verifies else applied)
    made = functools.cache(lambda: search_plan(inputs, meshes_to_try(inputs), around))
    entry = _entry(inputs, kept=context.enable_compile_cache and not verifies)
    try:
        planned = entry.fetch("plan", lambda: made().planned, Planned)
    except DoesNotFitError as error:
        if not call.advised or followed is not None:
            raise
        raise _with_what_fits(error, call, inputs, kept) from None
    if followed is not None:
        made.cache_clear()  # sizes may be many, and what a search is given is large: it is made again when asked for
    kept.planned(planned)
    warn_of_unknown(inputs.graph, planned.plan.unknown_operators)
    if context.strategy_ckpt_config.save_file and (call.processes is None or get_rank() == 0):
        planned.plan.save(context.strategy_ckpt_config.save_file)
    compiled = Compiled(
        inputs, planned, entry, lambda: made().draft, captured.state, captured.effects, kept, call.name
    )  # fmt: skip
    planned.plan.of(lambda: _alternatives(made().draft, planned.local), lambda: compiled.program.schedule.spans)
    return compiled


def search_plan(inputs: PlanInputs, meshes: Sequence[Mesh], around: Around[PlanDraft] = applied) -> Fitted:
    """Annotate, formulate and search on each of `meshes`, and lower the best: the cheapest plan, the one whose step
    ends first where that is asked for, searched for again where its program holds more than the limit."""
    draft = search_on_cheapest_mesh(inputs, meshes, around)
    draft = earliest(draft, around)
    return fitted(draft, around)


def plan_inputs_of(call: CallInputs, graph: Graph, loaded: Plan | None) -> PlanInputs:
    """All that the plan of a captured call follows from, but for the mesh."""
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
        parameters=dict(call.parameters),  # as they are now: what is searched again later is the same
        inputs=dict(call.inputs),
        loaded=loaded,
        replayed=_plan_of(graph, call.request.plans),
    )


def device_profile(
    graph: Graph, request: Request, context: ParallelContext, memory: float | None = None
) -> DeviceProfile:
    """The figures of the devices that a call is planned for; `memory`: the bytes that each is known to have."""
    device = request.device or ("cuda" if graph.device == "meta" else graph.device)
    profile = profile_of(context.device_profile or device)
    if memory is None:
        return profile
    sources = profile.sources.model_copy(update={"memory": "what the devices have"})
    return profile.model_copy(update={"memory": memory, "sources": sources})


def _plan_of(graph: Graph, plans: tuple[Plan, ...]) -> Plan | None:
    """The one of `plans` that is of `graph`; None if there are none. Raises StrategyError where none of them is, with
    what differs from the nearest."""
    if not plans:
        return None
    problems, plan = min(((differences(graph, plan), plan) for plan in plans), key=lambda pair: len(pair[0]))
    several = f"; of {len(plans)} plans the nearest differs" if plans[1:] else ""
    raise_problems(f"the plan that was given is not one of this call{several}:", problems)
    return plan


def _entry(inputs: PlanInputs, kept: bool) -> Entry:
    """Where the plan and its programs are found again, if they are `kept` at all."""
    graph, context = inputs.graph, inputs.context
    folder = cache_folder(context.compile_cache_path) if kept and not graph.hooks.by_number else None
    return Entry(
        graph, folder, name_of(inputs.fn), inputs.request, _options(context), _options(inputs.algo), inputs.processes,
        inputs.parameters, inputs.inputs, inputs.profile.model_dump(), text_of(inputs.rules),
        *(plan.model_dump_json() for plan in (inputs.loaded, inputs.replayed, inputs.followed) if plan),
    )  # fmt: skip


def _options(options: ParallelContext | AlgoParameters) -> tuple[Any, ...]:
    """The options, and which of them were set."""
    return options.model_dump(), sorted(options.model_fields_set)


def _alternatives(draft: PlanDraft, local: LocalProgram) -> Alternatives:
    """What the plan of `local`, made of `draft`, is compared with when it is asked to explain."""
    made = outcome(draft.problem, draft.solution, local)
    return Alternatives(draft.problem, made, draft.inputs.context.search_mode, draft.annotations.written)


def _with_what_fits(error: DoesNotFitError, call: CallInputs, inputs: PlanInputs, record: Record) -> DoesNotFitError:
    """`error`, of a call of which no plan fits, with what would do."""
    meshes, batch = meshes_to_try(inputs), batch_of((call.args, call.kwargs))

    def with_part(part: int) -> Fitted:
        args, kwargs = with_batch((call.args, call.kwargs), batch or 1, part)
        smaller = replace(call, args=args, kwargs=kwargs, values=None, late=())
        graph = capture_call(smaller, record).graph
        return fitted(search_on_cheapest_mesh(plan_inputs_of(smaller, graph, inputs.loaded), meshes))

    def within(limit: float) -> Fitted:
        roomy = replace(inputs, algo=inputs.algo.model_copy(update={"memory_limit": limit}))
        return fitted(search_on_cheapest_mesh(roomy, meshes))

    # on other devices than those that there are a plan of this call, or tensors that lie on them, say nothing
    free = inputs.replayed is None and not inputs.parameters and not inputs.inputs
    in_time = InTime()
    least = least_limit(error, within, in_time)
    found = what_fits(
        meshes if free else [], lambda mesh: _fits(lambda: fitted(search_on_mesh(inputs, mesh, math.inf))),
        batch, lambda part: _fits(lambda: with_part(part)), in_time,
    )  # fmt: skip
    return error.changed(least, error.limit, found)


def _fits(plan: Callable[[], Any]) -> bool:
    """Whether `plan` makes one. A model may refuse another batch, and a mesh a strategy, in any way of its own."""
    try:
        return bool(plan())
    except Exception:
        return False
