"""What a person said about a function, checked against its graph: the layouts that each tensor may have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from partway.context import DatasetMode, ParallelContext, ParallelMode
from partway.plan_inputs import PlanInputs
from partway.propagation.graph.graph import Graph
from partway.propagation.graph.nodes import shape
from partway.propagation.graph.port import Port, Role
from partway.propagation.graph.queries import beside_losses
from partway.propagation.graph.structure import optional_names, place_names
from partway.propagation.ops.collectives import constrain
from partway.propagation.plan.plan import Plan
from partway.propagation.search.problem import Allowed
from partway.request import Request, Strategies, requests
from partway.strategy import (
    Annotation,
    Layout,
    Mesh,
    Problem,
    Replicate,
    Shard,
    StrategyError,
    check_dataset_strategy,
    check_strategies,
    coarsest_mesh,
    meshes_of,
    placement_from_code,
)
from partway.strategy.errors import raise_problems
from partway.strategy.layout import layout
from partway.strategy.notation import Form, counted, form_of, placements_of, read_placement
from partway.strategy.suggest import did_you_mean, either, nearest, there_are

# -- constraints inside a function travel through the captured graph as text


def constraint_text(where: str, strategy: Any, mesh: Mesh | None, ndim: int) -> str:
    """A strategy for a tensor of `ndim` dims as JSON, for `partway::constrain`; `constraint_of` reads it.

    Raises StrategyError for placements that such a tensor cannot have.
    """
    value: dict[str, Any] = {"dims": strategy}
    if form_of(strategy) is Form.PLACEMENTS:
        mesh = strategy.mesh if isinstance(strategy, Layout) else mesh
        read = [read_placement(where, placement, ndim) for placement in placements_of(strategy)]
        raise_problems("a constraint cannot be met:", (p for p in read if isinstance(p, Problem)))
        value = {"placements": [str(placement) for placement in read]}
    return json.dumps({**value, "mesh": dict(zip(mesh.axes, mesh.sizes, strict=True)) if mesh else None})


def constraint_of(text: str) -> tuple[Any, Mesh | None]:
    """The strategy and the mesh that `constraint_text` wrote."""
    value = json.loads(text)
    mesh = Mesh(value["mesh"]) if value["mesh"] else None
    if "placements" in value:
        return tuple(placement_from_code(code) for code in value["placements"]), mesh
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in value["dims"]), mesh


# -- the mesh


def meshes_to_try(inputs: PlanInputs) -> list[Mesh]:
    """The meshes that a call may be planned on: the one given (to `shard`, by a saved plan, or inside the function);
    else that of the layouts which parameters already have; else every mesh of the devices on which the int strategies
    can be written, or only the coarsest where operators follow data parallelism by default.

    Raises StrategyError where there is no mesh and no number of devices, or another number than that of the processes.
    """
    graph, fn, request, context, processes = (
        inputs.graph, inputs.fn, inputs.request, inputs.context, inputs.processes
    )  # fmt: skip
    saved = inputs.replayed or inputs.loaded
    constraints = [constraint_of(str(n.args[1])) for n in graph.nodes if n.target is constrain]
    within = [own for _, own in constraints] + [inner.own_mesh for _, inner in requests(fn, request)]
    given = [
        request.own_mesh,
        saved.mesh if saved else None,
        *within,
        *(layout.mesh for layout in inputs.inputs.values()),
    ]
    if mesh := next((found for found in given if found is not None), None):
        if processes is not None:
            from partway.strategy.torch_mesh import check_ranks

            check_ranks(mesh, processes)
        return [mesh]
    if processes is None and not context.device_num_was_set:
        raise StrategyError(
            "there is no mesh to split over; pass mesh={'dp': 2, 'tp': 4}, or set_auto_parallel_context(device_num=8)"
        )
    devices = processes or context.device_num
    earlier = [layout.mesh for layout in inputs.parameters.values() if layout.mesh.device_num == devices]
    if earlier:
        return earlier[:1]
    strategies = [s for _, s in request.given()] + [s for s, _ in constraints]
    strategies += [s for _, inner in requests(fn, request) for s in (inner.parameter_plan or {}).values()]
    if dataset_applies(request, context) and not isinstance(context.dataset_strategy, str):
        strategies += list(context.dataset_strategy)
    counts = [tuple(n or 1 for n in s) for s in strategies if _is_counts(s, devices)]
    if context.mode_was_set and context.parallel_mode != ParallelMode.AUTO_PARALLEL:
        return [coarsest_mesh(devices, counts)]
    return meshes_of(devices, counts, inputs.profile.levels[0].devices)


def _is_counts(strategy: Any, devices: int) -> bool:
    """Whether a strategy is split counts that could be written; what could not is for the validator to refuse."""
    if not isinstance(strategy, tuple) or not strategy:
        return False
    if not all(entry is None or (isinstance(entry, int) and not isinstance(entry, bool)) for entry in strategy):
        return False
    product = 1
    for entry in strategy:
        if entry is not None and entry < 1:
            return False
        product *= entry or 1
    return devices % product == 0


# -- the layouts that each tensor may have


@dataclass(frozen=True)
class Annotations:
    """What `formulate` needs of the annotations: the allowed layouts by name, and the results that may stay split."""

    allowed: Allowed
    as_it_lies: frozenset[str]
    parts: int  # into how many the batch is split
    written: Mapping[str, str]  # where what is said of each name was written: one pattern may speak of many


def annotate(given: PlanInputs, mesh: Mesh) -> Annotations:
    """Check every annotation of a function against its graph; all failures are reported together.

    Raises StrategyError.
    """
    graph, fn, request, context = given.graph, given.fn, given.request, given.context
    problems: list[Problem] = []
    inputs = [port for port in graph.inputs if port.role is Role.INPUT]
    results = [port for port in graph.outputs if port.role is Role.RESULT]
    said = [
        *_inputs(inputs, fn, request, problems),
        *_results(results, request, problems),
        *_parameters(graph, fn, request, mesh, problems),
        *_constraints(graph, mesh, problems),
        *_dataset(inputs, request, context, mesh, problems),
    ]
    named = {one.key for one in said}  # of an input that is said to lie otherwise the DTensor is redistributed
    said += [
        _Said(port.name, f"input {port.name!r}", shape(port.node), given.inputs[port.name], "the DTensor that is given")
        for port in inputs
        if port.name in given.inputs and port.name not in named
    ]
    if context.mode_was_set and context.parallel_mode == ParallelMode.DATA_PARALLEL:
        said += _data_parallel(graph, inputs, request, mesh, context, problems)
    strict = given.algo.fully_use_devices and "fully_use_devices" in given.algo.model_fields_set
    checked: tuple[Annotation | None, ...] = ()
    try:
        stored = {Role.PARAMETER, Role.RESULT}
        keys = {port.name for port in (*graph.inputs, *graph.outputs) if port.role in stored}
        chunked = [s.words for s in said if s.key in keys]
        parameters = {port.name for port in graph.inputs if port.role is Role.PARAMETER}
        varying = [s.words for s in said if s.key not in parameters]
        listed = [(s.words, s.shape, s.strategy) for s in said]
        checked = check_strategies(listed, mesh, fully_use_devices=strict, chunked=chunked, varying=varying)
    except StrategyError as error:
        problems += error.problems
    raise_problems(f"{counted(len(problems), 'problem')} with strategies on the mesh {mesh}:", problems)
    allowed: dict[str, tuple[tuple[Layout, ...], str]] = {}
    sayers: dict[str, list[tuple[_Said, Annotation]]] = {}
    written: dict[str, str] = {}
    for one, annotation in zip(said, checked, strict=True):
        if annotation is not None:
            _allow(allowed, sayers, one, annotation, problems)
            written[one.key] = f"{written[one.key]} and {one.source}" if one.key in written else one.source
    raise_problems("annotations contradict each other:", problems)
    if given.loaded is not None:
        _load(allowed, graph, given.loaded, mesh, context, problems)
        raise_problems("the plan that strategy_ckpt_config loads does not fit:", problems)
        written.update({name: "strategy_ckpt_config" for name in allowed if name not in written})
    _fix(allowed, graph, given.parameters, mesh, problems)
    raise_problems("the parameters have layouts already:", problems)
    return Annotations(allowed, beside_losses(graph) - allowed.keys(), _parts(inputs, allowed), written)


@dataclass(frozen=True)
class _Said:
    """That `source` wrote `strategy` of one tensor: its key among the allowed layouts, the words for it, its shape."""

    key: str
    words: str
    shape: tuple[int, ...]
    strategy: Any
    source: str


def _allow(
    allowed: dict[str, tuple[tuple[Layout, ...], str]],
    sayers: dict[str, list[tuple[_Said, Annotation]]],
    said: _Said,
    annotation: Annotation,
    problems: list[Problem],
) -> None:
    layouts = annotation.layouts(said.shape)
    for other, earlier in sayers.get(said.key, ()):
        if not set(layouts).intersection(earlier.layouts(said.shape)):
            what = f"{other.source} says {earlier}, and {said.source} says {annotation}"
            problems.append(Problem(said.words, what, "drop one of the two"))
            return
    if said.key in allowed:  # not empty: what agrees is the same layout, the same counts, or a layout of the counts
        layouts = tuple(found for found in layouts if found in allowed[said.key][0])
    allowed[said.key] = layouts, str(annotation)
    sayers.setdefault(said.key, []).append((said, annotation))


def _fix(
    allowed: dict[str, tuple[tuple[Layout, ...], str]],
    graph: Graph,
    fixed: Mapping[str, Layout],
    mesh: Mesh,
    problems: list[Problem],
) -> None:
    """Keep the layouts that an earlier plan gave to parameters."""
    fresh = "shard a fresh copy of the module to change the layout of its parameters"
    others = dict.fromkeys(found.mesh for found in fixed.values() if found.mesh != mesh)
    problems += [
        Problem("mesh", f"this call is on ({mesh}), and they are split on ({other})", f"use that, or {fresh}")
        for other in others
    ]
    shapes = {port.name: shape(port.node) for port in graph.inputs if port.role is Role.PARAMETER}
    for name, lies in fixed.items():
        if others or name not in shapes:
            continue
        found = lies.without_single(shapes[name]) if lies.fits(shapes[name]) else lies
        if not found.fits(shapes[name]):
            what = f"has now the shape {list(shapes[name])}, which its layout {found} does not fit"
            problems.append(Problem(f"parameter {name!r}", what, fresh))
        elif name in allowed and found not in allowed[name][0]:
            what = f"is already split as {found}, which {allowed[name][1]} does not allow"
            problems.append(Problem(f"parameter {name!r}", what, fresh))
        allowed[name] = ((found,), allowed[name][1] if name in allowed else "")


def by_argument(fn: Any, given: Strategies, present: Sequence[str], problems: list[Problem]) -> dict[str, Any]:
    """The strategy of each argument by name. `present`: the arguments in which a call passes tensors; one that is None
    by default may be missing (labels, in evaluation), and its strategy then says nothing."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        by_name = dict(given)
    else:
        places = place_names(fn, len(given))
        if len(given) > len(places):
            what = f"has {counted(len(given), 'entry', 'entries')} for {counted(len(places), 'argument')}"
            listed = f" ({', '.join(places)})" if places else ""
            problems.append(Problem("in_strategy", what + listed, "write one entry per argument, in order"))
        by_name = dict(zip(places, given, strict=False))
    known = place_names(fn, len(by_name) + 64)
    for name, strategy in by_name.items():
        if strategy is not None and name not in present and name not in optional_names(fn):
            what = "the call passes no tensor for it" if name in known else "there is no such argument"
            others = nearest(name, present) or present
            fix = f"annotate {either(map(repr, others))}" if others else "the call passes no tensors at all"
            problems.append(Problem(f"in_strategy[{name!r}]", what, fix))
    return by_name


