"""Group by overlap: the groups with which the predicted schedule ends first.

Gradients   `best_groups` plays the schedule with all that may come of it: at each member its group ends, or goes on. A
            state says when computing goes on, when the lane is free, when each collective is over that something still
            reads, and where the open group of each key begins. One that another beats in all of that goes; so does one
            from which, at the least, the schedule takes no less than what is known. What other collectives and
            computing do in between is played too, so that no index and no size is predicted to end earlier.
Weights     `needed` is exact while nothing else is on the lane; what it finds is a proposal among auto and all `sizes`,
            of which the prediction of the whole schedule takes the `best`. (Weights have no mode index.)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..fusion import by_size
from .policy import AUTO_MB, MB, Groups, Key, Member

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_ROUNDING = 1 + 1e-12  # sums of the same seconds in another order
# The searches one after the other, until one proves something: whether the groups of all keys end together, and how
# many states are kept. With several keys there are too many states unless they do; but what is found is better.
_ONE_KEY = (False, 16), (False, 256), (False, 2048)
_SEVERAL_KEYS = (False, 16), (False, 64), (True, 256), (True, 2048)

Costs = Mapping[Key, tuple[float, float]]  # of a key's collectives: the seconds of one, and what each byte adds


def best(proposals: Iterable[Groups], predicted: Callable[[Groups], float]) -> Groups:
    """Of `proposals` the first with the least `predicted` seconds, but for rounding."""
    seconds = {groups: predicted(groups) for groups in proposals}
    least = min(seconds.values()) * _ROUNDING
    return next(groups for groups, found in seconds.items() if found <= least)


# -- Gradients: a group is issued when its last member is ready ------------------------------------------------------


class Compute(NamedTuple):
    """Computing waits for the collectives `others` and for those of `members`, and then takes `seconds`. What reads
    members stands back until their groups have been issued."""

    seconds: float
    others: tuple[int, ...] = ()
    members: tuple[int, ...] = ()


class Send(NamedTuple):
    """Another collective is issued and takes `seconds`; one that reads `members` stands back as computing does."""

    number: int
    seconds: float
    members: tuple[int, ...] = ()


class Offer(NamedTuple):
    """A member is ready. Computing waits for the collectives `others` when its group is issued."""

    member: int
    others: tuple[int, ...] = ()


Event = Compute | Send | Offer


@dataclass(frozen=True)
class Gradients:
    """What is played: the members, what their keys cost, and the events in which each member is offered once, in order.

    Computing, sending and the order of both are the same whatever the groups are, but for what reads a member.
    """

    members: Sequence[Member]
    costs: Costs
    events: Sequence[Event]

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        return tuple(dict.fromkeys(member.key for member in self.members))

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each member the number of its key, and its place among the members of that."""
        count: dict[Key, int] = defaultdict(int)
        found = []
        for member in self.members:
            found.append((self.keys.index(member.key), count[member.key]))
            count[member.key] += 1
        return tuple(found)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of members of each key."""
        return tuple(sum(key == of for of, _ in self.places) for key in range(len(self.keys)))

    @cached_property
    def bytes_before(self) -> tuple[Floats, ...]:
        """Of each key, by count of its members, the bytes of those before."""
        sizes: list[list[int]] = [[0] for _ in self.keys]
        for member, (key, _) in zip(self.members, self.places, strict=True):
            sizes[key].append(member.bytes)
        return tuple(np.cumsum(np.array(each, dtype=np.float64)) for each in sizes)

    @cached_property
    def levels(self) -> tuple[Ints, ...]:
        """Of each key, by count of its members, how many of those before are read."""
        read = {member for event in self.events if not isinstance(event, Offer) for member in event.members}
        found: list[list[int]] = [[0] for _ in self.keys]
        for member, (key, _) in enumerate(self.places):
            found[key].append(found[key][-1] + (member in read))
        return tuple(map(np.array, found))

    @cached_property
    def waits(self) -> dict[int, tuple[int, ...]]:
        """The collectives that members wait for."""
        return {event.member: event.others for event in self.events if isinstance(event, Offer) and event.others}

    @cached_property
    def last_read(self) -> dict[tuple[bool, int], int]:
        """Of each collective (a member's: True) the last event that reads it. (What a member waits for is read when its
        group ends, perhaps at the last member of its key.)"""
        found: dict[tuple[bool, int], int] = {}
        ends: dict[int, int] = {}
        for position, event in enumerate(self.events):
            if isinstance(event, Compute):
                found |= {(False, other): position for other in event.others}
                found |= {(True, member): position for member in event.members}
            elif isinstance(event, Offer):
                ends[self.places[event.member][0]] = position
        for event in self.events:
            if isinstance(event, Send) and event.members and (False, event.number) in found:
                found[False, event.number] = len(self.events)  # its readers may stand back with it
        for member, others in self.waits.items():
            for other in others:
                found[False, other] = max(found.get((False, other), 0), ends[self.places[member][0]])
        return found


def seconds(problem: Gradients, groups: Groups) -> float:
    """How long the schedule with `groups` takes; each member is in one of them."""
    group_of = {member: group for group in groups for member in group}
    clock = lane = 0.0
    others: dict[int, float] = {}
    over: dict[int, float] = {}  # of the members that have been sent
    waits: dict[int, float] = {}  # when all is over that a member waits for
    late: list[Compute | Send] = []
    for event in problem.events:
        now: list[Compute | Send] = []
        if not isinstance(event, Offer):
            (now if all(member in over for member in event.members) else late).append(event)
        else:
            group = group_of[event.member]
            waits[event.member] = max((others[other] for other in event.others), default=0.0)
            if event.member == group[-1]:
                waiting, per_byte = problem.costs[problem.members[event.member].key]
                clock = max(clock, *(waits[member] for member in group))
                lane = max(lane, clock) + waiting + per_byte * sum(problem.members[member].bytes for member in group)
                over.update(dict.fromkeys(group, lane))
                now = [each for each in late if all(member in over for member in each.members)]
                late = [each for each in late if each not in now]
        for each in now:
            if isinstance(each, Send):
                lane = others[each.number] = max(lane, clock) + each.seconds
            else:
                read = [over[member] for member in each.members] + [others[other] for other in each.others]
                clock = max(clock, *read) + each.seconds if read else clock + each.seconds
    return max(clock, lane)


def best_groups(problem: Gradients) -> Groups:
    """The groups with which the schedule ends first; of equals, groups are long from the end on: what is hidden anyway
    need not be sent in more messages.

    No index and no size is predicted to end earlier, unless more than 2048 states were in question at once;
    even then no size is.
    """
    members = problem.members
    if not members:
        return ()

    def predicted(groups: Groups) -> float:
        return seconds(problem, groups)

    found, proved = best(proposals(members), predicted), False
    several = len(problem.keys) > 1
    for tied, width in _SEVERAL_KEYS if several else _ONE_KEY:
        better, proved = search(problem, width, predicted(found), tied=tied)
        found = better or found
        if proved:
            break
    if tied or not proved:
        found = best((found, *sizes(members)), predicted)
    return _joined(problem, found)


def _joined(problem: Gradients, groups: Groups) -> Groups:
    """`groups` with those joined to the group before, from the end on, that do not make the schedule end earlier."""
    deadline = seconds(problem, groups) * _ROUNDING
    kept = set(groups)
    for group in sorted(groups, key=lambda group: group[-1], reverse=True):
        key = problem.members[group[0]].key
        before = max((other for other in kept if other < group and problem.members[other[0]].key == key), default=None)
        if before is not None:
            after = next(other for other in kept if group[-1] in other)
            joined = kept - {before, after} | {before + after}
            kept = joined if seconds(problem, tuple(joined)) <= deadline else kept
    return tuple(sorted(kept))


class _Bound(NamedTuple):
    """How long it takes at least from here to the end: after the clock, after the lane is free, and after each
    collective that is read is over. `work`: of what comes, the seconds on the lane."""

    clock: float
    lane: float
    over: Mapping[int, float]
    work: float


def _bounds(problem: Gradients) -> list[_Bound]:
    """What is left before each event, and after the last. Other collectives wait for each other only; the members take
    the lane for their bytes and, of each key, for one message."""
    bound = _Bound(0.0, 0.0, {}, 0.0)
    found = [bound]
    for event in reversed(problem.events):
        clock, lane, over, work = bound
        match event:
            case Compute(taken, others, ()):
                clock, over = clock + taken, {**over, **{o: max(over.get(o, 0.0), clock + taken) for o in others}}
            case Send(number, taken, members):
                lane, work = max(lane, over.get(number, 0.0)) + taken if not members else lane, work + taken
                over = {other: left for other, left in over.items() if other != number}
            case Offer(member, _):
                key, place = problem.places[member]
                waiting, per_byte = problem.costs[problem.keys[key]]
                work += per_byte * problem.members[member].bytes + waiting * (place + 1 == problem.counts[key])
        lane = max(lane, work)
        bound = _Bound(max(clock, lane), lane, over, work)
        found.append(bound)
    return found[::-1]


@dataclass(frozen=True)
class _States:
    """What may have come, one column for each state.

    times    rows: the clock, when the lane is free, when the collectives in `slots` are over (of a member that has
             not been sent: never)
    begins   one row for each key: where its open group begins
    free     one row for each key: whether it may begin a group
    slots    (whether it is a member, number) of the rows of `times` after the first two
    """

    times: Floats
    begins: Ints
    free: Bools
    slots: tuple[tuple[bool, int], ...]

    def take(self, which: Bools | Ints) -> _States:
        return replace(self, times=self.times[:, which], begins=self.begins[:, which], free=self.free[:, which])

    def beside(self, others: _States) -> _States:
        times, begins = np.hstack([self.times, others.times]), np.hstack([self.begins, others.begins])
        return _States(times, begins, np.hstack([self.free, others.free]), self.slots)

    def over(self, slot: tuple[bool, int]) -> Floats:
        row: Floats = self.times[2 + self.slots.index(slot)]
        return row

    def with_slot(self, slot: tuple[bool, int], over: Floats) -> _States:
        return replace(self, times=np.vstack([self.times, over[None]]), slots=(*self.slots, slot))

    def without_past(self, problem: Gradients, position: int) -> _States:
        """These, without what nothing reads after the event at `position`, or what is over in all of them."""
        over = (self.times[2:] <= self.times[0]).all(1)
        gone = {
            slot for slot, past in zip(self.slots, over, strict=True) if past or problem.last_read[slot] <= position
        }
        if not gone:
            return self
        kept = [0, 1, *(2 + row for row, slot in enumerate(self.slots) if slot not in gone)]
        return replace(self, times=self.times[kept], slots=tuple(slot for slot in self.slots if slot not in gone))


def search(problem: Gradients, width: int, known: float, *, tied: bool) -> tuple[Groups | None, bool]:
    """Groups that take less than `known` seconds, if any are found; and whether it is proved that there are no better
    ones, as no more than `width` states were in question at once.

    The groups of a key are contiguous among its members; those of all keys end together, as an index makes them, if
    they are `tied`: a key whose group has ended begins another one when no group is open.
    """
    bounds = _bounds(problem)
    states = _States(
        np.zeros((2, 1)),
        np.zeros((len(problem.keys), 1), dtype=np.int64),
        np.ones((len(problem.keys), 1), dtype=np.bool_),
        (),
    )
    late: list[Compute | Send] = []
    history: list[tuple[Ints, Bools]] = []  # for each member: the state before, and whether its group ends here
    offered = [0] * len(problem.keys)
    proved, full = True, 8
    for position, event in enumerate(problem.events):
        times = states.times
        match event:
            case Compute(taken, (), ()):
                times[0] += taken
            case Compute() | Send():
                if isinstance(event, Send) and (False, event.number) in problem.last_read:
                    states = states.with_slot((False, event.number), np.full(times.shape[1], math.inf))
                _run(states, event, ~_open(problem, states.begins, event))
                late += [event] if event.members else []
            case Offer():
                key, place = problem.places[event.member]
                offered[key] = place + 1
                if problem.last_read.get((True, event.member), 0) > position:
                    states = states.with_slot((True, event.member), np.full(times.shape[1], math.inf))
                before = np.flatnonzero(states.free[key])
                states = states.take(before)
                np.maximum(states.times, states.times[0], out=states.times)
                ended = _ended(problem, states, event.member, late, offered, tied)
                late = [each for each in late if _open(problem, states.begins, each).any()]
                bound = bounds[position + 1]
                front = np.flatnonzero(_least(problem, ended, bound, offered) * _ROUNDING < known)
                front = front[_front(problem, ended.take(front))]
                left = np.flatnonzero(_least(problem, states, bound, offered) * _ROUNDING < known)
                left = left[~_beats(problem, ended.take(front), states.take(left)).any(0)]
                if place + 1 == problem.counts[key]:  # no member is left that could end the group
                    left = left[:0]
                states = states.take(left).beside(ended.take(front))
                parents, ends = before[np.concatenate([left, front])], np.arange(len(left) + len(front)) >= len(left)
                kept = np.arange(len(parents))
                if len(kept) > 2 * full:
                    kept = kept[_front(problem, states.take(kept))]
                    full = max(len(kept), 8)
                if len(kept) > width:
                    proved = False
                    kept = kept[np.argsort(_least(problem, states.take(kept), bound, offered), kind="stable")[:width]]
                states = states.take(kept).without_past(problem, position)
                history.append((parents[kept], ends[kept]))
                if not len(kept):
                    return None, proved
    end = np.maximum(states.times[0], states.times[1])
    if end.min() * _ROUNDING >= known:
        return None, proved
    return _groups(problem, history, int(end.argmin())), proved


def _groups(problem: Gradients, history: Sequence[tuple[Ints, Bools]], state: int) -> Groups:
    """The groups that have led to `state`."""
    ends = []
    for parents, ended in reversed(history):
        ends.append(bool(ended[state]))
        state = int(parents[state])
    found: list[tuple[int, ...]] = []
    opened: dict[int, tuple[int, ...]] = {}
    for member, ended_here in enumerate(reversed(ends)):
        key = problem.places[member][0]
        group = (*opened.pop(key, ()), member)
        if ended_here:
            found.append(group)
        else:
            opened[key] = group
    return tuple(sorted(found))


def _run(states: _States, event: Compute | Send, where: Bools, least: Floats | float = 0.0) -> None:
    """Let `event` happen in the states of `where`; computing not before `least`."""
    clock, lane = states.times[:2]
    if isinstance(event, Send):
        lane[where] = np.maximum(lane, clock)[where] + event.seconds
        if (False, event.number) in states.slots:
            states.over((False, event.number))[where] = lane[where]
    else:
        read = [(False, other) for other in event.others] + [(True, member) for member in event.members]
        waits = np.max([clock, *(states.over(slot) for slot in read if slot in states.slots)], axis=0)
        clock[where] = np.maximum(waits, least)[where] + event.seconds


def _open(problem: Gradients, begins: Ints, event: Compute | Send) -> Bools:
    """In which states a member that `event` reads has not been sent."""
    found = np.zeros(begins.shape[1], dtype=np.bool_)
    for member in event.members:
        key, place = problem.places[member]
        found |= begins[key] <= place
    return found


def _ended(
    problem: Gradients, states: _States, member: int, late: Sequence[Compute | Send], offered: Sequence[int], tied: bool
) -> _States:
    """`states` after the open groups of `member`'s key have ended with it; what stood back for it then runs."""
    key, place = problem.places[member]
    waiting, per_byte = problem.costs[problem.keys[key]]
    times, begins, free = states.times.copy(), states.begins.copy(), states.free.copy()
    sizes = problem.bytes_before[key]
    for each, others in problem.waits.items():
        if each <= member and problem.places[each][0] == key:
            for slot in {(False, other) for other in others} & set(states.slots):
                waits = begins[key] <= problem.places[each][1]
                times[0] = np.where(waits, np.maximum(times[0], states.over(slot)), times[0])
    over = np.maximum(times[1], times[0]) + waiting + per_byte * (sizes[place + 1] - sizes[begins[key]])
    times[1] = over
    for row, (is_member, number) in enumerate(states.slots, 2):
        if is_member and problem.places[number][0] == key:
            times[row] = np.where(problem.places[number][1] >= begins[key], over, times[row])
    begins[key] = place + 1
    free[key] = not tied
    free |= (begins == np.array(offered)[:, None]).all(0)
    ended = _States(times, begins, free, states.slots)
    for event in late:
        _run(ended, event, _open(problem, states.begins, event) & ~_open(problem, begins, event), over)
    return ended


