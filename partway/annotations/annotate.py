"""The layouts that each tensor may have: the statements of all sources (in_strategy, parameter_plan, dataset_strategy,
...) on single tensors, checked on a mesh and merged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from partway.annotations.constraint_text import constraint_of
from partway.annotations.given import given_strategies
from partway.options.parallel import DatasetMode, ParallelContext, ParallelMode
from partway.propagation.graph.graph import Graph, beside_losses, in_caches
from partway.propagation.graph.nodes import shape
from partway.propagation.graph.port import Port, Role
from partway.propagation.ops.collectives import constrain
from partway.propagation.plan.plan import Plan
from partway.propagation.problem.problem import Allowed
from partway.requests.plan_inputs import PlanInputs
from partway.requests.request import Request, by_argument, check_out_strategy, requests
from partway.strategy import (
    REPLICATE,
    Annotation,
    Layout,
    Mesh,
    Problem,
    Replicate,
    Shard,
    StrategyError,
    check_strategies,
)
from partway.strategy.basics.suggest import did_you_mean, there_are
from partway.strategy.errors import raise_problems
from partway.strategy.layout import layout
from partway.strategy.notation import counted

_SHOWN = 6  # layouts of an annotation that are printed

Layouts = dict[str, tuple[tuple[Layout, ...], str]]  # by name: the allowed layouts, and the strategy as written


@dataclass(frozen=True)
class Annotations:
    """The annotations for `formulate`: the allowed layouts by name, and the results that may stay split."""

    allowed: Allowed
    as_it_lies: frozenset[str]
    parts: int  # the number of parts of the batch
    written: Mapping[str, str]  # by name, the sources of its strategies; one pattern may match many names

    def __str__(self) -> str:
        lines = [
            f"{counted(len(self.allowed), 'tensor')} annotated, the batch split into {counted(self.parts, 'part')}"
        ]
        for name, (layouts, text) in self.allowed.items():
            more = f" and {len(layouts) - _SHOWN} more" if len(layouts) > _SHOWN else ""
            allowed = ", ".join(map(str, layouts[:_SHOWN]))
            lines.append(f"{name}: {text}, from {self.written.get(name, 'an earlier plan')}: {allowed}{more}")
        return "\n".join([*lines, *(f"{name} may stay as it lies" for name in sorted(self.as_it_lies))])


def annotate(inputs: PlanInputs, mesh: Mesh) -> Annotations:
    """Check every annotation of a function against its graph; all failures are reported together.

    Raises StrategyError.
    """
    graph = inputs.graph
    allowed, written = _merged(_checked(inputs, mesh))
    if inputs.loaded is not None:
        allowed |= _of_saved_plan(inputs, inputs.loaded, mesh, allowed)
        written.update({name: "strategy_ckpt_config" for name in allowed if name not in written})
    allowed |= _of_earlier_plan(inputs, mesh, allowed)
    return Annotations(allowed, _as_they_lie(inputs) - allowed.keys(), _parts(graph, allowed), written)


def _as_they_lie(inputs: PlanInputs) -> frozenset[str]:
    """The outputs that may stay split; under a given plan those that it has split, too: one of training splits results
    beside a loss, and applies to a call without gradients as well."""
    if inputs.context.whole_results:
        return frozenset()
    planned = inputs.replayed.outputs if inputs.replayed else ()
    split = frozenset(each.name for each in planned if set(each.codes) != {str(REPLICATE)})
    return beside_losses(inputs.graph) | in_caches(inputs.graph) | split


def _checked(inputs: PlanInputs, mesh: Mesh) -> list[tuple[Statement, Annotation]]:
    """Every statement with its annotation. Raises one StrategyError with all problems."""
    graph, algo = inputs.graph, inputs.algo
    problems: list[Problem] = []
    every = statements(inputs, mesh, problems)
    stored = {Role.PARAMETER, Role.RESULT}
    storable = {port.name for port in (*graph.inputs, *graph.outputs) if port.role in stored}
    fixed_sizes = parameters(graph).keys()
    annotations: tuple[Annotation | None, ...] = ()
    try:
        annotations = check_strategies(
            [(one.words, one.shape, one.strategy) for one in every],
            mesh,
            fully_use_devices=algo.fully_use_devices and "fully_use_devices" in algo.model_fields_set,
            chunked=[one.words for one in every if one.key in storable],
            varying=[one.words for one in every if one.key not in fixed_sizes],
        )
    except StrategyError as error:
        problems += error.problems
    raise_problems(f"{counted(len(problems), 'problem')} with strategies on the mesh {mesh}:", problems)
    pairs = zip(every, annotations, strict=True)
    return [(one, annotation) for one, annotation in pairs if annotation is not None]


def _merged(pairs: Iterable[tuple[Statement, Annotation]]) -> tuple[Layouts, dict[str, str]]:
    """The layouts that all statements on a tensor allow, and the sources of the statements. Raises StrategyError if
    there is no such layout."""
    allowed: Layouts = {}
    written: dict[str, str] = {}
    earlier: dict[str, list[tuple[Statement, Annotation]]] = {}
    problems: list[Problem] = []
    for one, annotation in pairs:
        layouts = annotation.layouts(one.shape)
        others = earlier.setdefault(one.key, [])
        if problem := _contradiction(one, annotation, others):
            problems.append(problem)
        else:
            if one.key in allowed:  # never empties: equal layouts, equal counts, or a layout of the counts
                layouts = tuple(layout for layout in layouts if layout in allowed[one.key][0])
            allowed[one.key] = layouts, str(annotation)
            others.append((one, annotation))
        written[one.key] = f"{written[one.key]} and {one.source}" if one.key in written else one.source
    raise_problems("annotations contradict each other:", problems)
    return allowed, written


def _contradiction(
    one: Statement, annotation: Annotation, others: Iterable[tuple[Statement, Annotation]]
) -> Problem | None:
    """The contradiction between a statement and one of the others on the same tensor, or None."""
    layouts = set(annotation.layouts(one.shape))
    for other, its in others:
        if layouts.isdisjoint(its.layouts(one.shape)):
            what = f"{other.source} says {its}, and {one.source} says {annotation}"
            return Problem(one.words, what, "drop one of the two")
    return None


def _of_saved_plan(inputs: PlanInputs, saved: Plan, mesh: Mesh, taken: Collection[str]) -> Layouts:
    """The layouts of parameters in a saved plan, except for `taken`, which have strategies. Raises StrategyError."""
    layouts: Layouts = {}
    problems: list[Problem] = []
    title, where = "the plan that strategy_ckpt_config loads does not fit:", "strategy_ckpt_config"
    if saved.mesh != mesh:
        what = f"the saved plan is for the mesh {saved.mesh}, not {mesh}"
        raise_problems(title, [Problem(where, what, "use its mesh, or save a plan for this one")])
    ports = parameters(inputs.graph)
    if saved.parameters and ports and not ports.keys() & saved.parameters.keys():
        what = f"the saved plan is of other parameters, such as {next(iter(saved.parameters))!r}"
        problems.append(Problem(where, what, "load the plan of this model"))
    only_trainable = inputs.context.strategy_ckpt_config.only_trainable_params
    for name, its in saved.parameters.items():
        port = ports.get(name)
        if port is None or (only_trainable and not port.requires_grad) or name in taken:
            continue
        size = shape(port.node)
        if not its.fits(size):
            what = f"has shape {list(size)}, which the saved layout {its} does not fit"
            problems.append(Problem(f"parameter {name!r}", what, "save a plan of this model"))
        layouts[name] = (layout(mesh, its.placements).without_single(tuple(size)),), "loaded from a plan"
    raise_problems(title, problems)
    return layouts


def _of_earlier_plan(inputs: PlanInputs, mesh: Mesh, allowed: Layouts) -> Layouts:
    """The layouts of parameters that an earlier plan has laid out. Raises StrategyError if `allowed` lacks one."""
    fresh = "shard a fresh copy of the module to change the layout of its parameters"
    title = "the parameters have layouts already:"
    others = dict.fromkeys(its.mesh for its in inputs.parameters.values() if its.mesh != mesh)
    if others:
        texts = [f"this call is on ({mesh}), and they are split on ({other})" for other in others]
        raise_problems(title, [Problem("mesh", text, f"use that, or {fresh}") for text in texts])
    layouts: Layouts = {}
    problems: list[Problem] = []
    ports = parameters(inputs.graph)
    for name, its in inputs.parameters.items():
        if name not in ports:
            continue
        size = shape(ports[name].node)
        its = its.without_single(size) if its.fits(size) else its
        choices, text = allowed.get(name, ((its,), ""))
        if not its.fits(size):
            what = f"now has the shape {list(size)}, which its layout {its} does not fit"
            problems.append(Problem(f"parameter {name!r}", what, fresh))
        elif its not in choices:
            what = f"is already split as {its}, which {text} does not allow"
            problems.append(Problem(f"parameter {name!r}", what, fresh))
        layouts[name] = (its,), text
    raise_problems(title, problems)
    return layouts


def _parts(graph: Graph, allowed: Allowed) -> int:
    """The number of parts into which the annotations split the batch, the first dim of an input."""
    ports = [port for port in tensors(graph) if port.name in allowed and shape(port.node)]
    return max((allowed[port.name][0][0].splits(len(shape(port.node)))[0] for port in ports), default=1)


# -- Every source of strategies, read as statements on single tensors


@dataclass(frozen=True)
class Statement:
    """The strategy of one tensor by one source. `key`: the tensor's among the allowed layouts; `words`: its name in
    messages."""

    key: str
    words: str
    shape: tuple[int, ...]
    strategy: Any
    source: str


Source = Callable[[PlanInputs, Mesh, list[Problem]], Iterator[Statement]]


def statements(inputs: PlanInputs, mesh: Mesh, problems: list[Problem]) -> list[Statement]:
    """The statements of all sources on the tensors of the graph; the problems of a source are added to `problems`."""
    every = [one for source in _SOURCES for one in source(inputs, mesh, problems)]
    named = {one.key for one in every}  # a DTensor whose input has a strategy is redistributed
    every += [one for one in _dtensors(inputs) if one.key not in named]
    every += _data_parallel(inputs, mesh, problems)
    return every


def tensors(graph: Graph) -> list[Port]:
    """The inputs of a graph that are arguments of its call."""
    return [port for port in graph.inputs if port.role is Role.INPUT]


def parameters(graph: Graph) -> dict[str, Port]:
    """The parameters and buffers of a graph by name."""
    return {port.name: port for port in graph.inputs if port.role is Role.PARAMETER}


def _in_strategy(inputs: PlanInputs, mesh: Mesh, problems: list[Problem]) -> Iterator[Statement]:
    """One statement for each tensor of an annotated argument."""
    ports = tensors(inputs.graph)
    present = list(dict.fromkeys(port.argument for port in ports))
    for name, strategy in by_argument(inputs.fn, inputs.request.in_strategy, present, problems).items():
        for port in ports:
            if strategy is not None and port.argument == name:
                yield _of_input(port, strategy, f"in_strategy[{name!r}]")


def _out_strategy(inputs: PlanInputs, mesh: Mesh, problems: list[Problem]) -> Iterator[Statement]:
    results = [port for port in inputs.graph.outputs if port.role is Role.RESULT]
    strategies = inputs.request.out_strategy or ()
    check_out_strategy(strategies, len(results), problems)
    for i, (port, strategy) in enumerate(zip(results, strategies, strict=False)):
        if strategy is not None:
            yield Statement(port.name, f"output {i}", shape(port.node), strategy, f"out_strategy[{i}]")


def _parameter_plans(inputs: PlanInputs, mesh: Mesh, problems: list[Problem]) -> Iterator[Statement]:
    """The statements of parameter plans: of the request, and of those of sharded modules inside."""
    graph = inputs.graph
    ports = parameters(graph)
    names = {**{name: name for name in ports}, **graph.aliases}
    tied = {name: [alias for alias, other in graph.aliases.items() if other == name] for name in ports}
    for prefix, request in requests(inputs.fn, inputs.request):
        if request.parameter_plan and request.own_mesh not in (None, mesh):
            what = f"the parameter_plan inside is written for the mesh {request.own_mesh}, inside one for {mesh}"
            problems.append(Problem(f"module {prefix.rstrip('.')!r}", what, "use one mesh, or leave it out inside"))
            continue
        for pattern, strategy in (request.parameter_plan or {}).items():
            source = f"parameter_plan[{prefix + pattern!r}]"
            if not isinstance(inputs.fn, torch.nn.Module):
                fix = "annotate its arguments in in_strategy"
                problems.append(Problem(source, "a function has no parameters", fix))
                continue
            matched = dict.fromkeys(names[name] for name in names if fnmatchcase(name, prefix + pattern))
            if not matched:
                fix = did_you_mean(pattern, names, there_are("parameters", names))
                problems.append(Problem(source, "matches no parameter that the call uses", fix))
            for name in matched if strategy is not None else ():
                words = f"parameter {name!r}" + "".join(f" (tied to {alias!r})" for alias in tied[name])
                yield Statement(name, words, shape(ports[name].node), strategy, source)


def _constraints(inputs: PlanInputs, mesh: Mesh, problems: list[Problem]) -> Iterator[Statement]:
    """The statements of the marks made inside the function while it was captured."""
    for node in inputs.graph.nodes:
        if node.target is constrain:
            words = f"constraint on {node.args[2]}"
            strategy, own_mesh = constraint_of(str(node.args[1]))
            if own_mesh in (None, mesh):
                yield Statement(f"constraint:{node.name}", words, shape(node), strategy, words)
            else:
                what = f"is written for the mesh {own_mesh}, inside one for {mesh}"
                problems.append(Problem(words, what, "use one mesh, or leave it out inside"))


_SEARCHING = (ParallelMode.SEMI_AUTO_PARALLEL, ParallelMode.AUTO_PARALLEL)  # the modes with a dataset_strategy


def _dataset_strategy(inputs: PlanInputs, mesh: Mesh, problems: list[Problem]) -> Iterator[Statement]:
    context, ports = inputs.context, tensors(inputs.graph)
    mode = context.parallel_mode if context.mode_was_set else ParallelMode.AUTO_PARALLEL
    if not ports or mode not in _SEARCHING or not dataset_applies(inputs.request, context):
        return
    if not context.dataset_was_set:  # each process has the whole batch, and these modes split it
        context = context.model_copy(update={"dataset_strategy": DatasetMode.DATA_PARALLEL})
    given = [(port.name, str(port.argument), shape(port.node)) for port in ports]
    strategies = given_strategies(inputs.fn, inputs.request, context, given, mesh.device_num, problems)
    for port, strategy in zip(ports, strategies, strict=True):
        if strategy is not None:
            yield _of_input(port, strategy, "dataset_strategy")


_SOURCES: tuple[Source, ...] = (_in_strategy, _out_strategy, _parameter_plans, _constraints, _dataset_strategy)


def dataset_applies(request: Request, context: ParallelContext) -> bool:
    """Whether the dataset_strategy splits inputs without an in_strategy: it was set, or the mode is a semi-auto or auto
    one. If each process has the whole batch and there is an in_strategy, the search decides about the other inputs."""
    mode = context.mode_was_set and context.parallel_mode in _SEARCHING
    return context.gives_parts or (request.in_strategy is None and (mode or context.dataset_was_set))


def _dtensors(inputs: PlanInputs) -> Iterator[Statement]:
    """The layouts of the inputs that are DTensors."""
    for port in tensors(inputs.graph):
        if port.name in inputs.inputs:
            yield _of_input(port, inputs.inputs[port.name], "the DTensor that is given")


def _data_parallel(inputs: PlanInputs, mesh: Mesh, problems: list[Problem]) -> Iterator[Statement]:
    """The statements of parallel_mode="data_parallel": parameters are whole (except for those that
    enable_parallel_optimizer splits), and every input is split along its first dim."""
    context = inputs.context
    if not context.mode_was_set or context.parallel_mode != ParallelMode.DATA_PARALLEL:
        return
    if strategies := inputs.request.given():
        what = f"splits the batch and nothing else, but {strategies[0][0]} was given"
        fix = "drop the strategies, or set parallel_mode='semi_auto_parallel'"
        problems.append(Problem("parallel_mode 'data_parallel'", what, fix))
        return
    whole, batch = (Replicate(),) * len(mesh.axes), (Shard(0),) * len(mesh.axes)
    optimizer = context.enable_parallel_optimizer
    for port in (*parameters(inputs.graph).values(), *tensors(inputs.graph)):
        is_input, size = port.role is Role.INPUT, shape(port.node)
        if size and (is_input or not (optimizer and port.requires_grad)):
            words = f"{port.role.value} {port.name!r}"
            yield Statement(port.name, words, size, batch if is_input else whole, "parallel_mode 'data_parallel'")


def _of_input(port: Port, strategy: Any, source: str) -> Statement:
    return Statement(port.name, f"input {port.name!r}", shape(port.node), strategy, source)
