"""The Plan: a strategy for every operator of a graph, the collectives that follow, and what it all costs.

A plan is plain data: it can be printed, asked, saved and loaded without the model it was made for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ...strategy.afterwards import uncollected
from ...strategy.errors import StrategyError, shown
from ...strategy.files import read, save
from ...strategy.layout import Layout, layout
from ...strategy.mesh import Mesh
from ...strategy.notation import counted
from ...strategy.placement import Shard, placement_from_code
from ...strategy.suggest import did_you_mean
from ..graph.nodes import describe, is_tensor, module_path, operator_name, source_line
from ..graph.port import Role
from ..program.collective import PHASES, Collective
from ..program.local_program import LocalProgram
from ..program.lower import describe_option
from ..search.problem import AMONG, SearchProblem, VertexKind
from ..search.search import SEARCHES, SearchMode
from ..search.solution import Solution
from .explain import Alternatives, Origin, outcome
from .units import human, lasting

FORMAT: Literal[1] = 1
_LARGEST = 2**63 - 1  # that a size can be
_WIDEST = 10**6


class Report(str):
    """Text that an interactive session shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class TensorPlan(_Frozen):
    """One input or output: its global shape, its layout at rest (a code for each axis), and the annotation."""

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    codes: tuple[str, ...]
    annotation: str = ""


class OperatorPlan(_Frozen):
    """One operator: what it splits on each axis (a factor, or None), and the layouts of its tensors."""

    name: str
    operator: str
    result: str
    module: str
    source: str
    factors: tuple[str | None, ...]
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    strategy: str
    seconds: float
    annotation: str = ""


class Memory(_Frozen):
    """Bytes on one device, as memory_limit counts them.

    optimizer     its states, as many as the option optimizer_states says
    inputs        of the call, and buffers
    activations   what is kept for the backward, at most: results of operators, and weights that were gathered unless
                  they are gathered again
    """

    parameters: int
    gradients: int
    optimizer: int = 0
    inputs: int = 0
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.inputs + self.activations

    def __str__(self) -> str:
        return (
            f"parameters {human(self.parameters)}, gradients {human(self.gradients)}, "
            f"optimizer {human(self.optimizer)}, inputs {human(self.inputs)}, "
            f"activations {human(self.activations)}; {human(self.total)} in all"
        )


class Certificate(_Frozen):
    """What the search knows of its answer.

    cost           what the search weighs, of this plan
    bound          no plan under these annotations, and in this memory_limit, costs less (None: unknown)
    attained       another search found a plan that costs the bound: it is the optimum's cost
    proven         the plan is the optimum
    width          the most vertices that one table of the search joined
    memory_limit   bytes that a device may hold
    given          its strategies are those of a plan that was given: nothing was searched
    approximate    enable_algo_approxi left strategies out: bound, attained and proven are of those that it leaves
    """

    mode: SearchMode
    cost: float
    bound: float | None
    proven: bool
    width: int
    attained: bool = False
    memory_limit: float | None = None
    approximate: bool = False
    given: bool = False

    @property
    def gap(self) -> float | None:
        """How far above the bound the cost is, relative to the bound; None where there is no bound."""
        if self.proven:
            return 0.0
        return None if self.bound is None or self.bound <= 0 else (self.cost - self.bound) / self.bound

    def __str__(self) -> str:
        within = "" if self.memory_limit is None else f" within memory_limit {human(self.memory_limit)}"
        if self.given:
            return f"none{within}: the strategies are those of a plan that was given"
        search = f"{self.mode.value}{within}"
        optimum = f"the optimum{AMONG if self.approximate else ''}"
        if self.proven:
            return f"{search}: {optimum}, proven"
        if self.gap is None:
            return f"{search}: no bound"
        if self.attained:
            return f"{search}: {100 * self.gap:.1f} % above {optimum}"
        why = " (the duality gap)" if within and SEARCHES[self.mode].exact else ""
        return f"{search}: at most {100 * self.gap:.1f} % above {optimum}{why}"


