"""The passes in order: from a captured call to the program that every rank runs.

    annotate ─▶ formulate ─▶ search ─▶ lower ─▶ make_plan      differentiate ─▶ recompute ─▶ ... ─▶ separate ─▶ fuse
    └──────────────────── PLANNING ──────────────────────┘     └────────────────── PROGRAM ───────────────┘

A pass is a row of one of two tables, `PLANNING` and `PROGRAM`. It reads a draft, which is frozen, and makes one
printable value; the next pass reads the draft with that value. A pass depends only on its draft, so equal drafts make
equal plans. Observers (`verified`, `timed`) wrap each pass: see `Around`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from partway.annotations.annotate import Annotations, annotate
from partway.fusion.by_size import AUTO_MB
from partway.fusion.fuse import fuse_program
from partway.fusion.members import MB
from partway.fusion.modes import Fusion, FusionMode, FusionPolicies
from partway.options.parallel import ParallelMode
from partway.propagation.capture.hooks import none_of_all_modules
from partway.propagation.cost.cost import WEIGHTS, Level
from partway.propagation.cost.profile import DeviceProfile
from partway.propagation.graph.graph import differentiated, verify
from partway.propagation.plan.make import make_plan
from partway.propagation.plan.plan import Plan
from partway.propagation.plan.replay import follow, replay
from partway.propagation.problem.formulate import formulate
from partway.propagation.problem.problem import SearchProblem, Settings
from partway.propagation.program.accumulate import Accumulation, accumulation
from partway.propagation.program.apart import of_outputs
from partway.propagation.program.derivative import differentiate_again
from partway.propagation.program.differentiate import differentiate
from partway.propagation.program.gradients import reduce_in_float32, scale_parameter_gradients
from partway.propagation.program.lower import lower
from partway.propagation.program.program import Program, verify_program
from partway.propagation.program.recompute import checkpointed, planned, recompute, within_others
from partway.propagation.search.search import SEARCHES, find, search
from partway.propagation.search.solution import Elsewhere, Solution, verify_solution
from partway.requests.plan_inputs import PlanInputs
from partway.requests.planning_log import stage
from partway.strategy import Mesh, StrategyError
from partway.strategy.basics.blocks import uncollected

RESERVED = 0.06  # of a device's memory: for the driver, communication buffers and the allocator's gaps
GROUP_SHARE = 0.01  # of a memory limit: the largest group of collectives by itself
WORTH_AN_AXIS = 0.02  # the share of a plan's cost that one more axis has to save: more axes mean more collectives
_LATER: Any = None  # a field that a later pass makes


@dataclass(frozen=True)
class Draft:
    """An unfinished plan of `inputs` on `mesh`, or an unfinished program of a finished plan.

    below     the cost of a plan on another mesh, an upper bound for the search
    found     the solution of the search mode, without bound and fates, if FINDING ran
    elsewhere the other meshes that were candidates
    planned   whether the plan has a backward of each output
    wanted    whether the backward of the program starts from each output

    The passes make the other fields.
    """

    inputs: PlanInputs
    mesh: Mesh
    settings: Settings = _LATER
    below: float = math.inf
    found: Solution | None = None
    elsewhere: Elsewhere | None = None
    annotations: Annotations = _LATER
    problem: SearchProblem = _LATER
    solution: Solution = _LATER
    program: Program = _LATER
    plan: Plan = _LATER
    planned: tuple[bool, ...] = ()
    wanted: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Pass:
    """A pass: `run` makes a value from a draft, which becomes the draft's field `makes`. `check` raises VerifyError if
    the draft with it is malformed."""

    name: str
    makes: str
    run: Callable[[Any], Any]
    check: Callable[[Any], object] = id


Around = Callable[[Pass, Draft], Draft]


def applied(each: Pass, draft: Draft) -> Draft:
    """`draft` after the pass `each`."""
    return replace(draft, **{each.makes: each.run(draft)})


def verified(each: Pass, draft: Draft) -> Draft:
    """As `applied`, and raises VerifyError if the result of the pass is malformed."""
    draft = applied(each, draft)
    each.check(draft)
    return draft


def timed(
    seconds: dict[str, float], around: Around = applied, clock: Callable[[], float] = time.perf_counter
) -> Around:
    """As `around`, and adds the time of each pass, by `clock`, to `seconds`, by the pass's name."""

    def timing(each: Pass, draft: Draft) -> Draft:
        start = clock()
        try:
            return around(each, draft)
        finally:
            seconds[each.name] = seconds.get(each.name, 0.0) + clock() - start

    return timing


