"""Groups of ranks by name, as in MindSpore's `communication`, and the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence

from partway.ops.where import here
from partway.runtime import groups
from partway.runtime.launching import process
from partway.strategy import RuntimeStateError, StrategyError
from partway.strategy.errors import shown
from partway.strategy.place import WORLD_GROUPS, Group, manual_place


class GlobalComm:
    """MindSpore's name of the group of all ranks."""

    WORLD_COMM_GROUP = WORLD_GROUPS[0]


def create_group(group: str, rank_ids: Sequence[int]) -> None:
    """Make a group of ranks with a name for collectives, beside those along the axes of a mesh.

    group       the name; it must not be that of a mesh axis, of another group, or of all ranks
    rank_ids    its ranks, ascending, in the order of their positions in the group; one rank is a group, too

    Every rank of the job calls it, in the same order, whether it is in the group or not. A manual function has no such
    groups. Raises StrategyError for an invalid name or invalid ranks, RuntimeStateError before `init`, if ranks would
    make different groups, and if a rank cannot join.
    """
    _outside_of_manuals("create_group")
    groups.create(group, rank_ids, here("create_group"))


def destroy_group(group: str) -> None:
    """Destroy a group that `create_group` made. Every rank of the job calls it. Raises StrategyError if there is no
    such group, RuntimeStateError as `create_group` does."""
    _outside_of_manuals("destroy_group")
    here("destroy_group")
    groups.destroy(group)


def get_rank(group: Group = None) -> int:
    """The rank of this process, 0 if no launcher started it. With a group, its position there.

    group   as for a collective of `partway.ops`

    Raises RuntimeStateError before `init`, and for a group on virtual devices; StrategyError for an invalid group, and
    for one that this rank is not in.
    """
    return process.get_rank() if _is_world(group) else here("get_rank").index(group)


def get_group_size(group: Group = None) -> int:
    """The number of processes that run the program. With a group, the number of its processes.

    In simulation it is 1, whatever the number of devices: this process simulates all of them, so a data loader that
    reads the share `get_rank()` of `get_group_size()` correctly reads the whole batch. Raises as `get_rank` does, but
    a rank may ask for a group that it is not in.
    """
    return process.get_group_size() if _is_world(group) else len(_ranks("get_group_size", group))


def get_local_rank(group: Group = None) -> int:
    """The position of this process among those of its host, which take a GPU each; 0 if no launcher started it.
    Raises RuntimeStateError before `init`, and if a process group was started by other means and does not tell it;
    StrategyError for any group but that of all ranks."""
    if not _is_world(group):
        raise StrategyError(
            f"get_local_rank is the position among all ranks of a host, and not among those of {shown(group)}; leave "
            "out the group"
        )
    return process.get_local_rank()


def get_world_rank_from_group_rank(group: Group, group_rank_id: int) -> int:
    """The rank at the position `group_rank_id` of a group. Raises as `get_group_size` does, and StrategyError for an
    invalid position."""
    ranks = _ranks("get_world_rank_from_group_rank", group)
    if group_rank_id not in range(len(ranks)):
        raise StrategyError(
            f"the group {shown(group)} has no position {shown(group_rank_id)}; its positions are 0 to {len(ranks) - 1}"
        )
    return ranks[group_rank_id]


def get_group_rank_from_world_rank(world_rank_id: int, group: Group) -> int:
    """The position of the rank `world_rank_id` in a group. Raises as `get_group_size` does, and StrategyError for a
    rank that is not in it."""
    ranks = _ranks("get_group_rank_from_world_rank", group)
    if world_rank_id not in ranks:
        raise StrategyError(
            f"the rank {shown(world_rank_id)} is not in the group {shown(group)}; its ranks are "
            f"{', '.join(map(str, ranks))}"
        )
    return ranks.index(world_rank_id)


def _ranks(call: str, group: Group) -> tuple[int, ...]:
    """The ranks of a group, whether this one is in it or not."""
    place = here(call)
    members = place.members(group)
    return members.ranks if members else place.ranks(group)


def _is_world(group: Group) -> bool:
    return group is None or (isinstance(group, str) and group in WORLD_GROUPS)


def _outside_of_manuals(call: str) -> None:
    if manual_place() is not None:
        raise RuntimeStateError(
            f"{call} is called in a manual function, which has the axes of its mesh and no other groups; call it before"
        )
