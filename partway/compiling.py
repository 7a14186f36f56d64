"""`compile`: from a function and one call of it to a plan, and to the programs that every rank runs.

CallInputs ─▶ capture_call ─▶ PlanInputs ─▶ the passes (passes.py), on each mesh, or the cache ─▶ Compiled
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import NoneType
from typing import Any

import torch

from partway.annotations.annotate import Annotations
from partway.annotations.constrain import constrained_modules
from partway.annotations.meshes import meshes_to_try
from partway.cache import Entry, cache_folder
from partway.checks import check_target, check_tensors
from partway.context import current, current_algo
from partway.dtensors import inputs_on, own_dtensors, parameters_on, plain
from partway.earliest import earliest
from partway.fitted import Fitted, fitted
from partway.fitting import InTime, batch_of, least_limit, what_fits, with_batch
from partway.fusion.program import Program
from partway.graphs.record import Record, StepRecord, record
from partway.options.algo import AlgoParameters
from partway.options.parallel import ParallelContext
from partway.passes import (
    PlanDraft,
    Planned,
    StepDraft,
    accumulated,
    applied,
    fused,
    make_step,
    make_step_again,
    own_saved_tensors,
    search_on_cheapest_mesh,
    search_on_mesh,
    verified,
)
from partway.plan_inputs import PlanInputs
from partway.planning import planning
from partway.propagation.capture.any_size import AnySize
from partway.propagation.capture.capture import CaptureOptions, capture, capture_any_size, capture_counting
from partway.propagation.capture.tracing import Dims
from partway.propagation.cost.profile import DeviceProfile, profile_of
from partway.propagation.graph.graph import CalledHooks, Graph
from partway.propagation.graph.queries import differentiated, without_gradients
from partway.propagation.graph.question import Answer, Values
from partway.propagation.graph.structure import Path, check_call, flatten_call, name_of, state_of
from partway.propagation.plan.alternatives import Alternatives, outcome
from partway.propagation.plan.plan import Plan
from partway.propagation.plan.replay import differences
from partway.propagation.program.accumulate import Accumulation
from partway.propagation.program.local_program import LocalProgram
from partway.propagation.program.step import Step
from partway.propagation.search.formulate import warn_of_unknown
from partway.propagation.search.problem import SearchProblem
from partway.propagation.search.solution import Solution
from partway.propagation.torch_internals import bound_fake_results
from partway.request import Request
from partway.reuse.captures import fetch_capture
from partway.reuse.courses import values_of
from partway.reuse.effects import Effects
from partway.reuse.sizes import CallSizes, Captured
from partway.reuse.state import State, warn_of_unwatched
from partway.runtime.process import get_rank
from partway.strategy import Layout, Mesh, StrategyError, raise_problems
from partway.strategy.afterwards import afterwards
from partway.strategy.errors import DoesNotFitError
from partway.strategy.place import on_mesh
from partway.told import stage, telling
from partway.user_rules import rules, text_of

FAKE_RESULTS = 20_000  # that tracing keeps from one plan to the next; some kB each


@dataclass(frozen=True)
class Compiled:
    """A function planned for one signature.

    inputs     what the plan follows from
    planned    the plan, and the forward of one rank
    entry      where it and the programs lie on disk
    searched   the draft that the plan was made of; searched for again, once, where the plan was on disk
    state      what the call depends on beside its arguments
    effects    what the function leaves behind
    record     what hears the passes
    name       what the function is called
    """

    inputs: PlanInputs
    planned: Planned
    entry: Entry
    searched: Callable[[], PlanDraft]
    state: State
    effects: Effects
    record: Record
    name: str

    @property
    def graph(self) -> Graph:
        """The captured call."""
        return self.inputs.graph

    @property
    def context(self) -> ParallelContext:
        """The options that it was planned with."""
        return self.inputs.context

    @property
    def profile(self) -> DeviceProfile:
        """The figures of the devices."""
        return self.inputs.profile

    @property
    def local(self) -> LocalProgram:
        """The forward of one rank."""
        return self.planned.local

    @property
    def plan(self) -> Plan:
        """A strategy for every operator, and what it costs."""
        return self.planned.plan

    @property
    def mesh(self) -> Mesh:
        """The mesh that it was planned on."""
        return self.local.mesh

    @property
    def annotations(self) -> Annotations:
        """The layouts that the annotations allow."""
        return self.searched().annotations

    @property
    def problem(self) -> SearchProblem:
        """What the search was given."""
        return self.searched().problem

    @property
    def solution(self) -> Solution:
        """The strategies that the search chose."""
        return self.searched().solution

    @property
    def program(self) -> Program:
        """The graphs that every rank runs."""
        with planning():  # first, since a cached_property holds its lock while this waits
            return self._program

    @cached_property
    def _program(self) -> Program:
        return self.program_for(differentiated(self.graph))

    def program_for(self, wanted: tuple[bool, ...]) -> Program:
        """The program whose backward starts from the outputs marked in `wanted`."""
        what = f"making a program of {self.name}"
        with planning(), torch.inference_mode(False), telling(what):  # inference would record no gradients
            name = f"program-{_bits(wanted)}"
            heard = self.record.of_step("" if wanted == differentiated(self.graph) else name)
            program = self.entry.fetch(
                name, lambda: fused(self._step(wanted, heard), heard.around), Program, derived=True
            )
            heard.made(program)
            return program

    def accumulation_for(self, wanted: tuple[bool, ...]) -> Accumulation | None:
        """The backwards of `program_for(wanted)` whose reductions wait, or None if no gradient can wait."""
        with planning(), torch.inference_mode(False):
            name = f"accumulation-{_bits(wanted)}"
            heard = self.record.of_step(name)
            made = self.entry.fetch(
                name, lambda: accumulated(self._step(wanted, heard), heard.around), Accumulation, NoneType, derived=True
            )
            heard.made(made)
            return made

    def step_again(self, local: LocalProgram, wanted: tuple[bool, ...]) -> Step:
        """The step of `local`, the forward of one rank or the program of its gradients, whose outputs marked in
        `wanted` are differentiated more than once."""
        with planning(), torch.inference_mode(False):
            return make_step_again(self.inputs, local, self.planned.parts, wanted)

    def _step(self, wanted: tuple[bool, ...], heard: StepRecord) -> StepDraft:
        return make_step(self.inputs, self.planned, wanted, heard.around)


def _bits(wanted: tuple[bool, ...]) -> str:
    """A name for which outputs are differentiated."""
    return f"{len(wanted)}-{sum(want << i for i, want in enumerate(wanted)):x}"


@dataclass(frozen=True)
class CallInputs:
    """A call that is to be planned, and all that it is planned with.

    fn, args, kwargs   the call; its tensors have their global shapes
    request            the arguments of `shard` or `compile`
    context, algo      the options in force
    processes          how many a launcher started; None in simulation
    parameters         the layouts that parameters have already
    inputs             the layouts of the inputs that are DTensors
    values             where to find the values that the function asks for
    late               the answers to the first questions that it asks late
    memory             the bytes that each device has; None: those of the profile
    inference          no gradient is taken
    advised            where nothing fits, what would do is looked for
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    request: Request
    context: ParallelContext
    algo: AlgoParameters
    processes: int | None = None
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    values: Values | None = None
    late: tuple[Answer, ...] = ()
    memory: float | None = None
    inference: bool = False
    advised: bool = True
    numbers: tuple[Path, ...] = ()


