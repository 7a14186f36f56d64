"""How two planned calls differ, or the calls of two runs: `partway diff`.

Compared is what was decided: meshes, layouts, strategies, collectives with their bytes and predicted times, memory,
and what each pass left. How long passes took is not, nor where source lines stand.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from partway.graphs.index import Index, Row
from partway.graphs.saved import SavedCall
from partway.graphs.stages import LAYOUTS
from partway.propagation.plan.data import OperatorPlan, PlanData, TensorPlan
from partway.propagation.program.collective import Collective
from partway.strategy.notation import counted
from partway.strategy.units import human, lasting

LEGEND = (
    "splits dp:m: the mesh axis dp splits the index m of the operator's rule. The bytes and seconds of an operator are",
    "those that a rank sends, and needs, with the collectives that it causes.",
    *LAYOUTS,
)
_CLOSE = 1e-9  # the relative difference of numbers that are the same


@dataclass(frozen=True)
class Difference:
    """One thing that differs, or several alike.

    names           of what differs; where only a number in them tells them apart, they are one entry
    sides           a text for each side; none for what only one side has
    sent, seconds   of what only one side has; else by how much B is above A
    source          the line of code, of what no module names
    """

    names: tuple[str, ...]
    sides: tuple[str, ...] = ()
    sent: float = 0.0
    seconds: float = 0.0
    source: str = ""

    @property
    def weight(self) -> tuple[float, float]:
        """What it matters: things that weigh most come first."""
        return -abs(self.seconds), -abs(self.sent)

    def lines(self) -> Iterator[str]:
        """The entry, as text."""
        several = len(self.names) > 1
        name = f"{_pattern(self.names[0])} ({len(self.names)} times)" if several else self.names[0]
        yield name + (f"    {self._costs()}" if self.sent or self.seconds else "")
        yield from (["    # " + self.source] if self.source else [])
        yield from (f"    {side}" for side in self.sides)

    def _costs(self) -> str:
        if not self.sides:
            return f"{human(self.sent)}, {lasting(self.seconds)}"
        return f"{_signed(self.sent, human)}, {_signed(self.seconds, lasting)}"


@dataclass(frozen=True)
class Section:
    """Differences of one kind."""

    title: str
    entries: tuple[Difference, ...]

    def lines(self, most: int) -> Iterator[str]:
        """The section, with `most` entries (0: all)."""
        yield ""
        yield self.title
        shown = self.entries[: most or None]
        for entry in shown:
            yield from (f"  {line}" for line in entry.lines())
        if left := len(self.entries) - len(shown):
            yield f"  ... and {left} more; --rows 0 shows all"


@dataclass(frozen=True)
class Comparison:
    """How two calls differ. `problem`: why they cannot be compared further; `totals`: what is told of both."""

    a: SavedCall
    b: SavedCall
    problem: str
    totals: tuple[tuple[str, str, str, str], ...]
    sections: tuple[Section, ...]

    @property
    def same(self) -> bool:
        """Whether they do not differ."""
        return not self.problem and not self.sections and not any(change for *_, change in self.totals)

    def text(self, rows: int = 20) -> str:
        """What differs, with the first `rows` entries of each section (0: all)."""
        lines = [f"A  {self.a.path}", f"B  {self.b.path}"]
        if self.same:
            return "\n".join([*lines, "", "the plans are the same", ""])
        lines += ["", self.problem] if self.problem else []
        lines += ["", *_table((("", "A", "B", "B - A"), *self.totals))] if self.totals else []
        for section in self.sections:
            lines += section.lines(rows)
        return "\n".join([*lines, ""])


def compared(a: SavedCall, b: SavedCall) -> Comparison:
    """How the call `b` differs from `a`."""
    if a.plan is None or b.plan is None:
        failed = {side: call.index.failed for side, call in (("A", a), ("B", b)) if call.index and call.index.failed}
        same = len(failed) == 2 and len(set(failed.values())) == 1
        problem = "" if same else "; ".join(f"planning {side} failed: {error}" for side, error in failed.items())
        return Comparison(a, b, problem, (), ())
    sections = (
        Section("layouts that differ", _grouped(_tensors(a.plan, b.plan))),
        Section("operators whose strategy differs", _grouped(_operators(a.plan, b.plan))),
        Section("operators that only A has", _grouped(_alone(a.plan, b.plan))),
        Section("operators that only B has", _grouped(_alone(b.plan, a.plan))),
        Section("collectives that only A has", _grouped(_gone(a.plan, b.plan))),
        Section("collectives that only B has", _grouped(_gone(b.plan, a.plan))),
        Section("passes that left something else", tuple(_passes(a.index, b.index))),
    )
    return Comparison(a, b, "", tuple(_totals(a.plan, b.plan)), tuple(s for s in sections if s.entries))


def paired(a: Sequence[SavedCall], b: Sequence[SavedCall]) -> tuple[list[tuple[SavedCall, SavedCall]], list[str]]:
    """The calls of two runs that belong together, and what has no other: the first call of each name in A and in B,
    then the second. Where both have one call, its name does not matter."""
    if len(a) == len(b) == 1:
        return [(a[0], b[0])], []
    keyed = [_keyed(side) for side in (a, b)]
    pairs = [(call, keyed[1][key]) for key, call in keyed[0].items() if key in keyed[1]]
    alone = [
        f"only in {side}: {call.path.name}"
        for side, ours, theirs in (("A", keyed[0], keyed[1]), ("B", keyed[1], keyed[0]))
        for key, call in ours.items()
        if key not in theirs
    ]
    return pairs, alone


def _keyed(calls: Iterable[SavedCall]) -> dict[tuple[str, int], SavedCall]:
    counts = Counter[str]()
    keyed = {}
    for call in calls:
        keyed[call.name, counts[call.name]] = call
        counts[call.name] += 1
    return keyed


# -- What differs


def _totals(a: PlanData, b: PlanData) -> Iterator[tuple[str, str, str, str]]:
    def number(name: str, of: Callable[[PlanData], float], unit: Callable[[float], str]) -> tuple[str, str, str, str]:
        ours, theirs = of(a), of(b)
        change = "" if math.isclose(ours, theirs, rel_tol=_CLOSE) else _signed(theirs - ours, unit)
        return name, unit(ours), unit(theirs), change

    yield "mesh", str(a.mesh), str(b.mesh), "" if a.mesh == b.mesh else "another mesh"
    yield number("a step is predicted to take", lambda plan: plan.predicted_time, lasting)
    yield number("one rank sends in a step", lambda plan: plan.wire_bytes, human)
    for phase in ("forward", "backward"):
        yield number(f"collectives, {phase}", lambda plan, p=phase: sum(c.phase == p for c in plan.collectives), _count)  # type: ignore[misc]
    yield number("memory of a device", lambda plan: plan.memory.total, human)
    for field in ("parameters", "gradients", "optimizer", "inputs", "activations"):
        yield number(f"    {field}", lambda plan, f=field: getattr(plan.memory, f), human)  # type: ignore[misc]


def _tensors(a: PlanData, b: PlanData) -> Iterator[Difference]:
    ours, theirs = ({(t.role, t.name): t for t in (*plan.inputs, *plan.outputs)} for plan in (a, b))
    for key in dict.fromkeys((*ours, *theirs)):
        one, other = ours.get(key), theirs.get(key)
        if one is None or other is None or (one.shape, one.dtype, one.codes) != (other.shape, other.dtype, other.codes):
            yield Difference((f"{key[0].value} {key[1]}",), (f"A  {_tensor(a, one)}", f"B  {_tensor(b, other)}"))


def _tensor(plan: PlanData, tensor: TensorPlan | None) -> str:
    if tensor is None:
        return "has none"
    annotation = f", annotated {tensor.annotation}" if tensor.annotation else ""
    return f"{tensor.dtype}{list(tensor.shape)} {_codes(plan, tensor.codes)}{annotation}"


def _operators(a: PlanData, b: PlanData) -> Iterator[Difference]:
    theirs, costs = {(o.name, o.operator): o for o in b.operators}, [_costs(plan) for plan in (a, b)]
    for one in a.operators:
        other = theirs.get((one.name, one.operator))
        if other is None or _decided(one) == _decided(other):
            continue
        before, after = costs[0][one.name], costs[1][one.name]
        results = (one.strategy, one.results) != (other.strategy, other.results)
        sides = [_strategy(plan, o, results) for plan, o in ((a, one), (b, other))]
        yield Difference(
            (_name(one),),
            (f"A  {sides[0]}", f"B  {sides[1]}"),
            after[0] - before[0],
            after[1] - before[1],
            _source(one),
        )


def _alone(a: PlanData, b: PlanData) -> Iterator[Difference]:
    there = {(o.name, o.operator) for o in b.operators}
    for one in a.operators:
        if (one.name, one.operator) not in there:
            yield Difference((_name(one),), (_strategy(a, one, results=True),), source=_source(one))


def _gone(a: PlanData, b: PlanData) -> Iterator[Difference]:
    """The collectives of A that B has not. Each counts by itself: a rank sends what the entry says."""
    there = Counter(map(_sends, b.collectives))
    for c in a.collectives:
        if there[_sends(c)]:
            there[_sends(c)] -= 1
        else:
            what = f"{c.phase} {c.kind} over {','.join(c.axes)} of {c.tensor}, for {c.path or c.where}"
            yield Difference((what,), (), c.wire_bytes, c.predicted_time)


def _passes(a: Index | None, b: Index | None) -> Iterator[Difference]:
    if a is None or b is None:
        return
    ours, theirs = (_rows(index) for index in (a, b))
    for key in dict.fromkeys((*ours, *theirs)):
        one, other = ours.get(key), theirs.get(key)
        if _left(one) != _left(other):
            files = [row.file.removesuffix(".txt") for row in (one, other) if row and row.file]
            yield Difference((" ".join((key[0], *files[:1])),), (f"A  {_left(one)}", f"B  {_left(other)}"))


def _rows(index: Index) -> dict[tuple[str, int], Row]:
    """The passes whose result was kept, the first of each name, then the second."""
    counts = Counter[str]()
    rows = {}
    for row in index.rows:
        if row.kept:
            rows[row.name, counts[row.name]] = row
            counts[row.name] += 1
    return rows


def _left(row: Row | None) -> str:
    if row is None:
        return "was not run"
    if row.nodes is None:
        return "ran"
    collectives = ", ".join(f"{count} {kind}" for kind, count in row.collectives.items())
    sent = f"; {collectives}, {human(row.wire_bytes)} sent" if collectives else ""
    return f"{counted(row.nodes, 'node')}{sent}"


# -- In words


def _decided(o: OperatorPlan) -> Hashable:
    return o.factors, o.operands, o.results


def _sends(c: Collective) -> Hashable:
    return c.phase, c.kind, c.axes, c.group_size, c.tensor, c.where, c.payload_bytes, f"{c.predicted_time:.6g}"


def _costs(plan: PlanData) -> dict[str, tuple[float, float]]:
    """What each operator sends, and its seconds, with those of the collectives that it causes."""
    at = plan.collectives_by_place()
    return {
        o.name: (
            sum(c.wire_bytes for c in at.get(o.name, ())),
            o.seconds + sum(c.predicted_time for c in at.get(o.name, ())),
        )
        for o in plan.operators
    }


def _name(o: OperatorPlan) -> str:
    called = o.operator.split(".")[1] if "." in o.operator else o.operator
    return f"{o.module} {called} ({o.name})" if o.module else f"{called} ({o.name})"


def _source(o: OperatorPlan) -> str:
    return "" if o.module else o.source


def _strategy(plan: PlanData, o: OperatorPlan, results: bool) -> str:
    """The strategy with the layouts of the results or, where these tell nothing, of the operands."""
    layouts = ", ".join(_codes(plan, codes) for codes in (o.results if results else o.operands))
    split = " ".join(f"{axis}:{factor}" for axis, factor in zip(plan.axes, o.factors, strict=True) if factor)
    annotation = f", annotated {o.annotation}" if o.annotation else ""
    return f"splits {split or 'nothing'}{' ->' if results else ', reads'} {layouts}{annotation}"


def _codes(plan: PlanData, codes: Iterable[str]) -> str:
    return "[" + " ".join(f"{axis}:{code}" for axis, code in zip(plan.axes, codes, strict=True)) + "]"


def _grouped(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    """Those that only a number in their names tells apart as one, what matters most first."""
    groups: dict[Any, list[Difference]] = {}
    for each in differences:
        groups.setdefault((_pattern(each.names[0]), each.sides), []).append(each)
    joined = [
        Difference(
            tuple(name for each in group for name in each.names), group[0].sides,
            sum(each.sent for each in group), sum(each.seconds for each in group),
            group[0].source if len({each.source for each in group}) == 1 else "",
        )
        for group in groups.values()
    ]  # fmt: skip
    return tuple(sorted(joined, key=lambda each: each.weight))


def _pattern(name: str) -> str:
    """A name without the numbers that tell layers apart: `h.*.attn addmm` for `h.0.attn addmm_3`."""
    return re.sub(r"_\d+\b", "", re.sub(r"(?<=\.)\d+\b", "*", name))


def _signed(change: float, unit: Callable[[float], str]) -> str:
    return f"{'+' if change >= 0 else '-'}{unit(abs(change))}"


def _count(number: float) -> str:
    return str(int(number))


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    every = list(rows)
    widths = [max(len(row[i]) for row in every) for i in range(len(every[0]))]
    for first, *rest in every:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells]).rstrip()