def run(passes: Iterable[Pass], draft: Draft, around: Around = applied) -> Draft:
    """`draft` after all of `passes`, each run by `around`."""
    for each in passes:
        with stage(each.name):
            draft = around(each, draft)
    return draft


# -- From a graph to a plan


def _formulate(draft: Draft) -> SearchProblem:
    notes = draft.annotations
    return formulate(draft.inputs.graph, draft.settings, notes.allowed, notes.as_it_lies)


def _search(draft: Draft) -> Solution:
    inputs = draft.inputs
    if inputs.replayed is not None:
        return replay(draft.problem, inputs.replayed)
    if inputs.followed is not None:
        return follow(draft.problem, inputs.followed)
    return search(draft.problem, inputs.context.search_mode, draft.below, draft.found)


def _lower(draft: Draft) -> Program:
    program = lower(draft.problem, draft.solution.choice, draft.solution.keeping)
    return replace(program, parts=draft.annotations.parts)


def _make_plan(draft: Draft) -> Plan:
    mode, written = draft.inputs.context.search_mode, draft.annotations.written
    return make_plan(draft.problem, draft.solution, draft.program, mode, written, draft.elsewhere)


ANNOTATING = (Pass("annotate", "annotations", lambda draft: annotate(draft.inputs, draft.mesh)),)
SEARCHING = (
    Pass("formulate", "problem", _formulate),
    Pass("search", "solution", _search, lambda draft: verify_solution(draft.problem, draft.solution)),
)
FINDING = Pass("search", "found", lambda draft: find(draft.problem, draft.inputs.context.search_mode))
LOWERING = (
    Pass(
        "lower",
        "program",
        _lower,
        lambda draft: verify_program(draft.program),
    ),
    Pass("make_plan", "plan", _make_plan, lambda draft: verify(draft.inputs.graph)),  # passes must not change the graph
)
PLANNING = (*ANNOTATING, *SEARCHING, *LOWERING)


def plan_on_mesh(inputs: PlanInputs, mesh: Mesh, around: Around = applied) -> Draft:
    """The draft with a plan of `inputs` on `mesh`: all passes of PLANNING. Raises StrategyError if annotations cannot
    be satisfied, or memory does not suffice."""
    with uncollected():
        return lowered(search_on_mesh(inputs, mesh, math.inf, around), around)


@uncollected()
def search_on_cheapest_mesh(inputs: PlanInputs, meshes: Iterable[Mesh], around: Around = applied) -> Draft:
    """The draft, up to its solution, of the cheapest plan on any of `meshes`, if each axis has to save WORTH_AN_AXIS;
    of equal plans, that on the first mesh. A mesh on which an annotation cannot be satisfied is skipped; if all are,
    raises the StrategyError of the first.
    """
    best: Draft | None = None
    refused: StrategyError | None = None
    bounds: dict[Mesh, float] = {}
    for start in _starts(inputs, meshes, around):
        below = best.solution.cost * _worth(best.mesh) / _worth(start.mesh) if best else math.inf
        try:
            draft = _searched(replace(start, below=below), around)
        except StrategyError as error:
            refused = refused or error
            continue
        bounds[draft.mesh] = -math.inf if draft.problem.approximate else draft.solution.bound
        if draft.solution.cost < below * (1 - 1e-9):
            best = draft
    if best is None:
        assert refused is not None
        raise refused
    del bounds[best.mesh]
    elsewhere = Elsewhere(len(bounds), min(bounds.values())) if bounds else None
    return replace(best, below=math.inf, found=None, elsewhere=elsewhere)  # later searches are on this mesh only