def compile(
    fn_or_module: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Any = None,
    in_strategy: tuple[Any, ...] | Mapping[str, Any] | None = None,
    out_strategy: tuple[Any, ...] | None = None,
    parameter_plan: Mapping[str, Any] | None = None,
    device: str | None = None,
    level: int = 0,
    module_plan: Mapping[str, Any] | None = None,
    plan: Any = None,
    inference: bool = False,
) -> Compiled:
    """Plan a call of a function or module without running it; tensors on the meta device are welcome.

    The arguments are those of `shard`. Needs no process group and no second device.

    Raises StrategyError for annotations that cannot be met (all reasons at once), CaptureError for a function that
    torch.export cannot capture, OperatorError as `on_unknown_op` says.
    """
    request = Request(in_strategy, out_strategy, parameter_plan, mesh, device, level, module_plan, plan, inference)
    check_target("compile", fn_or_module)
    if not isinstance(args, tuple | list):
        raise StrategyError(
            f"args is a {type(args).__name__}; write the arguments of the call as a tuple, such as (x,)"
        )
    if not isinstance(kwargs, Mapping | None):
        raise StrategyError(f"kwargs is a {type(kwargs).__name__}; write a dict from argument names to values")
    args, kwargs = tuple(args), dict(kwargs or {})
    check_call(fn_or_module, args, kwargs)
    call = flatten_call(fn_or_module, args, kwargs)
    check_tensors(call, None)
    parameters: dict[str, Layout] = {}
    if isinstance(fn_or_module, torch.nn.Module):
        parameters = parameters_on(fn_or_module, own_dtensors(fn_or_module), request.own_mesh)
    inputs = inputs_on(call, request.own_mesh or next((layout.mesh for layout in parameters.values()), None))
    plain_args, plain_kwargs = call.structure.build([plain(tensor) for tensor in call.tensors])
    values = values_of(call.tensors, state_of(fn_or_module).__getitem__)
    return compile_call(
        CallInputs(
            fn_or_module, plain_args, plain_kwargs, request, current(), current_algo(), parameters=parameters,
            inputs=inputs, values=values, inference=in_inference(fn_or_module, request),
        )
    )  # fmt: skip


