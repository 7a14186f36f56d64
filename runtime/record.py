"""What ran: every collective that an executor performs is told to the recorders that listen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..propagation.cost import wire_bytes
from ..strategy.placement import Kind
from .instructions import Conversion


@dataclass(frozen=True, slots=True)
class Event:
    """One collective that ran. Bytes are those of one rank, as in `propagation.lower.Collective`."""

    kind: Kind
    axes: tuple[str, ...]
    group_size: int
    payload_bytes: int
    phase: str
    tags: tuple[int, ...]

    @property
    def wire_bytes(self) -> float:
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


def note(c: Conversion, parts: Sequence[Tensor]) -> None:
    """Tell the listeners that `c` communicates the local tensors `parts`, all in one collective."""
    if _listeners and c.kind.communicates:
        payload = sum(c.payload(part.numel(), part.element_size()) for part in parts)
        event = Event(c.kind, c.axes, c.size, payload, c.phase, c.tags)
        for events in _listeners:
            events.append(event)
