"""A plan as a table, its totals in three lines, and its whole contents as text."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ...strategy.basics.units import human, lasting
from ...strategy.errors import StrategyError, shown
from ...strategy.placement import Kind
from ..program.collective import PHASES, Collective
from .data import PlanData, TensorPlan

_WIDEST = 10**6


class Report(str):
    """Text whose repr is the text itself, for interactive sessions."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def table(plan: PlanData, *, every: bool, rows: int | None, width: int) -> Report:
    """See Plan.table."""
    for what, number in (("rows", rows), ("width", width)):
        if number is not None and (type(number) is not int or not 0 <= number <= _WIDEST):
            raise StrategyError(f"{what} is {shown(number)}; write an int from 0 to {_WIDEST:,}")
    cells = Table(title=f"plan on {plan.mesh}", title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    for name in ("operator", "strategy", "layout", "collectives", "sent", "predicted"):
        cells.add_column(name, justify="right" if name in ("sent", "predicted") else "left", overflow="fold")
    lines = list(_rows(plan, 0.0 if every else 1e-4 * plan.predicted_time, every))
    for line in lines[:rows]:
        cells.add_row(*line)
    left = len(lines) - len(lines[:rows])
    more = f" ... and {left} more\n" if left else ""
    return Report(_rendered(cells, width) + more + summary(plan) + _legend(lines[:rows], plan, width))


def _rows(plan: PlanData, least: float, every: bool) -> Iterator[tuple[str, ...]]:
    """The cells of `table`; without `every` only operators that send something or take more than `least` seconds."""
    at = plan.collectives_by_place()
    for o in plan.operators:
        here = at.get(o.name, [])
        if every or here or o.seconds > least:
            name = f"{o.module} {''.join(o.operator.split('.')[1:2]) or o.operator}" if o.module else o.name
            layouts = " ".join("".join(codes) for codes in o.results)
            yield (name, o.strategy.strip("()"), layouts, *_costs(here, o.seconds))
    for output in plan.outputs:
        if here := at.get(f"output {output.name}", []):
            yield (output.name, "", "".join(output.codes), *_costs(here, 0.0))


def _legend(rows: Sequence[tuple[str, ...]], plan: PlanData, width: int) -> str:
    """The meaning of the columns, and of the layouts and collectives in `rows`."""
    if not rows:
        return ""
    layouts = "".join(row[2] for row in rows)
    placements = {mark: words for mark, words in _PLACEMENTS.items() if mark in layouts}
    kinds = dict.fromkeys(c.kind for c in plan.collectives if any(str(c.kind) in row[3] for row in rows))
    lines = {
        "strategy": "axis:factor, the index of the formula that the devices on the axis share; axis:R, they share none",
        "layout": "of its result, a placement for each axis: " + ", ".join(map(" ".join, placements.items())),
        "collectives": ", ".join(f"{kind} {_DOES[kind]}" for kind in kinds),
        "sent": "bytes of one device in a step, forward and backward",
        "predicted": "the time of the operator and of its collectives",
    }
    texts = [f"{name}: {words}" for name, words in lines.items() if words]
    wrapped = [line for text in texts for line in textwrap.wrap(text, max(width, 20), subsequent_indent="    ")]
    return "\n" + "\n".join(wrapped)


_PLACEMENTS = {
    "S": "split along that dim",
    "R": "whole on every device",
    "B": "whole on every device, its gradient too",
    "P": "addends of the value, one on each device",
    "W": "split along that dim, with a margin of the neighbours'",
    "T": "rows of its tokens, sorted by expert",
    "E": "rows of its experts",
}
_DOES = {
    Kind.ALL_REDUCE: "adds up the addends, for every device",
    Kind.ALL_GATHER: "gives every device the whole",
    Kind.REDUCE_SCATTER: "adds up the addends, and gives each device its part",
    Kind.ALL_TO_ALL: "splits along another dim",
    Kind.ALL_TO_ALLV: "sends rows to the ranks of their experts, or back",
    Kind.EXCHANGE: "sends margins to neighbours",
}


def summary(plan: PlanData, options: Sequence[str] = ()) -> Report:
    """See Plan.summary. `options`: lines about what options cost."""
    forward = [c for c in plan.collectives if c.phase == "forward"]
    backward = [c for c in plan.collectives if c.phase == "backward"]
    limit = plan.certificate.memory_limit
    return Report(
        f"{len(forward)} collectives forward, {len(backward)} backward; one rank sends "
        f"{human(plan.wire_bytes)} a step; predicted {lasting(plan.predicted_time)}\n"
        f"on one device: {plan.memory}{'' if limit is None else f'; memory_limit {human(limit)}'}\n"
        f"search: {plan.certificate}" + "".join(f"\n{line}" for line in options)
    )


def text(plan: PlanData) -> str:
    """The whole plan as text, a line for each tensor, operator and collective; the first line has its totals."""
    return "\n".join(_lines(plan))


def _lines(plan: PlanData) -> Iterator[str]:
    yield f"a step is predicted to take {lasting(plan.predicted_time)}, one rank sends {human(plan.wire_bytes)}"
    yield f"mesh {plan.mesh}"
    yield f"on one device: {plan.memory}"
    yield f"search: {plan.certificate}"
    at = plan.collectives_by_place()
    for tensor in plan.inputs:
        yield _tensor(plan, tensor)
    before = ""
    for o in plan.operators:
        if (where := ": ".join(filter(None, (o.module, o.source)))) != before:
            yield f"# {where}".rstrip()
        before = where
        read = ", ".join(producer.tensor for producer in o.producers or ())
        yield f"{o.name}: {o.result} = {o.operator}({read})"
        split = " ".join(f"{axis}:{factor}" for axis, factor in zip(plan.axes, o.factors, strict=True) if factor)
        operands, results = (
            ", ".join(str(plan.layout_of(codes)) for codes in side) for side in (o.operands, o.results)
        )
        annotation = f", annotated {o.annotation}" if o.annotation else ""
        yield f"    # splits {split or 'nothing'}: {operands} -> {results}; {lasting(o.seconds)}{annotation}"
        yield from map(_collective, at.get(o.name, ()))
    for tensor in plan.outputs:
        yield _tensor(plan, tensor)
        yield from map(_collective, at.get(f"output {tensor.name}", ()))


def _tensor(plan: PlanData, tensor: TensorPlan) -> str:
    annotation = f"    # annotated {tensor.annotation}" if tensor.annotation else ""
    layout = plan.layout_of(tensor.codes)
    return f"{tensor.role.value} {tensor.name}: {tensor.dtype}{list(tensor.shape)} {layout}{annotation}"


def _collective(c: Collective) -> str:
    return f"    # {c.phase} {c.kind} over {','.join(c.axes)} of {c.tensor}: {c.cost}"


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


def _rendered(table: Table, width: int) -> str:
    out = StringIO()
    Console(file=out, width=width, force_terminal=False, highlight=False, markup=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
