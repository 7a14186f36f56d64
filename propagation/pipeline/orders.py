"""The schedules of a pipeline: GPipe, 1F1B, interleaved 1F1B, and those without bubbles.

Bubbles of p devices with m microbatches, where F, I and W take a second each for all stages of a device, and the most
microbatches in flight (v: chunks):

    schedule             bubble        in flight
    GPipe                3 (p-1)       m
    1F1B                 3 (p-1)       p
    interleaved 1F1B     3 (p-1) / v   p + (p-1) / v
    zero bubble          p-1           p
    the same, v chunks   (p-1) / v     p
    the same, as a V     (p-1) / 2     p

The first three are fixed orders: GPipe (Huang et al., 2019), 1F1B (Narayanan et al., PipeDream, 2021) and the
interleaved one of Megatron-LM (Narayanan et al., 2021). The others split B into I and W, and run W where a device would
wait (Qi et al., "Zero bubble pipeline parallelism", 2023, and "Pipeline parallelism with controllable memory", 2024).
They are found by list scheduling with the seconds of the real stages: whatever can start first runs next, unless a
device holds as many microbatches as it may.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable

from .actions import ActionKind, PipelineSchedule, StageAction, Stages
from .play import Clock, Played, Times

_Rank = Callable[[StageAction, str], tuple[float, ...]]


def gpipe(placed: Stages, microbatches: int) -> PipelineSchedule:
    """All forwards, and then all backwards."""
    return _in_order(placed, microbatches, lambda device: placed.chunks * microbatches)


def one_forward_one_backward(placed: Stages, microbatches: int) -> PipelineSchedule:
    """1F1B; with several chunks the interleaved one, in which p microbatches go through a chunk, then through the next.
    The stages are placed in a loop. If the microbatches are no multiple of p, there is no such order with several
    chunks, and the fastest found for equal stages takes its place."""
    p, v = placed.devices, placed.chunks
    if v > 1 and microbatches % p:
        return listed(placed, microbatches, Times.equal(placed.stages), p + math.ceil((p - 1) / v), apart=False)
    return _in_order(placed, microbatches, lambda device: (p - 1 - device) * min(v, 2) + (v - 1) * p)


def _in_order(placed: Stages, microbatches: int, first: Callable[[int], int]) -> PipelineSchedule:
    """Each device runs its `first` forwards, then a forward and a backward in turns, then the other backwards."""
    orders = []
    for device in range(placed.devices):
        stages = placed.of(device)
        forwards, backwards = (
            [
                StageAction(kind, stage, microbatch)
                for group in range(0, microbatches, placed.devices)
                for stage in along
                for microbatch in range(group, min(group + placed.devices, microbatches))
            ]
            for kind, along in ((ActionKind.FORWARD, stages), (ActionKind.BACKWARD, stages[::-1]))
        )
        ahead = min(first(device), len(forwards))
        turns = zip(forwards[ahead:], backwards, strict=False)
        rest = backwards[len(forwards) - ahead :]
        orders.append((*forwards[:ahead], *itertools.chain.from_iterable(turns), *rest))
    return PipelineSchedule(placed, microbatches, tuple(orders))


def listed(placed: Stages, microbatches: int, times: Times, most: int, *, apart: bool = True) -> PipelineSchedule:
    """The fastest of some orders for stages with these `times`, in which no device holds more than `most` microbatches,
    one or more. `apart`: I and W are, so that no device waits (zero bubble)."""
    ranks = _ranks(placed.devices)
    found = [_List(placed, microbatches, times, most, apart).by(rank, False) for rank in ranks]
    if not any(found):  # forwards of early chunks took all the room that later ones wait for
        found = [_List(placed, microbatches, times, most, apart).by(rank, True) for rank in ranks]
    best = min((each for each in found if each is not None), key=lambda each: each.seconds)
    return PipelineSchedule(placed, microbatches, tuple(tuple(run.action for run in runs) for runs in best.runs))


def _ranks(devices: int) -> list[_Rank]:
    """Which of two actions that may start at the same time is first: what the last one was not, a forward or a backward
    (or always one of them); of forwards the one of the latest stage, or of a group of as many microbatches as there are
    devices that of the earliest; of backwards that of the earliest stage."""

    def by(kinds: Callable[[ActionKind, str], bool], grouped: bool) -> _Rank:
        def rank(action: StageAction, last: str) -> tuple[float, ...]:
            kind, stage, microbatch = action
            if kind is ActionKind.WEIGHTS:
                return (2,)
            if kind is not ActionKind.FORWARD:
                return kinds(kind, last), stage, microbatch
            return kinds(kind, last), microbatch // devices if grouped else 0, stage if grouped else -stage

        return rank

    turns = (
        lambda kind, last: kind == last,
        lambda kind, last: kind is ActionKind.FORWARD,
        lambda kind, last: kind is not ActionKind.FORWARD,
    )
    return [by(kinds, grouped) for kinds in turns for grouped in (False, True)]


class _List:
    """List scheduling: of all actions the one that can start first runs next."""

    def __init__(self, placed: Stages, microbatches: int, times: Times, most: int, apart: bool) -> None:
        self.placed, self.microbatches, self.most = placed, microbatches, most
        self.clock, self.back = Clock(placed, times), ActionKind.INPUTS if apart else ActionKind.BACKWARD
        self.ahead = {kind: [0] * placed.stages for kind in (ActionKind.FORWARD, self.back)}  # of each stage the next
        self.over = [0] * placed.stages  # of each stage the microbatches of which it holds nothing any more
        self.waiting: list[deque[StageAction]] = [deque() for _ in range(placed.devices)]  # the W of each device
        self.last = [""] * placed.devices
        self.stages = [placed.of(device) for device in range(placed.devices)]

    def by(self, rank: _Rank, reserved: bool) -> Played | None:
        """All actions, by `rank` where several can start; None if devices wait for each other. They do not if the room
        of a microbatch is `reserved` for all chunks when it comes to a device."""
        best = [self._next(device, rank, reserved) for device in range(self.placed.devices)]
        for _ in range((3 if self.back is ActionKind.INPUTS else 2) * self.placed.stages * self.microbatches):
            able = [(found[0], device, found[2]) for device, found in enumerate(best) if found is not None]
            if not able:
                return None
            start, device, action = min(able)
            self._run(action, device, start)
            for other in {device, *map(self.placed.device, action.readers(self.placed.stages))}:
                best[other] = self._next(other, rank, reserved)
        return self.clock.played

    def _next(self, device: int, rank: _Rank, reserved: bool) -> tuple[float, tuple[float, ...], StageAction] | None:
        """What the device does next: when it starts, and its rank."""
        actions = [
            StageAction(kind, stage, place[stage])
            for kind, place in self.ahead.items()
            for stage in self.stages[device]
            if place[stage] < self.microbatches and (kind is self.back or self._has_room(device, stage, reserved))
        ]
        actions += itertools.islice(self.waiting[device], 1)
        starts = ((self.clock.start(action), action) for action in actions)
        able = [(start, rank(action, self.last[device]), action) for start, action in starts if start is not None]
        return min(able, default=None)

    def _has_room(self, device: int, stage: int, reserved: bool) -> bool:
        if not reserved:
            return self.clock.held[device] < self.most * self.placed.chunks
        first = self.stages[device][0]
        gone = min(self.over[each] for each in self.stages[device])
        return stage != first or self.ahead[ActionKind.FORWARD][first] - gone < self.most

    def _run(self, action: StageAction, device: int, start: float) -> None:
        self.clock.run(action, start)
        if action.kind is ActionKind.WEIGHTS:
            self.waiting[device].popleft()
        else:
            self.ahead[action.kind][action.stage] += 1
            self.last[device] = action.kind
        if action.kind is ActionKind.INPUTS:
            self.waiting[device].append(action._replace(kind=ActionKind.WEIGHTS))
        self.over[action.stage] += action.kind in (ActionKind.WEIGHTS, ActionKind.BACKWARD)
