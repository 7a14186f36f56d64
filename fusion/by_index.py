"""Group by index: segments of the sequence of members end after given counts.

    ends (20, 35), 50 members     the first 20, the next 15, the remaining 15

An index counts members of all keys together, so one list describes the whole backward. Members with different keys
cannot be one collective: a segment that holds several keys becomes one group for each. Indices count gradients, in the
order in which the backward produces them, so only AllReduce has this mode.

MindSpore's documentation says the same of [20, 35]; its implementation takes the indices as inclusive positions
from 0, which makes 21, 15 and the rest. Partway follows the documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..strategy.errors import ContextError
from .by_size import auto
from .members import Groups, Key, Member
from .policy import Policy, is_count


def group(members: Sequence[Member], ends: Sequence[int]) -> Groups:
    """Groups of positions in `members`, segment by segment and, within one, in the order of their first members.

    `ends` is ascending and positive, as `problems` checks. Raises ContextError if one is larger than the number
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


def problems(config: Any) -> list[str]:
    """The problems of a list of indices, as text that follows the name of the mode."""
    if not isinstance(config, list | tuple):
        return [f"takes a list of indices such as [20, 35], not {config!r}"]
    if not config:
        return ["takes at least one index, such as [20, 35], not an empty list"]
    bad = [index for index in config if not is_count(index)]
    if bad:
        return [f"takes whole numbers, 1 or more; {list(config)} has {', '.join(map(repr, bad))}"]
    repeated = sorted({index for index in config if config.count(index) > 1})
    texts = [f"takes each index once; {list(config)} repeats {', '.join(map(str, repeated))}"] if repeated else []
    if list(config) != sorted(config):
        texts.append(f"takes ascending indices; write {sorted(set(config))} for {list(config)}")
    return texts


INDEX = Policy(collectives=("allreduce",), problems=problems, group=group, updates=auto, shorthand="a list of indices")
