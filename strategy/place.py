"""Where a program of one rank runs: what `pw.axis_index` and the collectives of `partway.ops` ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from .errors import StrategyError, shown
from .mesh import Mesh
from .suggest import did_you_mean, there_are

Group = str | tuple[str, ...] | None


def check_group(group: object) -> tuple[str, ...]:
    """The names in a group. Raises StrategyError for what is none."""
    if group is None:
        return ()
    names = (group,) if isinstance(group, str) else group
    if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) for name in names):
        raise StrategyError(
            f"a group is the name of a mesh axis, a tuple of several, or None for all, not {shown(group)}"
        )
    if len(set(names)) < len(names):
        raise StrategyError(f"the group {shown(group)} names an axis twice; name each once")
    return tuple(names)


@dataclass(frozen=True)
class Place:
    """A rank of a mesh. `asked`: the axes along which a program has asked for its position, which it notes here."""

    mesh: Mesh
    rank: int
    asked: set[str] = field(default_factory=set, compare=False)

    def axes(self, group: Group) -> tuple[str, ...]:
        """The axes of a group, in the order of the mesh: one by name, several, or None for all.

        Raises StrategyError for others.
        """
        if group is None:
            return self.mesh.axes
        names = check_group(group)
        for name in names:
            if name not in self.mesh.axes:
                fix = did_you_mean(name, self.mesh.axes, there_are("axes of the mesh", self.mesh.axes))
                raise StrategyError(f"the mesh ({self.mesh}) has no axis {name!r}; {fix}")
        return tuple(axis for axis in self.mesh.axes if axis in names)

    def size(self, group: Group) -> int:
        """How many ranks a group has. Raises as `axes` does."""
        return self.mesh.size(*self.axes(group))

    def index(self, group: Group) -> int:
        """The position of this rank in its group, major to minor in the order of the mesh. Raises as `axes` does."""
        axes = self.axes(group)
        self.asked.update(axes)
        return self.mesh.position(self.rank, *axes)


_island: ContextVar[Place | None] = ContextVar("island", default=None)


def island_place() -> Place | None:
    """The place of the rank whose island is traced right now; None outside of islands."""
    return _island.get()


@contextmanager
def placed(place: Place) -> Iterator[None]:
    """A block in which an island is traced for the rank at `place`."""
    token = _island.set(place)
    try:
        yield
    finally:
        _island.reset(token)


_mesh: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


def surrounding_mesh() -> Mesh | None:
    """The mesh of the function that is captured right now, where it is known by then."""
    return _mesh.get()


@contextmanager
def on_mesh(mesh: Mesh | None) -> Iterator[None]:
    """A block in which a function is captured that is planned on `mesh`."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)
