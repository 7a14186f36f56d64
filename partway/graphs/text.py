"""What each stage shows, as lines of text: a captured graph, its strategies, the program of a rank, its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import fx

from partway.compiler.passes import PlanDraft
from partway.fusion.program import collectives_in
from partway.fusion.schedule import with_values
from partway.graphs.figures import NOTHING, Figures, figures_of
from partway.graphs.operators import Shown, bytes_of, codes_text, names_of, strategy_text, type_of
from partway.graphs.pictures import of_graphs, of_plan
from partway.propagation.cost.profile import DeviceProfile
from partway.propagation.graph.graph import Graph
from partway.propagation.graph.nodes import operands, results_of, source_of, tensor_of
from partway.propagation.graph.port import Port
from partway.propagation.plan.data import OperatorPlan, PlanData, TensorPlan
from partway.propagation.plan.plan import Plan
from partway.propagation.problem.problem import Options, SearchProblem, VertexKind
from partway.propagation.program.accumulate import Accumulation
from partway.propagation.program.collective import Collective
from partway.propagation.program.local_program import LocalProgram, PlacedPort
from partway.propagation.program.lower import describe_option
from partway.propagation.program.step import Step, returned_by
from partway.propagation.search.solution import Solution
from partway.strategy import Mesh
from partway.strategy.notation import counted
from partway.strategy.units import human, lasting

Lines = Iterator[str]


@dataclass(frozen=True)
class Page:
    """What one file shows.

    lines    its text, made when it is asked for
    graphs   the graphs in it, by the name of each part
    plan     the plan that it shows
    drawn    its picture, where it has neither
    """

    lines: Callable[[], Iterable[str]]
    graphs: Mapping[str, Shown] = field(default_factory=dict)
    plan: Plan | None = None
    drawn: str = ""

    @property
    def figures(self) -> Figures:
        """What is in its graphs."""
        return sum((figures_of(shown.graph, shown.collectives) for shown in self.graphs.values()), NOTHING)

    def as_it_is(self, pictures: bool) -> Page:
        """The page as it is now: what it shows may be changed."""
        now, drawn = tuple(self.lines()), self.picture() if pictures else ""
        return Page(lambda: now, drawn=drawn)

    def picture(self) -> str:
        """It as Graphviz's dot; "" for what has no picture."""
        if self.plan is not None:
            return of_plan(self.plan)
        return of_graphs(self.graphs) if self.graphs else self.drawn


_SHOWN = 6  # strategies of an operator, and layouts of an annotation, that are shown


# -- Before there is a mesh


def captured(module: fx.GraphModule, inputs: Sequence[Port]) -> Page:
    """The graph of a call, on whole tensors."""
    shown = Shown(module.graph, names_of(inputs, module.graph))

    def lines() -> Lines:
        for port in inputs:
            yield _input(port, port.node.meta.get("val"), shown.name(port.node))
        yield ""
        yield from shown.lines()
        yield ""
        yield f"return {', '.join(map(shown.written, returned_by(module.graph)))}"

    return Page(lines, {"": shown})


def _input(port: Port, value: Any, name: str) -> str:
    also = f" ({port.name})" if name != port.name else ""
    return f"{port.role.value} {name}{also}: {type_of(value)}    # {human(bytes_of(value))}"


# -- On a mesh


def annotated(draft: PlanDraft) -> Lines:
    """The layouts that annotations allow."""
    notes = draft.annotations
    for name, (layouts, text) in notes.allowed.items():
        yield f"{name}: {text}, from {notes.written.get(name, 'an earlier plan')}"
        yield from (f"    {layout}" for layout in layouts[:_SHOWN])
        if len(layouts) > _SHOWN:
            yield f"    and {len(layouts) - _SHOWN} more layouts"
    if not notes.allowed:
        yield "nothing is annotated: the search chooses all layouts"
    yield ""
    yield f"the batch is split into {counted(notes.parts, 'part')}"
    if notes.as_it_lies:
        yield f"may stay as they lie: {', '.join(sorted(notes.as_it_lies))}"


def formulated(problem: SearchProblem) -> Lines:
    """The strategies that each operator may have, those that cost least by themselves first."""
    known: dict[int, list[str]] = {}
    for vertex in problem.vertices:
        if vertex.kind is VertexKind.HUB:
            continue
        count = counted(len(vertex.options), "strategy", "strategies")
        annotation = f", annotated {vertex.annotation}" if vertex.annotation else ""
        yield f"{vertex.kind.value} {vertex.name}: {count}{annotation}"
        if vertex.kind is VertexKind.OPERATOR:
            if id(vertex.options) not in known:  # equal operators share them
                known[id(vertex.options)] = list(_cheapest(vertex.options))
            yield from known[id(vertex.options)]


def _cheapest(options: Options) -> Lines:
    order = options.unary.argsort(kind="stable")
    for i in order[:_SHOWN].tolist():
        option = options[i]
        held = f", holds {human(float(options.held[i]))}" if options.held[i] else ""
        results = ", ".join(map(str, option.results))
        yield f"    {_split(option.factors, options.mesh)} -> {results}    # {lasting(float(options.seconds[i]))}{held}"
    if len(order) > _SHOWN:
        yield f"    and {len(order) - _SHOWN} more"