def _worth(mesh: Mesh) -> float:
    """The factor by which the cost of a plan on a mesh counts, for the number of its axes."""
    return float((1 + WORTH_AN_AXIS) ** len(mesh.axes))


def _starts(inputs: PlanInputs, meshes: Iterable[Mesh], around: Around) -> Sequence[Draft]:
    """The drafts on `meshes`. In a heuristic mode, solutions are found first and sorted by cost, so that the slow
    parts, the bound and the fates, are computed on one mesh only."""
    starts = [Draft(inputs, mesh, settings_of(inputs, mesh)) for mesh in meshes]
    given = inputs.replayed is not None or inputs.followed is not None
    if len(starts) == 1 or given or SEARCHES[inputs.context.search_mode].exact:
        return starts
    for i, start in enumerate(starts):
        with contextlib.suppress(StrategyError):
            starts[i] = run((*ANNOTATING, *SEARCHING[:1], FINDING), start, around)
    costs = {start.mesh: f"{start.found.cost * _worth(start.mesh):.9e}" if start.found else "inf" for start in starts}
    return sorted(starts, key=lambda start: float(costs[start.mesh]))  # of the texts, which have no noise


def search_on_mesh(inputs: PlanInputs, mesh: Mesh, below: float, around: Around = applied) -> Draft:
    """The draft of a plan on `mesh`, up to its solution. The search is repeated with other settings if an operator
    cannot run on its part of the batch."""
    return _searched(Draft(inputs, mesh, settings_of(inputs, mesh), below), around)


def _searched(draft: Draft, around: Around) -> Draft:
    if draft.found is not None:
        return run(SEARCHING[1:], draft, around)
    draft = run(ANNOTATING, draft, around)
    try:
        draft = run(SEARCHING, draft, around)
    except StrategyError:
        if not draft.settings.stay_split:
            raise
        # an operator cannot run on its part of the batch: its operands are gathered
        draft = run(SEARCHING, replace(draft, settings=replace(draft.settings, stay_split=False)), around)
    return draft


def lowered(draft: Draft, around: Around = applied) -> Draft:
    """A draft with a solution, with its plan and the forward of one rank."""
    with uncollected(), none_of_all_modules():
        return run(LOWERING, draft, around)


def settings_of(inputs: PlanInputs, mesh: Mesh) -> Settings:
    """The settings of a search, by the options and the rules of users."""
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
        gradient_fp32_sync=context.gradient_fp32_sync,
        expert_load=algo.expert_load,
        optimizer_states=algo.optimizer_states,
        memory_limit=memory_limit(algo.memory_limit, inputs.profile),
        recompute=algo.recompute,
        regather=context.reshard_after_forward,
        on_unknown_op=context.on_unknown_op,
        rules=inputs.rules,
    )


def memory_limit(asked: float | None, profile: DeviceProfile) -> float | None:
    """The bytes that a plan may hold on a device: `asked`, or by default the device's memory less the reserved share.
    None, if `asked` is inf: no limit."""
    if asked is None:
        return profile.memory * (1 - RESERVED)
    return None if math.isinf(asked) else asked


# -- From a plan to the graphs of a step


def _differentiate(draft: Draft) -> Program:
    """The program with the backward of every planned output, if the wanted ones can be separated from it; else of the
    wanted ones."""
    return differentiate(draft.program, draft.planned if _is_separable(draft) else draft.wanted)


def _is_separable(draft: Draft) -> bool:
    """Whether the wanted outputs are some, but not all, of those for which the plan has a backward."""
    pairs = zip(draft.wanted, draft.planned, strict=True)
    return (
        any(draft.wanted) and draft.wanted != draft.planned and all(planned or not wanted for wanted, planned in pairs)
    )