def in_inference(fn: Callable[..., Any], request: Request) -> bool:
    """Whether no gradient is taken of a call of `fn` here and now: the request says so, or torch.inference_mode, or
    torch.no_grad with a module in evaluation. (Without gradients, but in training, a call runs as the others do.)"""
    if request.inference or torch.is_inference_mode_enabled():
        return True
    if torch.is_grad_enabled() or not isinstance(fn, torch.nn.Module):
        return False
    return not any(module.training for module in fn.modules())


def compile_call(call: CallInputs, alike: Compiled | None = None, sizes: CallSizes | None = None) -> Compiled:
    """Capture a call and plan it: on every mesh that it may be planned on, unless the plan is in the cache. `alike`:
    the same call as it was planned for training; it is not captured again. `sizes`: what is known of calls of other
    sizes, by which it may be captured and planned without running the function and without a search."""
    with planning():
        bound_fake_results(FAKE_RESULTS)
        kept = record(_called(call.fn))
        with kept.watching(), telling(f"planning {_called(call.fn)}") as told:
            with stage("capture"):
                captured = Captured(alike.graph, alike.state, alike.effects) if alike else _captured(call, kept, sizes)
            compiled = _compiled_as(call, captured, kept, sizes)
            plan = compiled.plan
            told.made = f"{len(plan.operators)} operators on {plan.mesh}, {plan.certificate}"
            return compiled


def _compiled_as(call: CallInputs, captured: Captured, kept: Record, sizes: CallSizes | None) -> Compiled:
    """A captured call, planned, with the strategies of a plan for other sizes where there is one that serves."""
    if sizes is not None and (plan := sizes.plan(call.inference)) is not None:
        with contextlib.suppress(StrategyError):  # these sizes may ask for more memory than there is
            return _compiled(call, captured, kept, plan)
    compiled = _compiled(call, captured, kept)
    if sizes is not None:
        sizes.searched(compiled.plan, call.inference)
    return compiled


def _captured(call: CallInputs, kept: Record, sizes: CallSizes | None) -> Captured:
    """The capture of a call: by way of one for all sizes, or from disk, or made now."""

    def capture() -> Captured:
        found = sizes and sizes.captured(
            call.args, call.kwargs, kept.capturing, functools.partial(capture_sizes, call)
        )  # fmt: skip
        return found or capture_call(call, kept)

    folder = cache_folder(call.context.compile_cache_path) if call.context.enable_compile_cache else None
    if folder is None or call.late or call.numbers or kept.hears or (sizes is not None and sizes.known):
        return capture()
    options = (
        replace(call.request, plan=None), _given_mesh(call), text_of(rules()), call.context.batch_norm_parts,
        call.context.random_numbers,
    )  # fmt: skip
    return fetch_capture(folder, call.fn, flatten_call(call.fn, call.args, call.kwargs), options, capture)


