"""`partway show`: the page of a saved plan, or of two side by side with their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from partway.commands import SavedCall, differences, saved_calls, strategies
from partway.propagation.plan import ExpertLoad, Origin, Plan, ScheduleSpan, loads_of, text
from partway.show.page.document import Section, Shown, document
from partway.show.page.facts import Said, said
from partway.show.page.load import load_sections
from partway.show.page.markup import safe
from partway.show.page.tables import find
from partway.show.page.time import timeline_sections
from partway.strategy import StrategyError, shown
from partway.strategy.basics import human, lasting

LINES = 1000  # differing lines


def page(paths: Sequence[Path]) -> str:
    """The page of the plan at a path, or of the plans at two. Raises StrategyError if there is none, or several."""
    calls = [_call(path) for path in paths]
    plans = [call.plan for call in calls]
    if len(plans) == 1:
        return document([Shown(plans[0], known=_known(plans[0]))], f"Plan on {plans[0].mesh}: {calls[0].path.name}")
    sides = [
        Shown(plan, f"{side}: {call.path}", _known(plan)) for side, plan, call in zip("AB", plans, calls, strict=True)
    ]
    section = Section("compare", "What differs", _differences(*plans))
    return document(sides, f"Two plans: {calls[0].path.name} and {calls[1].path.name}", [section])


def plan_page(
    plan: Plan,
    origin: Origin,
    alternatives: int,
    timelines: Mapping[str, Sequence[ScheduleSpan]],
    loads: Sequence[ExpertLoad],
    title: str,
) -> str:
    """The page of a new plan, for `Plan.save_html`."""
    known = said(plan, origin.alternatives if alternatives else None, alternatives)
    sections = (*timeline_sections({"predicted": origin.schedule}, timelines), *load_sections(loads_of(plan, loads)))
    return document([Shown(plan, known=known, sections=sections)], title or f"Plan on {plan.mesh}")


def page_path(a: Path, b: Path | None) -> Path:
    """The path of the page: beside A, named after it and B."""
    stem = a.stem if a.suffix == ".json" else a.name
    return a.with_name(f"{stem}_and_{b.stem if b.suffix == '.json' else b.name}.html" if b else f"{stem}.html")


def _call(path: Path) -> SavedCall:
    calls = saved_calls(path)
    if len(calls) != 1:
        names = ", ".join(call.path.name for call in calls[:6]) + (" …" if len(calls) > 6 else "")
        raise StrategyError(f"{shown(str(path))} has {len(calls)} calls; give the folder of one of them: {names}")
    return calls[0]


def _known(plan: Plan) -> Said:
    return said(plan, None, 1)


def _differences(a: Plan, b: Plan) -> str:
    texts = text(a), text(b)
    lines = differences(*texts)
    if not lines:
        return "<p>Nothing: the plans are the same.</p>"
    others = ", ".join(map(find, strategies(*texts)))
    more = [f"And {len(lines) - LINES:,} more lines; partway diff has them."] if len(lines) > LINES else []
    return "\n".join(
        [
            f"<p>{verdict(a, b)}</p>",
            *([f"<p>Another strategy: {others}</p>"] if others else []),
            f"<pre>{safe(chr(10).join([*lines[:LINES], *more]))}</pre>",
        ]
    )


def verdict(a: Plan, b: Plan) -> str:
    """Which plan is predicted to be faster, and the cost of that, in a sentence."""
    fewer = b.predicted_time <= a.predicted_time
    better, worse = ("B", "A") if fewer else ("A", "B")
    one, other = (b, a) if fewer else (a, b)
    saved = other.predicted_time - one.predicted_time
    if not saved:
        first = "A and B are predicted to take the same time"
    else:
        share = 100 * saved / other.predicted_time if other.predicted_time else 0.0
        first = f"{better} is predicted to be faster: by {lasting(saved)} a step, {share:.1f} % of what {worse} takes"
    more = []
    changes = {"sends": one.wire_bytes - other.wire_bytes, "holds": one.memory.total - other.memory.total}
    for what, change in changes.items():
        if change:
            more.append(f"{what} {human(abs(change))} {'more' if change > 0 else 'less'}")
    return safe(f"{first}. A rank of {better} {' and '.join(more)}." if more else f"{first}.")
