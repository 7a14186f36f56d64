"""The groups of weights with which computation ends first. A group is issued when the group before it is first used.

`needed` is exact while nothing else is on the lane: its result is a proposal, to be compared with others by a
prediction of the whole schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from .events import Costs, Floats
from .members import Key, Member


def needed(members: Sequence[Member], times: Sequence[float], costs: Costs) -> tuple[int, ...]:
    """The counts of members after which segments end so that computation ends first; `times`: when each member is first
    used if computation never waits, in seconds, ascending.

    The first group is issued at 0 and each other one when the group before it is first used, so that computation gets
    from one group to the next in `max(time between, cost of the next)`. A state of the dynamic program is a segment:
    the rest depends only on where it begins and ends. (A weight's collective has ended when the next is issued, since
    the weight is needed then.) Among equals, segments are as short as possible from the end on, to hold fewer weights.
    """
    count, keys = len(members), _columns(members)
    bytes_before, members_before = _sums(members, keys)
    waiting, per_byte = (np.array([costs[key][i] for key in keys]) for i in (0, 1))
    price = np.full((count + 1, count + 1), math.inf)  # of the segment from row to column
    for begin in range(count):
        there = members_before[begin + 1 :] > members_before[begin]
        payload = bytes_before[begin + 1 :] - bytes_before[begin]
        price[begin, begin + 1 :] = (there * waiting + payload * per_byte).sum(1)
    used = np.asarray(times, dtype=np.float64)
    first = np.full((count + 1, count + 1), math.inf)  # when the segment from row to column is first used
    before = np.zeros((count + 1, count + 1), dtype=np.int64)  # where the segment before that one begins
    first[0] = np.maximum(price[0], used[0]) if count else price[0]
    for begin in range(1, count):
        gap = used[begin] - used[:begin]
        came = first[:begin, begin, None] + np.maximum(gap[:, None], price[begin, begin + 1 :])
        before[begin, begin + 1 :] = begin - 1 - came[::-1].argmin(0)
        first[begin, begin + 1 :] = came.min(0)
    ends: list[int] = []
    begin, end = (count - 1 - int((first[:count, count] - used)[::-1].argmin()), count) if count else (0, 0)
    while end:
        ends.append(end)
        begin, end = int(before[begin, end]), begin
    return tuple(reversed(ends))


def _columns(members: Sequence[Member]) -> dict[Key, int]:
    return {key: column for column, key in enumerate(dict.fromkeys(member.key for member in members))}


def _sums(members: Sequence[Member], keys: Mapping[Key, int]) -> tuple[Floats, Floats]:
    """The bytes and the numbers of the first n members; rows are n, columns are keys."""
    sizes, counts = np.zeros((len(members) + 1, len(keys))), np.zeros((len(members) + 1, len(keys)))
    for position, member in enumerate(members):
        sizes[position + 1, keys[member.key]] = member.bytes
        counts[position + 1, keys[member.key]] = 1
    return sizes.cumsum(0), counts.cumsum(0)