def _inputs(inputs: Sequence[Port], fn: Any, request: Request, problems: list[Problem]) -> list[_Said]:
    """One entry for each tensor of an annotated argument."""
    present = list(dict.fromkeys(port.argument for port in inputs))
    by_name = by_argument(fn, request.in_strategy, present, problems)
    return [
        _Said(port.name, f"input {port.name!r}", shape(port.node), strategy, f"in_strategy[{name!r}]")
        for name, strategy in by_name.items()
        if strategy is not None
        for port in inputs
        if port.argument == name
    ]


def check_out_strategy(given: Sequence[Any] | None, results: int, problems: list[Problem]) -> None:
    """An out_strategy has at most one entry for each of the output tensors."""
    if given is not None and len(given) > results:
        what = f"has {counted(len(given), 'entry', 'entries')} for {counted(results, 'output tensor')}"
        problems.append(Problem("out_strategy", what, "write one entry per output tensor, in order"))


def _results(results: Sequence[Port], request: Request, problems: list[Problem]) -> list[_Said]:
    given = request.out_strategy or ()
    check_out_strategy(given, len(results), problems)
    return [
        _Said(port.name, f"output {i}", shape(port.node), strategy, f"out_strategy[{i}]")
        for i, (port, strategy) in enumerate(zip(results, given, strict=False))
        if strategy is not None
    ]


