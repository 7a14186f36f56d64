"""Recorders: executors report every collective to the listeners, and every instruction to timelines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...propagation.cost.cost import wire_bytes
from ...propagation.program.timeline import COMMUNICATION, COMPUTE, Span
from ...strategy.placement import Kind
from .instructions import Code, ConvertLayout, Instruction, Mark, Relayout


@dataclass(frozen=True, slots=True)
class Event:
    """One collective that ran. Bytes are those of one rank, as in `propagation.program.collective.Collective`."""

    kind: Kind
    axes: tuple[str, ...]
    group_size: int
    payload_bytes: int
    phase: str
    tags: tuple[int, ...]

    @property
    def wire_bytes(self) -> float:
        """The bytes that one rank sends."""
        return wire_bytes(self.kind, self.payload_bytes, self.group_size)


_listeners: list[list[Event]] = []


@contextlib.contextmanager
def record_collectives() -> Iterator[list[Event]]:
    """Collect, in order, the collectives that run inside the block (in simulation one event stands for all ranks)."""
    events: list[Event] = []
    _listeners.append(events)
    try:
        yield events
    finally:
        _listeners[:] = [listener for listener in _listeners if listener is not events]


def note(c: Relayout, parts: Sequence[Tensor]) -> None:
    """Report to the listeners that `c` communicates the local tensors `parts`, all in one collective."""
    if (_listeners or _timelines) and c.kind.communicates:
        payload = sum(c.payload(part.shape, part.element_size()) for part in parts)
        event = Event(c.kind, c.axes, c.size, payload, c.phase, c.tags)
        for events in _listeners:
            events.append(event)
        for timeline in _timelines:
            timeline.sent = payload


# -- A timeline ------------------------------------------------------------------------------------------------------

Stamp = Any  # seconds, or a CUDA event that yields them later


class _SpanRecorder:
    """Measures the spans of the steps that run while it listens.

    On the CPU an operator lasts from the end of the previous instruction, and a collective from its issue until the
    backend reports its completion. On a GPU both are read from events of the compute stream, so that a collective lasts
    until that stream has waited for it.
    """

    def __init__(self) -> None:
        self._measured: list[tuple[str, str, str, Stamp, Callable[[], Stamp], dict[str, Any]]] = []
        self._issued: dict[tuple[str, int], tuple[Stamp, list[Stamp], dict[str, Any]]] = {}
        self.sent = 0  # the payload of the last noted collective, which is the one being issued
        self._origin: Stamp = None
        self._last: Stamp = None

    def begin(self, inputs: Sequence[Any]) -> None:
        """Start a run of code."""
        first = inputs[0] if inputs else None
        tensor = first[0] if isinstance(first, list) else first
        self._cuda = isinstance(tensor, Tensor) and tensor.is_cuda
        self.resume()
        self._origin = self._origin or self._last

    def resume(self) -> None:
        """Exclude the time since the last instruction from the next one."""
        self._last = self._now()

    def mark(self, phase: str, step: Instruction, value: Any, awaited: bool) -> None:
        """Record that an instruction has run and returned `value`, or (`awaited`) that it has been waited for."""
        before, self._last = self._last, self._now()
        if not isinstance(step, ConvertLayout) or not step.communicates:
            if not awaited:
                self._add(step, phase, COMPUTE, before, self._last, {})
        elif awaited:
            issued, ended, about = self._issued.pop((phase, step.out))
            end = self._last
            self._measured.append((step.name, phase, COMMUNICATION, issued, lambda: ended[0] if ended else end, about))
        else:
            c = step.relayout
            about = {"kind": str(c.kind), "axes": ",".join(c.axes), "bytes": self.sent}
            if not hasattr(value, "works"):  # the results of simulated ranks, which are complete
                self._add(step, phase, COMMUNICATION, before, self._last, about)
                return
            done: list[Stamp] = []
            self._issued[phase, step.out] = before, done, about
            if not self._cuda:
                with contextlib.suppress(RuntimeError):  # gloo's reduce_scatter has no future: it ends with the wait
                    value.works[-1].get_future().add_done_callback(lambda _: done.append(time.perf_counter()))

    def spans(self) -> list[Span]:
        """The measured spans, relative to the start of the first step."""
        if self._origin is not None and self._cuda:
            torch.cuda.synchronize()
        spans = []
        for name, phase, lane, start, end, args in self._measured:
            begin = _seconds(self._origin, start)
            spans.append(Span(name, phase, lane, begin, max(_seconds(self._origin, end()) - begin, 0.0), args))
        return spans

    def _add(self, step: Instruction, phase: str, lane: str, start: Stamp, end: Stamp, args: dict[str, Any]) -> None:
        self._measured.append((step.name, phase, lane, start, lambda: end, args))

    def _now(self) -> Stamp:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(origin: Stamp, stamp: Stamp) -> float:
    return float(stamp - origin if isinstance(stamp, float) else origin.elapsed_time(stamp) / 1e3)


_timelines: list[_SpanRecorder] = []


@contextlib.contextmanager
def record_timeline() -> Iterator[list[Span]]:
    """Collect the spans of the operators and collectives of the steps inside the block, on this rank, with the names
    that `program.schedule` uses in predictions. The list is filled when the block ends.

    In simulation operators are those of the first rank, with gaps for the time of the others. A collective lasts while
    its results are computed; additions while the ranks run are in no span.

    Timing takes about a microsecond for each operator.
    """
    timeline, spans = _SpanRecorder(), list[Span]()
    _timelines.append(timeline)
    try:
        yield spans
    finally:
        _timelines.remove(timeline)
        spans += timeline.spans()


def timed() -> bool:
    """Whether a timeline listens to instructions."""
    return bool(_timelines)


def begin(inputs: Sequence[Any]) -> None:
    """Report to the timelines that code starts to run with `inputs`."""
    for timeline in _timelines:
        timeline.begin(inputs)


def resume() -> None:
    """Report to the timelines that the next instruction begins now, not at the end of the last one."""
    for timeline in _timelines:
        timeline.resume()


def marking(code: Code) -> Mark:
    """A function that reports the instructions of `code` to the timelines."""

    def mark(step: Instruction, value: Any, awaited: bool) -> None:
        for timeline in _timelines:
            timeline.mark(code.phase, step, value, awaited)

    return mark