def _beats(problem: Gradients, these: _States, others: _States) -> Bools:
    """Which of `these` (rows) are no worse in anything than which of `others` (columns).

    Who has sent more has less to send. But what reads a gradient that was sent makes computing wait for it, and what
    reads one that was not stands back: with such readers, states that have not sent the same cannot be compared.
    """
    found = np.ones((these.times.shape[1], others.times.shape[1]), dtype=np.bool_)
    for one, other in zip(these.times, others.times, strict=True):
        found &= one[:, None] <= other
    for one, other in zip((*these.begins, *these.free), (*others.begins, *others.free), strict=True):
        found &= one[:, None] >= other
    for key, level in enumerate(problem.levels):
        if level[-1]:
            found &= level[these.begins[key]][:, None] == level[others.begins[key]]
    return found


def _front(problem: Gradients, states: _States) -> Ints:
    """The states, by number, that no other one beats; of equals the first."""
    beats = _beats(problem, states, states)
    return np.flatnonzero(~(beats & ~(beats.T & np.tri(len(beats), dtype=np.bool_))).any(0))


def _least(problem: Gradients, states: _States, bound: _Bound, offered: Sequence[int]) -> Floats:
    """How long the schedule takes at least, from each of `states` on."""
    opened = np.zeros(states.times.shape[1])
    for key, sizes in enumerate(problem.bytes_before):
        opened += problem.costs[problem.keys[key]][1] * (sizes[offered[key]] - sizes[states.begins[key]])
    clock, lane = states.times[:2]
    over = [states.over((False, o)) + left for o, left in bound.over.items() if (False, o) in states.slots]
    least: Floats = np.max([clock + bound.clock, lane + bound.lane, lane + opened + bound.work, *over], axis=0)
    return least


# -- Weights: a group is issued when the group before it is first used ------------------------------------------------


def proposals(members: Sequence[Member]) -> Iterator[Groups]:
    """Every size in powers of two MB, from each member alone to all in one, and auto."""
    total = sum(member.bytes for member in members)
    for limit in (0, *(MB << power for power in range(max(total // MB, 1).bit_length() + 1)), AUTO_MB * MB):
        yield by_size.group(members, limit)


def sizes(members: Sequence[Member]) -> Iterator[Groups]:
    """What every size in MB makes of `members`, each once."""
    limit = MB
    while limit:
        groups = by_size.group(members, limit)
        yield groups
        last: dict[Key, int] = {}  # the bytes of the group before
        larger = []
        for group in groups:
            key = members[group[0]].key
            larger += [last[key] + members[group[0]].bytes] if key in last else []
            last[key] = sum(members[i].bytes for i in group)
        limit = -(-min(larger, default=0) // MB) * MB  # the least that joins a member to the group before


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
