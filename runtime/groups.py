"""The groups of ranks that call a collective together: along axes of a mesh, created by name, or a ProcessGroup of
PyTorch.

Creating a group is a collective of all ranks. They first agree on the group (`agreement.py`), so that ranks that would
create different groups, or in another order, get an error instead of waiting for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from ..strategy.basics.suggest import there_are
from ..strategy.errors import RuntimeStateError, StrategyError, shown
from ..strategy.mesh import Mesh
from ..strategy.place import WORLD_GROUPS, Members, Place
from ..strategy.torch_mesh import check_ranks, new_group, own_group
from .launching.process import launched
from .ranks.agreement import Fact, agreement
from .ranks.watch import failed_in, watch
from .ranks.world import of_world
from .torch_internals import process_group_named, timeout_of

WORLD = "world"  # the axis of all ranks if no mesh is set
_OF_TORCH = "ProcessGroup "  # the prefix of the names of PyTorch's groups
_EVERY_RANK = "let every rank create the same groups in one order, also those that it is not in"
_SAME_MESH = "call set_mesh with one mesh on every rank"
T = TypeVar("T")


@dataclass(frozen=True)
class _Made:
    """A group created by name: its process group if this rank is in it with others, and its number in order of
    creation."""

    members: Members
    group: Any
    number: int


class _Groups:
    """The groups of one job. `of` has the process groups of `mesh`: not those of programs, where the call of one rank
    alone would be matched with a collective of the program."""

    def __init__(self) -> None:
        self.world: Any = _world()
        self.mesh = Mesh({WORLD: dist.get_world_size() if self.world else 1})
        self.of: dict[tuple[str, ...], Any] = {}
        self.named: dict[str, _Made] = {}
        self.made = 0  # by name, so far


def _world() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def _groups() -> _Groups:
    return of_world(_Groups)


def set_mesh(mesh: Mesh | None) -> None:
    """Let collectives of this process name the axes of `mesh`; None: no axes. Every rank calls it.

    Makes a process group for each axis and each set of axes, so that ranks can then call collectives group by group.
    Raises RuntimeStateError for a mesh whose number of devices is not the number of processes, and if ranks pass
    different meshes; StrategyError for an axis with the name of a group.
    """
    here = _groups()
    about = "make the groups of a mesh"
    with agreement(about) as facts:
        mesh = mesh or Mesh({WORLD: dist.get_world_size()})
        check_ranks(mesh, dist.get_world_size())
        if mesh.is_part:
            raise StrategyError(
                f"set_mesh takes a mesh of all ranks of the job, not one of some ({mesh}); leave out ranks"
            )
        for axis in mesh.axes:
            if axis in here.named:
                raise StrategyError(
                    f"the mesh ({mesh}) has an axis {axis!r}, and a group is called so; destroy_group({axis!r}), or "
                    "rename the axis"
                )
        facts.append(Fact("the mesh", str(mesh), fix=_SAME_MESH))
    several = [axes for n in range(1, len(mesh.axes) + 1) for axes in itertools.combinations(mesh.axes, n)]
    timeout = timeout_of(here.world)

    def made() -> dict[tuple[str, ...], Any]:
        return {axes: own_group(mesh, axes, timeout, f"by hand {','.join(axes)}") for axes in several}

    here.of = _together(about, made)
    here.mesh = mesh


def place() -> Place:
    """The place of this process on the mesh that was set, or else on one axis of all ranks."""
    return Place(_groups().mesh, dist.get_rank(), groups=members_of)


def process_group(axes: tuple[str, ...]) -> Any:
    """The process group of this rank along `axes` of the mesh, or the group named there. That of all ranks is created
    at its first use, by all of them."""
    here = _groups()
    if axes[0] in here.named:
        return here.named[axes[0]].group
    if axes[0].startswith(_OF_TORCH):
        return _of_torch(axes[0])
    if not here.of:
        set_mesh(None)
    return here.of[axes]


def ledger_name(axes: tuple[str, ...], ranks: Sequence[int]) -> str:
    """The name of the ledger that these ranks alone share."""
    here = _groups()
    if axes[0] in here.named:
        return f"calls/{here.named[axes[0]].number}/{axes[0]}"
    mesh = "" if axes[0].startswith(_OF_TORCH) else here.mesh
    return f"calls/{mesh}/{','.join(axes)}/{ranks[0]}"


def members_of(group: object) -> Members | None:
    """Return the group that `group` denotes if it is the name of a created group or a ProcessGroup; else None. Raises
    StrategyError for a ProcessGroup without this rank."""
    if isinstance(group, str):
        if made := _groups().named.get(group):
            return made.members
        return _members(_of_torch(group)) if group.startswith(_OF_TORCH) else None
    found = process_group_of(group)
    return None if found is None else _members(found)


def process_group_of(group: object) -> Any:
    """Return `group` if it is a ProcessGroup, else None. Raises StrategyError for the value that new_group returns on
    ranks outside the group."""
    if isinstance(group, dist.ProcessGroup):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER and isinstance(group, int):
        raise StrategyError(
            "this rank is not in the group: new_group gives NON_GROUP_MEMBER to ranks that are outside of it; call its "
            "collectives on its own ranks alone"
        )
    return None


def _members(group: dist.ProcessGroup) -> Members:
    return Members(f"{_OF_TORCH}{group.group_name}", tuple(dist.get_process_group_ranks(group)))


def _of_torch(name: str) -> Any:
    """The ProcessGroup with this name as a group."""
    try:
        return process_group_named(name.removeprefix(_OF_TORCH))
    except RuntimeError as error:
        raise StrategyError(f"there is no {name}; it has been destroyed") from error


# -- Groups by name


def create(name: str, ranks: Sequence[int], place: Place) -> None:
    """Create the group `name` of `ranks`. Every rank of the job calls it, at `place`, whether it is in the group or
    not.

    Raises StrategyError for an invalid name or invalid ranks, and RuntimeStateError, on every rank, if ranks differ.
    """
    here = _groups()
    if not launched():
        here.named[name] = _Made(_checked(name, ranks, place), None, 0)
        return
    with agreement("create a group") as facts:
        members = _checked(name, ranks, place)
        facts.append(Fact("the group", str(members), fix=_EVERY_RANK))
    group = None
    if len(members.ranks) > 1:
        timeout = timeout_of(here.world)
        made = _together(f"create the group {members}", lambda: new_group(members.ranks, timeout, f"group {name}"))
        group = made if place.rank in members.ranks else None
    here.named[name] = _Made(members, group, here.made)
    here.made += 1


def destroy(name: str) -> None:
    """End the group `name`. Every rank calls it. Raises StrategyError if there is none, and RuntimeStateError, on every
    rank, if ranks differ."""
    here = _groups()
    if not launched():
        del here.named[_made_name(name)]
        return
    with agreement("destroy a group") as facts:
        facts.append(Fact("the group", str(here.named[_made_name(name)].members), fix=_EVERY_RANK))
    watch().forget(ledger_name((name,), ()))
    made = here.named.pop(name)
    if made.group is not None:
        dist.destroy_process_group(made.group)


def _checked(name: object, ranks: object, place: Place) -> Members:
    """The group with this name and these ranks. Raises StrategyError if they are invalid."""
    call, mesh = "create_group", place.mesh
    if not isinstance(name, str) or not name:
        raise StrategyError(f"{call}: the name of a group is {shown(name)}; write some text")
    taken = (
        "stands for all ranks"
        if name in WORLD_GROUPS
        else f"is an axis of the mesh ({mesh})"
        if name in mesh.axes
        else "is a group already"
        if name in _groups().named
        else "is as PyTorch's groups are called"
        if name.startswith(_OF_TORCH)
        else ""
    )
    if taken:
        raise StrategyError(f"{call}: {name!r} {taken}; give the group another name")
    given = list(ranks) if isinstance(ranks, Sequence) and not isinstance(ranks, str) else []
    if not given or not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in given):
        raise StrategyError(f"{call}: the ranks of {name!r} are {shown(ranks)}; write a list of ranks, such as [0, 2]")
    if given != sorted(set(given)):
        raise StrategyError(
            f"{call}: the ranks of {name!r} are {given}; write each once, in ascending order, which is that of their "
            f"positions in the group: {sorted(set(given))}"
        )
    if outside := [rank for rank in given if not 0 <= rank < mesh.device_num]:
        there = f"the ranks are 0 to {mesh.device_num - 1}" if mesh.device_num > 1 else "the one rank is 0"
        raise StrategyError(f"{call}: the group {name!r} has the rank {outside[0]}, and {there}")
    return Members(name, tuple(given))


def _made_name(name: object) -> str:
    """Return `name` if a group was created with it. Raises StrategyError otherwise."""
    named = _groups().named
    if isinstance(name, str) and name in named:
        return name
    why = "is of all ranks, which shutdown() ends" if name in WORLD_GROUPS else "is no group that create_group made"
    raise StrategyError(f"destroy_group: {shown(name)} {why}; {there_are('groups', named)}")


def _together(purpose: str, make: Callable[[], T]) -> T:
    """Return the result of `make`, which all ranks call together."""
    try:
        return watch().together(purpose, make)
    except RuntimeStateError:
        raise
    except RuntimeError as error:
        raise failed_in(purpose, error) from error