def _called(fn: Callable[..., Any]) -> str:
    return f"{name_of(fn)}.forward" if isinstance(fn, torch.nn.Module) else name_of(fn)


def _compiled(call: CallInputs, captured: Captured, record: Record, followed: Plan | None = None) -> Compiled:
    """A captured call, planned; with the strategies of `followed`, a plan for other sizes, or by a search. Raises
    StrategyError where these cannot be followed."""
    context = call.context
    loaded = Plan.load(path) if (path := context.strategy_ckpt_config.load_file) else None
    inputs = replace(_plan_inputs(call, captured.graph, loaded), followed=followed)
    verifies = os.environ.get("PARTWAY_VERIFY") == "1"
    around = record.planning(verified if verifies else applied)
    made = functools.cache(
        lambda: fitted(earliest(search_on_cheapest_mesh(inputs, meshes_to_try(inputs), around), around), around)
    )
    entry = _entry(inputs, kept=context.enable_compile_cache and not verifies)
    try:
        planned = entry.fetch("plan", lambda: made().planned, Planned)
    except DoesNotFitError as error:
        if not call.advised or followed is not None:
            raise
        raise _with_what_fits(error, call, inputs, record) from None
    if followed is not None:
        made.cache_clear()  # sizes may be many, and what a search is given is large: it is made again when asked for
    record.planned(planned)
    warn_of_unknown(inputs.graph, planned.plan.unknown_operators)
    if context.strategy_ckpt_config.save_file and (call.processes is None or get_rank() == 0):
        planned.plan.save(context.strategy_ckpt_config.save_file)
    compiled = Compiled(
        inputs, planned, entry, lambda: made().draft, captured.state, captured.effects, record, _called(call.fn)
    )  # fmt: skip
    planned.plan.of(lambda: alternatives(made().draft, planned.local), lambda: compiled.program.schedule.spans)
    return compiled


def _with_what_fits(error: DoesNotFitError, call: CallInputs, inputs: PlanInputs, record: Record) -> DoesNotFitError:
    """`error`, of a call of which no plan fits, with what would do."""
    meshes, batch = meshes_to_try(inputs), batch_of((call.args, call.kwargs))

    def with_part(part: int) -> Fitted:
        args, kwargs = with_batch((call.args, call.kwargs), batch or 1, part)
        smaller = replace(call, args=args, kwargs=kwargs, values=None, late=())
        graph = capture_call(smaller, record).graph
        return fitted(search_on_cheapest_mesh(_plan_inputs(smaller, graph, inputs.loaded), meshes))

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


def capture_call(call: CallInputs, record: Record) -> Captured:
    """The graph of a call. Raises CaptureError, and StrategyError for constraints inside that do not fit."""
    fn, state, effects = call.fn, *_before_capture(call)
    with _around_capture(call, effects):
        options = _capture_options(call, state)
        if call.numbers:
            graph = capture_counting(
                fn, call.args, call.kwargs, call.numbers, options, effects, record.capturing
            )  # fmt: skip
        else:
            graph = capture(fn, call.args, call.kwargs, options, call.values, effects, record.capturing)
    effects.check(graph.constants)
    return Captured(graph, _after_capture(fn, state, effects, graph.hooks, graph.read), effects)


def capture_sizes(call: CallInputs, dims: Dims) -> tuple[AnySize, CaptureOptions, State, Effects]:
    """The function of a call for all sizes of `dims`, the options of the capture, and what a Captured has beside its
    graph. Raises CaptureError, and StrategyError for constraints inside that do not fit."""
    fn, state, effects = call.fn, *_before_capture(call)
    with _around_capture(call, effects):
        options = _capture_options(call, state)
        captured = capture_any_size(fn, call.args, call.kwargs, dims, not state.reached.asks.memory, options, effects)
    traced, hooks = captured.traced, captured.attempt.hooks.called()
    effects.check(traced.constants)
    return captured, options, _after_capture(fn, state, effects, hooks, tuple(traced.read)), effects


