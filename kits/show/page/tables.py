"""The tables and bars of a page: the costs of a step, the memory of a rank, the annotations.

Each function returns a part of the page as HTML; names are escaped, whatever they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from partway.propagation.graph import Role
from partway.propagation.plan import Memory, PlanData, TensorPlan
from partway.propagation.program import PHASES, Collective
from partway.show.page.facts import Said, like, pattern
from partway.show.page.markup import safe
from partway.show.page.outline import Group, outline
from partway.strategy import counted
from partway.strategy.basics import human, lasting

ROWS = 30  # rows of a table; the rest is summed up
STACK = ("#8fbdf0", "#f6b566", "#7fd3c6", "#c3a8ee", "#f2a9c4", "#c9d67f", "#d4d9e1", "#e59a86", "#9fb4c9")
_WIDE = 1000  # the width of a stacked bar, in its own units


@dataclass(frozen=True)
class Share:
    """A part of a whole: its name, its amount, and that as text."""

    name: str
    amount: float
    text: str


def headline(plan: PlanData) -> str:
    """The main figures."""
    figures = {
        "mesh": f"{plan.mesh} · {counted(plan.mesh.device_num, 'device')}",
        "a step": f"{lasting(plan.predicted_time)} predicted, nothing overlapped",
        "a rank sends": human(plan.wire_bytes),
        "a device holds": f"{human(plan.memory.total)} at most",
        "operators": f"{len(plan.operators):,}",
        "collectives": f"{len(plan.collectives):,}",
        "search": str(plan.certificate),
    }
    cells = "".join(f"<div><dt>{safe(name)}</dt><dd>{safe(text)}</dd></div>" for name, text in figures.items())
    return f'<dl class="figures">{cells}</dl>'


def costs(plan: PlanData) -> str:
    """Where the seconds and the bytes of a step go: computing and each axis; by kind, axis and phase; by module."""
    return "\n".join([_time_bar(plan), _by_kind(plan), _by_module(plan)])


def _time_bar(plan: PlanData) -> str:
    computing = sum(o.seconds for o in plan.operators)
    again = sum(o.again for o in plan.operators)
    shares = [Share("computing", computing, lasting(computing)), Share("computing again", again, lasting(again))]
    for axes in dict.fromkeys(c.axes for c in plan.collectives):
        for phase in PHASES:
            seconds = sum(c.predicted_time for c in plan.collectives if c.axes == axes and c.phase == phase)
            shares.append(Share(f"{phase} collectives over {', '.join(axes)}", seconds, lasting(seconds)))
    return stacked("The seconds of a step, as if nothing overlapped", shares)


def _by_kind(plan: PlanData) -> str:
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for c in plan.collectives:
        groups.setdefault((c.kind, ", ".join(c.axes), c.phase), []).append(c)
    if not groups:
        return "<p>No collective: nothing is sent.</p>"
    rows = sorted(groups.items(), key=lambda item: -sum(c.predicted_time for c in item[1]))
    return table(
        "Collectives by kind, axis and phase",
        ("kind", "over", "phase", "#count", "#a rank sends", "#time", "of all time"),
        (
            (*map(safe, key), f"{len(cs):,}", human(sum(c.wire_bytes for c in cs)), _seconds(cs), _bar(cs, plan))
            for key, cs in rows
        ),
    )


def _by_module(plan: PlanData) -> str:
    at = plan.collectives_by_place()
    rows = []
    for name, numbers in _top(outline(plan)):
        operators = [plan.operators[i] for i in numbers]
        cs = [c for o in operators for c in at.get(o.name, ())]
        computing = sum(o.seconds + o.again for o in operators)
        held = sum(o.held_bytes or 0.0 for o in operators)
        seconds = computing + sum(c.predicted_time for c in cs)
        sent = human(sum(c.wire_bytes for c in cs))
        rows.append((seconds, (find(name) if name else "outside of modules", f"{len(operators):,}", lasting(computing),
                               _seconds(cs), sent, human(held), bar(seconds, plan.predicted_time))))  # fmt: skip
    rows.sort(key=lambda row: -row[0])
    head = ("module", "#operators", "#computing", "#collectives", "#a rank sends", "#kept", "of all time")
    return table("By module", head, [cells for _, cells in rows])


def _top(root: Group) -> Iterator[tuple[str, list[int]]]:
    """The modules in the by-module table, each with its operators: those of the first level that has several."""
    while sum(isinstance(child, Group) for child in root.children) == 1 and len(root.children) < 4:
        root = next(child for child in root.children if isinstance(child, Group))
    outside = [child for child in root.children if isinstance(child, int)]
    for child in root.children:
        if isinstance(child, Group):
            inner = [each for each in child.children if isinstance(each, Group)]
            split = child.kind == "module" and len(inner) > 2
            parts = inner if split else [child]
            for part in parts:
                yield part.name, numbers_in(part)
            outside += [each for each in child.children if isinstance(each, int)] if split else []
    if outside:
        yield "", outside


def numbers_in(group: Group) -> list[int]:
    """The operators in a group."""
    found = (([child] if isinstance(child, int) else numbers_in(child)) for child in group.children)
    return [number for numbers in found for number in numbers]


def dearest(plan: PlanData, known: Said) -> str:
    """The collectives, those of repeated layers as one, the most expensive first, each with its known causes."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, c in enumerate(plan.collectives):
        groups.setdefault(like(c), []).append(i)
    ordered = sorted(groups.values(), key=lambda numbers: -sum(plan.collectives[i].predicted_time for i in numbers))
    rows = []
    for numbers in ordered[:ROWS]:
        cs = [plan.collectives[i] for i in numbers]
        first = cs[0]
        name = f"{first.kind} over {', '.join(first.axes)} of {pattern(first.tensor) if len(cs) > 1 else first.tensor}"
        told = next((known.of_collectives[i] for i in numbers if i in known.of_collectives), ())
        button = f'<button class="link" type="button" data-collective="{safe(numbers[:400])}">{safe(name)}</button>'
        why = "<br>".join(safe(line) for line in (f"because {first.producer} meets {first.consumer}", *told))
        where = pattern(first.path) if len(cs) > 1 else first.path
        rows.append((button, first.phase, safe(where) or "the function", f"{len(cs):,}",
                     human(sum(c.wire_bytes for c in cs)), _seconds(cs), _bar(cs, plan), why))  # fmt: skip
    rest = [plan.collectives[i] for numbers in ordered[ROWS:] for i in numbers]
    more = f"<p>And {len(rest):,} more, {_seconds(rest)} together.</p>" if rest else ""
    head = ("collective", "phase", "for", "#times", "#a rank sends", "#time", "of all time", "why")
    return table("What costs most", head, rows) + more if rows else "<p>None.</p>"


