"""Group by size: a group is filled, in order, until the next member would take it over a limit.

With a limit of 64, members of 40, 30, 20, 90 and 10 bytes make the groups (40), (30 20), (90) and (10).
"""

from __future__ import annotations

from collections.abc import Sequence

from .policy import Groups, Key, Member


def group(members: Sequence[Member], limit: int) -> Groups:
    """Groups of positions in `members`, each of at most `limit` bytes unless it has one member only.

    Each key has its own open group, so members with other keys between two members do not part them. Groups come
    in the order of their first members.
    """
    groups: list[list[int]] = []
    open_group: dict[Key, tuple[list[int], int]] = {}
    for position, member in enumerate(members):
        found, filled = open_group.get(member.key, ([], 0))
        if not found or filled + member.bytes > limit:
            found, filled = [], 0
            groups.append(found)
        found.append(position)
        open_group[member.key] = found, filled + member.bytes
    return tuple(map(tuple, groups))
