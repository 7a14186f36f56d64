"""The groups of gradients with the shortest predicted backward.

A group is issued when its last member is ready.

`best_groups` is a branch and bound over the simulated schedule: at each member its group ends or continues. A state has
the times at which the compute lane goes on, at which the communication lane is free and at which each collective ends
that an event still reads, and where the open group of each key begins. A state is dropped if another one is no worse in
all of these, or if its lower bound is not below the best known time. Computation and other collectives in between are
simulated too, so that no index and no size is predicted to end earlier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..fusion import by_size
from .events import ROUNDING, Compute, Floats, GradientEvents, Ints, Offer, Send, best, seconds
from .members import Groups

Bools = NDArray[np.bool_]
# The searches in order, until one is a proof: (whether the groups of all keys end together, how many states are kept).
# With several keys there are too many states unless groups end together, but groups that end separately are better.
_ONE_KEY = (False, 16), (False, 256), (False, 2048)
_SEVERAL_KEYS = (False, 16), (False, 64), (True, 256), (True, 2048)


def best_groups(problem: GradientEvents) -> Groups:
    """The groups with the shortest schedule. Among equals, groups are as long as possible from the end on: a collective
    that is hidden anyway needs no message of its own.

    No index and no size is predicted to end earlier, unless more than 2048 states were open at once;
    even then no size is.
    """
    members = problem.members
    if not members:
        return ()

    def predicted(groups: Groups) -> float:
        return seconds(problem, groups)

    groups, proved = best(by_size.powers(members), predicted), False
    for tied, width in _SEVERAL_KEYS if len(problem.keys) > 1 else _ONE_KEY:
        better, proved = search(problem, width, predicted(groups), tied=tied)
        groups = better or groups
        if proved:
            break
    if tied or not proved:
        groups = best((groups, *by_size.every(members)), predicted)
    return _joined(problem, groups)


def _joined(problem: GradientEvents, groups: Groups) -> Groups:
    """`groups`, each joined to the group before it, from the end on, where that does not delay the schedule."""
    deadline = seconds(problem, groups) * ROUNDING
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
    """Lower bounds of the seconds from an event to the end: after the clock, after the lane is free, and after the end
    of each collective that is read. `work`: the seconds that later events take on the lane."""

    clock: float
    lane: float
    over: Mapping[int, float]
    work: float


def _bounds(problem: GradientEvents) -> list[_Bound]:
    """The lower bounds before each event, and after the last. They assume that other collectives wait only for each
    other, and that the members of each key take the lane for their bytes and one message."""
    bound = _Bound(0.0, 0.0, {}, 0.0)
    bounds = [bound]
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
        bounds.append(bound)
    return bounds[::-1]


@dataclass(frozen=True)
class _States:
    """The open states of a search, one column each.

    times    rows: the clock, when the lane is free, when each collective in `slots` ends (infinite for a member that
             has not been sent)
    begins   one row for each key: where its open group begins
    free     one row for each key: whether it may begin a group
    slots    (whether it is a member, number) of the rows of `times` after the first two
    """

    times: Floats
    begins: Ints
    free: Bools
    slots: tuple[tuple[bool, int], ...]

    def __len__(self) -> int:
        return int(self.times.shape[1])

    def take(self, which: Ints) -> _States:
        """The states with the numbers `which`."""
        return replace(self, times=self.times[:, which], begins=self.begins[:, which], free=self.free[:, which])

    def beside(self, others: _States) -> _States:
        """These, followed by `others`, which have the same slots."""
        times, begins = np.hstack([self.times, others.times]), np.hstack([self.begins, others.begins])
        return _States(times, begins, np.hstack([self.free, others.free]), self.slots)

    def over(self, slot: tuple[bool, int]) -> Floats:
        """When a collective ends, in each state."""
        row: Floats = self.times[2 + self.slots.index(slot)]
        return row

    def with_slot(self, slot: tuple[bool, int]) -> _States:
        """These, with the row of a collective that has not been sent in any of them."""
        never = np.full((1, len(self)), math.inf)
        return replace(self, times=np.vstack([self.times, never]), slots=(*self.slots, slot))

    def without_past(self, problem: GradientEvents, position: int) -> _States:
        """These, without collectives that no event after `position` reads, or that have ended in all of them."""
        over = (self.times[2:] <= self.times[0]).all(1)
        gone = {
            slot for slot, past in zip(self.slots, over, strict=True) if past or problem.last_read[slot] <= position
        }
        if not gone:
            return self
        kept = [0, 1, *(2 + row for row, slot in enumerate(self.slots) if slot not in gone)]
        return replace(self, times=self.times[kept], slots=tuple(slot for slot in self.slots if slot not in gone))


def search(problem: GradientEvents, width: int, known: float, *, tied: bool) -> tuple[Groups | None, bool]:
    """Groups that take less than `known` seconds, if any are found, and whether there are provably no better ones,
    because no more than `width` states were open at once.

    The groups of a key are contiguous among its members. If they are `tied`, the groups of all keys end together, as
    with an index: a key whose group has ended begins another one when no group is open.
    """
    return _OverlapSearch(problem, width, known, tied).run()


class _OverlapSearch:
    """One search: the open states after the events so far.

    late       events that are deferred in some state, because they read a member that has not been sent there
    history    for each member: the state before, and whether its group ends here
    offered    for each key, how many of its members are ready
    full       more than twice as many states are compared with each other, to drop dominated ones
    """

    def __init__(self, problem: GradientEvents, width: int, known: float, tied: bool) -> None:
        self.problem, self.width, self.known, self.tied = problem, width, known, tied
        self.bounds = _bounds(problem)
        keys = len(problem.keys)
        self.states = _States(
            np.zeros((2, 1)), np.zeros((keys, 1), dtype=np.int64), np.ones((keys, 1), dtype=np.bool_), ()
        )
        self.late: list[Compute | Send] = []
        self.history: list[tuple[Ints, Bools]] = []
        self.offered = [0] * keys
        self.proved, self.full = True, 8

    def run(self) -> tuple[Groups | None, bool]:
        """See `search`."""
        for position, event in enumerate(self.problem.events):
            match event:
                case Compute(taken, (), ()):
                    self.states.times[0] += taken
                case Compute() | Send():
                    self._happens(event)
                case Offer():
                    self._branch(position, event)
                    if not len(self.states):
                        return None, self.proved
        end = np.maximum(self.states.times[0], self.states.times[1])
        if end.min() * ROUNDING >= self.known:
            return None, self.proved
        return _groups(self.problem, self.history, int(end.argmin())), self.proved

    def _happens(self, event: Compute | Send) -> None:
        """Run `event` in the states that have sent every member it reads, and defer it in the others."""
        if isinstance(event, Send) and (False, event.number) in self.problem.last_read:
            self.states = self.states.with_slot((False, event.number))
        _run(self.states, event, ~_open(self.problem, self.states.begins, event))
        self.late += [event] if event.members else []

    def _branch(self, position: int, event: Offer) -> None:
        """A member is ready: branch into states in which its group continues and states in which it ends, and keep
        those that may still win."""
        problem = self.problem
        key, place = problem.places[event.member]
        self.offered[key] = place + 1
        states = self.states
        if problem.last_read.get((True, event.member), 0) > position:
            states = states.with_slot((True, event.member))
        before = np.flatnonzero(states.free[key])
        states = states.take(before)
        np.maximum(states.times, states.times[0], out=states.times)
        ended = _ended(problem, states, event.member, self.late, self.offered, self.tied)
        self.late = [each for each in self.late if _open(problem, states.begins, each).any()]
        bound = self.bounds[position + 1]
        front = self._promising(ended, bound)
        front = front[_front(problem, ended.take(front))]
        left = self._promising(states, bound)
        left = left[~_beats(problem, ended.take(front), states.take(left)).any(0)]
        if place + 1 == problem.counts[key]:  # no member is left that could end the group
            left = left[:0]
        states = states.take(left).beside(ended.take(front))
        parents, ends = before[np.concatenate([left, front])], np.arange(len(left) + len(front)) >= len(left)
        kept = self._kept(states, bound)
        self.states = states.take(kept).without_past(problem, position)
        self.history.append((parents[kept], ends[kept]))

    def _promising(self, states: _States, bound: _Bound) -> Ints:
        """The states, by number, whose lower bound is below the best known time."""
        return np.flatnonzero(_least(self.problem, states, bound, self.offered) * ROUNDING < self.known)

    def _kept(self, states: _States, bound: _Bound) -> Ints:
        """The states to keep, by number: the `width` with the least bounds."""
        kept = np.arange(len(states))
        if len(kept) > 2 * self.full:
            kept = kept[_front(self.problem, states.take(kept))]
            self.full = max(len(kept), 8)
        if len(kept) > self.width:
            self.proved = False
            least = _least(self.problem, states.take(kept), bound, self.offered)
            kept = kept[np.argsort(least, kind="stable")[: self.width]]
        return kept


def _groups(problem: GradientEvents, history: Sequence[tuple[Ints, Bools]], state: int) -> Groups:
    """The groups that have led to `state`."""
    ends = []
    for parents, ended in reversed(history):
        ends.append(bool(ended[state]))
        state = int(parents[state])
    groups: list[tuple[int, ...]] = []
    opened: dict[int, tuple[int, ...]] = {}
    for member, ended_here in enumerate(reversed(ends)):
        key = problem.places[member][0]
        group = (*opened.pop(key, ()), member)
        if ended_here:
            groups.append(group)
        else:
            opened[key] = group
    return tuple(sorted(groups))


def _run(states: _States, event: Compute | Send, where: Bools, least: Floats | float = 0.0) -> None:
    """Run `event` in the states of `where`; computation starts at `least` at the earliest."""
    clock, lane = states.times[:2]
    if isinstance(event, Send):
        lane[where] = np.maximum(lane, clock)[where] + event.seconds
        if (False, event.number) in states.slots:
            states.over((False, event.number))[where] = lane[where]
    else:
        read = [(False, other) for other in event.others] + [(True, member) for member in event.members]
        waits = np.max([clock, *(states.over(slot) for slot in read if slot in states.slots)], axis=0)
        clock[where] = np.maximum(waits, least)[where] + event.seconds


def _open(problem: GradientEvents, begins: Ints, event: Compute | Send) -> Bools:
    """For each state, whether it has not sent a member that `event` reads."""
    unsent = np.zeros(begins.shape[1], dtype=np.bool_)
    for member in event.members:
        key, place = problem.places[member]
        unsent |= begins[key] <= place
    return unsent


def _ended(
    problem: GradientEvents,
    states: _States,
    member: int,
    late: Sequence[Compute | Send],
    offered: Sequence[int],
    tied: bool,
) -> _States:
    """`states` after the open groups of `member`'s key have ended with it and the events deferred for it have run."""
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