def memory(held: Memory) -> str:
    """The memory of a rank at its peak."""
    kinds = ("parameters", "gradients", "optimizer", "inputs", "activations", "again", "working")
    names = {"again": "computed again", "optimizer": "optimizer states"}
    shares = [Share(names.get(k, k), getattr(held, k), human(getattr(held, k))) for k in kinds]
    when = f"in the {held.phase} of {held.at}" if held.at else "then"
    return stacked(f"The bytes of one device when it holds most, {when}: {human(held.total)}", shares)


def annotated(plan: PlanData, known: Said) -> str:
    """The annotations with their costs, and the inferred layouts."""
    tensors = [t for t in (*plan.inputs, *plan.outputs) if t.annotation]
    rows = [
        (find(t.name), safe(t.role), safe(t.annotation), codes_of(plan, t.codes), safe(_costs(known, t.name)))
        for t in tensors
    ]
    rows += [
        (find(o.name), "operator", safe(o.annotation), safe(o.strategy), safe(_costs(known, f"constraint:{o.name}")))
        for o in plan.operators
        if o.annotation
    ]
    cost = known.otherwise if rows and not known.of_annotations else ""
    head = ("name", "is", "annotated", "layout", "what that costs")
    first = table("Annotated", head, rows[:ROWS]) if rows else "<p>Nothing was annotated.</p>"
    first += f"<p>And {len(rows) - ROWS:,} more.</p>" if len(rows) > ROWS else ""
    first += f'<p class="soft">{safe(cost)}</p>' if cost else ""
    return first + _inferred(plan)


def _costs(known: Said, key: str) -> str:
    return known.of_annotations.get(key, "")


def _inferred(plan: PlanData) -> str:
    groups: dict[tuple[str, ...], list[TensorPlan]] = {}
    for t in plan.inputs:
        if not t.annotation and t.role in (Role.PARAMETER, Role.INPUT):
            groups.setdefault((pattern(t.name), t.role, f"{t.dtype}{list(t.shape)}", *t.codes), []).append(t)
    rows = [
        (
            find(ts[0].name, key[0] if len(ts) > 1 else ts[0].name),
            safe(ts[0].role),
            safe(key[2]),
            codes_of(plan, ts[0].codes),
            f"{len(ts):,}",
        )
        for key, ts in groups.items()
    ]
    if not rows:
        return ""
    more = f"<p>And {len(rows) - 2 * ROWS:,} more.</p>" if len(rows) > 2 * ROWS else ""
    inside = table("", ("name", "is", "shape", "layout", "#times"), rows[: 2 * ROWS]) + more
    return f"<h3>Inferred</h3><details><summary>{counted(len(rows), 'layout')}</summary>{inside}</details>"