def _parameters(graph: Graph, fn: Any, request: Request, mesh: Mesh, problems: list[Problem]) -> list[_Said]:
    ports = {port.name: port for port in graph.inputs if port.role is Role.PARAMETER}
    names = {**{name: name for name in ports}, **graph.aliases}
    tied = {found: [alias for alias, name in graph.aliases.items() if name == found] for found in ports}
    said = []
    for prefix, inner in requests(fn, request):
        if inner.parameter_plan and inner.own_mesh not in (None, mesh):
            what = f"the parameter_plan inside is written for the mesh {inner.own_mesh}, inside one for {mesh}"
            problems.append(Problem(f"module {prefix.rstrip('.')!r}", what, "use one mesh, or leave it out inside"))
            continue
        for pattern, strategy in (inner.parameter_plan or {}).items():
            source = f"parameter_plan[{prefix + pattern!r}]"
            if not isinstance(fn, torch.nn.Module):
                problems.append(
                    Problem(source, "a function has no parameters", "annotate its arguments in in_strategy")
                )
                continue
            matched = dict.fromkeys(names[name] for name in names if fnmatchcase(name, prefix + pattern))
            if not matched:
                fix = did_you_mean(pattern, names, there_are("parameters", names))
                problems.append(Problem(source, "matches no parameter that the call uses", fix))
            for name in matched if strategy is not None else ():
                words = f"parameter {name!r}" + "".join(f" (tied to {alias!r})" for alias in tied[name])
                said.append(_Said(name, words, shape(ports[name].node), strategy, source))
    return said


