"""The rank that runs a program, for `pw.axis_index` and the collectives of `partway.ops`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from .basics.blocks import meanwhile, under_way
from .basics.suggest import did_you_mean, there_are
from .errors import StrategyError, shown
from .mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group: TypeAlias = "str | tuple[str, ...] | ProcessGroup | None"
WORLD_GROUPS = ("hccl_world_group", "nccl_world_group", "mccl_world_group")  # MindSpore's names for all ranks


def check_group(group: object) -> tuple[str, ...]:
    """The names in a group. Raises StrategyError if `group` is not one."""
    if group is None:
        return ()
    names = (group,) if isinstance(group, str) else group
    if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) for name in names):
        raise StrategyError(
            "a group is the name of a mesh axis, a tuple of several, or None for all; on processes also the name of a "
            f"group that create_group made, or a ProcessGroup; not {shown(group)}"
        )
    if len(set(names)) < len(names):
        raise StrategyError(f"the group {shown(group)} names an axis twice; name each once")
    return tuple(names)


@dataclass(frozen=True)
class Members:
    """A group of ranks that is not made of mesh axes. `name`: its name in collectives; `ranks`: by position."""

    name: str
    ranks: tuple[int, ...]

    def position(self, rank: int) -> int:
        """The position of `rank`. Raises StrategyError if it is not in the group."""
        if rank not in self.ranks:
            raise StrategyError(
                f"rank {rank} is not in the group {self}; only its own ranks have a place in it, and call its "
                "collectives"
            )
        return self.ranks.index(rank)

    def __str__(self) -> str:
        return f"{self.name!r} (rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))})"


def _only_axes(group: object) -> None:
    """None: the only groups of a manual function are the axes of its mesh."""


@dataclass(frozen=True)
class Place:
    """A rank of a mesh. `asked`: collects the axes along which a program has asked for its position; `groups`: returns
    the group with a name that is not a mesh axis, or None."""

    mesh: Mesh
    rank: int
    asked: set[str] = field(default_factory=set, compare=False)
    groups: Callable[[object], Members | None] = field(default=_only_axes, compare=False)

    def members(self, group: Group) -> Members | None:
        """The group if it is not made of axes, whether or not this rank is in it; else None."""
        return self.groups(group[0] if isinstance(group, tuple | list) and len(group) == 1 else group)

    def axes(self, group: Group) -> tuple[str, ...]:
        """The axes of a group, in the order of the mesh; `group` is the name of one, several names, or None for all.
        For a group that is not made of axes, its name alone.

        Raises StrategyError for any other value, and for a group that this rank is not in.
        """
        if group is None or (isinstance(group, str) and group in WORLD_GROUPS):
            return self.mesh.axes
        if members := self.members(group):
            members.position(self.rank)
            return (members.name,)
        names = check_group(group)
        for name in names:
            if name not in self.mesh.axes:
                fix = did_you_mean(name, self.mesh.axes, there_are("axes of the mesh", self.mesh.axes))
                raise StrategyError(f"the mesh ({self.mesh}) has no axis {name!r}; {fix}")
        return tuple(axis for axis in self.mesh.axes if axis in names)

    def ranks(self, group: Group) -> tuple[int, ...]:
        """The ranks of a group, by position. Raises as `axes` does."""
        axes, members = self.axes(group), self.members(group)
        return members.ranks if members else self.mesh.group(self.rank, *axes)

    def size(self, group: Group) -> int:
        """The number of ranks in a group. Raises as `axes` does."""
        axes, members = self.axes(group), self.members(group)
        return len(members.ranks) if members else self.mesh.size(*axes)

    def index(self, group: Group) -> int:
        """The position of this rank in its group, major to minor in the order of the mesh. Raises as `axes` does."""
        axes, members = self.axes(group), self.members(group)
        if members:
            return members.position(self.rank)
        self.asked.update(axes)
        return self.mesh.position(self.rank, *axes)


def manual_place() -> Place | None:
    """The place of the rank whose manual function is traced right now; None outside of manual functions."""
    return under_way().manual


def placed(place: Place) -> AbstractContextManager[None]:
    """A block in which a manual function is traced for the rank at `place`."""
    return meanwhile(manual=place)


def surrounding_mesh() -> Mesh | None:
    """The mesh of the function that is captured right now; None if it is not known yet."""
    return under_way().mesh


def on_mesh(mesh: Mesh | None) -> AbstractContextManager[None]:
    """A block in which a function to be planned on `mesh` is captured."""
    return meanwhile(mesh=mesh)
