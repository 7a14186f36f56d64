"""The timeline on the page of a plan: a lane for computation, and one for the collectives of each axis; as predicted
and, if that is given, as measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from partway.propagation.plan import ScheduleSpan
from partway.show.lanes import STYLE, Lane, LaneSpan, lanes_figure
from partway.show.page.document import Section
from partway.strategy import StrategyError, shown
from partway.strategy.basics import human

MOST = 600  # spans of a lane; if there are more, short ones are drawn together with their neighbours


def timeline_sections(*timelines: Mapping[str, Sequence[ScheduleSpan]]) -> Iterator[Section]:
    """The section of the timelines that have a span; empty if none has. Raises StrategyError for an invalid
    timeline."""
    for each in timelines:
        _check(each)
    figures = [
        lanes_figure(f"One step, {name}", list(lanes_of(spans)))
        for each in timelines
        for name, spans in each.items()
        if spans
    ]
    if figures:
        yield Section("timeline", "What runs when", f"<style>{STYLE}</style>" + "\n".join(figures))


def _check(timelines: Any) -> None:
    """Raise StrategyError unless `timelines` is a dict of timelines."""
    of = timelines.items() if isinstance(timelines, Mapping) else [("timelines", timelines)]
    for name, spans in of:
        each = spans if isinstance(spans, Sequence) and not isinstance(spans, str) else [spans]
        if not isinstance(timelines, Mapping) or not all(hasattr(span, "lane") for span in each):
            raise StrategyError(f"{shown(name)} is {shown(spans)}; write a dict from names to lists of Spans")


def lanes_of(spans: Sequence[ScheduleSpan]) -> Iterator[Lane]:
    """A lane for computation, and one for the collectives of each axis, in the order in which they first run."""
    lanes: dict[str, list[LaneSpan]] = {"computing": []}
    for span in sorted(spans, key=lambda span: span.start):
        axes, sent = span.args.get("axes", ""), span.args.get("bytes")
        name = "computing" if span.lane == "compute" else f"collectives over {axes}" if axes else "collectives"
        title = human(sent) if isinstance(sent, int | float) else ""
        kind = span.phase if span.lane == "compute" else str(span.args.get("kind", ""))
        lanes.setdefault(name, []).append(LaneSpan(span.name, span.start, span.seconds, kind, title))
    for name, own in lanes.items():
        yield Lane(name, tuple(_fewer(own)))


def _fewer(spans: Sequence[LaneSpan]) -> Iterator[LaneSpan]:
    """`spans`, at most about MOST of them: those that are too short to see are joined with neighbours of their kind."""
    if len(spans) <= MOST:
        yield from spans
        return
    least = (spans[-1].end_s - spans[0].start_s) / MOST
    joined: list[LaneSpan] = []
    for span in spans:
        first = joined[0] if joined else span
        if joined and (span.kind != first.kind or span.end_s - first.start_s > least):
            yield _together(joined)
            joined = []
        joined.append(span)
    yield _together(joined)


def _together(spans: Sequence[LaneSpan]) -> LaneSpan:
    if len(spans) == 1:
        return spans[0]
    first, last = spans[0], spans[-1]
    seconds = max(span.end_s for span in spans) - first.start_s
    name = f"{first.name} … {last.name}"
    return LaneSpan(name, first.start_s, seconds, first.kind, f"{len(spans)} one after another")