def _constraints(graph: Graph, mesh: Mesh, problems: list[Problem]) -> list[_Said]:
    said = []
    for node in graph.nodes:
        if node.target is constrain:
            words = f"constraint on {node.args[2]}"
            strategy, own = constraint_of(str(node.args[1]))
            if own is not None and own != mesh:
                what = f"is written for the mesh {own}, inside one for {mesh}"
                problems.append(Problem(words, what, "use one mesh, or leave it out inside"))
                continue
            said.append(_Said(f"constraint:{node.name}", words, shape(node), strategy, words))
    return said


def dataset_applies(request: Request, context: ParallelContext) -> bool:
    """Whether the context's dataset_strategy annotates the inputs: nothing was said of them by in_strategy, and
    it (or a semi-auto or auto mode, whose default it is) was set."""
    modes = (ParallelMode.SEMI_AUTO_PARALLEL, ParallelMode.AUTO_PARALLEL)
    mode = context.mode_was_set and context.parallel_mode in modes
    return request.in_strategy is None and (mode or dataset_was_set(context))


def dataset_was_set(context: ParallelContext) -> bool:
    """Whether the user set the dataset_strategy: each rank then holds only its part of every input."""
    return bool({"dataset_strategy", "full_batch"} & context.model_fields_set)


def _dataset(
    inputs: Sequence[Port], request: Request, context: ParallelContext, mesh: Mesh, problems: list[Problem]
) -> list[_Said]:
    mode = context.parallel_mode if context.mode_was_set else ParallelMode.AUTO_PARALLEL
    modes = (ParallelMode.SEMI_AUTO_PARALLEL, ParallelMode.AUTO_PARALLEL)
    if not inputs or mode not in modes or not dataset_applies(request, context):
        return []
    value = context.dataset_strategy
    plain: Any = value.value if isinstance(value, DatasetMode) else value
    shapes = [shape(port.node) for port in inputs]
    try:
        strategies = check_dataset_strategy(plain, shapes, mesh.device_num, mode=mode.value) or ()
    except StrategyError as error:
        problems += error.problems
        return []
    return [
        _Said(port.name, f"input {port.name!r}", size, strategy, "dataset_strategy")
        for port, size, strategy in zip(inputs, shapes, strategies, strict=True)
        if size
    ]


