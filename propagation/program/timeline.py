"""Timelines of one rank, predicted or measured, and as files for Perfetto.

    save_chrome_trace("step.json", {"predicted": program.schedule.spans})

The file is Chrome's trace format, JSON with one event per span; https://ui.perfetto.dev and chrome://tracing open it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...strategy.basics.files import save
from ...strategy.errors import StrategyError, shown

_WHOSE = {"otherData": {"program": "Partway"}}
COMPUTE, COMMUNICATION = "compute", "communication"


@dataclass(frozen=True, slots=True)
class Span:
    """An operator or collective that takes time on one rank.

    name             the node of the program's graph, by name; equal in a prediction and a measurement
    phase            "forward" or "backward"
    lane             "compute" or "communication"
    start, seconds   seconds since the step began, and the duration
    args             details, such as its kind and its bytes

    Raises StrategyError for another lane, and for seconds below 0.
    """

    name: str
    phase: str
    lane: str
    start: float
    seconds: float
    args: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.lane not in (COMPUTE, COMMUNICATION):
            raise StrategyError(f"span {self.name!r} is on lane {self.lane!r}; write {COMPUTE!r} or {COMMUNICATION!r}")
        if not self.seconds >= 0:
            raise StrategyError(f"span {self.name!r} takes {self.seconds} s; write 0 or more")

    @property
    def end(self) -> float:
        """When it ended, in seconds since the step began."""
        return self.start + self.seconds


def save_chrome_trace(path: str | Path, sources: Mapping[str, Iterable[Span]]) -> None:
    """Write the spans of each source as one process of a Chrome trace, with a row for each of its lanes.

    Raises StrategyError if the file cannot be written, or would replace one that Partway did not write.
    """
    named = _checked(sources)
    events = [event for pid, (name, spans) in enumerate(named.items()) for event in _events(pid, name, spans)]
    save("the timeline", path, json.dumps({**_WHOSE, "traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _checked(sources: Any) -> dict[str, list[Span]]:
    named = dict(sources) if isinstance(sources, Mapping) else {"what is saved": sources}
    for name, spans in named.items():
        named[name] = list(spans) if isinstance(spans, Iterable) and getattr(spans, "ndim", 1) != 0 else [spans]
        if not isinstance(sources, Mapping) or not all(isinstance(span, Span) for span in named[name]):
            raise StrategyError(f"{shown(name)} is {shown(spans)}; write a dict from names to lists of Spans")
    return named


def _events(pid: int, source: str, spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": source}}
    rows = {COMPUTE: 0, COMMUNICATION: 1}
    for lane, tid in rows.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
    for span in spans:
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.phase,
            "pid": pid,
            "tid": rows[span.lane],
            "ts": span.start * 1e6,  # microseconds
            "dur": span.seconds * 1e6,
            "args": {"phase": span.phase, **span.args},
        }
