"""From the choices of a search to the Plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache

from torch import fx

from ...strategy.layout import Layout
from ..graph.nodes import (
    describe,
    described,
    is_tensor,
    module_path,
    operands,
    operator_name,
    source_line,
    source_of,
    value,
)
from ..memory.fates import Fate
from ..problem.problem import SearchProblem, Settings, Vertex, VertexKind
from ..program.lower import describe_option
from ..program.program import PlacedPort, Program
from ..search.search import SearchMode
from ..search.solution import Elsewhere, Solution
from .alternatives import Alternatives, outcome
from .data import Certificate, Memory, OperatorPlan, Producer, ProducerKind, TensorPlan
from .plan import Plan


def make_plan(
    problem: SearchProblem,
    solution: Solution,
    program: Program,
    mode: SearchMode,
    written: Mapping[str, str] | None = None,
    elsewhere: Elsewhere | None = None,
) -> Plan:
    """The Plan of a solution, with the collectives of its program. `written`: the place where the annotation of each
    tensor was written (default: each in its own). `elsewhere`: the other meshes that were candidates."""
    reached = outcome(problem, solution, program)
    keeping, held = solution.keeping, solution.held
    assert keeping is not None and held is not None
    chosen = list(zip(problem.vertices, solution.choice, keeping.fates, strict=True))
    producer_of = _producers(problem)
    annotations = {(vertex.kind, vertex.name): vertex.annotation for vertex in problem.vertices}
    updating = {
        vertex.name: float(vertex.seconds[choice]) for vertex, choice, _ in chosen if vertex.kind is VertexKind.INPUT
    }

    def tensors(placed: Iterable[PlacedPort], kind: VertexKind) -> tuple[TensorPlan, ...]:
        return tuple(
            TensorPlan(
                name=p.port.name,
                role=p.port.role,
                shape=p.shape,
                dtype=str(p.dtype).removeprefix("torch."),
                codes=_codes(p.layout),
                annotation=annotations.get((kind, p.port.name), ""),
                producer=producer_of(p.port.node) if kind is VertexKind.OUTPUT else None,
                seconds=updating.get(p.port.name, 0.0) if kind is VertexKind.INPUT else 0.0,
            )
            for p in placed
        )

    plan = Plan(
        axes=problem.settings.mesh.axes,
        sizes=problem.settings.mesh.sizes,
        ranks=tuple(problem.settings.mesh.ranks) if problem.settings.mesh.is_part else None,
        inputs=tensors(program.inputs, VertexKind.INPUT),
        operators=tuple(
            _operator(v, c, fate, problem.settings, producer_of)
            for v, c, fate in chosen
            if v.kind is VertexKind.OPERATOR
        ),
        outputs=tensors(program.outputs, VertexKind.OUTPUT),
        collectives=reached.collectives,
        memory=Memory.at_peak(held),
        certificate=_certificate(problem, solution, program, mode, elsewhere),
        unknown_operators=problem.unknown,
    )
    return plan.of(lambda: Alternatives(problem, reached, mode, written or {}))


def _producers(problem: SearchProblem) -> Callable[[fx.Node], Producer]:
    """A function from a node that an operator reads to the producer of its tensor."""
    inputs = {port.node: port.name for port in problem.graph.inputs}

    @cache
    def producer(node: fx.Node) -> Producer:
        source = source_of(node)
        if source.node in inputs:
            return Producer(kind=ProducerKind.INPUT, name=inputs[source.node])
        kind = ProducerKind.CONSTANT if source.node in problem.constants else ProducerKind.OPERATOR
        return Producer(kind=kind, name=source.node.name, result=source.index)

    return producer


def _operator(
    vertex: Vertex, choice: int, fate: Fate, settings: Settings, producer_of: Callable[[fx.Node], Producer]
) -> OperatorPlan:
    option = vertex.options[choice]
    return OperatorPlan(
        name=vertex.name,
        operator=operator_name(vertex.node),
        result=describe(vertex.node) if is_tensor(vertex.node) else "",
        module=module_path(vertex.node),
        source=source_line(vertex.node),
        factors=option.factors,
        operands=tuple(map(_codes, option.operands)),
        results=tuple(map(_codes, option.results)),
        strategy=describe_option(vertex, option),
        seconds=float(vertex.seconds[choice]),
        annotation=vertex.annotation,
        producers=tuple(map(producer_of, operands(vertex.node))),
        held_bytes=float(vertex.options.made[choice]) if fate.keeps else 0.0,
        fate=fate.name,
        again=float(fate.seconds(vertex.options, settings)[choice]),
        types=_types(vertex.node),
    )


def _types(node: fx.Node) -> tuple[str, ...]:
    made = value(node)
    return tuple(map(described, made if isinstance(made, (tuple, list)) else (made,)))


def _certificate(
    problem: SearchProblem, solution: Solution, program: Program, mode: SearchMode, elsewhere: Elsewhere | None
) -> Certificate:
    return Certificate(
        mode=mode,
        cost=program.cost,
        bound=None if solution.bound == float("-inf") else min(solution.bound, program.cost),
        proven=solution.proven,
        width=solution.width,
        attained=solution.attained or solution.proven,
        memory_limit=problem.settings.memory_limit,
        binding=solution.binding,
        approximate=problem.approximate,
        given=solution.replayed,
        of_other_sizes=solution.of_other_sizes,
        inference=not problem.graph.differentiable,
        ends=solution.ends.seconds if solution.ends else None,
        ends_bound=solution.ends.bound if solution.ends else None,
        other_meshes=elsewhere.meshes if elsewhere else 0,
        bound_elsewhere=elsewhere.bound if elsewhere and elsewhere.bound > float("-inf") else None,
    )


def _codes(layout: Layout) -> tuple[str, ...]:
    return tuple(map(str, layout.placements))
