"""Group by index: segments of the sequence of members end after given counts.

    ends (20, 35), 50 members     the first 20, the next 15, the remaining 15

An index counts members of all keys together, so one list describes the whole backward. Members with different keys
cannot be one collective: a segment that holds several keys becomes one group for each.

MindSpore's documentation says the same of [20, 35]; its implementation takes the indices as inclusive positions
from 0, which makes 21, 15 and the rest. Partway does what is documented.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..strategy.errors import ContextError
from .policy import Groups, Key, Member


def group(members: Sequence[Member], ends: Sequence[int]) -> Groups:
    """Groups of positions in `members`, segment by segment and, within one, in the order of their first members.

    `ends` is ascending and positive, as AllReduceFusion checks. Raises ContextError if one is larger than the number
    of members, unless there are none: a program without collectives has nothing to group.
    """
    count = len(members)
    too_large = [end for end in ends if end > count]
    if members and too_large:
        raise ContextError(
            f"AllReduce fusion: mode index {list(ends)} goes beyond the {count} gradient AllReduces of this program; "
            f"leave out {', '.join(map(str, too_large))}: what is left after the last index is one more group"
        )
    groups: list[tuple[int, ...]] = []
    for start, end in pairwise([0, *ends, count]):
        by_key: dict[Key, list[int]] = {}
        for position in range(start, min(end, count)):
            by_key.setdefault(members[position].key, []).append(position)
        groups.extend(map(tuple, by_key.values()))
    return tuple(groups)
