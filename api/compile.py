"""The passes in order: from a function and one call of it to the program that every rank runs.

Each arrow is a pure function from one frozen value to the next:

    capture  ─▶  annotate  ─▶  formulate  ─▶  search  ─▶  lower  ─▶  differentiate, recompute  ─▶  fuse
    Graph        Allowed       SearchProblem  Solution    LocalProgram  Step                       Program
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import NoneType
from typing import Any

import torch

from partway.annotations.annotate import Annotations, annotate
from partway.annotations.constrain import constrained_modules
from partway.annotations.meshes import meshes_to_try
from partway.cache import Entry, cache_folder
from partway.context import current, current_algo
from partway.dtensors import brought, has_other_data, inputs_on, parameters_on, plain
from partway.fusion.program import Program, make_program
from partway.options.algo import AlgoParameters
from partway.options.fields import ParallelMode
from partway.options.parallel import ParallelContext
from partway.plan_inputs import PlanInputs
from partway.planning import planning
from partway.propagation.capture.capture import CaptureOptions, capture, state_of
from partway.propagation.capture.hooks import none_of_all_modules
from partway.propagation.cost.cost import WEIGHTS, Level
from partway.propagation.cost.profile import DeviceProfile, profile_of
from partway.propagation.graph.graph import Graph, verify
from partway.propagation.graph.queries import differentiated
from partway.propagation.graph.question import Answer, Values
from partway.propagation.graph.structure import Call, check_call, flatten_call, name_of
from partway.propagation.plan.explain import Alternatives, outcome
from partway.propagation.plan.plan import Plan, make_plan
from partway.propagation.plan.replay import differences, replay
from partway.propagation.program.accumulate import Accumulation, accumulation
from partway.propagation.program.apart import of_outputs
from partway.propagation.program.differentiate import differentiate
from partway.propagation.program.local_program import LocalProgram, verify_program
from partway.propagation.program.lower import lower
from partway.propagation.program.precision import reduce_in_float32
from partway.propagation.program.recompute import checkpointed, gathered_weights, recompute, within_windows
from partway.propagation.program.step import Step, scale_parameter_gradients
from partway.propagation.search.formulate import formulate, warn_of_unknown
from partway.propagation.search.problem import SearchProblem, Settings
from partway.propagation.search.search import SearchMode, search
from partway.propagation.search.solution import Solution, verify_solution
from partway.propagation.torch_internals import is_transformed
from partway.request import Request
from partway.reuse.courses import values_of
from partway.reuse.effects import Effects
from partway.reuse.state import State, warn_of_unwatched
from partway.rule import rules, text_of
from partway.runtime.process import get_rank
from partway.strategy import Layout, Mesh, Problem, StrategyError, raise_problems
from partway.strategy.afterwards import afterwards, uncollected
from partway.strategy.errors import shown


@dataclass(frozen=True)
class Searched:
    """What the search was given and what it found."""

    annotations: Annotations
    problem: SearchProblem
    solution: Solution


@dataclass(frozen=True)
class Planned:
    """What is kept of a plan: the program of one rank, the plan that people read, and into how many parts the batch is
    split."""

    local: LocalProgram
    plan: Plan
    parts: int


@dataclass(frozen=True)
class Compiled:
    """A function planned for one signature.

    plan      a strategy for every operator, and what it costs
    program   the graphs that every rank runs (made when first asked for)
    state     what it depends on beside the call
    effects   what the function leaves behind
    """

    inputs: PlanInputs
    planned: Planned
    entry: Entry
    # what the plan was found in: searched again, once, where the plan was in the cache
    searched: Callable[[], Searched]
    state: State
    effects: Effects

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
        """The layouts that what was said allows."""
        return self.searched().annotations

    @property
    def problem(self) -> SearchProblem:
        """What the search was given."""
        return self.searched().problem

    @property
    def solution(self) -> Solution:
        """What the search found."""
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

        def make() -> Program:
            return self._fused(self._step(wanted))

        with planning():
            return self.entry.fetch(f"program-{_bits(wanted)}", make, Program, derived=True)

    def accumulation_for(self, wanted: tuple[bool, ...]) -> Accumulation | None:
        """The backwards of `program_for(wanted)` whose reductions wait, or None if no gradient can wait."""

        def make() -> Accumulation | None:
            found = accumulation(self._step(wanted))
            return found and replace(found, last=self._fused(found.last).step, rest=self._fused(found.rest).step)

        with planning():
            return self.entry.fetch(f"accumulation-{_bits(wanted)}", make, Accumulation, NoneType, derived=True)

    def _step(self, wanted: tuple[bool, ...]) -> Step:
        planned = differentiated(self.graph)
        if any(wanted) and wanted != planned and all(map(operator.le, wanted, planned)):
            return of_outputs(self._step(planned), wanted)
        with _own_saved_tensors(), uncollected(), none_of_all_modules():
            step: Step = differentiate(self.local, wanted)
            weights = gathered_weights(step) if self.local.regather else frozenset()
            step = recompute(step, checkpointed(step) | weights)
            step = recompute(*within_windows(step))
        if self.context.gradient_fp32_sync:
            step = reduce_in_float32(step)
        return step if self.context.gradients_mean else scale_parameter_gradients(step, self.planned.parts)

    def _fused(self, step: Step) -> Program:
        with uncollected():
            return make_program(step, self.context.fusion_policies, self.profile)


def _bits(wanted: tuple[bool, ...]) -> str:
    """A name for which outputs are differentiated."""
    return f"{len(wanted)}-{sum(want << i for i, want in enumerate(wanted)):x}"


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
) -> Compiled:
    """Plan a call of a function or module without running it; tensors on the meta device are welcome.

    The arguments are those of `shard`. Needs no process group and no second device.

    Raises StrategyError for annotations that cannot be met (all reasons at once), CaptureError for a function that
    torch.export cannot capture, OperatorError as `on_unknown_op` says.
    """
    request = Request(in_strategy, out_strategy, parameter_plan, mesh, device, level, module_plan, plan)
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
    fixed: dict[str, Layout] = {}
    if isinstance(fn_or_module, torch.nn.Module):
        fixed = parameters_on(fn_or_module, brought(fn_or_module), request.own_mesh)
    placed = inputs_on(call, request.own_mesh or next((found.mesh for found in fixed.values()), None))
    plain_args, plain_kwargs = call.structure.build([plain(tensor) for tensor in call.tensors])
    return compile_call(
        fn_or_module, plain_args, plain_kwargs, request, current(), current_algo(), fixed=fixed, placed=placed,
        values=values_of(call.tensors, state_of(fn_or_module).__getitem__),
    )  # fmt: skip


@planning()
def compile_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    context: ParallelContext,
    algo: AlgoParameters,
    *,
    processes: int | None = None,
    fixed: Mapping[str, Layout] | None = None,
    placed: Mapping[str, Layout] | None = None,
    values: Values | None = None,
    late: Sequence[Answer] = (),
) -> Compiled:
    """All passes for one call. `processes`: how many a launcher started; `fixed`: layouts that parameters have, and
    `placed` those of inputs that are DTensors; `values`: where to find the values that `fn` asks for; `late`: what it
    asks late is known to be so."""
    saved = Plan.load(path) if (path := context.strategy_ckpt_config.load_file) else None
    every = rules()
    state = State(fn)
    effects = Effects(fn, state)
    warn_of_unwatched(fn, state)
    with _own_saved_tensors(), constrained_modules(fn, request), afterwards(effects.finish):
        gradients = torch.is_grad_enabled() or not state.reached.asks.gradients
        options = CaptureOptions(context.batch_norm_parts, context.random_numbers, every, gradients, tuple(late))
        graph = capture(fn, args, kwargs, options, values, effects)
    effects.check(graph.constants)
    looking = frozenset(graph.hooks.observers)
    if effects.kept or looking or graph.read or not state.holds():  # hooks may have been added
        state = State(fn, looking, effects.kept, graph.read)
    mode, profile = context.search_mode, device_profile(graph, request, context)
    given = _given_plan(graph, request.plans)
    own = {node.target: every[node.target] for node in graph.nodes if node.target in every}
    settled = dict(fixed or {})  # as they are now: what is searched again later is the same
    inputs = PlanInputs(
        graph, fn, request, context, algo, profile, own, processes, settled, dict(placed or {}), saved, given
    )

    def plan_on(mesh: Mesh, below: float) -> Searched:
        annotations = annotate(inputs, mesh)

        def solved(settings: Settings) -> Searched:
            problem = formulate(graph, settings, annotations.allowed, annotations.as_it_lies)
            return Searched(annotations, problem, replay(problem, given) if given else search(problem, mode, below))

        settings = settings_of(inputs, mesh)
        try:
            found = solved(settings)
        except StrategyError:
            if not settings.stay_split:
                raise
            # an operator cannot run on its part of the batch: its operands are gathered
            settings = replace(settings, stay_split=False)
            found = solved(settings)
        if over := bytes_over_limit(found.problem, found.solution):
            if context.reshard_after_forward is False:
                raise StrategyError(_keeps_too_much(settings, over))
            found = solved(replace(settings, regather=True))
        return found

    @functools.cache
    def find() -> Searched:
        meshes = meshes_to_try(inputs)
        with uncollected():
            return cheapest(plan_on, meshes)

    def make() -> Planned:
        found = find()
        with uncollected(), none_of_all_modules():
            local = lower(found.problem, found.solution.choice)
            plan = make_plan(found.problem, found.solution, local, mode, found.annotations.written)
        return Planned(local, plan, found.annotations.parts)

    verifies = os.environ.get("PARTWAY_VERIFY") == "1"
    folder = (
        cache_folder(context.compile_cache_path)
        if context.enable_compile_cache and not verifies and not graph.hooks.made
        else None
    )
    entry = Entry(
        graph, folder, name_of(fn), request, _set(context), _set(algo), processes, settled, placed,
        profile.model_dump(), text_of(own), *(plan.model_dump_json() for plan in (saved, given) if plan),
    )  # fmt: skip
    planned = entry.fetch("plan", make, Planned)
    planned.plan.of(lambda: alternatives(find(), planned.local, mode))
    compiled = Compiled(inputs, planned, entry, find, state, effects)
    warn_of_unknown(graph, planned.plan.unknown_operators)
    if verifies:
        verify(graph)
        verify_solution(compiled.problem, compiled.solution)
        verify_program(compiled.local)
    if context.strategy_ckpt_config.save_file and (processes is None or get_rank() == 0):
        compiled.plan.save(context.strategy_ckpt_config.save_file)
    return compiled


def _given_plan(graph: Graph, plans: tuple[Plan, ...]) -> Plan | None:
    """The one of `plans` that is of `graph`. Raises StrategyError where there are some and none is, with what differs
    from the one that is nearest."""
    found = [(differences(graph, plan), plan) for plan in plans]
    if not found:
        return None
    problems, plan = min(found, key=lambda pair: len(pair[0]))
    several = f"; of {len(plans)} plans the nearest differs" if plans[1:] else ""
    raise_problems(f"the plan that was given is not one of this call{several}:", problems)
    return plan


def alternatives(found: Searched, local: LocalProgram, mode: SearchMode) -> Alternatives:
    """What the plan of `local` is compared with when it is asked to explain."""
    made = outcome(found.problem, found.solution, local)
    return Alternatives(found.problem, made, mode, found.annotations.written)


def _set(options: ParallelContext | AlgoParameters) -> tuple[Any, ...]:
    """The options, and which of them were set."""
    return options.model_dump(), sorted(options.model_fields_set)


def cheapest(plan_on: Callable[[Mesh, float], Searched], meshes: list[Mesh]) -> Searched:
    """The cheapest of the plans on `meshes`, on the first of them that has it. A mesh on which an annotation cannot be
    met is passed over; raises the first one's StrategyError where that is so on all of them."""
    best: Searched | None = None
    refused: StrategyError | None = None
    for mesh in meshes:
        try:
            found = plan_on(mesh, best.solution.cost if best else math.inf)
        except StrategyError as error:
            refused = refused or error
            continue
        if best is None or found.solution.cost < best.solution.cost * (1 - 1e-9):
            best = found
    if best is None:
        assert refused is not None
        raise refused
    return best