class Plan(_Frozen):
    """A strategy for every operator of one captured call on one mesh.

    collectives      each with kind, axes, group_size, payload_bytes, wire_bytes, phase, tensor, source, and the
                     strategies of its producer and consumer; the forward's first
    predicted_time   seconds of one forward and backward on one device, nothing overlapped
    memory           bytes on one device
    certificate      what the search knows of the plan: its bound, its gap, whether it is the optimum
    """

    format: Literal[1] = FORMAT
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    inputs: tuple[TensorPlan, ...]
    operators: tuple[OperatorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    collectives: tuple[Collective, ...]
    memory: Memory
    certificate: Certificate
    unknown_operators: tuple[str, ...] = ()
    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def mesh(self) -> Mesh:
        """The mesh it is for."""
        return Mesh(dict(zip(self.axes, self.sizes, strict=True)))

    @property
    def parameters(self) -> dict[str, Layout]:
        """The layout at rest of every parameter, by name."""
        return {t.name: self._layout(t.codes) for t in self.inputs if t.role is Role.PARAMETER}

    @property
    def predicted_time(self) -> float:
        """Seconds of one step, nothing overlapped."""
        return sum(o.seconds for o in self.operators) + sum(c.predicted_time for c in self.collectives)

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends in one step."""
        return sum(c.wire_bytes for c in self.collectives)

    def of(self, find: Callable[[], Alternatives]) -> Plan:
        """This plan, which now knows how to find its alternatives."""
        self._origin = Origin(find)
        return self

    def _layout(self, codes: Iterable[str]) -> Layout:
        return layout(self.mesh, tuple(map(placement_from_code, codes)))

    def table(self, *, every: bool = False, rows: int | None = None, width: int = 180) -> Report:
        """The plan as a table: operator, strategy, layout, collectives, bytes, predicted time.

        every   also operators that send nothing and take next to nothing: less than 1/10,000 of the step
        rows    no more than the first so many
        width   of the whole, in characters
        """
        for what, number in (("rows", rows), ("width", width)):
            if number is not None and (type(number) is not int or not 0 <= number <= _WIDEST):
                raise StrategyError(f"{what} is {shown(number)}; write an int from 0 to {_WIDEST:,}")
        table = Table(title=f"plan on {self.mesh}", title_justify="left", box=SIMPLE_HEAD, show_edge=False)
        for name in ("operator", "strategy", "layout", "collectives", "sent", "predicted"):
            table.add_column(name, justify="right" if name in ("sent", "predicted") else "left", overflow="fold")
        lines = list(self._rows(0.0 if every else 1e-4 * self.predicted_time, every))
        for line in lines[:rows]:
            table.add_row(*line)
        left = len(lines) - len(lines[:rows])
        more = f" ... and {left} more\n" if left else ""
        return Report(_rendered(table, width) + more + self.summary())

    def _rows(self, least: float, every: bool) -> Iterator[tuple[str, ...]]:
        """The cells of `table`; without `every` only what sends something or takes more than `least` seconds."""
        at = self._by_operator()
        for o in self.operators:
            here = at.get(o.name, [])
            if every or here or o.seconds > least:
                name = f"{o.module} {o.operator.split('.')[1]}" if o.module else o.name
                layouts = " ".join("".join(codes) for codes in o.results)
                yield (name, o.strategy.strip("()"), layouts, *_costs(here, o.seconds))
        for output in self.outputs:
            if here := at.get(f"output {output.name}", []):
                yield (output.name, "", "".join(output.codes), *_costs(here, 0.0))

    def summary(self) -> Report:
        """Totals in three lines."""
        forward = [c for c in self.collectives if c.phase == "forward"]
        backward = [c for c in self.collectives if c.phase == "backward"]
        limit = self.certificate.memory_limit
        return Report(
            f"{len(forward)} collectives forward, {len(backward)} backward; one rank sends "
            f"{human(self.wire_bytes)} a step; predicted {lasting(self.predicted_time)}\n"
            f"on one device: {self.memory}{'' if limit is None else f' of memory_limit {human(limit)}'}\n"
            f"search: {self.certificate}"
        )

    def explain(self, name: Any, *, alternatives: int = 8) -> Report:
        """Why an operator, a module or a tensor is as it is: its strategy, its annotation and what that costs, and each
        collective with its cost, its cause, and what the cheapest plan without it would cost.

        `name` is an operator's name, a module's path (its operators inside), a parameter's, input's or output's
        name, an fnmatch pattern of these, or an fx.Node. Raises StrategyError, with the closest names, for others.

        Costs of alternatives are found by searching again, for the `alternatives` collectives that cost most and as
        many annotations; 0: none. They need the model: a plan that was loaded has none.
        """
        if isinstance(alternatives, bool) or not isinstance(alternatives, int) or alternatives < 0:
            raise StrategyError(
                f"alternatives is {shown(alternatives)} ({type(alternatives).__name__}); write for how many "
                "collectives to find what the plan without them would cost: 0 (none) or more"
            )
        text = str(name) if isinstance(name, str) else str(getattr(name, "name", shown(name)))
        subjects = [
            *(_tensor_subject(self, t) for t in (*self.inputs, *self.outputs) if _matches(text, t.name)),
            *(
                _operator_subject(self, o, at)
                for at in [self._by_operator()]
                for o in self.operators
                if _matches(text, o.name) or _inside(text, o.module)
            ),
        ]
        if not subjects:
            raise StrategyError(_not_found(text, self))
        asked = _Asked(self._origin.alternatives, subjects, alternatives)
        lines: list[str] = []
        for subject in subjects:
            lines.append(subject.title)
            lines += [f"    {line}" for line in subject.lines]
            lines += [f"    {line}" for line in asked.of_annotation(subject)]
            for c in subject.collectives:
                lines += [_cost(c), *(f"        {line}" for line in (*_because(c), *asked.of_collective(c)))]
        return Report("\n".join([*lines, *asked.rest()]))

    def _by_operator(self) -> dict[str, list[Collective]]:
        at: dict[str, list[Collective]] = {}
        for c in self.collectives:
            at.setdefault(c.where, []).append(c)
        return at

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; folders on the way are made. Raises StrategyError where it cannot be written."""
        save("the plan", path, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Read a plan that `save` wrote. Raises StrategyError if the file holds none."""
        data = read("a plan from", path)
        where = shown(str(path))
        try:
            with uncollected():
                plan = cls.model_validate_json(data)
                plan._check()
        except StrategyError as error:
            raise StrategyError(f"{where} holds no plan: {error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "the file"
            raise StrategyError(f"{where} holds no plan of this version: {field}: {first['msg']}") from error
        return plan

    def _check(self) -> None:
        """Raise StrategyError unless the mesh, the shapes and the layouts of all tensors make sense."""
        if len(self.axes) != len(self.sizes):
            raise StrategyError(
                f"its mesh has {counted(len(self.axes), 'axis', 'axes')} and {counted(len(self.sizes), 'size')}"
            )
        mesh = self.mesh
        for tensor in (*self.inputs, *self.outputs):
            if not all(0 <= size <= _LARGEST for size in tensor.shape):
                raise StrategyError(f"{shown(tensor.name)} has the shape {shown(tensor.shape)}")
            found = layout(mesh, tuple(map(placement_from_code, tensor.codes)))
            if any(isinstance(p, Shard) and p.dim >= len(tensor.shape) for p in found.placements):
                raise StrategyError(
                    f"{tensor.name!r} of shape {list(tensor.shape)} cannot be laid out as {tensor.codes}"
                )
        for codes in {codes for o in self.operators for codes in (*o.operands, *o.results)}:
            layout(mesh, tuple(map(placement_from_code, codes)))
        for o in self.operators:
            if len(o.factors) != len(self.axes):
                raise StrategyError(
                    f"operator {shown(o.name)} splits {counted(len(o.factors), 'factor')}, one for each axis, and the "
                    f"mesh has {counted(len(self.axes), 'axis', 'axes')}"
                )

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        return f"<Plan on {self.mesh}: {len(self.operators)} operators, {len(self.collectives)} collectives>"


def make_plan(
    problem: SearchProblem,
    solution: Solution,
    program: LocalProgram,
    mode: SearchMode,
    written: Mapping[str, str] | None = None,
) -> Plan:
    """The Plan of a solution, with the collectives of its program. `written`: where what is said of each tensor was
    written (default: of each by itself)."""
    chosen = list(zip(problem.vertices, solution.choice, strict=True))
    operators = []
    activations, inputs = 0.0, 0.0
    for vertex, choice in chosen:
        if vertex.port and vertex.kind is VertexKind.INPUT and vertex.port.role is not Role.PARAMETER:
            inputs += float(vertex.held[choice])
        if vertex.kind is not VertexKind.OPERATOR:
            continue
        option = vertex.options[choice]
        activations += float(vertex.held[choice])
        operators.append(
            OperatorPlan(
                name=vertex.name,
                operator=operator_name(vertex.node),
                result=describe(vertex.node) if is_tensor(vertex.node) else "",
                module=module_path(vertex.node),
                source=source_line(vertex.node),
                factors=option.factors,
                operands=tuple(_code(found) for found in option.operands),
                results=tuple(_code(found) for found in option.results),
                strategy=describe_option(vertex, option),
                seconds=float(vertex.seconds[choice]),
                annotation=vertex.annotation,
            )
        )
    annotations = {(v.kind, v.name): v.annotation for v, _ in chosen}
    made = outcome(problem, solution, program)

    def tensors(placed: Iterable[Any], kind: VertexKind) -> tuple[TensorPlan, ...]:
        return tuple(
            TensorPlan(
                name=p.port.name, role=p.port.role, shape=p.shape, dtype=str(p.dtype).removeprefix("torch."),
                codes=_code(p.layout), annotation=annotations.get((kind, p.port.name), ""),
            )
            for p in placed
        )  # fmt: skip

    parameters = [p for p in program.inputs if p.port.role is Role.PARAMETER]
    held = {p.port.name: _bytes(p) for p in parameters}
    trained = sum(held[p.port.name] for p in parameters if p.port.requires_grad)
    plan = Plan(
        axes=problem.settings.mesh.axes,
        sizes=problem.settings.mesh.sizes,
        inputs=tensors(program.inputs, VertexKind.INPUT),
        operators=tuple(operators),
        outputs=tensors(program.outputs, VertexKind.OUTPUT),
        collectives=made.collectives,
        memory=Memory(
            parameters=sum(held.values()),
            gradients=trained,
            optimizer=round(problem.settings.optimizer_states * trained),
            inputs=round(inputs),
            activations=round(activations) + program.gathered_bytes,
        ),
        certificate=Certificate(
            mode=mode,
            cost=program.cost,
            bound=None if solution.bound == float("-inf") else min(solution.bound, program.cost),
            proven=solution.proven,
            width=solution.width,
            attained=solution.attained or solution.proven,
            memory_limit=problem.settings.memory_limit,
            approximate=problem.approximate,
            given=solution.replayed,
        ),
        unknown_operators=problem.unknown,
    )
    return plan.of(lambda: Alternatives(problem, made, mode, written or {}))


def _bytes(placed: Any) -> int:
    size = placed.dtype.itemsize
    for extent in placed.local_shape:
        size *= extent
    return int(size)


def _code(found: Layout) -> tuple[str, ...]:
    return tuple(map(str, found.placements))


def _codes(plan: Plan, codes: Iterable[str]) -> str:
    return "[" + " ".join(f"{axis}:{code}" for axis, code in zip(plan.axes, codes, strict=True)) + "]"


def _costs(collectives: list[Collective], seconds: float) -> tuple[str, str, str]:
    """The cells of an operator's collectives, the bytes that they send, and its time with theirs."""
    sent = human(sum(c.wire_bytes for c in collectives)) if collectives else ""
    return _brief(collectives), sent, lasting(seconds + sum(c.predicted_time for c in collectives))


def _brief(collectives: Iterable[Collective]) -> str:
    """`2 all_gather(tp); backward all_reduce(dp), reduce_scatter(tp)`."""
    phases = []
    for phase in PHASES:
        counts = Counter(f"{c.kind}({','.join(c.axes)})" for c in collectives if c.phase == phase)
        words = ", ".join(f"{n} {text}" if n > 1 else text for text, n in counts.items())
        phases.append(f"backward {words}" if words and phase == "backward" else words)
    return "; ".join(filter(None, phases))


def _cost(c: Collective) -> str:
    return (
        f"    {c.phase} {c.kind} over {','.join(c.axes)} ({c.group_size} ranks) of {c.tensor}: "
        f"{human(c.payload_bytes)}, {human(c.wire_bytes)} sent, {lasting(c.predicted_time)}"
    )


def _because(c: Collective) -> list[str]:
    return [f"because {c.producer} meets {c.consumer}", *([f"at {c.source}"] if c.source else [])]


@dataclass(frozen=True)
class _Subject:
    """A tensor or an operator that is explained: a title, what is said of it, its key among the allowed layouts where
    it is annotated, and its collectives."""

    title: str
    lines: tuple[str, ...]
    key: str
    collectives: tuple[Collective, ...]


def _tensor_subject(plan: Plan, t: TensorPlan) -> _Subject:
    return _Subject(
        f"{t.role.value} {t.name} {t.dtype}{list(t.shape)}: {_codes(plan, t.codes)}",
        (f"annotated {t.annotation}",) if t.annotation else (),
        t.name if t.annotation else "",
        tuple(c for c in plan.collectives if t.name in (c.tensor, c.where.removeprefix("output "))),
    )


def _operator_subject(plan: Plan, o: OperatorPlan, at: Mapping[str, list[Collective]]) -> _Subject:
    lines = [f"splits {o.strategy}; results {', '.join(_codes(plan, r) for r in o.results)}"]
    lines += [f"annotated {o.annotation}"] if o.annotation else []
    lines += [f"from {o.source}"] if o.source else []
    return _Subject(
        f"{o.name} = {o.operator} {o.result} in {o.module or 'the function'}",
        tuple(lines),
        f"constraint:{o.name}" if o.annotation else "",
        tuple(at.get(o.name, ())),
    )


class _Asked:
    """The alternatives that an explanation shows: of the collectives that cost most, and of the first annotations."""

    def __init__(self, found: Alternatives | None, subjects: list[_Subject], count: int) -> None:
        self.found, self.count = found, count
        shown = dict.fromkeys(c for subject in subjects for c in subject.collectives)
        self.collectives = sorted(shown, key=lambda c: -c.predicted_time)
        keys = [subject.key for subject in subjects if subject.key]
        said = [found.annotation_of(key) for key in keys] if found else []
        self.annotations = list(dict.fromkeys(one for one in said if one))
        self.something = bool(shown or keys)

    def of_annotation(self, subject: _Subject) -> list[str]:
        one = self.found.annotation_of(subject.key) if self.found and subject.key else None
        return [self.found.of_annotation(one)] if self.found and one in self.annotations[: self.count] else []

    def of_collective(self, c: Collective) -> list[str]:
        return self.found.of_collective(c) if self.found and c in self.collectives[: self.count] else []

    def rest(self) -> list[str]:
        """What is not shown, and how to get it."""
        if not self.count or not self.something:
            return []
        if self.found is None:
            return ["(loaded from a file: what alternatives cost, and what caused a collective, needs the model)"]
        most = max(len(self.collectives), len(self.annotations))
        if most <= self.count:
            return []
        left = [
            f"{min(len(things), self.count)} of {counted(len(things), noun)}{which}"
            for things, noun, which in (
                (self.collectives, "collective", ", those that cost most"), (self.annotations, "annotation", "")
            )
            if things
        ]  # fmt: skip
        return [f"alternatives are shown for {' and for '.join(left)}; explain(..., alternatives={most}) shows all"]


def _matches(pattern: str, name: str) -> bool:
    return bool(name) and fnmatchcase(name, pattern)


def _inside(pattern: str, path: str) -> bool:
    parts = path.split(".")
    return any(_matches(pattern, ".".join(parts[: i + 1])) for i in range(len(parts)))


def _not_found(text: str, plan: Plan) -> str:
    tensors = [t.name for t in (*plan.inputs, *plan.outputs)]
    names = dict.fromkeys([*tensors, *(o.module for o in plan.operators), *(o.name for o in plan.operators)])
    tops = dict.fromkeys(name.split(".")[0] for name in names if name)
    others = f"its names are, or begin with, {', '.join(list(tops)[:12])}"
    return f"the plan has nothing called {text!r}; {did_you_mean(text, sorted(names), others)}"


def _rendered(table: Table, width: int) -> str:
    out = StringIO()
    Console(file=out, width=width, force_terminal=False, highlight=False, markup=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