def _data_parallel(
    graph: Graph,
    inputs: Sequence[Port],
    request: Request,
    mesh: Mesh,
    context: ParallelContext,
    problems: list[Problem],
) -> list[_Said]:
    """parallel_mode="data_parallel": parameters whole (but for those that enable_parallel_optimizer splits), every
    input split along its first dim."""
    if request.given():
        what = f"splits the batch and nothing else, and {request.given()[0][0]} was given"
        fix = "drop the strategies, or set parallel_mode='semi_auto_parallel'"
        problems.append(Problem("parallel_mode 'data_parallel'", what, fix))
        return []
    whole, batch = (Replicate(),) * len(mesh.axes), (Shard(0),) * len(mesh.axes)
    said = []
    optimizer = context.enable_parallel_optimizer
    parameters = [p for p in graph.inputs if p.role is Role.PARAMETER and not (optimizer and p.requires_grad)]
    for port in (*parameters, *inputs):
        if shape(port.node):
            strategy = batch if port.role is Role.INPUT else whole
            words = f"{port.role.value} {port.name!r}"
            said.append(_Said(port.name, words, shape(port.node), strategy, "parallel_mode 'data_parallel'"))
    return said


def _load(
    allowed: dict[str, tuple[tuple[Layout, ...], str]],
    graph: Graph,
    saved: Plan,
    mesh: Mesh,
    context: ParallelContext,
    problems: list[Problem],
) -> None:
    """Add the parameters' layouts of a saved plan where nothing else was said."""
    if saved.mesh != mesh:
        problems.append(
            Problem("strategy_ckpt_config", f"the saved plan is for the mesh {saved.mesh}, not {mesh}",
                    "use its mesh, or save a plan for this one")
        )  # fmt: skip
        return
    ports = {port.name: port for port in graph.inputs if port.role is Role.PARAMETER}
    if saved.parameters and ports and not ports.keys() & saved.parameters.keys():
        what = f"the saved plan is of other parameters, such as {next(iter(saved.parameters))!r}"
        problems.append(Problem("strategy_ckpt_config", what, "load the plan of this model"))
    trainable = context.strategy_ckpt_config.only_trainable_params
    for name, found in saved.parameters.items():
        port = ports.get(name)
        if port is None or (trainable and not port.requires_grad) or name in allowed:
            continue
        if not found.fits(shape(port.node)):
            problems.append(
                Problem(f"parameter {name!r}", f"has shape {list(shape(port.node))}, which the saved layout {found} "
                        "does not fit", "save a plan of this model")
            )  # fmt: skip
        fitting = layout(mesh, found.placements).without_single(tuple(shape(port.node)))
        allowed[name] = ((fitting,), "loaded from a plan")


def _parts(inputs: Sequence[Port], allowed: Allowed) -> int:
    """Into how many parts the annotations split the batch, the first dim of an input."""
    return max(
        (allowed[p.name][0][0].splits(len(shape(p.node)))[0] for p in inputs if p.name in allowed and shape(p.node)),
        default=1,
    )
