"""Every source of strategies, read as statements on single tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from partway.annotations.argument_names import by_argument, check_out_strategy
from partway.annotations.constraint_text import constraint_of
from partway.annotations.given import given_strategies
from partway.options.fields import DatasetMode, ParallelMode
from partway.options.parallel import ParallelContext
from partway.propagation.graph.graph import Graph
from partway.propagation.graph.nodes import shape
from partway.propagation.graph.port import Port, Role
from partway.propagation.ops.collectives import constrain
from partway.requests.plan_inputs import PlanInputs
from partway.requests.request import Request, requests
from partway.strategy import Mesh, Problem, Replicate, Shard
from partway.strategy.basics.suggest import did_you_mean, there_are


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