def _recompute(draft: Draft) -> Program:
    return recompute(draft.program, checkpointed(draft.program) | planned(draft.program))


def _scale_gradients(draft: Draft) -> Program:
    mean = draft.inputs.context.gradients_mean
    return draft.program if mean else scale_parameter_gradients(draft.program, draft.program.parts)


def _separate(draft: Draft) -> Program:
    return of_outputs(draft.program, draft.wanted) if _is_separable(draft) else draft.program


def _fuse(draft: Draft) -> Program:
    policies = small_groups(draft.inputs.context.fusion_policies, draft.inputs.algo.memory_limit)
    return fuse_program(draft.program, policies)


def small_groups(policies: FusionPolicies, limit: float | None) -> FusionPolicies:
    """`policies` in which auto makes groups of at most a hundredth of the memory limit that a user set: two groups of
    weights and their send buffers take memory that the plan does not count."""
    if limit is None or limit * GROUP_SHARE >= AUTO_MB * MB:
        return policies
    small = Fusion(FusionMode.SIZE, max(1, int(limit * GROUP_SHARE / MB)))
    automatic = [field.name for field in fields(policies) if _is_auto(getattr(policies, field.name))]
    return replace(policies, **dict.fromkeys(automatic, small))


def _is_auto(fusion: Fusion | None) -> bool:
    return fusion is not None and fusion.mode is FusionMode.AUTO


DIFFERENTIATING = (
    Pass("differentiate", "program", _differentiate),
    Pass("recompute", "program", _recompute),
    Pass("recompute_within_others", "program", lambda draft: recompute(*within_others(draft.program))),
    Pass("reduce_in_float32", "program", lambda draft: reduce_in_float32(draft.program)),
    Pass("scale_gradients", "program", _scale_gradients),
    Pass("separate", "program", _separate),
)
DIFFERENTIATING_AGAIN = (
    Pass("differentiate_again", "program", lambda draft: differentiate_again(draft.program, draft.wanted)),
    *(each for each in DIFFERENTIATING if each.name in ("reduce_in_float32", "scale_gradients")),
)
FUSING = (Pass("fuse", "program", _fuse),)
PROGRAM = (*DIFFERENTIATING, *FUSING)


def differentiated_program(
    inputs: PlanInputs, program: Program, wanted: tuple[bool, ...], around: Around = applied
) -> Draft:
    """The draft of a plan's program, up to its fusion, whose backward starts from the outputs marked in `wanted`."""
    draft = Draft(inputs, program.mesh, program=program, planned=differentiated(inputs.graph), wanted=wanted)
    with own_saved_tensors(), uncollected(), none_of_all_modules():
        return run(DIFFERENTIATING, draft, around)


def differentiated_again(inputs: PlanInputs, program: Program, wanted: tuple[bool, ...]) -> Program:
    """`program`, up to its fusion, with a backward of the outputs marked in `wanted` that is differentiated again."""
    draft = Draft(inputs, program.mesh, program=program, planned=wanted, wanted=wanted)
    with own_saved_tensors(), uncollected(), none_of_all_modules():
        return run(DIFFERENTIATING_AGAIN, draft).program


def fused(draft: Draft, around: Around = applied) -> Program:
    """The program of a draft with a backward, after fusion."""
    with uncollected():
        return run(FUSING, draft, around).program


def accumulated(draft: Draft, around: Around = applied) -> Accumulation | None:
    """The backwards of a draft's program with delayed reductions, or None if no gradient can wait."""
    parts = accumulation(draft.program)
    if parts is None:
        return None
    last, rest = (fused(replace(draft, program=program), around) for program in (parts.last, parts.rest))
    return replace(parts, last=last, rest=rest)


def own_saved_tensors() -> torch.autograd.graph.saved_tensors_hooks:
    """A block in which the caller's hooks on saved tensors, such as those of activation checkpointing, do not run:
    its operators are only traced."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