def certificate(plan: PlanData) -> str:
    """The search's certificate for the plan."""
    known = plan.certificate
    gap = "unknown" if known.gap is None else f"{100 * known.gap:.2g} %"
    facts = {
        "search": known.mode.value,
        "cost": f"{known.cost:.6g}, as the search weighs it",
        "bound": "unknown" if known.bound is None else f"{known.bound:.6g}: no plan under these annotations costs less",
        "gap": f"{gap}{'; the plan is proven to be the optimum' if known.proven else ''}",
        "memory limit": "none"
        if known.memory_limit is None
        else human(known.memory_limit) + (", without which the plan would be another" if known.binding else ""),
        "backward": "none: the plan is for inference" if known.inference else "of all that is differentiated",
    }
    if plan.unknown_operators:
        facts["without a rule"] = f"{', '.join(plan.unknown_operators)}: every device computes all of them"
    rows = [(safe(name), safe(text)) for name, text in facts.items()]
    return f"<p>{safe(known)}.</p>" + table("", ("", ""), rows)


# -- The elements of the page -----------------------------------------------------------------------------------------


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells in HTML. A column whose head begins with # is numeric."""
    number = [name.startswith("#") for name in head]
    heads = "".join(
        f'<th scope="col"{_class(n)}>{safe(name.lstrip("#"))}</th>' for name, n in zip(head, number, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{_class(n)}>{cell}</td>" for cell, n in zip(row, number, strict=True)) + "</tr>"
        for row in rows
    )
    top = f"<h3>{safe(title)}</h3>" if title else ""
    named = f"<thead><tr>{heads}</tr></thead>" if "".join(head).strip("#") else ""
    return f'{top}<div class="scroll"><table>{named}<tbody>{body}</tbody></table></div>'


def _class(number: bool) -> str:
    return ' class="n"' if number else ""


def stacked(title: str, shares: Sequence[Share]) -> str:
    """Parts of a whole as one bar, and as a table."""
    shown = [share for share in shares if share.amount > 0]
    total = sum(share.amount for share in shown)
    if not total:
        return f"<h3>{safe(title)}</h3><p>Nothing.</p>"
    boxes, at = [], 0.0
    for i, share in enumerate(shown):
        wide = _WIDE * share.amount / total
        said = safe(f"{share.name}: {share.text}, {100 * share.amount / total:.0f} %")
        boxes.append(
            f'<rect x="{at:.2f}" y="0" width="{wide:.2f}" height="34" fill="{STACK[i % len(STACK)]}" '
            f'stroke="#0006"><title>{said}</title></rect>'
        )
        at += wide
    rows = [
        (
            f'<span class="legend"><i style="background:{STACK[i % len(STACK)]}"></i></span>{safe(share.name)}',
            share.text,
            f"{100 * share.amount / total:.1f} %",
        )
        for i, share in enumerate(shown)
    ]
    return (
        f'<h3>{safe(title)}</h3><svg class="stack" viewBox="0 0 {_WIDE} 34" preserveAspectRatio="none" role="img" '
        f'aria-label="{safe(title)}">{"".join(boxes)}</svg>{table("", ("", "#", "#"), rows)}'
    )


def find(name: str, shown: str = "") -> str:
    """A button that selects the element called `name`."""
    return f'<button class="link" type="button" data-find="{safe(name)}">{safe(shown or name)}</button>'


def codes_of(plan: PlanData, codes: Iterable[str]) -> str:
    """A layout, a code for each axis."""
    return safe(" ".join(f"{axis}:{code}" for axis, code in zip(plan.axes, codes, strict=True)))


def _seconds(collectives: Iterable[Collective]) -> str:
    return lasting(sum(c.predicted_time for c in collectives))


def _bar(collectives: Iterable[Collective], plan: PlanData) -> str:
    return bar(sum(c.predicted_time for c in collectives), plan.predicted_time)


def bar(part: float, whole: float) -> str:
    """A part of a whole as a bar with its percentage."""
    share = 100 * part / whole if whole else 0.0
    return f'<span class="barfill" style="width:{share:.2f}%"></span><span class="soft">{share:.1f} %</span>'
