"""The explanation of an operator, a module or a tensor, as text: see Plan.explain.

Facts come from the plan's data; the costs of other plans come from `alternatives`, which need the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ...strategy.basics.suggest import did_you_mean
from ...strategy.basics.units import human, lasting
from ...strategy.errors import StrategyError, shown
from ...strategy.notation import counted
from ..memory.fates import fate_named
from ..program.collective import Collective
from .alternatives import Alternatives
from .data import OperatorPlan, PlanData, TensorPlan
from .load import ExpertLoad, loads_of
from .planned_graph import planned_graph
from .report import Report

NAMED = 4  # tensors or readers of an operator that are named at most


def explain(
    plan: PlanData, known: Alternatives | None, name: Any, alternatives: int, loads: Sequence[ExpertLoad] = ()
) -> Report:
    """The explanation of `name`, with the costs of as many `alternatives`, and the `loads` of mixtures; `known`: the
    alternatives of the plan, None for a loaded plan."""
    if isinstance(alternatives, bool) or not isinstance(alternatives, int) or alternatives < 0:
        raise StrategyError(
            f"alternatives is {shown(alternatives)} ({type(alternatives).__name__}); write for how many "
            "collectives to find what the plan without them would cost: 0 (none) or more"
        )
    text = str(name) if isinstance(name, str) else str(getattr(name, "name", shown(name)))
    tensors = [t for t in (*plan.inputs, *plan.outputs) if _matches(text, t.name)]
    operators = [o for o in plan.operators if _matches(text, o.name) or _inside(text, o.module)]
    rows = loads_of(plan, loads)
    by_place, neighbours = plan.collectives_by_place(), _neighbours(plan, operators)
    subjects = [_tensor_subject(plan, t) for t in tensors]
    subjects += [
        _operator_subject(plan, o, by_place.get(o.name, []), neighbours.get(o.name, ""), rows.get(o.name))
        for o in operators
    ]
    if not subjects:
        raise StrategyError(_not_found(text, plan))
    asked = _ShownAlternatives(known, subjects, alternatives)
    lines: list[str] = []
    for subject in subjects:
        lines.append(subject.title)
        lines += [f"    {line}" for line in subject.lines]
        lines += [f"    {line}" for line in asked.of_annotation(subject)]
        for c in subject.collectives:
            lines += [_cost(c), *(f"        {line}" for line in (*_because(c), *asked.of_collective(c)))]
    options = known.options if known and alternatives else ()
    return Report("\n".join([*lines, *options, *asked.rest()]))


def _codes(plan: PlanData, codes: Iterable[str]) -> str:
    return "[" + " ".join(f"{axis}:{code}" for axis, code in zip(plan.axes, codes, strict=True)) + "]"


def _cost(c: Collective) -> str:
    return (
        f"    {c.phase} {c.kind} over {','.join(c.axes)} ({c.group_size} ranks) of {c.tensor}: "
        f"{human(c.payload_bytes)}, {human(c.wire_bytes)} sent, {lasting(c.predicted_time)}"
    )


def _because(c: Collective) -> list[str]:
    return [f"because {c.producer} meets {c.consumer}", *([f"at {c.source}"] if c.source else [])]


@dataclass(frozen=True)
class _Subject:
    """A tensor or an operator to explain: a title, the plan's facts about it, its key among the allowed layouts if it
    is annotated, and its collectives."""

    title: str
    lines: tuple[str, ...]
    key: str
    collectives: tuple[Collective, ...]


def _tensor_subject(plan: PlanData, t: TensorPlan) -> _Subject:
    return _Subject(
        f"{t.role.value} {t.name} {t.dtype}{list(t.shape)}: {_codes(plan, t.codes)}",
        (f"annotated {t.annotation}",) if t.annotation else (),
        t.name if t.annotation else "",
        tuple(c for c in plan.collectives if t.name in (c.tensor, c.where.removeprefix("output "))),
    )


def _neighbours(plan: PlanData, operators: Sequence[OperatorPlan]) -> dict[str, str]:
    """The operands and readers of each of `operators`, as text; empty for a plan without a graph."""
    if not operators:
        return {}
    try:
        graph = planned_graph(plan)
    except StrategyError:
        return {}
    texts = {}
    for o in operators:
        tensors = dict.fromkeys(tensor for _, _, tensor in graph.in_edges(o.name, data="tensor"))
        sides = ("reads", [*tensors]), ("read by", [*graph.successors(o.name)])
        texts[o.name] = "; ".join(f"{word} {_named(names)}" for word, names in sides if names)
    return texts


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _operator_subject(
    plan: PlanData, o: OperatorPlan, collectives: Iterable[Collective], neighbours: str, load: ExpertLoad | None
) -> _Subject:
    lines = [f"splits {o.strategy}; results {', '.join(_codes(plan, r) for r in o.results)}"]
    lines += [f"annotated {o.annotation}"] if o.annotation else []
    lines += [f"from {o.source}"] if o.source else []
    lines += [neighbours] if neighbours else []
    lines += _fate(o)
    lines += [f"{load.rows} in the recorded steps"] if load else []
    return _Subject(
        f"{o.name} = {o.operator} {o.result} in {o.module or 'the function'}",
        tuple(lines),
        f"constraint:{o.name}" if o.annotation else "",
        tuple(collectives),
    )


def _fate(o: OperatorPlan) -> list[str]:
    """A line about the fate of the results, if there is something to say."""
    fate = fate_named(o.fate)
    if fate is None or not fate.told:
        return []
    return [fate.told.format(seconds=lasting(o.again), bytes=human(o.held_bytes or 0.0))]


class _ShownAlternatives:
    """The alternatives that an explanation shows: of the costliest collectives, and of the first annotations."""

    def __init__(self, known: Alternatives | None, subjects: list[_Subject], count: int) -> None:
        self.known, self.count = known, count
        collectives = dict.fromkeys(c for subject in subjects for c in subject.collectives)
        self.collectives = sorted(collectives, key=lambda c: -c.predicted_time)
        keys = [subject.key for subject in subjects if subject.key]
        annotations = [known.annotation_of(key) for key in keys] if known else []
        self.annotations = list(dict.fromkeys(one for one in annotations if one))
        self.something = bool(collectives or keys)

    def of_annotation(self, subject: _Subject) -> list[str]:
        """The cost of the annotation of `subject`, if it is among those to show."""
        one = self.known.annotation_of(subject.key) if self.known and subject.key else None
        return [self.known.of_annotation(one)] if self.known and one in self.annotations[: self.count] else []

    def of_collective(self, c: Collective) -> list[str]:
        """The price of a plan without `c`, and its cause, if `c` is among those to show."""
        return self.known.of_collective(c) if self.known and c in self.collectives[: self.count] else []

    def rest(self) -> list[str]:
        """A line on alternatives that are not shown, and how to get them."""
        if not self.count or not self.something:
            return []
        if self.known is None:
            return ["(loaded from a file: what alternatives cost, and what caused a collective, needs the model)"]
        most = max(len(self.collectives), len(self.annotations))
        if most <= self.count:
            return []
        left = [
            f"{min(len(things), self.count)} of {counted(len(things), noun)}{which}"
            for things, noun, which in (
                (self.collectives, "collective", ", those that cost most"),
                (self.annotations, "annotation", ""),
            )
            if things
        ]
        return [f"alternatives are shown for {' and for '.join(left)}; explain(..., alternatives={most}) shows all"]


def _matches(pattern: str, name: str) -> bool:
    return bool(name) and fnmatchcase(name, pattern)


def _inside(pattern: str, path: str) -> bool:
    parts = path.split(".")
    return any(_matches(pattern, ".".join(parts[: i + 1])) for i in range(len(parts)))


def _not_found(text: str, plan: PlanData) -> str:
    tensors = [t.name for t in (*plan.inputs, *plan.outputs)]
    names = dict.fromkeys([*tensors, *(o.module for o in plan.operators), *(o.name for o in plan.operators)])
    tops = dict.fromkeys(name.split(".")[0] for name in names if name)
    others = f"its names are, or begin with, {', '.join(list(tops)[:12])}"
    return f"the plan has nothing called {text!r}; {did_you_mean(text, sorted(names), others)}"
