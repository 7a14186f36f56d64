"""Alternatives to a plan: the cheapest one without a collective, and without an annotation.

Each is the optimum of a problem that differs from the plan's in one thing, found as the plan was. To leave out a
collective, every conversion of its tensor that would run one of its kind, in its phase, over any of its axes, is made
impossible; to leave out an annotation, the problem is formulated without it. An annotation by a pattern counts as one.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, permutations
from typing import Protocol

import numpy as np
from torch import fx

from ...strategy.basics.units import human, lasting
from ...strategy.errors import StrategyError, UnknownOperatorWarning
from ...strategy.notation import counted
from ...strategy.placement import Kind, Placement, converts, step_kind
from ..cost.conversion import ConversionTable
from ..graph.graph import beside_losses
from ..graph.nodes import operands, source_of, values_of
from ..graph.port import Port
from ..memory.keeping import seconds_again
from ..ops.python.manual import call_manual, manual_of
from ..problem.formulate import formulate
from ..problem.problem import Allowed, SearchProblem, Settings, Vertex
from ..program.collective import Collective
from ..program.lower import lower, tensor_name
from ..program.program import Program
from ..rules.rule import Exchange
from ..rules.windows import Halo
from ..search.exact import dynamic_programming
from ..search.search import SEARCHES, SearchMode, search
from ..search.solution import Solution
from ..search.within_memory import trade_offs
from .data import SAME

TRIED = 16  # annotations that are left out one by one in the search for a cause
_EXACT = SearchMode.DYNAMIC_PROGRAMMING
WORTH_SAYING = 0.01  # the share of a plan's cost from which on what an option costs is said
NAMED = 2  # collectives of the alternative that are named


@dataclass(frozen=True)
class Outcome:
    """The result of a plan: its cost as weighed by the search, the seconds of a step, the bytes that one rank sends in
    it, and its collectives. `proven`: nothing is cheaper under the same conditions. `binding`: the memory limit is one
    of them. `held`: the most bytes on one device."""

    cost: float
    seconds: float
    sent: float
    collectives: tuple[Collective, ...]
    proven: bool
    binding: bool = False
    held: float = 0.0


@dataclass(frozen=True)
class WrittenAnnotation:
    """An annotation written in one place: the tensors and constraints that it concerns, and its text for each."""

    source: str
    keys: tuple[str, ...]
    texts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.source} {self.texts[0]}" if len(set(self.texts)) == 1 else self.source


def outcome(problem: SearchProblem, solution: Solution, program: Program) -> Outcome:
    """The outcome of the plan `solution`, lowered to `program`."""
    collectives = program.planned_collectives
    alone = sum(float(v.options.seconds[c]) for v, c in zip(problem.vertices, solution.choice, strict=True))
    if solution.keeping:
        alone += seconds_again(problem, solution.choice, solution.keeping)
    return Outcome(
        cost=solution.cost,
        seconds=alone + sum(c.predicted_time for c in collectives),
        sent=sum(c.wire_bytes for c in collectives),
        collectives=collectives,
        proven=solution.proven,
        binding=solution.binding,
        held=solution.held.peak if solution.held else 0.0,
    )


def best(problem: SearchProblem) -> Outcome | None:
    """The cheapest plan of `problem`; None if there is none, or none within its memory limit."""
    try:
        solution = search(problem, _EXACT)
    except StrategyError:
        return None
    return outcome(problem, solution, lower(problem, solution.choice, solution.keeping))


def _unlimited(problem: SearchProblem) -> SearchProblem:
    return replace(problem, settings=replace(problem.settings, memory_limit=None))


def without_collective(problem: SearchProblem, c: Collective) -> SearchProblem:
    """`problem` with no collective like `c` in the conversions of its tensor: of its kind, in its phase, over any of
    its axes, also inside operators. Raises StrategyError if an operator is left without an option."""
    inputs = {port.node: port for port in problem.graph.inputs}
    of_tensor = {edge for edge in problem.edges if tensor_name(inputs, edge.value) == c.tensor}
    vertices = tuple(_not_sending(v, c, inputs) for v in problem.vertices)
    if c.kind is Kind.EXCHANGE:
        return replace(problem, vertices=vertices)
    barred = {table: replace(table, barred=_like(c, table)) for table in {edge.table for edge in of_tensor}}
    edges = (replace(e, table=barred[e.table]) if e in of_tensor else e for e in problem.edges)
    return replace(problem, vertices=vertices, edges=tuple(edges))


def _not_sending(vertex: Vertex, c: Collective, inputs: Mapping[fx.Node, Port]) -> Vertex:
    """`vertex` with only the options whose own exchanges and windows run no collective like `c`."""
    rule = vertex.rule
    if rule is None or not rule.owners:
        return vertex
    tensors = [tensor_name(inputs, v) for v in (*map(source_of, operands(vertex.node)), *values_of(vertex.node))]
    sizes = tuple(map(vertex.options.mesh.size, c.axes))
    own: list[Halo | Exchange] = [
        halo for halo in rule.windows if c.kind is Kind.EXCHANGE and tensors[halo.operand] == c.tensor
    ]
    for exchange in rule.exchanges:
        hops = [hop for hop in exchange.hops(sizes) if tensors[hop.tensor] == c.tensor]
        if any(step_kind(hop.source, hop.target, c.phase, True) is c.kind for hop in hops):
            own.append(exchange)
    options, names = vertex.options, vertex.options.names
    along = [options.mesh.index(axis) for axis in c.axes]
    kept = np.ones(len(options), dtype=bool)
    for owner in own:
        kept &= ~(options.factors[:, along] == names.index(owner.factor)).any(axis=1)
    if not kept.any():
        raise StrategyError(f"{vertex.name} has no other strategy than one that exchanges {c.tensor} itself")
    return replace(vertex, options=options.take(kept))


def _like(c: Collective, table: ConversionTable) -> frozenset[tuple[tuple[str, ...], Placement, Placement]]:
    """The steps of `table` that run a collective like `c`."""
    names = table.mesh.axes
    sets = [axes for count in range(1, len(names) + 1) for axes in combinations(names, count) if set(axes) & {*c.axes}]
    pairs = [
        (source, target)
        for source, target in permutations(table.states, 2)
        if converts(source, target) and c.kind in table.kinds(source, target, c.phase)
    ]
    return frozenset((axes, source, target) for axes in sets for source, target in pairs)


def has(plan: Outcome, c: Collective) -> bool:
    """Whether a plan runs a collective like `c`."""
    return any(
        (other.tensor, other.kind, other.phase) == (c.tensor, c.kind, c.phase) and {*other.axes} & {*c.axes}
        for other in plan.collectives
    )


def without_annotations(problem: SearchProblem, left_out: Iterable[WrittenAnnotation]) -> SearchProblem:
    """`problem` without these annotations. Raises StrategyError as `formulate`."""
    keys = {key for one in left_out for key in one.keys}
    allowed = {name: layouts for name, layouts in problem.allowed.items() if name not in keys}
    return _formulated(problem, problem.settings, allowed, problem.as_it_lies | (beside_losses(problem.graph) & keys))


def _formulated(
    problem: SearchProblem, settings: Settings, allowed: Allowed, as_it_lies: frozenset[str]
) -> SearchProblem:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownOperatorWarning)  # the plan itself has warned
        return formulate(problem.graph, settings, allowed, as_it_lies)


@dataclass(frozen=True, eq=False)
class Alternatives:
    """The alternatives to a plan; each is searched for when it is first asked for.

    planned   the outcome of the plan itself
    written   the place where the annotation of each name in `problem.allowed` was written (default: its own)
    """

    problem: SearchProblem
    planned: Outcome
    mode: SearchMode
    written: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def optimum(self) -> Outcome | None:
        """The cheapest plan under the same annotations."""
        return self.planned if SEARCHES[self.mode].exact else best(self.problem)

    @property
    def limit(self) -> float | None:
        """The memory limit, if there is a cheaper plan without it."""
        return self.problem.settings.memory_limit if self.planned.binding else None

    @cached_property
    def unlimited(self) -> Outcome | None:
        """The cheapest plan under the same annotations without a memory limit."""
        return best(_unlimited(self.problem))

    @cached_property
    def annotations(self) -> tuple[WrittenAnnotation, ...]:
        """The annotations, in order. A layout that a parameter has from an earlier call is not one."""
        places: dict[str, list[str]] = {}
        for name, (_, text) in self.problem.allowed.items():
            if text:
                places.setdefault(self.written.get(name, name), []).append(name)
        return tuple(
            WrittenAnnotation(source, tuple(names), tuple(self.problem.allowed[name][1] for name in names))
            for source, names in places.items()
        )

    @cached_property
    def _known(self) -> dict[object, Outcome | None]:
        return {}

    def without(self, c: Collective) -> Outcome | None:
        """The cheapest plan without a collective like `c`; None if there is none."""
        key = (c.tensor, c.kind, c.phase, c.axes)
        if key not in self._known:
            try:
                self._known[key] = best(without_collective(self.problem, c))
            except StrategyError:
                self._known[key] = None
        return self._known[key]

    @cached_property
    def trade_offs(self) -> tuple[Outcome, ...]:
        """Plans under the same annotations, from the fastest to the one that holds the least."""
        problem = _unlimited(self.problem)
        free = dynamic_programming(problem)
        return tuple(
            outcome(problem, found, lower(problem, found.choice, found.keeping)) for found in trade_offs(problem, free)
        )

    def dropping(self, *left_out: WrittenAnnotation) -> Outcome | None:
        """The cheapest plan without some annotations; None if there is none."""
        if left_out not in self._known:
            try:
                self._known[left_out] = best(without_annotations(self.problem, left_out))
            except StrategyError:  # these annotations allowed what the settings rule out
                self._known[left_out] = None
        return self._known[left_out]

    def causes(self, c: Collective) -> tuple[WrittenAnnotation, ...]:
        """The annotations that, left out alone, make `c` disappear. If the optimum without an annotation costs the
        same as with it, the annotation is no cause: the plan is optimal without it as well."""
        return tuple(one for one in self.annotations[:TRIED] if self._gone(self.dropping(one), c))

    def together(self, c: Collective) -> tuple[WrittenAnnotation, ...]:
        """The annotations that cause `c` together, if none does alone: `c` is gone without all of them, and there with
        any one of them."""
        left = self.annotations
        for one in self.annotations:
            fewer = tuple(other for other in left if other is not one)
            if self._gone(self.dropping(*fewer), c):
                left = fewer
        return left

    def _gone(self, plan: Outcome | None, c: Collective) -> bool:
        if plan is None or self.optimum is None or has(plan, c):
            return False
        return not _same(plan.cost, self.optimum.cost)

    def of_collective(self, c: Collective) -> list[str]:
        """Two lines: the price of the cheapest plan without `c`, and the annotation that caused it. For a collective
        inside a manual function, one line that names the function."""
        if inside := self._manual_of(c):
            return [f"written by hand in the manual function {inside}, which is taken as it is"]
        return [self._price_without(c), f"caused by {self._cause(c)}"]

    def _manual_of(self, c: Collective) -> str:
        """The name of the manual function that calls `c`, or ""."""
        calls = {node.name: node for node in self.problem.graph.nodes if node.target is call_manual}
        inside = c.where in calls and c.tensor.startswith(f"{c.where}.")
        return manual_of(str(calls[c.where].args[1])).name if inside else ""

    def _price_without(self, c: Collective) -> str:
        plan = self.without(c)
        if plan is None:
            within = f" and memory_limit {human(self.limit)}" if self.limit else ""
            return f"no plan does without it under these annotations{within}"
        instead = _listed(_beyond(plan.collectives, self.planned.collectives))
        return f"the cheapest plan without it {comparison(plan, self.planned)}" + (
            f", with {instead}" if instead else ""
        )

    def _cause(self, c: Collective) -> str:
        if self.optimum is not None and not has(self.optimum, c):
            return f"{self.mode.value}: the optimum under the same annotations does without it"
        if self.limit and self._gone(self.unlimited, c):
            return f"memory_limit {human(self.limit)}: the optimum without a limit does without it"
        if not self.annotations:
            return "no annotation: there is none"
        if not self._gone(self.dropping(*self.annotations), c):
            return "no annotation: it is there in an optimum without any too"
        if causes := self.causes(c):
            return ", and by ".join(map(str, causes)) + (": without any of these it is gone" if causes[1:] else "")
        if len(self.annotations) > TRIED:
            return f"several annotations together, or by one beyond the first {TRIED} of {len(self.annotations)}"
        return f"{' and '.join(map(str, self.together(c)))} together"

    def annotation_of(self, key: str) -> WrittenAnnotation | None:
        """The annotation of the tensor or constraint `key`, if there is one."""
        return next((one for one in self.annotations if key in one.keys), None)

    @cached_property
    def options(self) -> tuple[str, ...]:
        """A line for each option in force that rules out a plan that costs less by WORTH_SAYING of the cost."""
        settings, found = self.problem.settings, dict[str, Outcome | None]()
        if settings.fully_use_devices:
            found["fully_use_devices=False"] = self._under(replace(settings, fully_use_devices=False))
        if settings.keep_cheapest is not None:
            found["enable_algo_approxi=False"] = self._under(replace(settings, keep_cheapest=None))
        if not SEARCHES[self.mode].exact:
            found[f"search_mode={_EXACT.value!r}"] = self.optimum
        enough = (1 - WORTH_SAYING) * self.planned.cost
        return tuple(
            f"with {option} the cheapest plan {comparison(plan, self.planned)}"
            for option, plan in found.items()
            if plan and plan.cost < enough
        )

    def _under(self, settings: Settings) -> Outcome | None:
        """The cheapest plan under other settings; None if there is none."""
        return best(_formulated(self.problem, settings, self.problem.allowed, self.problem.as_it_lies))

    def of_annotation(self, one: WrittenAnnotation) -> str:
        """A line: the cost of an annotation over the optimum without it."""
        plan = self.dropping(one)
        others = len(one.keys) - 1
        this = f"this annotation ({one.source}, of {counted(others, 'other')} too)" if others else "this annotation"
        if plan is None or self.optimum is None:
            return f"{this} cannot be left out: no plan without it keeps to the other options"
        if _same(plan.cost, self.optimum.cost):
            return f"{this} costs nothing: the optimum has it too"
        return f"{this} {price(self.optimum, plan)} over the optimum without it"


def price(one: Outcome, other: Outcome) -> str:
    """`costs 1.2 ms and saves 18.4 MB a step (weighted cost +3.1 %)`: the additional cost of `one` over `other`."""
    seconds, sent, about, weighed = _compared(one, other)
    first, second = ("saves" if amount < 0 else "costs" for amount in (seconds or sent, sent or seconds))
    amounts = f"{lasting(abs(seconds))} and {'' if first == second else f'{second} '}{human(abs(sent))}"
    return f"{first} {about}{amounts} a step{weighed}"


def comparison(one: Outcome, other: Outcome) -> str:
    """`takes 1.2 ms more and sends 18.4 MB less a step (weighted cost +3.1 %)`: `one` compared with `other`."""
    if _same(one.cost, other.cost):
        return "costs the same"
    seconds, sent, about, weighed = _compared(one, other)
    more, further = ("less" if amount < 0 else "more" for amount in (seconds, sent))
    return f"takes {about}{lasting(abs(seconds))} {more} and sends {human(abs(sent))} {further} a step{weighed}"


def _compared(one: Outcome, other: Outcome) -> tuple[float, int, str, str]:
    """The seconds and the bytes that `one` takes more than `other`; "about" if one of the two may not be the cheapest
    plan; and a comparison of their weighted costs."""
    about = "" if one.proven and other.proven else "about "
    weighed = f" (weighted cost {100 * (one.cost / other.cost - 1):+.1f} %)" if one.cost < 100 * other.cost else ""
    return round(one.seconds - other.seconds, 9), round(one.sent - other.sent), about, weighed


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= SAME * max(abs(a), abs(b))


def _beyond(these: Iterable[Collective], others: Iterable[Collective]) -> list[Collective]:
    """The collectives in `these` that are not in `others`."""
    left = Counter((c.tensor, c.kind, c.phase, c.axes) for c in others)
    beyond = []
    for c in these:
        key = (c.tensor, c.kind, c.phase, c.axes)
        left[key] -= 1
        if left[key] < 0:
            beyond.append(c)
    return beyond


def _listed(collectives: list[Collective]) -> str:
    words = [f"{c.phase} {c.kind}({','.join(c.axes)}) of {c.tensor}" for c in collectives[:NAMED]]
    more = len(collectives) - len(words)
    return ", ".join(words) + (f" and {more} more" if more else "")


class ScheduleSpan(Protocol):
    """An interval of the schedule of a program; see propagation/program/timeline.py."""

    @property
    def name(self) -> str:
        """The name of the node of the program's graph."""
        ...

    @property
    def phase(self) -> str:
        """The phase: forward or backward."""
        ...

    @property
    def lane(self) -> str:
        """The lane: compute or communication."""
        ...

    @property
    def start(self) -> float:
        """The start, in seconds from the beginning of the step."""
        ...

    @property
    def seconds(self) -> float:
        """The duration in seconds."""
        ...

    @property
    def args(self) -> Mapping[str, object]:
        """Further properties, such as its kind, axes and bytes."""
        ...


class Origin:
    """The part of a plan that only the process that made it has, and not a plan read from a file: its Alternatives, and
    the predicted schedule of its program. Each is found when it is first asked for.

    It does not take part in comparing plans: any two are equal, and a pickled one is empty.
    """

    def __init__(
        self,
        find: Callable[[], Alternatives] | None = None,
        schedule: Callable[[], Sequence[ScheduleSpan]] | None = None,
    ) -> None:
        self._find, self._schedule = find, schedule

    @cached_property
    def schedule(self) -> Sequence[ScheduleSpan]:
        """The predicted schedule of the program; empty if there is no program."""
        return self._schedule() if self._schedule else ()

    @cached_property
    def alternatives(self) -> Alternatives | None:
        """The alternatives of the plan; None if it was read from a file."""
        return self._find() if self._find else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return hash(Origin)

    def __deepcopy__(self, memo: object) -> Origin:
        return self

    def __reduce__(self) -> tuple[type[Origin], tuple[()]]:
        return Origin, ()