def bytes_over_limit(problem: SearchProblem, solution: Solution) -> float:
    """By how many bytes a plan exceeds the memory limit with the gathered weights that it keeps; 0: they fit."""
    limit = problem.settings.memory_limit
    if limit is None:
        return 0.0
    return max(0.0, problem.memory(solution.choice) + lower(problem, solution.choice).gathered_bytes - limit)


def _keeps_too_much(settings: Settings, over: float) -> str:
    limit = settings.memory_limit or 0.0
    return (
        f"the plan on the mesh {settings.mesh} keeps gathered weights for the backward, as reshard_after_forward=False "
        f"says, and exceeds memory_limit {limit / 1e9:.4g} GB by {over / 1e9:.4g} GB; set reshard_after_forward=None "
        "or True, so that the backward gathers them again, or a higher limit"
    )


def _own_saved_tensors() -> torch.autograd.graph.saved_tensors_hooks:
    """Keeps the caller's hooks, as those of activation checkpointing, off what is only traced."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def settings_of(inputs: PlanInputs, mesh: Mesh) -> Settings:
    """What the search needs to know of the options, and of the rules that users wrote."""
    context, algo = inputs.context, inputs.algo
    modes = (ParallelMode.SEMI_AUTO_PARALLEL, ParallelMode.DATA_PARALLEL)
    threshold = context.parallel_optimizer_config.parallel_optimizer_threshold * 1024
    return Settings(
        mesh=mesh,
        profile=inputs.profile,
        weights=WEIGHTS[Level(inputs.request.level)],
        fully_use_devices=algo.fully_use_devices,
        batch_by_default=context.mode_was_set and context.parallel_mode in modes,
        stay_split=context.mode_was_set and context.parallel_mode == ParallelMode.DATA_PARALLEL,
        elementwise_follow=algo.elementwise_op_strategy_follow,
        keep_cheapest=math.ceil(min(1 / algo.algo_approxi_epsilon, 1e18)) if algo.enable_algo_approxi else None,
        slice_align=algo.tensor_slice_align_size if algo.tensor_slice_align_enable else 1,
        shard_parameters=threshold if context.enable_parallel_optimizer else None,
        optimizer_states=algo.optimizer_states,
        memory_limit=algo.memory_limit,
        regather=context.reshard_after_forward is True,
        on_unknown_op=context.on_unknown_op,
        rules=inputs.rules,
    )


def device_profile(graph: Graph, request: Request, context: ParallelContext) -> DeviceProfile:
    """The figures of the devices that a call is planned for."""
    device = request.device or ("cuda" if graph.device == "meta" else graph.device)
    return profile_of(context.device_profile or device)


_LATER: dict[str, Callable[[Any], bool]] = {
    "a generator": inspect.isgeneratorfunction,
    "asynchronous": lambda fn: inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn),
}


def check_target(call: str, fn: Any) -> None:
    """Raise StrategyError unless `fn` is a function or a module that `call` (shard or compile) can take."""
    if isinstance(fn, torch.jit.ScriptModule):
        raise StrategyError(f"{call} takes an eager module, not a scripted one; give it the module that was scripted")
    if isinstance(fn, torch.nn.Module) and any(map(torch.nn.parameter.is_lazy, fn.parameters())):
        raise StrategyError(f"{type(fn).__name__} has parameters without a shape yet; call it once before {call}")
    if isinstance(fn, type):
        raise StrategyError(f"{call} takes an nn.Module object, not the class {fn.__name__}; write {fn.__name__}(...)")
    body = fn.forward if isinstance(fn, torch.nn.Module) else fn
    for kind, found in _LATER.items():
        if found(body):
            raise StrategyError(
                f"{call} takes a function whose call computes its result, and {name_of(fn)} is {kind}, which computes "
                "when it is asked for one; shard what it calls"
            )
    if not callable(fn) or getattr(type(fn), "forward", None) is torch.nn.Module.forward:
        text = type(fn).__name__ if isinstance(fn, torch.Tensor | torch.nn.Module) else shown(fn)
        raise StrategyError(f"{call} takes a function or an nn.Module object with a forward, not {text}")


_DATA = (
    "was given other data (.data =), of which a DTensor knows nothing",
    "copy into its part, with distribute_tensor(value, p.device_mesh, p.placements) and p.copy_() under no_grad",
)
_TRANSFORMED = (
    "is inside a transform of torch.func (vmap, grad, jvp, ...)",
    "transform plain functions, and call the sharded one outside",
)


def check_parameters(fn: Any) -> None:
    """Raise StrategyError unless every parameter, which torch.func.functional_call may have given, can be split."""
    parameters = dict(fn.named_parameters()) if isinstance(fn, torch.nn.Module) else {}
    problems = [Problem(f"parameter {n!r}", *_TRANSFORMED) for n, held in parameters.items() if is_transformed(held)]
    problems += [Problem(f"parameter {n!r}", *_DATA) for n, held in parameters.items() if has_other_data(held)]
    raise_problems("the parameters of the call cannot be split:", problems)


def check_tensors(call: Call, device: str | None) -> None:
    """Raise StrategyError unless every tensor is one that can be split, on a device of type `device` (None: any)."""
    problems = []
    for name, tensor in zip(call.names, call.tensors, strict=True):
        where = f"input {name!r}"
        if is_transformed(tensor):
            problems.append(Problem(where, *_TRANSFORMED))
        elif tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
            problems.append(Problem(where, f"is a {kind} tensor", "give a dense one, as with .to_dense()"))
        elif device is not None and tensor.device.type not in (device, "meta"):
            what = f"is on {tensor.device}, and device={device!r} was asked for"
            problems.append(Problem(where, what, f"move it with .to({device!r})"))
    raise_problems("the tensors of the call cannot be split:", problems)