def _split(factors: Sequence[str | None], mesh: Mesh) -> str:
    words = [f"{axis}:{factor}" for axis, factor in zip(mesh.axes, factors, strict=True) if factor]
    return f"splits {' '.join(words)}" if words else "splits nothing"


def tried(problem: SearchProblem, solution: Solution) -> Lines:
    """The strategies that a search chose, of a plan that need not be the one that is kept."""
    for vertex, choice in zip(problem.vertices, solution.choice, strict=True):
        if vertex.kind is not VertexKind.HUB:
            option = vertex.options[choice]
            layouts = ", ".join(map(str, option.results or option.operands))
            yield f"{vertex.kind.value} {vertex.name}: {describe_option(vertex, option)} -> {layouts}"


# -- With strategies


def searched(graph: Graph, plan: Plan) -> Page:
    """The captured graph with the strategy of each operator, in the words of `shard`."""
    return Page(lambda: _searched(graph, plan), plan=plan)


def _searched(graph: Graph, plan: Plan) -> Lines:
    shown = Shown(graph.module.graph, names_of(graph.inputs, graph.module.graph))
    operators, causes = {o.name: o for o in plan.operators}, plan.collectives_by_place()
    for tensor in plan.inputs:
        yield from _tensor(plan, tensor)
    yield ""

    def below(node: fx.Node) -> Lines:
        if node.name in operators:
            yield _strategies(plan, node, operators[node.name])
            yield _decided(plan, operators[node.name])
            yield from map(_cause, causes.get(node.name, ()))

    yield from shown.lines(below)
    yield ""
    for tensor in plan.outputs:
        yield from _tensor(plan, tensor)
        yield from (f"    {_cause(c)}" for c in causes.get(f"output {tensor.name}", ()))


def _tensor(plan: PlanData, tensor: TensorPlan) -> Lines:
    own = plan.layout_of(tensor.codes)
    local = (
        "" if own.local_shape(tensor.shape) == tensor.shape else f", a rank has {list(own.local_shape(tensor.shape))}"
    )
    yield f"{tensor.role.value} {tensor.name}: {tensor.dtype}{list(tensor.shape)}{local}"
    annotation = f"    # annotated {tensor.annotation}" if tensor.annotation else ""
    yield f"    {{strategy: {strategy_text(own, len(tensor.shape))}}}{annotation}"


def _strategies(plan: PlanData, node: fx.Node, operator: OperatorPlan) -> str:
    tensors = [tensor_of(source_of(operand)) for operand in operands(node)]
    sides = (tensors, operator.operands), (results_of(node), operator.results)
    texts = [
        _tuple(strategy_text(plan.layout_of(codes), t.dim()) for t, codes in zip(side, layouts, strict=True))
        for side, layouts in sides
    ]
    return f"{{in_strategy: {texts[0]}, out_strategy: {texts[1]}}}"


def _tuple(texts: Iterable[str]) -> str:
    every = list(texts)
    return f"({', '.join(every)}{',' * (len(every) == 1)})"


def _decided(plan: PlanData, operator: OperatorPlan) -> str:
    annotation = f"annotated {operator.annotation}; " if operator.annotation else ""
    results = ", ".join(codes_text(plan.mesh, codes) for codes in operator.results)
    return f"# {annotation}{_split(operator.factors, plan.mesh)} -> {results}; {lasting(operator.seconds)}"


def _cause(c: Collective) -> str:
    return (
        f"# {c.phase} {c.kind} over {','.join(c.axes)} of {c.tensor}: {c.group_size} ranks send "
        f"{human(c.wire_bytes)} each, {lasting(c.predicted_time)}"
    )


# -- Of one rank


def lowered(program: LocalProgram, profile: DeviceProfile) -> Page:
    """The forward of one rank, before it is differentiated."""
    step = undifferentiated(program)
    with suppress(Exception):  # no fake tensor runs an operator: the program is shown without sizes
        step = with_values(step)
    return forward(step, profile)


def undifferentiated(program: LocalProgram) -> Step:
    """The forward of one rank as a step without a backward."""
    return Step(program, program.module, None, (False,) * len(program.outputs), (False,) * len(program.inputs))


def forward(step: Step, profile: DeviceProfile) -> Page:
    """The forward graph of a step."""
    graph, program = step.forward.graph, step.program
    places = graph.find_nodes(op="placeholder")
    names = names_of([placed.port for placed in program.inputs], graph, places)
    values = returned_by(graph)
    results = {placed.port.name: value for placed, value in zip(program.outputs, values, strict=False)}
    shown = Shown(graph, names, collectives_in(graph, "forward", step, profile), results)

    def lines() -> Lines:
        for node, placed in zip(places, program.inputs, strict=True):
            yield _part(placed, shown.name(node))
        yield ""
        yield from shown.lines()
        yield ""
        returned = [shown.written(value) for value in values]
        for value, placed in zip(returned, program.outputs, strict=False):
            yield f"return {placed.port.name} = {value}    # {placed.port.role.value} {_whole(placed)}"
        if saved := returned[len(program.outputs) :]:
            yield f"save for the backward {', '.join(saved)}"

    return Page(lines, {"": shown})


