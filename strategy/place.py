from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from .mesh import Mesh


@dataclass(frozen=True)
class Place:
    mesh: Mesh
    rank: int
    asked: set[str] = field(default_factory=set)

_place: ContextVar[Place | None] = ContextVar("place", default=None)

def current() -> Place | None:
    return _place.get()

@contextmanager
def placed(place: Place | None) -> Iterator[None]:
    before = _place.get()
    _place.set(place)
    try:
        yield
    finally:
        _place.set(before)


def axis_index(axis):
    p = current()
    p.asked.update({axis} if isinstance(axis, str) else axis)
    return p.mesh.position(p.rank, *((axis,) if isinstance(axis, str) else axis))
