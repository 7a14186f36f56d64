"""Group by size: a group is filled, in order, until the next member would take it over a limit.

With a limit of 64, members of 40, 30, 20, 90 and 10 bytes make the groups (40), (30 20), (90) and (10).
In mode size the user sets the limit, in MB; in mode auto it is fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .members import MB, Groups, Key, Member
from .policy import COLLECTIVES, Policy, is_count, takes_none

AUTO_MB = 64


def group(members: Sequence[Member], limit: int) -> Groups:
    """Groups of positions in `members`, each of at most `limit` bytes unless it has only one member.

    Each key has its own open group, so members of other keys between two members do not separate them. Groups are in
    the order of their first members.
    """
    groups: list[list[int]] = []
    open_groups: dict[Key, tuple[list[int], int]] = {}
    for position, member in enumerate(members):
        positions, filled = open_groups.get(member.key, ([], 0))
        if not positions or filled + member.bytes > limit:
            positions, filled = [], 0
            groups.append(positions)
        positions.append(position)
        open_groups[member.key] = positions, filled + member.bytes
    return tuple(map(tuple, groups))


def powers(members: Sequence[Member]) -> Iterator[Groups]:
    """The groups by each power of two MB, from single members to one group of all, and by the limit of mode auto."""
    total = sum(member.bytes for member in members)
    for limit in (0, *(MB << power for power in range(max(total // MB, 1).bit_length() + 1)), AUTO_MB * MB):
        yield group(members, limit)


def every(members: Sequence[Member]) -> Iterator[Groups]:
    """The different groups by whole numbers of MB, each once."""
    limit = MB
    while limit:
        groups = group(members, limit)
        yield groups
        filled: dict[Key, int] = {}  # the bytes of the group before
        larger = []
        for positions in groups:
            first = members[positions[0]]
            larger += [filled[first.key] + first.bytes] if first.key in filled else []
            filled[first.key] = sum(members[i].bytes for i in positions)
        limit = -(-min(larger, default=0) // MB) * MB  # the smallest limit that adds a member to the group before


def auto(members: Sequence[Member], config: None = None) -> Groups:
    """The groups of at most `AUTO_MB`."""
    return group(members, AUTO_MB * MB)


def _of_config(members: Sequence[Member], config: int) -> Groups:
    return group(members, config * MB)


def _problems(config: Any) -> list[str]:
    return [] if is_count(config) else [f"takes a whole number of MB, 1 or more, not {config!r}"]


AUTO = Policy(
    collectives=COLLECTIVES, problems=takes_none(f"a group is at most {AUTO_MB} MB"), group=auto, updates=auto
)
SIZE = Policy(collectives=COLLECTIVES, problems=_problems, group=_of_config, updates=_of_config)
