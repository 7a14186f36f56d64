"""A backward as events, and its duration for given groups of its gradients.

Groups do not change the computation, the other collectives or the order of both, except for nodes that read a gradient.
So the events are read off the graph once (`events_of`), and any number of groupings is simulated on them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import fx

from ..propagation.program.schedule import Unit, Work
from ..propagation.program.timeline import COMMUNICATION, COMPUTE
from .members import Groups, Key, Member

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
ROUNDING = 1 + 1e-12  # tolerance: the same seconds summed in another order

Costs = Mapping[Key, tuple[float, float]]  # by key: the seconds of an empty message, and of each byte


class Compute(NamedTuple):
    """Computation that waits for the collectives `others` and for those of `members`, and then takes `seconds`. It is
    deferred until the groups of `members` have been issued."""

    seconds: float
    others: tuple[int, ...] = ()
    members: tuple[int, ...] = ()


class Send(NamedTuple):
    """Another collective, which takes `seconds`. If it reads `members`, it is deferred as Compute is."""

    number: int
    seconds: float
    members: tuple[int, ...] = ()


class Offer(NamedTuple):
    """A member is ready. When its group is issued, the compute lane waits for the collectives `others`."""

    member: int
    others: tuple[int, ...] = ()


Event = Compute | Send | Offer


@dataclass(frozen=True)
class GradientEvents:
    """The input of a simulation: members, the costs of their keys, and events, which offer each member once, in order.

    Groups do not change the computation, the other collectives or the order of both, except for events that read a
    member.
    """

    members: Sequence[Member]
    costs: Costs
    events: Sequence[Event]

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """The keys of all members, in the order of their first members."""
        return tuple(dict.fromkeys(member.key for member in self.members))

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each member, the number of its key and its place among the members of that key."""
        count: dict[Key, int] = defaultdict(int)
        places = []
        for member in self.members:
            places.append((self.keys.index(member.key), count[member.key]))
            count[member.key] += 1
        return tuple(places)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of members of each key."""
        return tuple(sum(key == of for of, _ in self.places) for key in range(len(self.keys)))

    @cached_property
    def bytes_before(self) -> tuple[Floats, ...]:
        """For each key, the bytes of its first n members, by n."""
        sizes: list[list[int]] = [[0] for _ in self.keys]
        for member, (key, _) in zip(self.members, self.places, strict=True):
            sizes[key].append(member.bytes)
        return tuple(np.cumsum(np.array(each, dtype=np.float64)) for each in sizes)

    @cached_property
    def levels(self) -> tuple[Ints, ...]:
        """For each key, how many of its first n members are read by an event, by n."""
        read = {member for event in self.events if not isinstance(event, Offer) for member in event.members}
        counts: list[list[int]] = [[0] for _ in self.keys]
        for member, (key, _) in enumerate(self.places):
            counts[key].append(counts[key][-1] + (member in read))
        return tuple(map(np.array, counts))

    @cached_property
    def waits(self) -> dict[int, tuple[int, ...]]:
        """The collectives that members wait for."""
        return {event.member: event.others for event in self.events if isinstance(event, Offer) and event.others}

    @cached_property
    def last_read(self) -> dict[tuple[bool, int], int]:
        """The last event that reads each collective; keys are (whether it is a member's, number). (A collective that a
        member waits for is read when the member's group ends, at the latest at the last member of its key.)"""
        last: dict[tuple[bool, int], int] = {}
        ends: dict[int, int] = {}
        for position, event in enumerate(self.events):
            if isinstance(event, Compute):
                last |= {(False, other): position for other in event.others}
                last |= {(True, member): position for member in event.members}
            elif isinstance(event, Offer):
                ends[self.places[event.member][0]] = position
        for event in self.events:
            if isinstance(event, Send) and event.members and (False, event.number) in last:
                last[False, event.number] = len(self.events)  # its readers may stand back with it
        for member, others in self.waits.items():
            for other in others:
                last[False, other] = max(last.get((False, other), 0), ends[self.places[member][0]])
        return last


def events_of(
    order: Iterable[Unit], work: Mapping[fx.Node, Work], members: Sequence[fx.Node]
) -> tuple[tuple[Event, ...], bool]:
    """The events of `order`, in which each of `members` stands where it is ready, and whether a member reads another
    one, which events do not represent.
    """
    position = {node: index for index, node in enumerate(members)}
    events: list[Event] = []
    reads: dict[fx.Node, frozenset[int]] = {}  # the members on which a node's value depends
    over: dict[fx.Node, frozenset[int]] = {}  # the other collectives that a reader of the node has to wait for
    waited: set[int] = set()
    chained, count = False, 0
    for unit in order:
        item = work[unit[0]]
        operands = [operand for node in unit for operand in node.all_input_nodes]
        read = frozenset[int]().union(*(reads[operand] for operand in operands))
        others = frozenset[int]().union(*(over[operand] for operand in operands)) - waited
        if unit[0].op == "output":
            continue
        if unit[0] in position:
            chained |= bool(read)
            events.append(Offer(position[unit[0]], tuple(sorted(others))))
            read, others = frozenset({position[unit[0]]}), frozenset()
        elif not item.late:
            seconds = item.seconds if item.lane == COMPUTE else 0.0
            last = events[-1] if events else None
            if not (read or others) and type(last) is Compute and not (last.others or last.members):
                events[-1] = Compute(last.seconds + seconds)
            elif read or others or seconds:
                events.append(Compute(seconds, tuple(sorted(others)), tuple(sorted(read))))
            if not read:
                waited |= others
                others = frozenset()
            if item.lane == COMMUNICATION:
                payload = sum(work[node].payload for node in unit)
                waiting, per_byte = item.rates(payload)
                events.append(Send(count, waiting + per_byte * payload, tuple(sorted(read))))
                others, count = frozenset({count}), count + 1
        for node in unit:
            reads[node], over[node] = read, others
    return tuple(events), chained


def seconds(problem: GradientEvents, groups: Groups) -> float:
    """The duration of the schedule with `groups`, in seconds; each member is in one of them."""
    group_of = {member: group for group in groups for member in group}
    clock = lane = 0.0
    others: dict[int, float] = {}
    over: dict[int, float] = {}  # when the collective of each sent member ends
    waits: dict[int, float] = {}  # when all collectives that a member waits for have ended
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


def best(proposals: Iterable[Groups], predicted: Callable[[Groups], float]) -> Groups:
    """The first of `proposals` with the least `predicted` seconds, up to rounding."""
    seconds = {groups: predicted(groups) for groups in proposals}
    least = min(seconds.values()) * ROUNDING
    return next(groups for groups, taken in seconds.items() if taken <= least)