def backward(
    step: Step, profile: DeviceProfile, gets: Sequence[str] | None = None, gives: Sequence[str] | None = None
) -> Page:
    """The backward graph of a step, which has one.

    gets    what its inputs are: "saved" ones are from the forward (default: those, and the gradients of the outputs)
    gives   what it returns (default: the gradients of all inputs that need one)
    """
    assert step.backward is not None
    graph = step.backward.graph
    usual, saved = _given(step)
    gets, gives = usual if gets is None else gets, _gradients(step) if gives is None else gives
    given = graph.find_nodes(op="placeholder")
    names = {node: name for node, name, word in zip(given, saved, gets, strict=False) if word == "saved"}
    returns = dict(zip(gives, returned_by(graph), strict=True))
    shown = Shown(graph, names, collectives_in(graph, "backward", step, profile), returns)

    def lines() -> Lines:
        for word, node in zip(gets, given, strict=True):
            value = node.meta.get("val")
            yield f"{word} {shown.name(node)}: {type_of(value)}    # {human(bytes_of(value))}"
        yield ""
        yield from shown.lines()
        yield ""
        for name, value in returns.items():
            yield f"return {name} = {shown.written(value)}"

    return Page(lines, {"": shown})


def _given(step: Step) -> tuple[list[str], list[str]]:
    """What the inputs of a usual backward are, and what the saved ones among them are called in the forward."""
    graph, program = step.forward.graph, step.program
    names = names_of([p.port for p in program.inputs], graph, graph.find_nodes(op="placeholder"))
    saved = returned_by(graph)[len(program.outputs) :]
    wanted = [p.port.name for p, wanted in zip(program.outputs, step.wanted, strict=True) if wanted]
    gets = ["saved"] * len(saved) + [f"gradient of {name}" for name in wanted]
    return gets, [names.get(node, node.name) for node in saved]


def _gradients(step: Step) -> list[str]:
    return [f"gradient of {p.port.name}" for p, needs in zip(step.program.inputs, step.needed, strict=True) if needs]


def accumulated(parts: Accumulation, profile: DeviceProfile) -> dict[str, Page]:
    """The backwards whose reductions wait: `early` of a micro-batch, `last` of the last one, `rest` where none is
    left."""
    usual, every = _given(parts.early)[0], _gradients(parts.early)
    waiting = [f"gradient of {parts.early.program.inputs[i].port.name}" for i in parts.inputs]
    addends = [f"{name} so far, on this rank," for name in waiting]
    early = [f"{name} so far, on this rank," if name in waiting else name for name in every]
    return {
        "early": backward(parts.early, profile, usual, early),
        "last": backward(parts.last, profile, [*usual, *addends], every),
        "rest": backward(parts.rest, profile, addends, waiting),
    }


def sides(step: Step, profile: DeviceProfile) -> tuple[Page, ...]:
    """The forward of a step and, if it has one, its backward."""
    return forward(step, profile), *(() if step.backward is None else (backward(step, profile),))


def whole(step: Step, profile: DeviceProfile) -> Page:
    """The forward and the backward of a step."""
    parts = dict(zip(("forward", "backward"), sides(step, profile), strict=False))

    def lines() -> Lines:
        for i, (name, page) in enumerate(parts.items()):
            yield from ([""] if i else [])
            yield name
            yield ""
            yield from page.lines()

    return Page(lines, {name: page.graphs[""] for name, page in parts.items()})


def _part(placed: PlacedPort, name: str) -> str:
    port, size = placed.port, prod(placed.local_shape) * placed.dtype.itemsize
    also = f" ({port.name})" if name != port.name else ""
    dtype = str(placed.dtype).removeprefix("torch.")
    return f"{port.role.value} {name}{also}: {dtype}{list(placed.local_shape)} {_whole(placed)}    # {human(size)}"


def _whole(placed: PlacedPort) -> str:
    return f"of {list(placed.shape)} {placed.layout}"


def own_parts(program: LocalProgram, rank: int) -> Lines:
    """What is a rank's own: its place on the mesh, and its part of each input and output."""
    mesh = program.mesh
    place = ", ".join(f"{axis} {at}" for axis, at in zip(mesh.axes, mesh.coordinate(rank), strict=True))
    yield f"rank {rank} of {mesh.device_num} on the mesh {mesh}: {place}"
    yield ""
    for placed in (*program.inputs, *program.outputs):
        slices = ", ".join(f"{s.start}:{s.stop}" for s in placed.layout.slices(placed.shape, rank))
        yield f"{placed.port.role.value} {placed.port.name}: [{slices}] of {list(placed.shape)}"
