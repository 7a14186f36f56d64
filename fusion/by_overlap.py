"""Group by overlap: the groups that the cost model says hide most.

Two exact searches over boundaries propose groups. Members of a segment that have several keys are a group for each.

    ready    gradients: a group is issued when its last member is ready, and computing does not wait for it
    needed   weights: a group is issued when the group before it is first used, and computing waits for it

Each is exact while nothing else is on the communication lane. What else is there the prediction of the whole schedule
knows: `best` asks it about these proposals, about auto, about sizes in powers of two and about no grouping at all, and
takes what ends first. So this mode never predicts worse than any of those; nor than any index or size as long as no
collective that computing waits for comes between the gradients (two such plans were seen 1 % apart).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from . import by_index, by_size
from .policy import AUTO_MB, MB, Groups, Key, Member

Floats = NDArray[np.float64]
_ROUNDING = 1 + 1e-12  # sums of the same seconds in another order

Costs = Mapping[Key, tuple[float, float]]  # of a key's collectives: the seconds of one, and what each byte adds


def best(proposals: Sequence[Groups], predicted: Callable[[Groups], float]) -> Groups:
    """Of `proposals` the first with the least `predicted` seconds, but for rounding."""
    seconds = {groups: predicted(groups) for groups in proposals}
    least = min(seconds.values()) * _ROUNDING
    return next(groups for groups, found in seconds.items() if found <= least)


def proposals(members: Sequence[Member], found: Sequence[int]) -> Iterator[Groups]:
    """The groups to ask the prediction about: `found`, the counts after which a search ends segments; every size in
    powers of two MB, from each member alone to all in one; auto; and none, which leaves all as they are."""
    yield by_index.group(members, found)
    total = sum(member.bytes for member in members)
    for limit in (0, *(MB << power for power in range(max(total // MB, 1).bit_length() + 1)), AUTO_MB * MB):
        yield by_size.group(members, limit)
    yield ()


def ready(members: Sequence[Member], times: Sequence[float], costs: Costs) -> tuple[int, ...]:
    """The counts after which segments end so that the last collective ends first; `times`: when each member is ready,
    in seconds, ascending.

    With members of one key, `finish(j) = min over i < j of max(finish(i), times[j - 1]) + cost(i..j)`: an earlier end
    of the lane is never worse for what follows. A segment's keys follow one another as their last members come. Of
    equals, segments are long from the end on: what is hidden anyway need not be sent in more messages.
    """
    count, keys = len(members), _columns(members)
    bytes_before, members_before = _sums(members, keys)
    finish = np.zeros(count + 1)
    last: dict[Key, int] = {}  # the latest member of each key so far
    latest: list[dict[Key, int]] = [{}]  # the same for each count of members

    def segments(end: int) -> tuple[Floats, Floats]:
        """Of the segments that end at `end`, by where they begin: when the lane ends, and how long they take."""
        lane, taken = finish[:end].copy(), np.zeros(end)
        for key, position in sorted(latest[end].items(), key=lambda item: item[1]):
            waiting, per_byte = costs[key]
            column = keys[key]
            there = members_before[end, column] > members_before[:end, column]
            seconds = waiting + per_byte * (bytes_before[end, column] - bytes_before[:end, column])
            lane = np.where(there, np.maximum(lane, times[position]) + seconds, lane)
            taken += np.where(there, seconds, 0.0)
        return lane, taken

    for end in range(1, count + 1):
        last[members[end - 1].key] = end - 1
        latest.append(dict(last))
        finish[end] = segments(end)[0].min()
    ends: list[int] = []
    deadline = finish[count]
    while count:
        ends.append(count)
        lane, taken = segments(count)
        count = int((lane <= max(deadline, lane.min()) * _ROUNDING).argmax())  # the longest that is in time
        deadline -= taken[count]
    return tuple(reversed(ends))


def needed(members: Sequence[Member], times: Sequence[float], costs: Costs) -> tuple[int, ...]:
    """The counts after which segments end so that computing ends first; `times`: when each member is first used if
    computing never waits, in seconds, ascending.

    The first group is issued at 0 and each other one when the group before it is first used, so that computing comes
    from one group to the next in `max(time between, cost of the next)`. A state is a segment: what follows depends on
    where it begins and where it ends. (A weight's collective is over when the next is issued, as it is needed then.)
    Of equals, segments are short from the end on: fewer weights are held at once.
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
    before = np.zeros((count + 1, count + 1), dtype=np.int64)  # where the segment before it begins
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
    """By count of members, for each key: the bytes and the number of those before."""
    sizes, counts = np.zeros((len(members) + 1, len(keys))), np.zeros((len(members) + 1, len(keys)))
    for position, member in enumerate(members):
        sizes[position + 1, keys[member.key]] = member.bytes
        counts[position + 1, keys[member.key]] = 1
    return sizes.cumsum(0), counts.cumsum(0)