def _beats(problem: GradientEvents, these: _States, others: _States) -> Bools:
    """A matrix: whether each of `these` (rows) is no worse in anything than each of `others` (columns).

    A state that has sent more has less left to send. But an event that reads a gradient makes the compute lane wait if
    the gradient was sent, and is deferred if not: with such readers, states that have sent different members cannot be
    compared.
    """
    beats = np.ones((these.times.shape[1], others.times.shape[1]), dtype=np.bool_)
    for one, other in zip(these.times, others.times, strict=True):
        beats &= one[:, None] <= other
    for one, other in zip((*these.begins, *these.free), (*others.begins, *others.free), strict=True):
        beats &= one[:, None] >= other
    for key, level in enumerate(problem.levels):
        if level[-1]:
            beats &= level[these.begins[key]][:, None] == level[others.begins[key]]
    return beats


def _front(problem: GradientEvents, states: _States) -> Ints:
    """The states, by number, that no other one dominates; of equals the first."""
    beats = _beats(problem, states, states)
    return np.flatnonzero(~(beats & ~(beats.T & np.tri(len(beats), dtype=np.bool_))).any(0))


def _least(problem: GradientEvents, states: _States, bound: _Bound, offered: Sequence[int]) -> Floats:
    """A lower bound of the duration of the whole schedule, for each of `states`."""
    opened = np.zeros(states.times.shape[1])
    for key, sizes in enumerate(problem.bytes_before):
        opened += problem.costs[problem.keys[key]][1] * (sizes[offered[key]] - sizes[states.begins[key]])
    clock, lane = states.times[:2]
    over = [states.over((False, o)) + left for o, left in bound.over.items() if (False, o) in states.slots]
    least: Floats = np.max([clock + bound.clock, lane + bound.lane, lane + opened + bound.work, *over], axis=0)
    return least
