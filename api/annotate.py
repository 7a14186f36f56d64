"""What a person said about a function, checked against its graph: the layouts that each tensor may have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch

from partway.context import AlgoParameters, DatasetMode, ParallelContext, ParallelMode
from partway.propagation.collectives import constrain
from partway.propagation.graph import Graph, Port, Role, shape
from partway.propagation.plan import Plan
from partway.propagation.problem import Allowed
from partway.propagation.structure import parameter_names
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
    placement_from_code,
)
from partway.strategy.errors import raise_problems
from partway.strategy.layout import layout

Strategies = tuple[Any, ...] | Mapping[str, Any] | None


@dataclass(frozen=True)
class Request:
    """The arguments of one `shard` or `compile`."""

    in_strategy: Strategies = None
    out_strategy: tuple[Any, ...] | None = None
    parameter_plan: Mapping[str, Any] | None = None
    mesh: Any = None
    device: str | None = None
    level: int = 0

    def __post_init__(self) -> None:
        problems = []
        given: tuple[Any, Any, Any] = self.in_strategy, self.out_strategy, self.parameter_plan  # of any type, as yet
        in_strategy, out_strategy, parameter_plan = given
        if in_strategy is not None and not isinstance(in_strategy, tuple | Mapping):
            problems.append(
                Problem("in_strategy", f"is {_kind(in_strategy)}", "write a tuple with one strategy (or None) per "
                        "argument, or a dict by argument name")
            )  # fmt: skip
        if out_strategy is not None and not isinstance(out_strategy, tuple):
            problems.append(
                Problem("out_strategy", f"is {_kind(out_strategy)}", "write a tuple with one strategy per output")
            )
        if parameter_plan is not None and not isinstance(parameter_plan, Mapping):
            problems.append(
                Problem("parameter_plan", f"is {_kind(parameter_plan)}", "write a dict from name patterns to "
                        'strategies, such as {"layers.*.weight": ("tp", None)}')
            )  # fmt: skip
        if self.level not in (0, 1, 2) or isinstance(self.level, bool):
            problems.append(
                Problem("level", f"is {self.level!r}", "write 0 (least communication), 1 (least memory) or 2 (speed)")
            )
        if self.device not in (None, "cpu", "cuda"):
            problems.append(Problem("device", f"is {self.device!r}", "write 'cpu', 'cuda' or None"))
        for name, strategy in self.given():
            if strategy is not None and not isinstance(strategy, tuple | list | Layout):
                problems.append(
                    Problem(name, f"its strategy is {_kind(strategy)}", "write a tuple with one entry per dim, "
                            'such as ("dp", None) or (8, 1), a list of placements, or None')
                )  # fmt: skip
        raise_problems("the arguments of shard are wrong", problems)

    def given(self) -> list[tuple[str, Any]]:
        """Every strategy with the words that name its place."""
        found: list[tuple[str, Any]] = []
        if isinstance(self.in_strategy, Mapping):
            found += [(f"in_strategy[{name!r}]", s) for name, s in self.in_strategy.items()]
        elif isinstance(self.in_strategy, tuple):
            found += [(f"in_strategy[{i}]", s) for i, s in enumerate(self.in_strategy)]
        if isinstance(self.out_strategy, tuple):
            found += [(f"out_strategy[{i}]", s) for i, s in enumerate(self.out_strategy)]
        if isinstance(self.parameter_plan, Mapping):
            found += [(f"parameter_plan[{name!r}]", s) for name, s in self.parameter_plan.items()]
        return found


def _kind(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


# -- constraints inside a function travel through the captured graph as text


def constraint_text(strategy: Any, mesh: Mesh | None) -> str:
    """A strategy as JSON, for `partway::constrain`; `constraint_of` reads it."""
    codes = None
    if isinstance(strategy, Layout):
        codes = [str(p) for p in strategy.placements]
    elif isinstance(strategy, tuple | list) and any(not isinstance(e, str | int | tuple | None) for e in strategy):
        codes = [_placement_code(p) for p in strategy]
    value = {"placements": codes} if codes is not None else {"dims": strategy}
    return json.dumps({**value, "mesh": dict(zip(mesh.axes, mesh.sizes, strict=True)) if mesh else None})


def _placement_code(placement: Any) -> str:
    if getattr(placement, "dim", None) is not None:
        return f"S{placement.dim}"
    return {"Replicate": "R", "Broadcast": "B", "Partial": "P"}.get(type(placement).__name__, "R")


def constraint_of(text: str) -> tuple[Any, Mesh | None]:
    """The strategy and the mesh that `constraint_text` wrote."""
    value = json.loads(text)
    mesh = Mesh(value["mesh"]) if value["mesh"] else None
    if "placements" in value:
        return tuple(placement_from_code(code) for code in value["placements"]), mesh
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in value["dims"]), mesh


# -- the mesh


def given_mesh(mesh: Any) -> Mesh | None:
    """A Mesh from what a person may pass: a Mesh, a dict, a DeviceMesh, or None. Raises StrategyError."""
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, Mapping):
        return Mesh(mesh)
    if hasattr(mesh, "mesh_dim_names"):
        from partway.strategy.torch_mesh import from_device_mesh

        return from_device_mesh(mesh)
    raise StrategyError(f"mesh is {_kind(mesh)}; write a Mesh, a dict such as {{'dp': 2, 'tp': 4}}, or a DeviceMesh")


def resolve_mesh(
    request: Request, context: ParallelContext, graph: Graph, processes: int | None, saved: Plan | None
) -> Mesh:
    """The mesh of a call: the one given, or the coarsest one of the devices that its int strategies can be
    written on. `processes`: how many a launcher started, or None in simulation."""
    mesh = given_mesh(request.mesh)
    if mesh is None and saved is not None:
        mesh = saved.mesh
    if mesh is not None:
        return mesh
    if processes is None and not context.device_num_was_set:
        raise StrategyError(
            "there is no mesh to split over; pass mesh={'dp': 2, 'tp': 4}, or set_auto_parallel_context(device_num=8)"
        )
    devices = processes or context.device_num
    strategies = [s for _, s in request.given()]
    strategies += [constraint_of(str(node.args[1]))[0] for node in graph.nodes if node.target is constrain]
    if not isinstance(context.dataset_strategy, str):
        strategies += list(context.dataset_strategy)
    counts = [tuple(n or 1 for n in s) for s in strategies if _is_counts(s, devices)]
    return coarsest_mesh(devices, counts)


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
    """What `formulate` needs: allowed layouts by name, results that may stay split, and whether the plain inputs of
    a rank are only its part (`dataset_strategy`)."""

    allowed: Allowed
    as_it_lies: frozenset[str]
    parts: int  # into how many the batch is split


def annotate(
    graph: Graph,
    fn: Any,
    request: Request,
    mesh: Mesh,
    context: ParallelContext,
    algo: AlgoParameters,
    fixed: Mapping[str, Layout],
    saved: Plan | None,
) -> Annotations:
    """Check everything that was said about `fn` against its graph; all failures are reported together.

    `fixed` are the layouts that parameters already have (an earlier plan split them). Raises StrategyError.
    """
    problems: list[Problem] = []
    named: list[tuple[str, str, tuple[int, ...], Any]] = []  # key, words, shape, strategy
    inputs = [port for port in graph.inputs if port.role is Role.INPUT]
    results = [port for port in graph.outputs if port.role is Role.RESULT]
    named += _inputs(inputs, fn, request, problems)
    named += _results(results, request, problems)
    named += _parameters(graph, fn, request, problems)
    named += _constraints(graph, mesh, problems)
    named += _dataset(inputs, request, context, mesh)
    if context.mode_was_set and context.parallel_mode == ParallelMode.DATA_PARALLEL:
        named += _data_parallel(graph, inputs, request, mesh, problems)
    strict = algo.fully_use_devices and "fully_use_devices" in algo.model_fields_set
    try:
        checked = check_strategies([(words, size, s) for _, words, size, s in named], mesh, fully_use_devices=strict)
    except StrategyError as error:
        raise_problems(str(error).splitlines()[0], [*problems, *error.problems])
        raise
    raise_problems(f"the annotations cannot be met on the mesh {mesh}", problems)
    allowed: dict[str, tuple[tuple[Layout, ...], str]] = {}
    for (key, words, size, _), annotation in zip(named, checked, strict=True):
        if annotation is not None:
            _allow(allowed, key, words, annotation, annotation.layouts(size), problems)
    raise_problems("annotations contradict each other", problems)
    if saved is not None:
        _load(allowed, graph, saved, mesh, context, problems)
    for name, found in fixed.items():
        if name in allowed and found not in allowed[name][0]:
            problems.append(
                Problem(f"parameter {name!r}", f"is already split as {found}, which {allowed[name][1]} does not allow",
                        "shard a fresh copy of the module to change the layout of its parameters")
            )  # fmt: skip
        allowed[name] = ((found,), allowed[name][1] if name in allowed else "")
    raise_problems("annotations contradict each other", problems)
    losses = [port for port in results if port.requires_grad and not shape(port.node)]
    free = {p.name for p in results if losses and shape(p.node) and p.name not in allowed}
    return Annotations(allowed, frozenset(free), _parts(inputs, allowed))


def _allow(
    allowed: dict[str, tuple[tuple[Layout, ...], str]],
    key: str,
    words: str,
    annotation: Annotation,
    layouts: tuple[Layout, ...],
    problems: list[Problem],
) -> None:
    if key in allowed:
        both = tuple(found for found in layouts if found in allowed[key][0])
        if not both:
            problems.append(Problem(words, f"is annotated {allowed[key][1]} and {annotation}", "drop one of the two"))
            return
        layouts = both
    allowed[key] = (layouts, str(annotation))


def _inputs(inputs: Sequence[Port], fn: Any, request: Request, problems: list[Problem]) -> list[Any]:
    """One entry for each tensor of an annotated argument."""
    given = request.in_strategy
    if given is None:
        return []
    positional = parameter_names(fn)
    present = list(dict.fromkeys(port.argument for port in inputs))
    if isinstance(given, Mapping):
        by_name = dict(given)
    else:
        places = positional or tuple(present)
        if len(given) > len(places):
            problems.append(
                Problem("in_strategy", f"has {len(given)} entries for {len(places)} arguments ({', '.join(places)})",
                        "write one entry per argument, in order")
            )  # fmt: skip
        by_name = dict(zip(places, given, strict=False))
    named = []
    for name, strategy in by_name.items():
        ports = [port for port in inputs if port.argument == name]
        if strategy is None:
            continue
        if not ports:
            known = name in positional
            close = get_close_matches(name, present)
            problems.append(
                Problem(f"in_strategy[{name!r}]",
                        "the call passes no tensor for it" if known else "there is no such argument",
                        f"annotate one of {', '.join(map(repr, close or present)) or 'the tensors of the call'}")
            )  # fmt: skip
        named += [(port.name, f"input {port.name!r}", shape(port.node), strategy) for port in ports]
    return named


def _results(results: Sequence[Port], request: Request, problems: list[Problem]) -> list[Any]:
    given = request.out_strategy
    if given is None:
        return []
    if len(given) > len(results):
        problems.append(
            Problem("out_strategy", f"has {len(given)} entries for {len(results)} output tensors",
                    "write one entry per output tensor, in order")
        )  # fmt: skip
    return [
        (port.name, f"output {i}", shape(port.node), strategy)
        for i, (port, strategy) in enumerate(zip(results, given, strict=False))
        if strategy is not None
    ]


def nested_plans(fn: Any) -> dict[str, Any]:
    """The parameter plans of sharded modules inside a module, by full name."""
    found: dict[str, Any] = {}
    if isinstance(fn, torch.nn.Module):
        for path, module in fn.named_modules():
            engine = module.__dict__.get("_partway")
            if path and engine is not None and engine.request.parameter_plan:
                found.update({f"{path}.{name}": s for name, s in engine.request.parameter_plan.items()})
    return found


def _parameters(graph: Graph, fn: Any, request: Request, problems: list[Problem]) -> list[Any]:
    plan = {**nested_plans(fn), **(request.parameter_plan or {})}
    ports = {port.name: port for port in graph.inputs if port.role is Role.PARAMETER}
    names = {**{name: name for name in ports}, **graph.aliases}
    if plan and not isinstance(fn, torch.nn.Module):
        problems.append(
            Problem("parameter_plan", "a function has no parameters", "annotate its arguments with in_strategy")
        )
        return []
    named = []
    for pattern, strategy in plan.items():
        matched = dict.fromkeys(names[name] for name in names if fnmatchcase(name, pattern))
        if not matched:
            close = get_close_matches(pattern, list(names), 3)
            problems.append(
                Problem(f"parameter_plan[{pattern!r}]", "matches no parameter that the call uses",
                        f"did you mean {' or '.join(map(repr, close))}?" if close else
                        f"the parameters are {', '.join(map(repr, list(names)[:6]))}{', ...' * (len(names) > 6)}")
            )  # fmt: skip
        if strategy is not None:
            named += [(name, f"parameter {name!r}", shape(ports[name].node), strategy) for name in matched]
    return named


def _constraints(graph: Graph, mesh: Mesh, problems: list[Problem]) -> list[Any]:
    named = []
    for node in graph.nodes:
        if node.target is constrain:
            strategy, own = constraint_of(str(node.args[1]))
            if own is not None and own != mesh:
                problems.append(
                    Problem(f"constraint on {node.args[2]}", f"is written for the mesh {own}, inside one for {mesh}",
                            "use one mesh, or leave it out inside")
                )  # fmt: skip
                continue
            named.append((f"constraint:{node.name}", f"constraint on {node.args[2]}", shape(node), strategy))
    return named


def dataset_applies(request: Request, context: ParallelContext) -> bool:
    """Whether the context's dataset_strategy annotates the inputs: nothing was said of them by in_strategy, and
    it (or a semi-auto or auto mode, whose default it is) was set."""
    modes = (ParallelMode.SEMI_AUTO_PARALLEL, ParallelMode.AUTO_PARALLEL)
    mode = context.mode_was_set and context.parallel_mode in modes
    return request.in_strategy is None and (mode or dataset_was_set(context))


def dataset_was_set(context: ParallelContext) -> bool:
    """Whether the user set the dataset_strategy: each rank then holds only its part of every input."""
    return bool({"dataset_strategy", "full_batch"} & context.model_fields_set)


def _dataset(inputs: Sequence[Port], request: Request, context: ParallelContext, mesh: Mesh) -> list[Any]:
    mode = context.parallel_mode if context.mode_was_set else ParallelMode.AUTO_PARALLEL
    if not inputs or not dataset_applies(request, context) or mode not in (
        ParallelMode.SEMI_AUTO_PARALLEL, ParallelMode.AUTO_PARALLEL,
    ):  # fmt: skip
        return []
    value = context.dataset_strategy
    plain: Any = value.value if isinstance(value, DatasetMode) else value
    shapes = [shape(port.node) for port in inputs]
    strategies = check_dataset_strategy(plain, shapes, mesh.device_num, mode=mode.value) or ()
    return [
        (port.name, f"input {port.name!r}", size, strategy)
        for port, size, strategy in zip(inputs, shapes, strategies, strict=True)
        if size
    ]


def _data_parallel(
    graph: Graph, inputs: Sequence[Port], request: Request, mesh: Mesh, problems: list[Problem]
) -> list[Any]:
    """parallel_mode="data_parallel": parameters whole, every input split along its first dim."""
    if request.given():
        problems.append(
            Problem("parallel_mode 'data_parallel'", "splits the batch and nothing else, and strategies were given",
                    "drop them, or set parallel_mode='semi_auto_parallel'")
        )  # fmt: skip
        return []
    whole, split = (Replicate(),) * len(mesh.axes), (Shard(0),) * len(mesh.axes)
    parameters = [port for port in graph.inputs if port.role is Role.PARAMETER]
    return [
        *((p.name, f"parameter {p.name!r}", shape(p.node), whole) for p in parameters),
        *((p.name, f"input {p.name!r}", shape(p.node), split) for p in inputs if shape(p.node)),
    ]


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
    trainable = context.strategy_ckpt_config.only_trainable_params
    for name, found in saved.parameters.items():
        port = ports.get(name)
        if port is None or (trainable and not port.requires_grad) or name in allowed:
            continue
        if not found.divides(shape(port.node)):
            problems.append(
                Problem(f"parameter {name!r}", f"has shape {list(shape(port.node))}, which the saved layout {found} "
                        "does not divide", "save a plan of this model")
            )  # fmt: skip
        allowed[name] = ((layout(mesh, found.placements),), "loaded from a plan")


def _parts(inputs: Sequence[Port], allowed: Allowed) -> int:
    """Into how many parts the annotations split the batch, the first dim of an input."""
    return max(
        (allowed[p.name][0][0].splits(len(shape(p.node)))[0] for p in inputs if p.name in allowed and shape(p.node)),
        default=1,
    )