def _before_capture(call: CallInputs) -> tuple[State, Effects]:
    state = State(call.fn)
    warn_of_unwatched(call.fn, state)
    return state, Effects(call.fn, state)


@contextlib.contextmanager
def _around_capture(call: CallInputs, effects: Effects) -> Iterator[None]:
    with (
        own_saved_tensors(), constrained_modules(call.fn, call.request), on_mesh(_given_mesh(call)),
        afterwards(effects.finish),
    ):  # fmt: skip
        yield


def _capture_options(call: CallInputs, state: State) -> CaptureOptions:
    context, gradients = call.context, torch.is_grad_enabled() or not state.reached.asks.gradients
    return CaptureOptions(
        context.batch_norm_parts, context.random_numbers, rules(), gradients, call.late, returns_given=True
    )


def _after_capture(
    fn: Callable[..., Any], state: State, effects: Effects, hooks: CalledHooks, read: tuple[torch.Tensor, ...]
) -> State:
    """What a captured function depends on: `state`, as it is now that hooks may have been added."""
    observers = frozenset(map(id, hooks.observers))
    if effects.kept or observers or read or not state.holds():
        return State(fn, observers, effects.kept, read)
    return state


def _given_mesh(call: CallInputs) -> Mesh | None:
    """The mesh of a call, where one is given: islands inside are traced on it."""
    layouts = (*call.inputs.values(), *call.parameters.values())
    meshes = [call.request.own_mesh, *(plan.mesh for plan in call.request.plans), *(layout.mesh for layout in layouts)]
    return next((mesh for mesh in meshes if mesh is not None), None)


def _plan_inputs(call: CallInputs, graph: Graph, loaded: Plan | None) -> PlanInputs:
    every = rules()
    graph = without_gradients(graph) if call.inference else graph
    return PlanInputs(
        graph,
        call.fn,
        call.request,
        call.context,
        call.algo,
        device_profile(graph, call.request, call.context, call.memory),
        {node.target: every[node.target] for node in graph.nodes if node.target in every},
        call.processes,
        dict(call.parameters),  # as they are now: what is searched again later is the same
        dict(call.inputs),
        loaded,
        _plan_of(graph, call.request.plans),
    )


def _entry(inputs: PlanInputs, kept: bool) -> Entry:
    """Where the plan and its programs are found again, if they are `kept` at all."""
    graph, context = inputs.graph, inputs.context
    folder = cache_folder(context.compile_cache_path) if kept and not graph.hooks.by_number else None
    return Entry(
        graph, folder, name_of(inputs.fn), inputs.request, _options(context), _options(inputs.algo), inputs.processes,
        inputs.parameters, inputs.inputs, inputs.profile.model_dump(), text_of(inputs.rules),
        *(plan.model_dump_json() for plan in (inputs.loaded, inputs.replayed, inputs.followed) if plan),
    )  # fmt: skip


def _plan_of(graph: Graph, plans: tuple[Plan, ...]) -> Plan | None:
    """The one of `plans` that is of `graph`; None if there are none. Raises StrategyError where none of them is, with
    what differs from the nearest."""
    if not plans:
        return None
    problems, plan = min(((differences(graph, plan), plan) for plan in plans), key=lambda pair: len(pair[0]))
    several = f"; of {len(plans)} plans the nearest differs" if plans[1:] else ""
    raise_problems(f"the plan that was given is not one of this call{several}:", problems)
    return plan


def alternatives(draft: PlanDraft, local: LocalProgram) -> Alternatives:
    """What the plan of `local`, made of `draft`, is compared with when it is asked to explain."""
    made = outcome(draft.problem, draft.solution, local)
    return Alternatives(draft.problem, made, draft.inputs.context.search_mode, draft.annotations.written)


def _options(options: ParallelContext | AlgoParameters) -> tuple[Any, ...]:
    """The options, and which of them were set."""
    return options.model_dump(), sorted(options.model_fields_set)


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
