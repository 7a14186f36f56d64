"""The layouts that each tensor may have: the statements of all sources, checked on a mesh and merged."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from partway.annotations.statements import Statement, parameters, statements, tensors
from partway.propagation.graph.graph import Graph
from partway.propagation.graph.nodes import shape
from partway.propagation.graph.port import Role
from partway.propagation.graph.queries import beside_losses, in_caches
from partway.propagation.plan.plan import Plan
from partway.propagation.problem.problem import Allowed
from partway.requests.plan_inputs import PlanInputs
from partway.strategy import Annotation, Layout, Mesh, Problem, StrategyError, check_strategies
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
    lie = frozenset[str]() if inputs.context.whole_results else beside_losses(graph) | in_caches(graph)
    as_it_lies = lie - allowed.keys()
    return Annotations(allowed, as_it_lies, _parts(graph, allowed), written)


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
